"""The picture of benchmarks/accuracy.py: loss or test error against bytes sent, with the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from accuracy_cases import CORE, FAMILY, MORE, STEPS, VARIANTS, WARM
from accuracy_report import COLUMNS, NAMES, TITLES, Result, Results
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from gradcomp.registry import parse_spec

# Okabe and Ito's colours, told apart by most colour-blind readers too
_STYLES = {
    "none": ("black", "o"), "fp16": ("#7F7F7F", "s"), "bf16": ("#8C6D31", "s"), "int8": ("#0072B2", "D"),
    "int4": ("#56B4E9", "D"), "onebit": ("#D55E00", "^"), "topk": ("#E69F00", "v"), "powersgd": ("#009E73", "P"),
    "onebit_adam": ("#CC79A7", "*"), "zero_one_adam": ("#CC79A7", "X"),
}  # fmt: skip


def save(path: Path, results: Results) -> None:
    """Write a PNG of four panels: tasks against optimizers."""
    figure = Figure(figsize=(13, 9.5), layout="constrained")
    FigureCanvasAgg(figure)
    handles: dict[str, object] = {}
    for axes, (task, optimizer) in zip(figure.subplots(2, 2).flat, COLUMNS, strict=True):
        found = [results.find(task, optimizer, spec, WARM if warm else 0.0) for spec, warm in (*CORE, *VARIANTS, *MORE)]
        if optimizer == "adamw":
            found += [results.find(task, name, "onebit", 0.2) for name, family in FAMILY.items() if family == "adamw"]
        _panel(axes, task, [result for result in found if result is not None and result.mean is not None])
        axes.set_title(f"{TITLES[task]}, {TITLES[optimizer]}, 2 ranks, {STEPS[task]} steps")
        handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=6, frameon=False
    )  # fmt: skip
    figure.suptitle(
        "Equal steps, data and learning rates. Bars: standard deviation over seeds; grey: that of uncompressed runs; hollow: no "
        "error feedback;\ncold: without warm-up; line: the best for its bytes. What diverged is not shown.",
        fontsize=10,
    )
    figure.savefig(path, dpi=110)


def _panel(axes: Axes, task: str, found: Sequence[Result]) -> None:
    points: list[tuple[float, float]] = []
    for result in found:
        name = result.case.optimizer if result.case.optimizer in FAMILY else parse_spec(result.case.spec)[0].name
        colour, marker = _STYLES[name]
        mean = result.mean if task == "text" else 100 - (result.mean or 0.0)
        assert mean is not None
        points.append((result.megabytes, mean))
        hollow = "error_feedback=false" in result.case.spec
        axes.errorbar(
            result.megabytes, mean, yerr=result.spread, color=colour, marker=marker, markersize=7, linestyle="",
            markerfacecolor="white" if hollow else colour, capsize=2, elinewidth=0.8, label=NAMES.get(name, name),
        )  # fmt: skip
        if name == "none":
            axes.axhspan(mean - result.spread, mean + result.spread, color="grey", alpha=0.2)
        else:
            axes.annotate(
                _short(result),
                (result.megabytes, mean),
                xytext=(4, 3),
                textcoords="offset points",
                fontsize=6,
                color=colour,
            )
    front = _front(points)
    axes.plot(*zip(*front, strict=True), color="grey", linewidth=1, zorder=0)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.yaxis.set_minor_formatter("{x:.3g}")
    axes.yaxis.set_major_formatter("{x:.3g}")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.tick_params(axis="x", which="minor", labelsize=7)
    axes.set_xlabel("MB sent by each rank in the whole run")
    axes.set_ylabel("held-out loss (nats per byte)" if task == "text" else "test error (%)")
    axes.grid(True, which="both", alpha=0.2)


def _front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those than which none is both smaller and better."""
    front: list[tuple[float, float]] = []
    for point in sorted(points):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return front


def _short(result: Result) -> str:
    if result.case.optimizer in FAMILY:
        return NAMES[result.case.optimizer]
    name, _, options = result.case.spec.partition(":")
    short = options.replace("error_feedback=false", "no EF").replace("error_feedback=true", "EF").replace("ratio=", "")
    cold = (result.case.spec, True) in CORE and not result.case.warmup
    return " ".join(filter(None, (name, short.replace("rank=", "r"), "cold" if cold else "")))
