"""fp16 and bf16 on the CPU: conversion, saturation count and finite check in one pass over memory."""

from __future__ import annotations

import torch
from torch import Tensor

from gradcomp.kernels import reference
from gradcomp.kernels.cpu.vectors import (
    F32,
    HALVES,
    LANES,
    STREAM,
    U32,
    Vector,
    as_floats,
    as_ints,
    clear,
    copy,
    fence,
    float_bits,
    floats,
    inline,
    ints,
    kernel,
    largest,
    load,
    load_float,
    load_halves,
    load_word,
    load_words,
    magnitude_bits,
    put,
    scratch,
    store,
    store_halves,
    store_int,
    store_word,
    store_words,
    top,
)

_CHUNK = 256
"""Elements that are converted between two looks at the largest of them; they stay in the L1 cache."""
_INF = U32(0x7F800000)
_TOP_FP16, _TOP_BF16 = U32(0x477FE000), U32(0x7F7F0000)
"""fp32 bits of the largest finite value of each type."""


@inline
def _saturate(values: int, limit: U32) -> tuple[int, bool]:
    """Clamp finite values of a chunk whose magnitude bits exceed ``limit``: how many, and whether all were finite."""
    count, finite = 0, True
    for j in range(_CHUNK):
        bits = float_bits(load_float(values + 4 * j))
        size, sign = bits & U32(0x7FFFFFFF), bits & U32(0x80000000)
        if size >= _INF:
            finite = False
            if size > _INF:
                # The quiet NaN without payload, which rounding to bf16 cannot turn into something else.
                store_int(values + 4 * j, U32(sign | U32(0x7FC00000)))
        elif size > limit:
            count += 1
            store_int(values + 4 * j, U32(sign | limit))
    return count, finite


@inline
def _narrow(values: int, peaks: Vector, out: int, count: int, half: bool, spare: int) -> tuple[int, bool]:
    """Convert a chunk of v, of which ``count`` count, to ``out``; returns as _saturate."""
    limit = _TOP_FP16 if half else _TOP_BF16
    clamped, finite = 0, True
    if top(peaks) > limit:
        clamped, finite = _saturate(values, limit)
    target = out if count == _CHUNK else spare
    for j in range(0, _CHUNK, LANES):
        if half:
            store_halves(target + 2 * j, load(values + 4 * j))
        else:
            bits = as_ints(load(values + 4 * j))
            odd = (bits >> ints(U32(16))) & ints(U32(1))
            store_words(target + 2 * j, (bits + ints(U32(0x7FFF)) + odd) >> ints(U32(16)))
    if count < _CHUNK:
        for j in range(count):
            store_word(out + 2 * j, load_word(spare + 2 * j))
    return clamped, finite


@inline
def _widen(values: int, half: bool) -> Vector:
    if half:
        return load_halves(values)
    return as_floats(load_words(values) << ints(U32(16)))


@kernel
def _encode(flat: int, size: int, out: int, half: bool, gain: F32, room: int) -> tuple[int, bool]:
    values, stage, spare = room, room + 4 * _CHUNK, room + 8 * _CHUNK
    saturated, finite, g = 0, True, floats(gain)
    for c in range(0, size, _CHUNK):
        count, source = min(_CHUNK, size - c), flat + 4 * c
        if count < _CHUNK:
            copy(stage, source, count, False)
            clear(stage + 4 * count, _CHUNK - count, False)
            source = stage
        peaks = ints(U32(0))
        for j in range(0, _CHUNK, LANES):
            v = load(source + 4 * j) * g
            peaks = largest(peaks, magnitude_bits(v))
            store(values + 4 * j, v)
        clamped, good = _narrow(values, peaks, out + 2 * c, count, half, spare)
        saturated += clamped
        finite = finite and good
    return saturated, finite


@kernel
def _mean(received: int, world: int, stride: int, size: int, out: int, half: bool, room: int) -> None:
    values, spare = room, room + 4 * _CHUNK
    share = floats(F32(1.0 / world))
    for c in range(0, size, _CHUNK):
        count = min(_CHUNK, size - c)
        for w in range(world):
            source = received + 2 * (w * stride + c)
            if count < _CHUNK:
                for j in range(count):
                    store_word(spare + 2 * j, load_word(source + 2 * j))
                source = spare
            for j in range(0, _CHUNK, LANES):
                v = floats(F32(0)) if w == 0 else load(values + 4 * j)
                store(values + 4 * j, v + _widen(source + 2 * j, half))
        peaks = ints(U32(0))
        for j in range(0, _CHUNK, LANES):
            v = load(values + 4 * j) * share
            peaks = largest(peaks, magnitude_bits(v))
            store(values + 4 * j, v)
        _narrow(values, peaks, out + 2 * c, count, half, spare)


@kernel
def _decode(values: int, size: int, flat: int, half: bool, gain: F32, bypass: bool, room: int) -> None:
    g, whole = floats(gain), size // LANES * LANES
    for j in range(0, whole, LANES):
        put(flat + 4 * j, _widen(values + 2 * j, half) * g, bypass)
    fence()
    if whole < size:
        for j in range(size - whole):
            store_word(room + 2 * j, load_word(values + 2 * (whole + j)))
        store(room + 4 * LANES, _widen(room, half) * g)
        copy(flat + 4 * whole, room + 4 * LANES, size - whole, False)


def _served(dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 or HALVES


def cast_encode(flat: Tensor, out: Tensor, gain: float, finite: Tensor, saturated: Tensor) -> None:
    """See :meth:`gradcomp.kernels.ops.Ops.cast_encode`."""
    if not _served(out.dtype):
        return reference.cast_encode(flat, out, gain, finite, saturated)
    half = out.dtype == torch.float16
    room = scratch(3 * _CHUNK)
    count, good = _encode(flat.data_ptr(), flat.numel(), out.data_ptr(), half, F32(gain), room.data_ptr())
    if count:
        saturated.add_(count)
    if not good:
        finite.zero_()


def cast_mean(received: Tensor, out: Tensor) -> None:
    """See :meth:`gradcomp.kernels.ops.Ops.cast_mean`."""
    if not _served(out.dtype):
        return reference.cast_mean(received, out)
    (world, size), half, room = received.shape, out.dtype == torch.float16, scratch(2 * _CHUNK)
    if size:
        _mean(received.data_ptr(), world, received.stride(0), size, out.data_ptr(), half, room.data_ptr())


def cast_decode(values: Tensor, flat: Tensor, gain: float) -> None:
    """See :meth:`gradcomp.kernels.ops.Ops.cast_decode`."""
    if not _served(values.dtype):
        return reference.cast_decode(values, flat, gain)
    size, at = flat.numel(), flat.data_ptr()
    half, bypass, room = values.dtype == torch.float16, size >= STREAM and at % 64 == 0, scratch(2 * LANES)
    _decode(values.data_ptr(), size, at, half, F32(gain), bypass, room.data_ptr())
