"""Schedules drive compressor generators: they alone decide when a collective is issued and when it is waited for.

All of them issue the collectives of all buckets in an order that depends only on the order of submission, so it is the
same on every rank; none issues a collective in a future's callback. With the last bucket of a step every exchange is
finished when :meth:`Schedule.submit` returns.

===================== ======================================================================================
``inline``            issue and wait, bucket after bucket: no overlap with backward; right everywhere
``pipeline:depth=D``  bucket k issues its first collective, then bucket k-D its next one; single remaining
                      collectives complete in the background. Default on gloo with D = 1
``thread``            a worker thread with its own process group drives the buckets one after another
===================== ======================================================================================
"""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from gradcomp.collectives import Collective, Group, Pending, Wait
from gradcomp.errors import ConfigError, GradcompError, MismatchError

Exchange = Generator[Collective | Wait, None, None]


@dataclass(slots=True)
class Timings:
    """Seconds of host time: up to the last collective (encoding and the owners' stage), blocked on collectives, after it."""

    encode: float = 0.0
    exchange: float = 0.0
    decode: float = 0.0


@dataclass(slots=True)
class Task:
    """One bucket's exchange. ``done`` is called once, when the exchange has finished.

    ``pending`` is what it waits for: the ``awaited``-th of the ``issued`` collectives. ``ending``: the last one is issued.
    """

    exchange: Exchange
    done: Callable[[], None]
    name: str
    timings: Timings
    pending: Pending | None = None
    awaited: int = 0
    issued: int = 0
    ending: bool = False
    age: int = 0
    number: int = 0
    _ahead: dict[int, tuple[int, Pending]] = field(default_factory=dict)

    def advance(self, group: Group) -> bool:
        """Run to where it must wait, issuing collectives on the way; returns False when the exchange has ended."""
        ending = self.ending
        begun = time.perf_counter()
        with _named(f"gradcomp::{self.name}::{'decompress' if ending else 'compress'}"):
            live = self._run(group)
        spent = time.perf_counter() - begun
        if ending:
            self.timings.decode += spent
        else:
            self.timings.encode += spent
        if not live:
            self.done()
        return live

    def _run(self, group: Group) -> bool:
        for request in self.exchange:
            if isinstance(request, Wait):
                self.awaited, self.pending = self._ahead.pop(id(request.request))
                return True
            if self.ending:
                raise AssertionError(f"{self.name} issued a collective after one that it called final")
            pending = group.start(request)
            self.issued += 1
            self.ending = request.final
            if not request.ahead:
                self.awaited, self.pending = self.issued, pending
                return True
            self._ahead[id(request)] = self.issued, pending
        return False

    def wait(self) -> None:
        """Wait for the collective in flight."""
        if self.pending is not None:
            begun = time.perf_counter()
            with _named(f"gradcomp::{self.name}::comm"):
                self.pending.wait()
            self.timings.exchange += time.perf_counter() - begun
            self.pending = None

    def run(self, group: Group) -> None:
        """Drive to the end, waiting for each collective."""
        while self.advance(group):
            self.wait()


def _named(what: str) -> AbstractContextManager[object]:
    """A range in the profiler's trace; without a profiler it would cost 10 us for nothing."""
    profiling: bool = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    return torch.profiler.record_function(what) if profiling else nullcontext()


class Schedule(ABC):
    """Drives the exchanges of one handle."""

    def __init__(self, group: Group) -> None:
        self.group = group

    @abstractmethod
    def submit(self, task: Task, last: bool) -> None:
        """Take the next bucket; with ``last`` (of the step) all buckets are finished on return."""

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups whose traffic belongs to this schedule."""
        return (self.group,)

    def close(self) -> None:
        """Release threads."""

    def abandon(self) -> None:
        """Forget what is in flight, after an error."""


class Inline(Schedule):
    """Issue and wait."""

    def __str__(self) -> str:
        return "inline"

    def submit(self, task: Task, last: bool) -> None:
        """See :meth:`Schedule.submit`."""
        task.run(self.group)


class Pipeline(Schedule):
    """Deterministic overlap: each submission lets the buckets that are ``depth`` or more older take one step."""

    def __init__(self, group: Group, depth: int = 1) -> None:
        super().__init__(group)
        self.depth = depth
        self._live: list[Task] = []
        self._submitted = 0
        self._disagreed: dict[int, MismatchError] = {}

    def __str__(self) -> str:
        return f"pipeline:depth={self.depth}"

    def submit(self, task: Task, last: bool) -> None:
        """See :meth:`Schedule.submit`."""
        for older in self._live:
            older.age += 1
        task.number = self._submitted = self._submitted + 1
        if task.advance(self.group):
            self._live.append(task)
        self._step([older for older in self._live if older.age >= self.depth])
        # No collective follows these, so when they are decoded cannot change the order on the wire.
        for older in [older for older in self._live if older.ending]:
            self._finish(older, only_if_done=True)
        while last and self._live:
            self._step(list(self._live))
            if all(task.ending for task in self._live):
                for task in list(self._live):
                    self._finish(task)
        if last and self._disagreed:
            raise self._disagreed[min(self._disagreed)]

    def _step(self, tasks: list[Task]) -> None:
        """Let each task wait for all that it has issued so far, and issue what follows from that."""
        for task in [task for task in tasks if not task.ending]:
            before = task.issued
            while task.awaited <= before:
                task.wait()
                if not task.advance(self.group):
                    self._live.remove(task)
                    break

    def _finish(self, task: Task, only_if_done: bool = False) -> None:
        while task.pending is None or not only_if_done or task.pending.done():
            task.wait()
            try:
                live = task.advance(self.group)
            except MismatchError as error:
                # Every rank finds it in this bucket, but not at the same submission: raised at once, it would leave the
                # ranks with different numbers of collectives issued. Kept until all are in step.
                self._disagreed[task.number] = error
                live = False
            if not live:
                self._live.remove(task)
                return

    def abandon(self) -> None:
        """See :meth:`Schedule.abandon`."""
        self._live.clear()
        self._disagreed.clear()


class Thread(Schedule):
    """A worker thread takes the buckets in order; its own process group keeps them apart from the main thread's."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._own = group.duplicate()
        self._queue: queue.SimpleQueue[Task | threading.Event | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._worker = threading.Thread(target=self._work, name="gradcomp", daemon=True)
        self._worker.start()

    def __str__(self) -> str:
        return "thread"

    @property
    def groups(self) -> tuple[Group, ...]:
        """See :attr:`Schedule.groups`."""
        return (self.group, self._own)

    def _work(self) -> None:
        with torch.no_grad():
            while (item := self._queue.get()) is not None:
                if isinstance(item, threading.Event):
                    item.set()
                elif self._error is None:
                    try:
                        item.run(self._own)
                    except BaseException as error:  # carried to the thread that calls backward(), with its type
                        self._error = error

    def submit(self, task: Task, last: bool) -> None:
        """See :meth:`Schedule.submit`."""
        if not self._worker.is_alive():
            raise GradcompError(
                "the handle was closed, so its thread cannot exchange this step; close() it after training"
            )
        self._queue.put(task)
        if last or self._error is not None:
            finished = threading.Event()
            self._queue.put(finished)
            finished.wait()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """See :meth:`Schedule.close`."""
        self._queue.put(None)
        self._worker.join()


def parse_schedule(spec: str) -> tuple[str, int]:
    """``auto``, ``inline``, ``thread``, ``pipeline`` or ``pipeline:depth=D`` as (name, depth).

    Raises:
        ConfigError: another value.
    """
    name, _, option = spec.partition(":")
    key, _, value = option.partition("=")
    if spec in ("auto", "inline", "thread", "pipeline"):
        return spec, 1
    if name == "pipeline" and key == "depth" and value.isdigit() and 1 <= int(value) <= 64:
        return name, int(value)
    raise ConfigError(f"schedule={spec!r}: allowed are 'auto', 'inline', 'pipeline', 'pipeline:depth=1..64', 'thread'")


def make_schedule(spec: str, group: Group) -> Schedule:
    """Build a schedule. Collective for ``thread``.

    ``auto`` is pipeline:depth=1 on gloo, and inline elsewhere (on NCCL waiting is stream-ordered, not blocking).
    """
    name, depth = parse_schedule(spec)
    if name == "auto":
        name = "pipeline" if group.backend == "gloo" and group.world > 1 else "inline"
    if name == "inline":
        return Inline(group)
    return Thread(group) if name == "thread" else Pipeline(group, depth)
