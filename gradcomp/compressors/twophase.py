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

from typing import Any, ClassVar

from torch import Tensor

from gradcomp import wire
from gradcomp.bucket import owned_blocks
from gradcomp.collectives import AllGather, AllToAll
from gradcomp.compressors.base import Compressor, ExactSection, Exchange, Part
from gradcomp.kernels.ops import ShardLayout
from gradcomp.memory import Buffer


class TwoPhase(Compressor):
    """Configs have ``block`` (elements per scale), ``error_feedback`` and optionally ``stochastic``."""

    code_bits: ClassVar[int]

    def __init__(self, config: Any, part: Part) -> None:
        super().__init__(config, part)
        self.blocks, spans = part.blocks(config.block)
        self.exact = ExactSection(part)
        codes = wire.BODY + self.exact.nbytes
        scales = codes + wire.align(self.blocks.per_shard * config.block * self.code_bits // 8)
        self.layout = ShardLayout(scales + wire.align(4 * self.blocks.per_shard), codes, scales)
        size = self.layout.nbytes
        self.send, self.recv = (part.zeros(part.world * size, wire.BYTE) for _ in range(2))
        self.stochastic = getattr(config, "stochastic", False)
        self.worker: Buffer | None = None
        self.server: Buffer | None = None
        numel, owned = self.blocks.count * config.block, self.blocks.per_shard * config.block
        if config.error_feedback:
            whole = part.row is None
            self.worker = part.memory.worker(spans, config.block, numel, part.device, with_server=whole)
            if whole:
                self.server = part.memory.server(spans, config.block, owned, part.device)
        if part.row is None:
            self.mine = part.zeros(size, wire.BYTE)
        else:
            self.owned, self.decoded = owned_blocks(self.blocks, part.rank, part.row), part.zeros(part.row)

    @property
    def feeds_back(self) -> bool:
        """See :attr:`Compressor.feeds_back`."""
        return self.worker is not None

    def reduce(self) -> Exchange:
        """See :meth:`Compressor.reduce`."""
        part, ops = self.part, self.part.ops
        send, recv, mine = (buffer.view(-1, self.layout.nbytes) for buffer in (self.send, self.recv, self.mine))

        self._encode(send)
        yield AllToAll(self.send, self.recv)
        if not part.agree(wire.check_headers(recv, part.header)):
            return

        self.exact.average(recv, mine)
        ops.block_server(
            self.recv, self.blocks, self.layout, self.mine, self.code_bits,
            *_read_write(self.server), self._seed(1), part.finite,
        )  # fmt: skip
        wire.write_header(mine, part.header, part.all_finite())
        # the all-to-all has completed, so its send buffer is free to receive the means
        yield AllGather(self.mine, self.send, final=True)
        if not part.agree(wire.check_headers(send, part.header)):
            return
        ops.block_decode(self.send, self.blocks, self.layout, part.flat, self.code_bits, part.scale)
        self.exact.unpack(send)

    def reduce_scatter(self) -> Exchange:
        """See :meth:`Compressor.reduce_scatter`."""
        part, shard = self.part, self.part.shard
        assert shard is not None
        send, recv = (buffer.view(-1, self.layout.nbytes) for buffer in (self.send, self.recv))
        self._encode(send)
        yield AllToAll(self.send, self.recv, final=True)
        if not part.agree(wire.check_headers(recv, part.header)):
            return
        self.decoded.zero_()  # between the blocks; other exchanges may have used the memory
        for rank in range(part.world):
            # in rank order, and blocks never overlap: the first one need not find zeros
            target = self.decoded if rank else shard
            part.ops.block_decode(recv[rank], self.owned, self.layout, target, self.code_bits, part.scale / part.world)
            if rank:
                shard.add_(self.decoded)
        self.exact.average_to_shard(recv)

    def _encode(self, send: Tensor) -> None:
        """Fill ``send`` uint8 [W, S]: header, riders, codes, scales."""
        part = self.part
        self.exact.pack(send)
        part.ops.block_encode(
            part.flat, self.blocks, self.layout, self.send, self.code_bits,
            *_read_write(self.worker), 1.0 / part.scale, self._seed(0), part.finite,
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
