"""Tables, picture and the planner's summary from the rows of benchmarks/accuracy.py.

Every run is compared with the uncompressed run of the same task, seed, number of ranks, steps and learning rate: relative
change of held-out loss for text, change of accuracy in percentage points for images. Figures are mean ± standard deviation
over seeds of these paired changes. "Noise" is the standard deviation of the uncompressed runs themselves.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import schema
from accuracy_cases import CORE, FAMILY, FEW, LEARNING_RATE, MORE, STEPS, STRONG, TASKS, VARIANTS, WARM, Case

from gradcomp.registry import format_spec, parse_spec

COLUMNS = tuple((task, optimizer) for task in TASKS for optimizer in ("sgd", "adamw"))
TITLES = {"text": "text", "images": "images", "sgd": "SGD", "adamw": "AdamW", "lamb": "LAMB"}
SAFE = [(spec, warm, None) for spec, warm in CORE] + [(spec, True, "int8") for spec in STRONG]
NAMES = {"onebit_adam": "OneBitAdam", "zero_one_adam": "ZeroOneAdam", "onebit_lamb": "OneBitLamb", "lamb": "LAMB"}


@dataclass(frozen=True, slots=True)
class Result:
    """One configuration. ``values``: per seed, loss (text) or accuracy in percent (images), None if it diverged.

    ``changes``: paired with the uncompressed run of the same seed, in percent or percentage points. ``ratio``: how many
    times fewer bytes a step sends after warm-up, ``run_ratio`` in the whole run, ``megabytes`` sent by rank 0 in it.
    """

    case: Case
    values: tuple[float | None, ...]
    changes: tuple[float | None, ...]
    ratio: float
    run_ratio: float
    megabytes: float

    @property
    def mean(self) -> float | None:
        return _mean(self.values)

    @property
    def spread(self) -> float:
        return _deviation(self.values)

    @property
    def change(self) -> float | None:
        return _mean(self.changes)

    @property
    def change_spread(self) -> float:
        return _deviation(self.changes)


def _mean(values: Sequence[float | None]) -> float | None:
    finite = [value for value in values if value is not None]
    return statistics.mean(finite) if finite and len(finite) == len(values) else None


def _deviation(values: Sequence[float | None]) -> float:
    finite = [value for value in values if value is not None]
    return statistics.stdev(finite) if len(finite) > 1 else 0.0


class Results:
    """All configurations of a results file, by case (its seed set to 0)."""

    def __init__(self, rows: Iterable[schema.Row]) -> None:
        groups: dict[Case, dict[int, schema.Row]] = defaultdict(dict)
        self.both: list[tuple[schema.Row, schema.Row]] = []
        """Runs with real and virtual ranks."""
        for row in rows:
            config = {k: v for k, v in row.config.items() if k not in ("peak_lr", "data", "virtual")}
            runs = groups[Case(**config, seed=0)]  # type: ignore[arg-type]
            if row.seed in runs:
                self.both.append((runs[row.seed], row))
            if row.seed not in runs or not row.config.get("virtual", False):  # real ranks take precedence
                runs[row.seed] = row
        self._groups = groups
        self.all = {case: self._result(case, runs) for case, runs in groups.items()}

    def _result(self, case: Case, runs: dict[int, schema.Row]) -> Result:
        baseline = self._groups.get(baseline_of(case), {})
        values, changes = [], []
        for seed, row in sorted(runs.items()):
            value = _value(row)
            values.append(value)
            if seed in baseline:
                reference = _value(baseline[seed])
                known = value is not None and reference is not None
                changes.append(_change(case.task, value, reference) if known else None)  # type: ignore[arg-type]
        last = next(iter(runs.values()))
        return Result(
            case,
            tuple(values),
            tuple(changes),
            last.number("ratio_per_step"),
            last.number("ratio"),
            last.number("wire_bytes") / 1e6,
        )

    def find(self, task: str, optimizer: str, spec: str, warmup: float = 0.0, **options: object) -> Result | None:
        """The result of a configuration at its usual settings except ``options``; None if there is none yet."""
        clip = 1.0 if (task, optimizer) == ("text", "sgd") else None
        case = Case(task=task, optimizer=optimizer, spec=spec, warmup=warmup, clip=clip, steps=STEPS[task], seed=0)
        return self.all.get(replace(case, **options))  # type: ignore[arg-type]


def baseline_of(case: Case) -> Case:
    """The uncompressed run that a case is compared with."""
    return replace(case, optimizer=case.family, spec="none", warmup=0.0, head=None)


def _value(row: schema.Row) -> float | None:
    if row.measured["loss"] is None or row.measured["diverged_at"] is not None:
        return None
    return 100 * row.number("accuracy") if row.config["task"] == "images" else row.number("loss")


def _change(task: str, value: float, reference: float) -> float:
    return value - reference if task == "images" else 100 * (value / reference - 1)


# ---------------------------------------------------------------------------- tables
def _table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "".join(f"{line}\n" for line in lines + ["| " + " | ".join(row) + " |" for row in body])


def _title(task: str, optimizer: str) -> str:
    return f"{TITLES[task]}, {TITLES[optimizer]}: {'loss, %' if task == 'text' else 'accuracy, points'}"


def _unit(task: str) -> str:
    return "%" if task == "text" else "points"


def _cell(result: Result | None) -> str:
    if result is None or not result.changes:
        return ""
    if result.change is None:
        return "diverged"
    return f"{result.change:+.1f}" + (f" ± {result.change_spread:.1f}" if len(result.changes) > 1 else "")


def _ratios(results: Iterable[Result | None]) -> str:
    """Of text and images."""
    found = [f"{r.ratio:.1f}" if r.ratio < 9.95 else f"{r.ratio:.0f}" for r in results if r is not None]
    return " / ".join(dict.fromkeys(found))


def _label(spec: str, warmup: float) -> str:
    plain = parse_spec(spec)[0].traits.memory == 0 or spec == "none"
    note = "" if warmup or plain else ", no warm-up" if (spec, True) in CORE else ""
    return f"`{spec}`{note}"


def _spec_table(results: Results, specs: Sequence[tuple[str, bool]], **options: object) -> str:
    head = ["spec", "fewer bytes (text / images)"]
    head += [_title(*column) for column in COLUMNS]
    body = []
    for spec, warm in specs:
        found = [results.find(t, o, spec, WARM if warm else 0.0, **options) for t, o in COLUMNS]
        if spec == "none":
            body.append(["`none`", "1", *(_absolute(r) for r in found)])
        elif any(found):
            cells = [_cell(result) for result in found]
            body.append(
                [_label(spec, WARM if warm else 0.0), _ratios((found[0] or found[1], found[2] or found[3])), *cells]
            )
    return _table(head, body)


def _absolute(result: Result | None) -> str:
    if result is None or result.mean is None:
        return ""
    several = len(result.values) > 1
    if result.case.task == "text":
        return f"{result.mean:.3f}" + (f" ± {100 * result.spread / result.mean:.1f} %" if several else "")
    return f"{result.mean:.1f} %" + (f" ± {result.spread:.1f}" if several else "")


def main_table(results: Results) -> str:
    """Every compressor at its main settings, 2 ranks."""
    return _spec_table(results, CORE)


def variants_table(results: Results) -> str:
    """Without error feedback or warm-up, and other blocks."""
    return _spec_table(results, [("none", False), *VARIANTS])


def heads_table(results: Results) -> str:
    """The output layer compressed as the rest, and with int8."""
    head = ["spec", "output layer", "fewer bytes (text / images)", *(_title(*column) for column in COLUMNS)]
    body = []
    for spec in STRONG:
        for own in (None, "int8"):
            found = [results.find(task, optimizer, spec, WARM, head=own) for task, optimizer in COLUMNS]
            ratios = _ratios((found[0] or found[1], found[2] or found[3]))
            body.append([f"`{spec}`", f"`{own}`" if own else "the same", ratios, *map(_cell, found)])
    return _table(head, body)


def more_table(results: Results) -> str:
    """Further settings."""
    return _spec_table(results, [("none", False), *MORE])


def ranks_table(results: Results) -> str:
    """4 ranks, with the same global batch."""
    return _spec_table(results, FEW, ranks=4)


def optimizer_table(results: Results) -> str:
    """The 1-bit optimizers against their uncompressed ones."""
    head = ["optimizer", "against", "fewer bytes, whole run"]
    head += [f"{task}, {ranks} ranks: {_unit(task)}" for task in TASKS for ranks in (2, 4)]
    body = []
    for name, family in FAMILY.items():
        found = [results.find(task, name, "onebit", 0.2, ranks=ranks) for task in TASKS for ranks in (2, 4)]
        runs = " / ".join(dict.fromkeys(f"{r.run_ratio:.1f}" for r in (found[0], found[2]) if r))
        body.append([f"`{NAMES[name]}`", TITLES[family], runs, *(_cell(result) for result in found)])
    return _table(head, body)


def rates_table(results: Results) -> str:
    """The tuned learning rate and its neighbours."""
    head = ["task, optimizer", "peak rate", "`none`", *(f"`{spec}`" for spec, _ in FEW[1:])]
    body = []
    for task, optimizer in COLUMNS:
        for factor in (0.5, 1.0, 2.0, 4.0):
            found = [results.find(task, optimizer, s, WARM if w else 0.0, lr_factor=factor) for s, w in FEW]
            if any(found):
                rate = f"{LEARNING_RATE[task, optimizer] * factor:g} ({factor:g}x)"
                body.append([f"{task}, {TITLES[optimizer]}", rate, _absolute(found[0]), *map(_cell, found[1:])])
    return _table(head, body)


def long_table(results: Results) -> str:
    """Text, SGD: the usual number of steps and four times as many."""
    body = []
    for spec, warm in FEW[1:]:
        found = [
            results.find("text", "sgd", spec, WARM if warm else 0.0, steps=steps)
            for steps in (STEPS["text"], 4 * STEPS["text"])
        ]
        body.append([_label(spec, WARM), *map(_cell, found)])
    return _table(["spec", f"{STEPS['text']} steps: loss, %", f"{4 * STEPS['text']} steps: loss, %"], body)


FREE, CHEAP = 0.2, 1.0
"""Worse by at most so many percent of loss or points of accuracy (or by the spread over seeds): no measurable, a small cost."""


def cost(results: Results, task: str, optimizer: str, spec: str, warmup: float, **options: object) -> float | None:
    """By how much worse than uncompressed, in percent of loss or points of accuracy; 0 within the noise; None if not known."""
    found, none = results.find(task, optimizer, spec, warmup, **options), results.find(task, optimizer, "none")
    if found is None or none is None or found.change is None or none.mean is None:
        return math.inf if found is not None and found.changes and none is not None else None
    worse = found.change if task == "text" else -found.change
    noise = none.spread if task == "images" else 100 * none.spread / none.mean
    return 0.0 if worse <= max(FREE, noise, found.change_spread) else worse


def safe_table(results: Results) -> str:
    """Settings by what they cost in the worse of the two tasks, most bytes saved first."""
    body = []
    for optimizer in ("sgd", "adamw"):
        classes: dict[str, list[tuple[float, str]]] = {"free": [], "cheap": [], "dear": []}
        for spec, warm, head in SAFE:
            if spec == "none":
                continue
            warmup = WARM if warm else 0.0
            costs = [cost(results, task, optimizer, spec, warmup, head=head) for task in TASKS]
            if any(c is None for c in costs):
                continue
            worst = max(c for c in costs if c is not None)
            name = f"`{spec}`" + (f", output layer `{head}`" if head else "")
            ratios = [r.ratio for r in (results.find(t, optimizer, spec, warmup, head=head) for t in TASKS) if r]
            kind = "free" if not worst else "cheap" if worst <= CHEAP else "dear"
            said = (
                f"{name} ({min(ratios):.0f} to {max(ratios):.0f}x)"
                if max(ratios) > 1.2 * min(ratios)
                else f"{name} ({min(ratios):.0f}x)"
            )
            classes[kind].append((max(ratios), said))
        body.append(
            [TITLES[optimizer], *("; ".join(said for _, said in sorted(c, reverse=True)) for c in classes.values())]
        )
    return _table(["optimizer", "no measurable cost", f"up to {CHEAP:g} % or {CHEAP:g} point", "more"], body)


TABLES: dict[str, Callable[[Results], str]] = {
    "accuracy": main_table,
    "accuracy-safe": safe_table,
    "accuracy-variants": variants_table,
    "accuracy-heads": heads_table,
    "accuracy-more": more_table,
    "accuracy-ranks": ranks_table,
    "accuracy-optimizers": optimizer_table,
    "accuracy-rates": rates_table,
    "accuracy-long": long_table,
}


# ---------------------------------------------------------------------------- planner
def planner_summary(results: Results) -> dict[str, object]:
    """For gradcomp/planner: per spec and optimizer the least and greatest change of the text model's loss, in percent; for
    some specs also with the output layer at int8."""
    compressors: dict[str, dict[str, list[float]]] = {}
    heads: dict[str, dict[str, list[float]]] = {}

    def put(where: dict[str, dict[str, list[float]]], name: str, found: Result | None) -> None:
        if found and found.change is not None:
            changes = [change for change in found.changes if change is not None]
            where.setdefault(name, {})[found.case.family] = [round(min(changes), 2), round(max(changes), 2)]

    for spec, warm in (*CORE, *VARIANTS, *MORE):
        if spec != "none" and (warm or (spec, True) not in CORE):
            for optimizer in ("sgd", "adamw"):
                put(compressors, format_spec(spec), results.find("text", optimizer, spec, WARM if warm else 0.0))
    for spec in STRONG:
        for optimizer in ("sgd", "adamw"):
            put(heads, format_spec(spec), results.find("text", optimizer, spec, WARM, head="int8"))
    for name in FAMILY:
        put(compressors, name, results.find("text", name, "onebit", 0.2))
    seeds = max((len(result.values) for result in results.all.values()), default=0)
    what = f"byte-level transformer, 0.28 M parameters, {STEPS['text']} steps, 2 ranks, up to {seeds} seeds"
    return {"what": what, "compressors": compressors, "output layer int8": heads}


def write_planner_summary(results: Results, path: Path) -> None:
    """As JSON."""
    path.write_text(json.dumps(planner_summary(results), indent=2) + "\n")
