"""Step time against the link's speed, for the best choices. Needs matplotlib (extra ``bench``)."""

from __future__ import annotations

import math
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from gradcomp.planner.decide import Plan
from gradcomp.planner.predict import Row, predict
from gradcomp.planner.volume import SCHEMES

# Okabe and Ito's colours, told apart by most colour-blind readers too; black is for the uncompressed run.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
_LINES = 5


def choices(plan: Plan) -> list[Row]:
    """The best rows of different compressors, and uncompressed in the scheme of the best."""
    usable = [row for row in plan.rows if row.available and row.fits is not False and row.compressor != "built in"]
    found: list[Row] = []
    if plan.best is not None and plan.best in usable:
        found.append(plan.best)
        found += [r for r in usable if r.scheme == plan.best.scheme and r.compressor == "none" and r is not plan.best]
    for row in usable:
        if len(found) < _LINES and all(row.compressor != other.compressor for other in found):
            found.append(row)
    return found


def save(path: Path, plan: Plan) -> None:
    """Write the picture as PNG."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    job = plan.job
    links = [10 ** (exponent / 10) for exponent in range(-10, 26)]  # 0.1 to about 300 Gb/s
    colours = iter(_COLOURS)
    for row in choices(plan):
        times = [predict(job, row.scheme, row.compressor, job.network.at(link)).step_seconds for link in links]
        plain = row.compressor == "none"
        axes.plot(
            links, times, label=f"{SCHEMES[row.scheme].title}, {row.compressor}",
            color="black" if plain else next(colours), linewidth=2.5 if plain else 1.7,
        )  # fmt: skip
    axes.axvline(job.network.gigabits, color="grey", linestyle=":", label=f"your link, {job.network.gigabits:g} Gb/s")
    axes.set_xscale("log")
    low, high = axes.get_ylim()
    if high / max(low, 1e-9) > 5 or math.isclose(low, 0):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks([0.1, 1, 10, 25, 100], ["0.1", "1", "10", "25", "100"])
    axes.set_xlabel("link speed (Gb/s)")
    axes.set_ylabel("seconds per optimizer step (predicted)")
    axes.set_title(f"{job.model.title}, {job.gpus} GPUs", fontsize=10)
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)
