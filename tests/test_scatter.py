"""A handle for trainers that shard gradients: reduce-scatter on real ranks, steps of several rounds, skipped steps."""

from __future__ import annotations

from threading import Event
from typing import Any

import pytest
import torch
import torch.distributed as dist
from workers import Battery

import gradcomp
from gradcomp import Handle
from gradcomp.bucket import Parameter, shard_slots

SHAPES = {"a.weight": (70, 66), "a.bias": (70,), "b.weight": (96, 70), "b.bias": (5,)}


def make(world: int, spec: str, **options: Any) -> tuple[Handle, list[list[Parameter]]]:
    parameters = []
    for name, shape in SHAPES.items():
        numel = torch.Size(shape).numel()
        parameters.append(Parameter(name, numel, shape, torch.float32, chunk=-(-numel // world)))
    group = dist.group.WORLD
    assert group is not None
    handle = Handle(group, parameters, torch.device("cpu"), spec, synchronous=True, **options)
    return handle, [parameters[2:], parameters[:2]]


def rows(parameters: list[Parameter], gradients: dict[str, torch.Tensor], world: int) -> torch.Tensor:
    """The reduce-scatter's input: row r is every parameter's chunk r, padded."""
    chunks = []
    for p in parameters:
        padded = torch.zeros(world * (p.chunk or 0))
        padded[: p.numel] = gradients[p.name]
        chunks.append(padded.view(world, -1))
    return torch.cat(chunks, 1)


def exchange(handle: Handle, buckets: list[list[Parameter]], step: int, rank: int, bad: bool = False) -> dict[str, Any]:
    """One round; returns this rank's shards and the true ones."""
    world, result = handle.group.world, {}
    generator = torch.Generator().manual_seed(97 * step + rank)
    for number, parameters in enumerate(buckets):
        local = {p.name: torch.randn(p.numel, generator=generator) for p in parameters}
        if bad and rank == world - 1:
            local[parameters[0].name][0] = float("inf")  # in rank 0's shard
        buffer = rows(parameters, local, world)
        true = buffer.clone()
        dist.all_reduce(true)
        slots, length = shard_slots(parameters, world)
        out = torch.full((length,), 7.0)
        done = Event()
        handle.submit(number, lambda slots=slots: slots, buffer.view(-1), done.set, False, out)
        assert done.is_set()
        result[number] = (out, true[rank] / world)
    handle.finish()
    return result


def follow(rank: int, world: int, spec: str) -> dict[str, Any]:
    handle, buckets = make(world, spec)
    applied, true = {}, {}
    for step in range(4):
        for number, (mine, exact) in exchange(handle, buckets, step, rank).items():
            applied[number] = applied.get(number, 0) + mine.double()
            true[number] = true.get(number, 0) + exact.double()
    before, stats = handle.state_dict(), handle.stats()
    bad = exchange(handle, buckets, 4, rank, bad=True)
    after = handle.state_dict()
    return {
        "lost": {n: float((true[n] - applied[n]).norm() / true[n].norm()) for n in true},
        "stats": stats.as_dict(),
        "bad": [bool(mine.isfinite().all()) for mine, _ in bad.values()],
        "kept": all(torch.equal(before["worker"][name], after["worker"][name]) for name in before["worker"]),
        "held": sorted(before["worker"]),
        "skipped": handle.stats().skipped_steps,
    }


def resume(rank: int, world: int, spec: str) -> bool:
    """Three steps, save, three more; and the same from the checkpoint."""
    handle, buckets = make(world, spec)
    for step in range(3):
        exchange(handle, buckets, step, rank)
    state = handle.state_dict()
    ours = [exchange(handle, buckets, step, rank) for step in range(3, 6)]
    again, buckets = make(world, spec)
    again.load_state_dict(state)
    theirs = [exchange(again, buckets, step, rank) for step in range(3, 6)]
    pairs = zip(ours, theirs, strict=True)
    return all(torch.equal(one[n][0], other[n][0]) for one, other in pairs for n in one)


def accumulate(rank: int, world: int) -> dict[str, Any]:
    """Steps of three rounds, the second one skipped by the trainer, the third one not finite in its first round."""
    handle, buckets = make(world, "onebit:error_feedback=true", counts_steps=True, warmup_steps=1)
    norms, said = [], []
    for step, applied in enumerate((True, True, False, True)):
        for turn in range(3):
            exchange(handle, buckets, 10 * step + turn, rank, bad=step == 3 and turn == 0)
        handle.end_step(applied)
        norms.append(handle.stats().residual_norm)
        said.append(handle.stats().as_dict())
    return {"norms": norms, "stats": said}


def refuse(rank: int, world: int) -> list[str]:
    said = []
    for spec, options in (
        ("topk", {}),
        ("powersgd", {}),
        ("int8", {"rules": [("a.weight", "topk")]}),
        ("int8", {"schedule": "thread"}),
    ):
        with pytest.raises(gradcomp.GradcompError) as raised:
            make(world, spec, **options)
        said.append(str(raised.value))
    return said


FEEDBACK = "onebit:error_feedback=true"
SPECS = ["none", "fp16", "bf16", "int8", "int4", "int8:error_feedback=true", "int4:error_feedback=true", FEEDBACK]
RUNS = {
    world: Battery(
        world,
        {("follow", spec): (follow, (spec,)) for spec in SPECS}
        | {("resume", spec): (resume, (spec,)) for spec in ("int8:stochastic=true", FEEDBACK)}
        | {"accumulate": (accumulate, ()), "refuse": (refuse, ())},
    )
    for world in (2, 3)
}
worlds = pytest.mark.parametrize("world", RUNS)


@worlds
@pytest.mark.parametrize("spec", SPECS)
def test_shards_are_the_mean(world: int, spec: str) -> None:
    bound = {"none": 1e-6, "fp16": 1e-3, "bf16": 1e-2, "int8": 0.02, "onebit": 0.7}.get(spec.partition(":")[0], 0.3)
    for result in RUNS[world]["follow", spec]:
        assert max(result["lost"].values()) < bound, result["lost"]
        assert result["stats"]["steps"] == 4


@worlds
def test_bytes_are_those_of_a_reduce_scatter(world: int) -> None:
    for spec, least in {"none": 1.0, "fp16": 1.8, "int8": 2.7, FEEDBACK: 8.0}.items():
        for result in RUNS[world]["follow", spec]:
            stats = result["stats"]
            assert stats["raw_bytes_per_step"] == pytest.approx(
                (world - 1) * 4 * sum(-(-torch.Size(s).numel() // world) for s in SHAPES.values())
            )
            assert stats["raw_bytes_per_step"] / stats["wire_bytes_per_step"] >= least * 0.99, spec


@worlds
@pytest.mark.parametrize("spec", ["int8", FEEDBACK, "int8:error_feedback=true"])
def test_an_inf_reaches_every_shard_and_no_residual(world: int, spec: str) -> None:
    for result in RUNS[world]["follow", spec]:
        assert result["bad"] == [False, False]
        assert result["kept"]
        assert result["held"] == ([] if spec == "int8" else ["a.weight", "b.weight"])
        assert result["skipped"] == 1


@worlds
@pytest.mark.parametrize("spec", ["int8:stochastic=true", FEEDBACK])
def test_resume_is_exact(world: int, spec: str) -> None:
    assert all(RUNS[world]["resume", spec])


@worlds
def test_a_skipped_step_takes_all_its_rounds_back(world: int) -> None:
    for result in RUNS[world]["accumulate"]:
        assert result["norms"][0] == 0, "the first step is uncompressed"
        assert 0 < result["norms"][1] == result["norms"][2] != result["norms"][3]
        last = result["stats"][-1]
        assert (last["steps"], last["compressed_steps"], last["skipped_steps"]) == (4, 3, 1)
        warmup, compressed = result["stats"][0], result["stats"][1]
        assert warmup["raw_bytes_per_step"] == compressed["raw_bytes_per_step"], "bytes are per step, not per round"
        assert warmup["wire_bytes_per_step"] > 9 * compressed["wire_bytes_per_step"]


@worlds
def test_refusals(world: int) -> None:
    for topk, powersgd, rule, schedule in RUNS[world]["refuse"]:
        assert topk.startswith("topk does not fit a reduce-scatter")
        assert powersgd.startswith("powersgd does not fit a reduce-scatter")
        assert rule.startswith("topk does not fit")
        assert schedule.startswith("schedule='thread': allowed is 'auto' or 'inline'")
