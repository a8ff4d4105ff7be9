"""int8 and int4: blockwise linear quantisation, two-phase. int8 is the default compressor.

Per block of ``block`` elements of one parameter: ``scale = max|v| / L``, ``code = round(v / scale)`` with L = 127 (int8) or
7 (int4). 8 + 32/block or 4 + 32/block bits per element. Round-to-nearest is nearly unbiased on real gradients;
``stochastic`` rounds up with probability equal to the fraction, which makes each encoding unbiased (QSGD). Optional error
feedback keeps the rounding error (LoCo's first term).

[QSGD: Alistarh et al. 2017, arXiv 1610.02132; LoCo: arXiv 2407.04480; block scales: Dettmers 2016, arXiv 1511.04561]
"""

from __future__ import annotations

from dataclasses import dataclass

from gradcomp.compressors.base import Traits, require_block, require_flag
from gradcomp.compressors.twophase import TwoPhase


@dataclass(frozen=True, kw_only=True, slots=True)
class Int8Config:
    """``block``: elements per scale. ``stochastic``: unbiased rounding. ``error_feedback``: keep the rounding error."""

    block: int = 256
    stochastic: bool = False
    error_feedback: bool = False

    def __post_init__(self) -> None:
        """Check ranges."""
        require_block(self.block)
        require_flag("stochastic", self.stochastic)
        require_flag("error_feedback", self.error_feedback)


@dataclass(frozen=True, kw_only=True, slots=True)
class Int4Config:
    """As :class:`Int8Config`; error feedback is on, since 15 levels lose much of a small gradient."""

    block: int = 128
    stochastic: bool = False
    error_feedback: bool = True

    def __post_init__(self) -> None:
        """Check ranges."""
        require_block(self.block)
        require_flag("stochastic", self.stochastic)
        require_flag("error_feedback", self.error_feedback)


class Int8(TwoPhase):
    """See the module's docstring."""

    name = "int8"
    Config = Int8Config
    code_bits = 8
    traits = Traits(
        summary="8-bit blocks",
        reference="QSGD, arXiv 1610.02132",
        collectives="all-to-all + all-gather",
        bits=8 + 32 / 256,
        memory=0,
        linear=False,
        biased=True,
        bypass=frozenset({"small"}),
        carries_exact=True,
        scatters=True,
    )


class Int4(TwoPhase):
    """See the module's docstring."""

    name = "int4"
    Config = Int4Config
    code_bits = 4
    traits = Traits(
        summary="4-bit blocks, error feedback",
        reference="LoCo, arXiv 2407.04480",
        collectives="all-to-all + all-gather",
        bits=4 + 32 / 128,
        memory=8,
        memory_sharded=8,
        linear=False,
        biased=True,
        bypass=frozenset({"small", "vector"}),
        carries_exact=True,
        scatters=True,
    )
