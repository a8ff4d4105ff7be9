"""Write the READMEs' tables and the plots from the results that are committed, so that they never drift from the data.

    python benchmarks/report.py            # rewrite both READMEs between their markers, and benchmarks/results/*.png
    python benchmarks/report.py --check    # 1 if a README is not what the results say; writes nothing

A table stands between ``<!-- results: NAME -->`` and ``<!-- end of results -->``; NAME is one of SECTIONS, which says how it
is made. Of rows with equal configuration and seed the last one in the file counts.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import accuracy_report
import planner as compare
import schema
from schema import Row

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
DOCUMENTS = (README, ROOT / "benchmarks" / "README.md")
MARKED = re.compile(r"(<!-- results: (?P<name>[a-z0-9-]+) -->\n).*?(<!-- end of results -->)", re.DOTALL)
BENCHMARKS = ("accuracy", "kernels", "network", "peers", "planner")
NOTHING, NO_HOOK = "no communication", "no hook"


def load(benchmark: str) -> list[Row]:
    """The rows of ``results/BENCHMARK.jsonl``, without those that later ones replace."""
    latest = {}
    for row in schema.read(schema.RESULTS / f"{benchmark}.jsonl"):
        latest[json.dumps(row.config, sort_keys=True), row.seed] = row
    return list(latest.values())


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def origin(rows: Sequence[Row]) -> str:
    """Machine, versions and dates of rows, in words.

    Raises:
        LookupError: there are no rows.
    """
    if not rows:
        raise LookupError("not measured")
    machines = sorted({f"{row.machine.cpu}, {row.machine.cores} cores" for row in rows})
    packages = sorted(
        {f"{name} {row.versions[name]}" for row in rows for name in ("torch", "numba") if name in row.versions}
    )
    dates = sorted({row.date.isoformat() for row in rows})
    return f"{'; '.join(machines)}; {', '.join(packages)}; {' and '.join(dict.fromkeys([dates[0], dates[-1]]))}"


def code(name: str) -> str:
    """A gradcomp spec as code, other exchanges in words."""
    return name if " " in name else f"`{name}`"


# ---------------------------------------------------------------- kernels
HIDDEN_KERNELS = ("stochastic", "server stage", "accumulate", "mean", "Top-K decode")


def kernels() -> str:
    rows = load("kernels")
    lines = []
    for row in rows:
        config, name = row.config, str(row.config["kernel"])
        if any(word in name for word in HIDDEN_KERNELS) or config.get("block", 256) != 256:
            continue
        details = [f"{config['ratio']:.1%}"] if "ratio" in config else []
        details += [f"block {config['block']}"] if "block" in config else []
        details += [f"rank {config['rank']}, {config['model']}"] if "model" in config else []
        of_copy = f"{row.number('copies'):.1f} copies" if "copies" in row.measured else f"{row.number('of_copy'):.2f}"
        ratios = [row.measured.get(f"torch_{allocator}_ratio") for allocator in ("default", "tuned")]
        lines.append([", ".join([name, *details]), of_copy, *("" if r is None else f"{r:.2g}x" for r in ratios)])
    elements = max(int(str(row.config["elements"])) for row in rows if "model" not in row.config)
    reps = rows[0].config["reps"]
    head = f"{elements / 1e6:.0f} M fp32 elements, one thread, medians of {reps}; {origin(rows)}.\n\n"
    return head + table(["kernel", "of copy", "torch, default", "torch, tuned"], lines)


# ---------------------------------------------------------------- network
def network_rows(ranks: int, batch: int = 8, model: str = "mlp", trainer: str = "ddp") -> dict[float, dict[str, Row]]:
    """Speed to exchange to row, of links that were shaped."""
    found: dict[float, dict[str, Row]] = {}
    for row in load("network"):
        config = row.config
        if config["gigabits"] and (config["ranks"], config["batch"], config["model"], config["trainer"]) == (
            ranks, batch, model, trainer,
        ):  # fmt: skip
            found.setdefault(float(str(config["gigabits"])), {})[str(config["exchange"])] = row
    return dict(sorted(found.items()))


def milliseconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def two_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.5 else f"{value:.2g}"


def step_cell(row: Row | None, base: Row | None) -> list[str]:
    """Median step in ms with its 20-80 % range, and how many times faster than the base."""
    if row is None or row.error is not None:
        return ["" if row is None else "failed", ""]
    step = row.measured["step_ms"]
    assert isinstance(step, schema.Quantiles)
    faster = "" if base is None or base.error is not None else f"{two_digits(base.number('step_ms') / step.p50)}x"
    low, middle, high = (milliseconds(value) for value in (step.p20, step.p50, step.p80))
    return [f"{middle} ({low} to {high})", faster]


def network(ranks: int) -> str:
    by_speed = network_rows(ranks)
    names = list(dict.fromkeys(name for rows in by_speed.values() for name in rows))
    lines = []
    for name in names:
        any_row = next(rows[name] for rows in by_speed.values() if name in rows)
        megabytes = f"{any_row.number('payload_bytes') / 1e6:.3g}" if any_row.error is None else ""
        cells = [code(name), megabytes]
        for gigabits, rows in by_speed.items():
            row = rows.get(name)
            cells += step_cell(row, rows.get(NO_HOOK))
            if gigabits == 1.0:
                fine = (
                    row is not None and row.error is None and "ideal_ms" in row.measured and row.number("ideal_ms") > 0
                )
                cells.append(two_digits(row.number("exposed_ms") / row.number("ideal_ms")) if fine and row else "")
        lines.append(cells)
    headings = ["exchange", "MB sent"]
    for gigabits, rows in by_speed.items():
        limited = " *" if any(row.config["cpu_limited"] for row in rows.values()) else ""
        headings += [f"{gigabits:g} Gb/s, ms{limited}", "vs no hook"]
        headings += ["exposed / ideal"] if gigabits == 1.0 else []
    everything = [row for rows in by_speed.values() for row in rows.values()]
    head = (
        f"{ranks} ranks, MLP of 10.5 M parameters, plain DDP with its default buckets; median step and 20 to 80 % range; "
        f"{origin(everything)}.\n\n"
    )
    foot = "\n\\* limited by the CPU, not the link.\n" if any("*" in heading for heading in headings) else ""
    return head + table(headings, lines) + foot


def overhead() -> str:
    """`none` against no hook where the link is not limited."""
    rows = [row for row in load("network") if not row.config["gigabits"] and row.error is None]
    by_model: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_model.setdefault(str(row.config["model"]), {})[str(row.config["exchange"])] = row
    lines = []
    for model, mine in by_model.items():
        more = mine["none"].number("step_ms") / mine[NO_HOOK].number("step_ms") - 1
        steps = [step_cell(mine[name], None)[0] for name in (NOTHING, NO_HOOK, "none")]
        lines.append([model, *steps, f"{100 * more:+.1f} %"])
    return table(["model", "no communication, ms", "no hook, ms", "`none`, ms", "more"], lines)


def crossing(points: Sequence[tuple[float, float]]) -> str:
    """Where a ratio of times, given at rising speeds, first exceeds 1: interpolated between the logarithms."""
    if points[0][1] >= 1:
        return f"below {points[0][0]:g}"
    for (slow, before), (fast, after) in itertools.pairwise(points):
        if after >= 1:
            part = -math.log(before) / (math.log(after) - math.log(before))
            return f"{slow * (fast / slow) ** part:.2g}"
    return f"above {points[-1][0]:g}"


def break_even() -> str:
    columns, batches = (
        [],
        sorted({int(str(row.config["batch"])) for row in load("network") if row.config["model"] == "mlp"}),
    )
    for ranks in (2, 4):
        for batch in batches:
            by_speed = network_rows(ranks, batch)
            if len(by_speed) < 2:
                continue
            points: dict[str, list[tuple[float, float]]] = {}
            for gigabits, rows in by_speed.items():
                for name, row in rows.items():
                    if name not in (NOTHING, NO_HOOK) and row.error is None and rows[NO_HOOK].error is None:
                        ratio = row.number("step_ms") / rows[NO_HOOK].number("step_ms")
                        points.setdefault(name, []).append((gigabits, ratio))
            middle = by_speed.get(1.0) or next(iter(by_speed.values()))
            columns.append((ranks, middle[NOTHING].number("step_ms"), {n: crossing(p) for n, p in points.items()}))
    names = list(dict.fromkeys(name for _, _, found in columns for name in found))
    headings = ["exchange", *(f"{ranks} ranks, compute {compute:.0f} ms" for ranks, compute, _ in columns)]
    return table(headings, [[code(name), *(found.get(name, "") for _, _, found in columns)] for name in names])


# ---------------------------------------------------------------- peers
def peers() -> str:
    rows = load("peers")
    names = list(dict.fromkeys(str(row.config["peer"]) for row in rows))
    speeds = sorted({float(str(row.config["gigabits"])) for row in rows})
    lines = []
    for name in names:
        mine = {float(str(row.config["gigabits"])): row for row in rows if row.config["peer"] == name}
        good = [row for row in mine.values() if row.error is None]
        if not good:
            lines.append([name, "failed", *[""] * (len(speeds) + 3)])
            continue
        one = good[-1]
        times = [
            milliseconds(mine[s].number("exchange_ms")) if s in mine and mine[s].error is None else "failed"
            for s in speeds
        ]
        errors = [f"{one.number(key):.2g}" for key in ("error_of_one", "error_of_sum")]
        lines.append([name, f"{one.number('link_bytes') / 1e6:.3g}", str(one.measured["calls"] or ""), *times, *errors])
    headings = ["exchange", "MB sent", "calls", *(f"{speed:g} Gb/s, ms" for speed in speeds), "error of 1 step", "of 6"]
    versions = sorted({f"{n} {r.versions[n]}" for r in rows for n in ("deepspeed", "hivemind") if n in r.versions})
    return f"2 ranks; {origin(rows)}; {', '.join(versions)}.\n\n" + table(headings, lines)


# ---------------------------------------------------------------- DeepSpeed
def deepspeed() -> str:
    rows = [row for row in load("network") if row.config["trainer"] == "deepspeed"]
    plain = {str(row.config["exchange"]): row for row in rows}
    lines = []
    for name, row in plain.items():
        base = plain.get(name.partition(",")[0])
        megabytes = "" if row.error else f"{row.number('link_bytes') / 1e6:.3g}"
        lines.append([name, megabytes, *step_cell(row, base)])
    head = f"2 ranks, 1 Gb/s, the same MLP; {origin(rows)}.\n\n"
    return head + table(["engine", "MB on the link", "step, ms", "against its own collectives"], lines)


# ---------------------------------------------------------------- planner
def planner() -> str:
    """Measured and predicted steps, and what was advised."""
    rows = load("planner")
    specs = list(dict.fromkeys(str(row.config["exchange"]) for row in rows))
    lines, good = [], 0
    for (gigabits, ranks, model, batch), mine in compare.scenarios(rows).items():
        by_spec = {str(row.config["exchange"]): row for row in mine}
        cells = [
            f"{milliseconds(row.number('step_ms'))} / {milliseconds(row.number('predicted_ms'))}"
            for row in map(by_spec.__getitem__, specs)
        ]
        advised, fastest, more = compare.regret(mine)
        good += more <= compare.NEAR
        limited = " *" if mine[0].config["cpu_limited"] else ""
        advice = code(advised) + (f", {100 * more:.0f} % over {code(fastest)}" if advised != fastest else "")
        lines.append([f"{gigabits:g} Gb/s{limited}, {ranks} ranks", f"{model}, batch {batch}", *cells, advice])
    errors = sorted(abs(compare.error_of(row)) for row in rows)
    shaped = sorted(abs(compare.error_of(row)) for row in rows if not row.config["cpu_limited"])
    head = (
        f"Milliseconds measured / predicted; {origin(rows)}. {len(errors)} predictions: median error "
        f"{100 * statistics.median(errors):.0f} %, largest {100 * errors[-1]:.0f} % (at 0.1 and 1 Gb/s: {len(shaped)}, "
        f"{100 * statistics.median(shaped):.0f} and {100 * shaped[-1]:.0f} %). The advice is the fastest or within "
        f"{100 * compare.NEAR:.0f} % of it in {good} of {len(lines)} scenarios.\n\n"
    )
    return head + table(["link", "model", *map(code, specs), "advice"], lines)


def accuracy(make: Callable[[accuracy_report.Results], str]) -> str:
    return make(accuracy_report.Results(load("accuracy")))


SECTIONS: dict[str, Callable[[], str]] = {
    "kernels": kernels,
    "network-2": lambda: network(2),
    "network-4": lambda: network(4),
    "overhead": overhead,
    "break-even": break_even,
    "peers": peers,
    "deepspeed": deepspeed,
    "planner": planner,
    **{name: functools.partial(accuracy, make) for name, make in accuracy_report.TABLES.items()},
}


def rewritten(text: str) -> str:
    """``text`` with every marked section made anew.

    Raises:
        ValueError: a marker names no section.
    """

    def replace(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in SECTIONS:
            raise ValueError(f"no section {name!r}; known are {', '.join(SECTIONS)}")
        try:
            made = SECTIONS[name]()
        except FileNotFoundError as missing:
            made = f"Not measured yet: `{Path(missing.filename).name}` is missing (benchmarks/README.md).\n"
        except LookupError:
            made = "Not measured yet (benchmarks/README.md).\n"
        return match[1] + "\n" + made + "\n" + match[3]

    return MARKED.sub(replace, text)


def plot_network(path: Path) -> None:
    """Step time against link speed, two ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    by_speed = network_rows(2)
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for name in dict.fromkeys(name for rows in by_speed.values() for name in rows):
        good = [
            (g, rows[name].number("step_ms")) for g, rows in by_speed.items() if name in rows and not rows[name].error
        ]
        plain = " " in name
        axes.plot(*zip(*good, strict=True), marker="o", linestyle="--" if plain else "-", label=name)
    axes.set(xscale="log", yscale="log", xlabel="link speed, Gb/s", ylabel="step, ms",
             title="10.5 M-parameter MLP, 2 ranks, measured")  # fmt: skip
    axes.grid(True, which="both", alpha=0.3)
    axes.legend(fontsize="small", ncols=2)
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only")
    arguments = parser.parse_args()
    stale = {path: text for path in DOCUMENTS if (text := rewritten(path.read_text())) != path.read_text()}
    if arguments.check:
        for path in stale:
            print(
                f"{path.relative_to(ROOT)} differs from the results: run python benchmarks/report.py", file=sys.stderr
            )
        return int(bool(stale))
    for path, text in stale.items():
        path.write_text(text)
    if (schema.RESULTS / "network.jsonl").exists():
        plot_network(schema.RESULTS / "network.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
