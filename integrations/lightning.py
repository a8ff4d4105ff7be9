"""PyTorch Lightning: a callback that puts compression into the trainer's strategy, its checkpoints and its loggers.

``DDPStrategy(ddp_comm_hook=)`` is applied on CUDA only; the callback works on every device. For those who prefer the strategy's
arguments, :func:`ddp_hook` gives a pair that can be made before the model is wrapped.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with types, not with strings.
import gc
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradcomp.errors import GradcompError, UnsupportedError
from gradcomp.integrations.ddp import DDPState, gradcomp_hook, make_handle
from gradcomp.integrations.ddp import register as register_ddp
from gradcomp.integrations.fsdp import register as register_fsdp
from gradcomp.integrations.trainers import ALONE, logged, required, share, states_for
from gradcomp.registration import Handle, SpecLike

with required("lightning", "lightning"):
    import lightning.pytorch as pl
    from lightning.fabric.utilities import move_data_to_device


class GradcompCallback(pl.Callback):
    """Compresses the gradients of a fit: ``Trainer(strategy="ddp", callbacks=[GradcompCallback("int8")])``.

    The state of all ranks goes into Lightning's checkpoints, so that resuming in the same world size is exact; saving sends
    it to rank 0, one rank at a time. Numbers go to the trainer's loggers every ``log_every_n_steps``.

    Args:
        spec: as for :func:`gradcomp.register`.
        options: those of :func:`gradcomp.register`; ``scaler`` and ``optimizer`` are the trainer's, if not given.

    Raises:
        UnsupportedError: when the fit starts, for a strategy in which it cannot work.
    """

    def __init__(self, spec: SpecLike = "int8", **options: Any) -> None:
        self._spec, self._options = spec, options
        self._handle: Handle | None = None
        self._restored: list[dict[str, Any]] | None = None

    @property
    def handle(self) -> Handle:
        """The handle of the current or last fit.

        Raises:
            GradcompError: no fit with several processes has started.
        """
        if self._handle is None:
            raise GradcompError("GradcompCallback has no handle: no fit with several processes has started")
        return self._handle

    # ---------------------------------------------------------------- what Lightning calls
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The model is wrapped: register."""
        self._handle = None
        model = trainer.strategy.model
        if trainer.world_size == 1:
            warnings.warn(ALONE, stacklevel=2)
            return
        sharded = model is not None and any(isinstance(module, FSDPModule) for module in model.modules())
        if not sharded and not isinstance(model, DistributedDataParallel):
            raise UnsupportedError(
                "GradcompCallback works with DDPStrategy (strategy='ddp'), and with ModelParallelStrategy where "
                f"configure_model() calls fully_shard, not with {type(trainer.strategy).__name__}"
            )
        options = {"scaler": getattr(trainer.precision_plugin, "scaler", None), **self._options}
        if len(trainer.optimizers) == 1:
            options.setdefault("optimizer", trainer.optimizers[0])
        register = register_fsdp if sharded else register_ddp
        handle = register(model, self._spec, **options)
        if handle.group.world == 1:
            warnings.warn(ALONE + " (data_parallel_size is 1)", stacklevel=2)
        elif handle.group.world < trainer.world_size:
            raise UnsupportedError(
                f"gradients are exchanged between {handle.group.world} of {trainer.world_size} processes: GradcompCallback saves "
                "the state of one such group only, so tensor_parallel_size must be 1"
            )
        self._handle = handle

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A checkpoint, if any, is loaded by now in every strategy: restore."""
        states, self._restored = self._restored, None
        if self._handle is None:
            return
        group = self._handle.group
        if states is not None:
            mine = [states[rank] for rank in share(group.rank, group.world, len(states))]
            self._handle.load_state_dict(states_for(mine))
        elif trainer.ckpt_path is not None:
            warnings.warn(
                f"gradcomp: {trainer.ckpt_path} holds no state of gradcomp; compression starts afresh, without residuals",
                stacklevel=2,
            )

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Log, in the steps in which Lightning's own callbacks do."""
        if self._handle is None or not trainer.is_global_zero or not trainer._logger_connector.should_update_logs:
            return
        numbers = logged([self._handle])
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    def state_dict(self) -> dict[str, Any]:
        """The states of all ranks, on rank 0, which writes the checkpoint. Collective."""
        if self._handle is None:
            return {}
        group = self._handle.group
        state = move_data_to_device(self._handle.state_dict(), torch.device("cpu"))
        if group.rank:
            dist.send_object_list([state], group=group.process_group, group_dst=0)
            return {}
        states = [state]
        for rank in range(1, group.world):
            received: list[Any] = [None]
            dist.recv_object_list(received, group=group.process_group, group_src=rank)
            states.append(received[0])
        return {"states": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep what a checkpoint holds until the model is wrapped."""
        self._restored = state_dict["states"]


class LateDDPState:
    """The hook's state where the DDP module is made later, by the trainer: registers in the first backward pass."""

    def __init__(self, spec: SpecLike, options: Mapping[str, Any]) -> None:
        self._spec, self._options = spec, options
        self._state: DDPState | None = None
        alive = weakref.ref(self)  # a pair that was thrown away does not watch
        self._watch = register_optimizer_step_post_hook(lambda *_: pair._stepped() if (pair := alive()) else None)

    @property
    def handle(self) -> Handle:
        """The handle.

        Raises:
            GradcompError: before the first backward pass.
        """
        if self._state is None:
            raise GradcompError("there is no handle before the first backward pass")
        return self._state.handle

    def state(self) -> DDPState:
        """The state that belongs to the DDP module in which this one was registered."""
        if self._state is None:
            self._watch.remove()
            (ddp,) = (ddp for ddp in _ddp_modules() if any(state is self for _, state in ddp._comm_hooks))
            self._state = DDPState(ddp, make_handle(ddp, self._spec, self, **self._options))
        return self._state

    def _stepped(self) -> None:
        self._watch.remove()
        if any(not ddp._comm_hooks and dist.get_world_size(ddp.process_group) > 1 for ddp in _ddp_modules()):
            raise UnsupportedError(
                "an optimizer has stepped, but the trainer never registered gradcomp's communication hook: Lightning applies "
                "ddp_comm_hook on CUDA devices only. Use Trainer(callbacks=[GradcompCallback(...)]) instead"
            )


def _ddp_modules() -> list[DistributedDataParallel]:
    """All that exist; nothing leads from a bucket, or from a hook's state, to its module."""
    return [thing for thing in gc.get_objects() if issubclass(type(thing), DistributedDataParallel)]


LateHook = Callable[[LateDDPState, dist.GradBucket], "torch.futures.Future[Tensor]"]  # type: ignore[name-defined]


def late_gradcomp_hook(  # the annotations are what DDP demands
    state: LateDDPState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """The communication hook."""
    return gradcomp_hook(state.state(), bucket)


def ddp_hook(spec: SpecLike = "int8", **options: Any) -> tuple[LateDDPState, LateHook]:
    """The pair for ``DDPStrategy(ddp_comm_state=state, ddp_comm_hook=hook)``, on CUDA; ``state.handle`` is the handle.

    Nothing is saved or logged: :class:`GradcompCallback` does that. Options are those of :func:`gradcomp.register`. On CPUs,
    where Lightning leaves the hook out, the first optimizer step raises an UnsupportedError.
    """
    return LateDDPState(spec, options), late_gradcomp_hook
