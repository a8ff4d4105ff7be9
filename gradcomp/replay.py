"""After a resume: the first steps in the buckets of the step that was saved.

A new DDP module begins with other buckets than the job that it continues had at that step (one bucket; it rebuilds them
after the first step, with static_graph after the second). What three or more ranks add depends, in the last bit, on where
an element stands in its bucket, so plain DDP does not resume bit for bit there. gradcomp holds the buckets of these steps
until all are there, regroups them as the checkpoint says, and exchanges those: no overlap in two steps, and the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradcomp.bucket import Slot

_STEPS = 2


@dataclass(frozen=True, slots=True)
class Held:
    """A bucket as the trainer handed it over. No slots: to be all-reduced as it is."""

    key: Hashable
    slots: Sequence[Slot]
    buffer: Tensor
    done: Callable[[], None]

    def get_slots(self) -> Sequence[Slot]:
        """The slots, as the handle asks for them."""
        return self.slots


class LayoutReplay:
    """Regroups the buckets of the first steps into ``layout``: the parameters' names, bucket by bucket."""

    def __init__(self, layout: Sequence[Sequence[str]]) -> None:
        self._layout = layout
        self._steps = _STEPS
        self._held: list[Held] = []

    @property
    def finished(self) -> bool:
        """Whether the trainer's own buckets may be used from now on."""
        return self._steps == 0

    def hold(self, bucket: Held) -> None:
        """Keep a bucket until the step's last one is there."""
        self._held.append(bucket)

    def release(self) -> list[Held]:
        """All buckets of the step, regrouped; finishing them finishes the trainer's."""
        held, self._held = self._held, []
        self._steps -= 1
        sources = {slot.name: (bucket.buffer, slot) for bucket in held for slot in bucket.slots}
        wanted = [name for names in self._layout for name in names]
        if [[slot.name for slot in bucket.slots] for bucket in held if bucket.slots] == self._layout:
            self._steps = 0
            return held
        if sorted(wanted) != sorted(sources):  # another model part is trained: nothing to reproduce
            self._steps = 0
            return held

        untouched = [bucket for bucket in held if not bucket.slots]
        left = len(self._layout)

        def one_done() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                for bucket in held:
                    if bucket.slots:
                        bucket.done()

        regrouped = [self._regroup(i, names, sources, one_done) for i, names in enumerate(self._layout)]
        return [*regrouped, *untouched]

    def _regroup(
        self, number: int, names: Sequence[str], sources: dict[str, tuple[Tensor, Slot]], done: Callable[[], None]
    ) -> Held:
        pieces, slots, offset = [], [], 0
        for name in names:
            buffer, slot = sources[name]
            pieces.append(buffer[slot.offset : slot.offset + slot.numel])
            slots.append(replace(slot, offset=offset))
            offset += slot.numel
        flat = torch.cat(pieces)

        def copy_back() -> None:
            for piece, slot in zip(pieces, slots, strict=True):
                piece.copy_(flat[slot.offset : slot.offset + slot.numel])
            done()

        return Held(("replay", number), slots, flat, copy_back)
