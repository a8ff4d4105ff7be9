"""Buckets of fp32 momentum or gradients, and the two handles that average them: one exactly, one compressed.

Also the side of DDP: a hook that leaves gradients local, and the check that DDP has not averaged them.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with types, not with strings.
import gc
import glob
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradcomp.bucket import Parameter, Slot
from gradcomp.errors import UnsupportedError
from gradcomp.registration import Handle
from gradcomp.rules import Rule, RuleLike
from gradcomp.stats import Stats


@dataclass(frozen=True, eq=False, slots=True)
class Source:
    """A parameter before it has a place. ``kept``: never compress it."""

    parameter: Tensor
    group: int
    name: str
    embedding: bool
    kept: bool


@dataclass(frozen=True, eq=False, slots=True)
class Member:
    """A parameter and its place: ``view`` (fp32, the parameter's shape) is its part of a bucket. ``exact``: uncompressed."""

    parameter: Tensor
    group: int
    name: str
    exact: bool
    view: Tensor


@dataclass(frozen=True, eq=False, slots=True)
class _Bucket:
    buffer: Tensor
    slots: list[Slot]
    members: list[Member]


class Buckets:
    """The exchange of one optimizer. Making it is collective.

    Args:
        sources: all trained parameters in declaration order.
        process_group: over which to average.
        compressor, rules: of the compressed exchange.
        cap: elements per bucket.
        describe: what the ranks must agree on, beyond what handles check.
        options: ``schedule`` and ``backend`` of the handles.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        process_group: dist.ProcessGroup,
        compressor: str,
        rules: Sequence[RuleLike],
        cap: int,
        describe: Callable[[], str],
        options: dict[str, Any],
    ) -> None:
        devices = {source.parameter.device for source in sources}
        if len(devices) > 1:
            raise UnsupportedError(f"parameters on several devices: {sorted(map(str, devices))}")
        device = devices.pop()
        parameters = [
            Parameter(s.name, s.parameter.numel(), tuple(s.parameter.shape), torch.float32, s.embedding)
            for s in sources
        ]
        kept = [Rule(name=glob.escape(source.name), spec="none") for source in sources if source.kept]
        self.exact = Handle(process_group, parameters, device, "none", **options)
        self.compressed = Handle(process_group, parameters, device, compressor, rules=[*kept, *rules], **options)
        self.exact.group.agree(describe, "gradcomp optimizer")
        self.world = self.exact.group.world
        self._last = self.exact
        self._bypassed = self.compressed.stats().bypassed

        self._buckets: list[_Bucket] = []
        pending: list[Source] = []
        for source in sources:
            if pending and sum(s.parameter.numel() for s in [*pending, source]) > cap:
                self._buckets.append(self._lay_out(pending, device))
                pending = []
            pending.append(source)
        self._buckets.append(self._lay_out(pending, device))
        self.members = [member for bucket in self._buckets for member in bucket.members]
        self._suspects = _unhooked_ddp({id(source.parameter) for source in sources})

    def _lay_out(self, sources: Sequence[Source], device: torch.device) -> _Bucket:
        buffer = torch.zeros(sum(source.parameter.numel() for source in sources), device=device)
        slots, members, offset = [], [], 0
        for source in sources:
            shape, numel = tuple(source.parameter.shape), source.parameter.numel()
            view = buffer[offset : offset + numel].view(shape)
            slots.append(Slot(source.name, offset, numel, shape, tuple(view.stride())))
            members.append(Member(source.parameter, source.group, source.name, source.name in self._bypassed, view))
            offset += numel
        return _Bucket(buffer, slots, members)

    def exchange(self, handle: Handle, write: Callable[[Member], None]) -> bool:
        """Average what ``write`` puts into each member's view, in place; whether all ranks were finite."""
        for number, bucket in enumerate(self._buckets):
            for member in bucket.members:
                write(member)
            last = bucket is self._buckets[-1]
            handle.submit(number, lambda slots=bucket.slots: slots, bucket.buffer, _nothing, last)  # type: ignore[misc]
        self._last = handle
        if self.world == 1:
            return all(bool(torch.isfinite(bucket.buffer).all()) for bucket in self._buckets)
        return handle.last_step_finite

    def clip(self, limit: float, exact: bool | None = None) -> None:
        """Bound the norm of all views, or of those that are exact or compressed, together."""
        members = [member for member in self.members if exact is None or member.exact == exact]
        if not limit or not members:
            return
        norm = float(torch.stack([torch.linalg.vector_norm(member.view) for member in members]).norm())
        if norm > limit:
            for member in members:
                member.view.mul_(limit / norm)

    def check_local_gradients(self) -> None:
        """Raise UnsupportedError if DDP has averaged the gradients."""
        for reference in self._suspects:
            ddp = reference()
            # set by the last forward pass: whether its backward averages gradients
            if ddp is not None and ddp.require_forward_param_sync and not getattr(ddp, "_comm_hooks", None):
                raise UnsupportedError(
                    "DistributedDataParallel has averaged these gradients, at full volume, so nothing would be saved: call "
                    "optimizer.attach(ddp) before training, or run forward and backward in ddp.no_sync()"
                )

    def stats(self, steps: int, skipped: int) -> Stats:
        """Both handles' traffic as one; rounds that were left out count as zero bytes."""
        exact, compressed = self.exact.stats(), self.compressed.stats()
        numel = sum(bucket.buffer.numel() for bucket in self._buckets)
        per_step = 8 * (self.world - 1) * numel // self.world
        last = compressed if self._last is self.compressed else exact
        return replace(
            compressed,
            steps=steps,
            skipped_steps=skipped,
            raw_bytes=per_step * steps,
            raw_bytes_per_step=per_step,
            wire_bytes=exact.wire_bytes + compressed.wire_bytes,
            wire_bytes_per_step=last.wire_bytes_per_step,
            collectives=exact.collectives + compressed.collectives,
            encode_seconds=exact.encode_seconds + compressed.encode_seconds,
            exchange_seconds=exact.exchange_seconds + compressed.exchange_seconds,
            decode_seconds=exact.decode_seconds + compressed.decode_seconds,
        )

    def close(self) -> None:
        """Stop the worker threads of the ``thread`` schedule."""
        self.exact.close()
        self.compressed.close()


def leave_gradients_local(ddp: DistributedDataParallel) -> None:
    """Give ``ddp`` a communication hook that communicates nothing.

    Raises:
        UnsupportedError: it has a hook.
    """
    hooks = getattr(ddp, "_comm_hooks", None)
    if hooks:
        raise UnsupportedError(
            f"this DDP module already has the communication hook {hooks[0][0].__qualname__}; a module whose optimizer "
            "exchanges momentum needs no other compression: leave gradcomp.register() out"
        )
    ddp.register_comm_hook(None, _pass_through)


def _pass_through(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _unhooked_ddp(parameters: set[int]) -> list[weakref.ref[DistributedDataParallel]]:
    """DDP modules that hold any of ``parameters`` and have no hook: they average gradients, unless in no_sync()."""
    found = []
    for thing in gc.get_referrers(*_with_subclasses(DistributedDataParallel)):  # instances refer to their class
        if not issubclass(type(thing), DistributedDataParallel) or getattr(thing, "_comm_hooks", None):
            continue
        if any(id(parameter) in parameters for parameter in thing.parameters()):
            found.append(weakref.ref(thing))
    return found


def _with_subclasses(kind: type[Any]) -> list[type[Any]]:
    found = [kind]
    for child in kind.__subclasses__():
        found += _with_subclasses(child)
    return found


def _nothing() -> None:
    """The buckets are read after the last one."""
