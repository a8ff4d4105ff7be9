"""No compression: the trainer's own all-reduce of the mean, for comparison, warm-up and bypassed parameters.

``g <- sum over ranks of (g * fp32(1/N))``, in the gradient's dtype, in place: bit for bit what DDP does without a hook.
32 bits per element (of the dtype's own), unbiased, one all-reduce.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradcomp.collectives import AllReduce, ReduceScatter
from gradcomp.compressors.base import Compressor, Exchange, Traits


@dataclass(frozen=True, kw_only=True, slots=True)
class NoneConfig:
    """No options."""


class NoCompression(Compressor):
    """See the module's docstring."""

    name = "none"
    Config = NoneConfig
    traits = Traits(
        summary="uncompressed all-reduce",
        reference="torch.nn.parallel.DistributedDataParallel",
        collectives="all-reduce",
        bits=32,
        memory=0,
        linear=True,
        biased=False,
        scatters=True,
    )

    def reduce(self) -> Exchange:
        """See :meth:`Compressor.reduce`; ``part.flat`` may have any dtype."""
        flat = self.part.flat
        flat.mul_(1.0 / self.part.world)
        yield AllReduce(flat, final=True)

    def reduce_scatter(self) -> Exchange:
        """See :meth:`Compressor.reduce_scatter`; ``part.flat`` and ``part.shard`` may have any (one) dtype."""
        part = self.part
        assert part.shard is not None
        yield ReduceScatter(part.flat.mul_(1.0 / part.world), part.shard, final=True)
