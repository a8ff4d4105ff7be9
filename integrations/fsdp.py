"""FSDP2 (``torch.distributed.fsdp.fully_shard``): compression of what it exchanges.

* :func:`register` (also :func:`gradcomp.register`): the reduce-scatter of gradients;
* :func:`register_hsdp`: the all-reduce between replicas of a sharded model, over the slow links of hybrid sharding;
* :func:`register_all_gather`: the all-gather of parameters.

FSDP2 waits for each exchange, so compressed ones do not overlap with backward on the CPU; on CUDA they run in FSDP2's
reduce-scatter stream.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradcomp.bucket import Slot, shard_slots
from gradcomp.collectives import Group
from gradcomp.errors import MismatchError, UnsupportedError
from gradcomp.integrations.fsdp_gather import register_all_gather as register_all_gather
from gradcomp.integrations.fsdp_units import BackwardSteps, ReduceScatter, ShardedParameter, Unit, describe, find_units
from gradcomp.registration import Handle, Scaler, SpecLike
from gradcomp.rules import RuleLike


def register(
    model: nn.Module,
    spec: SpecLike = "int8",
    *,
    rules: Iterable[RuleLike] | None = None,
    warmup_steps: int = 0,
    schedule: str = "auto",
    scaler: Scaler | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    backend: str = "auto",
) -> Handle:
    """Compress the reduce-scatter of a model's gradients, from the next backward pass on.

    Call it on all ranks after ``fully_shard``; all FSDP modules inside ``model`` are served. A step is a backward pass that
    exchanges gradients. Arguments as for :func:`gradcomp.register`, with these differences:

    * ``spec``: ``none``, ``fp16``, ``bf16``, ``int8``, ``int4`` or ``onebit``.
    * error feedback is off unless the spec says ``error_feedback=true`` or is a config object: its residual has the size
      of the whole model on every rank, 8 bytes per parameter.
    * ``schedule``: ``auto`` or ``inline``.

    Turns on ``set_reduce_scatter_unused_params``: parameters without a gradient take part with zeros, so that the layout
    is the same in all steps and on all ranks.

    Raises:
        ConfigError: a bad option. UnsupportedError: a combination that cannot work. MismatchError: the ranks differ.
    """
    units = find_units(model, "gradcomp.register")
    for unit in units:
        _check_comms(unit)
    handle = Handle(
        units[0].process_group, describe(units, chunks=True), units[0].group.device, spec, rules=rules,
        warmup_steps=warmup_steps, schedule=schedule, scaler=scaler, optimizer=optimizer, backend=backend, synchronous=True,
        counts_steps=True,
    )  # fmt: skip
    if handle.keeps_feedback:
        nbytes = 8 * sum(parameter.numel for unit in units for parameter in unit.trainable)
        warnings.warn(
            f"gradcomp: error feedback in FSDP2's reduce-scatter keeps a residual of the whole, unsharded model on every rank, "
            f"up to {nbytes:,} bytes (8 per parameter; stats().memory_bytes says how much it is). Between the replicas of "
            "register_hsdp it has the size of a shard",
            stacklevel=3,  # the call of gradcomp.register()
        )
    steps = BackwardSteps(model, units, handle)
    for unit in units:
        unit.module.set_custom_reduce_scatter(CompressedReduceScatter(unit, handle, steps))
        if hasattr(unit.module, "set_reduce_scatter_unused_params"):
            unit.module.set_reduce_scatter_unused_params(True, recurse=False)
    return handle


def _check_comms(unit: Unit) -> None:
    where = f"FSDP module {unit.name or 'the root'!r}"
    scatter, gather = unit.group._reduce_scatter_comm, type(unit.group._all_gather_comm).__name__
    if isinstance(scatter, CompressedReduceScatter):
        raise UnsupportedError(f"{where} is registered already; to change the compressor call handle.set()")
    for name in (type(scatter).__name__, gather):
        if name.startswith(("SymmMem", "ProcessGroupAlloc")):
            raise UnsupportedError(
                f"{where} uses {name} (set_symm_mem_for_comm or set_allocate_memory_from_process_group_for_comm), which torch "
                "does not combine with custom communication; leave that call out"
            )
    if type(scatter).__name__ != "DefaultReduceScatter":
        raise UnsupportedError(
            f"{where} already has a custom reduce-scatter, {type(scatter).__qualname__}; FSDP2 allows one"
        )


class CompressedReduceScatter(ReduceScatter):
    """One unit's reduce-scatter."""

    def __init__(self, unit: Unit, handle: Handle, steps: BackwardSteps) -> None:
        self._unit, self._handle, self._steps = unit, handle, steps

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer of FSDP2's."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """``output_tensor`` [L] becomes this rank's row of ``input_tensor`` [W * L], reduced over the ranks by ``op``."""
        unit, world = self._unit, self._handle.group.world
        if group is not self._handle.group.process_group:
            raise UnsupportedError("set_separate_reduce_scatter_group() was called after registration; call it before")
        if not getattr(unit.group, "reduce_scatter_unused_params", True):
            raise UnsupportedError(
                "set_reduce_scatter_unused_params(False) was called after registration; without it the layout of gradients "
                "depends on which parameters a rank used, so leave it on"
            )
        parameters = unit.trainable
        names = tuple(parameter.name for parameter in parameters)
        key = (names, input_tensor.dtype, input_tensor.numel())
        self._steps.exchange(unit, key, lambda: _slots(unit, world, input_tensor), input_tensor, output_tensor)
        factor = _relative_to_mean(op, world)
        if factor != 1:
            output_tensor.mul_(factor)


def _slots(unit: Unit, world: int, buffer: Tensor) -> list[Slot]:
    """Where FSDP2 puts the trainable parameters; none for what is not floating point: reduced as it is."""
    slots, row = shard_slots(describe([unit], chunks=True), world)
    if row * world != buffer.numel():
        raise UnsupportedError(
            f"FSDP module {unit.name or 'the root'!r} reduce-scatters {buffer.numel()} elements, its parameters "
            f"{[p.name for p in unit.trainable]} have {row * world}: a parameter without gradient was left out, or this torch "
            f"lays gradients out in another way than gradcomp knows ({torch.__version__})"
        )
    return slots if buffer.dtype.is_floating_point else []


def _relative_to_mean(op: Any, world: int) -> float:
    """What the mean must be multiplied by to become the result of ``op``."""
    op = dist.ReduceOp(op) if isinstance(op, dist.ReduceOp.RedOpType) else op
    if op == dist.ReduceOp.AVG:
        return 1.0
    if op == dist.ReduceOp.SUM:
        return float(world)
    if op == dist.ReduceOp.PREMUL_SUM:
        return float(op.factor) * world
    raise UnsupportedError(f"FSDP2 asks for the reduction {op}; allowed are AVG, SUM and PREMUL_SUM")


def register_hsdp(
    model: nn.Module,
    replicate_group: dist.ProcessGroup,
    spec: SpecLike = "int8",
    *,
    rules: Iterable[RuleLike] | None = None,
    warmup_steps: int = 0,
    schedule: str = "auto",
    scaler: Scaler | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    backend: str = "auto",
) -> Handle:
    """Hybrid sharding with a compressed all-reduce between replicas: fast links inside a replica, slow ones between.

    Shard every replica on a 1-D mesh of its own, and pass the group of the ranks that hold the same shard::

        mesh = init_device_mesh("cuda", (replicas, shards), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        handle = register_hsdp(model, mesh["replicate"].get_group(), "int4")

    All compressors work; residuals have the size of the shard. Nothing makes the replicas equal at the start, so that is
    checked. Every backward pass that reduce-scatters also all-reduces. The result is the mean over all ranks, or, after
    ``set_gradient_divide_factor(f)``, the sum over all ranks divided by f, as with torch's own hybrid sharding. Combines
    with :func:`register`, which compresses the reduce-scatter inside the replicas.

    Arguments otherwise as for :func:`register`.

    Raises:
        ConfigError: a bad option. UnsupportedError: a combination that cannot work. MismatchError: the ranks differ, the
            group is not one of equal shards, or the replicas' parameters differ.
    """
    units = find_units(model, "register_hsdp")
    for unit in units:
        if unit.group._all_reduce_hook is not None:
            raise UnsupportedError(
                f"FSDP module {unit.name or 'the root'!r} already has an all-reduce hook; FSDP2 allows one"
            )
    _check_replicas(units, replicate_group)
    handle = Handle(
        replicate_group, describe(units, chunks=False), units[0].group.device, spec, rules=rules, warmup_steps=warmup_steps,
        schedule=schedule, scaler=scaler, optimizer=optimizer, backend=backend, synchronous=True,
        counts_steps=True,
    )  # fmt: skip
    steps = BackwardSteps(model, units, handle)
    for unit in units:
        unit.module.set_all_reduce_hook(_AllReduce(unit, handle, steps))
    return handle


def _check_replicas(units: Sequence[Unit], replicate_group: dist.ProcessGroup) -> None:
    mesh = units[0].group.mesh_info
    digests = {}
    for unit in units:
        for parameter in unit.parameters:
            values = parameter.fsdp.sharded_param.detach().to_local()
            if values.is_meta:
                raise UnsupportedError(
                    f"parameter {parameter.name!r} is on the meta device; materialise the model first"
                )
            digests[parameter.name] = hashlib.sha256(
                values.contiguous().view(-1).view(torch.uint8).cpu().numpy()
            ).digest()
    shard = f"shard {mesh.shard_mesh_rank} of {mesh.shard_mesh_size}"
    everyone = Group(replicate_group).gather_object((shard, digests), "register_hsdp")
    if len({shard for shard, _ in everyone}) > 1:
        said = "; ".join(f"rank {rank}: {shard}" for rank, (shard, _) in enumerate(everyone))
        raise MismatchError(f"register_hsdp: replicate_group must hold the ranks with the same shard, but got {said}")
    first = everyone[0][1]
    differ = sorted(name for name in first if any(theirs.get(name) != first[name] for _, theirs in everyone))
    if differ or any(theirs.keys() != first.keys() for _, theirs in everyone):
        raise MismatchError(
            f"register_hsdp: the replicas start with different parameters, {len(differ)} of {len(first)}: {differ[:5]}. Build "
            "the model from the same seed or load the same checkpoint in all replicas before registration"
        )


class _AllReduce:
    """One unit's all-reduce hook: replaces the reduce-scattered shard [L] by its mean over the replicas."""

    def __init__(self, unit: Unit, handle: Handle, steps: BackwardSteps) -> None:
        self._unit, self._handle, self._steps = unit, handle, steps

    def __call__(self, shard: Tensor) -> None:
        group, world = self._unit.group, self._handle.group.world
        if not group.all_reduce_grads:
            raise UnsupportedError(
                "set_requires_all_reduce(False) would leave this step's gradients different between replicas; accumulate with "
                "set_requires_gradient_sync(False)"
            )
        parameters = self._unit.trainable
        names = tuple(parameter.name for parameter in parameters)
        key = (names, shard.dtype, shard.numel())
        self._steps.exchange(self._unit, key, lambda: self._slots(parameters, shard), shard)
        if group.gradient_divide_factor is not None:  # torch then sums over replicas
            shard.mul_(world)

    def _slots(self, parameters: Sequence[ShardedParameter], shard: Tensor) -> list[Slot]:
        slots, offset = [], 0
        for p in parameters:
            stride = torch.empty(p.local, device="meta").stride()
            slots.append(Slot(p.name, offset, math.prod(p.local), p.local, tuple(stride)))
            offset += p.chunk
        if offset != shard.numel():
            raise UnsupportedError(
                f"FSDP module {self._unit.name or 'the root'!r} all-reduces {shard.numel()} elements, its parameters have "
                f"{offset}: a parameter without gradient was left out (set_reduce_scatter_unused_params(True) helps), or this "
                f"torch lays gradients out in another way than gradcomp knows ({torch.__version__})"
            )
        return slots if shard.dtype.is_floating_point else []
