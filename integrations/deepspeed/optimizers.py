"""gradcomp's optimizers as DeepSpeed's client optimizer, at stage 0: successors of those that DeepSpeed removed.

The engine reduces no gradients and clips none: the optimizer exchanges exact gradients during its warm-up and compressed
momentum afterwards, and clips what it has averaged (see :mod:`gradcomp.optim.base`). In fp16 and bf16 it steps DeepSpeed's
fp32 master copies, and an overflow on one rank skips the step on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

from gradcomp.errors import ConfigError, UnsupportedError
from gradcomp.integrations.deepspeed import checkpoint, stages
from gradcomp.integrations.deepspeed.checks import agree_on_engine
from gradcomp.optim import OneBitAdam, OneBitLamb, ZeroOneAdam
from gradcomp.optim.base import ExchangingOptimizer

OPTIMIZERS: dict[str, type[ExchangingOptimizer]] = {
    "OneBitAdam": OneBitAdam, "ZeroOneAdam": ZeroOneAdam, "OneBitLamb": OneBitLamb
}  # fmt: skip
"""By their names in DeepSpeed's configuration."""

_STAGE_0 = (
    "runs at ZeRO stage 0 only, as DeepSpeed's did: at other stages a rank has a part of the momentum; use stage 0, or any "
    'optimizer with compressed gradients, "gradcomp": {"compressor": "int8"}'
)


def build_optimizer(kind: str, params: Mapping[str, Any]) -> Callable[[Any], ExchangingOptimizer]:
    """What DeepSpeed calls with the parameters to get the optimizer of its configuration.

    Raises:
        ConfigError: a parameter that the optimizer does not have.
    """

    def build(parameters: Any) -> ExchangingOptimizer:
        try:
            optimizer = OPTIMIZERS[kind](parameters, **params)
        except TypeError as error:
            raise ConfigError(f"DeepSpeed configuration, optimizer.params of {kind}={dict(params)}: {error}") from error
        optimizer.waiting = True
        return optimizer

    return build


def attach_optimizer(engine: Any) -> ExchangingOptimizer:
    """Let an engine's gradcomp optimizer exchange by itself. :func:`initialize` does it; call it on all ranks otherwise.

    With fp16 or bf16 the optimizer must have come through :func:`initialize`, because DeepSpeed steps it in its constructor.

    Returns:
        The optimizer, which is also ``engine.gradcomp``.

    Raises:
        UnsupportedError: another stage or optimizer, or a configuration that cannot work.
    """
    optimizer = getattr(engine, "basic_optimizer", None)
    if not isinstance(optimizer, ExchangingOptimizer):
        raise UnsupportedError(
            f"attach_optimizer() needs an engine whose optimizer is one of {', '.join(OPTIMIZERS)} of gradcomp.optim, got "
            f"{type(optimizer).__name__}; to compress gradients call attach(engine)"
        )
    agree_on_engine(engine)
    if engine.zero_optimization_stage() or isinstance(engine.optimizer, BF16_Optimizer):
        raise UnsupportedError(f"{type(optimizer).__name__} {_STAGE_0}")
    if engine.has_moe_layers:
        raise UnsupportedError(
            f"{type(optimizer).__name__} averages all parameters over all ranks, which MoE does not do"
        )
    overrides = stages.Overrides()
    masters = {}
    if isinstance(engine.optimizer, FP16_UnfusedOptimizer):
        for ours, copies in zip(engine.optimizer.fp16_groups, engine.optimizer.fp32_groups, strict=True):
            masters.update({id(p): master for p, master in zip(ours, copies, strict=True)})
        overrides.set(engine.optimizer, "clip_grad", 0.0)
    else:
        overrides.set(engine, "clip_fp32_gradients", _nothing)
    optimizer.attach(engine.module, masters=masters, process_group=engine.seq_data_parallel_group)
    optimizer.max_grad_norm = optimizer.max_grad_norm or float(engine.gradient_clipping())
    optimizer.waiting, optimizer.residuals_in_state = False, False
    overrides.set(engine, "enable_backward_allreduce", False)
    checkpoint.replace_checkpoints(engine, _OptimizerState(optimizer), overrides)
    overrides.set(engine, "gradcomp", optimizer)
    return optimizer


class _OptimizerState:
    """The residuals of the momentum; all else is in DeepSpeed's own files."""

    def __init__(self, optimizer: ExchangingOptimizer) -> None:
        self._optimizer = optimizer

    @property
    def group(self) -> Any:
        """The data-parallel ranks."""
        return self._optimizer.momentum_handle.group

    def before_save(self) -> None:
        """0/1 Adam's ranks differ between meetings, and DeepSpeed saves rank 0's parameters."""
        if isinstance(self._optimizer, ZeroOneAdam):
            self._optimizer.synchronize()

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals."""
        return self._optimizer.momentum_handle.state_dict()

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """See :meth:`checkpoint.Stateful.load`."""
        self._optimizer.momentum_handle.load_state_dict(states)

    def reset(self) -> None:
        """See :meth:`checkpoint.Stateful.reset`."""
        self._optimizer.momentum_handle.reset()


def refuse_stage(kind: str, config: Mapping[str, Any]) -> None:
    """Raise UnsupportedError if the configuration asks for one of these optimizers under ZeRO."""
    if int((config.get("zero_optimization") or {}).get("stage", 0)):
        raise UnsupportedError(f"{kind} {_STAGE_0}")


def _nothing() -> None:
    """The engine would clip gradients that are not averaged yet."""
