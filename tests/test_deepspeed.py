"""DeepSpeed on real ranks: every ZeRO stage and the settings that change how gradients move, against DeepSpeed itself."""

from __future__ import annotations

from typing import Any

import deepspeed_workers as ds
import pytest
import torch
from deepspeed_workers import settings
from workers import Battery

STAGES = (0, 1, 2, 3)
STEPS = 6
SMALL = {"reduce_bucket_size": 5000}
"""Between one and two layers of the model: several buckets, and the largest layers bypass DeepSpeed's bucket buffer."""
TINY = {"reduce_bucket_size": 3000}

VARIANTS: dict[str, dict[str, Any]] = {
    **{f"zero{stage}": settings(stage) for stage in STAGES},
    **{f"zero{stage} bf16": settings(stage, "bf16") for stage in STAGES},
    **{f"zero{stage} fp16": settings(stage, "fp16") for stage in STAGES},
    **{f"zero{stage} accumulating": settings(stage, gradient_accumulation_steps=3) for stage in STAGES},
    **{f"zero{stage} clipping": settings(stage, gradient_clipping=0.05) for stage in STAGES},
    **{f"zero{stage} small buckets": settings(stage, zero={**SMALL, "overlap_comm": True}) for stage in (1, 2, 3)},
    "zero2 tiny buckets": settings(2, zero=TINY),
    **{f"zero{stage} not contiguous": settings(stage, zero={"contiguous_gradients": False}) for stage in (1, 2, 3)},
    **{f"zero{stage} all-reduce": settings(stage, zero={"reduce_scatter": False}) for stage in (2, 3)},
    "zero2 to owners": settings(2, zero={"use_multi_rank_bucket_allreduce": False}),
    "zero2 round robin": settings(2, zero={"round_robin_gradients": True}),
    "zero2 offload": settings(2, zero={"offload_optimizer": {"device": "cpu", "pin_memory": False}}),
    "zero3 offload": settings(3, zero={"offload_optimizer": {"device": "cpu", "pin_memory": False}}),
    "BF16_Optimizer": settings(1, "bf16", data_types={"grad_accum_dtype": "fp32"}),
    "zero2 bf16, fp32 sums": settings(
        2, "bf16", data_types={"grad_accum_dtype": "fp32"}, gradient_accumulation_steps=2
    ),
    **{f"zero{stage} unmanaged": settings(stage, managed_gradient_accumulation=False) for stage in (1, 2)},
}
EVERYWHERE = [f"zero{stage}" for stage in STAGES]
SPECS = ("none", "fp16", "bf16", "int8", "int4", "onebit", "powersgd", "topk")


def follow(
    rank: int, world: int, variant: str, spec: str | None, steps: int = STEPS, coalesce: int = 0, **options: Any
) -> dict[str, Any]:
    """Train and note everything that the tests speak of; without ``spec`` DeepSpeed alone."""
    engine = ds.make_engine(VARIANTS[variant])
    handle, said = ds.attach(engine, spec, **options) if spec else (None, [])
    losses = ds.train(engine, range(steps), rank, coalesce=coalesce)
    return {
        "digest": ds.digest(engine),
        "loss": ds.evaluation_loss(engine),
        "losses": losses,
        "norm": float(engine.get_global_grad_norm() or 0.0),
        "stats": handle.stats().as_dict() if handle else None,
        "warned": said,
    }


def fits(variant: str, spec: str | None) -> bool:
    """Stage 3 needs a compressor that can be reduce-scattered."""
    return not (variant.startswith("zero3") and spec in ("powersgd", "topk"))


# ---------------------------------------------------------------- experts
# ranks, stage, and among how many ranks the experts are dealt out
MOE = [*((2, stage, apart) for stage in (0, 1, 2) for apart in (1, 2)), (4, 0, 2), (4, 2, 2)]


def mixture(rank: int, world: int, stage: int, ep_size: int, spec: str | None) -> dict[str, Any]:
    """Two experts, on every rank or one on each; experts that a rank shares with others are averaged with those."""
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    class Mixture(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.before, self.after = torch.nn.Linear(32, 64), torch.nn.Linear(64, 4)
            expert = torch.nn.Linear(64, 64)
            self.moe = MoE(64, expert, num_experts=2, ep_size=ep_size, k=1, capacity_factor=4.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mixed: torch.Tensor = self.moe(torch.tanh(self.before(x)))[0]
            return self.after(mixed)

    with ds.quiet():
        model = Mixture()
        groups = split_params_into_different_moe_groups_for_optimizer(
            {"params": list(model.parameters()), "name": "all"}
        )
        optimizer = torch.optim.AdamW(groups, lr=3e-3, foreach=False)
        engine = ds.make_engine(settings(stage), model, optimizer=optimizer)
    handle, _ = ds.attach(engine, spec) if spec else (None, [])
    losses = ds.train(engine, range(20), rank)
    shared = [n for n, p in engine.module.named_parameters() if ep_size == 1 or getattr(p, "allreduce", True)]
    values = dict(engine.module.named_parameters())
    return {
        "all": ds.digest(engine),
        "shared": [values[name].detach().sum().item() for name in shared],
        "losses": losses,
        "experts": len(handle.experts) if handle else None,
        "stats": handle.stats().as_dict() if handle else None,
    }


START = {"start": (ds.start, ())}
CASES: dict[Any, Any] = {
    **START,
    **{(variant, spec): (follow, (variant, spec)) for variant in VARIANTS for spec in (None, "none", "int8")},
    **{(v, s): (follow, (v, s)) for v in [*EVERYWHERE, "BF16_Optimizer"] for s in SPECS if fits(v, s)},
    **{
        (f"{variant} coalescing", spec): (follow, (variant, spec, STEPS, 3))
        for variant in ("zero1", "zero2", "zero3")
        for spec in (None, "none", "int8")
    },
}
MOE_RUNS = {
    world: Battery(
        world,
        {
            **START,
            **{
                (s, ep, spec): (mixture, (s, ep, spec))
                for w, s, ep in MOE
                if w == world
                for spec in (None, "none", "int8")
            },
        },
        timeout=280,
    )
    for world in (2, 4)
}
CASES_3 = {
    **START,
    **{(v, s): (follow, (v, s)) for v in EVERYWHERE for s in (None, *SPECS) if fits(v, s)},
    **{
        (v, s): (follow, (v, s)) for v in ("zero2 bf16", "zero3 fp16", "BF16_Optimizer") for s in (None, "none", "int8")
    },
}
RUNS = {2: Battery(2, CASES, timeout=280), 3: Battery(3, CASES_3, timeout=280)}
ALL = [(world, *key) for world, run in RUNS.items() for key in run.cases if key != "start"]
pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(("world", "variant", "spec"), [key for key in ALL if key[2]])
def test_ranks_hold_the_same_bits(world: int, variant: str, spec: str) -> None:
    results = RUNS[world][variant, spec]
    assert len({result["digest"] for result in results}) == 1
    assert results[0]["stats"]["steps"] == STEPS


@pytest.mark.parametrize(("world", "variant"), [key[:2] for key in ALL if key[2] == "none"])
def test_none_is_deepspeed_bit_for_bit(world: int, variant: str) -> None:
    run = RUNS[world]
    ours, theirs = run[variant, "none"][0], run[variant, None][0]
    assert ours["digest"] == theirs["digest"]
    assert ours["losses"] == theirs["losses"]
    assert ours["stats"]["ratio"] == 1.0


@pytest.mark.parametrize(("world", "variant"), [key[:2] for key in ALL if key[2] == "int8"])
def test_int8_stays_near_and_sends_less(world: int, variant: str) -> None:
    run = RUNS[world]
    ours, theirs = run[variant, "int8"][0], run[variant, None][0]
    assert ours["digest"] != theirs["digest"], "something must have been rounded"
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.01)
    halved = "bf16" in variant.lower() or "fp16" in variant
    assert ours["stats"]["ratio_per_step"] > (1.5 if halved else 3.0)
    assert ours["stats"]["compressed_steps"] == STEPS


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(
    "how", ["small buckets", "not contiguous", "all-reduce", "to owners", "round robin", "tiny buckets"]
)
def test_buckets_and_layouts_do_not_change_a_bit(stage: int, how: str) -> None:
    """Blocks and their owners belong to parameters, and two ranks' sums do not depend on the order."""
    variant = f"zero{stage} {how}"
    if variant not in VARIANTS:
        variant = f"zero2 {how}"
    assert RUNS[2][variant, "int8"][0]["digest"] == RUNS[2][f"zero{stage}", "int8"][0]["digest"]


@pytest.mark.parametrize("variant", [v for v in VARIANTS if "clipping" in v and "zero0" not in v])
def test_clipping_sees_the_averaged_gradient(variant: str) -> None:
    """The norm that DeepSpeed clips by is that of the mean, not of what one rank had."""
    ours, theirs = RUNS[2][variant, "int8"][0], RUNS[2][variant, None][0]
    assert theirs["norm"] > 0.05, "clipping must take place"
    assert ours["norm"] == pytest.approx(theirs["norm"], rel=0.01)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_micro_batches_are_exchanged_one_by_one_from_stage_2_on_unless_coalesced(stage: int) -> None:
    plain, each, coalesced = (
        RUNS[2][f"zero{stage}{how}", "int8"][0]["stats"]["wire_bytes"] for how in ("", " accumulating", " coalescing")
    )
    assert each == pytest.approx(plain * (1 if stage == 1 else 3), rel=0.01)
    assert coalesced == pytest.approx(plain, rel=0.01)


@pytest.mark.parametrize("spec", ["int4", "onebit", "powersgd", "topk"])
def test_residuals_are_kept_below_stage_2_only_unless_asked_for(spec: str) -> None:
    for variant in [v for v in EVERYWHERE if fits(v, spec)]:
        result = RUNS[2][variant, spec][0]
        said = " ".join(result["warned"])
        held, stage = result["stats"]["memory_bytes"], int(variant[-1])
        if stage >= 2:
            assert held < 10_000, "PowerSGD's warm starts"
            assert "error feedback of" in said
            assert "is off" in said
            assert "bytes" in said
        else:
            assert held >= 8 * 14336, "two fp32 copies of the compressed matrices"
            assert ("bytes on every rank" in said) == (stage == 1)


@pytest.mark.parametrize(("world", "stage", "ep_size"), MOE)
def test_experts_are_averaged_with_those_who_share_them(world: int, stage: int, ep_size: int) -> None:
    theirs, exact, ours = (MOE_RUNS[world][stage, ep_size, spec] for spec in (None, "none", "int8"))
    assert [result["all"] for result in exact] == [result["all"] for result in theirs]
    assert all(result["shared"] == ours[0]["shared"] for result in ours)
    assert [result["all"] for result in ours[:ep_size]] == [result["all"] for result in ours[-ep_size:]]
    assert ours[0]["all"] != theirs[0]["all"]
    assert ours[0]["experts"] == (1 if world == 4 else 0), "shared with all ranks, or alone, experts need no handle"
    assert ours[0]["stats"]["ratio"] > (1.5 if (world, ep_size) == (2, 2) else 2.5)
    assert sum(ours[0]["losses"][-5:]) == pytest.approx(sum(theirs[0]["losses"][-5:]), rel=0.02)


# ---------------------------------------------------------------- long runs
LONG = 300
LONG_RUNS = Battery(
    2,
    {
        **START,
        **{(f"zero{s}", spec): (follow, (f"zero{s}", spec, LONG)) for s in STAGES for spec in (None, "int8")},
    },
    timeout=280,
)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_int8_after_300_steps_is_within_a_percent(stage: int) -> None:
    ours, theirs = (LONG_RUNS[f"zero{stage}", spec][0] for spec in ("int8", None))
    assert sum(theirs["losses"][-10:]) < 0.1 * sum(theirs["losses"][:10])
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.01)
