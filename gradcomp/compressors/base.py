"""What a compressor is: a config, traits, buffers, and a generator that yields collectives.

A compressor object serves one *part* of a bucket: the parameters in it that use this compressor. It is built once per
bucket layout (its buffers are allocated then) and its :meth:`Compressor.reduce` runs once per step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradcomp import wire
from gradcomp.bucket import BlockSpan, Parameter, ParameterTable, RowRuns, Runs, Scratch, Slot, cut_blocks
from gradcomp.collectives import Collective, Wait
from gradcomp.errors import ConfigError, UnsupportedError
from gradcomp.kernels.ops import Blocks, Ops
from gradcomp.memory import Memory

Exchange = Generator[Collective | Wait, None, None]

SMALL = 1024
"""Parameters of fewer elements are not worth a block of their own: they go uncompressed by default."""


_PIECE = 1 << 20
_MESSAGE_BYTES = 1 << 17
_PIECES_IN_STEP = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """Facts about a compressor that rules, docs, planner and contract tests read.

    ``bits``: payload bits per element at the default options, without headers. ``memory``: bytes of persistent state per
    parameter on every rank at the default options (residuals count twice: old and new); ``memory_sharded``: the same, but
    divided among the ranks. ``bypass``: kinds of parameters that go
    uncompressed by default, of ``vector`` (one dimension or fewer than two long ones), ``small``, ``embedding``.
    ``scatters``: whether it fits a reduce-scatter (ZeRO-3, FSDP2).
    """

    summary: str
    reference: str
    collectives: str
    bits: float
    memory: float
    linear: bool
    biased: bool
    memory_sharded: float = 0
    fixed_size: bool = True
    needs_matrices: bool = False
    strongly_biased: bool = False
    bypass: frozenset[str] = frozenset()
    carries_exact: bool = False
    scatters: bool = False


def require(allowed: bool, field: str, value: object, what: str) -> None:
    """Raise :class:`ConfigError` naming field, value and what is allowed, unless ``allowed``."""
    if not allowed:
        raise ConfigError(f"{field}={value!r}: allowed is {what}")


def require_block(value: int) -> None:
    """Check a block size."""
    power = isinstance(value, int) and value > 0 and value & (value - 1) == 0
    require(power and 32 <= value <= 65536, "block", value, "a power of two from 32 to 65536")


def require_flag(field: str, value: object) -> None:
    """Check a boolean option."""
    require(isinstance(value, bool), field, value, "true or false")


@dataclass(slots=True)
class Part:
    """The parameters of one bucket that share a compressor, and what the compressor may use.

    Built once per layout: ``slots`` (compressed), ``exact_slots`` (uncompressed riders, empty unless the compressor
    carries them), ``rank``, ``world``, ``device``, ``ops``, ``memory``, ``spec`` and ``layout`` (checksums).
    Set before every step: ``flat`` (the bucket, fp32 [n]; the raw buffer in its own dtype for ``none``), ``scale`` (loss
    scale that is in ``flat``) and ``step``. Set by the compressor: ``ok``, whether all ranks were finite.

    In a reduce-scatter ``flat`` is [W * row], slots have owners, and the mean goes to ``shard`` [row]. ``scratch``: where
    buffers come from if other exchanges share them.
    """

    slots: Sequence[Slot]
    exact_slots: Sequence[Slot]
    table: ParameterTable
    rank: int
    world: int
    device: torch.device
    ops: Ops
    memory: Memory
    spec: int
    layout: int
    flat: Tensor
    finite: Tensor
    saturated: Tensor
    row: int | None = None
    shard: Tensor | None = None
    scratch: Scratch | None = None
    scale: float = 1.0
    step: int = 0
    ok: bool = True
    _runs: Runs | None = None
    _compact: Tensor | None = None

    @property
    def numel(self) -> int:
        """Compressed elements."""
        return sum(slot.numel for slot in self.slots)

    @property
    def header(self) -> wire.Header:
        """What all ranks must agree on in this step."""
        return wire.Header(self.world, self.spec, self.layout, self.step)

    def blocks(self, size: int) -> tuple[Blocks, tuple[BlockSpan, ...]]:
        """Cut the compressed slots into blocks of ``size``."""
        return cut_blocks(self.slots, self.table, size, self.rank, self.world, self.device)

    def pieces(self, bits: int) -> int:
        """In how many pieces a two-phase exchange of ``bits`` per element travels.

        While one is on the network, the next is encoded or the one before averaged or decoded. Where a model has many buckets
        they do that for one another, so the pieces of all buckets are about 16. A smaller piece gains less than its latency
        costs (a message of 128 KiB takes 1 ms at 1 Gb/s), and its residuals would not be written past the cache (kernels/cpu).
        """
        if self.row is not None:
            return 1
        least = max(_PIECE, 8 * _MESSAGE_BYTES * self.world // bits)
        fair = round(_PIECES_IN_STEP * self.numel / max(1, self.table.numel))
        return max(1, min(fair, self.numel // least))

    def zeros(self, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A buffer, allocated once per layout. In a reduce-scatter its contents, and zeros, may not outlive the exchange."""
        if self.scratch is not None:
            return self.scratch.take(numel, dtype, self.device)
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def gather(self) -> Tensor:
        """This rank's gradients of the compressed slots, unscaled: fp32 [numel], in slot order, in one buffer of its own."""
        if self._runs is None or self._compact is None:
            self._runs, self._compact = Runs(self.slots, self.device), self.zeros(self.numel)
        self._runs.gather(self.flat, self._compact)
        return self._compact.mul_(1.0 / self.scale)

    def scatter(self, values: Tensor) -> None:
        """Write the mean, fp32 [numel] as :meth:`gather` gives it, to the bucket."""
        assert self._runs is not None
        self._runs.scatter(values if self.scale == 1.0 else values * self.scale, self.flat)

    def begin(self) -> None:
        """Start a step."""
        self.ok = True
        self.finite.fill_(1)

    def all_finite(self) -> bool:
        """Whether everything that this rank encoded so far is finite (waits for the device)."""
        return bool(self.finite.item())

    def agree(self, finite: bool) -> bool:
        """Record the ranks' verdict. If any was not finite, the whole bucket becomes NaN on every rank."""
        if not finite:
            self.ok = False
            (self.flat if self.shard is None else self.shard).fill_(float("nan"))
        return finite

    def row_runs(self, slots: Sequence[Slot]) -> RowRuns:
        """Some slots of a reduce-scatter's input, by owner."""
        assert self.row is not None
        return RowRuns(slots, self.rank, self.world, self.row, self.device)


class Compressor(ABC):
    """One algorithm. Subclasses are final: write another compressor rather than another layer."""

    name: ClassVar[str]
    traits: ClassVar[Traits]
    Config: ClassVar[type[Any]]

    def __init__(self, config: Any, part: Part) -> None:
        """Allocate buffers for ``part``; nothing that grows with it is allocated in :meth:`reduce`."""
        self.part = part

    @abstractmethod
    def reduce(self) -> Exchange:
        """Replace the slots of ``part.flat`` by their mean over the ranks, as compressed.

        Straight-line code that yields the collectives it needs; after each ``yield`` the request's buffers hold the
        result. Must issue the same collectives on all ranks, and call ``part.agree`` with the ranks' common verdict.
        """

    def reduce_scatter(self) -> Exchange:
        """Write the mean of this rank's row of ``part.flat`` [W * row], as compressed, to ``part.shard`` [row].

        Otherwise as :meth:`reduce`; only for compressors whose traits say so.
        """
        raise NotImplementedError(self.name)

    @classmethod
    def check_scatter(cls, config: Any) -> None:
        """Raise UnsupportedError unless :meth:`reduce_scatter` works with ``config``."""
        if not cls.traits.scatters:
            raise UnsupportedError(
                f"{cls.name} does not fit a reduce-scatter, which gives each rank a piece of every gradient (ZeRO-3, FSDP2); "
                "allowed are none, fp16, bf16, int8, int4 and onebit. All compressors work where whole gradients are averaged: "
                "DDP, ZeRO-0 to 2, and between the replicas of HSDP"
            )

    @classmethod
    def bypass(cls, config: Any, parameter: Parameter) -> str | None:
        """Why this parameter goes uncompressed by default, or None."""
        kinds = cls.traits.bypass
        long_dimensions = sum(size > 1 for size in parameter.shape)
        if "embedding" in kinds and parameter.embedding:
            return "embedding"
        if "vector" in kinds and long_dimensions < 2:
            return "vector"
        if "small" in kinds and parameter.numel < SMALL:
            return f"fewer than {SMALL} elements"
        return None

    @property
    def feeds_back(self) -> bool:
        """Whether this object reads and writes its parameters' residuals."""
        return False

    @classmethod
    def start_step(cls, config: Any) -> int:
        """First step that is compressed; earlier ones are exchanged uncompressed."""
        return 0


class ExactSection:
    """Uncompressed riders of a two-phase payload: an fp32 section of each shard, summed by its owner."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._runs = Runs(part.exact_slots, part.device)
        self.numel = self._runs.numel
        self._rows = part.row_runs(part.exact_slots) if part.row is not None else None
        self.per_shard = -(-self.numel // part.world) if self._rows is None else self._rows.share
        self._flat = part.zeros(self.per_shard * part.world)

    @property
    def nbytes(self) -> int:
        """Bytes of the section in each shard, aligned."""
        return wire.align(4 * self.per_shard)

    def _view(self, shards: Tensor) -> Tensor:
        section = shards[:, wire.BODY : wire.BODY + 4 * self.per_shard]
        return section.view(torch.float32)

    def pack(self, shards: Tensor) -> None:
        """Copy the riders into ``shards`` uint8 [W, S]; clears ``part.finite`` on inf or NaN."""
        if self.numel:
            if self._rows is None:
                self._runs.gather(self._part.flat, self._flat)
            else:
                self._rows.gather(self._part.flat, self._flat.view(self._part.world, -1))
            self._part.finite.mul_(torch.isfinite(self._flat).all())
            self._view(shards).copy_(self._flat.view(self._part.world, -1))

    def average(self, received: Tensor, mine: Tensor) -> None:
        """Mean of ``received`` uint8 [W, S] into ``mine`` uint8 [1, S]."""
        if self.numel:
            mean = self._view(received).sum(0, keepdim=True).mul_(1.0 / self._part.world)
            self._part.finite.mul_(torch.isfinite(mean).all())
            self._view(mine).copy_(mean)

    def average_to_shard(self, received: Tensor) -> None:
        """Mean of ``received`` uint8 [W, S] into ``part.shard``, in a reduce-scatter."""
        if self.numel:
            assert self._rows is not None
            assert self._part.shard is not None
            self._rows.put(self._view(received).sum(0).mul_(1.0 / self._part.world), self._part.shard)

    def unpack(self, gathered: Tensor) -> None:
        """Write the means, ``gathered`` uint8 [W, S], to the bucket."""
        if self.numel:
            self._flat.view(self._part.world, -1).copy_(self._view(gathered))
            self._runs.scatter(self._flat, self._part.flat)
