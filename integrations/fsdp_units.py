"""What FSDP2 made of a model: its units (one per ``fully_shard`` call), their parameters, and where a backward pass ends.

torch gives the hooks (custom communication, all-reduce hook), but names and layout only through private attributes of
``FSDPModule``; this module is the one place that reads them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule

from gradcomp.bucket import Parameter, Slot
from gradcomp.errors import UnsupportedError
from gradcomp.registration import Handle

if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
    raise UnsupportedError(
        f"torch {torch.__version__} does not let FSDP2's communication be replaced (FSDPModule.set_custom_reduce_scatter); "
        "use a newer torch (tested: 2.13)"
    )

from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather as AllGather
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo


@dataclass(frozen=True, slots=True)
class ShardedParameter:
    """A parameter of a unit.

    ``shape``: of the whole parameter; ``local``: of this rank's shard, without padding; ``chunk``: elements that each
    rank's shard has in the flat buffers, padding included.
    """

    name: str
    fsdp: Any
    embedding: bool
    shape: tuple[int, ...]
    local: tuple[int, ...]
    chunk: int

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def trainable(self) -> bool:
        """Whether it takes part in the reduce-scatter (may change between steps)."""
        return bool(self.fsdp.sharded_param.requires_grad)


@dataclass(frozen=True, slots=True)
class Unit:
    """What one ``fully_shard`` call shards and exchanges together."""

    name: str
    module: FSDPModule
    group: Any
    parameters: tuple[ShardedParameter, ...]

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group over which the unit is reduce-scattered."""
        found: dist.ProcessGroup = self.group._reduce_scatter_process_group
        return found

    @property
    def world(self) -> int:
        """Number of shards."""
        return dist.get_world_size(self.process_group)

    @property
    def trainable(self) -> list[ShardedParameter]:
        """The parameters with a gradient, in the order in which FSDP2 lays them out."""
        return [parameter for parameter in self.parameters if parameter.trainable]


def find_units(model: nn.Module, purpose: str) -> list[Unit]:
    """The units of ``model``, in the order of its modules.

    Raises:
        UnsupportedError: none, or such as cannot be served; ``purpose`` says by what.
    """
    model = getattr(model, "_orig_mod", model)
    names = {id(module): _clean(name) for name, module in model.named_modules()}
    units, seen = [], set()
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        if id(state) in seen:  # fully_shard([a, b]): one unit of two modules
            continue
        seen.add(id(state))
        groups = _groups(state)
        where = f"FSDP module {names[id(module)] or 'the root'!r}"
        if len(groups) > 1:
            raise UnsupportedError(
                f"{where} has {len(groups)} parameter groups (shard_placement_fn with several meshes), for which torch allows "
                "no custom communication; wrap the parameters of each mesh in a module of their own"
            )
        for group in groups:
            _check_mesh(group, where, purpose)
            units.append(Unit(names[id(module)], module, group, tuple(_parameters(group, model, names))))
    if not units:
        raise UnsupportedError(
            f"{purpose} needs a model with FSDP2 modules, got {type(model).__name__}: call "
            "torch.distributed.fsdp.fully_shard on it first"
        )
    first = units[0]
    for unit in units:
        if dist.get_process_group_ranks(unit.process_group) != dist.get_process_group_ranks(first.process_group):
            raise UnsupportedError(
                f"FSDP modules {first.name or 'the root'!r} and {unit.name!r} are sharded over different ranks; call {purpose} "
                "on submodules that share a mesh, one after the other"
            )
    return units


def _groups(state: Any) -> Sequence[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.12 a module had one or none
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return list(groups)


def _check_mesh(group: Any, where: str, purpose: str) -> None:
    mesh = group.mesh_info
    if not isinstance(mesh, FSDPMeshInfo):
        raise UnsupportedError(
            f"{where} comes from replicate(), whose all-reduce cannot be replaced; use DistributedDataParallel, or fully_shard "
            "on a mesh of one rank with gradcomp.integrations.fsdp.register_hsdp(model, replicate_group)"
        )
    if isinstance(mesh, HSDPMeshInfo):
        raise UnsupportedError(
            f"{where} is sharded on a 2-D mesh, whose all-reduce between replicas cannot be replaced. {purpose} wants a 1-D "
            "mesh: fully_shard(model, mesh=mesh['shard']), then gradcomp.integrations.fsdp.register_hsdp(model, "
            "mesh['replicate'].get_group())"
        )


def _parameters(group: Any, model: nn.Module, names: dict[int, str]) -> Iterator[ShardedParameter]:
    world = group.mesh_info.shard_mesh_size
    for parameter in group.fsdp_params:
        info = parameter._module_info
        owners = [info.module, *info.shared_modules]
        name = ".".join(part for part in (names[id(info.module)], info.param_name) if part)
        embedding = any(isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) for owner in owners)
        shape = tuple(parameter._orig_size)
        if parameter.fsdp_placement.dim == 0:
            chunk = max(1, -(-shape[0] // world)) * math.prod(shape[1:])
        else:  # other dimensions are sharded evenly
            chunk = math.prod(shape) // world
        yield ShardedParameter(_clean(name), parameter, embedding, shape, tuple(parameter.sharded_size), chunk)


def _clean(name: str) -> str:
    """Names without what torch.compile and activation checkpointing put in between."""
    parts = [part for part in name.split(".") if part not in ("_orig_mod", "_checkpoint_wrapped_module")]
    return ".".join(parts)


class BackwardSteps:
    """Makes one step of a handle of all that is exchanged in one backward pass.

    FSDP2 does not say which exchange is the last one. So the first of a backward asks autograd to be called when it has
    finished; nothing is sent then. A unit whose module ran twice in forward is exchanged twice: that begins another round.
    A step that an exception left open is dropped in the next forward pass, as FSDP2 drops its gradients
    (``FSDPModule.reset_iter_state``).
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit], handle: Handle) -> None:
        self._handle, self._state = handle, units[0].module._get_fsdp_state()
        self._open, self._finite = False, True
        self._round: set[str] = set()
        model = getattr(model, "_orig_mod", model)
        model.register_forward_pre_hook(torch.compiler.disable(self._forward))  # type: ignore[no-untyped-call]

    def exchange(
        self,
        unit: Unit,
        key: Hashable,
        slots: Callable[[], Sequence[Slot]],
        buffer: Tensor,
        out: Tensor | None = None,
    ) -> None:
        """Exchange a unit's ``buffer``; finished on return."""
        if not self._open:
            Variable._execution_engine.queue_callback(self._end)
            self._open, self._finite = True, True
            self._round.clear()
        elif unit.name in self._round:
            self._end_round()
        self._round.add(unit.name)
        self._handle.submit(key, slots, buffer, _nothing, False, out)

    def _end_round(self) -> None:
        self._handle.finish()
        self._finite = self._finite and self._handle.last_step_finite
        self._round.clear()

    def _end(self) -> None:
        if getattr(self._state._state_ctx, "post_backward_final_callback_queued", False):
            raise UnsupportedError(
                "gradients were exchanged in a backward pass inside the backward pass: activation checkpointing with "
                "use_reentrant=True; use use_reentrant=False"
            )
        self._open = False
        self._end_round()
        self._handle.end_step(self._finite)

    def _forward(self, module: nn.Module, args: Any) -> None:
        if self._open and torch._C._current_graph_task_id() == -1:
            self._open = False
            self._handle.abort_step()


def _nothing() -> None:
    pass


def describe(units: Sequence[Unit], *, chunks: bool) -> list[Parameter]:
    """The trainable parameters for the handle: whole ones cut into ``chunks``, or this rank's shards."""
    return [
        Parameter(
            p.name, p.numel, p.shape, p.fsdp.sharded_param.dtype, p.embedding, p.chunk, p.fsdp.fsdp_placement.dim > 0
        )
        if chunks
        else Parameter(p.name, math.prod(p.local), p.local, p.fsdp.sharded_param.dtype, p.embedding)
        for unit in units
        for p in unit.trainable
    ]
