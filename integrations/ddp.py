"""``torch.nn.parallel.DistributedDataParallel``: compression as a communication hook.

DDP calls the hook once per bucket and step, in the same order on all ranks. The hook hands the bucket to the handle and
returns a future that is completed, at the latest, in the call for the last bucket.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with types, not with strings.
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradcomp.bucket import Parameter, Slot
from gradcomp.errors import UnsupportedError
from gradcomp.registration import Handle, Scaler, SpecLike
from gradcomp.rules import RuleLike

Hook = Callable[["DDPState", dist.GradBucket], "torch.futures.Future[Tensor]"]  # type: ignore[name-defined]


class DDPState:
    """What DDP passes back to the hook: the handle, and names for the bucket's parameters."""

    def __init__(self, ddp: DistributedDataParallel, handle: Handle) -> None:
        self.handle = handle
        self._names = {id(parameter): _clean(name) for name, parameter in ddp.module.named_parameters()}
        self._probe = next((p for p in ddp.module.parameters() if p.requires_grad), None)
        self._seen: tuple[tuple[int, int], int] | None = None
        self._warned = False
        _optimizer_steps.watch()

    def slots(self, parameters: Sequence[Tensor], buffer: Tensor) -> list[Slot]:
        """Where the parameters stand in the bucket; empty for buckets that must be all-reduced as they are."""
        if buffer.is_sparse:
            for parameter in parameters:
                self.handle.leave_out(self._names[id(parameter)], "sparse gradient")
        if buffer.is_sparse or buffer.is_complex() or not buffer.dtype.is_floating_point:
            return []
        slots, offset = [], 0
        for parameter in parameters:
            if parameter.is_complex():  # the bucket holds pairs of reals
                return []
            name = self._names[id(parameter)]
            slots.append(Slot(name, offset, parameter.numel(), tuple(parameter.shape), tuple(parameter.stride())))
            offset += parameter.numel()
        if offset != buffer.numel():
            raise UnsupportedError(
                f"a bucket of {buffer.numel()} elements holds parameters of {offset}: this torch lays buckets out in another "
                f"way than gradcomp knows ({torch.__version__})"
            )
        return slots

    def watch_accumulation(self) -> None:
        """Warn once when gradients are reduced again although the optimizer has not stepped in between."""
        if self._warned or self._probe is None or self.handle.group.world == 1:
            return
        # a parameter's version shows an update by hand, but not one by a fused optimizer
        seen = ((self._probe._version, _optimizer_steps.count), self.handle.step)
        previous, self._seen = self._seen, seen
        if previous is None or previous[1] == seen[1]:  # the step before did not finish
            return
        # steps that a scaler may have skipped do not count, nor do uncompressed ones
        if previous[0] == seen[0] and self.handle.last_step_compressed and self.handle.last_step_finite:
            self._warned = True
            warnings.warn(
                "gradcomp: backward() ran twice without an optimizer step, so gradients were compressed and exchanged twice. "
                "To accumulate gradients, wrap all but the last backward pass in ddp.no_sync().",
                stacklevel=2,
            )


class _OptimizerSteps:
    """Counts the steps of all optimizers in this process, from the first registration on."""

    def __init__(self) -> None:
        self.count = 0
        self._watching = False

    def watch(self) -> None:
        if not self._watching:
            self._watching = True
            register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():  # a compiled step shows in the parameters' versions
            self.count += 1


_optimizer_steps = _OptimizerSteps()


def gradcomp_hook(  # the annotations are what DDP demands
    state: DDPState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """The communication hook."""
    if isinstance(bucket, tuple):
        raise UnsupportedError(_PYTHON_REDUCER)
    parameters, buffer, last = bucket.parameters(), bucket.buffer(), bucket.is_last()
    if bucket.index() == 0:
        state.watch_accumulation()
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    key = (bucket.index(), buffer.dtype, buffer.numel(), *map(id, parameters))
    state.handle.submit(key, lambda: state.slots(parameters, buffer), buffer, lambda: future.set_result(buffer), last)
    return future


_PYTHON_REDUCER = (
    "torch._dynamo.config.optimize_ddp='python_reducer' ignores hooks' results; use True (the default) or False"
)


def make_handle(ddp: DistributedDataParallel, spec: SpecLike = "int8", mine: Any = None, **options: Any) -> Handle:
    """Check ``ddp`` and make a handle for its process group. Collective.

    Args:
        mine: the state of the caller's hook, where that was registered before.

    Raises:
        UnsupportedError: a combination in which a hook cannot work.
    """
    if not isinstance(ddp, DistributedDataParallel):
        raise UnsupportedError(
            f"register() needs a DistributedDataParallel module, got {type(ddp).__name__}: wrap the model first, "
            "ddp = DistributedDataParallel(model)"
        )
    others = [hook for hook, state in getattr(ddp, "_comm_hooks", ()) if mine is None or state is not mine]
    if others:
        raise UnsupportedError(
            f"this DDP module already has the communication hook {others[0].__qualname__}; DDP allows one. "
            "Register gradcomp on a module without hook; to change the compressor later call handle.set()"
        )
    if getattr(ddp, "mixed_precision", None) is not None:
        raise UnsupportedError(
            "DDP(mixed_precision=...) takes the hook's place; use torch.autocast or a bf16 model instead"
        )
    if getattr(ddp, "skip_all_reduce_unused_params", False):
        raise UnsupportedError(
            "DDP(skip_all_reduce_unused_params=True) skips buckets per rank, so exchanges would not match; leave it off"
        )
    if torch._dynamo.config.optimize_ddp == "python_reducer":
        raise UnsupportedError(_PYTHON_REDUCER)
    delayed = getattr(ddp, "_delay_all_reduce_params", None)
    if delayed:
        warnings.warn("gradcomp: delay_all_reduce_named_params bypass the hook and stay uncompressed", stacklevel=5)
    embeddings = {
        id(module.weight)
        for module in ddp.module.modules()
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag))
    }
    parameters = [
        Parameter(_clean(name), p.numel(), tuple(p.shape), p.dtype, id(p) in embeddings)
        for name, p in ddp.module.named_parameters()
        if p.requires_grad
    ]
    device = next(p.device for p in ddp.module.parameters() if p.requires_grad)
    return Handle(ddp.process_group, parameters, device, spec, find_unused=ddp.find_unused_parameters, **options)


def ddp_hook(ddp: DistributedDataParallel, spec: SpecLike = "int8", **options: Any) -> tuple[DDPState, Hook]:
    """The pair (state, hook) for trainers that call ``register_comm_hook`` themselves; ``state.handle`` is the handle.

    Options are those of :func:`gradcomp.register`.
    """
    return DDPState(ddp, make_handle(ddp, spec, **options)), gradcomp_hook


def register(
    ddp: DistributedDataParallel,
    spec: SpecLike = "int8",
    *,
    rules: Iterable[RuleLike] | None = None,
    warmup_steps: int = 0,
    schedule: str = "auto",
    scaler: Scaler | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    backend: str = "auto",
) -> Handle:
    """Compress the gradients of a DDP module from the next backward pass on. Call it on all ranks, after wrapping.

    Args:
        ddp: the wrapped model; its own process group is used.
        spec: ``"int8"`` (default), ``"powersgd:rank=4"``, a config object, or a function from the step to one of these.
        rules: which parameters get what, e.g. ``[("*.embed*", "none")]``; see :class:`gradcomp.Rule`.
        warmup_steps: the first steps are exchanged uncompressed.
        schedule: ``auto``, ``inline``, ``pipeline:depth=D`` or ``thread``.
        scaler: the ``GradScaler`` in use, so that residuals are kept unscaled.
        optimizer: the optimizer in use, if known; warns of combinations that converge badly.
        backend: kernels: ``auto``, ``numba``, ``torch`` or ``cuda``.

    Returns:
        The handle: ``stats()``, ``set()``, ``disable()``, ``state_dict()``, ``load_state_dict()``.

    Raises:
        ConfigError: a bad option. UnsupportedError: a combination that cannot work. MismatchError: the ranks differ.
    """
    state, hook = ddp_hook(
        ddp, spec, rules=rules, warmup_steps=warmup_steps, schedule=schedule, scaler=scaler, optimizer=optimizer,
        backend=backend,
    )  # fmt: skip
    ddp.register_comm_hook(state, hook)
    return state.handle


def _clean(name: str) -> str:
    """Parameter names without what torch.compile and activation checkpointing put in between."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
