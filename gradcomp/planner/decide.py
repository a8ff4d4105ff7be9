"""Which scheme and which compressor, or none: all choices predicted, ranked, and explained in one sentence each."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import resources
from typing import Any

from gradcomp.errors import ConfigError, UnsupportedError
from gradcomp.planner import volume
from gradcomp.planner.predict import Job, Row, buckets_of, duration, effective_spec, predict, step_time
from gradcomp.planner.volume import SCHEMES
from gradcomp.registry import format_spec, parse_spec

MARGIN = 0.03
"""A smaller gain than this is not worth a risk: the choice with less of it is preferred. Relative to each other, steps are
predicted to a few percent (benchmarks/planner.py); with 5 % it advised against the fastest in 2 of 12 measured cases."""


@dataclass(frozen=True)
class Plan:
    """All rows, best first; ``best`` is None when nothing fits. ``safe``: the best that costs no accuracy as measured."""

    job: Job
    rows: list[Row]
    best: Row | None
    safe: Row | None
    break_even: dict[str, float | None]
    """Of each compressor in the scheme of ``best``: the link (Gb/s) below which it beats none; None: nowhere; inf: anywhere."""
    advice: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def plan(job: Job) -> Plan:
    """Predict every choice and decide."""
    rows = []
    for scheme in job.schemes:
        for spec in dict.fromkeys(job.compressors):
            try:
                rows.append(predict(job, scheme, spec))
            except UnsupportedError:
                continue  # the compressor does not fit a reduce-scatter, or the scheme has its own
    rows.sort(key=lambda row: (row.fits is False, not row.available, row.step_seconds))
    candidates = [row for row in rows if row.fits is not False and row.available]
    harmless = [row for row in candidates if risk(row.compressor, row.scheme) <= 2]
    safe = choose(harmless)
    best = safe if job.safe else choose(candidates)
    even = {} if best is None else break_even(job, best.scheme)
    made = Plan(job, rows, best, safe, even)
    made.advice.extend(_advice(made))
    made.warnings.extend(_warnings(made))
    return made


def risk(spec: str, scheme: str = "ddp") -> int:
    """0: uncompressed; 1: rounding; 2: int8, nearly unbiased; 3: biased with error feedback; 4: strongly biased, or without."""
    if SCHEMES[scheme].weight_spec:
        return max(risk(SCHEMES[scheme].weight_spec), risk(spec, "fsdp2"))
    if spec in ("none", "built in"):
        return 0
    compressor, config = parse_spec(effective_spec(SCHEMES[scheme], spec))
    traits = compressor.traits
    if not traits.biased:
        return 1
    if traits.memory == 0 and traits.bits >= 8:
        return 2
    return 4 if traits.strongly_biased or not getattr(config, "error_feedback", True) else 3


def choose(rows: Sequence[Row]) -> Row | None:
    """The fastest, or one within the margin of it that risks less accuracy or needs less memory."""
    if not rows:
        return None
    fastest = min(row.step_seconds for row in rows)
    close = [row for row in rows if row.step_seconds <= (1 + MARGIN) * fastest]
    return min(close, key=lambda row: (risk(row.compressor, row.scheme), row.step_seconds, row.memory_bytes))


def break_even(job: Job, scheme: str) -> dict[str, float | None]:
    """For each compressor: the link speed in Gb/s below which its step is shorter than that of ``none``."""
    speeds: dict[str, float | None] = {}
    for spec in dict.fromkeys(job.compressors):
        if spec == "none" or SCHEMES[scheme].name == "zero++" or job.gpus == 1:
            continue
        try:
            speeds[spec] = _break_even(job, scheme, spec)
        except UnsupportedError:
            continue
    return speeds


def _break_even(job: Job, scheme: str, spec: str) -> float | None:
    def seconds(spec: str, gigabits: float) -> float:
        buckets = buckets_of(job, SCHEMES[scheme], spec)
        return step_time(job, SCHEMES[scheme], spec, buckets, job.network.at(gigabits)).total

    def wins(gigabits: float) -> bool:
        return seconds(spec, gigabits) < seconds("none", gigabits)

    slow, fast = 1e-2, 1e4
    if not wins(slow):
        return None
    if wins(fast):
        return math.inf
    for _ in range(9):  # to 3 %
        middle = math.sqrt(slow * fast)
        slow, fast = (middle, fast) if wins(middle) else (slow, middle)
    return math.sqrt(slow * fast)


def _advice(made: Plan) -> list[str]:
    job, best = made.job, made.best
    if best is None:
        return [_nothing_fits(made)]
    said = []
    none = next((row for row in made.rows if row.scheme == best.scheme and row.compressor == "none"), None)
    title = SCHEMES[best.scheme].title
    if job.gpus == 1:
        return ["One GPU exchanges nothing: there is nothing to compress."]
    if best.compressor == "none":
        said.append(
            f"Do not compress: {title} as it is, {duration(best.step_seconds)} a step; what binds is {best.why}."
        )
    else:
        gain = (
            f", {none.step_seconds / best.step_seconds:.1f} times faster than uncompressed" if none is not None else ""
        )
        said.append(
            f"{title} with {best.compressor}: {duration(best.step_seconds)} a step{gain}; what binds is {best.why}."
        )
        if none is not None and math.isfinite(none.useful_ratio):
            said.append(
                f"Uncompressed, the link is busy for {none.useful_ratio:.3g} times as long as backward takes: with codecs that "
                "cost nothing, a compression ratio beyond that would gain nothing more."
            )
    fitting = [row for row in made.rows if row.available and row.fits is False]
    if fitting and len({row.scheme for row in fitting}) < len({row.scheme for row in made.rows}):
        schemes = list(dict.fromkeys(SCHEMES[row.scheme].title for row in fitting if row.compressor == "none"))
        if schemes:
            said.append(f"Too large for the GPU's memory even uncompressed: {', '.join(schemes)}.")
    said += _scaling(made, best)
    if job.gpus_per_node > 1 and best.compressor != "none":
        said.append(
            f"Each NIC serves {job.gpus_per_node} GPUs. A flat all-to-all writes from each of them; compressing only between "
            f"nodes (HSDP with gradcomp between the replicas) would put {_hierarchical(job, best):.3g} GB per step on a NIC."
        )
    return said


def _hierarchical(job: Job, best: Row) -> float:
    raw = volume.all_reduce(job.width * job.model.numel, job.gpus)
    ratio = raw / max(1.0, sum(b.nbytes for b in buckets_of(job, SCHEMES["ddp"], best.compressor)))
    nodes = max(2, job.gpus // job.gpus_per_node)
    return volume.hierarchical_nic_bytes(job.width * job.model.numel, ratio, nodes) / 1e9


def _scaling(made: Plan, best: Row) -> list[str]:
    """Whether this many machines, and more of them, help."""
    job = made.job
    if best.compressor == "built in":
        return []
    more = predict(replace(job, gpus=2 * job.gpus), best.scheme, best.compressor)
    gain = more.samples_per_second / best.samples_per_second
    said = []
    if gain < 1.1:
        said.append(
            f"More machines will not help: with {2 * job.gpus} GPUs it does {gain:.2f} times as many samples per second."
        )
    if job.gpus > job.gpus_per_node:
        one = predict(replace(job, gpus=1, gpus_per_node=1), "ddp", "none")
        against = best.samples_per_second / (one.samples_per_second * job.gpus)
        said.append(
            f"{job.gpus} GPUs do {100 * against:.0f} % of {job.gpus} times the work of one that exchanges nothing"
            + (" (and one GPU alone would be faster)." if against * job.gpus < 1 else ".")
        )
    return said


def _nothing_fits(made: Plan) -> str:
    least = min((row for row in made.rows if row.available), key=lambda row: row.memory_bytes, default=None)
    assert least is not None
    assert made.job.gpu_memory is not None
    return (
        f"Nothing fits in {made.job.gpu_memory / 1e9:.0f} GB: the least, {SCHEMES[least.scheme].title} with "
        f"{least.compressor}, needs {least.memory_bytes / 1e9:.1f} GB per GPU. Try --offload, --checkpointing, a smaller "
        "micro-batch, or more GPUs."
    )


# ------------------------------------------------------------------------ accuracy
@lru_cache(maxsize=1)
def accuracy_table() -> dict[str, Any]:
    """The accuracy benchmark's summary, which ships with the package: ``benchmarks/accuracy.py --report --planner`` writes it."""
    found: dict[str, Any] = json.loads(resources.files("gradcomp.planner").joinpath("accuracy.json").read_text())
    return found


def accuracy_of(spec: str, optimizer: str) -> str | None:
    """What was measured of a compressor under an optimizer ("adam" or "sgd"), in words; None if nothing was."""
    try:
        name = parse_spec(spec)[0].name
    except ConfigError:
        return None
    kind = "sgd" if optimizer == "sgd" else "adamw"
    table = accuracy_table()
    entry = table["compressors"].get(format_spec(spec), table["compressors"].get(name, {})).get(kind)
    if entry is None:
        return None
    head = table["output layer int8"].get(format_spec(spec), {}).get(kind)
    better = f", {_span(*head)} with the output layer at int8" if head is not None else ""
    return f"held-out loss {_span(*entry)} against uncompressed at equal steps{better} ({table['what']})"


def _span(low: float, high: float) -> str:
    return f"{low:+.1f} %" if abs(high - low) < 0.05 else f"{low:+.1f} to {high:+.1f} %"


def _warnings(made: Plan) -> list[str]:
    job, best, said = made.job, made.best, []
    if best is not None and best.compressor not in ("none", "built in"):
        measured = accuracy_of(best.compressor, job.optimizer)
        traits = parse_spec(best.compressor)[0].traits
        if measured is not None:
            said.append(f"{best.compressor}: {measured}.")
        if traits.strongly_biased:
            said.append(
                f"{best.compressor} is strongly biased: start with uncompressed steps (warmup_steps), keep the output layer at "
                'int8 (rules=[("head.weight", "int8")], with its name), and compare your own loss with a short uncompressed run.'
            )
        if traits.strongly_biased and job.optimizer != "sgd":
            said.append(
                "Under Adam what compression gets wrong goes into the second moment: gradcomp.optim.OneBitAdam compresses "
                "momentum instead."
            )
        if made.safe is not None and made.safe is not best:
            slower = made.safe.step_seconds / best.step_seconds
            said.append(
                f"Without that risk: {SCHEMES[made.safe.scheme].title} with {made.safe.compressor}, "
                f"{duration(made.safe.step_seconds)} a step ({slower:.2f} times as long). --safe recommends only such."
            )
    if job.profile is None:
        said.append(
            "Link efficiency, latency and codec times are assumed. Measure yours: torchrun ... -m gradcomp probe, then "
            "gradcomp plan --profile."
        )
        if job.device == "cuda":
            said.append(
                "Codec times on GPUs are computed from memory traffic; gradcomp's CUDA kernels were never timed."
            )
    if job.compute_seconds is None and (job.profile is None or job.profile.compute is None):
        said.append(
            f"Compute time is 6 (with checkpointing 8) FLOP per parameter and token at {job.tflops:g} TFLOP/s per GPU; give "
            "--compute-seconds if you know it."
        )
    return said
