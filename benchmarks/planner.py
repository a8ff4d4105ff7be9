"""Is the planner right? Predicted against measured step times on shaped links, and its advice against all alternatives.

    sudo python benchmarks/planner.py                                  # 10 minutes; needs root
    sudo python benchmarks/planner.py --gigabits 1 --ranks 2           # one link
    sudo python benchmarks/planner.py --quick                          # does it run?
    sudo python benchmarks/planner.py --out benchmarks/results/planner.jsonl --plot benchmarks/results/planner.png
    python benchmarks/planner.py --read benchmarks/results/planner.jsonl --plot benchmarks/results/planner.png

Ranks live in network namespaces (links.py). On each link they first probe: collectives, codecs, and each model's own step, all
ranks at once. From that, and nothing else, `gradcomp.planner` predicts the step of every model and compressor; then the steps
are run. ``advice``: what the planner would choose of these, and how much longer it takes than the fastest measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import links
import planner_steps
import schema
from rich.console import Console
from rich.table import Table

from gradcomp.planner import Job, Model, Profile, predict
from gradcomp.planner.decide import choose

SPECS = ["none", "fp16", "int8", "onebit", "topk", "powersgd"]
SETTINGS: dict[tuple[float, int], list[tuple[str, int]]] = {
    (0.1, 2): [("mlp", 8), ("transformer", 4)],
    (0.1, 4): [("mlp", 8)],
    (1.0, 2): [("mlp", 8), ("transformer", 4), ("small", 512)],
    (1.0, 4): [("mlp", 8), ("transformer", 4), ("small", 512)],
    (10.0, 2): [("mlp", 8), ("small", 512), ("small", 2048)],
}
"""(Gb/s, ranks): models with their batch. The last ones compute so long that nothing is gained by compression."""
LARGEST = {0.1: 5e6, 1.0: 20e6, 10.0: 70e6}
"""Bytes of the largest message that is probed."""
NEAR = 0.10
"""Advice is good if what it advises takes at most so much longer than the fastest."""


def run(gigabits: float, ranks: int, plan: planner_steps.Plan, console: Console) -> list[schema.Row]:
    """Rows of one link: measured and predicted."""
    profile: Profile | None = None
    compute: dict[tuple[str, int], dict[str, float]] = {}
    steps: list[dict[str, Any]] = []

    def hear(line: str) -> None:
        nonlocal profile
        message = json.loads(line) if line.startswith("{") else {}
        if "profile" in message:
            with TemporaryDirectory() as folder:
                path = Path(folder, "profile.json")
                path.write_text(json.dumps(message["profile"]))
                profile = Profile.load(path)
        elif "compute" in message:
            compute[tuple(message["scenario"])] = message["compute"]  # type: ignore[index]
        elif "step_ms" in message:
            steps.append(message)
        elif "note" in message:
            console.print(f"  {message['note']}", highlight=False, markup=False)

    with links.star(ranks, gigabits) as star:
        star.launch([sys.executable, planner_steps.__file__, plan.dump()], hear)
    assert profile is not None
    made = []
    for name, size in plan.scenarios:
        job = make_job(name, ranks, replace(profile, compute=compute[name, size]))
        mine = [step for step in steps if step["scenario"] == [name, size]]
        predicted = {step["spec"]: predict(job, "ddp", step["spec"]) for step in mine}
        for step in mine:
            row = predicted[step["spec"]]
            config = {
                "model": name, "batch": size, "exchange": step["spec"], "gigabits": gigabits, "ranks": ranks,
                "trainer": "ddp", "cpu_limited": gigabits >= links.CPU_LIMITED,
            }  # fmt: skip
            measured = {
                "step_ms": schema.quantiles(step["step_ms"]), "predicted_ms": 1e3 * row.step_seconds,
                "compute_ms": 1e3 * row.compute_seconds, "codec_ms": 1e3 * row.codec_seconds,
                "link_ms": 1e3 * row.comm_seconds, "payload_bytes": round(row.bytes_per_rank),
            }  # fmt: skip
            made.append(schema.Row.make("planner", config=config, seed=plan.seed, measured=measured))
    return made


def make_job(name: str, ranks: int, profile: Profile) -> Job:
    return Job(
        model=Model.of(planner_steps.MODELS[name]()), gpus=ranks, network=profile.network(), profile=profile,
        device="cpu", backend="gloo", precision="fp32", schemes=("ddp",),
    )  # fmt: skip


# ---------------------------------------------------------------- results
def error_of(row: schema.Row) -> float:
    """Relative error of the prediction."""
    return row.number("predicted_ms") / row.number("step_ms") - 1


def scenarios(rows: Iterable[schema.Row]) -> dict[tuple[Any, ...], list[schema.Row]]:
    """Rows that differ in the exchange only."""
    found: dict[tuple[Any, ...], list[schema.Row]] = {}
    for row in rows:
        key = tuple(row.config[name] for name in ("gigabits", "ranks", "model", "batch"))
        found.setdefault(key, []).append(row)
    return found


def regret(rows: Sequence[schema.Row]) -> tuple[str, str, float]:
    """What the planner advises by its predictions, what was fastest, and how much longer the advised one takes."""
    predicted = [
        SimpleNamespace(
            step_seconds=row.number("predicted_ms"), compressor=row.config["exchange"], scheme="ddp", memory_bytes=0
        )
        for row in rows
    ]
    chosen: Any = choose(predicted)  # type: ignore[arg-type]
    advised = next(row for row in rows if row.config["exchange"] == chosen.compressor)
    fastest = min(rows, key=lambda row: row.number("step_ms"))
    more = advised.number("step_ms") / fastest.number("step_ms") - 1
    return str(advised.config["exchange"]), str(fastest.config["exchange"]), more


def show(console: Console, rows: Sequence[schema.Row]) -> None:
    table = Table("link, ranks, model", *SPECS, "advice", "fastest", title="ms measured / predicted (error)")
    for (gigabits, ranks, model, batch), mine in scenarios(rows).items():
        cells = {
            row.config[
                "exchange"
            ]: f"{row.number('step_ms'):.0f}/{row.number('predicted_ms'):.0f} ({100 * error_of(row):+.0f} %)"
            for row in mine
        }
        advised, fastest, more = regret(mine)
        table.add_row(
            f"{gigabits:g} Gb/s, {ranks}, {model} {batch}", *(cells.get(spec, "") for spec in SPECS),
            advised + (f" (+{100 * more:.0f} %)" if more > 0 else ""), fastest,
        )  # fmt: skip
    console.print(table)
    errors = sorted(abs(error_of(row)) for row in rows)
    good = sum(regret(mine)[2] <= NEAR for mine in scenarios(rows).values())
    console.print(
        f"{len(errors)} predictions: median error {100 * statistics.median(errors):.1f} %, largest {100 * errors[-1]:.0f} %; "
        f"advice within 10 % of the fastest in {good} of {len(scenarios(rows))} scenarios"
    )
    small = [row for row in rows if not row.config["cpu_limited"]]
    if small and len(small) < len(rows):
        errors = sorted(abs(error_of(row)) for row in small)
        console.print(
            f"of it at 0.1 and 1 Gb/s: {len(errors)}, median {100 * statistics.median(errors):.1f} %, "
            f"largest {100 * errors[-1]:.0f} %"
        )


def plot(path: Path, rows: Sequence[schema.Row]) -> None:
    """Predicted against measured, with bands of 15 and 30 %."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    colours = ("black", "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7")
    markers = {(0.1, 2): "o", (0.1, 4): "s", (1.0, 2): "^", (1.0, 4): "D", (10.0, 2): "P"}
    figure = Figure(figsize=(7, 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    times = [row.number("step_ms") for row in rows]
    ends = [min(times) / 1.5, max(times) * 1.5]
    for part, shade in ((0.30, 0.10), (0.15, 0.18)):
        axes.fill_between(ends, [e * (1 - part) for e in ends], [e * (1 + part) for e in ends], color="grey", alpha=shade,
                          linewidth=0, label=f"± {100 * part:.0f} %")  # fmt: skip
    axes.plot(ends, ends, color="grey", linewidth=1)
    for spec, colour in zip(SPECS, colours, strict=True):
        axes.plot([], [], "o", color=colour, label=spec)
    for (gigabits, ranks), marker in markers.items():
        axes.plot([], [], marker, color="none", markeredgecolor="black", label=f"{gigabits:g} Gb/s, {ranks} ranks")
    for row in rows:
        marker = markers[row.config["gigabits"], row.config["ranks"]]  # type: ignore[index]
        colour = colours[SPECS.index(str(row.config["exchange"]))]
        axes.plot([row.number("step_ms")], [row.number("predicted_ms")], marker, color=colour, markersize=6)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("measured step (ms)")
    axes.set_ylabel("predicted step (ms)")
    axes.set_title("gradcomp's planner on shaped links, 2 cores", fontsize=10)
    axes.legend(frameon=False, fontsize=8, ncols=2)
    axes.grid(True, which="major", alpha=0.3)
    figure.savefig(path, dpi=130)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabits", type=float, nargs="+", default=[0.1, 1.0, 10.0], choices=[0.1, 1.0, 10.0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], choices=[2, 4])
    parser.add_argument("--models", nargs="+", default=list(planner_steps.MODELS), choices=list(planner_steps.MODELS))
    parser.add_argument("--seconds", type=float, default=2.0, help="of timed steps for each model and compressor")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="one link, one small model, two compressors, few steps")
    parser.add_argument("--out", type=Path, help="JSON lines, appended")
    parser.add_argument("--plot", type=Path, help="the scatter plot, PNG")
    parser.add_argument("--read", type=Path, help="show earlier results instead of measuring")
    arguments = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 200)
    if arguments.read is not None:
        rows = [row for row in schema.read(arguments.read) if row.benchmark == "planner"]
    else:
        try:
            links.isolate()
            rows = measure(arguments, console)
        except links.LinksError as error:
            sys.stderr.write(f"planner.py: {error}\n")
            return 1
    if arguments.out is not None and arguments.read is None:
        schema.append(arguments.out, rows)
    show(console, rows)
    if arguments.plot is not None:
        plot(arguments.plot, rows)
    return 0


def measure(arguments: argparse.Namespace, console: Console) -> list[schema.Row]:
    if arguments.quick:
        plan = planner_steps.Plan(
            1.0, [("small", 16)], ["none", "int8"], 1e6, seconds=0.1, most_steps=2, seed=arguments.seed
        )
        return run(1.0, 2, plan, console)
    rows = []
    for (gigabits, ranks), wanted in SETTINGS.items():
        if gigabits in arguments.gigabits and ranks in arguments.ranks:
            console.print(f"{gigabits:g} Gb/s, {ranks} ranks", style="bold")
            some = [(model, batch) for model, batch in wanted if model in arguments.models]
            plan = planner_steps.Plan(
                gigabits, some, SPECS, LARGEST[gigabits], seconds=arguments.seconds, seed=arguments.seed
            )
            rows += run(gigabits, ranks, plan, console)
    return rows


if __name__ == "__main__":
    sys.exit(main())
