"""Hugging Face Accelerate: compression for what ``accelerator.prepare`` wraps, before or after it was called.

``prepare`` wraps models in DDP, FSDP2 or a DeepSpeed engine; each is registered as it is without Accelerate. The state goes
through ``accelerator.save_state`` and ``load_state``.
"""

from __future__ import annotations

import os
import warnings
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradcomp.errors import ConfigError, GradcompError, UnsupportedError
from gradcomp.integrations.dispatch import register as register_model
from gradcomp.integrations.trainers import ALONE, load_states, logged, required, save_states
from gradcomp.registration import Handle, SpecLike

with required("accelerate", "accelerate"):
    from accelerate import Accelerator, DistributedType


class Compression:
    """Compression of the models of one ``Accelerator``; made by :func:`register`."""

    def __init__(self, accelerator: Accelerator, spec: SpecLike, options: dict[str, Any]) -> None:
        self._accelerator = accelerator
        self._spec, self._options = spec, options
        self._by_model: weakref.WeakKeyDictionary[nn.Module, Handle] = weakref.WeakKeyDictionary()
        self._optimizer: torch.optim.Optimizer | None = options.get("optimizer")
        self._alone = self._check_distribution()
        self._prepare, self._prepare_model = accelerator.prepare, accelerator.prepare_model
        accelerator.prepare, accelerator.prepare_model = self._preparing, self._preparing_model
        accelerator.register_save_state_pre_hook(lambda models, weights, folder: self.save(folder))
        accelerator.register_load_state_pre_hook(lambda models, folder: self.load(folder))

    # ---------------------------------------------------------------- what a user calls
    @property
    def handles(self) -> list[Handle]:
        """The handles of the models prepared so far, in that order; none in a run of one process."""
        return list(self._by_model.values())

    @property
    def handle(self) -> Handle:
        """The handle of the only model.

        Raises:
            GradcompError: there is none yet, or there are several.
        """
        handles = self.handles
        if len(handles) != 1:
            why = "take .handles" if handles else "one process" if self._alone else "is prepare() still to come?"
            raise GradcompError(f"{len(handles)} models are compressed: {why}")
        return handles[0]

    def metrics(self) -> dict[str, float]:
        """Numbers of this rank for ``accelerator.log``; empty before ``prepare`` and in a run of one process."""
        return logged(self.handles)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write this rank's state into a checkpoint's folder; ``save_state`` does it. Every rank must call it."""
        if self.handles and not self._in_engine:
            save_states(self.handles, folder)

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Restore the state from a checkpoint's folder; ``load_state`` does it. Collective.

        Raises:
            ConfigError, MismatchError: on every rank, when files are missing, damaged, or do not fit the models.
        """
        if self.handles and not self._in_engine and not load_states(self.handles, folder):
            warnings.warn(
                f"gradcomp: {folder} holds no state of gradcomp; compression starts afresh, without residuals",
                stacklevel=2,
            )

    def require(self) -> None:
        """Check that something is compressed, or that there is only one process.

        Raises:
            UnsupportedError: neither.
        """
        if not self._alone and not self._by_model:
            raise UnsupportedError(
                "no model was wrapped by accelerator.prepare(): gradcomp works with DDP, FSDP2 and DeepSpeed, and this trainer "
                "distributes the model in another way"
            )

    # ---------------------------------------------------------------- inside Accelerate
    @property
    def _in_engine(self) -> bool:
        """DeepSpeed's engine saves and loads the state itself."""
        return bool(self._accelerator.distributed_type == DistributedType.DEEPSPEED)

    def _check_distribution(self) -> bool:
        """Whether there is one process only, so nothing to compress."""
        if self._accelerator.distributed_type != DistributedType.NO:
            return False
        world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
        if world > 1:
            raise UnsupportedError(
                f"{world} processes were started, but Accelerate runs each on its own (distributed_type NO); on CPUs, use "
                "Accelerator(cpu=True), or TrainingArguments(use_cpu=True)"
            )
        warnings.warn(ALONE, stacklevel=4)
        return True

    def _preparing(self, *args: Any, **kwargs: Any) -> Any:
        optimizers = [arg for arg in args if isinstance(arg, torch.optim.Optimizer)]
        if self._optimizer is None and len(optimizers) == 1:
            self._optimizer = getattr(optimizers[0], "optimizer", optimizers[0])  # of an AcceleratedOptimizer
        result = self._prepare(*args, **kwargs)
        for item in result if isinstance(result, tuple | list) else (result,):
            if isinstance(item, nn.Module):
                self.attach(item)
        return result

    def _preparing_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = self._prepare_model(model, *args, **kwargs)
        if isinstance(_uncompiled(result), nn.parallel.DistributedDataParallel):
            self.attach(result)
        return result

    def attach(self, model: nn.Module) -> None:
        """Compress a prepared model, unless that is done already or it has nothing to train.

        Raises:
            UnsupportedError: a way of distribution in which it cannot work.
        """
        model = _uncompiled(model)
        if self._alone or model in self._by_model or not any(p.requires_grad for p in model.parameters()):
            return
        if self._accelerator.distributed_type == DistributedType.MEGATRON_LM:
            raise UnsupportedError(
                "Megatron-LM through Accelerate exchanges gradients itself: gradcomp cannot compress them"
            )
        options = dict(self._options)
        if not self._in_engine and self._accelerator.scaler is not None:
            options.setdefault("scaler", self._accelerator.scaler)
        options.setdefault("optimizer", self._optimizer)
        self._by_model[model] = register_model(model, self._spec, **options)


def register(
    accelerator: Accelerator, spec: SpecLike = "int8", *, model: nn.Module | None = None, **options: Any
) -> Compression:
    """Compress the gradients of the models that ``accelerator`` prepares. Call it on all ranks.

    Args:
        accelerator: before ``prepare``: every model prepared later is compressed.
        spec: as for :func:`gradcomp.register`.
        model: after ``prepare``: the model that it returned.
        options: those of :func:`gradcomp.register`; ``scaler`` and ``optimizer`` are Accelerate's own, if not given.

    Returns:
        The :class:`Compression`; ``compression.handle`` is the handle, ``compression.metrics()`` is for ``accelerator.log``.

    Raises:
        ConfigError: a bad option, or ``prepare`` was called before and no ``model`` is given. UnsupportedError: a combination
            that cannot work. MismatchError: the ranks differ.
    """
    if model is None and accelerator._models:
        raise ConfigError(
            "model=None: accelerator.prepare() was called before, so allowed is the model that it returned"
        )
    compression = Compression(accelerator, spec, options)
    if model is not None:
        compression.attach(model)
    return compression


def _uncompiled(model: nn.Module) -> nn.Module:
    """The module in ``torch.compile``'s wrapper: Accelerate compiles after wrapping."""
    inner = getattr(model, "_orig_mod", model)
    assert isinstance(inner, nn.Module)
    return inner
