"""Top-K with error feedback: the k largest elements of each parameter travel, the rest waits in the residual.

``v = g + e; S = {i: |v_i| among the k largest}; send (i, v_i) for i in S; e <- v, zero where sent``. The payloads of all
ranks are gathered and added: (N-1) k entries per rank, so the advantage over a dense ring shrinks with N (50x at N = 2,
12.5x at 8, 1.6x at 64 for 1 % with 8-byte entries). Selection is within each parameter, so that layers with small
gradients are heard and the result does not depend on how parameters are packed into buckets.

``select=exact`` finds the k-th largest magnitude exactly; ``sampled`` (default) estimates it from a sample, aimed at 97 %
of k, in parameters with enough elements. Both send exactly k entries (padded with zeros): the payload has a fixed size.
``index=int16`` (default) sends the low 16 bits of each ascending index and one count per 65536 elements; ``int32`` sends
whole indices. ``values`` is fp32 or fp16; what fp16 rounds away stays in the residual.

[Stich et al. 2018, arXiv 1809.07599; Deep Gradient Compression: Lin et al. 2018, arXiv 1712.01887 (sampled threshold)]
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradcomp import wire
from gradcomp.collectives import AllGather
from gradcomp.compressors.base import Compressor, Exchange, Part, Traits, require, require_flag
from gradcomp.kernels.ops import Segments
from gradcomp.memory import Buffer

_BLOCK = 256
_CHUNK = 1 << 16
_TAIL = 1024
"""Sampled elements that lie above the threshold: the estimate's spread is 1/sqrt of that, 3 %."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TopKConfig:
    """``ratio``: share of each parameter's elements sent, or ``k``: how many per parameter (then ratio is ignored)."""

    ratio: float = 0.01
    k: int | None = None
    select: Literal["sampled", "exact"] = "sampled"
    index: Literal["int16", "int32"] = "int16"
    values: Literal["fp32", "fp16"] = "fp32"
    error_feedback: bool = True

    def __post_init__(self) -> None:
        """Check ranges."""
        require(0 < self.ratio <= 1, "ratio", self.ratio, "a number above 0, at most 1")
        require(self.k is None or self.k >= 1, "k", self.k, "a whole number of at least 1")
        require(self.select in ("sampled", "exact"), "select", self.select, "'sampled' or 'exact'")
        require(self.index in ("int16", "int32"), "index", self.index, "'int16' or 'int32'")
        require(self.values in ("fp32", "fp16"), "values", self.values, "'fp32' or 'fp16'")
        require_flag("error_feedback", self.error_feedback)


class TopK(Compressor):
    """See the module's docstring."""

    name = "topk"
    Config = TopKConfig
    traits = Traits(
        summary="largest elements, error feedback",
        reference="Stich 2018, arXiv 1809.07599; DGC, arXiv 1712.01887",
        collectives="all-gather",
        bits=0.01 * 48,
        memory=8,
        linear=False,
        biased=True,
        strongly_biased=True,
        bypass=frozenset({"vector", "small"}),
    )

    def __init__(self, config: TopKConfig, part: Part) -> None:
        super().__init__(config, part)
        self.config = config
        self.blocks, spans = part.blocks(_BLOCK)
        self.size = self.blocks.count * _BLOCK  # block space
        wanted = [min(slot.numel, config.k or math.ceil(config.ratio * slot.numel)) for slot in part.slots]
        strides = [1 if config.select == "exact" else max(1, k // _TAIL) for k in wanted]
        self.k = sum(wanted)
        columns = ([span.first * _BLOCK for span in spans], [slot.numel for slot in part.slots], wanted, strides)
        places = [sum(wanted[:i]) for i in range(len(wanted))]
        self.segments = Segments(*(torch.tensor(column, device=part.device) for column in (*columns, places)))
        self.chunks = -(-self.size // _CHUNK) if config.index == "int16" else 0

        self.at_indices = wire.BODY + wire.align(4 * self.chunks)
        self.at_values = self.at_indices + wire.align((2 if self.chunks else 4) * self.k)
        value_bytes = 2 if config.values == "fp16" else 4
        self.nbytes = self.at_values + wire.align(value_bytes * self.k)
        self.mine = part.zeros(self.nbytes, wire.BYTE)
        self.gathered = part.zeros(part.world * self.nbytes, wire.BYTE)
        self.indices, self.selected = part.zeros(self.k, torch.int32), part.zeros(self.k)
        self.all_indices, self.all_selected = (
            part.zeros(part.world * self.k, torch.int32),
            part.zeros(part.world * self.k),
        )
        self.half = part.zeros(self.k, torch.float16)

        self.worker: Buffer | None = None
        if config.error_feedback:
            self.worker = part.memory.worker(spans, _BLOCK, self.size, part.device, with_server=False)
        self.work = part.zeros(self.size) if self.worker is None else None

    @property
    def feeds_back(self) -> bool:
        """See :attr:`Compressor.feeds_back`."""
        return self.worker is not None

    def reduce(self) -> Exchange:
        """See :meth:`Compressor.reduce`."""
        part, ops, mine = self.part, self.part.ops, self.mine.view(1, -1)
        if self.worker is None:
            old, values = None, self.work
        else:
            old, values = self.worker.open()
        assert values is not None
        ops.accumulate(part.flat, self.blocks, old, values, 1.0 / part.scale, part.finite)
        finite = part.all_finite()
        if finite:
            ops.topk_select(values, self.segments, self.indices, self.selected)
            self._pack(mine)
            values.index_add_(0, self.indices, self.selected, alpha=-1)  # v - v = 0; padding adds 0
        wire.write_header(mine, part.header, finite)
        yield AllGather(self.mine, self.gathered, final=True)
        shards = self.gathered.view(part.world, -1)
        if not part.agree(wire.check_headers(shards, part.header)):
            return
        self._unpack(shards)
        ops.topk_decode(self.all_indices, self.all_selected, self.blocks, part.flat, part.scale / part.world)

    def _pack(self, mine: Tensor) -> None:
        """Write indices and values behind the header; ``selected`` becomes what the receivers will read."""
        if self.chunks:
            counts = torch.bincount(self.indices >> 16, minlength=self.chunks).to(torch.int32)
            self._section(mine, wire.BODY, torch.int32, self.chunks).copy_(counts)
            self._section(mine, self.at_indices, torch.int16, self.k).copy_(self.indices)  # keeps the low 16 bits
        else:
            self._section(mine, self.at_indices, torch.int32, self.k).copy_(self.indices)
        if self.config.values == "fp16":
            self.part.ops.cast_encode(self.selected, self.half, 1.0, self.part.finite, self.part.saturated)
            self._section(mine, self.at_values, torch.float16, self.k).copy_(self.half)
            self.selected.copy_(self.half)
        else:
            self._section(mine, self.at_values, torch.float32, self.k).copy_(self.selected)

    def _unpack(self, shards: Tensor) -> None:
        """Read all ranks' indices and values, in rank order."""
        world, k = self.part.world, self.k
        indices = self.all_indices.view(world, k)
        if self.chunks:
            counts = self._section(shards, wire.BODY, torch.int32, self.chunks).reshape(-1)
            chunk = torch.arange(self.chunks, device=shards.device, dtype=torch.int32).repeat(world)
            high = chunk.repeat_interleave(counts, output_size=world * k).view(world, k)
            low = self._section(shards, self.at_indices, torch.int16, k).to(torch.int32)
            torch.bitwise_or(high << 16, low & 0xFFFF, out=indices)
        else:
            indices.copy_(self._section(shards, self.at_indices, torch.int32, k))
        dtype = torch.float16 if self.config.values == "fp16" else torch.float32
        self.all_selected.view(world, k).copy_(self._section(shards, self.at_values, dtype, k))

    @staticmethod
    def _section(shards: Tensor, start: int, dtype: torch.dtype, count: int) -> Tensor:
        return shards[:, start : start + count * dtype.itemsize].view(dtype)
