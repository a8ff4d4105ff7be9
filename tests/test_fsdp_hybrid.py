"""FSDP2 on four ranks: sharding over all of them, hybrid sharding of 2 replicas x 2 shards, and other world sizes."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import fsdp_cases as cases
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import workers
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from workers import Battery

import gradcomp
from gradcomp.integrations.dcp import HandleState
from gradcomp.integrations.fsdp import register_hsdp

LONG = 300


def hybrid(rank: int, world: int, spec: str | None, steps: int, how: str = "") -> dict[str, Any]:
    """2 replicas x 2 shards; ``spec`` None: torch's own hybrid sharding. One unit, so that 300 steps are quick."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(workers.Net(0, cases.WIDTH), mesh=mesh["shard"] if spec else mesh)
    inside = cases.register(model, "int8") if how == "both" else None
    handle = register_hsdp(model, mesh["replicate"].get_group(), spec) if spec else None
    if how.startswith("divide"):
        model.set_gradient_divide_factor(float(how.split()[1]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    if how == "gradients" or how.startswith("divide"):
        workers.loss_of(model, 0, rank).backward()
        true = cases.reference(0, rank)
        factor = 4 / float(how.split()[1]) if how.startswith("divide") else 1.0
        return {"error": cases.relative(cases.whole(model), {n: g * factor for n, g in true.items()})}
    same, losses = [], []
    for step in range(steps):
        losses += workers.train(model, optimizer, range(step, step + 1), rank)
        if step % 50 == 49 or step == steps - 1:
            digests: list[Any] = [None, None]
            dist.all_gather_object(digests, cases.digest(model, own=True), group=mesh["replicate"].get_group())
            same.append(digests[0] == digests[1])
    shard = sum(p.to_local().numel() for p in model.parameters())
    result = {"loss": cases.evaluate(model), "same": same, "shard": shard}
    for name, used in (("stats", handle), ("inside", inside)):
        if used is not None:
            result[name] = used.stats().as_dict()
    return result


def hybrid_refused(rank: int, world: int) -> list[str]:
    """What can't be done between replicas."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    said = []
    for again in (True, False):
        model = fully_shard(workers.Net(0, 64), mesh=mesh["shard"])
        register_hsdp(model, mesh["replicate"].get_group(), "int4")
        try:
            if again:
                register_hsdp(model, mesh["replicate"].get_group())
            model.set_requires_all_reduce(False)
            workers.loss_of(model, 0, rank).backward()
        except gradcomp.UnsupportedError as error:
            said.append(str(error))
    return said


def hybrid_resumed(rank: int, world: int, spec: str) -> dict[str, Any]:
    """Stop, save, load, go on; every group of replicas has its own states in the checkpoint."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def build(seed: int) -> tuple[Any, Any, Any]:
        model = fully_shard(workers.Net(seed, cases.WIDTH), mesh=mesh["shard"])
        handle = register_hsdp(model, mesh["replicate"].get_group(), spec)
        return model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9), handle

    def go_on(model: Any, optimizer: Any) -> str:
        workers.train(model, optimizer, range(3, 6), rank)
        return cases.digest(model, own=True)

    with cases.shared_folder() as folder:
        model, optimizer, handle = build(0)
        workers.train(model, optimizer, range(3), rank)
        saved = copy.deepcopy({"optimizer": optimizer.state_dict()})
        weights = {n: p.detach().to_local().clone() for n, p in model.named_parameters()}
        dcp.save({"gradcomp": HandleState(handle)}, checkpoint_id=folder)
        straight = go_on(model, optimizer)
        model, optimizer, handle = build(1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.to_local().copy_(weights[name])
        optimizer.load_state_dict(saved["optimizer"])
        dcp.load({"gradcomp": HandleState(handle)}, checkpoint_id=folder)
        step = handle.step
        return {"straight": straight, "resumed": go_on(model, optimizer), "step": step}


def fewer_ranks(rank: int, world: int, spec: str, columns: bool) -> dict[str, Any] | str | None:
    """Saved on four ranks, loaded on two: the summed residual is kept. ``columns``: sharded along the second dimension."""
    placement: dict[str, Any] = {"shard_placement_fn": cases.by_columns} if columns else {}
    half = DeviceMesh("cpu", [0, 1])
    others = DeviceMesh("cpu", [2, 3])
    with cases.shared_folder() as folder:
        model = cases.shard(workers.Net(0, cases.WIDTH), **placement)
        handle = cases.register(model, spec)
        workers.train(model, torch.optim.SGD(model.parameters(), lr=0.02), range(3), rank)
        dcp.save({"gradcomp": HandleState(handle)}, checkpoint_id=folder)
        held = {n: v.double() for n, v in handle.state_dict()["worker"].items()}
        before = workers.mean_over_ranks(held)
        mesh = half if rank < 2 else others  # two jobs of two ranks each load the same checkpoint
        group = mesh.get_group()
        model = cases.shard(workers.Net(1, cases.WIDTH), mesh=mesh, **placement)
        handle = cases.register(model, spec)
        state = HandleState(handle, saved_world_size=4)
        if rank < 2:
            try:
                dcp.load({"gradcomp": state}, checkpoint_id=folder, process_group=group)
            except gradcomp.UnsupportedError as error:
                return str(error)
            after = {n: v.double() for n, v in handle.state_dict()["worker"].items()}
            for values in after.values():
                dist.all_reduce(values, group=group)
                values /= 2
            step = handle.step
            workers.loss_of(model, 3, rank).backward()  # training goes on
            return {"error": cases.relative(after, before), "held": len(after), "step": step, "next": handle.step}
    return None


def tensor_parallel(rank: int, world: int) -> dict[str, Any]:
    """2 x 2: layers split between two ranks, gradients reduce-scattered between the others."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    losses = []
    for own in (False, True):
        model: Any = workers.Net(0, 64)
        plan = {f"layers.{i}": RowwiseParallel() if i % 2 else ColwiseParallel() for i in range(4)}
        model = cases.shard(parallelize_module(model, mesh["tensor"], plan), mesh=mesh["data"])
        handle = cases.register(model, "int8") if own else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # of torch about itself
            losses.append(workers.train(model, optimizer, range(5), mesh["data"].get_local_rank()))
    assert handle is not None
    return {"native": losses[0], "int8": losses[1], "ratio": handle.stats().ratio}


FOUR = Battery(
    4,
    {
        **{("run", spec): (cases.train, (spec, 25, {})) for spec in (None, "int8", "onebit")},
        **{("reshard", to): (cases.gradients, ("int8", f"reshard {to}")) for to in ("True", "2")},
        "divide": (cases.gradients, ("none", "divide 1.0")),
        ("hybrid", None): (hybrid, (None, LONG)),
        **{("hybrid", spec): (hybrid, (spec, LONG)) for spec in ("int8", "onebit")},
        ("hybrid", "powersgd"): (hybrid, ("powersgd", 10)),
        ("hybrid", "both"): (hybrid, ("int8", 10, "both")),
        **{("hybrid", how): (hybrid, ("none", 1, how)) for how in ("gradients", "divide 2.0")},
        "hybrid refused": (hybrid_refused, ()),
        **{("hybrid resumed", spec): (hybrid_resumed, (spec,)) for spec in ("onebit", "powersgd")},
        "tensor parallel": (tensor_parallel, ()),
        "resumed": (cases.resumed, ("int8:error_feedback=true",)),
        "conserved": (cases.conserved, ("onebit:error_feedback=true", False)),
        **{("fewer", columns): (fewer_ranks, ("int8:error_feedback=true", columns)) for columns in (False, True)},
    },
    timeout=400,
)


def test_four_ranks_train_as_uncompressed_and_stay_equal() -> None:
    native, ours = FOUR["run", None], FOUR["run", "int8"]
    assert len({result["digest"] for result in ours}) == 1
    assert ours[0]["loss"] == pytest.approx(native[0]["loss"], rel=0.01)
    assert 3.7 < ours[0]["stats"]["ratio"] < 3.95


def test_onebit_on_four_ranks_stays_equal() -> None:
    assert len({result["digest"] for result in FOUR["run", "onebit"]}) == 1


@pytest.mark.parametrize("to", ["True", "2"])
def test_resharding_to_fewer_ranks_does_not_matter_to_gradients(to: str) -> None:
    assert FOUR["reshard", to][0]["error"] < 0.03
    assert FOUR["reshard", to][0]["error"] == FOUR["reshard", "True"][0]["error"]


def test_a_divide_factor_that_gloo_cannot_reduce_with() -> None:
    assert FOUR["divide"][0]["error"] < 1e-6


def test_with_tensor_parallelism() -> None:
    for result in FOUR["tensor parallel"]:
        assert result["int8"] == pytest.approx(result["native"], rel=1e-3)
        assert result["int8"] != result["native"]
        assert result["ratio"] > 2.9


# ---------------------------------------------------------------- hybrid sharding
@pytest.mark.parametrize(("spec", "percent"), [("int8", 1), ("onebit", 5)])
def test_replicas_stay_bit_identical_for_300_steps(spec: str, percent: float) -> None:
    native, results = FOUR["hybrid", None][0]["loss"], FOUR["hybrid", spec]
    for result in results:
        assert result["same"] == [True] * 6
        assert result["loss"] < native * (1 + percent / 100)


def test_hybrid_residuals_have_the_size_of_a_shard() -> None:
    for result in FOUR["hybrid", "onebit"]:
        memory = result["stats"]["memory_bytes"]
        assert 0.8 * 8 * 1.5 * result["shard"] < memory < 1.1 * 8 * 1.5 * result["shard"]
    assert 3.7 < FOUR["hybrid", "int8"][0]["stats"]["ratio"] < 3.95


@pytest.mark.parametrize("spec", ["powersgd", "both"])
def test_other_hybrid_combinations(spec: str) -> None:
    for result in FOUR["hybrid", spec]:
        assert all(result["same"])
        assert result["stats"]["steps"] == 10
        if spec == "both":
            assert result["inside"]["steps"] == 10
            assert result["inside"]["ratio"] > 3.7


@pytest.mark.parametrize("how", ["gradients", "divide 2.0"])
def test_hybrid_gradients_are_the_mean_over_all_ranks(how: str) -> None:
    assert max(result["error"] for result in FOUR["hybrid", how]) < 1e-6


def test_what_cannot_work_between_replicas_is_refused() -> None:
    for said in FOUR["hybrid refused"]:
        assert "already has an all-reduce hook" in said[0]
        assert "accumulate with set_requires_gradient_sync(False)" in said[1]


@pytest.mark.parametrize("spec", ["onebit", "powersgd"])
def test_hybrid_runs_resume_bit_for_bit(spec: str) -> None:
    for result in FOUR["hybrid resumed", spec]:
        assert result["straight"] == result["resumed"]
        assert result["step"] == 3


# ---------------------------------------------------------------- checkpoints
def test_four_ranks_resume_bit_for_bit() -> None:
    for result in FOUR["resumed"]:
        assert result["resumed"] == result["straight"]


def test_error_feedback_loses_nothing_on_four_ranks() -> None:
    for result in FOUR["conserved"]:
        assert result["lost"] < 1e-6
        assert result["without"] > 0.1


def test_a_checkpoint_of_four_ranks_on_two_keeps_the_total_residual() -> None:
    first, second, *_ = FOUR["fewer", False]
    for result in (first, second):
        assert result["error"] < 1e-6
        assert result["held"] == 5
        assert result["step"] == 3


def test_a_checkpoint_of_other_shards_is_refused() -> None:
    for said in FOUR["fewer", True][:2]:
        assert "fit the world size in which they were saved only" in said
