"""PowerSGD products on the CPU: rank columns in groups of 4, rows in groups of 2 or 4, one call for all matrices.

Each pass reads its matrix once from memory; the few rows of Q in use stay in the L1 or L2 cache, and grouping rows
halves or quarters what is read from there. A last group that is short repeats its last row or column: the results are
the same values written twice, and no second copy of the loops is needed.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from gradcomp.kernels.cpu.vectors import (
    F32,
    LANES,
    STREAM,
    Array,
    Vector,
    clear,
    fence,
    floats,
    fused,
    inline,
    kernel,
    load,
    load_float,
    put,
    scaled_sum,
    store,
    store_float,
    total,
)
from gradcomp.kernels.ops import Blocks, Matrices

_ZERO = F32(0)


@inline
def _sum(flat: int, residual: int, gain: F32, j: int) -> F32:
    """Element j of scaled_sum()."""
    v = F32(load_float(flat + 4 * j) * gain)
    if residual != 0:
        v = F32(v + load_float(residual + 4 * j))
    return v


@inline
def _rest(row: int, q: int, first: int, n: int, sum_: F32) -> F32:
    """sum_ + row[first : n] . q[first : n]."""
    for j in range(first, n):
        sum_ += load_float(row + 4 * j) * load_float(q + 4 * j)
    return F32(sum_)


@inline
def _project_rows(
    flat0: int,
    flat1: int,
    residual0: int,
    residual1: int,
    work0: int,
    work1: int,
    gain: F32,
    n: int,
    q: int,
    r: int,
    k: int,
    p0: int,
    p1: int,
    bypass: bool,
) -> None:
    """P[:, k : k + 4] of two rows of n elements; for k = 0 the rows of ``work`` are made in the same pass."""
    k1, k2, k3 = min(k + 1, r - 1), min(k + 2, r - 1), min(k + 3, r - 1)
    q0, q1, q2, q3 = q + 4 * n * k, q + 4 * n * k1, q + 4 * n * k2, q + 4 * n * k3
    zero, g, whole = floats(_ZERO), floats(gain), n // LANES * LANES
    a0, a1, a2, a3, b0, b1, b2, b3 = zero, zero, zero, zero, zero, zero, zero, zero
    for j in range(0, whole, LANES):
        if k == 0:
            v, w = scaled_sum(flat0, residual0, g, j), scaled_sum(flat1, residual1, g, j)
            put(work0 + 4 * j, v, bypass)
            put(work1 + 4 * j, w, bypass)
        else:
            v, w = load(work0 + 4 * j), load(work1 + 4 * j)
        x0, x1, x2, x3 = load(q0 + 4 * j), load(q1 + 4 * j), load(q2 + 4 * j), load(q3 + 4 * j)
        a0, a1, a2, a3 = fused(v, x0, a0), fused(v, x1, a1), fused(v, x2, a2), fused(v, x3, a3)
        b0, b1, b2, b3 = fused(w, x0, b0), fused(w, x1, b1), fused(w, x2, b2), fused(w, x3, b3)
    if k == 0:
        for j in range(whole, n):
            store_float(work0 + 4 * j, _sum(flat0, residual0, gain, j))
            store_float(work1 + 4 * j, _sum(flat1, residual1, gain, j))
    store_float(p0 + 4 * k, _rest(work0, q0, whole, n, total(a0)))
    store_float(p0 + 4 * k1, _rest(work0, q1, whole, n, total(a1)))
    store_float(p0 + 4 * k2, _rest(work0, q2, whole, n, total(a2)))
    store_float(p0 + 4 * k3, _rest(work0, q3, whole, n, total(a3)))
    store_float(p1 + 4 * k, _rest(work1, q0, whole, n, total(b0)))
    store_float(p1 + 4 * k1, _rest(work1, q1, whole, n, total(b1)))
    store_float(p1 + 4 * k2, _rest(work1, q2, whole, n, total(b2)))
    store_float(p1 + 4 * k3, _rest(work1, q3, whole, n, total(b3)))


@kernel
def _project(
    size: int, flat: int, table: Array, residual: int, work: int, q: int, p: int, gain: F32, large: bool
) -> None:
    """``table`` int64 [7, count]: flat, work, rows, cols, rank, p, q of Matrices."""
    for t in range(table.shape[1]):
        m, n, r = table[2, t], table[3, t], table[4, t]
        at, made = flat + 4 * table[0, t], work + 4 * table[1, t]
        old, right, left = residual + 4 * table[1, t], q + 4 * table[6, t], p + 4 * table[5, t]
        # Past the cache only if the rows of work are whole cache lines and no later group of columns reads them again.
        bypass = large and r <= 4 and n % LANES == 0 and made % 64 == 0
        for i in range(0, m, 2):
            row0, row1 = 4 * n * i, 4 * n * min(i + 1, m - 1)
            old0, old1 = (old + row0, old + row1) if residual != 0 else (0, 0)
            p0, p1 = left + 4 * r * i, left + 4 * r * min(i + 1, m - 1)
            for k in range(0, r, 4):
                _project_rows(
                    at + row0, at + row1, old0, old1, made + row0, made + row1, gain, n, right, r, k, p0, p1, bypass
                )
        clear(made + 4 * m * n, -(m * n) % size, False)
    fence()


@inline
def _row(v0: Vector, v1: Vector, v2: Vector, v3: Vector, c: tuple[Vector, Vector, Vector, Vector], x: Vector) -> Vector:
    return fused(v0, c[0], fused(v1, c[1], fused(v2, c[2], fused(v3, c[3], x))))


@inline
def _column(p: int, r: int, i: int, m: int, k: int) -> tuple[F32, F32, F32, F32]:
    """P[i : i + 4, k], with zeros for rows past the last."""
    c0 = load_float(p + 4 * (i * r + k))
    c1 = load_float(p + 4 * ((i + 1) * r + k)) if i + 1 < m else _ZERO
    c2 = load_float(p + 4 * ((i + 2) * r + k)) if i + 2 < m else _ZERO
    c3 = load_float(p + 4 * ((i + 3) * r + k)) if i + 3 < m else _ZERO
    return c0, c1, c2, c3


@inline
def _splat4(c: tuple[F32, F32, F32, F32]) -> tuple[Vector, Vector, Vector, Vector]:
    return floats(c[0]), floats(c[1]), floats(c[2]), floats(c[3])


@inline
def _add_scaled(row0: int, row1: int, row2: int, row3: int, j: int, c: tuple[F32, F32, F32, F32], q: int) -> None:
    x = load_float(row0 + 4 * j) * c[0] + load_float(row1 + 4 * j) * c[1]
    x += load_float(row2 + 4 * j) * c[2] + load_float(row3 + 4 * j) * c[3]
    store_float(q + 4 * j, F32(load_float(q + 4 * j) + x))


@kernel
def _backproject(work: int, table: Array, p: int, q: int) -> None:
    for t in range(table.shape[1]):
        m, n, r = table[2, t], table[3, t], table[4, t]
        matrix, left, right = work + 4 * table[1, t], p + 4 * table[5, t], q + 4 * table[6, t]
        whole = n // LANES * LANES
        clear(right, n * r, False)
        for i in range(0, m, 4):
            row0, row1 = matrix + 4 * n * i, matrix + 4 * n * min(i + 1, m - 1)
            row2, row3 = matrix + 4 * n * min(i + 2, m - 1), matrix + 4 * n * min(i + 3, m - 1)
            for k in range(0, r, 4):
                k1, k2, k3 = min(k + 1, r - 1), min(k + 2, r - 1), min(k + 3, r - 1)
                q0, q1, q2, q3 = right + 4 * n * k, right + 4 * n * k1, right + 4 * n * k2, right + 4 * n * k3
                c0, c1 = _column(left, r, i, m, k), _column(left, r, i, m, k1)
                c2, c3 = _column(left, r, i, m, k2), _column(left, r, i, m, k3)
                s0, s1, s2, s3 = _splat4(c0), _splat4(c1), _splat4(c2), _splat4(c3)
                for j in range(0, whole, LANES):
                    v0, v1, v2, v3 = load(row0 + 4 * j), load(row1 + 4 * j), load(row2 + 4 * j), load(row3 + 4 * j)
                    # All four loads before the stores: repeated columns then get the same sum, once.
                    x0, x1, x2, x3 = load(q0 + 4 * j), load(q1 + 4 * j), load(q2 + 4 * j), load(q3 + 4 * j)
                    store(q0 + 4 * j, _row(v0, v1, v2, v3, s0, x0))
                    store(q1 + 4 * j, _row(v0, v1, v2, v3, s1, x1))
                    store(q2 + 4 * j, _row(v0, v1, v2, v3, s2, x2))
                    store(q3 + 4 * j, _row(v0, v1, v2, v3, s3, x3))
                for j in range(whole, n):
                    _add_scaled(row0, row1, row2, row3, j, c0, q0)
                    if k1 > k:
                        _add_scaled(row0, row1, row2, row3, j, c1, q1)
                    if k2 > k1:
                        _add_scaled(row0, row1, row2, row3, j, c2, q2)
                    if k3 > k2:
                        _add_scaled(row0, row1, row2, row3, j, c3, q3)


@inline
def _factor(p: int, k: int, r: int) -> Vector:
    """P[k] of a row, 0 past the rank."""
    return floats(load_float(p + 4 * k) if k < r else _ZERO)


@inline
def _element(p: int, q: int, n: int, r: int, j: int, gain: F32, residual: bool, out: int, work: int) -> None:
    y = _ZERO
    for k in range(r):
        y = F32(y + load_float(p + 4 * k) * load_float(q + 4 * (n * k + j)))
    store_float(out + 4 * j, F32(y * gain))
    if residual:
        store_float(work + 4 * j, F32(load_float(work + 4 * j) - y))


@kernel
def _decode(work: int, table: Array, p: int, q: int, flat: int, gain: F32, residual: bool, large: bool) -> None:
    g = floats(gain)
    for t in range(table.shape[1]):
        m, n, r = table[2, t], table[3, t], table[4, t]
        matrix, left, right = work + 4 * table[1, t], p + 4 * table[5, t], q + 4 * table[6, t]
        out, whole = flat + 4 * table[0, t], n // LANES * LANES
        bypass = large and n % LANES == 0 and out % 64 == 0
        for i in range(0, m, 2):
            second = min(i + 1, m - 1)
            p0, p1 = left + 4 * r * i, left + 4 * r * second
            w0, w1 = matrix + 4 * n * i, matrix + 4 * n * second
            o0, o1 = out + 4 * n * i, out + 4 * n * second
            # The first columns of P stay in registers; rank 4 has no others.
            a0, b0 = floats(load_float(p0)), floats(load_float(p1))
            k1, k2, k3 = min(1, r - 1), min(2, r - 1), min(3, r - 1)
            a1, b1 = _factor(p0, 1, r), _factor(p1, 1, r)
            a2, b2 = _factor(p0, 2, r), _factor(p1, 2, r)
            a3, b3 = _factor(p0, 3, r), _factor(p1, 3, r)
            for j in range(0, whole, LANES):
                x0, x1 = load(right + 4 * j), load(right + 4 * (n * k1 + j))
                x2, x3 = load(right + 4 * (n * k2 + j)), load(right + 4 * (n * k3 + j))
                y = fused(a0, x0, fused(a1, x1, fused(a2, x2, a3 * x3)))
                z = fused(b0, x0, fused(b1, x1, fused(b2, x2, b3 * x3)))
                for k in range(4, r):
                    x = load(right + 4 * (n * k + j))
                    y = fused(floats(load_float(p0 + 4 * k)), x, y)
                    z = fused(floats(load_float(p1 + 4 * k)), x, z)
                put(o0 + 4 * j, y * g, bypass)
                put(o1 + 4 * j, z * g, bypass)
                if residual:
                    # Both loads before the stores: a repeated last row is reduced once.
                    v, w = load(w0 + 4 * j), load(w1 + 4 * j)
                    store(w0 + 4 * j, v - y)
                    store(w1 + 4 * j, w - z)
            for j in range(whole, n):
                _element(p0, right, n, r, j, gain, residual, o0, w0)
                if second > i:
                    _element(p1, right, n, r, j, gain, residual, o1, w1)
    fence()


# --- ops --------------------------------------------------------------------------------------------------------------


def _table(matrices: Matrices) -> Array:
    columns = (matrices.flat, matrices.work, matrices.rows, matrices.cols, matrices.rank, matrices.p, matrices.q)
    return np.stack([column.numpy() for column in columns])


def lowrank_project(
    flat: Tensor,
    matrices: Matrices,
    blocks: Blocks,
    residual: Tensor | None,
    work: Tensor,
    q: Tensor,
    p: Tensor,
    gain: float,
) -> None:
    """See :meth:`gradcomp.kernels.ops.Ops.lowrank_project`."""
    _project(
        blocks.size,
        flat.data_ptr(),
        _table(matrices),
        0 if residual is None else residual.data_ptr(),
        work.data_ptr(),
        q.data_ptr(),
        p.data_ptr(),
        F32(gain),
        work.numel() >= STREAM,
    )


def lowrank_backproject(work: Tensor, matrices: Matrices, p: Tensor, q: Tensor) -> None:
    """See :meth:`gradcomp.kernels.ops.Ops.lowrank_backproject`."""
    _backproject(work.data_ptr(), _table(matrices), p.data_ptr(), q.data_ptr())


def lowrank_decode(
    work: Tensor, matrices: Matrices, p: Tensor, q: Tensor, flat: Tensor, gain: float, residual: bool
) -> None:
    """See :meth:`gradcomp.kernels.ops.Ops.lowrank_decode`."""
    _decode(
        work.data_ptr(),
        _table(matrices),
        p.data_ptr(),
        q.data_ptr(),
        flat.data_ptr(),
        F32(gain),
        residual,
        flat.numel() >= STREAM,
    )
