"""The demo's results: one row per compressor, as a table for people and as JSON for programs."""

from __future__ import annotations

import math
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

import gradcomp
from gradcomp.demo.launch import cores, threads_per_rank
from gradcomp.demo.predict import FORMULA, LINKS, break_even_gigabits, predicted_seconds
from gradcomp.demo.settings import Settings
from gradcomp.demo.train import BUCKET_MB, Run

FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One compressor's results.

    Bytes are what one rank sends, per step in the steady state; ``total_wire_bytes`` includes warm-up. ``final_loss`` is on
    held-out data, in nats. Times are medians of the steady steps, in milliseconds; ``predicted_ms`` is by link speed
    (Gb/s). ``break_even_gbps``: below this link speed the predicted step is shorter than that of ``none`` (None: on no
    link, or there is no such run; inf: on every link).
    """

    compressor: str
    wire_bytes_per_step: int
    raw_bytes_per_step: int
    ratio: float
    total_wire_bytes: int
    final_loss: float
    bits_per_byte: float | None
    accuracy: float
    diverged_at_step: int | None
    warmup_steps: int
    step_ms: float
    step_ms_p20: float
    step_ms_p80: float
    encode_ms: float
    decode_ms: float
    collectives_per_step: int
    memory_bytes: int
    predicted_ms: dict[float, float]
    break_even_gbps: float | None
    backend: str
    schedule: str
    curve: list[tuple[int, int, float]]
    notes: list[str]


def make_rows(runs: list[Run], compute: float, settings: Settings) -> list[Row]:
    """Rows of ``runs``; ``compute``: seconds of a step that exchanges nothing."""
    base = next((run for run in runs if run.spec == "none"), None)
    return [_row(run, base, compute, settings) for run in runs]


def _row(run: Run, base: Run | None, compute: float, settings: Settings) -> Row:
    codec = run.encode + run.decode
    even = None
    if base is not None and run is not base:
        even = break_even_gigabits(
            codec, run.wire_bytes_per_step, run.collectives_per_step,
            base.encode + base.decode, base.wire_bytes_per_step, base.collectives_per_step,
        )  # fmt: skip
    return Row(
        compressor=run.spec,
        wire_bytes_per_step=run.wire_bytes_per_step,
        raw_bytes_per_step=run.raw_bytes_per_step,
        ratio=run.ratio,
        total_wire_bytes=run.wire_bytes,
        final_loss=run.loss,
        bits_per_byte=run.loss / math.log(2) if settings.task == "text" else None,
        accuracy=run.accuracy,
        diverged_at_step=run.diverged_at,
        warmup_steps=run.warmup_steps,
        step_ms=1e3 * run.step,
        step_ms_p20=1e3 * run.step_p20,
        step_ms_p80=1e3 * run.step_p80,
        encode_ms=1e3 * run.encode,
        decode_ms=1e3 * run.decode,
        collectives_per_step=run.collectives_per_step,
        memory_bytes=run.memory_bytes,
        predicted_ms={
            link: 1e3 * predicted_seconds(compute, codec, run.wire_bytes_per_step, run.collectives_per_step, link)
            for link in LINKS
        },
        break_even_gbps=even,
        backend=run.backend,
        schedule=run.schedule,
        curve=run.curve,
        notes=run.notes,
    )


def fastest(rows: list[Row], link: float) -> Row | None:
    """The row with the shortest predicted step at ``link`` Gb/s, of those that did not diverge."""
    sound = [row for row in rows if row.diverged_at_step is None and math.isfinite(row.predicted_ms[link])]
    return min(sound, key=lambda row: row.predicted_ms[link], default=None)


# -------------------------------------------------------------------- for people
def print_report(console: Console, rows: list[Row], compute: float, source: str, settings: Settings) -> None:
    """The table, how to read it, and what was noticed."""
    console.print()
    console.print(make_table(rows, settings))
    for line in _explain(rows, compute, source, settings):
        console.print(line, highlight=False)


def make_table(rows: list[Row], settings: Settings) -> RenderableType:
    """The table; at each link speed the fastest compressor is marked with a star."""
    table = Table(title="Bytes, quality and step time of each compressor", title_style="bold", header_style="bold")
    table.add_column("compressor", no_wrap=True)
    quality = "bits/byte" if settings.task == "text" else "accuracy"
    headings = ["kB/step", "ratio", "loss", quality, "warm-up", "codec ms", "step ms\nhere"]
    headings += [f"predicted ms\n{link:g} Gb/s" for link in LINKS]
    for heading in headings:
        table.add_column(heading, justify="right")
    best = {link: fastest(rows, link) for link in LINKS}
    for row in rows:
        good = f"{row.bits_per_byte:.3f}" if row.bits_per_byte is not None else f"{100 * row.accuracy:.1f} %"
        diverged = row.diverged_at_step is not None
        table.add_row(
            row.compressor,
            f"{row.wire_bytes_per_step / 1e3:,.1f}",
            f"{row.ratio:.1f}x",
            Text("diverged", style="red") if diverged else f"{row.final_loss:.3f}",
            "" if diverged else good,
            str(row.warmup_steps) if row.warmup_steps else "",
            f"{row.encode_ms + row.decode_ms:.1f}",
            f"{row.step_ms:.1f}",
            *(
                Text(f"* {row.predicted_ms[link]:.1f}", style="bold green")
                if row is best[link]
                else f"{row.predicted_ms[link]:.1f}"
                for link in LINKS
            ),
        )
    return table


def _explain(rows: list[Row], compute: float, source: str, settings: Settings) -> list[str]:
    threads = threads_per_rank(settings.ranks)
    lines = [
        f"Data: {source}; every rank trains on its own share, the loss is on held-out data.",
        f"Training: {settings.steps} steps of {settings.ranks} x {settings.batch}, {settings.describe_optimizer()}; tuned "
        "for none, the same for all.",
        f"kB/step: what each rank sends once warm-up is over. Ratio: to an uncompressed ring all-reduce of {settings.ranks} "
        "ranks.",
    ]
    if any(row.warmup_steps for row in rows):
        lines.append(
            "Warm-up: steps exchanged uncompressed at the start, as is usual for 1-bit and Top-K. They also leave the output "
            "layer to int8, because there they lose most."
        )
    lines += [
        f"Step here: median on this machine, {settings.ranks} ranks of {threads} thread{'s' * (threads > 1)} on {cores()} "
        "cores over the loopback interface, which is faster than any network.",
        f"Predicted, not measured; no overlap assumed: {FORMULA}. Compute was {1e3 * compute:.1f} ms.",
        f"* fastest predicted. {_break_even(rows)}".strip(),
    ]
    if settings.ranks > cores():
        lines.append(
            f"{settings.ranks} ranks share {cores()} cores: compute and codec times are longer than on one core each."
        )
    lines += [f"{row.compressor}: diverged, stopped at step {row.diverged_at_step}." for row in rows if _diverged(row)]
    return lines + [f"{row.compressor}: {note}" for row in rows for note in row.notes]


def _diverged(row: Row) -> bool:
    return row.diverged_at_step is not None


def _break_even(rows: list[Row]) -> str:
    words = []
    for row in rows:
        speed = row.break_even_gbps
        if speed is not None and speed > 0:
            words.append(f"{row.compressor} {f'{speed:.2g} Gb/s' if speed < 1000 else 'any speed'}")
    return f"Predicted to beat none on links below: {', '.join(words)}." if words else ""


# -------------------------------------------------------------------- for programs
def as_json(rows: list[Row], compute: float, source: str, settings: Settings, seconds: float) -> dict[str, Any]:
    """Everything, as plain values: NaN and infinity become null and the string "any"."""
    return {
        "format": FORMAT,
        "machine": machine(),
        "task": settings.task,
        "data": source,
        "settings": {
            **asdict(settings),
            "batch_per_rank": settings.batch,
            "learning_rate": settings.learning_rate,
            "bucket_cap_mb": BUCKET_MB,
            "threads_per_rank": threads_per_rank(settings.ranks),
        },
        "compute_ms": _plain(1e3 * compute),
        "prediction": FORMULA,
        "seconds": round(seconds, 1),
        "rows": [_plain_row(row) for row in rows],
    }


def _plain_row(row: Row) -> dict[str, Any]:
    values = {name: _plain(value) for name, value in asdict(row).items()}
    values["predicted_ms"] = {f"{link:g}": _plain(time) for link, time in row.predicted_ms.items()}
    values["break_even_gbps"] = "any" if row.break_even_gbps == math.inf else _plain(row.break_even_gbps)
    values["curve"] = [{"step": s, "wire_bytes": b, "loss": _plain(loss)} for s, b, loss in row.curve]
    return values


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    return {
        "cpu": _cpu_name(),
        "cores": cores(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "numba": _version("numba"),
        "gradcomp": gradcomp.__version__,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except ImportError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
