"""The two-phase exchange that the blockwise codecs share (1-bit, int8, int4).

Every rank encodes its bucket, sends each owner its blocks (all-to-all), the owners average in fp32, encode the mean again
and send it to everybody (all-gather). Volume per rank: ``2 (N-1)/N`` times the encoded bucket, whatever N is.

With error feedback, per block of worker w and of the owner (server):

    v_w = g_w + e_w;            c_w = C(v_w);  e_w <- v_w - c_w
    m   = mean over w of c_w + s;  c = C(m);   s   <- m - c;     every rank applies c

[Seide et al. 2014; Tang et al., 1-bit Adam, arXiv 2102.02888, section 4; Karimireddy et al. 2019, arXiv 1901.09847]
"""

from __future__ import annotations

from typing import Any, ClassVar

from gradcomp import wire
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
        self.mine = part.zeros(size, wire.BYTE)
        self.stochastic = getattr(config, "stochastic", False)
        self.worker: Buffer | None = None
        self.server: Buffer | None = None
        if config.error_feedback:
            numel, owned = self.blocks.count * config.block, self.blocks.per_shard * config.block
            self.worker = part.memory.worker(spans, config.block, numel, part.device, with_server=True)
            self.server = part.memory.server(spans, config.block, owned, part.device)

    @property
    def feeds_back(self) -> bool:
        """See :attr:`Compressor.feeds_back`."""
        return self.worker is not None

    def reduce(self) -> Exchange:
        """See :meth:`Compressor.reduce`."""
        part, ops = self.part, self.part.ops
        send, recv, mine = (buffer.view(-1, self.layout.nbytes) for buffer in (self.send, self.recv, self.mine))

        self.exact.pack(send)
        ops.block_encode(
            part.flat, self.blocks, self.layout, self.send, self.code_bits,
            *_read_write(self.worker), 1.0 / part.scale, self._seed(0), part.finite,
        )  # fmt: skip
        wire.write_header(send, part.header, part.all_finite())
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

    def _seed(self, phase: int) -> int | None:
        """Counter-based randomness: the same for the same step, rank and phase, in whatever bucket a block travels."""
        return wire.checksum(self.part.step, self.part.rank, phase) if self.stochastic else None


def _read_write(buffer: Buffer | None) -> tuple[Any, Any]:
    """A residual's old and new tensor, marked as written."""
    if buffer is None:
        return None, None
    buffer.written = True
    return buffer.current, buffer.next
