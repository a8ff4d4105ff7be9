"""The two-phase exchange that the blockwise codecs share (1-bit, int8, int4).

Every rank encodes its bucket, sends each owner its blocks (all-to-all), the owners average in fp32, encode the mean again
and send it to everybody (all-gather). Volume per rank: ``2 (N-1)/N`` times the encoded bucket, whatever N is.

With error feedback, per block of worker w and of the owner (server):

    v_w = g_w + e_w;            c_w = C(v_w);  e_w <- v_w - c_w
    m   = mean over w of c_w + s;  c = C(m);   s   <- m - c;     every rank applies c

In a reduce-scatter (ZeRO-3, FSDP2) the owner of a block is the rank whose shard it is in, and the exchange ends with the
owners' mean: half the volume, no second error, no server residual. The worker's residual is then the whole model on every
rank, which is what sharding was to avoid; so integrations turn error feedback off there unless it is asked for.

[Seide et al. 2014; Tang et al., 1-bit Adam, arXiv 2102.02888, section 4; Karimireddy et al. 2019, arXiv 1901.09847]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from gradcomp import wire
from gradcomp.bucket import Piece, owned_blocks, split_blocks
from gradcomp.collectives import AllGather, AllToAll, Wait
from gradcomp.compressors.base import Compressor, ExactSection, Exchange, Part
from gradcomp.kernels.ops import Blocks, ShardLayout
from gradcomp.memory import Buffer


@dataclass(slots=True)
class _Payload:
    """One piece of the bucket: its blocks, the buffers it travels in, and where its residuals begin."""

    blocks: Blocks
    layout: ShardLayout
    exact: ExactSection | None
    send: Tensor
    recv: Tensor
    mine: Tensor
    worker_at: int
    server_at: int

    def rows(self, buffer: Tensor) -> Tensor:
        """A payload as uint8 [W, S]."""
        return buffer.view(-1, self.layout.nbytes)


class TwoPhase(Compressor):
    """Configs have ``block`` (elements per scale), ``error_feedback`` and optionally ``stochastic``.

    A large bucket of few travels in pieces, so that encoding, the network, averaging and decoding overlap.
    """

    code_bits: ClassVar[int]

    def __init__(self, config: Any, part: Part) -> None:
        super().__init__(config, part)
        blocks, spans = part.blocks(config.block)
        self.stochastic = getattr(config, "stochastic", False)
        whole = part.row is None
        pieces = split_blocks(blocks, part.rank, part.pieces(self.code_bits))
        self.payloads = [self._payload(piece, ExactSection(part) if i == 0 else None) for i, piece in enumerate(pieces)]
        self.worker: Buffer | None = None
        self.server: Buffer | None = None
        if config.error_feedback:
            numel, block = blocks.count * config.block, config.block
            self.worker = part.memory.worker(spans, block, numel, part.device, with_server=whole)
            if whole:
                # a piece may have a place that this rank does not use: the next piece's first, or one past the last
                owned = max(piece.owned_first + piece.blocks.per_shard for piece in pieces)
                self.server = part.memory.server(spans, block, owned * block, part.device)
        if part.row is not None:
            self.owned, self.decoded = owned_blocks(blocks, part.rank, part.row), part.zeros(part.row)

    def _payload(self, piece: Piece, exact: ExactSection | None) -> _Payload:
        part, blocks = self.part, piece.blocks
        codes = wire.BODY + (exact.nbytes if exact is not None else 0)
        scales = codes + wire.align(blocks.per_shard * blocks.size * self.code_bits // 8)
        size = scales + wire.align(4 * blocks.per_shard)
        send, recv = (part.zeros(part.world * size, wire.BYTE) for _ in range(2))
        mine = part.zeros(size if part.row is None else 0, wire.BYTE)
        at = (piece.first * blocks.size, piece.owned_first * blocks.size)
        return _Payload(blocks, ShardLayout(size, codes, scales), exact, send, recv, mine, *at)

    @property
    def feeds_back(self) -> bool:
        """See :attr:`Compressor.feeds_back`."""
        return self.worker is not None

    def reduce(self) -> Exchange:
        """See :meth:`Compressor.reduce`."""
        part, ops = self.part, self.part.ops
        outgoing, incoming = [], []
        residuals, server_residuals = _read_write(self.worker), _read_write(self.server)
        for payload in self.payloads:
            self._encode(payload, residuals)
            outgoing.append(AllToAll(payload.send, payload.recv, ahead=True))
            yield outgoing[-1]

        finite = True
        for payload, request in zip(self.payloads, outgoing, strict=True):
            yield Wait(request)
            recv, mine = payload.rows(payload.recv), payload.rows(payload.mine)
            finite &= wire.check_headers(recv, part.header)
            if payload.exact is not None:
                payload.exact.average(recv, mine)
            owned = payload.blocks.per_shard * payload.blocks.size
            ops.block_server(
                payload.recv, payload.blocks, payload.layout, payload.mine, self.code_bits,
                *_slices(server_residuals, payload.server_at, owned), self._seed(1), part.finite,
            )  # fmt: skip
            wire.write_header(mine, part.header, finite and part.all_finite())
            # the all-to-all has completed, so its send buffer is free to receive the means
            incoming.append(AllGather(payload.mine, payload.send, final=payload is self.payloads[-1], ahead=True))
            yield incoming[-1]

        for payload, gathered in zip(self.payloads, incoming, strict=True):
            yield Wait(gathered)
            send = payload.rows(payload.send)
            finite &= wire.check_headers(send, part.header)
            ops.block_decode(payload.send, payload.blocks, payload.layout, part.flat, self.code_bits, part.scale)
            if payload.exact is not None:
                payload.exact.unpack(send)
        part.agree(finite)

    def reduce_scatter(self) -> Exchange:
        """See :meth:`Compressor.reduce_scatter`."""
        part, shard, payload = self.part, self.part.shard, self.payloads[0]
        assert shard is not None
        assert payload.exact is not None
        self._encode(payload, _read_write(self.worker))
        yield AllToAll(payload.send, payload.recv, final=True)
        recv = payload.rows(payload.recv)
        if not part.agree(wire.check_headers(recv, part.header)):
            return
        self.decoded.zero_()  # between the blocks; other exchanges may have used the memory
        for rank in range(part.world):
            # in rank order, and blocks never overlap: the first one need not find zeros
            target, gain = self.decoded if rank else shard, part.scale / part.world
            part.ops.block_decode(recv[rank], self.owned, payload.layout, target, self.code_bits, gain)
            if rank:
                shard.add_(self.decoded)
        payload.exact.average_to_shard(recv)

    def _encode(self, payload: _Payload, residuals: tuple[Any, Any]) -> None:
        """Fill ``payload.send`` uint8 [W * S]: header, riders, codes, scales."""
        part, blocks, send = self.part, payload.blocks, payload.rows(payload.send)
        if payload.exact is not None:
            payload.exact.pack(send)
        part.ops.block_encode(
            part.flat, blocks, payload.layout, payload.send, self.code_bits,
            *_slices(residuals, payload.worker_at, blocks.count * blocks.size), 1.0 / part.scale, self._seed(0),
            part.finite,
        )  # fmt: skip
        wire.write_header(send, part.header, part.all_finite())

    def _seed(self, phase: int) -> int | None:
        """Counter-based randomness: the same for the same step, rank and phase, in whatever bucket a block travels."""
        return wire.checksum(self.part.step, self.part.rank, phase) if self.stochastic else None


def _read_write(buffer: Buffer | None) -> tuple[Any, Any]:
    """A residual's old and new tensor, marked as written."""
    if buffer is None:
        return None, None
    return buffer.open()


def _slices(residuals: tuple[Any, Any], start: int, numel: int) -> tuple[Any, Any]:
    """A piece of a residual's old and new tensor."""
    old, new = residuals
    return (None, None) if old is None else (old[start : start + numel], new[start : start + numel])
