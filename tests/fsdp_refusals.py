"""Combinations that FSDP2 integration refuses, as the ranks of a test run them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import workers
from fsdp_cases import shard
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import gradcomp
from gradcomp.integrations.fsdp import register_all_gather, register_hsdp


def raises(rank: int, world: int, how: str) -> str:
    """What a user is told; "Type: message"."""
    try:
        _DOES[how](rank)
    except gradcomp.GradcompError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _registered(spec: str = "int8", **options: Any) -> Any:
    model = shard(workers.Net(0, 64))
    gradcomp.register(model, spec, **options)
    return model


def _step(model: nn.Module, rank: int) -> None:
    workers.loss_of(model, 0, rank).backward()


def _freeze_on_one(rank: int) -> None:
    model = _registered()
    model.layers[2].bias.requires_grad_(rank != 1)
    _step(model, rank)


def _register_different(rank: int) -> None:
    model = shard(workers.Net(0, 64))
    model.layers[2].bias.requires_grad_(rank != 1)
    gradcomp.register(model, "int8")


def _unstable(rank: int) -> None:
    model = _registered()
    model.set_reduce_scatter_unused_params(False)
    _step(model, rank)


def _separate(rank: int) -> None:
    model = _registered()
    model.set_separate_reduce_scatter_group()
    _step(model, rank)


class _Reentrant(workers.Net):
    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


def _reentrant(rank: int) -> None:
    model = shard(_Reentrant(0, 64))
    gradcomp.register(model, "int8")
    x, _ = workers.batch(0, rank)
    model(x.requires_grad_()).sum().backward()


def _twice(rank: int) -> None:
    gradcomp.register(_registered(), "int8")


def _custom(rank: int) -> None:
    from gradcomp.integrations.fsdp_units import ReduceScatter

    class Mine(ReduceScatter):
        def allocate(self, size: Any, *, dtype: Any, device: Any) -> Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(self, *args: Any, **kwargs: Any) -> None:
            pass

    model = shard(workers.Net(0, 64))
    model.layers[0].set_custom_reduce_scatter(Mine())
    gradcomp.register(model, "int8")


def _allocated(rank: int) -> None:
    model = shard(workers.Net(0, 64))
    model.layers[0].set_allocate_memory_from_process_group_for_comm(True)
    gradcomp.register(model, "int8")


def _two_meshes(rank: int) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("a", "b"))
    one, two = (FSDPMeshInfo(mesh[name], shard_mesh_dim=0) for name in ("a", "b"))

    def place(parameter: nn.Parameter) -> Any:
        return ShardPlacementResult(placement=Shard(0), mesh_info=one if parameter.ndim > 1 else two)

    model = fully_shard(workers.Net(0, 64), mesh=mesh["a"], shard_placement_fn=place)
    gradcomp.register(model, "int8")


def _native_hybrid(rank: int) -> None:
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("replicate", "shard"))
    gradcomp.register(shard(workers.Net(0, 64), mesh=mesh), "int8")


def _replicate(rank: int) -> None:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    gradcomp.register(replicate(workers.Net(0, 64)), "int8")


def _unequal_replicas(rank: int) -> None:
    group = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    model = shard(workers.Net(rank, 64), mesh=group["shard"])
    register_hsdp(model, group["replicate"].get_group())


def _wrong_group(rank: int) -> None:
    register_hsdp(shard(workers.Net(0, 64)), dist.group.WORLD)  # type: ignore[arg-type]


def _other_weights(rank: int) -> None:
    register_all_gather(shard(workers.Net(0, 64)), "int4")


def _gather_twice(rank: int) -> None:
    model = shard(workers.Net(0, 64))
    register_all_gather(model)
    register_all_gather(model)


_DOES: dict[str, Callable[[int], object]] = {
    "topk": lambda rank: _registered("topk"),
    "powersgd": lambda rank: _registered("int8", rules=[("layers.1.*", "powersgd")]),
    "pipeline": lambda rank: _registered("int8", schedule="pipeline"),
    "plain model": lambda rank: gradcomp.integrations.fsdp.register(workers.Net()),
    "different models": _register_different,
    "frozen on one rank": _freeze_on_one,
    "unstable layout": _unstable,
    "separate group": _separate,
    "reentrant": _reentrant,
    "twice": _twice,
    "custom": _custom,
    "process group's memory": _allocated,
    "two meshes": _two_meshes,
    "native hybrid": _native_hybrid,
    "replicate": _replicate,
    "unequal replicas": _unequal_replicas,
    "wrong group": _wrong_group,
    "int4 weights": _other_weights,
    "weights twice": _gather_twice,
}
REFUSALS = tuple(_DOES)
