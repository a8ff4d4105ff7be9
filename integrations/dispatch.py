"""``gradcomp.register``: one line for every trainer, chosen by the model's class.

No trainer is imported here: classes are told apart by the names of their modules, and the integration is loaded on use.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any, NamedTuple

import torch

from gradcomp.errors import UnsupportedError
from gradcomp.registration import Handle, Scaler, SpecLike
from gradcomp.rules import RuleLike


class _Trainer(NamedTuple):
    """A class of a trainer, as ``package`` (the start of its module's name) and ``name`` ("" for any), and who serves it."""

    package: str
    name: str
    module: str
    function: str


_TRAINERS = (
    _Trainer("torch.nn.parallel", "DistributedDataParallel", "gradcomp.integrations.ddp", "register"),
    _Trainer("torch.distributed.fsdp", "FSDPModule", "gradcomp.integrations.fsdp", "register"),
    _Trainer("deepspeed.runtime", "", "gradcomp.integrations.deepspeed", "attach"),
)


def register(
    model: Any,
    spec: SpecLike = "int8",
    *,
    rules: Iterable[RuleLike] | None = None,
    warmup_steps: int = 0,
    schedule: str = "auto",
    scaler: Scaler | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    backend: str = "auto",
) -> Handle:
    """Compress the gradients of a wrapped model from the next backward pass on. Call it on all ranks, after wrapping.

    Args:
        model: a ``DistributedDataParallel`` or FSDP2 (``fully_shard``) module, or a DeepSpeed engine; its own process group is
            used.
        spec: ``"int8"`` (default), ``"powersgd:rank=4"``, a config object, or a function from the step to one of these.
        rules: which parameters get what, e.g. ``[("*.embed*", "none")]``; see :class:`gradcomp.Rule`.
        warmup_steps: the first steps are exchanged uncompressed.
        schedule: ``auto``, ``inline``, ``pipeline:depth=D`` or ``thread``.
        scaler: the ``GradScaler`` in use, so that residuals are kept unscaled. Not with DeepSpeed, which has its own.
        optimizer: the optimizer in use, if known; warns of combinations that converge badly.
        backend: kernels: ``auto``, ``numba``, ``torch`` or ``cuda``.

    Returns:
        The handle: ``stats()``, ``set()``, ``disable()``, ``state_dict()``, ``load_state_dict()``.

    Raises:
        ConfigError: a bad option. UnsupportedError: a model or combination that cannot work. MismatchError: the ranks
            differ.
    """
    options = {
        "rules": rules, "warmup_steps": warmup_steps, "schedule": schedule, "scaler": scaler, "optimizer": optimizer,
        "backend": backend,
    }  # fmt: skip
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
    for base in type(model).__mro__:
        for trainer in _TRAINERS:
            if base.__module__.startswith(trainer.package) and trainer.name in ("", base.__name__):
                handle: Handle = getattr(import_module(trainer.module), trainer.function)(model, spec, **options)
                return handle
    raise UnsupportedError(
        f"register() needs a DistributedDataParallel module, an FSDP2 module or a DeepSpeed engine, got {type(model).__name__}: "
        "wrap the model first, ddp = DistributedDataParallel(model), or shard it, fully_shard(model)"
    )
