"""A plan for people (tables, sentences, something to paste) and for programs (JSON)."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradcomp.planner import paste
from gradcomp.planner.decide import Plan
from gradcomp.planner.predict import Row
from gradcomp.planner.volume import SCHEMES

FORMAT = 1
_SHOWN = 12


def print_plan(plan: Plan, console: Console, everything: bool = False) -> None:
    """The table, the recommendation and why, what to be careful of, and what to paste."""
    job = plan.job
    net = job.network
    measured = f", measured on {net.measured_ranks} ranks" if net.curves is not None else ""
    console.print(
        f"{job.model.title}; {job.gpus} GPUs, {job.gpus_per_node} per node; {net.gigabits:g} Gb/s at "
        f"{100 * net.efficiency:.0f} %{measured}; {job.precision}, {job.optimizer}; "
        f"{job.micro_batch} x {job.sequence} tokens per GPU and micro-step, {job.accumulation} per optimizer step",
        highlight=False, markup=False, soft_wrap=True,
    )  # fmt: skip
    console.print(make_table(plan, everything))
    shown = plan.rows if everything else shown_rows(plan)
    notes: dict[str, list[str]] = {}
    for row in shown:
        if row.note and SCHEMES[row.scheme].title not in notes.setdefault(row.note, []):
            notes[row.note].append(SCHEMES[row.scheme].title)
    for note, titles in notes.items():
        console.print(f"(1) {', '.join(sorted(titles))}: {note}.", highlight=False, markup=False, soft_wrap=True)
    hidden = len(plan.rows) - _SHOWN
    if not everything and hidden > 0:
        console.print(f"{hidden} more rows with --all.", highlight=False)
    console.print()
    for line in plan.advice:
        console.print(
            line, style="bold" if line is plan.advice[0] else "", highlight=False, markup=False, soft_wrap=True
        )
    even = [f"{spec} {_speed(speed)}" for spec, speed in plan.break_even.items()]
    if even and plan.best is not None:
        where = SCHEMES[plan.best.scheme].title
        console.print(
            f"With {where}, faster than uncompressed on links below: {', '.join(even)}.",
            highlight=False, markup=False, soft_wrap=True,
        )  # fmt: skip
    for line in plan.warnings:
        console.print(f"Note: {line}", highlight=False, markup=False, soft_wrap=True)
    if plan.best is not None and job.gpus > 1:
        what = "DeepSpeed configuration" if SCHEMES[plan.best.scheme].trainer == "deepspeed" else "Python"
        console.print(f"\nTo paste ({what}):", style="bold")
        console.print(paste.paste(job, plan.best), highlight=False, markup=False, soft_wrap=True)


def _speed(speed: float | None) -> str:
    if speed is None:
        return "none"
    return "any speed" if math.isinf(speed) else f"{speed:.3g} Gb/s"


def shown_rows(plan: Plan) -> list[Row]:
    """The rows of the short table: the best, the fastest ones, and each scheme uncompressed."""
    wanted = [
        row for row in plan.rows if row.compressor in ("none", "built in") or row is plan.best or row is plan.safe
    ]
    others = [row for row in plan.rows if row not in wanted]
    room = max(0, _SHOWN - len(wanted))
    return [row for row in plan.rows if row in wanted or row in others[:room]]


def make_table(plan: Plan, everything: bool = False) -> Table:
    """Best first; the recommendation is marked."""
    table = Table(header_style="bold")
    for heading in ("", "scheme", "compressor"):
        table.add_column(heading, no_wrap=True)
    for heading in (
        "GB sent\nper step",
        "link\nbusy s",
        "waiting\ns",
        "codec\ns",
        "step\ns",
        "tokens/s",
        "GB per\nGPU",
    ):
        table.add_column(heading, justify="right")
    table.add_column("what binds")
    for row in plan.rows if everything else shown_rows(plan):
        style = "bold green" if row is plan.best else "dim" if row.fits is False or not row.available else ""
        mark = "*" if row is plan.best else "+" if row is plan.safe else ""
        table.add_row(
            mark, SCHEMES[row.scheme].title, row.compressor, _gb(row.bytes_per_rank), _sec(row.comm_seconds),
            _sec(row.exposed_seconds), _sec(row.codec_seconds), _sec(row.step_seconds), f"{row.tokens_per_second:,.0f}",
            Text(f"{row.memory_bytes / 1e9:.1f}", style="red" if row.fits is False else ""),
            row.binds + (" (1)" if row.note else ""), style=style,
        )  # fmt: skip
    table.caption = "* recommended, + best without risk to accuracy"
    return table


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.3g}"


def _sec(seconds: float) -> str:
    return f"{seconds:.3g}"


def as_json(plan: Plan) -> dict[str, Any]:
    """Everything as plain values: rows best first, in bytes and seconds."""
    job = plan.job
    best = plan.best
    return {
        "format": FORMAT,
        "model": {"title": job.model.title, "parameters": job.model.numel},
        "gpus": job.gpus,
        "gpus_per_node": job.gpus_per_node,
        "link": {
            "gigabits": job.network.gigabits,
            "efficiency": job.network.efficiency,
            "latency_seconds": job.network.latency,
            "measured": job.network.curves is not None,
        },
        "precision": job.precision,
        "optimizer": job.optimizer,
        "rows": [asdict(row) for row in plan.rows],
        "recommendation": None if best is None else {"scheme": best.scheme, "compressor": best.compressor},
        "without_risk": None if plan.safe is None else {"scheme": plan.safe.scheme, "compressor": plan.safe.compressor},
        "advice": plan.advice,
        "warnings": plan.warnings,
        "break_even_gigabits": {
            spec: "any" if speed is not None and math.isinf(speed) else speed for spec, speed in plan.break_even.items()
        },
        "paste": None if best is None else paste.paste(job, best),
    }
