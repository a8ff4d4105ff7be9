"""Top-K on the CPU: exact selection by counting, threshold compaction, sparse decode.

Magnitudes are compared as the integers that their bits form. 64 elements at a time become a mask, and only its set bits
cost anything: at 1 % selected, a pass runs at the speed of reading memory.
"""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from gradcomp.kernels.cpu.vectors import (
    F32,
    LANES,
    STREAM,
    U32,
    Array,
    bits_float,
    clear,
    copy,
    count_bits,
    fence,
    fetch_to_write,
    float_bits,
    floats,
    inline,
    ints,
    kernel,
    largest,
    load_float,
    load_int,
    magnitude_bits,
    mask_at_least,
    put,
    scaled_sum,
    scratch,
    store_float,
    store_int,
    top,
    trailing_zeros,
)
from gradcomp.kernels.ops import Blocks, Segments

_INF = U32(0x7F800000)
_SIZE = U32(0x7FFFFFFF)
_BINS = 2048
_AHEAD = 64
"""Elements of a sparse payload whose cache lines are fetched at once."""
_SAMPLE = 1 << 14
"""Elements that bound the search from below."""


@kernel
def _accumulate(
    size: int, flat: int, start: Array, length: Array, residual: int, out: int, gain: F32, bypass: bool, stage: int
) -> bool:
    g, peaks = floats(gain), ints(U32(0))
    for c in range(len(start)):
        n, source, r, target = length[c], flat + 4 * start[c], residual, out + 4 * c * size
        if residual != 0:
            r = residual + 4 * c * size
        if n < size:
            copy(stage, source, n, False)
            clear(stage + 4 * n, size - n, False)
            source = stage
        for j in range(0, size, LANES):
            v = scaled_sum(source, r, g, j)
            peaks = largest(peaks, magnitude_bits(v))
            put(target + 4 * j, v, bypass)
    fence()
    return bool(top(peaks) < _INF)


# --- selection --------------------------------------------------------------------------------------------------------


@inline
def _magnitude(values: int, i: int) -> U32:
    return U32(load_int(values + 4 * i) & _SIZE)


@inline
def _tally(counts: Array, bits: U32, low: U32, shift: U32) -> None:
    index = int(np.int64((bits - low) >> shift))
    counts[index if index < _BINS else _BINS] += 1


@inline
def _histogram(values: int, size: int, low: U32, shift: U32, counts: Array) -> None:
    """Count magnitudes >= ``low`` in bins of 2**shift; the last entry takes all that lie past the bins."""
    counts[:] = 0
    whole = size // 64 * 64
    for j in range(0, whole, 64):
        mask = mask_at_least(values + 4 * j, low)
        if mask == np.uint64(0xFFFFFFFFFFFFFFFF):
            for i in range(j, j + 64):
                _tally(counts, _magnitude(values, i), low, shift)
        else:
            while mask != np.uint64(0):
                _tally(counts, _magnitude(values, j + trailing_zeros(mask)), low, shift)
                mask &= mask - np.uint64(1)
    for i in range(whole, size):
        bits = _magnitude(values, i)
        if bits >= low:
            _tally(counts, bits, low, shift)


@inline
def _search(values: int, size: int, k: int, low: U32, span: int, counts: Array) -> int:
    """Bits of the k-th largest magnitude if they are in low .. low + 2**span - 1, else -1; 11 bits a pass."""
    shift = max(span - 11, 0)
    while True:
        _histogram(values, size, low, U32(shift), counts)
        above, index = 0, _BINS
        while index >= 0 and above + counts[index] < k:
            above += counts[index]
            index -= 1
        if index < 0 or index == _BINS:
            return -1
        low = U32(low + U32(index << shift))
        if shift == 0:
            return int(np.int64(low))
        shift = max(shift - 11, 0)


@inline
def _strided(values: int, first: int, stride: int, count: int, out: int) -> None:
    for i in range(count):
        store_float(out + 4 * i, load_float(values + 4 * (first + i * stride)))


@inline
def _kth(values: int, size: int, k: int, sample: int) -> F32:
    counts = np.empty(_BINS + 1, np.int64)
    if size >= 8 * _SAMPLE:
        # Bounds 4 standard deviations to both sides, from a sample: the passes then count few elements in narrow bins.
        # If the threshold is not between them, the search starts again without.
        stride = size // _SAMPLE
        _strided(values, stride // 2, stride, _SAMPLE, sample)
        expected = k / size * _SAMPLE
        margin = 4.0 * math.sqrt(expected) + 4.0
        if expected + margin < _SAMPLE // 2:
            low = _search(sample, _SAMPLE, int(expected + margin), U32(0), 31, counts)
            high = _search(sample, _SAMPLE, max(int(expected - margin), 1), U32(0), 31, counts)
            span = 1
            while high - low >= 1 << span:
                span += 1
            found = _search(values, size, k, U32(low), span, counts)
            if found >= 0:
                return F32(bits_float(U32(found)))
    return F32(bits_float(U32(_search(values, size, k, U32(0), 31, counts))))


@kernel
def _threshold(values: int, size: int, k: int, sample: int) -> F32:
    return _kth(values, size, k, sample)


@kernel
def _sampled(values: int, first: int, stride: int, count: int, k: int, room: int) -> F32:
    _strided(values, first, stride, count, room)
    return _kth(room, count, k, room + 4 * count)


# --- compaction -------------------------------------------------------------------------------------------------------


@inline
def _take(values: int, i: int, indices: int, selected: int, count: int) -> None:
    store_int(indices + 4 * count, U32(i))
    store_float(selected + 4 * count, load_float(values + 4 * i))


@inline
def _collect(
    values: int, first: int, size: int, bound: U32, k: int, indices: int, selected: int, count: int
) -> tuple[int, int, int]:
    """Append elements from ``first`` on with magnitude bits >= ``bound``, until ``count`` is k.

    Returns count, how many of the new ones equal the bound, and the index of the first that found no room, or size.
    """
    equal, j = 0, first
    while j + 64 <= size:
        mask = mask_at_least(values + 4 * j, bound)
        while mask != np.uint64(0):
            i = j + trailing_zeros(mask)
            mask &= mask - np.uint64(1)
            if count == k:
                return count, equal, i
            equal += _magnitude(values, i) == bound
            _take(values, i, indices, selected, count)
            count += 1
        j += 64
    while j < size:
        bits = _magnitude(values, j)
        if bits >= bound:
            if count == k:
                return count, equal, j
            equal += bits == bound
            _take(values, j, indices, selected, count)
            count += 1
        j += 1
    return count, equal, size


@inline
def _count(values: int, first: int, size: int, bound: U32, most: int) -> int:
    """Number of elements from ``first`` on with magnitude bits >= ``bound``, at most ``most``."""
    count, j = 0, first
    while j + 64 <= size and count < most:
        count += count_bits(mask_at_least(values + 4 * j, bound))
        j += 64
    while j < size and count < most:
        count += 1 if _magnitude(values, j) >= bound else 0
        j += 1
    return min(count, most)


@inline
def _drop(indices: int, selected: int, count: int, bound: U32, ties: int) -> int:
    """Of the elements that equal the bound keep the first ``ties``; returns how many elements are left."""
    kept, equal = 0, 0
    for i in range(count):
        tie = _magnitude(selected, i) == bound
        if not tie or equal < ties:
            store_int(indices + 4 * kept, load_int(indices + 4 * i))
            store_float(selected + 4 * kept, load_float(selected + 4 * i))
            kept += 1
        equal += tie
    return kept


@kernel
def _compact(values: int, size: int, threshold: F32, k: int, indices: int, selected: int) -> int:
    bound = U32(float_bits(threshold) & _SIZE)
    count, equal, rest = _collect(values, 0, size, bound, k, indices, selected, 0)
    if rest < size and equal > 0:
        # Ties took places that larger elements further on need: give back as many as those are, latest first. (Without
        # ties the first k are the answer. A sampled threshold is itself an element, so one tie is the usual case.)
        higher = U32(bound + U32(1))
        larger = _count(values, rest, size, higher, equal)
        count = _drop(indices, selected, count, bound, equal - larger)
        count, equal, rest = _collect(values, rest, size, higher, k, indices, selected, count)
    for i in range(count, k):
        store_int(indices + 4 * i, U32(size - 1))
        store_float(selected + 4 * i, F32(0))
    return count


@kernel
def _select(
    values: int,
    start: Array,
    numel: Array,
    wanted: Array,
    stride: Array,
    place: Array,
    indices: int,
    selected: int,
    room: int,
) -> None:
    for s in range(len(start)):
        part, size, k, out = values + 4 * start[s], numel[s], wanted[s], indices + 4 * place[s]
        if stride[s] > 1:
            first = stride[s] // 2
            count = (size - first + stride[s] - 1) // stride[s]
            aim = max(1, k * 97 // 100)
            threshold = _sampled(part, first, stride[s], count, max(1, round(aim / size * count)), room)
        else:
            threshold = _threshold(part, size, k, room)
        _compact(part, size, threshold, k, out, selected + 4 * place[s])
        for i in range(k):
            store_int(out + 4 * i, U32(load_int(out + 4 * i) + U32(start[s])))


@kernel
def _decode(
    indices: int,
    selected: int,
    count: int,
    size: int,
    start: Array,
    length: Array,
    flat: int,
    gain: F32,
    bypass: bool,
) -> None:
    for c in range(len(start)):
        clear(flat + 4 * start[c], int(length[c]), bypass)
    fence()
    places, targets = len(start) * size, np.empty(_AHEAD, np.int64)
    for first in range(0, count, _AHEAD):
        # Each element lies on a cache line of its own: ask for many lines before the first is needed.
        last = min(_AHEAD, count - first)
        for i in range(last):
            index, targets[i] = np.int64(load_int(indices + 4 * (first + i))), 0
            if index < places:  # as unsigned, so that a negative index of a broken payload is not followed either
                block = index // size
                place = index - block * size
                if place < length[block]:
                    targets[i] = flat + 4 * (start[block] + place)
                    fetch_to_write(targets[i])
        for i in range(last):
            if targets[i] != 0:
                value = F32(load_float(selected + 4 * (first + i)) * gain)
                store_float(targets[i], F32(load_float(targets[i]) + value))


# --- ops --------------------------------------------------------------------------------------------------------------


def accumulate(flat: Tensor, blocks: Blocks, residual: Tensor | None, out: Tensor, gain: float, finite: Tensor) -> None:
    """See :meth:`gradcomp.kernels.ops.Ops.accumulate`."""
    old, new = 0 if residual is None else residual.data_ptr(), out.data_ptr()
    bypass = out.numel() >= STREAM and new % 64 == 0
    start, length = blocks.start.numpy(), blocks.length.numpy()
    stage = scratch(blocks.size)
    if not _accumulate(blocks.size, flat.data_ptr(), start, length, old, new, F32(gain), bypass, stage.data_ptr()):
        finite.zero_()


def topk_threshold(values: Tensor, k: int) -> float:
    """See :meth:`gradcomp.kernels.ops.Ops.topk_threshold`."""
    sample = scratch(_SAMPLE)
    return float(_threshold(values.data_ptr(), values.numel(), k, sample.data_ptr()))


def topk_sample(values: Tensor, k: int, stride: int) -> float:
    """See :meth:`gradcomp.kernels.ops.Ops.topk_sample`."""
    first = stride // 2
    count = (values.numel() - first + stride - 1) // stride
    rank = max(1, round(k / values.numel() * count))
    room = scratch(count + _SAMPLE)
    return float(_sampled(values.data_ptr(), first, stride, count, rank, room.data_ptr()))


def topk_compact(values: Tensor, threshold: float, k: int, indices: Tensor, selected: Tensor) -> int:
    """See :meth:`gradcomp.kernels.ops.Ops.topk_compact`."""
    size = values.numel()
    return int(_compact(values.data_ptr(), size, F32(threshold), k, indices.data_ptr(), selected.data_ptr()))


def topk_select(values: Tensor, segments: Segments, indices: Tensor, selected: Tensor) -> None:
    """See :meth:`gradcomp.kernels.ops.Ops.topk_select`."""
    sampled = segments.numel // segments.stride
    room = scratch(_SAMPLE + 1 + int(sampled[segments.stride > 1].max() if (segments.stride > 1).any() else 0))
    _select(
        values.data_ptr(),
        segments.start.numpy(),
        segments.numel.numpy(),
        segments.k.numpy(),
        segments.stride.numpy(),
        segments.place.numpy(),
        indices.data_ptr(),
        selected.data_ptr(),
        room.data_ptr(),
    )


def topk_decode(indices: Tensor, selected: Tensor, blocks: Blocks, flat: Tensor, gain: float) -> None:
    """See :meth:`gradcomp.kernels.ops.Ops.topk_decode`."""
    _decode(
        indices.data_ptr(),
        selected.data_ptr(),
        indices.numel(),
        blocks.size,
        blocks.start.numpy(),
        blocks.length.numpy(),
        flat.data_ptr(),
        F32(gain),
        flat.numel() >= STREAM,
    )
