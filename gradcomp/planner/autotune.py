"""Let a running job choose its compressor: measure the first steps, predict all candidates, set the best.

    handle = gradcomp.register(ddp, "none")
    tuner = gradcomp.planner.Autotune(handle)
    for x, y in loader:
        ...
        optimizer.step()
        tuner.step()        # on all ranks, after every step; costs nothing once it has decided

The same model as ``gradcomp plan``: the job's own buckets, its own link and codecs. All ranks share their measurements before
they decide, so they decide alike, and ``handle.set()`` checks that they did.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from gradcomp.bucket import Parameter, ParameterTable
from gradcomp.compressors.base import require
from gradcomp.errors import UnsupportedError
from gradcomp.planner import payload, timing
from gradcomp.planner.decide import MARGIN, risk
from gradcomp.planner.predict import duration
from gradcomp.planner.probe import measure_codec, measure_collectives
from gradcomp.planner.profile import Codec, Network
from gradcomp.registration import Handle
from gradcomp.registry import format_spec
from gradcomp.rules import Rule, choose

CANDIDATES = ("none", "fp16", "int8", "int4", "powersgd", "onebit", "topk")
_LARGEST = 4e6
"""Bytes of the largest message by which the link is measured: enough for its bandwidth, little enough for a pause of seconds."""
_WARM = 3
"""First steps that are not counted: buckets are rebuilt, kernels are compiled."""
_log = logging.getLogger("gradcomp")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A compressor and the rules that give groups of parameters another one; ``step_seconds``: predicted."""

    spec: str
    rules: tuple[Rule, ...]
    step_seconds: float

    def __str__(self) -> str:
        groups = "".join(f", {rule.name}: {rule.spec}" for rule in self.rules)
        return f"{self.spec}{groups}"


@dataclass(frozen=True, slots=True)
class Decision:
    """What was set, why, and what was predicted of all candidates, fastest first."""

    chosen: Candidate
    candidates: tuple[Candidate, ...]
    measured_seconds: float
    compute_seconds: float
    reason: str

    def __str__(self) -> str:
        return self.reason


class Autotune:
    """Chooses once, after ``steps`` measured steps.

    Args:
        handle: of a trainer that averages whole gradients (DDP, ZeRO-0 to 2).
        candidates: specs to choose from; ``none`` is always among them.
        steps: to measure, after three that do not count.
        safe: only compressors that cost no accuracy as measured (none, casts, int8). False allows all candidates.
        largest: bytes of the largest message by which the link is measured.

    Raises:
        ConfigError: a bad option. UnsupportedError: the trainer reduce-scatters gradients.
    """

    def __init__(
        self, handle: Handle, *, candidates: Sequence[str] = CANDIDATES, steps: int = 10, safe: bool = True,
        largest: float = _LARGEST,
    ) -> None:  # fmt: skip
        require(isinstance(steps, int) and steps >= 3, "steps", steps, "a whole number of at least 3")
        if any(p.chunk is not None for p in handle.parameters):
            raise UnsupportedError(
                "autotune works where whole gradients are averaged (DDP, ZeRO-0 to 2), not where they are reduce-scattered: "
                "use gradcomp plan"
            )
        specs = [format_spec(spec) for spec in ("none", *candidates)]
        self._specs = [spec for spec in dict.fromkeys(specs) if not safe or risk(spec) <= 2]
        self._safe, self._largest = safe, largest
        self.handle, self._wanted = handle, _WARM + steps
        self._times: list[tuple[float, float, float]] = []
        self._before: tuple[float, float, float] | None = None
        self.decision: Decision | None = None

    def step(self) -> Decision | None:
        """Call it after every optimizer step, on all ranks. Returns the decision in the step in which it is made.

        The deciding call is collective and takes some seconds: it measures link and codecs.
        """
        if self.decision is not None:
            return None
        stats = self.handle.stats()
        coding = stats.encode_seconds + stats.decode_seconds
        now = time.perf_counter(), stats.exchange_seconds, coding
        if self._before is not None:
            wall, waiting, codec = (new - old for new, old in zip(now, self._before, strict=True))
            self._times.append((wall, waiting, codec))
        self._before = now
        if len(self._times) < self._wanted:
            return None
        if self.handle.group.world == 1:
            only = Candidate("none", (), self._times[-1][0])
            self.decision = Decision(only, (only,), only.step_seconds, only.step_seconds, "One rank exchanges nothing.")
            return self.decision
        self.decision = self._decide()
        chosen = self.decision.chosen
        self.handle.set(chosen.spec, rules=(*self.handle.rules, *chosen.rules))
        if self.handle.group.rank == 0:
            _log.info("autotune: %s", self.decision.reason)
        return self.decision

    # ---------------------------------------------------------------- the decision
    def _decide(self) -> Decision:
        group, parameters = self.handle.group, self.handle.parameters
        medians = [statistics.median(column) for column in zip(*self._times[_WARM:], strict=True)]
        wall, waiting, coding = (
            max(column) if i == 0 else min(column)
            for i, column in enumerate(zip(*group.gather_object(medians, "autotune"), strict=True))
        )
        device = torch.device("cuda", torch.cuda.current_device()) if group.backend == "nccl" else torch.device("cpu")
        kinds = ("AllReduce", "AllToAll", "AllGather")
        curves = measure_collectives(group, device, self._largest, _silent, kinds)
        network = Network(
            gigabits=8e-9 / curves["AllReduce"].per_byte, efficiency=1.0, latency=0.0, curves=curves,
            measured_ranks=group.world,
        )  # fmt: skip
        codecs = {spec: measure_codec(group, spec, device) for spec in self._specs if spec != "none"}
        current, schedule = self.handle.stats().spec, self.handle.stats().schedule
        compute = wall - waiting - coding
        if (
            group.backend != "gloo"
        ):  # there waiting does not block the host: find the compute time that explains the step
            compute = self._explaining(wall, current, network, codecs.get(current), schedule)

        found = []
        for spec in self._specs:
            for rules in self._assignments(spec, parameters):
                seconds = self._predict(spec, rules, network, codecs.get(spec), compute, schedule)
                found.append(Candidate(spec, rules, seconds))
        found.sort(key=lambda candidate: candidate.step_seconds)
        close = [c for c in found if c.step_seconds <= (1 + MARGIN) * found[0].step_seconds]
        chosen = min(close, key=lambda c: (risk(c.spec), c.step_seconds))
        return Decision(chosen, tuple(found), wall, compute, _reason(chosen, found, wall, compute, current, network))

    def _assignments(self, spec: str, parameters: Sequence[Parameter]) -> list[tuple[Rule, ...]]:
        """Ways to serve the groups of parameters: all by the compressor's defaults; embeddings that it leaves out by int8."""
        ways: list[tuple[Rule, ...]] = [()]
        choices = choose(parameters, spec, self.handle.rules)
        left = [p for p in parameters if p.embedding and choices[p.name].bypassed == "embedding"]
        if left and spec != "none":
            ways.append(tuple(Rule(name=_escape(p.name), spec="int8") for p in left))
        return ways

    def _buckets(self, spec: str, rules: tuple[Rule, ...]) -> list[payload.Bucket]:
        parameters, world = self.handle.parameters, self.handle.group.world
        table = ParameterTable(parameters)
        choices = choose(parameters, spec, (*self.handle.rules, *rules))
        by_name = {p.name: p for p in parameters}
        buckets = []
        for names in self.handle.buckets:
            members = [by_name[name] for name in names]
            if any(choices[p.name].spec != "none" for p in members):
                buckets.append(payload.run_dry(members, choices, table, world))
            else:
                buckets.append(payload.plain(members, world))
        return buckets

    def _predict(
        self, spec: str, rules: tuple[Rule, ...], network: Network, codec: Codec | None, compute: float, schedule: str
    ) -> float:
        buckets = self._buckets(spec, rules)
        text = "inline" if schedule == "thread" else schedule
        step = timing.backward(buckets, compute * 2 / 3, network, codec, self.handle.group.world, text)
        return compute / 3 + step.total

    def _explaining(self, wall: float, spec: str, network: Network, codec: Codec | None, schedule: str) -> float:
        low, high = 0.0, wall
        for _ in range(20):
            middle = (low + high) / 2
            longer = self._predict(spec, (), network, codec, middle, schedule) > wall
            low, high = (low, middle) if longer else (middle, high)
        return low


def _reason(
    chosen: Candidate, found: Sequence[Candidate], wall: float, compute: float, current: str, network: Network
) -> str:
    others = ", ".join(f"{c} {duration(c.step_seconds)}" for c in found if c is not chosen)
    none = next(c for c in found if c.spec == "none")
    link = f"link {network.gigabits:.3g} Gb/s as measured"
    measured = f"measured {duration(wall)} a step with {current}, of it {duration(compute)} computing; {link}"
    if chosen.spec == "none":
        gain = f"nothing would make the step shorter by more than {100 * MARGIN:.0f} %"
        return f"no compression: {gain} ({measured}; predicted: {others})"
    times = none.step_seconds / chosen.step_seconds
    return (
        f"{chosen}: predicted {duration(chosen.step_seconds)} a step, {times:.2f} times faster than uncompressed ({measured}; "
        f"others: {others})"
    )


def _escape(name: str) -> str:
    """A pattern that matches exactly this name."""
    pattern = "".join(f"[{c}]" if c in "*?[" else c for c in name)
    assert fnmatchcase(name, pattern)
    return pattern


def _silent(line: str) -> None:
    """Measurements of a running job are not printed."""
