"""How long a step takes: a small event model, in which the library's own schedules run on a virtual clock.

The host computes backward and hands over each bucket when its gradients are ready; :mod:`gradcomp.schedule` decides, as in a
real step, when a collective is issued and when it is waited for. Collectives occupy the link one after another, encoding and
decoding occupy the host. What is left after all of that is the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gradcomp.collectives import Group, Wait
from gradcomp.planner.payload import Bucket, Request
from gradcomp.planner.profile import Codec, Network
from gradcomp.schedule import Inline, Pipeline, Schedule, Task, Timings, parse_schedule


@dataclass(slots=True)
class _Clock:
    now: float = 0.0
    link_free: float = 0.0
    link_busy: float = 0.0
    codec: float = 0.0

    def transfer(self, seconds: float) -> float:
        """Occupy the link as soon as it is free; returns when it is done."""
        self.link_free = max(self.link_free, self.now) + seconds
        self.link_busy += seconds
        return self.link_free

    def work(self, seconds: float) -> None:
        """Occupy the host with coding."""
        self.now += seconds
        self.codec += seconds


class _VirtualPending:
    def __init__(self, clock: _Clock, end: float) -> None:
        self._clock, self._end = clock, end

    def wait(self) -> None:
        self._clock.now = max(self._clock.now, self._end)

    def done(self) -> bool:
        return self._end <= self._clock.now


class _VirtualGroup(Group):
    """What a schedule issues its collectives on."""

    def __init__(self, clock: _Clock, network: Network, ranks: int) -> None:
        self.rank, self.world, self.backend = 0, ranks, "virtual"
        self._clock, self._network = clock, network

    def start(self, request: Any) -> Any:
        # measured curves are of all pieces of a phase together; on an assumed link each has its latency
        part = request.part if self._network.curves is not None else 1.0
        seconds = part * self._network.seconds(request.kind, request.nbytes / part, self.world)
        end = self._clock.transfer(seconds)
        self._clock.now += self._network.issue(request.kind)
        return _VirtualPending(self._clock, end)


@dataclass(frozen=True, slots=True)
class Step:
    """Seconds of one optimizer step: ``total``, and of it ``compute``; ``link``: the link is busy; ``codec``: coding;
    ``exposed``: neither computing nor coding, so waiting for the link."""

    total: float
    compute: float
    link: float
    codec: float

    @property
    def exposed(self) -> float:
        """Communication that nothing hides."""
        return max(0.0, self.total - self.compute - self.codec)

    def __add__(self, other: Step) -> Step:
        return Step(
            self.total + other.total, self.compute + other.compute, self.link + other.link, self.codec + other.codec
        )


NOTHING = Step(0.0, 0.0, 0.0, 0.0)


def compute_only(seconds: float) -> Step:
    """Time in which only the device works."""
    return Step(seconds, seconds, 0.0, 0.0)


def schedule_of(text: str, backend: str) -> str:
    """``auto`` as the library resolves it: pipelined on gloo, inline elsewhere.

    Raises:
        ConfigError: not a schedule, or ``thread``, which the model does not cover.
    """
    from gradcomp.compressors.base import require

    name, depth = parse_schedule(text)
    require(name != "thread", "schedule", text, "auto, inline, pipeline or pipeline:depth=D (thread is not modelled)")
    if name == "auto":
        name = "pipeline" if backend == "gloo" else "inline"
    return f"pipeline:depth={depth}" if name == "pipeline" else "inline"


def _make_schedule(text: str, group: Group) -> Schedule:
    name, depth = parse_schedule(text)
    return Pipeline(group, depth) if name == "pipeline" else Inline(group)


def _exchange(bucket: Bucket, codec: Codec | None, clock: _Clock) -> Iterator[Request | Wait]:
    """The bucket's requests with the coding before each; the pieces of a phase take equal parts of it."""
    before: list[Request] = []
    for index, phase in enumerate(bucket.phases):
        for piece, request in enumerate(phase):
            # the last piece waits for whatever the phase before has left
            for earlier in before[piece:] if request is phase[-1] else before[piece : piece + 1]:
                if earlier.ahead:
                    yield _wait(earlier)
            if codec is not None:
                clock.work(codec.seconds(bucket.numel, index) / len(phase))
            yield request
        before = phase
    for request in before:
        if request.ahead:
            yield _wait(request)
        if codec is not None:
            clock.work(codec.seconds(bucket.numel, len(bucket.phases)) / len(before))


def _wait(request: Any) -> Wait:
    return Wait(request)


def backward(
    buckets: Sequence[Bucket],
    seconds: float,
    network: Network,
    codec: Codec | None,
    ranks: int,
    schedule: str = "pipeline:depth=1",
    overlap: bool = True,
) -> Step:
    """Backward and the exchange of its gradients.

    Args:
        buckets: in the order in which they become ready; each takes a part of ``seconds`` in proportion to its elements.
        seconds: backward alone.
        codec: of the compressor; None: the trainer's own all-reduce.
        schedule: ``inline`` or ``pipeline:depth=D``.
        overlap: whether buckets are handed over during backward; otherwise all of them after it.
    """
    clock = _Clock()
    group = _VirtualGroup(clock, network, ranks)
    runner = _make_schedule(schedule, group)
    total = sum(bucket.numel for bucket in buckets) or 1.0
    if not overlap:
        clock.now = seconds
    for index, bucket in enumerate(buckets):
        if overlap:
            clock.now += seconds * bucket.numel / total
        exchange: Any = _exchange(bucket, codec, clock)
        runner.submit(Task(exchange, lambda: None, "planned", Timings()), index == len(buckets) - 1)
    return Step(max(clock.now, clock.link_free), seconds, clock.link_busy, clock.codec)


def sharded_micro_step(
    units: Sequence[tuple[float, Bucket]],
    forward_seconds: float,
    backward_seconds: float,
    weight_bytes: float,
    network: Network,
    codec: Codec | None,
    ranks: int,
    gathers: int = 2,
    overlap: bool = True,
    gather_codec: Codec | None = None,
) -> Step:
    """One micro-step of ZeRO-3 or FSDP: weights are gathered unit by unit, gradients reduce-scattered.

    The gather of a unit is issued when the one before it starts to compute (prefetch of one); a reduce-scatter when its unit
    has been computed. Without ``overlap`` (gloo) everything happens in turn.

    Args:
        units: (parameters, exchange of the gradients) in the order of forward.
        forward_seconds, backward_seconds: of all units, in proportion to their parameters.
        weight_bytes: per parameter, when gathered.
        gathers: 2, or 1 if the weights stay after forward.
        gather_codec: of the weights: its last segment, decoding, is the work of every gather.
    """
    clock = _Clock()
    total = sum(numel for numel, _ in units) or 1.0

    def gather(numel: float) -> float:
        seconds = network.seconds("AllGather", weight_bytes * numel * (ranks - 1) / ranks, ranks)
        if not overlap:
            clock.link_free = max(clock.link_free, clock.now)
        return clock.transfer(seconds)

    def run(order: Sequence[tuple[float, Bucket]], seconds: float, gathering: bool, reducing: bool) -> None:
        ready = gather(order[0][0]) if gathering else clock.now
        for index, (numel, bucket) in enumerate(order):
            clock.now = max(clock.now, ready)
            if gathering and gather_codec is not None:
                clock.work(gather_codec.seconds(numel, len(gather_codec.segments) - 1))
            following = order[index + 1][0] if index + 1 < len(order) and gathering else None
            if overlap and following is not None:
                ready = gather(following)  # while this unit computes
            clock.now += seconds * numel / total
            if reducing:
                reduce(bucket)
            if not overlap and following is not None:
                ready = gather(following)

    def reduce(bucket: Bucket) -> None:
        for index, request in enumerate(bucket.requests):
            if codec is not None:
                clock.work(codec.seconds(bucket.numel, index))
            end = clock.transfer(network.seconds(request.kind, request.nbytes, ranks))
            if codec is not None or not overlap:  # a codec must wait for what it decodes
                clock.now = max(clock.now, end)
        if codec is not None:
            clock.work(codec.seconds(bucket.numel, len(bucket.requests)))

    run(units, forward_seconds, True, False)
    run(list(reversed(units)), backward_seconds, gathers > 1, True)
    return Step(max(clock.now, clock.link_free), forward_seconds + backward_seconds, clock.link_busy, clock.codec)
