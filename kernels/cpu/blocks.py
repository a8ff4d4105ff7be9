"""1-bit, int8 and int4 blocks on the CPU: one pass over memory per op.

A block needs its scale before its codes and residual can be written. Two passes over each block in turn would make the
memory system alternate between reading and writing, which it does badly; here one loop reads a block and writes codes
and residual of the block before it from a buffer in the L1 cache, so that the streams stay steady at any block size.
Residuals and decoded gradients bypass the cache when they are larger than it (``STREAM``).
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gradcomp.kernels.cpu.vectors import (
    F32,
    LANES,
    STREAM,
    U32,
    Array,
    Vector,
    as_floats,
    as_ints,
    bits_float,
    clear,
    copy,
    floats,
    floor,
    higher,
    inline,
    ints,
    kernel,
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
    scratch,
    shift_signed,
    signed,
    store,
    store_byte,
    store_bytes,
    store_float,
    store_signs,
    to_floats,
    top,
    total,
)
from gradcomp.kernels.ops import Blocks, ShardLayout

_ROUND = F32(12582912.0)
"""1.5 * 2**23: adding it rounds |x| < 2**22 half to even to an integer, found in the low bits of the sum."""
_INF = U32(0x7F800000)
_TINY = U32(0x0D800000)
"""Bits of 2**-100."""
_ZERO = F32(0)


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
    return higher(lower(x, limit), floats(_ZERO) - limit)


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
def _decoded(codes: int, j: int, bits: int, half: int, scale: Vector) -> Vector:
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
def _step(
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
        sums = floats(_ZERO)
        for j in range(0, size, LANES):
            v = scaled_sum(flat, residual, g, j)
            store(new + 4 * j, v)
            store_signs(new_code + j // 8, v)
            sums = sums + magnitude(v)
            if left != 0:
                w = load(old + 4 * j)
                put(left + 4 * j, w - signed(s, w), bypass)
        return _mean(total(sums), new, length), _ZERO

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
        return peak, _ZERO
    if bits_ < _TINY:
        return _ZERO, _ZERO
    return F32(peak / most), F32(most / peak)


@inline
def _finish_tail(bits: int, size: int, length: int, code: int) -> None:
    """Clear the sign bits past the length of a short block."""
    if bits == 1 and length < size:
        if length % 8 != 0:
            at = code + length // 8
            store_byte(at, np.uint8(load_byte(at) & ((1 << (length % 8)) - 1)))
        for j in range((length + 7) // 8, size // 8):
            store_byte(code + j, np.uint8(0))


@kernel
def _encode(
    bits: int,
    size: int,
    flat: int,
    start: Array,
    length: Array,
    position: Array,
    per_shard: int,
    shard: tuple[int, int, int],
    payload: int,
    residual: int,
    residual_out: int,
    gain: F32,
    seed: int,
    bypass: bool,
    room: int,
) -> bool:
    """Returns whether every value was finite. ``shard``: nbytes, codes and scales of the ShardLayout."""
    count, width, finite = len(start), size * bits // 8, True
    # Two buffers of v, one to pad a short block, one for what is written before the first and after the last block.
    buffers, stage, spare = room, room + 8 * size, room + 12 * size
    code, left, scale, inverse, counter = spare, residual_out, _ZERO, _ZERO, 0
    for c in range(count + 1):
        if c < count:
            n, source, r = length[c], flat + 4 * start[c], residual
            if residual != 0:
                r = residual + 4 * c * size
            if n < size:
                copy(stage, source, n, False)
                clear(stage + 4 * n, size - n, False)
                source = stage
            place = position[c]
            first = payload + place // per_shard * shard[0]
            next_code = first + shard[1] + place % per_shard * width
        else:
            n, source, r, next_code = size, stage, 0, spare
        new, old = buffers + 4 * size * (c % 2), buffers + 4 * size * (1 - c % 2)
        scale, inverse = _step(
            bits, size, source, r, gain, n, new, next_code, old, code, scale, inverse, left, seed, counter, bypass
        )
        if c > 0 and residual_out != 0 and length[c - 1] < size:
            clear(left + 4 * length[c - 1], size - length[c - 1], False)
        if c < count:
            finite = finite and np.isfinite(scale)
            store_float(first + shard[2] + 4 * (place % per_shard), scale)
            _finish_tail(bits, size, n, next_code)
            code, counter = next_code, place * size
            if residual_out != 0:
                left = residual_out + 4 * c * size
    return finite


@kernel
def _server(
    bits: int,
    size: int,
    received: int,
    world: int,
    owned: Array,
    shard: tuple[int, int, int],
    out: int,
    residual: int,
    residual_out: int,
    seed: int,
    bypass: bool,
    room: int,
) -> bool:
    count, width, half, finite = len(owned), size * bits // 8, size // 2, True
    buffers, stage, spare = room, room + 8 * size, room + 12 * size
    code, left, scale, inverse, counter, last = spare, residual_out, _ZERO, _ZERO, 0, size
    share = floats(F32(1.0 / world))
    step = 0
    for c in range(count + 1):
        r, next_code, n = 0, spare, size
        if c < count:
            n = owned[c]
            if n == 0:
                if residual_out != 0:
                    clear(residual_out + 4 * c * size, size, False)
                continue
            next_code = out + shard[1] + c * width
            for j in range(0, n, LANES):
                sums = floats(_ZERO)
                for w in range(world):
                    first = received + w * shard[0]
                    s = floats(load_float(first + shard[2] + 4 * c))
                    sums = sums + _decoded(first + shard[1] + c * width, j, bits, half, s)
                store(stage + 4 * j, sums * share)
            clear(stage + 4 * n, size - n, False)
            if residual != 0:
                r = residual + 4 * c * size
        new, old = buffers + 4 * size * (step % 2), buffers + 4 * size * (1 - step % 2)
        scale, inverse = _step(
            bits,
            size,
            stage,
            r,
            F32(1),
            n,
            new,
            next_code,
            old,
            code,
            scale,
            inverse,
            left,
            seed,
            counter,
            bypass,
        )
        if step > 0 and residual_out != 0:
            clear(left + 4 * last, size - last, False)
        if c < count:
            finite = finite and np.isfinite(scale)
            store_float(out + shard[2] + 4 * c, scale)
            _finish_tail(bits, size, n, next_code)
            code, counter, last = next_code, c * size, n
            if residual_out != 0:
                left = residual_out + 4 * c * size
        step += 1
    return finite


@kernel
def _decode(
    bits: int,
    size: int,
    gathered: int,
    start: Array,
    length: Array,
    position: Array,
    per_shard: int,
    shard: tuple[int, int, int],
    flat: int,
    gain: F32,
    bypass: bool,
    stage: int,
) -> None:
    width, half, g = size * bits // 8, size // 2, floats(gain)
    for c in range(len(start)):
        place, n, target = position[c], length[c], flat + 4 * start[c]
        first, place = gathered + place // per_shard * shard[0], place % per_shard
        code, s = first + shard[1] + place * width, floats(load_float(first + shard[2] + 4 * place))
        if n == size and (not bypass or target % 64 == 0):
            for j in range(0, size, LANES):
                put(target + 4 * j, _decoded(code, j, bits, half, s) * g, bypass)
        else:
            for j in range(0, n, LANES):
                store(stage + 4 * j, _decoded(code, j, bits, half, s) * g)
            copy(target, stage, n, bypass)


# --- ops --------------------------------------------------------------------------------------------------------------


def _pointer(array: Tensor | None) -> int:
    return 0 if array is None else array.data_ptr()


def _seed(seed: int | None) -> int:
    return -1 if seed is None else seed & 0xFFFFFFFF


def _bypass(out: Tensor | None) -> bool:
    """Whether an array is large and aligned enough for its blocks to be written past the cache."""
    return out is not None and out.numel() >= STREAM and out.data_ptr() % 64 == 0


def block_encode(
    flat: Tensor,
    blocks: Blocks,
    layout: ShardLayout,
    payload: Tensor,
    bits: int,
    residual: Tensor | None,
    residual_out: Tensor | None,
    gain: float,
    seed: int | None,
    finite: Tensor,
) -> None:
    """See :meth:`gradcomp.kernels.ops.Ops.block_encode`."""
    room = scratch(4 * blocks.size)
    if not _encode(
        bits,
        blocks.size,
        flat.data_ptr(),
        blocks.start.numpy(),
        blocks.length.numpy(),
        blocks.position.numpy(),
        blocks.per_shard,
        (layout.nbytes, layout.codes, layout.scales),
        payload.data_ptr(),
        _pointer(residual),
        _pointer(residual_out),
        F32(gain),
        _seed(seed),
        _bypass(residual_out),
        room.data_ptr(),
    ):
        finite.zero_()


def block_server(
    received: Tensor,
    blocks: Blocks,
    layout: ShardLayout,
    out: Tensor,
    bits: int,
    residual: Tensor | None,
    residual_out: Tensor | None,
    seed: int | None,
    finite: Tensor,
) -> None:
    """See :meth:`gradcomp.kernels.ops.Ops.block_server`."""
    room = scratch(4 * blocks.size)
    if not _server(
        bits,
        blocks.size,
        received.data_ptr(),
        blocks.world,
        blocks.owned.numpy(),
        (layout.nbytes, layout.codes, layout.scales),
        out.data_ptr(),
        _pointer(residual),
        _pointer(residual_out),
        _seed(seed),
        _bypass(residual_out),
        room.data_ptr(),
    ):
        finite.zero_()


def block_decode(gathered: Tensor, blocks: Blocks, layout: ShardLayout, flat: Tensor, bits: int, gain: float) -> None:
    """See :meth:`gradcomp.kernels.ops.Ops.block_decode`."""
    stage = scratch(blocks.size)
    _decode(
        bits,
        blocks.size,
        gathered.data_ptr(),
        blocks.start.numpy(),
        blocks.length.numpy(),
        blocks.position.numpy(),
        blocks.per_shard,
        (layout.nbytes, layout.codes, layout.scales),
        flat.data_ptr(),
        F32(gain),
        flat.numel() >= STREAM,
        stage.data_ptr(),
    )
