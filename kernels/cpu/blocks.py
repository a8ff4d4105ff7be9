"""1-bit, int8 and int4 blocks on the CPU: one pass over memory per op.

Residuals and decoded gradients bypass the cache when they are larger than it (``STREAM``).
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gradcomp.kernels.cpu.codes import ZERO, decoded, finish_tail, step
from gradcomp.kernels.cpu.vectors import (
    F32,
    LANES,
    STREAM,
    Array,
    clear,
    copy,
    fence,
    fetch_to_read,
    floats,
    kernel,
    load_float,
    put,
    scratch,
    store,
    store_float,
)
from gradcomp.kernels.ops import Blocks, ShardLayout

# --- kernels ----------------------------------------------------------------------------------------------------------


@kernel
def _encode(
    bits: int,
    size: int,
    flat: int,
    start: Array,
    length: Array,
    position: Array,
    number: Array,
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
    code, left, scale, inverse, counter = spare, residual_out, ZERO, ZERO, 0
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
        if residual_out == 0:
            # The hardware's prefetch ends with each 4 KiB page. Where bytes are read and few are written, starting the
            # next page gains a quarter; with error feedback it costs a tenth.
            fetch_to_read(source + 4096)
            fetch_to_read(source + 4160)
        scale, inverse = step(
            bits, size, source, r, gain, n, new, next_code, old, code, scale, inverse, left, seed, counter, bypass
        )
        if c > 0 and residual_out != 0 and length[c - 1] < size:
            clear(left + 4 * length[c - 1], size - length[c - 1], False)
        if c < count:
            finite = finite and np.isfinite(scale)
            store_float(first + shard[2] + 4 * (place % per_shard), scale)
            finish_tail(bits, size, n, next_code)
            code, counter = next_code, number[c] * size
            if residual_out != 0:
                left = residual_out + 4 * c * size
    fence()
    return finite


@kernel
def _server(
    bits: int,
    size: int,
    received: int,
    world: int,
    owned: Array,
    number: Array,
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
    code, left, scale, inverse, counter, last = spare, residual_out, ZERO, ZERO, 0, size
    share = floats(F32(1.0 / world))
    done = 0
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
                sums = floats(ZERO)
                for w in range(world):
                    first = received + w * shard[0]
                    s = floats(load_float(first + shard[2] + 4 * c))
                    sums = sums + decoded(first + shard[1] + c * width, j, bits, half, s)
                store(stage + 4 * j, sums * share)
            clear(stage + 4 * n, size - n, False)
            if residual != 0:
                r = residual + 4 * c * size
        new, old = buffers + 4 * size * (done % 2), buffers + 4 * size * (1 - done % 2)
        scale, inverse = step(
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
        if done > 0 and residual_out != 0:
            clear(left + 4 * last, size - last, False)
        if c < count:
            finite = finite and np.isfinite(scale)
            store_float(out + shard[2] + 4 * c, scale)
            finish_tail(bits, size, n, next_code)
            code, counter, last = next_code, number[c] * size, n
            if residual_out != 0:
                left = residual_out + 4 * c * size
        done += 1
    fence()
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
                put(target + 4 * j, decoded(code, j, bits, half, s) * g, bypass)
        else:
            for j in range(0, n, LANES):
                store(stage + 4 * j, decoded(code, j, bits, half, s) * g)
            copy(target, stage, n, bypass)
    fence()


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
        blocks.number.numpy(),
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
        blocks.owned_number.numpy(),
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
