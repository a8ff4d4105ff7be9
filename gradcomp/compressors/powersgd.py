"""PowerSGD: each matrix travels as two thin factors.

For M = g + e, m x n, rank r:  P <- mean(M Q);  P^ <- orthonormal columns of P;  Q <- mean(M^T P^);  decoded P^ Q^T;
e <- M - P^ Q^T. r (m + n) floats per matrix, two all-reduces per bucket: uncompressed vectors ride with P. Q is kept as
the next step's start (one power iteration per step). Linear in M, biased; residual 4 bytes per parameter, doubled because
the previous step's is kept until the step is known to be finite.

A matrix is compressed only if that makes it at least ``min_rate`` times smaller. Convolutions are matrices of their
outermost dimension in memory against the rest.

[Vogels et al. 2019, arXiv 1905.13727, algorithms 1 and 2]
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch

from gradcomp import wire
from gradcomp.bucket import Parameter, Runs, Slot
from gradcomp.collectives import AllReduce
from gradcomp.compressors.base import Compressor, Exchange, Part, Traits, require, require_flag
from gradcomp.kernels.ops import Matrices
from gradcomp.memory import Buffer

_BLOCK = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class PowerSGDConfig:
    """``rank`` r; ``start_step``: first compressed step; ``min_rate``: least m n / (r (m + n)) worth compressing."""

    rank: int = 4
    error_feedback: bool = True
    warm_start: bool = True
    start_step: int = 0
    min_rate: float = 2.0

    def __post_init__(self) -> None:
        """Check ranges."""
        require(
            isinstance(self.rank, int) and 1 <= self.rank <= 1024, "rank", self.rank, "a whole number from 1 to 1024"
        )
        require(self.start_step >= 0, "start_step", self.start_step, "a whole number of at least 0")
        require(self.min_rate >= 1, "min_rate", self.min_rate, "a number of at least 1")
        require_flag("error_feedback", self.error_feedback)
        require_flag("warm_start", self.warm_start)


class PowerSGD(Compressor):
    """See the module's docstring."""

    name = "powersgd"
    Config = PowerSGDConfig
    traits = Traits(
        summary="low-rank factors, error feedback",
        reference="Vogels 2019, arXiv 1905.13727",
        collectives="2 all-reduces",
        bits=32 / 72,
        memory=8,
        linear=True,
        biased=True,
        needs_matrices=True,
        bypass=frozenset({"vector", "small", "embedding"}),
        carries_exact=True,
    )

    @classmethod
    def bypass(cls, config: PowerSGDConfig, parameter: Parameter) -> str | None:
        """As :meth:`Compressor.bypass`, and matrices that low rank would not shrink enough."""
        reason = super().bypass(config, parameter)
        if reason is None and rate(parameter.shape, config.rank) < config.min_rate:
            return f"rank {config.rank} makes it less than {config.min_rate:g} times smaller"
        return reason

    @classmethod
    def start_step(cls, config: PowerSGDConfig) -> int:
        """See :meth:`Compressor.start_step`."""
        return config.start_step

    def __init__(self, config: PowerSGDConfig, part: Part) -> None:
        super().__init__(config, part)
        self.config = config
        # equal shapes next to each other, so that they can be handled as one batch
        part.slots = sorted(part.slots, key=lambda slot: (*slot.matrix, slot.offset))
        self.blocks, spans = part.blocks(_BLOCK)
        size = self.blocks.count * _BLOCK
        self.matrices, places, p_numel, q_numel = _table(
            part.slots, [span.first * _BLOCK for span in spans], config.rank, part.device
        )

        self.exact = Runs(part.exact_slots, part.device)
        self.p_numel, self.q_numel = p_numel, q_numel
        # all-reduced as one: [P of every matrix | uncompressed vectors | agreement slots]
        self.p = part.zeros(p_numel + self.exact.numel + wire.SUM_SLOTS)
        self.q = part.zeros(q_numel + wire.SUM_SLOTS)

        self.factor: Buffer | None = None
        self.places, self.initial = places, part.zeros(q_numel)
        if config.warm_start:
            missing = [place for place in places if not part.memory.known("factor", place[0])]
            self.factor = part.memory.factor(places, q_numel, part.device, config.rank)
            for name, start, numel in missing:
                self.factor.current[start : start + numel].copy_(_random(name, 0, numel))
        self.worker: Buffer | None = None
        if config.error_feedback:
            self.worker = part.memory.worker(spans, _BLOCK, size, part.device, with_server=False)
        self.work = part.zeros(size) if self.worker is None else None

    @property
    def feeds_back(self) -> bool:
        """See :attr:`Compressor.feeds_back`."""
        return self.worker is not None

    def reduce(self) -> Exchange:
        """See :meth:`Compressor.reduce`."""
        part, ops, matrices = self.part, self.part.ops, self.matrices
        p, q = self.p[: self.p_numel], self.q[: self.q_numel]
        riders = self.p[self.p_numel : self.p_numel + self.exact.numel]
        old, work = (None, self.work) if self.worker is None else self.worker.open()
        assert work is not None
        if self.factor is None:
            start = self.initial
            for name, at, numel in self.places:
                start[at : at + numel].copy_(_random(name, part.step, numel))
        else:
            start, next_start = self.factor.open()

        ops.lowrank_project(part.flat, matrices, self.blocks, old, work, start, p, 1.0 / part.scale)
        self.exact.gather(part.flat, riders)
        finite = bool(torch.isfinite(self.p[: -wire.SUM_SLOTS]).all())
        wire.write_sum_slots(self.p[-wire.SUM_SLOTS :], part.header, finite)
        yield AllReduce(self.p)
        if not part.agree(wire.check_sum_slots(self.p[-wire.SUM_SLOTS :], part.header)):
            return

        self.p[: -wire.SUM_SLOTS].mul_(1.0 / part.world)
        for count, m, _, r, _, _, at, _ in matrices.batches:
            batch = p[at : at + count * m * r].view(count, m, r)
            batch.copy_(torch.linalg.qr(batch).Q)
        ops.lowrank_backproject(work, matrices, p, q)
        wire.write_sum_slots(self.q[-wire.SUM_SLOTS :], part.header, bool(torch.isfinite(q).all()))
        yield AllReduce(self.q, final=True)
        if not part.agree(wire.check_sum_slots(self.q[-wire.SUM_SLOTS :], part.header)):
            return

        q.mul_(1.0 / part.world)
        ops.lowrank_decode(work, matrices, p, q, part.flat, part.scale, self.worker is not None)
        self.exact.scatter(riders, part.flat)
        if self.factor is not None:
            next_start.copy_(q)
            # only the direction matters for the next P; at the gradient's own scale P would have its square
            for count, _, n, r, _, _, _, at in matrices.batches:
                batch = next_start[at : at + count * r * n].view(count, -1)
                batch.div_(batch.abs().amax(1, keepdim=True).clamp_min_(torch.finfo(batch.dtype).tiny))


def rate(shape: tuple[int, ...], rank: int) -> float:
    """How many times smaller the factors are than a matrix (its outermost dimension against the rest)."""
    numel = 1
    for size in shape:
        numel *= size
    rows = next((size for size in shape if size > 1), 1)
    cols = numel // max(1, rows)
    r = min(rank, rows, cols)
    return numel / (r * (rows + cols)) if r else 0.0


def _random(name: str, step: int, numel: int) -> torch.Tensor:
    """Normal numbers that are the same on all ranks and in all buckets."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(wire.checksum(name, step)))


def _table(
    slots: list[Slot], work_offsets: list[int], rank: int, device: torch.device
) -> tuple[Matrices, list[tuple[str, int, int]], int, int]:
    """The kernels' table of matrices, and each parameter's (name, start, numel) in Q."""
    columns: dict[str, list[int]] = defaultdict(list)
    batches: list[tuple[int, int, int, int, int, int, int, int]] = []
    places = []
    p_at = q_at = 0
    for slot, work in zip(slots, work_offsets, strict=True):
        m, n = slot.matrix
        r = min(rank, m, n)
        stride = -(-slot.numel // _BLOCK) * _BLOCK
        row = {"flat": slot.offset, "work": work, "rows": m, "cols": n, "rank": r, "p": p_at, "q": q_at}
        for field, value in row.items():
            columns[field].append(value)
        if batches and batches[-1][1:4] == (m, n, r):
            batches[-1] = (batches[-1][0] + 1, *batches[-1][1:])
        else:
            batches.append((1, m, n, r, work, stride, p_at, q_at))
        places.append((slot.name, q_at, n * r))
        p_at, q_at = p_at + m * r, q_at + n * r
    tensors = {
        field: torch.tensor(columns[field], dtype=torch.int64, device=device)
        for field in ("flat", "work", "rows", "cols", "rank", "p", "q")
    }
    return Matrices(**tensors, batches=tuple(batches)), places, p_at, q_at
