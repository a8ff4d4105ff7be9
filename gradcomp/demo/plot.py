"""The demo's picture: what the bytes buy, and what a step would take on slower and faster links."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from gradcomp.demo.predict import predicted_seconds
from gradcomp.demo.report import Row
from gradcomp.demo.settings import Settings

# Okabe and Ito's colours, told apart by most colour-blind readers too; black is for the uncompressed run.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8C6D31", "#7F7F7F")
_MARKERS = "osD^vPX*"


def save(path: Path, rows: Sequence[Row], compute: float, settings: Settings) -> None:
    """Write the picture as PNG. ``compute``: seconds of a step that exchanges nothing."""
    figure = Figure(figsize=(13, 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    styles = _styles(rows)
    _loss_against_bytes(left, rows, styles, settings)
    _time_against_link(right, rows, styles, compute)
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(9, len(labels)), frameon=False)
    what = "byte-level transformer" if settings.task == "text" else "image classifier"
    figure.suptitle(
        f"{what}, {settings.ranks} ranks, {settings.steps} steps, same seed, data and learning rate for all"
    )
    figure.savefig(path, dpi=120)


def _styles(rows: Sequence[Row]) -> list[dict[str, object]]:
    """Colour and marker of each row; the uncompressed one is black and thick."""
    styles: list[dict[str, object]] = []
    others = 0
    for row in rows:
        if row.compressor == "none":
            styles.append({"color": "black", "marker": "o", "linewidth": 2.5})
            continue
        styles.append({"color": _COLOURS[others % 8], "marker": _MARKERS[(others + 1) % 8], "linewidth": 1.5})
        others += 1
    return styles


def _loss_against_bytes(axes: Axes, rows: Sequence[Row], styles: list[dict[str, object]], settings: Settings) -> None:
    shown: list[float] = []
    for row, style in zip(rows, styles, strict=True):
        points = [(sent, loss) for _, sent, loss in row.curve if sent > 0 and math.isfinite(loss)]
        axes.plot([sent / 1e6 for sent, _ in points], [loss for _, loss in points], markersize=5, **style)  # type: ignore[arg-type]
        shown += [loss for _, loss in points]
    axes.set_xscale("log")
    if shown:
        # a run that got worse than guessing would flatten all others
        limit = math.log(256 if settings.task == "text" else 10) * 1.15
        axes.set_ylim(top=min(1.05 * max(shown), limit))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("MB sent by each rank since the start")
    axes.set_ylabel("loss on held-out data (nats)")
    axes.set_title("What the bytes buy")
    axes.grid(True, which="major", alpha=0.3)


def _time_against_link(axes: Axes, rows: Sequence[Row], styles: list[dict[str, object]], compute: float) -> None:
    links = [10 ** (exponent / 20) for exponent in range(-20, 41)]  # 0.1 to 100 Gb/s
    for row, style in zip(rows, styles, strict=True):
        codec = (row.encode_ms + row.decode_ms) / 1e3
        times = [
            1e3 * predicted_seconds(compute, codec, row.wire_bytes_per_step, row.collectives_per_step, link)
            for link in links
        ]
        axes.plot(links, times, label=row.compressor, markevery=10, markersize=5, **style)  # type: ignore[arg-type]
    axes.axhline(1e3 * compute, color="grey", linestyle=":", linewidth=1.5, label="compute alone")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks([0.1, 1, 10, 25, 100], ["0.1", "1", "10", "25", "100"])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("link speed (Gb/s)")
    axes.set_ylabel("step time (ms)")
    axes.set_title("Predicted step time (not measured; no overlap assumed)")
    axes.grid(True, which="both", alpha=0.3)
