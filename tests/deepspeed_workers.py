"""Engines, data and checks of the DeepSpeed tests, run on every rank of a launch (see :class:`workers.Battery`).

DeepSpeed is imported where it is used, in the ranks: importing it here would cost every test run seconds.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Any

import torch
from torch import Tensor, nn
from workers import Net, batch

import gradcomp

MICRO_BATCH = 16


def start(rank: int, world: int) -> None:
    """DeepSpeed on CPU and gloo: no compiled operation, fp16 allowed, quiet. Once per launch."""
    os.environ.update(DS_ACCELERATOR="cpu", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed
        from deepspeed.accelerator import get_accelerator

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled, for a minute
        type(get_accelerator()).is_fp16_supported = lambda self: True
        deepspeed.init_distributed("gloo")


@contextmanager
def quiet() -> Iterator[None]:
    """DeepSpeed's prints, and its and torch's own warnings, are not ours; gradcomp's warnings stay errors."""
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message="gradcomp")
        yield


def settings(stage: int, dtype: str = "fp32", **changes: Any) -> dict[str, Any]:
    """A configuration; ``zero`` is merged into its section."""
    zero = {"stage": stage, "overlap_comm": False, **changes.pop("zero", {})}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH, "gradient_accumulation_steps": 1, "steps_per_print": 10**9,
        "zero_optimization": zero, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,
    }  # fmt: skip
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if dtype == "fp16":
        config["fp16"] = {
            "enabled": True, "initial_scale_power": 8, "loss_scale_window": 40, "hysteresis": 1, "min_loss_scale": 1
        }  # fmt: skip
    return {**config, **changes}


def make_engine(
    config: Mapping[str, Any], model: nn.Module | None = None, *, lr: float = 3e-3, initialize: Any = None, **given: Any
) -> Any:
    """An engine by DeepSpeed's ``initialize``, or by ours."""
    import deepspeed

    model = Net() if model is None else model
    with quiet():
        if "optimizer" not in given:
            given["optimizer"] = torch.optim.AdamW(model.parameters(), lr=lr, foreach=False)
        call: Callable[..., Any] = initialize or deepspeed.initialize
        return call(model=model, config=dict(config), **given)[0]


def attach(engine: Any, spec: Any, **options: Any) -> tuple[Any, list[str]]:
    """The handle, and what gradcomp warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        handle = gradcomp.register(engine, spec, **options)
    return handle, [str(each.message) for each in caught if "gradcomp" in str(each.message)]


def loss_of(engine: Any, step: int, rank: int) -> Tensor:
    """The loss of a micro-batch."""
    x, y = batch(step, rank, MICRO_BATCH)
    dtype = next(engine.module.parameters()).dtype
    return nn.functional.mse_loss(engine(x.to(dtype)).float(), y)


def train(engine: Any, steps: range, rank: int, spikes: Sequence[int] = (), coalesce: int = 0) -> list[float]:
    """Optimizer steps; in ``spikes`` rank 1's gradients overflow fp16 in the last micro-batch.

    ``coalesce``: so many backward passes in each ``coalesce_grad_reduction()``.
    """
    losses, micro = [], coalesce or engine.gradient_accumulation_steps()
    with quiet():
        for step in steps:
            with engine.coalesce_grad_reduction() if coalesce else nullcontext():
                for part in range(micro):
                    loss = loss_of(engine, step * micro + part, rank)
                    losses.append(float(loss.detach()))
                    spike = step in spikes and rank == 1 and part == micro - 1
                    engine.backward(loss * 1e7 if spike else loss)
                    if not coalesce:
                        engine.step()
            if coalesce:
                engine.step()
    return losses


def parameters(engine: Any) -> Tensor:
    """All parameters, whole."""
    import deepspeed

    everything = list(engine.module.parameters())
    with quiet(), torch.no_grad():
        gather = engine.zero_optimization_stage() == 3
        with deepspeed.zero.GatheredParameters(everything) if gather else nullcontext():
            return torch.cat([p.detach().float().flatten() for p in everything]).clone()


def digest(engine: Any) -> str:
    """A hash of every bit of the parameters."""
    return hashlib.sha256(parameters(engine).numpy().tobytes()).hexdigest()


def evaluation_loss(engine: Any) -> float:
    """On data of its own, the same on all ranks."""
    with quiet(), torch.no_grad():
        return sum(float(loss_of(engine, 1_000_000 + step, 0)) for step in range(8)) / 8


def same(one: Any, other: Any) -> bool:
    """Whether two states hold the same bits."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
