"""1-bit with error feedback: one sign per element and one fp32 scale per block, two-phase.

``C(v) = mean|v| * sign(v)`` per block of ``block`` elements of one parameter; the rest stays in the residuals of worker
and server. 1 + 32/block bits per element, biased. Worker and server residual: 4 (1 + 1/N) bytes per parameter, doubled
because the previous step's are kept until the step is known to be finite.

Exact zeros cannot be sent, so embeddings, vectors and small parameters go uncompressed by default. It costs quality at
equal steps (README, "What compression costs"): under Adam what compression gets wrong also goes into the second moment,
and at a learning rate near the edge of stability error feedback can diverge.

[Seide et al. 2014; EF-SignSGD: Karimireddy et al. 2019, arXiv 1901.09847, algorithm 1]
"""

from __future__ import annotations

from dataclasses import dataclass

from gradcomp.compressors.base import Traits, require_block, require_flag
from gradcomp.compressors.twophase import TwoPhase


@dataclass(frozen=True, kw_only=True, slots=True)
class OneBitConfig:
    """``block``: elements per scale. ``error_feedback``: keep what was not sent (off is for study only)."""

    block: int = 256
    error_feedback: bool = True

    def __post_init__(self) -> None:
        """Check ranges."""
        require_block(self.block)
        require_flag("error_feedback", self.error_feedback)


class OneBit(TwoPhase):
    """See the module's docstring."""

    name = "onebit"
    Config = OneBitConfig
    code_bits = 1
    traits = Traits(
        summary="1-bit signs, block scales, error feedback",
        reference="Seide 2014; Karimireddy 2019, arXiv 1901.09847",
        collectives="all-to-all + all-gather",
        bits=1 + 32 / 256,
        memory=8,
        memory_sharded=8,
        linear=False,
        biased=True,
        strongly_biased=True,
        bypass=frozenset({"vector", "small", "embedding"}),
        carries_exact=True,
        scatters=True,
    )
