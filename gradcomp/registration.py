"""The handle: one registered model's compression, whatever trainer it hangs in.

Integrations describe the parameters and hand over buckets (:meth:`Handle.submit`); everything else that a user does goes
through the handle: stats, changing the compressor, state for checkpoints.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from gradcomp.bucket import Parameter, ParameterTable, Scratch, Slot
from gradcomp.checkpoint import STATE_FORMAT, agree_on_states
from gradcomp.collectives import Group
from gradcomp.compressors.base import require
from gradcomp.engine import BucketExchange, Context, is_finite
from gradcomp.errors import GradcompError, UnsupportedError
from gradcomp.kernels.select import get_ops
from gradcomp.memory import Memory
from gradcomp.registry import parse_spec
from gradcomp.replay import Held, LayoutReplay
from gradcomp.rules import Choice, Rule, RuleLike
from gradcomp.schedule import Task, make_schedule, parse_schedule
from gradcomp.selection import Selection
from gradcomp.selection import SpecLike as SpecLike
from gradcomp.stats import Counters, Stats

_NORM_EVERY = 50
_log = logging.getLogger("gradcomp")


class Scaler(Protocol):
    """What is used of ``torch.amp.GradScaler``."""

    def get_scale(self) -> float:
        """The factor that is in the gradients."""


class Handle:
    """Compression of one model's gradients; made by :func:`gradcomp.register`.

    Args:
        process_group: the group over which the trainer averages gradients.
        parameters: all parameters in declaration order.
        device: of the gradients.
        spec: compressor, or a function from the step to one.
        rules: see :class:`gradcomp.Rule`.
        warmup_steps: the first steps are exchanged uncompressed.
        schedule: ``auto``, ``inline``, ``pipeline:depth=D`` or ``thread``.
        scaler: the ``GradScaler`` in use, so that residuals are kept unscaled.
        optimizer: the optimizer in use, if known: warns of combinations that converge badly.
        backend: kernels, ``auto``, ``numba``, ``torch`` or ``cuda``; a named one works or raises.
        find_unused: the trainer drops the gradients of parameters that no rank used.
        synchronous: the trainer uses a bucket's result as soon as :meth:`submit` returns, and says :meth:`finish` when it
            has no more buckets.
        counts_steps: the trainer says :meth:`end_step`; a step may have several rounds of buckets (micro-batches).
        lean: the trainer shards to save memory, so error feedback is off unless a spec names it or is a config object: its
            residual would be the whole model on every rank. Always so if parameters are cut into chunks (reduce-scatter).
        trainer_dtype: in which the trainer itself would exchange gradients, if not in their own; for ``raw_bytes``.

    Raises:
        ConfigError, UnsupportedError, MismatchError: on every rank alike.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        parameters: Sequence[Parameter],
        device: torch.device,
        spec: SpecLike = "int8",
        *,
        rules: Iterable[RuleLike] | None = None,
        warmup_steps: int = 0,
        schedule: str = "auto",
        scaler: Scaler | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        backend: str = "auto",
        find_unused: bool = False,
        synchronous: bool = False,
        counts_steps: bool = False,
        lean: bool = False,
        trainer_dtype: torch.dtype | None = None,
    ) -> None:
        self.group = Group(process_group)
        self._scaler = scaler

        def check() -> str:
            require(scaler is None or hasattr(scaler, "get_scale"), "scaler", scaler, "a GradScaler or None")
            name, _ = parse_schedule(schedule)
            allowed = "'auto' or 'inline': this trainer uses a bucket's result at once"
            require(not synchronous or name in ("auto", "inline"), "schedule", schedule, allowed)
            self._table = ParameterTable(parameters, self.group.world)
            self._ops = get_ops(device, backend)
            self._selection = Selection(spec, rules, warmup_steps, self._table, lean or self._table.scatters)
            return f"{self._selection.describe()}, schedule {schedule!r}, {'a' if scaler is not None else 'no'} scaler"

        self.group.agree(check, "gradcomp registration")
        self._schedule = make_schedule("inline" if synchronous else schedule, self.group)
        self._synchronous, self._counts_steps = synchronous, counts_steps
        self._trainer_dtype = trainer_dtype
        self._memory = Memory(self._table, self.group.rank, self.group.world)
        if counts_steps:
            self._memory.begin()
        scratch = Scratch() if synchronous else None
        self._context = Context(
            self._table, self._memory, self.group.rank, self.group.world, self._ops, find_unused, scratch,
            keeps_buffers=not counts_steps and not synchronous,
        )  # fmt: skip
        self._counters = Counters()
        self._step = 0
        self._rounds = 0
        self._rounds_in_step = 0
        self._raw_counted = 0
        self._compressed_step = False
        self._scale = 1.0
        self._exchanges: dict[Hashable, BucketExchange] = {}
        self._used: dict[Hashable, BucketExchange] = {}
        self._used_in_step: set[Hashable] = set()
        self._norm_squared = 0.0
        self._saturated = 0
        self._left_out: dict[str, str] = {}
        self._layout: list[list[str]] = []
        self._replay: LayoutReplay | None = None
        self._in_step = False
        self._last_ok, self._unchecked = True, list[Tensor]()
        self._error: BaseException | None = None
        if optimizer is not None:
            self._selection.warn_of(optimizer)
        _log.info("%s: schedule %s, kernels %s", self._selection.spec_at(0), self._schedule, self._ops.name)

    # ---------------------------------------------------------------- what a user calls
    def stats(self) -> Stats:
        """A snapshot: bytes, ratio, times, residuals, and what was bypassed and why. Local to this rank."""
        counters, spec = self._counters, self._selection.spec_at(self._step)
        norm = self._memory.worker_norm()
        return Stats(
            spec=spec,
            schedule=str(self._schedule),
            backend=self._ops.name,
            rank=self.group.rank,
            world_size=self.group.world,
            steps=counters.steps,
            compressed_steps=counters.compressed_steps,
            skipped_steps=counters.skipped_steps,
            raw_bytes=counters.raw_bytes,
            wire_bytes=self._sent(),
            raw_bytes_per_step=counters.last_raw_bytes,
            wire_bytes_per_step=counters.last_wire_bytes,
            collectives=sum(group.calls for group in self._schedule.groups),
            encode_seconds=counters.timings.encode,
            exchange_seconds=counters.timings.exchange,
            decode_seconds=counters.timings.decode,
            residual_norm=norm,
            residual_ratio=norm / counters.gradient_norm if counters.gradient_norm else 0.0,
            saturations=self._saturated + sum(int(e.saturated) for e in self._exchanges.values()),
            memory_bytes=self._memory.nbytes,
            bypassed={n: c.bypassed for n, c in self._selection.choices(spec).items() if c.bypassed is not None}
            | self._left_out,
        )

    def set(self, spec: SpecLike, *, rules: Iterable[RuleLike] | None = None) -> None:
        """Use another compressor from the next step on; residuals carry over. All ranks must call it between steps.

        Raises:
            ConfigError: bad spec. MismatchError: the ranks pass different specs, or are at different steps.
        """
        self._between_steps("set()")
        selection = self._selection

        def change() -> str:
            nonlocal selection
            selection = selection.changed(spec, rules, self._step)
            return f"{selection.describe()} at step {self._step}"

        self.group.agree(change, "handle.set()")
        self._selection = selection

    def disable(self) -> None:
        """Exchange uncompressed from the next step on. All ranks must call it between steps."""
        self.set("none")

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals, warm starts and step: tensors, strings and plain numbers only.

        Every rank must save its own (residuals differ by rank).
        """
        self._between_steps("state_dict()")
        where = {"step": self._step, "rounds": self._rounds, "layout": self._layout}
        return {"format": STATE_FORMAT, **where, **self._memory.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Restore a checkpoint. All ranks must call it; each passes the state that it saved.

        In another world size, pass to each rank a list of some of the old ranks' states, so that each old state is
        passed to exactly one rank (an empty list is fine): the total residual is kept.

        Raises:
            ConfigError, MismatchError: on every rank, when states are missing, doubled, of different steps, or do not
                fit the model. Nothing is changed then.
        """
        self._between_steps("load_state_dict()")
        states = [state] if isinstance(state, Mapping) else list(state)
        step, exact = agree_on_states(self.group, self._memory, states)
        permuted = [p.name for p in self._table.whole.values() if p.permuted]
        held = self.keeps_feedback or any(name in state["worker"] for state in states for name in permuted)
        if permuted and held and not exact:
            raise UnsupportedError(
                f"load_state_dict: residuals of parameters that are not sharded along their first dimension ({permuted[:5]}) fit "
                "the world size in which they were saved only"
            )
        self._memory.load_state_dicts(states, exact)
        self._exchanges.clear()
        self._step = step
        self._rounds = states[0].get("rounds", step) if states else step
        self._replay = LayoutReplay(states[0]["layout"]) if exact and not self._synchronous else None

    def close(self) -> None:
        """Stop the worker thread of the ``thread`` schedule."""
        self._schedule.close()

    def __repr__(self) -> str:
        spec = self._selection.spec_at(self._step)
        return f"<gradcomp {spec}, schedule {self._schedule}, kernels {self._ops.name}, step {self._step}>"

    # ---------------------------------------------------------------- what integrations call
    @property
    def step(self) -> int:
        """Steps exchanged so far."""
        return self._step

    @property
    def last_step_finite(self) -> bool:
        """Whether the last step was finite on all ranks. Ask between ``backward()`` and the next one."""
        if self._unchecked:
            self._last_ok = all(map(is_finite, self._unchecked))
            self._counters.skipped_steps += not self._last_ok
            self._unchecked = []
        return self._last_ok

    @property
    def last_step_compressed(self) -> bool:
        """Whether anything was compressed in the last step."""
        return self._compressed_step

    @property
    def keeps_feedback(self) -> bool:
        """Whether the compressors that begin use error feedback."""
        specs = {choice.spec for choice in self.choices.values()}
        return any(getattr(parse_spec(spec)[1], "error_feedback", False) for spec in specs)

    @property
    def choices(self) -> Mapping[str, Choice]:
        """What each parameter uses in the next step, warm-up aside."""
        return self._selection.choices(self._selection.spec_at(self._step))

    @property
    def parameters(self) -> Sequence[Parameter]:
        """All parameters in declaration order, as they were registered."""
        return tuple(self._table.whole.values())

    @property
    def buckets(self) -> Sequence[Sequence[str]]:
        """The names in each bucket of the last round, in the order in which they were exchanged."""
        return self._layout

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules in force."""
        return self._selection.rules

    def leave_out(self, name: str, reason: str) -> None:
        """Note that the trainer's bucket does not let this parameter be compressed, for :meth:`stats`."""
        self._left_out[name] = reason

    @property
    def in_use(self) -> bool:
        """Whether any bucket came to this handle since the last :meth:`end_step`."""
        return self._in_step or self._rounds_in_step > 0

    def compresses(self, names: Iterable[str]) -> bool:
        """Whether :meth:`submit` would do more for a bucket of these parameters than average it, in this step.

        If not, a trainer may average it itself, and say :meth:`count_uncompressed`.
        """
        if not self._in_step:
            self._begin_round()
        if self.group.world == 1:
            return False
        names = list(names)
        choices = self._active_choices or {}
        return any(name in choices and choices[name].bypassed is None for name in names) or (
            self._memory.active and any(self._memory.holds(name) for name in names)
        )

    def count_uncompressed(self, numel: int, *, scatter: bool = False) -> None:
        """The trainer averages a bucket of ``numel`` elements itself (``scatter``: in a reduce-scatter)."""
        if not self._in_step:
            self._begin_round()
        size = (self._trainer_dtype or torch.float32).itemsize
        sent = (1 if scatter else 2) * (self.group.world - 1) * numel * size // self.group.world
        self._counters.last_raw_bytes += sent
        self.group.bytes_sent += sent
        self.group.calls += 1

    def reset(self) -> None:
        """Forget all residuals and warm starts."""
        self._between_steps("reset()")
        self._memory.clear()
        self._exchanges.clear()

    def submit(
        self,
        key: Hashable,
        slots: Callable[[], Sequence[Slot]],
        buffer: Tensor,
        done: Callable[[], None],
        last: bool,
        out: Tensor | None = None,
    ) -> None:
        """Exchange one bucket: replaces ``buffer`` by the mean and then calls ``done``, at the latest with ``last``.

        Args:
            key: identifies the bucket's layout; ``slots`` is called when it is new. An empty result: all-reduce as it is.
            last: no other bucket follows in this round (see also :meth:`finish`).
            out: for a reduce-scatter of ``buffer`` [W * L] (see :func:`gradcomp.bucket.shard_slots`): becomes this rank's
                row [L] of the mean, in the same dtype.

        Raises:
            MismatchError, ExchangeError: the handle cannot be used any more; later calls raise again.
        """
        if self._error is not None:
            raise GradcompError(
                f"this handle stopped at step {self._step} after an error: {self._error}"
            ) from self._error
        try:
            if not self._in_step:
                self._begin_round()
            if self.group.world == 1:
                if out is not None:
                    out.copy_(buffer)
                done()
            elif self._replay is None:
                self._exchange(key, slots, buffer, done, last, out)
            else:
                self._replay_or_exchange(self._replay, key, slots, buffer, done, last)
            if last:
                self._end_round()
        except BaseException as error:
            self._error = error
            self._schedule.abandon()
            raise

    def finish(self) -> None:
        """End a round of buckets, for a trainer that cannot tell which bucket is the last one."""
        if self._in_step:
            try:
                self._end_round()
            except BaseException as error:
                self._error = error
                raise

    def end_step(self, applied: bool) -> None:
        """The trainer has ended a step, of one or more rounds; not ``applied``: it skipped it, so residuals go back."""
        self.finish()
        if not applied and self._memory.rollback():
            self._exchanges.clear()
        self._memory.begin()
        if self._rounds_in_step:
            self._counters.steps += 1
            self._counters.skipped_steps += not applied
            self._step += 1
            self._release_unused()
        self._rounds_in_step = 0

    def abort_step(self) -> None:
        """An exception ended the trainer's step early: nothing of it was applied, so residuals go back to its begin."""
        self._memory.discard()
        self._schedule.abandon()
        self._in_step = False
        if self._counts_steps:
            if self._memory.rollback():
                self._exchanges.clear()
            self._memory.begin()
            self._rounds_in_step = 0

    def _replay_or_exchange(
        self,
        replay: LayoutReplay,
        key: Hashable,
        slots: Callable[[], Sequence[Slot]],
        buffer: Tensor,
        done: Callable[[], None],
        last: bool,
    ) -> None:
        replay.hold(Held(key, slots(), buffer, done))
        if last:
            buckets = replay.release()
            for held in buckets:
                self._exchange(held.key, held.get_slots, held.buffer, held.done, held is buckets[-1])
            if replay.finished:
                self._replay = None

    def _exchange(
        self,
        key: Hashable,
        slots: Callable[[], Sequence[Slot]],
        buffer: Tensor,
        done: Callable[[], None],
        last: bool,
        out: Tensor | None = None,
    ) -> None:
        key = (key, self._active)
        exchange = self._exchanges.get(key)
        if exchange is None:
            row = None if out is None else out.numel()
            exchange = BucketExchange(slots(), buffer, self._active_choices, self._context, row)
            self._exchanges[key] = exchange
        self._used[key] = exchange
        values = buffer._values() if buffer.is_sparse else buffer
        passes = 2 if out is None else 1
        size = values.element_size() if self._trainer_dtype is None else self._trainer_dtype.itemsize
        self._counters.last_raw_bytes += passes * (self.group.world - 1) * values.numel() * size // self.group.world
        if self._step % _NORM_EVERY == 0 and exchange.compressed:
            self._norm_squared += float(buffer.float().norm()) ** 2
        run = exchange.run(buffer, self._rounds, self._scale, out)
        task = Task(run, done, exchange.name, self._counters.timings)
        self._schedule.submit(task, last)

    # ---------------------------------------------------------------- steps
    def _begin_round(self) -> None:
        self._in_step = True
        self._scale = float(self._scaler.get_scale()) if self._scaler is not None else 1.0
        # a change of what is active changes the buckets' keys: they are built anew and residuals move by name
        self._active, self._active_choices = self._selection.active_at(self._step)
        if not self._rounds_in_step:
            self._counters.last_raw_bytes = 0
            self._sent_before = self._sent()
            self._compressed_step, self._raw_counted = False, 0
        self._used = {}
        self._norm_squared = 0.0

    def _end_round(self) -> None:
        counters = self._counters
        compressed = any(exchange.compressed for exchange in self._used.values())
        expected = any(choice.bypassed is None for choice in (self._active_choices or {}).values())
        if self.group.world > 1 and expected and not compressed and not self._synchronous:
            raise UnsupportedError(
                f"step {self._step}: nothing was compressed although {self._active} was asked for: the trainer's buckets held "
                "none of the parameters that should be compressed"
            )
        self._last_ok = all(exchange.ok for exchange in self._used.values())
        self._unchecked = [e.unchecked for e in self._used.values() if e.unchecked is not None]
        if self._last_ok:
            self._memory.commit()
            for exchange in self._used.values():
                exchange.settle()
        else:
            self._memory.discard()
            counters.skipped_steps += not self._counts_steps
        if self._norm_squared:
            counters.gradient_norm = self._norm_squared**0.5 / self._scale
        counters.compressed_steps += compressed and not self._compressed_step
        self._compressed_step |= compressed
        counters.raw_bytes += counters.last_raw_bytes - self._raw_counted
        self._raw_counted = counters.last_raw_bytes
        counters.last_wire_bytes = self._sent() - self._sent_before
        self._layout = [[slot.name for slot in exchange.slots] for exchange in self._used.values() if exchange.slots]
        self._used_in_step |= self._used.keys()
        self._rounds += 1
        self._in_step = False
        if self._counts_steps:
            self._rounds_in_step += 1
        else:
            counters.steps += 1
            self._step += 1
            self._release_unused()

    def _release_unused(self) -> None:
        """Drop the buffers of layouts that the step did not use: they are gone."""
        for key in self._exchanges.keys() - self._used_in_step:
            self._saturated += int(self._exchanges.pop(key).saturated)
        self._used_in_step.clear()

    def _sent(self) -> int:
        return sum(group.bytes_sent for group in self._schedule.groups)

    def _between_steps(self, what: str) -> None:
        if self._in_step:
            raise GradcompError(f"{what} was called in the middle of a step; call it between backward passes")
