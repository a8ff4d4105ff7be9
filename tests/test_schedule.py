"""Schedules: the order on the wire depends on the order of submission alone, and the last bucket finishes everything."""

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradcomp import ConfigError, GradcompError
from gradcomp.collectives import AllReduce, Collective, Wait
from gradcomp.schedule import Exchange, Inline, Pipeline, Task, Thread, Timings, make_schedule


class FakePending:
    def __init__(self, group: "FakeGroup", request: Collective) -> None:
        self.group, self.request = group, request

    def wait(self) -> None:
        self.group.log.append(("wait", int(self.request.tensor[0])))

    def done(self) -> bool:
        return next(self.group.luck)


class FakeGroup:
    """Records what is issued; ``luck`` decides which collectives look finished early."""

    backend, world, rank = "gloo", 2, 0

    def __init__(self, luck: Iterator[bool]) -> None:
        self.log: list[tuple[str, int]] = []
        self.luck = luck

    def start(self, request: Collective) -> FakePending:
        self.log.append(("issue", int(request.tensor[0])))
        return FakePending(self, request)

    def duplicate(self) -> "FakeGroup":
        return self


def exchange(bucket: int, phases: int) -> Exchange:
    for phase in range(phases):
        yield AllReduce(torch.tensor([10 * bucket + phase]), final=phase == phases - 1)


def in_pieces(bucket: int, pieces: int) -> Exchange:
    """Two phases; the pieces of a phase are under way at the same time."""
    first = [AllReduce(torch.tensor([10 * bucket + piece]), ahead=True) for piece in range(pieces)]
    second = [AllReduce(torch.tensor([10 * bucket + 5 + piece]), ahead=True) for piece in range(pieces)]
    yield from first
    for before, after in zip(first, second, strict=True):
        yield Wait(before)
        after.final = after is second[-1]
        yield after
    for request in second:
        yield Wait(request)


def drive(
    name: str, phases: list[int], luck: list[bool], kind: Callable[[int, int], Exchange] = exchange
) -> tuple[list[int], list[int], FakeGroup]:
    def endless() -> Iterator[bool]:
        while True:
            yield from luck or [False]

    group = FakeGroup(endless())
    schedule = make_schedule(name, group)  # type: ignore[arg-type]
    finished: list[int] = []
    for bucket, count in enumerate(phases):
        task = Task(kind(bucket, count), lambda b=bucket: finished.append(b), "t", Timings())
        schedule.submit(task, last=bucket == len(phases) - 1)
    schedule.close()
    return [what for kind, what in group.log if kind == "issue"], finished, group


@given(
    name=st.sampled_from(["inline", "pipeline:depth=1", "pipeline:depth=3", "thread"]),
    phases=st.lists(st.integers(0, 3), min_size=1, max_size=8),
    luck=st.lists(st.booleans(), max_size=6),
)
def test_order_is_the_same_whatever_finishes_early(name: str, phases: list[int], luck: list[bool]) -> None:
    issued, finished, _ = drive(name, phases, luck)
    assert issued == drive(name, phases, [])[0]
    assert sorted(issued) == [10 * b + p for b, count in enumerate(phases) for p in range(count)]
    assert sorted(finished) == list(range(len(phases)))


@given(
    name=st.sampled_from(["inline", "pipeline:depth=1", "pipeline:depth=3", "thread"]),
    pieces=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    luck=st.lists(st.booleans(), max_size=6),
)
def test_the_same_with_pieces_and_each_is_waited_for_once(name: str, pieces: list[int], luck: list[bool]) -> None:
    issued, finished, group = drive(name, pieces, luck, in_pieces)
    assert issued == drive(name, pieces, [], in_pieces)[0]
    assert sorted(issued) == sorted(
        10 * b + 5 * phase + p for b, n in enumerate(pieces) for phase in (0, 1) for p in range(n)
    )
    assert sorted(what for kind, what in group.log if kind == "wait") == sorted(issued)
    assert sorted(finished) == list(range(len(pieces)))


def test_pieces_of_a_phase_are_issued_before_the_first_is_waited_for() -> None:
    issued, _, group = drive("pipeline:depth=1", [2, 2], [], in_pieces)
    assert issued == [0, 1, 10, 11, 5, 6, 15, 16]
    assert group.log[:6] == [("issue", 0), ("issue", 1), ("issue", 10), ("issue", 11), ("wait", 0), ("issue", 5)]
    assert drive("inline", [2, 2], [], in_pieces)[0] == [0, 1, 5, 6, 10, 11, 15, 16]


def test_inline_and_thread_take_buckets_one_by_one() -> None:
    for name in ("inline", "thread"):
        assert drive(name, [2, 1, 3], [])[0] == [0, 1, 10, 20, 21, 22]


def test_pipeline_overlaps_the_first_phase_of_younger_buckets() -> None:
    assert drive("pipeline:depth=1", [2, 2, 2], [])[0] == [0, 10, 1, 20, 11, 21]
    assert drive("pipeline:depth=2", [2, 2, 2], [])[0] == [0, 10, 20, 1, 11, 21]


def test_pipeline_does_not_wait_for_a_final_collective_before_the_end() -> None:
    _, _, group = drive("pipeline:depth=1", [1, 1, 1], [])
    assert group.log == [("issue", 0), ("issue", 10), ("issue", 20), ("wait", 0), ("wait", 10), ("wait", 20)]


def test_a_collective_after_a_final_one_is_a_bug_that_is_seen() -> None:
    def wrong() -> Exchange:
        yield AllReduce(torch.tensor([0]), final=True)
        yield AllReduce(torch.tensor([1]))

    schedule = Pipeline(FakeGroup(iter([True] * 9)))  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="final"):
        schedule.submit(Task(wrong(), lambda: None, "t", Timings()), last=True)


def test_a_profiler_sees_the_phases_by_name() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        drive("pipeline:depth=1", [2, 2], [])
    names = [event.name for event in profiler.events() if event.name.startswith("gradcomp::")]
    assert names.count("gradcomp::t::compress") == 4
    assert names.count("gradcomp::t::comm") == 4
    assert names.count("gradcomp::t::decompress") == 2


def test_an_error_in_the_worker_thread_keeps_its_type() -> None:
    def failing() -> Exchange:
        yield AllReduce(torch.tensor([0]))
        raise GradcompError("here")

    group = FakeGroup(iter([]))
    schedule = Thread(group)  # type: ignore[arg-type]
    with pytest.raises(GradcompError, match="here"):
        schedule.submit(Task(failing(), lambda: None, "t", Timings()), last=True)
    with pytest.raises(GradcompError, match="here"):
        schedule.submit(Task(exchange(1, 1), lambda: None, "t", Timings()), last=False)
    schedule.close()


@pytest.mark.parametrize(
    "bad", ["", "pipe", "pipeline:depth=0", "pipeline:depth=x", "pipeline:d=2", "thread:2", "inline:"]
)
def test_bad_schedules_are_named(bad: str) -> None:
    with pytest.raises(ConfigError, match="allowed are 'auto', 'inline'"):
        make_schedule(bad, FakeGroup(iter([])))  # type: ignore[arg-type]


def test_auto_picks_and_says_so() -> None:
    gloo, nccl = FakeGroup(iter([])), FakeGroup(iter([]))
    nccl.backend = "nccl"
    assert str(make_schedule("auto", gloo)) == "pipeline:depth=1"  # type: ignore[arg-type]
    assert isinstance(make_schedule("auto", nccl), Inline)  # type: ignore[arg-type]
