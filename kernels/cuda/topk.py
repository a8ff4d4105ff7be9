"""Top-K on CUDA: exact or sampled thresholds per segment, compaction, sparse decode; the host learns nothing on the way.

A selection is ten small launches over one list of segments (three times histogram and pick, then mark, scan, write).
Scratch memory is a quarter byte per element and 8 KiB per segment, kept per stream and size.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from gradcomp.kernels.cuda.blocks import accumulate as accumulate
from gradcomp.kernels.cuda.launch import grid, keep, launch, zeros
from gradcomp.kernels.ops import Blocks, Segments

TILE, BINS = 16384, 2048  # as in topk.cuh
_PASSES = ((20, 11), (10, 10), (0, 10))  # shift and bits of each digit of a magnitude, from the top
_AIM = 97  # per cent of k that a sampled threshold is aimed at, so that few exceed k


@dataclass(frozen=True, slots=True)
class _Work:
    """Scratch for one (number of elements, number of segments); ``hist`` is zero between calls (see topk_pick)."""

    tiles: Tensor
    sample_tiles: Tensor
    rank: Tensor
    threshold: Tensor
    quota: Tensor
    found: Tensor
    hist: Tensor
    masks: Tensor
    counts: Tensor
    most: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Two threads that use one stream must not interleave their launches: they share this memory."""


def _work(values: Tensor, segments: int) -> _Work:
    most = values.numel() // TILE + segments  # tiles, whatever the segments are

    def make() -> _Work:
        at = values.device
        return _Work(
            tiles=zeros(at, segments + 1),
            sample_tiles=zeros(at, segments + 1),
            rank=zeros(at, segments),
            threshold=zeros(at, segments),
            quota=zeros(at, segments),
            found=zeros(at, segments),
            hist=zeros(at, segments * BINS),
            masks=zeros(at, most * TILE // 16),
            counts=zeros(at, most, torch.int64),
            most=most,
        )

    return keep(values.device, ("topk", values.numel(), segments), make)


def _columns(segments: Segments) -> tuple[Tensor | np.int32, ...]:
    count = np.int32(segments.start.numel())
    return segments.start, segments.numel, segments.k, segments.stride, segments.place, count


def _one(values: Tensor, k: int, stride: int = 1) -> Segments:
    """All of ``values`` as one segment."""
    return Segments(*torch.tensor([[0], [values.numel()], [k], [stride], [0]], device=values.device))


def _find(values: Tensor, segments: Segments, work: _Work, aim: int) -> None:
    """Each segment's threshold, into ``work.threshold`` (bits of a float)."""
    device, count = values.device, segments.start.numel()
    _plan(values, segments, work, aim, -1)
    for shift, bits in _PASSES:
        launch(
            "topk_threshold",
            "topk_histogram",
            device,
            grid(device, work.most),
            *(values, *_columns(segments), work.sample_tiles, work.threshold, work.hist),
            *(np.int32(shift), np.int32(bits)),
        )
        launch(
            "topk_threshold",
            "topk_pick",
            device,
            grid(device, count),
            *(np.int32(count), work.rank, work.threshold, work.hist, np.int32(bits)),
        )


def _plan(values: Tensor, segments: Segments, work: _Work, aim: int, given: int) -> None:
    launch(
        "topk_threshold",
        "topk_plan",
        values.device,
        1,
        *(*_columns(segments), np.int32(aim), np.int32(given)),
        *(work.tiles, work.sample_tiles, work.rank, work.threshold),
    )


def _compact(values: Tensor, segments: Segments, work: _Work, indices: Tensor, selected: Tensor) -> None:
    device, columns = values.device, _columns(segments)
    many = grid(device, work.most)
    launch(
        *("topk_compact", "topk_mark", device, many),
        *(values, *columns, work.tiles, work.threshold, work.masks, work.counts),
    )
    launch(
        *("topk_compact", "topk_scan", device, grid(device, segments.start.numel())),
        *(values, *columns, work.tiles, work.counts, work.quota, work.found, indices, selected),
    )
    launch(
        *("topk_compact", "topk_write", device, grid(device, work.most, threads=128)),
        *(values, *columns, work.tiles, work.masks, work.counts, work.quota, indices, selected),
        block=128,
    )


def topk_select(values: Tensor, segments: Segments, indices: Tensor, selected: Tensor) -> None:
    """See :meth:`gradcomp.kernels.ops.Ops.topk_select`."""
    if segments.start.numel() == 0:
        return
    work = _work(values, segments.start.numel())
    with work.lock:
        _find(values, segments, work, _AIM)
        _compact(values, segments, work, indices, selected)


def topk_threshold(values: Tensor, k: int) -> float:
    """See :meth:`gradcomp.kernels.ops.Ops.topk_threshold`. Waits for the device: the result is a Python number."""
    return topk_sample(values, k, 1)


def topk_sample(values: Tensor, k: int, stride: int) -> float:
    """See :meth:`gradcomp.kernels.ops.Ops.topk_sample`. Waits for the device: the result is a Python number."""
    work = _work(values, 1)
    with work.lock:
        _find(values, _one(values, k, stride), work, 100)
        return float(work.threshold.view(torch.float32).item())


def topk_compact(values: Tensor, threshold: float, k: int, indices: Tensor, selected: Tensor) -> int:
    """See :meth:`gradcomp.kernels.ops.Ops.topk_compact`. Waits for the device: the count is a Python number."""
    work, segments = _work(values, 1), _one(values, k)
    with work.lock:
        _plan(values, segments, work, 100, int(np.abs(np.float32(threshold)).view(np.int32)))
        _compact(values, segments, work, indices, selected)
        return int(work.found.item())


def topk_decode(indices: Tensor, selected: Tensor, blocks: Blocks, flat: Tensor, gain: float) -> None:
    """See :meth:`gradcomp.kernels.ops.Ops.topk_decode`."""
    if blocks.count == 0:
        return
    table = (blocks.start, blocks.length, np.int32(blocks.count), np.int32(blocks.size))
    many = grid(flat.device, blocks.count * blocks.size // 4, 256)
    launch("topk_decode", "topk_zero", flat.device, many, *table, flat)
    k = -(-indices.numel() // blocks.world)
    for first in range(0, indices.numel(), max(1, k)):
        some = min(k, indices.numel() - first)
        launch(
            *("topk_decode", "topk_add", flat.device, grid(flat.device, some, 256)),
            *(indices[first:], selected[first:], np.int64(some), *table, flat, np.float32(gain)),
        )
