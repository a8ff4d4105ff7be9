"""The codes of 1-bit, int8 and int4 blocks, 16 elements and one block at a time; :mod:`.blocks` drives them.

A block needs its scale before its codes and residual can be written. Two passes over each block in turn would make the
memory system alternate between reading and writing, which it does badly; here one loop (:func:`step`) reads a block and
writes codes and residual of the block before it from a buffer in the L1 cache, so that the streams stay steady at any
block size.
"""

from __future__ import annotations

import numpy as np

from gradcomp.kernels.cpu.vectors import (
    F32,
    LANES,
    U32,
    Vector,
    as_floats,
    as_ints,
    bits_float,
    floats,
    floor,
    higher,
    inline,
    ints,
    lanes,
    largest,
    load,
    load_byte,
    load_bytes,
    load_float,
    load_signs,
    lower,
    magnitude,
    magnitude_bits,
    put,
    scaled_sum,
    shift_signed,
    signed,
    store,
    store_byte,
    store_bytes,
    store_signs,
    to_floats,
    top,
    total,
)

_ROUND = F32(12582912.0)
"""1.5 * 2**23: adding it rounds |x| < 2**22 half to even to an integer, found in the low bits of the sum."""
_INF = U32(0x7F800000)
_TINY = U32(0x0D800000)
"""Bits of 2**-100."""
ZERO = F32(0)


# --- 16 elements ------------------------------------------------------------------------------------------------------
# An address of 0 means that the array is absent.


@inline
def _quantise(v: Vector, inverse: Vector, limit: Vector, seed: int, counter: int) -> Vector:
    """Integer codes as fp32: rounded half to even, or stochastically when ``seed`` >= 0."""
    x = v * inverse
    if seed < 0:
        return (x + floats(_ROUND)) - floats(_ROUND)
    h = lanes(U32(counter)) * ints(U32(0x9E3779B9)) + ints(U32(seed))
    h = (h ^ (h >> ints(U32(16)))) * ints(U32(0x85EBCA6B))
    h = (h ^ (h >> ints(U32(13)))) * ints(U32(0xC2B2AE35))
    h = (h ^ (h >> ints(U32(16)))) >> ints(U32(8))
    x = floor(x + to_floats(h) * floats(F32(2.0**-24)))
    return higher(lower(x, limit), floats(ZERO) - limit)


@inline
def _code(
    old: int, j: int, inverse: Vector, scale: Vector, limit: Vector, seed: int, counter: int, left: int, bypass: bool
) -> Vector:
    """int32 codes of element j of a block, in the low bits; writes its residual."""
    v = load(old + 4 * j)
    code = _quantise(v, inverse, limit, seed, counter + j)
    if left != 0:
        put(left + 4 * j, v - code * scale, bypass)
    return as_ints(code + floats(_ROUND))


@inline
def decoded(codes: int, j: int, bits: int, half: int, scale: Vector) -> Vector:
    """Elements j .. j + 15 of the block whose code starts at ``codes``."""
    if bits == 1:
        return as_floats(as_ints(scale) ^ load_signs(codes + j // 8))
    if bits == 8:
        return to_floats(load_bytes(codes + j)) * scale
    # To the top of the lane: the low nibble by 28, the high one by 24.
    at, up = (j, U32(28)) if j < half else (j - half, U32(24))
    return to_floats(shift_signed(load_bytes(codes + at) << ints(up), ints(U32(28)))) * scale


# --- blocks -----------------------------------------------------------------------------------------------------------


@inline
def _mean(sum_: F32, v: int, length: int) -> F32:
    """Mean magnitude from the fp32 sum; if that is not finite, the slow sum tells overflow from inf and NaN."""
    if sum_ < F32(3e38):
        return F32(sum_ / F32(length))
    wide = 0.0
    for j in range(length):
        wide += abs(np.float64(load_float(v + 4 * j)))
    return F32(wide / length)


@inline
def step(
    bits: int,
    size: int,
    # the block that is read
    flat: int,
    residual: int,
    gain: F32,
    length: int,
    new: int,
    new_code: int,
    # the block before it, whose codes and residual are written
    old: int,
    old_code: int,
    scale: F32,
    inverse: F32,
    left: int,
    seed: int,
    counter: int,
    bypass: bool,
) -> tuple[F32, F32]:
    """Read one block into ``new``, write its signs, finish the one in ``old``; returns the new scale and inverse."""
    g, s, half = floats(gain), floats(scale), size // 2
    if bits == 1:
        sums = floats(ZERO)
        for j in range(0, size, LANES):
            v = scaled_sum(flat, residual, g, j)
            store(new + 4 * j, v)
            store_signs(new_code + j // 8, v)
            sums = sums + magnitude(v)
            if left != 0:
                w = load(old + 4 * j)
                put(left + 4 * j, w - signed(s, w), bypass)
        return _mean(total(sums), new, length), ZERO

    most, q, peaks = F32(127 if bits == 8 else 7), floats(inverse), ints(U32(0))
    limit = floats(most)
    if bits == 8:
        for j in range(0, size, LANES):
            v = scaled_sum(flat, residual, g, j)
            store(new + 4 * j, v)
            peaks = largest(peaks, magnitude_bits(v))
            store_bytes(old_code + j, _code(old, j, q, s, limit, seed, counter, left, bypass))
    else:
        for j in range(0, half, LANES):
            # Reading in address order, not at j and j + half: the prefetcher follows one stream only.
            v, w = scaled_sum(flat, residual, g, 2 * j), scaled_sum(flat, residual, g, 2 * j + LANES)
            store(new + 8 * j, v)
            store(new + 8 * j + 4 * LANES, w)
            peaks = largest(largest(peaks, magnitude_bits(v)), magnitude_bits(w))
            low = _code(old, j, q, s, limit, seed, counter, left, bypass)
            high = _code(old, j + half, q, s, limit, seed, counter, left, bypass)
            store_bytes(old_code + j, (low & ints(U32(15))) | (high << ints(U32(4))))
    bits_ = top(peaks)
    peak = bits_float(bits_)
    if bits_ >= _INF:
        return peak, ZERO
    if bits_ < _TINY:
        return ZERO, ZERO
    return F32(peak / most), F32(most / peak)


@inline
def finish_tail(bits: int, size: int, length: int, code: int) -> None:
    """Clear the sign bits past the length of a short block."""
    if bits == 1 and length < size:
        if length % 8 != 0:
            at = code + length // 8
            store_byte(at, np.uint8(load_byte(at) & ((1 << (length % 8)) - 1)))
        for j in range((length + 7) // 8, size // 8):
            store_byte(code + j, np.uint8(0))
