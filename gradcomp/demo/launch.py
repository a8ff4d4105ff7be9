"""Ranks as processes: start them, hear from them, and leave none behind, whatever happens."""

from __future__ import annotations

import multiprocessing as mp
import os
import queue
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.context import SpawnProcess
from typing import Any

import torch
import torch.distributed as dist

from gradcomp.errors import ConfigError, GradcompError

Worker = Callable[..., None]
"""Called as ``worker(rank, ranks, emit, *args)``; defined at module level, because processes are spawned."""

_GROUP_TIMEOUT = 120.0  # seconds; kernels may be compiled while others wait
_PATIENCE = 3.0  # seconds for the error that caused another rank's error


def run_ranks(worker: Worker, ranks: int, args: tuple[Any, ...], on_message: Callable[[str, Any], None]) -> None:
    """Run ``worker`` in ``ranks`` processes with a gloo group on the loopback interface, until all have finished.

    ``on_message(kind, content)`` is called here, in order, for everything that a worker emits.

    Raises:
        ConfigError: a rank raised it. GradcompError: a rank failed otherwise. All others are ended first; so they are on
            KeyboardInterrupt.
    """
    context = mp.get_context("spawn")
    messages: Any = context.Queue()
    processes: list[SpawnProcess] = []
    with tempfile.TemporaryDirectory(prefix="gradcomp-") as folder:
        rendezvous = os.path.join(folder, "rendezvous")
        try:
            # Ctrl-C goes to every process of the terminal. The ranks inherit the blocked signal, from their first
            # instruction on, and leave it to this process to end them.
            with _sigint_blocked(), _environment(ranks):
                for rank in range(ranks):
                    process = context.Process(
                        target=_entry, args=(rank, ranks, rendezvous, messages, worker, args), daemon=True
                    )
                    process.start()
                    processes.append(process)
            _listen(messages, processes, on_message)
        finally:
            with _sigint_blocked():
                _end(processes)
                messages.close()


def _listen(messages: Any, processes: list[SpawnProcess], on_message: Callable[[str, Any], None]) -> None:
    running = set(range(len(processes)))
    failures: list[tuple[int, str, str]] = []
    deadline = float("inf")
    while running and time.monotonic() < deadline:
        try:
            rank, kind, content = messages.get(timeout=0.2)
        except queue.Empty:
            for rank in sorted(running):
                if processes[rank].exitcode is not None and messages.empty():
                    failures.append((rank, "Ended", f"ended with exit code {processes[rank].exitcode}"))
                    running.discard(rank)
        else:
            if kind == "failed":
                failures.append((rank, *content))
            if kind in ("failed", "finished"):
                running.discard(rank)
            else:
                on_message(kind, content)
        if failures:
            deadline = min(deadline, time.monotonic() + _PATIENCE)
    if failures:
        _raise(failures)


def _raise(failures: list[tuple[int, str, str]]) -> None:
    """Report the cause: a rank that lost its neighbour says less than the neighbour."""

    def remoteness(failure: tuple[int, str, str]) -> int:
        _, kind, text = failure
        if kind == "Ended":
            return 1
        return 2 if kind == "ExchangeError" or "gloo" in text else 0

    rank, kind, text = min(failures, key=remoteness)
    if kind == "ConfigError":
        raise ConfigError(text)
    raise GradcompError(f"rank {rank} {text}" if kind == "Ended" else f"rank {rank} failed: {kind}: {text}")


def _end(processes: list[SpawnProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.terminate()
    deadline = time.monotonic() + 2
    for process in processes:
        process.join(timeout=max(0.1, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Hold Ctrl-C back: it arrives at the end of the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _environment(ranks: int) -> Iterator[None]:
    """What must be set before a rank imports torch."""
    wanted = {
        "OMP_NUM_THREADS": str(threads_per_rank(ranks)),
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_rank(ranks: int) -> int:
    """Threads that torch uses in each rank, so that together they do not exceed the cores."""
    return max(1, cores() // ranks)


def _entry(rank: int, ranks: int, rendezvous: str, messages: Any, worker: Worker, args: tuple[Any, ...]) -> None:
    """The life of a rank."""
    threading.Thread(target=_die_with_parent, daemon=True).start()

    def emit(kind: str, content: Any) -> None:
        messages.put((rank, kind, content))

    try:
        torch.set_num_threads(threads_per_rank(ranks))
        dist.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=_GROUP_TIMEOUT),
        )
        worker(rank, ranks, emit, *args)
        emit("finished", None)
    except BaseException as error:
        if os.environ.get("GRADCOMP_TRACEBACK"):
            traceback.print_exc()
        emit("failed", (type(error).__name__, str(error)))
    messages.close()
    messages.join_thread()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads sometimes abort at a normal exit, after all work is done


def _die_with_parent() -> None:
    """A parent that was killed cannot end its ranks."""
    parent = mp.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
