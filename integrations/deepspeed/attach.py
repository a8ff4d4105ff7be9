""":func:`attach`: a handle for a DeepSpeed engine, and what belongs to each optimizer step."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.utils import is_moe_param

from gradcomp.bucket import Parameter
from gradcomp.compressors.twophase import TwoPhase
from gradcomp.errors import ConfigError, UnsupportedError
from gradcomp.integrations.deepspeed import checkpoint, stages
from gradcomp.integrations.deepspeed.checks import agree_on_engine
from gradcomp.optim.base import ExchangingOptimizer
from gradcomp.registration import Handle, Scaler, SpecLike
from gradcomp.registry import format_spec, parse_spec
from gradcomp.rules import Choice, RuleLike, as_rules, choose
from gradcomp.stats import Stats

_REPLACE = {0: stages.replace_stage0, 1: stages.replace_stage12, 2: stages.replace_stage12, 3: stages.replace_stage3}
_MOVES = {
    0: "engine.allreduce_bucket",
    1: "optimizer.average_tensor",
    2: "optimizer.average_tensor",
    3: "optimizer.__avg_scatter_grads",
}


class DeepSpeedHandle(Handle):
    """The handle of a DeepSpeed engine, made by :func:`attach`; also ``engine.gradcomp``.

    A step is an optimizer step, of one or more micro-batches. With experts there are more handles, one for each group of
    ranks that averages some of them; what is done to this one is done to them.
    """

    def __init__(
        self, stage: int, experts: Sequence[Handle], overrides: stages.Overrides, *args: Any, **kw: Any
    ) -> None:
        self.stage = stage
        """Where gradients are reduced: ZeRO's stage, but 0 for ``BF16_Optimizer``."""
        self.experts = experts
        self._overrides = overrides
        super().__init__(*args, **kw)

    def detach(self) -> None:
        """Give the engine back as DeepSpeed made it. Residuals are dropped."""
        self._overrides.undo()

    def stats(self) -> Stats:
        """As :meth:`Handle.stats`, with what experts' groups sent added."""
        total = super().stats()
        for other in (handle.stats() for handle in self.experts):
            added = {name: getattr(total, name) + getattr(other, name) for name in _SUMMED}
            norm = math.hypot(total.residual_norm, other.residual_norm)
            total = replace(total, **added, residual_norm=norm, bypassed={**total.bypassed, **other.bypassed})
        return total

    def set(self, spec: SpecLike, *, rules: Iterable[RuleLike] | None = None) -> None:
        """As :meth:`Handle.set`; at stages 2 and 3 without error feedback unless the spec names it, as in :func:`attach`."""
        super().set(spec, rules=rules)
        for handle in self.experts:
            handle.set(spec, rules=rules)

    def end_step(self, applied: bool) -> None:
        """See :meth:`Handle.end_step`."""
        super().end_step(applied)
        for handle in self.experts:
            handle.end_step(applied)


_SUMMED = tuple(
    field.name
    for field in fields(Stats)
    if field.name.endswith(("_bytes", "_bytes_per_step", "_seconds")) or field.name in ("collectives", "saturations")
)


def attach(
    engine: Any,
    spec: SpecLike = "int8",
    *,
    rules: Iterable[RuleLike] | None = None,
    warmup_steps: int = 0,
    schedule: str = "auto",
    scaler: Scaler | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    backend: str = "auto",
) -> DeepSpeedHandle:
    """Compress the gradients of a DeepSpeed engine from the next backward pass on. Call it on all ranks.

    At stages 2 and 3, whose users are short of memory, error feedback is off unless the spec says ``error_feedback=true``
    (or is a config object), because a residual is a whole fp32 model on every rank, and is kept twice.

    Args:
        engine: what ``deepspeed.initialize`` returned; before ``load_checkpoint``.
        spec: as for :func:`gradcomp.register`; at stage 3 ``topk`` and ``powersgd`` are refused.
        rules: as for :func:`gradcomp.register`.
        warmup_steps: the first optimizer steps are exchanged uncompressed, by DeepSpeed itself.
        schedule: ``auto`` or ``inline``, which is the same: DeepSpeed uses a bucket's mean at once.
        scaler: must be None: DeepSpeed's own loss scale is followed.
        optimizer: must be None or the engine's.
        backend: as for :func:`gradcomp.register`.

    Raises:
        UnsupportedError: a DeepSpeed version or configuration in which gradients go other ways. ConfigError,
            MismatchError: as for :func:`gradcomp.register`.
    """
    basic = getattr(engine, "basic_optimizer", None)
    if isinstance(basic, ExchangingOptimizer):
        raise UnsupportedError(
            f"{type(basic).__name__} exchanges momentum itself, so there are no gradients left to compress; use "
            "another optimizer, or attach_optimizer(engine) alone"
        )
    if getattr(engine, "gradcomp", None) is not None:
        raise UnsupportedError("this engine already has a handle, engine.gradcomp: use its set(), or detach() it first")
    stage = agree_on_engine(engine)
    if scaler is not None:
        raise ConfigError(
            f"scaler={type(scaler).__name__}: allowed is None with DeepSpeed, whose own loss scale is used"
        )
    parameters = stages.describe_parameters(engine)
    if not parameters:
        raise UnsupportedError("no parameter of this engine's module requires a gradient")
    options: dict[str, Any] = {
        "rules": rules, "warmup_steps": warmup_steps, "schedule": schedule, "backend": backend,
        "scaler": _LossScale(engine.optimizer), "synchronous": True, "counts_steps": True, "lean": stage >= 2,
        "trainer_dtype": engine.communication_data_type,
    }  # fmt: skip
    groups = _expert_groups(engine)
    apart = {name for _, members in groups for name in members}
    dense = [p for name, p in parameters.items() if name not in apart]
    experts = [
        Handle(group, [parameters[name] for name in members], engine.device, spec, **options)
        for group, members in groups
        if dist.get_world_size(group) > 1
    ]
    overrides = stages.Overrides()
    handle = DeepSpeedHandle(
        stage, experts, overrides, engine.seq_data_parallel_group, dense, engine.device, spec,
        optimizer=optimizer if optimizer is not None else engine.basic_optimizer, **options,
    )  # fmt: skip
    _warn_of_memory(handle, spec, rules, parameters, stage)
    reducer = stages.Reducer(handle, experts, parameters)
    _REPLACE[stage](engine, reducer, overrides)
    _follow_steps(engine, handle, stage, overrides)
    checkpoint.replace_checkpoints(engine, checkpoint.HandleState(reducer.handles), overrides)
    overrides.set(engine, "gradcomp", handle)
    return handle


class _LossScale:
    """DeepSpeed's loss scale under the name that a ``GradScaler`` gives it."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def get_scale(self) -> float:
        """The factor that is in the gradients."""
        return float(getattr(self._optimizer, "loss_scale", 1.0))


def _expert_groups(engine: Any) -> list[tuple[Any, list[str]]]:
    """Process groups over which some experts are averaged, in one order on all ranks, and the names of these experts.

    Experts that all ranks share are none of them: they are averaged as everything else is.
    """
    members: dict[str, list[str]] = {}
    for name, p in engine.module.named_parameters():
        if is_moe_param(p) and p.requires_grad:
            members.setdefault(p.group_name, []).append(stages.clean(name))
    groups = [(engine.expert_data_parallel_group[key], members[key]) for key in sorted(members)]
    everyone = stages.ranks_of(engine.seq_data_parallel_group)
    return [(group, names) for group, names in groups if stages.ranks_of(group) != everyone]


def _follow_steps(engine: Any, handle: DeepSpeedHandle, stage: int, overrides: stages.Overrides) -> None:
    """Tell the handle when an optimizer step has ended, and whether it was applied."""
    stock = engine.step

    @functools.wraps(stock)
    def step(*args: Any, **kwargs: Any) -> Any:
        before = engine.global_steps
        result = stock(*args, **kwargs)
        if engine.global_steps != before:
            if handle.group.world > 1 and not handle.in_use:
                raise UnsupportedError(
                    f"step {before}: no gradient came to gradcomp, so nothing was compressed: {_MOVES[stage]} was not called. "
                    "Either this DeepSpeed moves gradients by another method, or backward() was called past the engine"
                )
            handle.end_step(bool(engine.was_step_applied()))
        return result

    overrides.set(engine, "step", step)


# ---------------------------------------------------------------- error feedback by stage
def _warn_of_memory(
    handle: Handle, asked: SpecLike, rules: Iterable[RuleLike] | None, parameters: Mapping[str, Parameter], stage: int
) -> None:
    """Say what error feedback costs where it is kept under ZeRO, and what it would cost where it was left out."""
    first = asked(0) if callable(asked) and not isinstance(asked, str) else asked
    wanted = choose(parameters.values(), first, as_rules(rules))
    kept = _residual_bytes(handle.choices, parameters, stage, handle.group.world)
    saved = _residual_bytes(wanted, parameters, stage, handle.group.world) - kept
    if kept and stage:
        warnings.warn(
            f"gradcomp: error feedback holds {kept:,} bytes on every rank: residuals of the whole model, old and new, which "
            f"ZeRO {stage} does not partition. error_feedback=false does without",
            stacklevel=4,
        )
    elif saved:
        warnings.warn(
            f"gradcomp: error feedback of {format_spec(first)} is off at ZeRO {stage}, where it would hold {saved:,} bytes on "
            "every rank; without it 4 bits and less lose accuracy. Write error_feedback=true to have it, or use int8, which "
            "needs none",
            stacklevel=4,
        )


def _residual_bytes(choices: Mapping[str, Choice], parameters: Mapping[str, Parameter], stage: int, world: int) -> int:
    """Residuals kept on every rank: fp32, old and new, and 1/N of that where blocks have owners."""
    total = 0.0
    for name, choice in choices.items():
        compressor, config = parse_spec(choice.spec)
        if getattr(config, "error_feedback", False):
            owner = 1 / world if issubclass(compressor, TwoPhase) and stage < 3 else 0
            total += 8 * (1 + owner) * parameters[name].numel
    return int(total)
