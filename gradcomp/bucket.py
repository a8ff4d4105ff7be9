"""A bucket: one flat tensor and the parameters in it.

Slots are described by the *parameters* (name, size, stride), never by ``GradBucket.gradients()``, whose views are wrong for
complex, sparse and strided parameters. Blocks never span parameters, and a block's owner depends on the parameter alone
(its place in declaration order), not on the bucket: that keeps server residuals valid when buckets are rebuilt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from gradcomp.kernels.ops import Blocks


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's place in a flat bucket (``offset`` and ``numel`` in elements, in memory order).

    In the input of a reduce-scatter a slot is one rank's piece of a parameter; ``owner`` is that rank.
    """

    name: str
    offset: int
    numel: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    owner: int | None = None

    @property
    def parameter(self) -> str:
        """Name of the parameter that the slot is (a piece of)."""
        return self.name if self.owner is None else self.name.rpartition("#")[0]

    @property
    def matrix(self) -> tuple[int, int]:
        """(m, n) of the slot as a row-major matrix in memory order: the outermost dimension against the rest."""
        if len(self.shape) < 2 or self.numel == 0:
            return 1, self.numel
        outermost = max(range(len(self.shape)), key=lambda d: (self.shape[d] > 1, self.stride[d]))
        rows = self.shape[outermost]
        return rows, self.numel // rows


@dataclass(frozen=True, slots=True)
class Parameter:
    """What the engine knows of a parameter. ``embedding``: its rows are looked up, so most gradient rows are zero.

    ``chunk``: the trainer reduce-scatters gradients, and this many elements of the flattened parameter are one rank's (the
    last ranks may have fewer, or none). ``permuted``: in which order the flattened parameter is, depends on the number of
    ranks (sharding along another dimension than the first).
    """

    name: str
    numel: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    embedding: bool = False
    chunk: int | None = None
    permuted: bool = False

    def pieces(self, world: int) -> list[Parameter]:
        """The parameter itself, or what each of ``world`` ranks has of it."""
        if self.chunk is None:
            return [self]
        sizes = [min(self.chunk, max(0, self.numel - rank * self.chunk)) for rank in range(world)]
        return [
            replace(self, name=f"{self.name}#{rank}", numel=size, shape=(size,), chunk=None)
            for rank, size in enumerate(sizes)
        ]


def shard_slots(parameters: Sequence[Parameter], world: int) -> tuple[list[Slot], int]:
    """The slots of a reduce-scatter's input, and the length L of its rows.

    The input is [W * L]: row r holds rank r's piece of each of ``parameters``, in their order, each padded to ``chunk``.
    """
    row = sum(parameter.chunk or 0 for parameter in parameters)
    slots, start = [], 0
    for parameter in parameters:
        for rank, piece in enumerate(parameter.pieces(world)):
            slots.append(Slot(piece.name, rank * row + start, piece.numel, piece.shape, (1,), rank))
        start += parameter.chunk or 0
    return slots, row


class ParameterTable:
    """All parameters in declaration order, which is the same on all ranks and in all buckets.

    ``whole``: the parameters; ``by_name``: what slots and residuals are named by, pieces where gradients are
    reduce-scattered among ``world`` ranks.
    """

    def __init__(self, parameters: Sequence[Parameter], world: int = 1) -> None:
        self.whole: Mapping[str, Parameter] = {parameter.name: parameter for parameter in parameters}
        if len(self.whole) != len(parameters):
            raise ValueError("parameter names are not unique")
        self.numel = sum(parameter.numel for parameter in parameters)
        self.scatters = any(parameter.chunk is not None for parameter in parameters)
        self._pieces = {parameter.name: parameter.pieces(world) for parameter in parameters}
        self.by_name: Mapping[str, Parameter] = {p.name: p for pieces in self._pieces.values() for p in pieces}
        self._first_blocks: dict[int, dict[str, int]] = {}

    def pieces(self, name: str) -> Sequence[Parameter]:
        """The names and sizes under which slots and residuals of the parameter ``name`` go."""
        return self._pieces[name]

    def first_block(self, name: str, size: int) -> int:
        """Number of blocks of ``size`` elements in all parameters declared before ``name``."""
        table = self._first_blocks.get(size)
        if table is None:
            table, count = {}, 0
            for parameter in self.by_name.values():
                table[parameter.name] = count
                count += -(-parameter.numel // size)
            self._first_blocks[size] = table
        return table[name]


@dataclass(frozen=True, slots=True)
class BlockSpan:
    """Where one parameter's blocks stand: ``first`` of ``count`` blocks in block space, and in the owned shard."""

    name: str
    first: int
    count: int
    numel: int
    owned_first: int
    owned_count: int


def cut_blocks(
    slots: Sequence[Slot], table: ParameterTable, size: int, rank: int, world: int, device: torch.device
) -> tuple[Blocks, tuple[BlockSpan, ...]]:
    """Cut ``slots`` into blocks of at most ``size`` elements and deal them out: to the slot's owner, else round-robin."""
    counts = np.array([-(-slot.numel // size) for slot in slots], dtype=np.int64)
    nb = int(counts.sum())
    slot_of = np.repeat(np.arange(len(slots)), counts)
    first = np.concatenate([[0], np.cumsum(counts)[:-1]]) if len(slots) else np.zeros(0, np.int64)
    within = np.arange(nb) - first[slot_of]
    offsets = np.array([slot.offset for slot in slots], dtype=np.int64)
    numels = np.array([slot.numel for slot in slots], dtype=np.int64)
    start = offsets[slot_of] + within * size
    length = np.minimum(size, numels[slot_of] - within * size).astype(np.int32)
    firsts = np.array([table.first_block(slot.name, size) for slot in slots], dtype=np.int64)
    number = firsts[slot_of] + within
    given = np.array([-1 if slot.owner is None else slot.owner for slot in slots], dtype=np.int64)[slot_of]
    owner = np.where(given >= 0, given, number % world)

    shares = np.bincount(owner, minlength=world)
    order = np.argsort(owner, kind="stable")
    local = np.empty(nb, np.int64)
    local[order] = np.arange(nb) - np.repeat(np.concatenate([[0], np.cumsum(shares)[:-1]]), shares)
    per_shard = int(shares.max()) if nb else 0
    owned, owned_number = np.zeros(per_shard, np.int32), np.zeros(per_shard, np.int32)
    mine = owner == rank
    owned[local[mine]] = length[mine]
    owned_number[local[mine]] = number[mine]

    spans = []
    for i, slot in enumerate(slots):
        in_slot = local[first[i] : first[i] + counts[i]][mine[first[i] : first[i] + counts[i]]]
        spans.append(
            BlockSpan(
                slot.name,
                int(first[i]),
                int(counts[i]),
                slot.numel,
                int(in_slot[0]) if in_slot.size else 0,
                in_slot.size,
            )
        )
    blocks = Blocks(
        size=size,
        world=world,
        per_shard=per_shard,
        start=torch.from_numpy(start).to(device),
        length=torch.from_numpy(length).to(device),
        position=torch.from_numpy((owner * per_shard + local).astype(np.int32)).to(device),
        owned=torch.from_numpy(owned).to(device),
        number=torch.from_numpy(number.astype(np.int32)).to(device),
        owned_number=torch.from_numpy(owned_number).to(device),
    )
    return blocks, tuple(spans)


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive blocks of a bucket that travel in a payload of their own: the first is block ``first`` of the bucket,
    and their owned ones begin at place ``owned_first`` of this rank's shard."""

    blocks: Blocks
    first: int
    owned_first: int


def split_blocks(blocks: Blocks, rank: int, count: int) -> list[Piece]:
    """Cut a bucket's blocks into ``count`` pieces of about the same number of blocks."""
    if count <= 1:
        return [Piece(blocks, 0, 0)]
    owner, place = blocks.position.long() // blocks.per_shard, blocks.position.long() % blocks.per_shard
    before, pieces = torch.zeros(blocks.world, dtype=torch.int64, device=owner.device), []
    for i in range(count):
        run = slice(i * blocks.count // count, (i + 1) * blocks.count // count)
        shares = torch.bincount(owner[run], minlength=blocks.world)
        per_shard, first, mine = int(shares.max()), int(before[rank]), int(shares[rank])
        owned, owned_number = (
            torch.cat([known[first : first + mine], known.new_zeros(per_shard - mine)])
            for known in (blocks.owned, blocks.owned_number)
        )
        position = owner[run] * per_shard + place[run] - before[owner[run]]
        part = replace(
            blocks, per_shard=per_shard, start=blocks.start[run], length=blocks.length[run], number=blocks.number[run],
            position=position.to(torch.int32), owned=owned, owned_number=owned_number,
        )  # fmt: skip
        pieces.append(Piece(part, run.start, first))
        before += shares
    return pieces


class Runs:
    """Some slots of a flat bucket as one compact tensor of :attr:`numel` elements, in slot order.

    Long runs are copied as slices, short ones (biases, norms) by one indexed copy, so the number of parameters does not
    show in the step.
    """

    _LONG = 1 << 14

    def __init__(self, slots: Sequence[Slot], device: torch.device) -> None:
        runs: list[list[int]] = []
        for slot in slots:
            if runs and runs[-1][0] + runs[-1][1] == slot.offset:
                runs[-1][1] += slot.numel
            elif slot.numel:
                runs.append([slot.offset, slot.numel])
        self.numel = sum(numel for _, numel in runs)
        self._long: list[tuple[int, int, int]] = []
        index, place, at = [], [], 0
        for offset, numel in runs:
            if numel >= self._LONG or len(runs) == 1:
                self._long.append((offset, at, numel))
            else:
                index.append(torch.arange(offset, offset + numel))
                place.append(torch.arange(at, at + numel))
            at += numel
        self._index = torch.cat(index).to(device) if index else None
        self._place = torch.cat(place).to(device) if place else None

    def view(self, flat: Tensor) -> Tensor | None:
        """The compact tensor itself, without a copy, where the slots are one contiguous run."""
        if len(self._long) == 1 and self._index is None:
            offset, _, numel = self._long[0]
            return flat[offset : offset + numel]
        return None

    def gather(self, flat: Tensor, out: Tensor) -> None:
        """Copy the slots of ``flat`` to ``out`` [numel]."""
        for offset, at, numel in self._long:
            out[at : at + numel].copy_(flat[offset : offset + numel])
        if self._index is not None and self._place is not None:
            if self._index.numel() == self.numel:
                torch.index_select(flat, 0, self._index, out=out[: self.numel])
            else:
                out.index_copy_(0, self._place, flat.index_select(0, self._index))

    def scatter(self, values: Tensor, flat: Tensor) -> None:
        """Copy ``values`` [numel] back to the slots of ``flat``."""
        for offset, at, numel in self._long:
            flat[offset : offset + numel].copy_(values[at : at + numel])
        if self._index is not None and self._place is not None:
            source = values[: self.numel] if self._index.numel() == self.numel else values.index_select(0, self._place)
            flat.index_copy_(0, self._index, source)


def owned_blocks(blocks: Blocks, rank: int, row: int) -> Blocks:
    """This rank's blocks of a reduce-scatter's input, to decode one rank's shard into this rank's row [L] of the result."""
    mine = torch.nonzero(blocks.position // blocks.per_shard == rank).view(-1) if blocks.per_shard else blocks.start
    return replace(
        blocks,
        world=1,
        start=blocks.start[mine] - rank * row,
        length=blocks.length[mine],
        position=blocks.position[mine] - rank * blocks.per_shard,
        number=blocks.number[mine],
    )


class RowRuns:
    """Slots of a reduce-scatter's input, compact: row r is what rank r owns, padded with zeros to :attr:`share`."""

    def __init__(self, slots: Sequence[Slot], rank: int, world: int, row: int, device: torch.device) -> None:
        owned = [[slot for slot in slots if slot.owner == owner] for owner in range(world)]
        self._rows = [Runs(mine, device) for mine in owned]
        self._mine = Runs([replace(slot, offset=slot.offset - rank * row) for slot in owned[rank]], device)
        self.share = max(runs.numel for runs in self._rows)

    def gather(self, flat: Tensor, out: Tensor) -> None:
        """Copy the slots of ``flat`` [W * L] to ``out`` [W, share or more]."""
        for runs, values in zip(self._rows, out, strict=True):
            if runs.numel:
                runs.gather(flat, values)
            values[runs.numel :].zero_()

    def put(self, values: Tensor, shard: Tensor) -> None:
        """Copy this rank's ``values`` [share] to its places in ``shard`` [L]."""
        if self._mine.numel:
            self._mine.scatter(values, shard)


class Scratch:
    """Memory shared by exchanges of which only one runs at a time: the reduce-scatters of trainers that shard to save memory.

    An exchange takes its buffers once, when it is built; their contents do not outlive one of its runs.
    """

    def __init__(self) -> None:
        self._segments: list[Tensor] = []
        self._taken = 0

    def begin(self) -> None:
        """Another exchange takes buffers."""
        self._taken = 0

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer [numel] with any contents: the k-th of an exchange lies where the k-th of the others lies."""
        place, nbytes = self._taken, numel * dtype.itemsize
        self._taken += 1
        if place == len(self._segments):
            self._segments.append(torch.zeros(nbytes, dtype=torch.uint8, device=device))
        elif self._segments[place].numel() < nbytes:
            self._segments[place] = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        return self._segments[place][:nbytes].view(dtype)
