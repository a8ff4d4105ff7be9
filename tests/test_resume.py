"""Stop, save, load, go on = never stopped; and what becomes of residuals when buckets or world size change."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from workers import Battery

import gradcomp

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "find_unused": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "bucket_view": {"gradient_as_bucket_view": True},
}
HALF, ALL = 4, 8


def through_file(state: Any) -> Any:
    """As a checkpoint goes: saved, and loaded without running code from it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def stop_and_go_on(rank: int, world: int, spec: str, mode: str, schedule: str) -> tuple[list[str], list[str]]:
    """Digests after each of the steps of the second half, without and with a restart in between."""
    options: dict[str, Any] = {"ddp": MODES[mode], "schedule": schedule}

    def second_half(ddp: Any, optimizer: Any) -> list[str]:
        digests = []
        for step in range(HALF, ALL):
            workers.train(ddp, optimizer, range(step, step + 1), rank)
            digests.append(workers.digest(ddp))
        return digests

    ddp, optimizer, handle = workers.setup(spec, **options)
    workers.train(ddp, optimizer, range(HALF), rank)
    saved = through_file(
        {"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict(), "gradcomp": handle.state_dict()}
    )
    straight = second_half(ddp, optimizer)
    handle.close()

    ddp, optimizer, handle = workers.setup(spec, seed=1, **options)
    ddp.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    handle.load_state_dict(saved["gradcomp"])
    assert handle.step == HALF
    resumed = second_half(ddp, optimizer)
    handle.close()
    return straight, resumed


SPECS = [*workers.all_specs(), "powersgd:warm_start=false"]
RUNS = {
    2: {
        **{
            (2, spec, mode, "auto"): (stop_and_go_on, (spec, mode, "auto"))
            for spec in SPECS
            for mode in (MODES if spec in workers.feedback_specs() else ("default", "bucket_view"))
        },
        **{
            (2, spec, "default", "thread"): (stop_and_go_on, (spec, "default", "thread"))
            for spec in ("onebit", "powersgd")
        },
    },
    # with three ranks, sums depend on the place in the bucket: the first steps are exchanged in the saved buckets
    3: {
        **{(3, spec, "default", "auto"): (stop_and_go_on, (spec, "default", "auto")) for spec in SPECS},
        **{
            (3, spec, "static_graph", "auto"): (stop_and_go_on, (spec, "static_graph", "auto"))
            for spec in ("none", "topk")
        },
    },
}
BATTERIES = {world: Battery(world, cases, timeout=110) for world, cases in RUNS.items()}


@pytest.mark.parametrize(("world", "spec", "mode", "schedule"), [key for cases in RUNS.values() for key in cases])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(world: int, spec: str, mode: str, schedule: str) -> None:
    results = BATTERIES[world][world, spec, mode, schedule]
    assert all(result == results[0] for result in results)
    straight, resumed = results[0]
    assert resumed == straight


# ---------------------------------------------------------------- other buckets
def into_other_buckets(rank: int, world: int, spec: str) -> dict[str, Any]:
    ddp, optimizer, handle = workers.setup(spec)
    workers.train(ddp, optimizer, range(HALF), rank)
    saved = through_file({"model": ddp.module.state_dict(), "gradcomp": handle.state_dict()})

    ddp, optimizer, handle = workers.setup(spec, seed=1, ddp={"bucket_cap_mb": 0.05, "find_unused_parameters": True})
    ddp.module.load_state_dict(saved["model"])
    handle.load_state_dict(saved["gradcomp"])
    loaded = handle.state_dict()
    same = {
        kind: saved["gradcomp"][kind].keys() == loaded[kind].keys()
        and all(torch.equal(values_of(saved["gradcomp"][kind][n]), values_of(loaded[kind][n])) for n in loaded[kind])
        for kind in ("worker", "server", "factor")
    }
    return {"same": same, "held": len(loaded["worker"]), "lost": conservation(ddp, optimizer, handle, rank)}


def values_of(item: Any) -> torch.Tensor:
    return item["values"] if isinstance(item, dict) else item


def conservation(ddp: Any, optimizer: Any, handle: gradcomp.Handle, rank: int) -> list[float]:
    """Residual before + true mean - applied - residual after, per step, relative to the largest gradient."""
    lost = []
    before = workers.gathered_residual(handle, ddp)
    for step in range(HALF, HALF + 3):
        mean = workers.mean_over_ranks(workers.local_gradients(ddp, step, rank))
        workers.train(ddp, optimizer, range(step, step + 1), rank)
        applied, after = workers.gradients(ddp), workers.gathered_residual(handle, ddp)
        size = max(float(m.abs().max()) for m in mean.values())
        lost.append(
            workers.worst({n: before[n] + mean[n] for n in mean}, {n: applied[n] + after[n] for n in mean}) / size
        )
        before = after
    return lost


OTHER = Battery(2, {spec: (into_other_buckets, (spec,)) for spec in workers.feedback_specs()})


@pytest.mark.parametrize("spec", workers.feedback_specs())
def test_with_another_bucket_size_every_residual_stays_with_its_parameter(spec: str) -> None:
    for result in OTHER[spec]:
        assert result["held"] == 4, "one per compressed matrix"
        assert result["same"] == {"worker": True, "server": True, "factor": True}
        assert max(result["lost"]) < 1e-6


# ---------------------------------------------------------------- another world size
def half_a_run(rank: int, world: int, spec: str) -> bytes:
    ddp, optimizer, handle = workers.setup(spec)
    workers.train(ddp, optimizer, range(HALF), rank)
    file = io.BytesIO()
    torch.save({"model": ddp.module.state_dict(), "gradcomp": handle.state_dict()}, file)
    return file.getvalue()


def go_on_with(rank: int, world: int, spec: str, saved: Sequence[bytes]) -> dict[str, Any]:
    """Deal the old states out to the ranks and go on."""
    old = [torch.load(io.BytesIO(raw), weights_only=True) for raw in saved]
    ddp, optimizer, handle = workers.setup(spec, seed=1)
    ddp.module.load_state_dict(old[0]["model"])
    handle.load_state_dict([state["gradcomp"] for state in old[rank::world]])
    before = workers.total_residual([state["gradcomp"] for state in old], ddp.module)
    size = max(float(r.abs().max()) for r in before.values())
    changed = workers.worst(before, workers.gathered_residual(handle, ddp)) / size
    lost = conservation(ddp, optimizer, handle, rank)
    return {"changed": changed, "lost": lost, "step": handle.step, "digest": workers.digest(ddp), "size": size}


SAVES = {old: Battery(old, {spec: (half_a_run, (spec,)) for spec in workers.feedback_specs()}) for old in (2, 3)}


@pytest.mark.parametrize(("old", "new"), [(3, 2), (2, 3)])
def test_another_world_size_keeps_the_total_residual(old: int, new: int) -> None:
    resumed = Battery(new, {spec: (go_on_with, (spec, SAVES[old][spec])) for spec in workers.feedback_specs()})
    for spec in workers.feedback_specs():
        results = resumed[spec]
        assert len({result["digest"] for result in results}) == 1, spec
        for result in results:
            assert result["size"] > 0, spec
            assert result["step"] == HALF + 3, spec
            assert result["changed"] < 1e-6, spec
            assert max(result["lost"]) < 1e-6, spec


# ---------------------------------------------------------------- states that do not fit
def refusal(rank: int, world: int, kind: str) -> tuple[str, str, bool, bool]:
    """Load a bad checkpoint, then show that the handle is as before and works."""
    ddp, optimizer, handle = workers.setup("onebit")
    workers.train(ddp, optimizer, range(2), rank)
    good = through_file(handle.state_dict())
    bad: Any = through_file(handle.state_dict())
    name = next(iter(bad["worker"]))
    if kind == "missing":
        bad = good if rank == 0 else []
    elif kind == "doubled":
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, good)
        bad = everyone[0]
    elif kind == "other step":
        bad["step"] = 7 + rank
    elif kind == "not ours":
        bad = ddp.module.state_dict()
    elif kind == "nothing":
        bad = {} if rank == 1 else good
    elif kind == "foreign model on one rank" and rank == 1:
        bad["worker"]["encoder.weight"] = bad["worker"].pop(name)
    elif kind == "without its worker residuals" and rank == 1:
        del bad["worker"]
    elif kind == "without its rank" and rank == 1:
        del bad["rank"]
    elif kind == "short worker residual" and rank == 1:
        bad["worker"][name] = bad["worker"][name][:-1]
    elif kind == "short server residual" and rank == 1:
        bad["server"][name]["values"] = bad["server"][name]["values"][:-1]
    elif kind == "server residual without values" and rank == 1:
        bad["server"][name] = bad["server"][name]["tag"]
    elif kind == "not tensors" and rank == 1:
        bad["worker"] = None
    error: BaseException | None = None
    try:
        handle.load_state_dict(bad)
    except Exception as caught:
        error = caught
    state = handle.state_dict()
    unchanged = state["step"] == 2 and all(torch.equal(state["worker"][n], good["worker"][n]) for n in good["worker"])
    workers.train(ddp, optimizer, range(2, 4), rank)
    return type(error).__name__, str(error), unchanged, handle.step == 4


REFUSALS = {
    "missing": ("ConfigError", "Save handle.state_dict() on every rank"),
    "doubled": ("ConfigError", "got those of ranks [0, 0]"),
    "other step": ("MismatchError", "different (world size, rank, step)"),
    "not ours": ("ConfigError", "is this a gradcomp state_dict?"),
    "nothing": ("ConfigError", "rank 1: format=None"),
    "foreign model on one rank": ("ConfigError", "unknown parameters ['encoder.weight']"),
    "without its worker residuals": ("ConfigError", "rank 1: "),
    "without its rank": ("ConfigError", "rank 1: "),
    "short worker residual": ("ConfigError", "parameters of another size ['layers.0.weight']"),
    "short server residual": ("ConfigError", "layers.0.weight"),
    "server residual without values": ("ConfigError", "rank 1: "),
    "not tensors": ("ConfigError", "rank 1: "),
}
REFUSED = Battery(2, {kind: (refusal, (kind,)) for kind in REFUSALS}, group_timeout=10)


@pytest.mark.parametrize("kind", list(REFUSALS))
def test_states_that_do_not_fit_are_refused_alike_on_every_rank(kind: str) -> None:
    results = REFUSED[kind]
    name, text = REFUSALS[kind]
    assert results[0] == results[1]
    raised, said, unchanged, works = results[0]
    assert raised == name, said
    assert text in said
    assert unchanged
    assert works
