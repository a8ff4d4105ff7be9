"""Step times on real, slow links: no hook, torch's hooks and every compressor, side by side in one run.

    sudo python benchmarks/network.py                                  # 12 minutes; needs root
    sudo python benchmarks/network.py --gigabits 1 --ranks 2           # one link, 1 minute
    sudo python benchmarks/network.py --quick                          # does it run? 20 seconds, two exchanges
    sudo python benchmarks/network.py --out benchmarks/results/network.jsonl

Every rank has a network namespace of its own, joined to the others by a link of the given speed (links.py). Per link and
number of ranks, one start; all exchanges take turns in it, a few steps each, so that what else the machine does meets all.

``step``      forward, backward with exchange, optimizer; the slowest rank's time
``exposed``   what the exchange adds: step - (the same step without communication)
``ideal``     bytes that a rank sends / speed of the link: no exchange of so many bytes can be faster, unless backward hides it
``x ideal``   exposed / ideal
``link MB``   what the network interface counted, with headers, in MB per step and rank
``codec``     host time for encoding and decoding, part of it while the link is busy
``cpu``       processor time of a rank's process, all threads, without the kernel's work on packets in interrupts
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import links
import schema
import steps
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import gradcomp

UNSHAPED = 0.0
"""As ``gigabits``: the link is not limited, so the exchange's own cost shows."""


@dataclass(frozen=True)
class Setting:
    """One link speed and number of ranks."""

    gigabits: float
    ranks: int
    latency_ms: float
    plan: steps.Plan

    def __str__(self) -> str:
        speed = f"{self.gigabits:g} Gb/s" if self.gigabits else "no limit"
        plan = self.plan
        return f"{speed}, {self.ranks} ranks, {plan.trainer}, {plan.model}, batch {plan.batch}"


def measure(setting: Setting, note: Any) -> tuple[dict[str, dict[str, Any]], str | None]:
    """What each exchange of the plan gave, and why some gave nothing."""
    found: dict[str, dict[str, Any]] = {}

    def hear(line: str) -> None:
        message = json.loads(line) if line.startswith("{") else {}
        if "exchange" in message:
            found[message["exchange"]] = message
        elif message:
            note(f"round {message['round']}" if "round" in message else message["ready"])

    try:
        with links.star(setting.ranks, setting.gigabits, setting.latency_ms) as star:
            star.launch([sys.executable, steps.__file__, setting.plan.dump()], hear, {"DS_ACCELERATOR": "cpu"})
    except links.LinksError as error:
        return found, str(error)
    return found, None


def rows(setting: Setting, found: dict[str, dict[str, Any]], error: str | None) -> list[schema.Row]:
    """One row for each exchange of the plan, those that failed included."""
    plan, made = setting.plan, []
    silent = found.get(steps.NO_COMMUNICATION)
    without = schema.quantiles(silent["step_ms"]).p50 if silent else None
    for name in plan.exchanges:
        config: dict[str, Any] = {
            "exchange": name, "gigabits": setting.gigabits or None, "ranks": setting.ranks, "model": plan.model,
            "batch": plan.batch, "bucket_mb": plan.bucket_mb, "latency_ms": setting.latency_ms,
            "trainer": plan.trainer, "cpu_limited": not 0 < setting.gigabits < links.CPU_LIMITED,
        }  # fmt: skip
        one = found.get(name)
        if one is None:
            why = error or "rank 0 reported nothing"
            made.append(schema.Row.make("network", config=config, seed=plan.seed, measured={}, error=why[-500:]))
            continue
        measured: dict[str, Any] = {
            **{key: schema.quantiles(one[key]) for key in ("step_ms", "cpu_ms", "codec_ms")},
            "payload_bytes": round(one["payload_bytes"]), "link_bytes": one["link_bytes"],
        }  # fmt: skip
        if without is not None and name != steps.NO_COMMUNICATION:
            measured["without_ms"] = without
            measured["exposed_ms"] = round(measured["step_ms"].p50 - without, 2)
            if setting.gigabits:
                measured["ideal_ms"] = float(f"{one['payload_bytes'] * 8e-6 / setting.gigabits:.4g}")
        made.append(schema.Row.make("network", config=config, seed=plan.seed, measured=measured))
    return made


def show(console: Console, setting: Setting, made: Sequence[schema.Row]) -> None:
    title = f"{setting}, times in ms" + (" (limited by the CPU, not the link)" if made[0].config["cpu_limited"] else "")
    table = Table("exchange", title=title)
    for name in (
        "step p20/p50/p80",
        "exposed",
        "ideal",
        "x ideal",
        "codec",
        "cpu",
        "MB",
        "link MB",
        "vs no hook",
        "vs torch fp16",
    ):
        table.add_column(name, justify="right")
    medians = {row.config["exchange"]: row.number("step_ms") for row in made if row.error is None}
    for row in made:
        name, values = str(row.config["exchange"]), row.measured
        if row.error is not None:
            table.add_row(name, f"failed: {row.error.splitlines()[-1][:60]}")
            continue
        step = values["step_ms"]
        assert isinstance(step, schema.Quantiles)
        exposed, ideal = values.get("exposed_ms"), values.get("ideal_ms")
        table.add_row(
            name,
            f"{step.p20:.1f}/{step.p50:.1f}/{step.p80:.1f}",
            "" if exposed is None else f"{exposed:.1f}",
            "" if not ideal else f"{ideal:.1f}",
            "" if not ideal or exposed is None else f"{exposed / ideal:.1f}",
            f"{row.number('codec_ms'):.1f}",
            f"{row.number('cpu_ms'):.0f}",
            f"{row.number('payload_bytes') / 1e6:.2f}",
            f"{row.number('link_bytes') / 1e6:.2f}",
            *(
                f"{medians[base] / step.p50:.1f}x" if base in medians else ""
                for base in (steps.NO_HOOK, steps.TORCH_FP16)
            ),
        )
    console.print(table)


def settings(arguments: argparse.Namespace) -> list[Setting]:
    """What to measure, in order."""
    if arguments.quick:
        plan = steps.Plan([steps.NO_COMMUNICATION, "onebit"], rounds=1, seconds=0.1, most_steps=2)
        return [Setting(1.0, 2, 0.0, plan)]
    exchanges = arguments.exchanges or [*steps.BASELINES, *gradcomp.compressor_names()]
    plan = steps.Plan(exchanges, model=arguments.model, seconds=arguments.seconds, seed=arguments.seed)
    made = []
    if UNSHAPED in arguments.gigabits:  # what the library costs by itself shows best in many small buckets
        costs = [name for name in exchanges if name in (steps.NO_COMMUNICATION, steps.NO_HOOK, "none")]
        small = replace(plan, exchanges=costs, bucket_mb=1.0, rounds=8, most_steps=160, seconds=4 * arguments.seconds)
        for model, batch in (("mlp", 8), ("transformer", 4)):
            made.append(Setting(UNSHAPED, 2, 0.0, replace(small, model=model, batch=batch)))
    for ranks in arguments.ranks:
        for gigabits in arguments.gigabits:
            if gigabits == UNSHAPED:
                continue
            for batch in arguments.batch[:1] if ranks > 2 or gigabits < 1 else arguments.batch:
                made.append(Setting(gigabits, ranks, arguments.latency_ms, replace(plan, batch=batch)))
    if arguments.deepspeed:
        pairs = [
            (stage, spec) for stage in range(4) for spec in (None, "int8", "onebit") if stage < 2 or spec != "onebit"
        ]
        names = [steps.deepspeed_name(stage, spec) for stage, spec in pairs]
        engines = replace(plan, exchanges=names, trainer="deepspeed", batch=arguments.batch[0])
        made.append(Setting(1.0, 2, arguments.latency_ms, engines))
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabits", type=float, nargs="+", default=[UNSHAPED, 0.1, 1.0, 10.0],
                        help="of the links; 0: unlimited, 2 ranks, buckets of 1 MB, only none against no hook")  # fmt: skip
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument(
        "--latency-ms", type=float, default=0.0, help="from rank to rank, one way; needs the kernel's netem"
    )
    parser.add_argument("--model", choices=sorted(steps.MODELS), default="mlp")
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 256],
                        help="samples or sequences per rank; all but the first with 2 ranks at 1 Gb/s and more only")  # fmt: skip
    parser.add_argument("--deepspeed", action="store_true", help="DeepSpeed's ZeRO stages as well, at 1 Gb/s, 2 ranks")
    parser.add_argument(
        "--exchanges", nargs="+", help=f"any of {', '.join(steps.BASELINES)}, and gradcomp specs (default: all)"
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="budget of timed steps per exchange")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="one link, two exchanges, two steps")
    parser.add_argument("--out", type=Path, help="append the rows to this file, as JSON lines")
    arguments = parser.parse_args()
    try:
        links.isolate(latency=arguments.latency_ms > 0)
    except links.LinksError as error:
        print(f"network.py: {error}", file=sys.stderr)
        return 2
    console, failed = Console(width=None if sys.stdout.isatty() else 150), False
    todo = settings(arguments)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[at]}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        for setting in todo:
            total = len(setting.plan.exchanges) + setting.plan.rounds
            task = progress.add_task(str(setting), total=total, at="starting")
            found, error = measure(setting, lambda at, task=task: progress.update(task, advance=1, at=at))
            progress.remove_task(task)
            made = rows(setting, found, error)
            failed = failed or any(row.error for row in made)
            show(console, setting, made)
            if arguments.out:
                schema.append(arguments.out, made)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
