"""The invariants on real ranks under DDP: every registered compressor, every schedule, several buckets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import workers
from workers import SCHEDULES, Battery

from gradcomp.compressors import base

STEPS = 4
PADDING = ["fp16", "int8", "int4", "onebit", "topk"]
"""Compressors whose payloads are cut or padded by the number of ranks."""


def follow(rank: int, world: int, spec: str, schedule: str) -> dict[str, Any]:
    """Train a few steps and note everything that the invariants speak of."""
    ddp, optimizer, handle = workers.setup(spec, schedule=schedule)
    applied = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in ddp.module.named_parameters()}
    true = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in ddp.module.named_parameters()}
    digests = []
    with workers.recorded_requests() as requests:
        for step in range(STEPS):
            local = workers.local_gradients(ddp, step, rank)
            workers.train(ddp, optimizer, range(step, step + 1), rank)
            for name, gradient in workers.gradients(ddp).items():
                applied[name] += gradient
                true[name] += local[name]
            digests.append(workers.digest(ddp))
    true = workers.mean_over_ranks(true)
    residual = workers.gathered_residual(handle, ddp)
    stats = handle.stats()
    handle.close()
    return {
        "digests": digests,
        "requests": requests,
        "lost": workers.worst(applied, {n: true[n] - residual[n] for n in true}),
        "held": max(float(r.abs().max()) for r in residual.values()),
        "size": max(float(t.abs().max()) for t in true.values()),
        "stats": stats.as_dict(),
    }


def cases(specs: list[str], schedules: Sequence[str] = SCHEDULES) -> dict[Any, Any]:
    return {(spec, schedule): (follow, (spec, schedule)) for spec in specs for schedule in schedules}


RUNS = {
    2: Battery(2, cases(workers.all_specs())),
    3: Battery(3, cases(PADDING)),
    5: Battery(5, cases(PADDING, ["pipeline:depth=1", "thread"])),
}
KEYS = [(world, *key) for world, run in RUNS.items() for key in run.cases]
everywhere = pytest.mark.parametrize(("world", "spec", "schedule"), KEYS)


def follow_in_pieces(rank: int, world: int, spec: str, schedule: str) -> Any:
    """As large buckets go: each exchange in several pieces."""
    before = base._PIECE, base._MESSAGE_BYTES
    base._PIECE, base._MESSAGE_BYTES = 256, 1
    try:
        return follow(rank, world, spec, schedule)
    finally:
        base._PIECE, base._MESSAGE_BYTES = before


PIECES = Battery(2, {(s, n): (follow_in_pieces, (s, n)) for s in ("fp16", "int8", "onebit") for n in SCHEDULES})


@everywhere
def test_ranks_hold_the_same_bits_after_every_step(world: int, spec: str, schedule: str) -> None:
    results = RUNS[world][spec, schedule]
    assert len(set(results[0]["digests"])) == STEPS, "the parameters must move in every step"
    assert all(result["digests"] == results[0]["digests"] for result in results)


@everywhere
def test_every_rank_issues_the_same_collectives_in_the_same_order(world: int, spec: str, schedule: str) -> None:
    results = RUNS[world][spec, schedule]
    assert len(results[0]["requests"]) >= 3 * STEPS, "several buckets"
    assert all(result["requests"] == results[0]["requests"] for result in results)


@pytest.mark.parametrize(("spec", "schedule"), list(PIECES.cases))
def test_pieces_change_no_bit_and_overlap_in_the_same_order(spec: str, schedule: str) -> None:
    results, whole = PIECES[spec, schedule], RUNS[2][spec, schedule]
    for result in results:
        assert result["requests"] == results[0]["requests"]
        assert len(result["requests"]) > 2 * len(whole[0]["requests"])
        assert result["digests"] == whole[0]["digests"]


@pytest.mark.parametrize(
    ("world", "spec", "schedule"),
    [key for key in KEYS if key[1] in {*workers.feedback_specs(), "topk", "onebit", "int4"}],
)
def test_with_error_feedback_nothing_is_lost(world: int, spec: str, schedule: str) -> None:
    """Sum of what was applied = sum of the true means - residual."""
    for result in RUNS[world][spec, schedule]:
        assert result["held"] > 1e-5 * result["size"], "there must be something to hold back"
        assert result["lost"] < 1e-6 * result["size"]


@pytest.mark.parametrize(("world", "spec", "schedule"), [key for key in KEYS if key[1] not in ("none",)])
def test_stats_say_that_it_was_compressed(world: int, spec: str, schedule: str) -> None:
    for rank, result in enumerate(RUNS[world][spec, schedule]):
        stats = result["stats"]
        assert (stats["rank"], stats["world_size"], stats["steps"]) == (rank, world, STEPS)
        assert (stats["compressed_steps"], stats["skipped_steps"], stats["spec"]) == (STEPS, 0, spec)
        assert stats["schedule"] == schedule
        assert stats["ratio_per_step"] > 1.5
        assert (stats["memory_bytes"] > 0) == (spec in workers.feedback_specs() or "topk" in spec)


# ---------------------------------------------------------------- against the trainer's own all-reduce
def against_plain(rank: int, world: int, spec: str, schedule: str, options: dict[str, Any]) -> dict[str, Any]:
    """Each step from equal parameters: gradients by the hook, gradients by DDP alone, and the mean with its fp16 bound."""
    ddp, _, handle = workers.setup(spec, schedule=schedule, ddp=options)
    plain = workers.wrap(workers.Net(), **options)
    exact, excess = [], []
    for step in range(STEPS):
        local = workers.local_gradients(ddp, step, rank)
        for model in (ddp, plain):
            model.zero_grad()
            workers.loss_of(model, step, rank).backward()
        ours, theirs = workers.gradients(ddp), workers.gradients(plain)
        exact.append(all(torch.equal(ours[name], theirs[name]) for name in theirs))
        mean, size = workers.mean_over_ranks(local), workers.mean_over_ranks({n: g.abs() for n, g in local.items()})
        # every rank rounds its gradient, the owner rounds the mean: 2^-11 relative, or 2^-25 where fp16 is subnormal
        excess.append(max(float(((ours[n] - mean[n]).abs() / (2 * 2**-11 * size[n] + 2 * 2**-25)).max()) for n in mean))
        with torch.no_grad():
            for model in (ddp, plain):
                for name, parameter in model.module.named_parameters():
                    parameter -= 0.1 * mean[name].float()
    handle.close()
    return {"exact": exact, "excess": max(excess)}


PLAIN = {
    (world, spec, schedule, name): (against_plain, (spec, schedule, options))
    for world in (2, 3)
    for spec in ("none", "fp16")
    for schedule in (SCHEDULES if world == 2 else ("pipeline:depth=1",))
    for name, options in {"default": {}, "bucket_view": {"gradient_as_bucket_view": True}}.items()
}
PLAIN_RUNS = {world: Battery(world, {k: c for k, c in PLAIN.items() if k[0] == world}) for world in (2, 3)}


@pytest.mark.parametrize("key", [key for key in PLAIN if key[1] == "none"])
def test_none_is_the_all_reduce_of_ddp_bit_for_bit(key: Any) -> None:
    for result in PLAIN_RUNS[key[0]][key]:
        assert result["exact"] == [True] * STEPS


@pytest.mark.parametrize("key", [key for key in PLAIN if key[1] == "fp16"])
def test_fp16_is_the_mean_within_fp16_rounding(key: Any) -> None:
    for result in PLAIN_RUNS[key[0]][key]:
        assert result["excess"] <= 1.01
        assert result["exact"] == [False] * STEPS, "fp16 must have rounded something"


# ---------------------------------------------------------------- long runs in every mode of DDP
LONG = 200
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "find_unused": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "join": {},
}


def long_run(rank: int, world: int, spec: str, mode: str) -> dict[str, Any]:
    ddp, optimizer, handle = workers.setup(spec, ddp=MODES[mode])
    losses: list[float] = []
    with workers.recorded_requests() as requests:
        if mode == "join":  # rank 1 has less data
            with ddp.join():
                losses = workers.train(ddp, optimizer, range(LONG if rank == 0 else LONG - 30), rank)
        elif mode == "find_unused":
            for step in range(LONG):  # unused nowhere, on one rank, on both
                skip = (step % 4 == 1 and rank == 0) or step % 4 == 2
                losses += workers.train(ddp, optimizer, range(step, step + 1), rank, skip=skip)
        else:
            losses = workers.train(ddp, optimizer, range(LONG), rank)
    return {"losses": losses, "digest": workers.digest(ddp), "requests": requests, "stats": handle.stats().as_dict()}


LONG_RUNS = Battery(
    2, {(spec, mode): (long_run, (spec, mode)) for spec in ("powersgd", "onebit") for mode in MODES}, timeout=110
)


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "mode"), list(LONG_RUNS.cases))
def test_two_hundred_steps_with_several_buckets(spec: str, mode: str) -> None:
    results = LONG_RUNS[spec, mode]
    assert results[0]["digest"] == results[1]["digest"]
    assert results[0]["requests"] == results[1]["requests"]
    assert results[0]["stats"]["steps"] == results[1]["stats"]["steps"] == LONG
    assert len(results[0]["requests"]) > 3 * LONG, "several buckets"
    losses = results[0]["losses"]
    assert sum(losses[-10:]) < 0.2 * sum(losses[:10])
