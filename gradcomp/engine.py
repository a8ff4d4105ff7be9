"""One bucket's exchange: which compressor serves which slots, and the straight line from gradient buffer to mean.

This is the only place where compressors, memory, rules and wire meet; it knows neither trainers nor process groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradcomp import wire
from gradcomp.bucket import ParameterTable, RowRuns, Runs, Scratch, Slot
from gradcomp.collectives import AllGather, AllReduce, ReduceScatter, Wait
from gradcomp.compressors.base import Compressor, Part
from gradcomp.kernels.ops import Ops
from gradcomp.memory import Memory
from gradcomp.registry import parse_spec
from gradcomp.rules import Choice
from gradcomp.schedule import Exchange


@dataclass(frozen=True, slots=True)
class Context:
    """What all buckets of a handle share.

    ``find_unused``: the trainer drops the gradients of parameters that no rank used, so their residuals must not be sent.
    ``scratch``: the buffers of reduce-scatters, if only one exchange runs at a time. ``keeps_buffers``: the trainer leaves a
    bucket's gradients where they are until the next step.
    """

    table: ParameterTable
    memory: Memory
    rank: int
    world: int
    ops: Ops
    find_unused: bool = False
    scratch: Scratch | None = None
    keeps_buffers: bool = False


class BucketExchange:
    """A bucket under one layout and one choice of compressors; allocates everything that its steps need.

    Args:
        slots: the parameters in the bucket.
        buffer: its flat gradient tensor (any dtype; sparse and complex ones are only ever all-reduced).
        choices: per parameter name; None to all-reduce the bucket as it is.
        row: length of a rank's shard of ``buffer``, for a reduce-scatter; None for an all-reduce.

    After each run ``ok`` tells whether the gradients were finite on all ranks, unless ``unchecked`` holds the mean: then nobody
    has looked.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        buffer: Tensor,
        choices: Mapping[str, Choice] | None,
        context: Context,
        row: int | None = None,
    ) -> None:
        self.ok = True
        self.unchecked: Tensor | None = None
        self._context = context
        self._memory = context.memory
        groups: dict[str, list[Slot]] = {}
        exact: list[Slot] = []
        for slot in slots:
            spec = choices[slot.parameter].spec if choices is not None and slot.numel else "none"
            (exact if spec == "none" else groups.setdefault(spec, [])).append(slot)

        self.compressed = bool(groups)
        self._alone = choices is None or all(choice.spec == "none" for choice in choices.values())
        self.name = "+".join(parse_spec(spec)[0].name for spec in groups) or "none"
        self._spec = wire.checksum(sorted((slot.name, spec) for spec, members in groups.items() for slot in members))
        self._layout = wire.checksum([(s.name, s.offset, s.numel) for s in slots], str(buffer.dtype), context.world)
        self._fresh = True

        scratch = context.scratch if row is not None else None
        if scratch is not None:
            scratch.begin()

        def floats(numel: int) -> Tensor:
            if scratch is None:
                return torch.zeros(numel, device=buffer.device)
            return scratch.take(numel, torch.float32, buffer.device)

        as_it_is = not groups or buffer.dtype == torch.float32
        self._flat = None if as_it_is else floats(buffer.numel())
        flat = buffer if self._flat is None else self._flat
        self._row = row
        self._shard = None if as_it_is or row is None else floats(row)
        self.slots = slots
        self._finite = torch.ones(1, dtype=torch.int32, device=buffer.device)
        self.saturated = torch.zeros(1, dtype=torch.int64, device=buffer.device)

        self._parts: list[Compressor] = []
        if not groups:
            groups = {"none": exact}
            exact = []
        for spec, members in groups.items():
            compressor, config = parse_spec(spec)
            riders, exact = (exact, []) if compressor.traits.carries_exact else ([], exact)
            part = Part(
                slots=members, exact_slots=riders, table=context.table, rank=context.rank, world=context.world,
                device=buffer.device, ops=context.ops, memory=context.memory, spec=wire.checksum(spec),
                layout=self._layout, flat=flat, finite=self._finite, saturated=self.saturated, row=row,
                scratch=scratch,
            )  # fmt: skip
            self._parts.append(compressor(config, part))

        # riders that no compressor of this bucket carries get a collective of their own
        self._exact: Runs | RowRuns
        if row is None:
            self._exact = Runs(exact, buffer.device)
            self._exact_values = floats(self._exact.numel)
        else:
            self._exact = RowRuns(exact, context.rank, context.world, row, buffer.device)
            self._exact_values = floats(context.world * self._exact.share).view(context.world, self._exact.share)
            self._release(buffer)
        # residuals that the chosen compressors do not read would be lost: send them with the next step
        self.feeds_back = any(compressor.feeds_back for compressor in self._parts)
        reads = {slot.name for c in self._parts if c.feeds_back for slot in c.part.slots}
        self._leftover = [s for s in slots if s.name not in reads and context.memory.read_worker(s.name) is not None]

    def run(self, buffer: Tensor, step: int, scale: float, out: Tensor | None = None) -> Exchange:
        """Replace ``buffer`` by the compressed mean; ``scale`` is the loss scale in it.

        In a reduce-scatter ``out`` [row] becomes this rank's row of the mean, and ``buffer`` is left with anything.
        """
        self.ok, self.unchecked, context = True, None, self._context
        if self._fresh:
            yield from self._handshake(buffer.device, step)
            self._fresh = False
        flat = buffer if self._flat is None else self._flat.copy_(buffer)
        for slot in self._leftover:
            residual = self._memory.read_worker(slot.name)
            if residual is not None:
                flat[slot.offset : slot.offset + slot.numel].add_(residual, alpha=scale)

        if out is not None:
            yield from self._run_scatter(flat, step, scale, out)
            self._release(buffer)
            return
        assert isinstance(self._exact, Runs)
        if self._exact.numel:
            self._exact.gather(flat, self._exact_values)
            self._exact_values.mul_(1.0 / self._context.world)
            yield AllReduce(self._exact_values)
            self.ok = bool(torch.isfinite(self._exact_values).all())
            self._exact.scatter(self._exact_values, flat)
        unused: list[str] = []
        if self._context.find_unused and self.feeds_back:
            used = torch.stack([self._is_used(flat, slot) for slot in self.slots])
            yield AllReduce(used)
            unused = [slot.name for slot, count in zip(self.slots, used.tolist(), strict=True) if count == 0]
        for compressor in self._parts:
            part = compressor.part
            part.flat, part.step, part.scale = flat, step, scale
            part.begin()
            for request in compressor.reduce():
                if not isinstance(request, Wait):
                    request.final = request.final and compressor is self._parts[-1]
                yield request
            self.ok = self.ok and part.ok

        for name in unused:
            self._memory.keep(name)
        if self._alone and context.keeps_buffers and not self._memory.active:
            self.unchecked = flat  # no residual depends on it: who asks may look, instead of a pass in every step
        elif not self.compressed:
            self.ok = is_finite(flat)  # other buckets' residuals, and whether the trainer skips the step, depend on it
        if self._flat is not None:
            buffer.copy_(self._flat)

    def _run_scatter(self, flat: Tensor, step: int, scale: float, out: Tensor) -> Exchange:
        shard = out if self._shard is None else self._shard
        shard.zero_()
        assert isinstance(self._exact, RowRuns)
        exact = not self.compressed or self._exact.share > 0
        if exact and self._memory.active:  # each rank sees its own shard only, but residuals depend on all of them
            finite = torch.tensor([float(is_finite(flat))], device=flat.device)
            yield AllReduce(finite)
            self.ok = float(finite) == self._context.world
        if self._exact.share:
            self._exact.gather(flat, self._exact_values)
            values = self._exact_values.new_zeros(self._exact.share)
            yield ReduceScatter(self._exact_values.mul_(1.0 / self._context.world).view(-1), values)
            self._exact.put(values, shard)
        for compressor in self._parts:
            part = compressor.part
            part.flat, part.shard, part.step, part.scale = flat, shard, step, scale
            part.begin()
            for request in compressor.reduce_scatter():
                if not isinstance(request, Wait):
                    request.final = request.final and compressor is self._parts[-1]
                yield request
            self.ok = self.ok and part.ok
        if exact and not self._memory.active:
            self.ok = self.ok and is_finite(shard)
        if not self.ok:
            shard.fill_(float("nan"))
        if self._shard is not None:
            out.copy_(self._shard)

    def _release(self, buffer: Tensor) -> None:
        """Hold on to no tensor of a trainer that frees gradients to save memory."""
        for compressor in self._parts:
            compressor.part.flat, compressor.part.shard = buffer.new_empty(0), None

    @staticmethod
    def _is_used(flat: Tensor, slot: Slot) -> Tensor:
        """1.0 if this rank has a gradient for the parameter (DDP fills in zeros otherwise)."""
        values = flat[slot.offset : slot.offset + slot.numel]
        return torch.linalg.vector_norm(values, float("inf")).ne(0).float() if slot.numel else values.new_zeros(())

    def settle(self) -> None:
        """The step was committed: what :meth:`run` sent of leftover residuals is gone from memory."""
        for slot in self._leftover:
            self._memory.drop_worker(slot.name)
        self._leftover = []

    def _handshake(self, device: torch.device, step: int) -> Exchange:
        """Once per layout: all ranks must agree before collectives of layout-dependent sizes are issued."""
        world = self._context.world
        mine = torch.zeros(1, wire.HEADER_BYTES, dtype=wire.BYTE, device=device)
        everyone = torch.zeros(world * wire.HEADER_BYTES, dtype=wire.BYTE, device=device)
        header = wire.Header(world, self._spec, self._layout, step)
        wire.write_header(mine, header, True)
        yield AllGather(mine.view(-1), everyone)
        wire.check_headers(everyone.view(world, -1), header)


def is_finite(tensor: Tensor) -> bool:
    """Whether there is no inf or NaN in it; sparse and complex ones too."""
    values = tensor._values() if tensor.is_sparse else tensor
    values = torch.view_as_real(values) if values.is_complex() else values
    if not values.is_floating_point():
        return True
    total = values.sum(dtype=torch.promote_types(values.dtype, torch.float32))  # finite only if every term is
    return bool(torch.isfinite(total)) or bool(torch.isfinite(values).all())
