"""What users combine with DDP must work: subgroups, accumulation, mixed dtypes, layouts, compilation, changes in mid-run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from workers import SCHEDULES, Battery, Net

import gradcomp


def both(make: Callable[[], nn.Module], spec: str, **options: Any) -> tuple[DDP, DDP, gradcomp.Handle]:
    """The same model in DDP with gradcomp and in DDP alone."""
    torch.manual_seed(0)
    ours = workers.wrap(make())
    torch.manual_seed(0)
    theirs = workers.wrap(make())
    return ours, theirs, gradcomp.register(ours, spec, backend=workers.BACKEND, **options)


def run_losses(
    models: tuple[DDP, DDP], loss: Callable[[nn.Module, int], Tensor], steps: int = 3
) -> list[dict[str, float]]:
    """Relative difference of the gradients per parameter and step; parameters move by DDP's own gradients."""
    differences = []
    for step in range(steps):
        for model in models:
            model.zero_grad()
            loss(model, step).backward()
        found = {}
        for (name, ours), theirs in zip(
            models[0].module.named_parameters(), models[1].module.parameters(), strict=True
        ):
            assert ours.grad is not None
            assert theirs.grad is not None
            a, b = (g.to_dense() if g.is_sparse else g for g in (ours.grad, theirs.grad))
            found[name] = float((a - b).abs().max() / b.abs().max())
            with torch.no_grad():
                for parameter in (ours, theirs):
                    parameter -= 0.1 * b
        differences.append(found)
    return differences


# ---------------------------------------------------------------- groups
def on_a_subgroup(rank: int, world: int, schedule: str) -> Any:
    """DDP on ranks 1 and 2 of 3; rank 0 takes no part."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return None
    ddp = workers.wrap(Net(), process_group=group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    handle = gradcomp.register(ddp, "fp16", schedule=schedule, backend=workers.BACKEND)
    worst = 0.0
    for step in range(3):
        mean = {n: g.clone() for n, g in workers.local_gradients(ddp, step, rank).items()}
        for gradient in mean.values():
            dist.all_reduce(gradient, group=group)
        workers.train(ddp, optimizer, range(step, step + 1), rank)
        worst = max(worst, workers.worst(workers.gradients(ddp), {n: g / 2 for n, g in mean.items()}))
    stats = handle.stats()
    handle.close()
    return worst, stats.world_size, stats.rank, len(handle.state_dict()["worker"])


SUBGROUPS = Battery(3, {schedule: (on_a_subgroup, (schedule,)) for schedule in SCHEDULES})


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ddp_on_a_subgroup_averages_over_the_subgroup(schedule: str) -> None:
    outside, first, second = SUBGROUPS[schedule]
    assert outside is None
    for place, (worst, world, rank, _) in enumerate((first, second)):
        assert 0 < worst < 1e-3
        assert (world, rank) == (2, place)


def on_a_mesh(rank: int, world: int) -> Any:
    """DDP over one dimension of a 2 x 2 device mesh: two replicas each of two models."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "data"))
    ddp = workers.wrap(Net(), device_mesh=mesh["data"])
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    handle = gradcomp.register(ddp, "int8", backend=workers.BACKEND)
    workers.train(ddp, optimizer, range(3), rank)
    return handle.stats().world_size, mesh["data"].get_group().rank(), workers.digest(ddp)


MESH = Battery(4, {"mesh": (on_a_mesh, ())})


def test_ddp_on_a_device_mesh_averages_over_its_dimension() -> None:
    results = MESH["mesh"]
    assert [(world, rank) for world, rank, _ in results] == [(2, 0), (2, 1)] * 2
    digests = [digest for *_, digest in results]
    assert digests[0] == digests[1]
    assert digests[2] == digests[3]
    assert digests[0] != digests[2]  # the two groups saw different data


def test_one_rank_changes_nothing_and_sends_nothing() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for schedule in SCHEDULES:
            ddp, optimizer, handle = workers.setup("onebit", schedule=schedule)
            plain = Net()
            workers.train(plain, torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9), range(3), 0)
            workers.train(ddp, optimizer, range(3), 0)
            assert workers.digest(ddp) == workers.digest(plain)
            assert (handle.stats().wire_bytes, handle.stats().steps, handle.stats().ratio) == (0, 3, 1.0)
            handle.load_state_dict(handle.state_dict())
            handle.close()
    finally:
        dist.destroy_process_group()


# ---------------------------------------------------------------- models
class Mixed(nn.Module):
    """fp32, bf16, sparse and complex parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 32, sparse=True)
        self.layer = nn.Linear(32, 64)
        self.bf16 = nn.Linear(64, 64, dtype=torch.bfloat16)
        self.turn = nn.Parameter(torch.randn(64, 64, dtype=torch.complex64) / 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.layer(self.table(ids))
        return (self.bf16(x.bfloat16()).float() + (x.to(torch.complex64) @ self.turn).abs()).tanh()


class Images(nn.Module):
    """Convolutions in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 24, 3), nn.Tanh(), nn.Conv2d(24, 40, 3), nn.Tanh())
        self.head = nn.Linear(40, 4)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x).mean((2, 3)))


def mixed(rank: int, world: int) -> Any:
    ours, theirs, handle = both(Mixed, "int8")

    def loss(model: nn.Module, step: int) -> Tensor:
        ids = torch.randint(50, (8,), generator=torch.Generator().manual_seed(step * 2 + rank))
        return (model(ids) * torch.arange(64)).mean()

    return run_losses((ours, theirs), loss), dict(handle.stats().bypassed), handle.stats().ratio


def images(rank: int, world: int, spec: str) -> Any:
    ours, theirs, _ = both(Images, spec)
    assert ours.module.net[2].weight.is_contiguous(memory_format=torch.channels_last)

    def loss(model: nn.Module, step: int) -> Tensor:
        x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(step * 2 + rank))
        return model(x.to(memory_format=torch.channels_last)).square().mean()

    return run_losses((ours, theirs), loss), [p.grad.stride() == p.stride() for p in ours.parameters()]


def unused(rank: int, world: int, spec: str) -> Any:
    """The third layer rests in steps 2 and 3: on rank 0 first, then on both."""
    ddp, optimizer, handle = workers.setup(spec, ddp={"find_unused_parameters": True})
    applied, true, rested = Sums(ddp), Sums(ddp), []
    for step in range(5):
        skip = (step == 2 and rank == 0) or step == 3
        local = workers.local_gradients(ddp, step, rank, skip=skip)
        workers.train(ddp, optimizer, range(step, step + 1), rank, skip=skip)
        rested.append(ddp.module.layers[2].weight.grad is None)
        applied.add(workers.gradients(ddp))
        true.add(local)
    return rested, lost(applied, true, handle, ddp), workers.digest(ddp)


def compiled(rank: int, world: int, where: str) -> Any:
    """torch.compile around DDP or inside it; both against plain DDP."""
    torch._dynamo.reset()
    ours, theirs = Net(), workers.wrap(Net())
    model: Any = torch.compile(ours, backend="aot_eager") if where == "inside" else ours
    ddp = workers.wrap(model, bucket_cap_mb=1)  # torch.compile asserts on smaller buckets
    handle = gradcomp.register(ddp, "fp16", backend=workers.BACKEND)
    called: Any = torch.compile(ddp, backend="aot_eager") if where == "around" else ddp
    for step in range(3):
        for run, module in ((called, ours), (theirs, theirs)):
            workers.train(run, torch.optim.SGD(module.parameters(), lr=0), range(step, step + 1), rank)
    names = sorted(handle.stats().bypassed)
    return workers.worst(workers.gradients(ours), workers.gradients(theirs)), handle.stats().ratio_per_step, names


# ---------------------------------------------------------------- accumulation, warm-up, changes
class Sums:
    """Running sums of gradients, in double precision."""

    def __init__(self, ddp: DDP) -> None:
        self.values = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in ddp.module.named_parameters()}

    def add(self, gradients: dict[str, Tensor]) -> None:
        for name, gradient in gradients.items():
            self.values[name] += gradient


def lost(applied: Sums, true: Sums, handle: gradcomp.Handle, ddp: DDP) -> float:
    """Sum of the true means - residual - sum of what was applied, relative to the first."""
    means, held = workers.mean_over_ranks(true.values), workers.gathered_residual(handle, ddp)
    size = max(float(mean.abs().max()) for mean in means.values())
    return workers.worst(applied.values, {n: means[n] - held[n] for n in means}) / size


def accumulated(rank: int, world: int, spec: str) -> float:
    ours, theirs, handle = both(Net, spec)
    for model in (ours, theirs):
        for step in range(3):
            with workers.without_sync(model, step < 2):
                workers.loss_of(model, step, rank).backward()
    assert handle.stats().steps == 1
    return workers.worst(workers.gradients(ours), workers.gradients(theirs))


def warmed_up(rank: int, world: int) -> Any:
    ours, theirs, handle = both(Net, "onebit", warmup_steps=2)
    differences = run_losses((ours, theirs), lambda model, step: workers.loss_of(model, step, rank), 4)
    return [max(found.values()) for found in differences], handle.stats().compressed_steps


def by_step(step: int) -> str:
    """A spec as a function of the step."""
    return ["int8:error_feedback=true", "onebit", "powersgd:rank=2", "topk:ratio=0.05", "int4:block=64"][
        min(step // 2, 4)
    ]


def changing(rank: int, world: int, how: str, schedule: str) -> Any:
    """Another compressor every two steps, at last none: everything that was held back must arrive."""
    ddp, optimizer, handle = workers.setup(by_step if how == "function" else by_step(0), schedule=schedule)
    applied, true, specs = Sums(ddp), Sums(ddp), []
    for step in range(12):
        if how == "set" and step % 2 == 0 and step < 10:
            handle.set(by_step(step))
        if step == 10:
            handle.disable()
        true.add(workers.local_gradients(ddp, step, rank))
        workers.train(ddp, optimizer, range(step, step + 1), rank)
        applied.add(workers.gradients(ddp))
        specs.append(handle.stats().spec)
    end = handle.state_dict()
    handle.close()
    return {
        "lost": lost(applied, true, handle, ddp), "specs": specs, "digest": workers.digest(ddp),
        "left": len(end["worker"]) + len(end["server"]), "residual": handle.stats().residual_norm,
    }  # fmt: skip


def closed(rank: int, world: int) -> Any:
    """close() ends the thread, may be called twice, and what comes after it is an error, not a hang."""
    ddp, optimizer, handle = workers.setup("int8", schedule="thread")
    workers.train(ddp, optimizer, range(2), rank)
    during = [t.name for t in threading.enumerate()].count("gradcomp")
    handle.close()
    handle.close()
    after = [t.name for t in threading.enumerate()].count("gradcomp")
    with pytest.raises(gradcomp.GradcompError) as caught:
        workers.train(ddp, optimizer, range(2, 3), rank)
    return during, after, str(caught.value)


PAIRS = Battery(
    2,
    {
        "mixed": (mixed, ()),
        **{("images", spec): (images, (spec,)) for spec in ("int8", "none", "powersgd:rank=24,min_rate=1")},
        **{("unused", spec): (unused, (spec,)) for spec in workers.feedback_specs()},
        **{("compiled", where): (compiled, (where,)) for where in ("inside", "around")},
        **{("accumulated", spec): (accumulated, (spec,)) for spec in ("none", "fp16")},
        "warm-up": (warmed_up, ()),
        **{("changing", how, s): (changing, (how, s)) for how in ("set", "function") for s in SCHEDULES},
        "closed": (closed, ()),
    },
    timeout=110,
)


def test_sparse_and_complex_parameters_are_left_to_the_all_reduce() -> None:
    for differences, bypassed, ratio in PAIRS["mixed"]:
        assert bypassed["table.weight"] == "sparse gradient"
        assert bypassed["turn"] == "dtype complex64"
        assert 1 < ratio < 4
        for found in differences:
            assert found["table.weight"] == found["turn"] == found["layer.bias"] == 0
            assert 0 < found["layer.weight"] < 0.01
            assert 0 < found["bf16.weight"] < 0.02


@pytest.mark.parametrize(("spec", "bound"), [("none", 0.0), ("int8", 0.01), ("powersgd:rank=24,min_rate=1", 0.05)])
def test_channels_last_weights_get_their_own_gradients(spec: str, bound: float) -> None:
    for differences, strides in PAIRS["images", spec]:
        assert all(strides)
        assert max(max(found.values()) for found in differences) <= bound


@pytest.mark.parametrize("spec", workers.feedback_specs())
def test_unused_parameters_keep_their_residual(spec: str) -> None:
    results = PAIRS["unused", spec]
    assert results[0] == results[1]
    rested, missing, _ = results[0]
    assert rested == [False, False, False, True, False]
    assert missing < 1e-6


@pytest.mark.parametrize("where", ["inside", "around"])
def test_compiled_models(where: str) -> None:
    for worst, ratio, bypassed in PAIRS["compiled", where]:
        assert worst < 1e-3
        assert ratio > 1.9
        assert bypassed == []


@pytest.mark.parametrize(("spec", "bound"), [("none", 0.0), ("fp16", 1e-3)])
def test_accumulation_with_no_sync(spec: str, bound: float) -> None:
    for worst in PAIRS["accumulated", spec]:
        assert worst <= bound


def test_warm_up_steps_are_uncompressed() -> None:
    for differences, compressed in PAIRS["warm-up"]:
        assert differences[:2] == [0, 0]
        assert min(differences[2:]) > 0.01
        assert compressed == 2


@pytest.mark.parametrize(("how", "schedule"), [(how, s) for how in ("set", "function") for s in SCHEDULES])
def test_changing_the_compressor_in_mid_run_loses_nothing(how: str, schedule: str) -> None:
    results = PAIRS["changing", how, schedule]
    assert results[0]["digest"] == results[1]["digest"]
    for result in results:
        assert result["specs"][9:] == [gradcomp.format_spec("int4:block=64"), "none", "none"]
        assert result["left"] == 0, "disable() sends what is left with the next step"
        assert result["residual"] == 0
        assert result["lost"] < 1e-6


def test_a_closed_handle_refuses_further_steps() -> None:
    for during, after, said in PAIRS["closed"]:
        assert during == after + 1
        assert "closed" in said
