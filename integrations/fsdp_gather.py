"""FSDP2's all-gather of parameters, in 8-bit blocks.

The shards that the optimizer updates stay exact; what the ranks compute with is their int8 image, the same on every rank
(ZeRO++'s qwZ: Wang et al., arXiv 2306.10209, section 4.1). One byte and 4/256 per element instead of four, in forward and
again in backward. Parameters of one dimension or fewer than 1024 elements travel exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradcomp import wire
from gradcomp.bucket import Parameter, ParameterTable, Runs, Slot, cut_blocks
from gradcomp.collectives import AllGather as AllGatherRequest
from gradcomp.collectives import Group
from gradcomp.compressors.base import SMALL, require, require_block
from gradcomp.errors import UnsupportedError
from gradcomp.integrations.fsdp_units import AllGather, Unit, find_units
from gradcomp.kernels.ops import Ops, ShardLayout
from gradcomp.kernels.select import get_ops


@dataclass(slots=True)
class GatherStats:
    """What this rank sent for parameters: ``raw_bytes`` would have gone uncompressed, in the parameters' dtype."""

    calls: int = 0
    raw_bytes: int = 0
    wire_bytes: int = 0

    @property
    def ratio(self) -> float:
        """How many times fewer bytes."""
        return self.raw_bytes / self.wire_bytes if self.wire_bytes else 1.0


def register_all_gather(
    model: nn.Module, spec: str = "int8", *, block: int = 256, backend: str = "auto"
) -> GatherStats:
    """Gather the parameters of all FSDP modules in ``model`` in int8, from the next forward pass on.

    Independent of how gradients are exchanged. Call it on all ranks, after ``fully_shard``. Losses change by what int8
    weights change; see integrations/README.md for measurements.

    Args:
        spec: ``"int8"``.
        block: elements per scale.
        backend: kernels, ``auto``, ``numba``, ``torch`` or ``cuda``.

    Returns:
        Running totals of this rank.

    Raises:
        ConfigError: a bad option. UnsupportedError: a combination that cannot work. MismatchError: the ranks differ.
    """
    require(spec == "int8", "spec", spec, "'int8'")
    require_block(block)
    units = find_units(model, "register_all_gather")
    for unit in units:
        _check(unit)
    group = Group(units[0].group._all_gather_process_group)
    layout = [(p.name, p.chunk) for unit in units for p in unit.parameters]
    group.agree(lambda: f"{spec}, block {block}, parameters {wire.checksum(layout):#010x}", "register_all_gather")
    stats, ops = GatherStats(), get_ops(units[0].group.device, backend)
    for unit in units:
        unit.module.set_custom_all_gather(BlockAllGather(unit, group, 8, block, ops, stats))
    return stats


def _check(unit: Unit) -> None:
    where = f"FSDP module {unit.name or 'the root'!r}"
    comm, after = type(unit.group._all_gather_comm).__name__, unit.group.post_forward_mesh_info
    if comm != "DefaultAllGather":
        raise UnsupportedError(f"{where} already has a custom all-gather, {comm}; FSDP2 allows one")
    if after is not None and after.shard_mesh_size != unit.group.mesh_info.shard_mesh_size:
        raise UnsupportedError(
            f"{where} reshards to {after.shard_mesh_size} ranks after forward, so backward would round what forward rounded "
            "already; use reshard_after_forward=True or False"
        )
    dtypes = {str(unit.group.mp_policy.param_dtype or p.fsdp.sharded_param.dtype) for p in unit.parameters}
    extended = [p.name for p in unit.parameters if hasattr(p.fsdp._sharded_local_tensor, "fsdp_pre_all_gather")]
    if len(dtypes) > 1 or extended:
        raise UnsupportedError(
            f"{where} gathers parameters as {sorted(dtypes)}{f', {extended} by their own code' if extended else ''}; int8 needs "
            "one floating-point dtype per FSDP module"
        )


class BlockAllGather(AllGather):
    """One unit's all-gather, in blocks of ``bits`` (8, or 4 for measurements).

    A rank's payload is ``[codes | scales | exact parameters]``, each section aligned. Every rank decodes every payload, its
    own too, so all compute with the same weights. Inf or NaN in a shard arrives as NaN.
    """

    def __init__(self, unit: Unit, group: Group, bits: int, block: int, ops: Ops, stats: GatherStats) -> None:
        self._group, self._bits, self._block, self._ops, self._stats = group, bits, block, ops, stats
        device = unit.group.device
        coded: list[Slot] = []
        exact: list[Slot] = []
        offset = 0
        for p in unit.parameters:
            slot = Slot(p.name, offset, p.chunk, (p.chunk,), (1,))
            (coded if len(p.shape) > 1 and math.prod(p.shape) >= SMALL else exact).append(slot)
            offset += p.chunk
        self._row = offset
        table = ParameterTable([Parameter(s.name, s.numel, s.shape, torch.float32) for s in coded])
        self._blocks, _ = cut_blocks(coded, table, block, 0, 1, device)
        self._exact = Runs(exact, device)
        self._finite = torch.ones(1, dtype=torch.int32, device=device)

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer of FSDP2's."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """``output_tensor`` [W * L] becomes the rounded shards of all ranks; ``input_tensor`` [L] is this rank's."""
        if input_tensor.numel() != self._row or not input_tensor.dtype.is_floating_point:
            raise UnsupportedError(
                f"FSDP2 gathers {input_tensor.numel()} elements of {input_tensor.dtype}, expected {self._row} of a "
                "floating-point dtype: the parameters were changed after registration"
            )
        world, dtype, device = self._group.world, input_tensor.dtype, input_tensor.device
        codes = wire.align(self._blocks.count * self._block * self._bits // 8)
        exact = codes + wire.align(4 * self._blocks.count)
        layout = ShardLayout(exact + wire.align(self._exact.numel * dtype.itemsize), 0, codes)
        mine = torch.zeros(layout.nbytes, dtype=wire.BYTE, device=device)
        everyone = torch.empty(world * layout.nbytes, dtype=wire.BYTE, device=device)

        self._finite.fill_(1)
        self._ops.block_encode(
            input_tensor.float(), self._blocks, layout, mine, self._bits, None, None, 1.0, None, self._finite
        )
        scales = mine[codes : codes + 4 * self._blocks.count].view(torch.float32)
        scales.masked_fill_(self._finite == 0, float("nan"))
        if self._exact.numel:
            self._exact.gather(input_tensor, self._section(mine, exact, dtype))
        request = AllGatherRequest(mine, everyone)
        self._group.run(request)

        shards = output_tensor.view(world, -1)
        decoded = shards if dtype == torch.float32 else torch.empty(shards.shape, device=device)
        for shard, values, payload in zip(shards, decoded, everyone.view(world, -1), strict=True):
            self._ops.block_decode(payload, self._blocks, layout, values, self._bits, 1.0)
            if values is not shard:
                shard.copy_(values)
            if self._exact.numel:
                self._exact.scatter(self._section(payload, exact, dtype), shard)
        self._stats.calls += 1
        self._stats.wire_bytes += request.wire_bytes(world)
        self._stats.raw_bytes += (world - 1) * input_tensor.numel() * dtype.itemsize

    def _section(self, payload: Tensor, start: int, dtype: torch.dtype) -> Tensor:
        return payload[start : start + self._exact.numel * dtype.itemsize].view(dtype)
