"""Ratio against accuracy: every compressor on real data, equal steps and learning rates, several seeds.

    python benchmarks/accuracy.py                         # the whole grid on real ranks: about 2 hours on 2 idle cores
    python benchmarks/accuracy.py --virtual               # a third of that; all but the 1-bit optimizers; then without, for those
    python benchmarks/accuracy.py --sets core --seeds 1   # 10 minutes
    python benchmarks/accuracy.py --quick --out FILE      # does it run? (seconds)
    python benchmarks/accuracy.py --report                # all tables, and the picture, from the rows that there are

Tasks: a byte-level transformer (0.28 M parameters) on the Python standard library's source, loss in nats per byte; a
convolutional network (0.21 M) on Fashion-MNIST, test accuracy (Debian's package dataset-fashion-mnist; without it
scikit-learn's digits). SGD with momentum 0.9, AdamW, and the 1-bit optimizers. Rows are appended to --out as they finish, and
what is there already is left out: a run can be stopped and started again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import accuracy_virtual
import schema
from accuracy_cases import Case, grid, quick
from accuracy_train import work

from gradcomp.demo import data
from gradcomp.demo.launch import run_ranks
from gradcomp.errors import GradcompError

SETS = ("core", "heads", "variants", "ranks", "long", "more", "rates", "all")
_CASES_PER_LAUNCH = 50


@cache
def _source(task: str) -> str:
    return data.describe(task)


def config_of(case: Case) -> dict[str, Any]:
    """What a row says of a run, besides the seed."""
    return {**case.config, "peak_lr": case.peak, "data": _source(case.task)}


def key(config: Mapping[str, Any], seed: int) -> str:
    """What makes a run: equal keys are the same run."""
    return json.dumps([dict(config), seed], sort_keys=True)


def run(cases: list[Case], out: Path, *, full: bool = True, virtual: bool = False) -> None:
    """Run what ``out`` does not hold yet, with one line of progress per run.

    ``full``: evaluate on all held-out data. ``virtual``: the ranks are virtual ones in this process; the 1-bit optimizers,
    which need real ones, are left out.

    Raises:
        GradcompError: a task's data is not there, or a rank failed.
    """
    rows = schema.read(out) if out.exists() else []
    done = {key({k: v for k, v in row.config.items() if k != "virtual"}, row.seed) for row in rows}
    said = {"virtual": True} if virtual else {}
    if virtual:
        cases = [c for c in cases if c.optimizer in ("sgd", "adamw")]
    cases = list(dict.fromkeys(c for c in cases if key(config_of(c), c.seed) not in done))
    total, finished, begun = len(cases), 0, time.monotonic()

    def on_message(kind: str, content: tuple[Case, dict[str, Any]]) -> None:
        nonlocal finished
        case, measured = content
        schema.append(
            out, [schema.Row.make("accuracy", config=config_of(case) | said, seed=case.seed, measured=measured)]
        )
        finished += 1
        left = (time.monotonic() - begun) / finished * (total - finished)
        loss = "not finite" if measured["loss"] is None else f"{measured['loss']:.4f}"
        print(
            f"[{finished}/{total}, {left / 60:.0f} min left] {case.task} {case.optimizer} {case.ranks} ranks "
            f"rate x{case.lr_factor:g} seed {case.seed} {case.spec} warm-up {case.warmup:g}: loss {loss}, "
            f"accuracy {100 * measured['accuracy']:.2f} %, {measured['ratio']:.1f}x fewer bytes, {measured['run_s']:.1f} s",
            flush=True,
        )

    print(f"{total} {'run' if total == 1 else 'runs'} to do; {out} holds {len(done)}", flush=True)
    if virtual:
        for found in accuracy_virtual.work(cases, full):
            on_message("row", found)
        return
    while cases:
        chunk = [c for c in cases[:_CASES_PER_LAUNCH] if c.ranks == cases[0].ranks]
        run_ranks(work, cases[0].ranks, (chunk, full), on_message)
        cases = [c for c in cases if c not in set(chunk)]


def report(out: Path, plot: Path, planner: Path | None) -> None:
    """Print every table, and write the picture and, if asked for, the planner's summary."""
    import accuracy_plot
    import accuracy_report

    results = accuracy_report.Results(schema.read(out))
    for name, table in accuracy_report.TABLES.items():
        print(f"\n## {name}\n\n{table(results)}")
    accuracy_plot.save(plot, results)
    if planner is not None:
        accuracy_report.write_planner_summary(results, planner)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", default=["all"], choices=SETS, help="parts of the grid, in this order")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="instead of the tasks' own")
    parser.add_argument("--tasks", nargs="+", default=["text", "images"], choices=("text", "images"))
    parser.add_argument("--virtual", action="store_true", help="virtual ranks in one process: a third of the time")
    parser.add_argument("--quick", action="store_true", help="6 runs of 6 steps: does it work?")
    parser.add_argument("--out", type=Path, default=schema.RESULTS / "accuracy.jsonl", help="rows are appended here")
    parser.add_argument("--report", action="store_true", help="no runs: tables of --out, and its picture beside it")
    parser.add_argument("--planner", type=Path, help="with --report: write the planner's summary to this file")
    arguments = parser.parse_args()
    if arguments.report:
        report(arguments.out, arguments.out.with_suffix(".png"), arguments.planner)
        return
    cases = [c for name in arguments.sets for c in grid(name, arguments.seeds) if c.task in arguments.tasks]
    if arguments.quick:
        cases = quick()
    elif arguments.steps:
        cases = [replace(c, steps=arguments.steps) for c in cases]
    try:
        run(cases, arguments.out, full=not arguments.quick, virtual=arguments.virtual)
    except GradcompError as error:
        sys.exit(f"accuracy: {error}")


if __name__ == "__main__":
    main()
