"""inf and NaN reach every rank, cost one step and leave no trace; loss scales come and go without disturbing residuals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import workers
from workers import Battery

import gradcomp

PLACES = {"matrix": ("layers.1.weight", 70), "bypassed": ("layers.3.bias", 5), "alone": ("layers.4.weight", 9)}
"""Where the bad value stands: in a compressed matrix, and in parameters that most compressors leave out."""
VALUES = {"inf": math.inf, "nan": math.nan}


class Poison:
    """Puts ``value`` into one element of a parameter's gradient in the steps and on the ranks that :attr:`on` says."""

    def __init__(self, model: torch.nn.Module, place: str, value: float) -> None:
        name, index = PLACES[place]
        self.on = False
        self._index, self._value = index, value
        dict(model.named_parameters())[name].register_hook(self._hook)

    def _hook(self, gradient: torch.Tensor) -> torch.Tensor:
        if not self.on:
            return gradient
        poisoned = gradient.clone()
        poisoned.view(-1)[self._index] = self._value
        return poisoned


def state_of(handle: Any) -> dict[str, torch.Tensor]:
    state = handle.state_dict()
    flat = {f"worker {n}": v for n, v in state["worker"].items()}
    return flat | {f"{kind} {n}": i["values"] for kind in ("server", "factor") for n, i in state[kind].items()}


def one_bad_step(rank: int, world: int, spec: str, place: str, value: str, bad: int, schedule: str) -> dict[str, Any]:
    """Training with a GradScaler; step ``bad`` has one bad value on rank 1 only."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    ddp, optimizer, handle = workers.setup(spec, scaler=scaler, schedule=schedule)
    poison = Poison(ddp.module, place, VALUES[value])
    finite, moved, skipped_state = [], [], False
    losses = []
    for step in range(6):
        poison.on = step == bad and rank == 1
        before, parameters = state_of(handle), workers.digest(ddp)
        optimizer.zero_grad()
        loss = workers.loss_of(ddp, step, rank)
        scaler.scale(loss).backward()
        finite.append(all(bool(torch.isfinite(p.grad).all()) for p in ddp.parameters()))
        scaler.step(optimizer)
        scaler.update()
        after = state_of(handle)
        if step == bad:
            fresh = not before  # in the first step the buffers appear; they must be as new
            names = after.keys() if fresh else before.keys()
            skipped_state = after.keys() == names and all(
                torch.equal(after[n], torch.zeros_like(after[n])) if fresh else torch.equal(after[n], before[n])
                for n in names
                if not (fresh and n.startswith("factor"))
            )
        moved.append(parameters != workers.digest(ddp))
        losses.append(loss.item())
    stats = handle.stats()
    handle.close()
    return {
        "finite": finite, "moved": moved, "kept": skipped_state, "losses": losses, "digest": workers.digest(ddp),
        "skipped": stats.skipped_steps, "steps": stats.steps, "scale": scaler.get_scale(),
        "end": all(bool(torch.isfinite(v).all()) for v in state_of(handle).values()),
    }  # fmt: skip


CASES = {
    **{(s, p, v, 3, "auto"): () for s in workers.all_specs() for p, v in (("matrix", "inf"), ("bypassed", "nan"))},
    **{(s, p, v, 3, "auto"): () for s in workers.feedback_specs() for p, v in (("matrix", "nan"), ("bypassed", "inf"))},
    **{(s, p, "inf", 0, "auto"): () for s in workers.feedback_specs() for p in ("matrix", "bypassed", "alone")},
    **{(s, "bypassed", "inf", 3, t): () for s in ("onebit", "topk") for t in workers.SCHEDULES},
}
BAD = Battery(2, {key: (one_bad_step, key) for key in CASES}, timeout=110)


@pytest.mark.parametrize("key", list(CASES), ids=lambda key: "-".join(map(str, key)))
def test_a_bad_value_on_one_rank_costs_every_rank_that_step_and_nothing_else(key: Any) -> None:
    results = BAD[key]
    spec, _, _, bad, _ = key
    for result in results:
        expected = [step != bad for step in range(6)]
        assert result["finite"] == expected
        assert result["moved"] == expected
        assert result["kept"], "residuals and warm starts must be the same bits before and after"
        assert result["end"]
        assert result["scale"] == 2.0**9, "one back-off"
        assert result["steps"] == 6
        assert result["digest"] == results[0]["digest"]
        assert all(math.isfinite(loss) for loss in result["losses"])
        assert result["skipped"] == (0 if spec == "none" else 1), "uncompressed steps are looked at when somebody asks"


# ---------------------------------------------------------------- several buckets by dtype, from the first step
class Both(torch.nn.Module):
    """fp32 layers, and a small bf16 layer that has a bucket of its own."""

    full: torch.nn.Module
    bf16: torch.nn.Module

    def __init__(self, bf16_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        modules = {"full": workers.Net(), "bf16": torch.nn.Linear(8, 4, dtype=torch.bfloat16)}
        for name in sorted(modules, reverse=not bf16_first):
            self.add_module(name, modules[name])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.full(x) + self.bf16(x[:, :8].bfloat16()).float()
        return result


def one_bad_bucket(rank: int, world: int, spec: str, order: str) -> dict[str, Any]:
    """Two buckets in the very first step, of which only one is compressed; the bad value is in the other."""
    both = Both(order == "bf16 first")
    ddp = workers.wrap(both)
    handle = gradcomp.register(ddp, spec, backend=workers.BACKEND)
    both.bf16.weight.register_hook(lambda g: torch.full_like(g, math.inf) if rank == 1 else g)
    workers.loss_of(ddp, 0, rank).backward()
    residual = {n: v for n, v in state_of(handle).items() if not n.startswith("factor")}
    return {
        "finite": all(bool(torch.isfinite(p.grad).all()) for p in ddp.parameters()),
        "untouched": bool(residual) and all(not v.any() for v in residual.values()),
        "skipped": handle.stats().skipped_steps,
    }


FIRST = Battery(
    2,
    {
        (spec, order): (one_bad_bucket, (spec, order))
        for spec in workers.feedback_specs()
        for order in ("bf16 first", "bf16 last")
    },
)


@pytest.mark.parametrize(("spec", "order"), list(FIRST.cases))
def test_a_bad_value_in_an_uncompressed_bucket_of_the_first_step_changes_no_residual(spec: str, order: str) -> None:
    for result in FIRST[spec, order]:
        assert result == {"finite": False, "untouched": True, "skipped": 1}


# ---------------------------------------------------------------- loss scales
def with_scales(rank: int, world: int, spec: str, scales: tuple[float, ...]) -> dict[str, Any]:
    """Twelve steps; the scale changes after every four."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scales[0], growth_interval=1000)
    ddp, optimizer, handle = workers.setup(spec, scaler=scaler)
    for step in range(12):
        optimizer.zero_grad()
        scaler.scale(workers.loss_of(ddp, step, rank)).backward()
        scaler.step(optimizer)
        scaler.update(scales[(step + 1) // 4 % 3])
    residual = {f"residual {n}": v for n, v in workers.gathered_residual(handle, ddp).items()}
    return {n: p.detach().double().numpy() for n, p in ddp.module.named_parameters()} | {
        n: v.numpy() for n, v in residual.items()
    }


SCALES = {"constant": (1024.0, 1024.0, 1024.0), "changing": (1024.0, 4096.0, 256.0), "one": (1.0, 1.0, 1.0)}
SCALED = Battery(
    2, {(spec, name): (with_scales, (spec, scales)) for spec in workers.all_specs() for name, scales in SCALES.items()}
)


@pytest.mark.parametrize("spec", workers.all_specs())
def test_changing_the_loss_scale_does_not_disturb_residuals(spec: str) -> None:
    """Powers of two scale exactly, so even the bits agree where no value leaves the range of its type."""
    constant = SCALED[spec, "constant"][0]
    for name in ("changing", "one"):
        other = SCALED[spec, name][0]
        for parameter, values in constant.items():
            assert abs(values - other[parameter]).max() <= 1e-6 * max(1e-3, abs(values).max()), (name, parameter)


# ---------------------------------------------------------------- without a scaler
def without_scaler(rank: int, world: int, spec: str) -> dict[str, Any]:
    """A user's own guard: no GradScaler, skip the step if the gradients are not finite."""
    ddp, optimizer, handle = workers.setup(spec)
    poison = Poison(ddp.module, "matrix", math.nan)
    skipped = []
    for step in range(8):
        poison.on = step in (2, 5) and rank == 0
        optimizer.zero_grad()
        workers.loss_of(ddp, step, rank).backward()
        bad = not handle.last_step_finite
        skipped.append(bad)
        if not bad:
            optimizer.step()
    verdicts: list[Any] = [None] * world
    dist.all_gather_object(verdicts, skipped)
    losses = workers.train(ddp, optimizer, range(8, 10), rank)
    return {"verdicts": verdicts, "digest": workers.digest(ddp), "finite": math.isfinite(sum(losses))}


GUARDED = Battery(2, {spec: (without_scaler, (spec,)) for spec in ["none", *workers.feedback_specs()]})


@pytest.mark.parametrize("spec", ["none", *workers.feedback_specs()])
def test_last_step_finite_tells_every_rank_the_same(spec: str) -> None:
    results = GUARDED[spec]
    for result in results:
        assert result["verdicts"] == [[step in (2, 5) for step in range(8)]] * 2
        assert result["finite"]
    assert results[0]["digest"] == results[1]["digest"]
