"""Error-feedback memory, keyed by parameter name.

A residual belongs to its parameter, not to a bucket: it survives rebuilt buckets, another bucket size, resume and another
world size. There are three kinds:

* ``worker``: what this rank's encoding left out of its own gradient, fp32 [numel] per parameter, in unscaled units;
* ``server``: what the second encoding left out of the *mean*, for the blocks that this rank owns;
* ``factor``: a compressor's warm start, the same on all ranks (PowerSGD's Q).

The quantity that error feedback must never lose is ``total = mean over ranks of worker + sum over ranks of server``. So a
server residual that can no longer stay where it is (other block size, other world size) becomes worker residual of the
rank that holds it, times the world size.

Every buffer is double: a step reads ``current`` and writes ``next``. :meth:`Memory.commit` swaps them when the step was
finite on all ranks; otherwise nothing moves. That costs 8 bytes per parameter instead of 4, and one pass less than
recomputing. A trainer that decides later whether a step counts (DeepSpeed) says :meth:`Memory.begin` before it and, if it
skipped the step, :meth:`Memory.rollback` after it. Where several exchanges make a step, the second one copies what the
step began with to a third buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from gradcomp.bucket import BlockSpan, ParameterTable
from gradcomp.errors import ConfigError

Kind = Literal["worker", "server", "factor"]
_KINDS: tuple[Kind, ...] = ("worker", "server", "factor")


@dataclass(eq=False, slots=True)
class Buffer:
    """A double-buffered tensor. ``tag``: what the contents depend on besides the parameter (block size, world, rank)."""

    current: Tensor
    next: Tensor
    tag: int
    written: bool = False
    commits: int = 0
    saved: Tensor | None = None

    def open(self) -> tuple[Tensor, Tensor]:
        """Old and new contents, for an exchange that reads the one and writes the other."""
        if self.commits == 1:
            self.saved = self.next.clone() if self.saved is None else self.saved.copy_(self.next)
            self.commits = 2
        self.written = True
        return self.current, self.next

    def swap(self) -> None:
        """Exchange old and new."""
        self.current, self.next = self.next, self.current

    @property
    def origin(self) -> Tensor:
        """The contents at the last :meth:`Memory.begin`."""
        if self.commits > 1:
            assert self.saved is not None
            return self.saved
        return self.next if self.commits else self.current

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that is held."""
        return (self.current, self.next) if self.saved is None else (self.current, self.next, self.saved)


@dataclass(frozen=True, slots=True)
class _Entry:
    """One parameter's part of a buffer."""

    buffer: Buffer
    start: int
    numel: int

    def read(self) -> Tensor:
        return self.buffer.current[self.start : self.start + self.numel]


@dataclass(slots=True)
class Memory:
    """The residuals of one rank."""

    table: ParameterTable
    rank: int
    world: int
    _entries: dict[tuple[Kind, str], _Entry] = field(default_factory=dict)
    _transaction: bool = False
    _dropped: dict[str, _Entry] = field(default_factory=dict)
    _distinct: list[Buffer] | None = None

    # ---------------------------------------------------------------- buffers
    def worker(
        self, spans: Sequence[BlockSpan], block_size: int, numel: int, device: torch.device, *, with_server: bool
    ) -> Buffer:
        """A residual in block space, ``numel`` fp32 elements, filled with what is known of its parameters."""
        for span in spans:
            server = self._entries.get(("server", span.name))
            if server is not None and not (with_server and server.buffer.tag == block_size):
                self._fold(span.name)
        return self._attach("worker", [(s.name, s.first * block_size, s.numel) for s in spans], numel, device, 0)

    def server(self, spans: Sequence[BlockSpan], block_size: int, numel: int, device: torch.device) -> Buffer:
        """The residual of the shard that this rank owns. Attach the worker's buffer first."""
        places = [(s.name, s.owned_first * block_size, s.owned_count * block_size) for s in spans if s.owned_count]
        return self._attach("server", places, numel, device, block_size)

    def factor(self, places: Sequence[tuple[str, int, int]], numel: int, device: torch.device, tag: int) -> Buffer:
        """A warm start: (name, offset, numel) per parameter; entries of another size or ``tag`` are dropped."""
        for name, _, size in places:
            entry = self._entries.get(("factor", name))
            if entry is not None and (entry.numel != size or entry.buffer.tag != tag):
                self._pop("factor", name)
        return self._attach("factor", places, numel, device, tag)

    def known(self, kind: Kind, name: str) -> bool:
        """Whether anything is held for this parameter."""
        return (kind, name) in self._entries

    def _attach(
        self, kind: Kind, places: Sequence[tuple[str, int, int]], numel: int, device: torch.device, tag: int
    ) -> Buffer:
        buffer = Buffer(torch.zeros(numel, device=device), torch.zeros(numel, device=device), tag)
        for name, start, size in places:
            old = self._entries.get((kind, name))
            if old is not None:
                self._move(old, buffer, start)
            self._set(kind, name, _Entry(buffer, start, size))
        return buffer

    @staticmethod
    def _move(old: _Entry, buffer: Buffer, start: int) -> None:
        """Carry an entry over to a new buffer, in the middle of a trainer's step with what the step began with."""
        if old.buffer.commits and buffer.saved is None:
            buffer.saved, buffer.commits = buffer.current.clone(), 2
        buffer.current[start : start + old.numel].copy_(old.read())
        if buffer.saved is not None:
            origin = old.buffer.origin[old.start : old.start + old.numel]
            buffer.saved[start : start + old.numel].copy_(origin)

    def _blocks_of(self, name: str, block_size: int, rank: int, world: int) -> range:
        """Which blocks of a parameter ``rank`` owns in a world of ``world`` (see bucket.cut_blocks)."""
        count = -(-self.table.by_name[name].numel // block_size)
        return range((rank - self.table.first_block(name, block_size)) % world, count, world)

    def _add_server_to_worker(
        self, name: str, values: Tensor, block_size: int, rank: int, world: int, factor: float
    ) -> None:
        """worker += factor * server, at the blocks that ``rank`` of ``world`` owned."""
        numel = self.table.by_name[name].numel
        padded = torch.zeros(-(-numel // block_size), block_size, device=values.device)
        owned = self._blocks_of(name, block_size, rank, world)
        padded[owned.start : owned.stop : owned.step] = values.view(-1, block_size)
        self._add_worker(name, padded.view(-1)[:numel], factor)

    def _add_worker(self, name: str, values: Tensor, factor: float) -> None:
        entry = self._entries.get(("worker", name))
        if entry is None:
            zeros = torch.zeros(values.numel(), device=values.device)
            entry = self._set("worker", name, _Entry(Buffer(zeros, zeros.clone(), 0), 0, values.numel()))
        entry.read().add_(values, alpha=factor)

    def _fold(self, name: str) -> None:
        server = self._pop("server", name)
        assert server is not None
        self._add_server_to_worker(name, server.read(), server.buffer.tag, self.rank, self.world, float(self.world))

    # ---------------------------------------------------------------- steps
    def keep(self, name: str) -> None:
        """What this step wrote for a parameter will not be applied: let it keep what it had."""
        for kind in _KINDS:
            entry = self._entries.get((kind, name))
            if entry is not None and entry.buffer.written:
                entry.buffer.next[entry.start : entry.start + entry.numel].copy_(entry.read())

    def commit(self) -> None:
        """The exchange was finite on all ranks: what it wrote becomes current."""
        for buffer in self._buffers():
            if buffer.written:
                buffer.swap()
                buffer.written = False
                buffer.commits = max(buffer.commits, int(self._transaction))

    def discard(self) -> None:
        """The exchange was not finite: forget what it wrote."""
        for buffer in self._buffers():
            buffer.written = False

    def begin(self) -> None:
        """A step of the trainer begins: :meth:`rollback` leads back to here."""
        self._transaction = True
        self._dropped.clear()
        for buffer in self._buffers():
            buffer.commits = 0

    def rollback(self) -> bool:
        """Undo every :meth:`commit` since the last :meth:`begin`: the trainer skipped the step.

        Returns:
            Whether residuals that had been sent and dropped are back, so that buckets must look for them again.
        """
        restored = bool(self._dropped)
        for name, entry in self._dropped.items():
            self._set("worker", name, entry)
        self._dropped.clear()
        for buffer in self._buffers():
            if buffer.commits == 1:
                buffer.swap()
            elif buffer.commits:
                buffer.current.copy_(buffer.origin)
            buffer.commits = 0
        return restored

    def holds(self, parameter: str) -> bool:
        """Whether there is any residual of a parameter, whole or in pieces."""
        return any(self.known(kind, p.name) for p in self.table.pieces(parameter) for kind in ("worker", "server"))

    def read_worker(self, name: str) -> Tensor | None:
        """All residual of a parameter (server part folded in), fp32 [numel]; None if there is none."""
        if self.known("server", name):
            self._fold(name)
        entry = self._entries.get(("worker", name))
        return None if entry is None else entry.read()

    def drop_worker(self, name: str) -> None:
        """Forget the residual of a parameter: it has been sent."""
        entry = self._pop("worker", name)
        if entry is not None and self._transaction:
            self._dropped.setdefault(name, entry)

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self._dropped.clear()
        self._distinct = None

    def _buffers(self) -> list[Buffer]:
        """Each buffer once; remembered, since it is asked for in every step."""
        if self._distinct is None:
            self._distinct = list({id(entry.buffer): entry.buffer for entry in self._entries.values()}.values())
        return self._distinct

    def _set(self, kind: Kind, name: str, entry: _Entry) -> _Entry:
        self._entries[kind, name] = entry
        self._distinct = None
        return entry

    def _pop(self, kind: Kind, name: str) -> _Entry | None:
        self._distinct = None
        return self._entries.pop((kind, name), None)

    # ---------------------------------------------------------------- numbers
    @property
    def nbytes(self) -> int:
        """Bytes held, all buffers."""
        return sum(tensor.numel() * tensor.element_size() for buffer in self._buffers() for tensor in buffer.tensors)

    @property
    def active(self) -> bool:
        """Whether any residual is kept."""
        return bool(self._entries)

    def worker_norm(self) -> float:
        """L2 norm of all worker residuals of this rank."""
        norms = [entry.read().norm() for (kind, _), entry in self._entries.items() if kind == "worker"]
        return float(torch.stack(norms).norm()) if norms else 0.0

    # ---------------------------------------------------------------- checkpoints
    def state_dict(self) -> dict[str, Any]:
        """Copies, as tensors, strings and plain numbers only (``torch.load(weights_only=True)``)."""
        state: dict[str, Any] = {"rank": self.rank, "world": self.world, "worker": {}, "server": {}, "factor": {}}
        for name in self.table.whole:
            pieces = self.table.pieces(name)
            held = [self._entries.get(("worker", piece.name)) for piece in pieces]
            device = next((entry.buffer.current.device for entry in held if entry is not None), None)
            if device is not None:
                parts = [
                    torch.zeros(piece.numel, device=device) if entry is None else entry.read()
                    for piece, entry in zip(pieces, held, strict=True)
                ]
                state["worker"][name] = torch.cat(parts)
        for (kind, name), entry in self._entries.items():
            if kind != "worker":
                state[kind][name] = {"tag": entry.buffer.tag, "values": entry.read().clone()}
        return state

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]], exact: bool) -> None:
        """Replace the contents by this rank's share of a checkpoint.

        ``exact``: every rank restores its own state of the same world size, as it was. Otherwise each state's
        contribution to the total is kept: worker residuals are scaled by new over old world size, server residuals
        become worker residuals, and warm starts, which must be the same on all ranks, start afresh.
        """
        self.clear()
        for state in states:
            for name, values in state["worker"].items():
                pieces = self.table.pieces(name)
                for piece, part in zip(pieces, values.split([piece.numel for piece in pieces]), strict=True):
                    self._add_worker(piece.name, part, self.world / state["world"])
            for name, item in state["server"].items():
                if exact:
                    self._restore("server", name, item["values"], item["tag"])
                else:
                    self._add_server_to_worker(
                        name, item["values"], item["tag"], state["rank"], state["world"], float(self.world)
                    )
            for name, item in state["factor"].items() if exact else ():
                self._restore("factor", name, item["values"], item["tag"])

    def _restore(self, kind: Kind, name: str, values: Tensor, tag: int) -> None:
        buffer = Buffer(values.clone(), torch.zeros_like(values), tag)
        self._set(kind, name, _Entry(buffer, 0, values.numel()))

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise ConfigError unless ``state`` fits the model."""
        try:
            rank, world = int(state["rank"]), int(state["world"])
            names = {*state["worker"], *state["server"], *state["factor"]}
            unknown = sorted(names - set(self.table.whole))
            wrong = {n for n, values in state["worker"].items() if values.numel() != self._numel(n)}
            for name, item in state["server"].items():
                blocks = self._blocks_of(name, item["tag"], rank, world) if name not in unknown else ()
                if item["values"].numel() != len(blocks) * item["tag"]:
                    wrong.add(name)
            for item in state["factor"].values():
                item["tag"], item["values"].numel()
        except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise ConfigError(
                f"state_dict is incomplete or damaged ({error!r}); allowed is what handle.state_dict() returned"
            ) from error
        wrong -= set(unknown)
        if unknown or wrong:
            raise ConfigError(
                f"state_dict does not fit this model: unknown parameters {unknown[:5]}, parameters of another size "
                f"{sorted(wrong)[:5]}; allowed are the names and sizes of the module that was registered"
            )

    def _numel(self, name: str) -> int:
        return self.table.whole[name].numel if name in self.table.whole else 0
