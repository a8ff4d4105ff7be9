"""fp16 and bf16 casts: half the bytes of fp32.

``accumulate=fp32`` (default): two-phase, every owner sums its share in fp32 and casts the mean once more, so the sum does
not lose bits as N grows. ``accumulate=wire``: one all-reduce in the half type, divided by N before the cast; the ring adds
in the half type. 16 bits per element, no memory, rounding to nearest. Finite values beyond the type's range become the
largest finite value and are counted; inf and NaN stay what they are. (With ``accumulate=wire`` the ring's sum of such values
may still overflow to inf, which all ranks see.)

[Micikevicius et al. 2018, arXiv 1710.03740, on fp16's range; torch's fp16_compress_hook is accumulate=wire unclamped]
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from gradcomp import wire
from gradcomp.bucket import Runs
from gradcomp.collectives import AllGather, AllReduce, AllToAll, Wait
from gradcomp.compressors.base import Compressor, Exchange, Part, Traits, require
from gradcomp.errors import UnsupportedError


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp16Config:
    """``accumulate``: fp32 (owners sum in fp32) or wire (the all-reduce sums in fp16)."""

    accumulate: Literal["fp32", "wire"] = "fp32"

    def __post_init__(self) -> None:
        """Check ranges."""
        require(self.accumulate in ("fp32", "wire"), "accumulate", self.accumulate, "'fp32' or 'wire'")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bf16Config:
    """As :class:`Fp16Config`, in bf16."""

    accumulate: Literal["fp32", "wire"] = "fp32"

    def __post_init__(self) -> None:
        """Check ranges."""
        require(self.accumulate in ("fp32", "wire"), "accumulate", self.accumulate, "'fp32' or 'wire'")


@dataclass(slots=True)
class _Payload:
    """Elements ``start`` to ``stop`` of the bucket, ``share`` of them for each rank, and the buffers they travel in."""

    start: int
    stop: int
    share: int
    send: Tensor
    recv: Tensor
    mine: Tensor

    def shares(self, flat: Tensor, halves: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each rank's share of ``flat`` [n], and its place in ``halves`` [W, share]."""
        for rank, row in enumerate(halves):
            share = flat[self.start : self.stop][rank * self.share : (rank + 1) * self.share]
            if share.numel():
                yield share, row[: share.numel()]


class Cast(Compressor):
    """The algorithm for both types. A large bucket of few travels in pieces, as in :class:`TwoPhase`."""

    dtype: ClassVar[torch.dtype]

    def __init__(self, config: Any, part: Part) -> None:
        super().__init__(config, part)
        if part.row is not None:
            self._init_scatter(part)
            return
        self.runs = Runs(part.slots, part.device)
        n = self.runs.numel
        # where the slots are not one contiguous run, they are gathered here first
        self.compact = None if self.runs.view(part.flat) is not None else part.zeros(n)
        self.in_wire_type = config.accumulate == "wire"
        if self.in_wire_type:
            self.half = part.zeros(n, self.dtype)
            return
        count = part.pieces(16)
        # multiples of the alignment, so that every rank's share of a piece is aligned as the bucket is
        bounds = [wire.align(i * n // count) for i in range(count)] + [n]
        self.payloads = [self._payload(start, stop) for start, stop in itertools.pairwise(bounds)]

    def _payload(self, start: int, stop: int) -> _Payload:
        share = wire.align(-(-(stop - start) // self.part.world))
        size = wire.BODY + 2 * share
        send, recv = (self.part.zeros(self.part.world * size, wire.BYTE) for _ in range(2))
        return _Payload(start, stop, share, send, recv, self.part.zeros(size, wire.BYTE))

    def _init_scatter(self, part: Part) -> None:
        self.rows = part.row_runs(part.slots)
        self.share = wire.align(self.rows.share)
        self.size = wire.BODY + 2 * self.share
        self.send, self.recv = (part.zeros(part.world * self.size, wire.BYTE) for _ in range(2))
        self.compact = part.zeros(part.world * self.share)

    def _halves(self, shards: Tensor) -> Tensor:
        """The elements of ``shards`` uint8 [rows, S] in the half type, [rows, share]."""
        return shards[:, wire.BODY :].view(self.dtype)

    def reduce(self) -> Exchange:
        """See :meth:`Compressor.reduce`."""
        part, ops = self.part, self.part.ops
        flat = self.runs.view(part.flat)
        if flat is None:
            assert self.compact is not None
            flat = self.compact
            self.runs.gather(part.flat, flat)

        if self.in_wire_type:
            ops.cast_encode(flat, self.half, 1.0 / (part.scale * part.world), part.finite, part.saturated)
            yield AllReduce(self.half, final=True)
            part.ok = bool(torch.isfinite(self.half).all())
            ops.cast_decode(self.half, flat, part.scale)
        else:
            yield from self._two_phases(flat)

        if self.compact is not None:
            self.runs.scatter(flat, part.flat)

    def _two_phases(self, flat: Tensor) -> Exchange:
        part, ops = self.part, self.part.ops
        outgoing, incoming = [], []
        for payload in self.payloads:
            send = payload.send.view(part.world, -1)
            for source, halves in payload.shares(flat, self._halves(send)):
                ops.cast_encode(source, halves, 1.0 / part.scale, part.finite, part.saturated)
            wire.write_header(send, part.header, part.all_finite())
            outgoing.append(AllToAll(payload.send, payload.recv, ahead=True))
            yield outgoing[-1]

        finite = True
        for payload, request in zip(self.payloads, outgoing, strict=True):
            yield Wait(request)
            recv, mine = payload.recv.view(part.world, -1), payload.mine.view(1, -1)
            finite &= wire.check_headers(recv, part.header)
            ops.cast_mean(self._halves(recv), self._halves(mine)[0])
            wire.write_header(mine, part.header, finite)
            incoming.append(AllGather(payload.mine, payload.send, final=payload is self.payloads[-1], ahead=True))
            yield incoming[-1]

        for payload, gathered in zip(self.payloads, incoming, strict=True):
            yield Wait(gathered)
            send = payload.send.view(part.world, -1)
            finite &= wire.check_headers(send, part.header)
            for target, halves in payload.shares(flat, self._halves(send)):
                ops.cast_decode(halves, target, part.scale)
        part.ok = finite  # inf and NaN have travelled as they are

    def reduce_scatter(self) -> Exchange:
        """See :meth:`Compressor.reduce_scatter`. The mean stays in fp32: it is cast once only."""
        part, ops, shard = self.part, self.part.ops, self.part.shard
        assert self.compact is not None
        assert shard is not None
        compact = self.compact.view(part.world, -1)
        send, recv = (buffer.view(-1, self.size) for buffer in (self.send, self.recv))
        self.rows.gather(part.flat, compact)
        for values, halves in zip(compact, self._halves(send), strict=True):
            ops.cast_encode(values, halves, 1.0 / part.scale, part.finite, part.saturated)
        wire.write_header(send, part.header, part.all_finite())
        yield AllToAll(self.send, self.recv, final=True)
        if not part.agree(wire.check_headers(recv, part.header)):
            return
        total, *others = self._halves(recv)
        mean = compact[0].copy_(total)
        for other in others:
            mean.add_(other)
        self.rows.put(mean.mul_(part.scale / part.world), shard)

    @classmethod
    def check_scatter(cls, config: Any) -> None:
        """See :meth:`Compressor.check_scatter`."""
        if config.accumulate == "wire":
            raise UnsupportedError(
                f"{cls.name}:accumulate=wire does not fit a reduce-scatter; allowed is accumulate=fp32, of the same size"
            )


def _traits(summary: str) -> Traits:
    return Traits(
        summary=summary,
        reference="arXiv 1710.03740",
        collectives="all-to-all + all-gather",
        bits=16,
        memory=0,
        linear=True,
        biased=False,
        scatters=True,
    )


class Fp16(Cast):
    """See the module's docstring."""

    name = "fp16"
    Config = Fp16Config
    dtype = torch.float16
    traits = _traits("half precision, fp32 sums, saturating")


class Bf16(Cast):
    """See the module's docstring."""

    name = "bf16"
    Config = Bf16Config
    dtype = torch.bfloat16
    traits = _traits("bfloat16, fp32 sums")
