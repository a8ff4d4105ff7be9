"""Collectives as requests, and the only caller of ``torch.distributed``'s collectives.

A compressor yields requests (:class:`AllReduce`, :class:`AllToAll`, :class:`AllGather`, :class:`ReduceScatter`); a
schedule issues them through a :class:`Group`, which counts every byte that this rank puts on the network. Volumes per rank
(N ranks, M bytes in the send buffer): ring all-reduce ``2 (N-1)/N M``, all-to-all and reduce-scatter ``(N-1)/N M``,
all-gather ``(N-1) M``.

A request is complete when the compressor goes on, unless it is ``ahead``: then the compressor goes on at once, and yields
a :class:`Wait` for it before it uses the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradcomp.errors import ExchangeError, GradcompError, MismatchError


@dataclass(slots=True)
class AllReduce:
    """Sum ``tensor`` over the ranks, in place. ``final``: the compressor issues nothing after this request."""

    tensor: Tensor
    final: bool = False
    ahead: bool = False

    def wire_bytes(self, world: int) -> int:
        """Bytes that each rank sends."""
        values = self.tensor._values() if self.tensor.is_sparse else self.tensor
        return 2 * (world - 1) * values.numel() * values.element_size() // world


@dataclass(slots=True)
class AllToAll:
    """Row r of ``send`` (uint8 [W * S]) goes to rank r; row r of ``recv`` comes from rank r."""

    send: Tensor
    recv: Tensor
    final: bool = False
    ahead: bool = False

    def wire_bytes(self, world: int) -> int:
        """Bytes that each rank sends."""
        return (world - 1) * self.send.numel() // world


@dataclass(slots=True)
class AllGather:
    """``recv`` (uint8 [W * S]) becomes the concatenation of every rank's ``send`` (uint8 [S])."""

    send: Tensor
    recv: Tensor
    final: bool = False
    ahead: bool = False

    def wire_bytes(self, world: int) -> int:
        """Bytes that each rank sends."""
        return (world - 1) * self.send.numel()


@dataclass(slots=True)
class ReduceScatter:
    """``recv`` [L] becomes the sum over the ranks of row r of ``send`` [W * L], r being this rank."""

    send: Tensor
    recv: Tensor
    final: bool = False
    ahead: bool = False

    def wire_bytes(self, world: int) -> int:
        """Bytes that each rank sends."""
        return (world - 1) * self.send.numel() * self.send.element_size() // world


Collective = AllReduce | AllToAll | AllGather | ReduceScatter


@dataclass(slots=True)
class Wait:
    """Go on when ``request``, which was issued ahead, is complete. Each of those is waited for once."""

    request: Collective


class Pending:
    """An issued collective."""

    def __init__(self, work: dist.Work, what: str) -> None:
        self._work, self._what = work, what

    def wait(self) -> None:
        """Block until the result may be used (on NCCL: until the current stream is ordered behind it)."""
        try:
            self._work.wait()
        except RuntimeError as error:
            raise _exchange_error(self._what, error) from error

    def done(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return bool(self._work.is_completed())


def _exchange_error(what: str, error: Exception) -> ExchangeError:
    return ExchangeError(
        f"{what} failed: another rank died, raised an error, runs another compressor, or did not take part within the "
        f"process group's timeout. Look for the first error in the logs of the other ranks. ({error})"
    )


class Group:
    """A process group that issues requests and counts bytes."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.process_group = process_group
        self.rank = dist.get_rank(process_group)
        self.world = dist.get_world_size(process_group)
        self.backend = str(dist.get_backend(process_group))
        self.bytes_sent = 0
        self.calls = 0

    def start(self, request: Collective) -> Pending:
        """Issue ``request`` asynchronously. Every rank must start the same requests in the same order."""
        what = f"rank {self.rank} of {self.world}: {type(request).__name__}"
        self.bytes_sent += request.wire_bytes(self.world)
        self.calls += 1
        try:
            work: dist.Work | None
            if isinstance(request, AllReduce):
                work = dist.all_reduce(request.tensor, group=self.process_group, async_op=True)
            elif isinstance(request, AllToAll):
                work = dist.all_to_all_single(request.recv, request.send, group=self.process_group, async_op=True)
            elif isinstance(request, AllGather):
                work = _all_gather(request.recv, request.send, self.process_group)
            else:
                work = _reduce_scatter(request.recv, request.send, self.process_group)
        except RuntimeError as error:
            raise _exchange_error(what, error) from error
        assert work is not None  # None only outside the group, where nobody calls this
        return Pending(work, what)

    def run(self, request: Collective) -> None:
        """Issue and wait."""
        self.start(request).wait()

    def gather_object(self, value: Any, purpose: str) -> list[Any]:
        """Every rank's ``value`` (plain data), in rank order; for control only, never in a step. Collective."""
        values: list[Any] = [None] * self.world
        try:
            dist.all_gather_object(values, value, group=self.process_group)
        except RuntimeError as error:
            raise _exchange_error(f"rank {self.rank} of {self.world}: {purpose}", error) from error
        return values

    def agree(self, describe: Callable[[], str], purpose: str) -> None:
        """Check that ``describe`` returns the same text on all ranks. Collective.

        If it raises a GradcompError on some ranks, those raise it and the others a MismatchError: nobody waits for a rank
        that has already given up.

        Raises:
            MismatchError: the texts differ; the same message on every rank.
        """
        value, error = "", None
        try:
            value = describe()
        except GradcompError as raised:
            error = raised
        everyone = self.gather_object((value, None if error is None else str(error)), purpose)
        if error is not None:
            raise error
        refused = [f"rank {rank}: {said}" for rank, (_, said) in enumerate(everyone) if said is not None]
        if refused:
            raise MismatchError(f"{purpose}: refused on other ranks: " + "; ".join(refused))
        if len({text for text, _ in everyone}) > 1:
            said = "; ".join(f"rank {rank}: {text}" for rank, (text, _) in enumerate(everyone))
            raise MismatchError(f"{purpose}: all ranks must pass the same arguments, but got {said}")

    def duplicate(self) -> Group:
        """A new process group over the same ranks, so that another thread has its own order. Collective."""
        ranks = dist.get_process_group_ranks(self.process_group)
        timeout = self.process_group._get_backend(torch.device(self._device_type())).options._timeout
        return Group(dist.new_group(ranks, timeout=timeout, backend=self.backend, use_local_synchronization=True))

    def _device_type(self) -> str:
        return "cuda" if self.backend == "nccl" else "cpu"


def _find_all_gather(module: Any) -> Callable[..., Any]:
    """torch 2.13 renamed all_gather_into_tensor and warns about the old name; older releases have only that."""
    found: Callable[..., Any] = getattr(module, "all_gather_single", None) or module.all_gather_into_tensor
    return found


def _find_reduce_scatter(module: Any) -> Callable[..., Any]:
    """As :func:`_find_all_gather`, for reduce_scatter_tensor."""
    found: Callable[..., Any] = getattr(module, "reduce_scatter_single", None) or module.reduce_scatter_tensor
    return found


def _all_gather(recv: Tensor, send: Tensor, process_group: dist.ProcessGroup) -> dist.Work | None:
    work: dist.Work | None = _find_all_gather(dist)(recv, send, group=process_group, async_op=True)
    return work


def _reduce_scatter(recv: Tensor, send: Tensor, process_group: dist.ProcessGroup) -> dist.Work | None:
    work: dist.Work | None = _find_reduce_scatter(dist)(recv, send, group=process_group, async_op=True)
    return work
