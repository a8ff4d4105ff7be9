"""The optimizers that DeepSpeed removed, as its client optimizers, from the configurations that were written for them."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import deepspeed_workers as ds
import pytest
import torch
import torch.distributed as dist
import workers
from deepspeed_workers import settings
from workers import Battery, Net

from gradcomp.errors import ConfigError, UnsupportedError
from gradcomp.optim import OneBitAdam

pytestmark = pytest.mark.timeout(300)
FREEZE, STEPS = 6, 20

OLD: dict[str, dict[str, Any]] = {
    "OneBitAdam": {
        "lr": 3e-3, "freeze_step": FREEZE, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01, "cuda_aware": False,
        "comm_backend_name": "nccl",
    },
    "ZeroOneAdam": {"lr": 3e-3, "var_freeze_step": FREEZE, "local_step_scaler": 4, "local_step_clipper": 2, "cuda_aware": False},
    "OneBitLamb": {"lr": 1e-2, "freeze_step": FREEZE, "max_coeff": 10.0, "min_coeff": 0.01, "coeff_beta": 0.9},
}  # fmt: skip
"""The sections ``optimizer.params`` of DeepSpeed 0.19.6's documentation, with other numbers."""


def old_config(kind: str, dtype: str = "fp32", **changes: Any) -> dict[str, Any]:
    return settings(0, dtype, optimizer={"type": kind, "params": OLD[kind]}, **changes)


def make(config: dict[str, Any], seed: int = 0, **given: Any) -> Any:
    """An engine, through our initialize; what the old options bring as warnings is expected."""
    from gradcomp.integrations.deepspeed import initialize

    model = Net(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = given or {"optimizer": None, "model_parameters": model.parameters()}
        return initialize(model=model, config=config, **given)[0]


def follow(rank: int, world: int, kind: str, dtype: str) -> dict[str, Any]:
    engine = make(old_config(kind, dtype))
    losses = ds.train(engine, range(STEPS), rank)
    stats = engine.gradcomp.stats()
    if kind == "ZeroOneAdam":
        engine.basic_optimizer.synchronize()
        parameters = torch.cat(
            [p.detach().float().flatten() for g in engine.optimizer.param_groups for p in g["params"]]
        )
    else:
        parameters = ds.parameters(engine)
    everyone = [torch.zeros_like(parameters) for _ in range(world)]
    dist.all_gather(everyone, parameters)
    return {
        "kind": type(engine.gradcomp).__name__,
        "losses": losses,
        "same": all(torch.equal(everyone[0], each) for each in everyone),
        "ratio": stats.ratio,
        "last": stats.ratio_per_step,
        "steps": (stats.steps, stats.skipped_steps),
        "bypassed": sorted(stats.bypassed),
    }


def by_hand(rank: int, world: int) -> bool:
    """The same bits as without DeepSpeed: plain torch, the same data, no clipping."""
    engine = make(old_config("OneBitAdam"))
    ds.train(engine, range(STEPS), rank)
    model = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = OneBitAdam(model.parameters(), module=model, **OLD["OneBitAdam"])
    workers.train(model, optimizer, range(STEPS), rank)
    return torch.equal(torch.cat([p.detach().flatten() for p in model.parameters()]), ds.parameters(engine))


def clipped(rank: int, world: int) -> dict[str, Any]:
    """DeepSpeed's gradient_clipping bounds the averaged gradient, not a rank's own."""
    engine = make(old_config("OneBitAdam", gradient_clipping=0.02))
    ds.train(engine, range(3), rank)
    model = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = OneBitAdam(model.parameters(), module=model, max_grad_norm=0.02, **OLD["OneBitAdam"])
    workers.train(model, optimizer, range(3), rank)
    unclipped = make(old_config("OneBitAdam"))
    ds.train(unclipped, range(3), rank)
    ours = ds.parameters(engine)
    return {
        "limit": engine.basic_optimizer.max_grad_norm,
        "as torch": torch.equal(torch.cat([p.detach().flatten() for p in model.parameters()]), ours),
        "matters": not torch.equal(ours, ds.parameters(unclipped)),
    }


def overflow(rank: int, world: int) -> dict[str, Any]:
    engine = make(old_config("OneBitAdam", "fp16"))
    losses = ds.train(engine, range(8), rank)
    before = engine.basic_optimizer.momentum_handle.state_dict()
    ds.train(engine, range(8, 10), rank, spikes=(8, 9))
    kept = ds.same(before, engine.basic_optimizer.momentum_handle.state_dict())
    losses += ds.train(engine, range(10, 40), rank)
    return {"skipped": engine.skipped_steps, "kept": kept, "losses": losses, "digest": ds.digest(engine)}


def resume(rank: int, world: int, kind: str, dtype: str) -> dict[str, Any]:
    where = [tempfile.mkdtemp(prefix="gradcomp-deepspeed-") if rank == 0 else None]
    dist.broadcast_object_list(where, src=0)
    folder, config = Path(str(where[0])), old_config(kind, dtype)
    engine = make(config)
    ds.train(engine, range(10), rank)
    with ds.quiet():
        engine.save_checkpoint(str(folder))
    saved = engine.basic_optimizer.momentum_handle.state_dict()
    ds.train(engine, range(10, 14), rank)

    again = make(config, seed=1)
    with ds.quiet():
        again.load_checkpoint(str(folder))
    loaded = again.basic_optimizer.momentum_handle.state_dict()
    restored = all(ds.same(saved[kind], loaded[kind]) for kind in ("step", "worker", "server", "factor"))
    ds.train(again, range(10, 14), rank)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    held = any(bool(v.abs().max() > 0) for v in saved["worker"].values())
    return {"exact": torch.equal(ds.parameters(engine), ds.parameters(again)), "restored": restored, "held": held}


def refusals(rank: int, world: int) -> dict[str, str]:
    import deepspeed

    from gradcomp.integrations.deepspeed import attach_optimizer

    def answer(call: Any) -> str:
        try:
            with ds.quiet():
                call()
        except (ConfigError, UnsupportedError) as error:
            return f"{type(error).__name__}: {error}"
        return "accepted"

    def plain(config: dict[str, Any]) -> Any:
        model = Net()
        optimizer = OneBitAdam(model.parameters(), freeze_step=2)
        return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

    def client(config: dict[str, Any]) -> Any:
        model = Net()
        return make(config, optimizer=OneBitAdam(model.parameters(), freeze_step=2))

    zero = {**old_config("OneBitAdam"), "zero_optimization": {"stage": 1}}
    zero_warmup = old_config("OneBitAdam")
    zero_warmup["optimizer"] = {"type": "OneBitAdam", "params": {"freeze_step": 0}}
    unknown = old_config("OneBitAdam")
    unknown["optimizer"] = {"type": "OneBitAdam", "params": {"freeze_steps": 3}}
    both = {**old_config("OneBitAdam"), "gradcomp": {"compressor": "int8"}}
    return {
        "zero": answer(lambda: make(zero)),
        "client under zero": answer(lambda: client(settings(2))),
        "no warm-up": answer(lambda: make(zero_warmup)),
        "unknown": answer(lambda: make(unknown)),
        "both": answer(lambda: make(both)),
        "register": answer(lambda: __import__("gradcomp").register(make(old_config("OneBitAdam")))),
        "another": answer(lambda: attach_optimizer(ds.make_engine(settings(0)))),
        "stock, fp32": answer(lambda: ds.train(plain(settings(0)), range(1), rank)),
        "stock, fp16": answer(lambda: plain(settings(0, "fp16"))),
        "stock, zero": answer(lambda: ds.train(plain(settings(2)), range(1), rank)),
    }


RUN = Battery(
    2,
    {
        "start": (ds.start, ()),
        **{("follow", kind, dtype): (follow, (kind, dtype)) for kind in OLD for dtype in ("fp32", "bf16", "fp16")},
        "by hand": (by_hand, ()),
        "clipped": (clipped, ()),
        "overflow": (overflow, ()),
        **{("resume", kind, "fp32"): (resume, (kind, "fp32")) for kind in OLD},
        ("resume", "OneBitAdam", "fp16"): (resume, ("OneBitAdam", "fp16")),
        "refusals": (refusals, ()),
    },
    timeout=280,
)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("kind", list(OLD))
def test_an_old_configuration_runs_and_saves_bytes(kind: str, dtype: str) -> None:
    for result in RUN["follow", kind, dtype]:
        assert result["kind"] == kind
        assert result["same"]
        assert sum(result["losses"][-4:]) < sum(result["losses"][:4])
        assert result["steps"] == (STEPS, 0), "and not one more, which DeepSpeed's fp16 optimizer takes when it is made"
        assert result["ratio"] > 1.5
        assert result["last"] > (8 if kind != "ZeroOneAdam" else 5)
        assert "layers.0.weight" not in result["bypassed"], "names come from the model, also for master copies"
        assert "layers.0.bias" in result["bypassed"]


def test_the_same_bits_as_without_deepspeed() -> None:
    assert all(RUN["by hand"])


def test_clipping_is_done_by_the_optimizer() -> None:
    for result in RUN["clipped"]:
        assert result == {"limit": 0.02, "as torch": True, "matters": True}


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    results = RUN["overflow"]
    for result in results:
        assert result["skipped"] == 2
        assert result["kept"]
        assert sum(result["losses"][-4:]) < sum(result["losses"][:4])
    assert results[0]["digest"] == results[1]["digest"]


@pytest.mark.parametrize(("kind", "dtype"), [*((kind, "fp32") for kind in OLD), ("OneBitAdam", "fp16")])
def test_resume_restores_every_ranks_residuals(kind: str, dtype: str) -> None:
    for result in RUN["resume", kind, dtype]:
        assert result == {"exact": True, "restored": True, "held": True}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("zero", "OneBitAdam runs at ZeRO stage 0 only"),
        ("client under zero", "OneBitAdam runs at ZeRO stage 0 only"),
        ("no warm-up", "freeze_step=0"),
        ("unknown", "optimizer.params of OneBitAdam={'freeze_steps': 3}"),
        ("both", "allowed is nothing with OneBitAdam"),
        ("register", "OneBitAdam exchanges momentum itself"),
        ("another", "attach_optimizer() needs an engine whose optimizer is one of OneBitAdam, ZeroOneAdam, OneBitLamb"),
        ("stock, fp32", "call gradcomp.integrations.deepspeed.initialize() instead of deepspeed.initialize()"),
        ("stock, fp16", "has replaced the parameters of OneBitAdam"),
        ("stock, zero", "has replaced the parameters of OneBitAdam"),
    ],
)
def test_what_cannot_work_is_refused(name: str, text: str) -> None:
    for answers in RUN["refusals"]:
        assert text in answers[name]
