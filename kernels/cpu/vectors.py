"""Vectors of 16 lanes inside numba: the few operations that the CPU kernels need and LLVM does not find by itself.

numba has no vector type, and its loops lose the comparison masks, the non-temporal stores and the byte packing that
make these kernels run at memory speed. ``F`` (16 fp32) and ``I`` (16 int32) are numba types whose values are LLVM
vectors, so they live in registers. Everything is generic LLVM IR: 512-bit registers where the CPU has them, pairs of
256-bit or quadruples of 128-bit ones elsewhere. Little-endian machines only, as is torch.

This is also the only file that imports numba.
"""

from __future__ import annotations

import operator
import platform
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

# Imported as Any: how much of numba is typed differs from version to version.
numba: Any = import_module("numba")
extending: Any = import_module("numba.extending")
cgutils: Any = import_module("numba.core.cgutils")
config: Any = import_module("numba.core.config")
llvmlite: Any = import_module("llvmlite.binding")
ir: Any = import_module("llvmlite.ir")
types: Any = numba.types

Array: TypeAlias = "np.ndarray[Any, Any]"
Vector: TypeAlias = Any
F32: TypeAlias = np.float32
U32: TypeAlias = np.uint32
Function = TypeVar("Function", bound=Callable[..., Any])

LANES = 16
STREAM = 1 << 20
"""Outputs of at least so many fp32 elements (4 MiB) are written past the cache: they would not stay in it anyway."""
_OPTIONS = {"nogil": True, "error_model": "numpy", "boundscheck": False}
"""nogil: a communication thread overlaps with backward. No fastmath: signs, NaN and rounding belong to the format."""


def kernel(function: Function) -> Function:
    """Compile an entry point and keep the machine code on disk. The cache notices changes of the function's own file
    only: after editing another file of this folder, delete ``__pycache__``."""
    return numba.njit(cache=True, **_OPTIONS)(function)  # type: ignore[no-any-return]


def inline(function: Function) -> Function:
    """Compile a helper that is always inlined: a call would pass vectors through memory."""
    return numba.njit(forceinline=True, **_OPTIONS)(function)  # type: ignore[no-any-return]


def _converts_halves() -> bool:
    """Whether machine code may convert fp16: on x86 without F16C (before 2012, or as NUMBA_CPU_FEATURES says) it would
    call a function that not every C library has, and LLVM aborts the process."""
    if platform.machine().lower() not in ("x86_64", "amd64", "i686"):
        return platform.machine().lower() in ("aarch64", "arm64")
    if config.CPU_FEATURES is not None or config.CPU_NAME is not None:
        return "+f16c" in (config.CPU_FEATURES or "")
    return bool(llvmlite.get_host_cpu_features().get("f16c", False))


HALVES = _converts_halves()
"""Whether load_halves() and store_halves() may be used."""


# --- types ------------------------------------------------------------------------------------------------------------

_F32, _I32, _I8 = ir.FloatType(), ir.IntType(32), ir.IntType(8)
_VF, _VI, _VB = (ir.VectorType(element, LANES) for element in (_F32, _I32, _I8))
_VW, _VH = ir.VectorType(ir.IntType(16), LANES), ir.VectorType(ir.HalfType(), LANES)


class _VectorType(types.Type):  # type: ignore[misc]
    """numba type of 16 lanes of ``element``."""

    def __init__(self, element: str) -> None:
        super().__init__(f"Vector16({element})")


class _VectorModel(extending.models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _VF if kind == FLOATS else _VI)


extending.register_model(_VectorType)(_VectorModel)
FLOATS, INTS = _VectorType("f32"), _VectorType("i32")


def _const(value: int) -> Any:
    return ir.Constant(_VI, [value] * LANES)


def _define(result: Any, arguments: tuple[Any, ...], build: Callable[..., Any]) -> Any:
    """An intrinsic of fixed types from ``build(builder, *values)``."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        out = build(builder, *values)
        return context.get_dummy_value() if result == types.void else out

    # numba reads the number of parameters from the signature.
    if len(arguments) == 0:
        return extending.intrinsic(lambda typingctx: (result(), generate))
    if len(arguments) == 1:
        return extending.intrinsic(lambda typingctx, x: (result(*arguments), generate))
    if len(arguments) == 2:
        return extending.intrinsic(lambda typingctx, x, y: (result(*arguments), generate))
    return extending.intrinsic(lambda typingctx, x, y, z: (result(*arguments), generate))


def _operator(symbol: Any, kind: Any, build: Callable[..., Any]) -> None:
    """Let ``symbol`` work on two vectors of ``kind`` inside kernels."""
    run = _define(kind, (kind, kind), build)

    def choose(x: Any, y: Any) -> Any:
        return (lambda x, y: run(x, y)) if x == kind and y == kind else None

    extending.overload(symbol, strict=False)(choose)


def _splat(builder: Any, value: Any, kind: Any) -> Any:
    empty = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(empty, value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, empty, _const(0))


def _call(builder: Any, name: str, *values: Any) -> Any:
    """Call an LLVM function that takes and returns FLOATS."""
    kind = ir.FunctionType(_VF, [_VF] * len(values))
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)


for _symbol, _method in ((operator.add, "fadd"), (operator.sub, "fsub"), (operator.mul, "fmul")):
    _operator(_symbol, FLOATS, lambda b, x, y, method=_method: getattr(b, method)(x, y))
for _symbol, _method in (
    (operator.add, "add"),
    (operator.mul, "mul"),
    (operator.and_, "and_"),
    (operator.or_, "or_"),
    (operator.xor, "xor"),
    (operator.lshift, "shl"),
    (operator.rshift, "lshr"),
):
    _operator(_symbol, INTS, lambda b, x, y, method=_method: getattr(b, method)(x, y))

floats = _define(FLOATS, (types.float32,), lambda b, x: _splat(b, x, _VF))
"""16 times one fp32."""
ints = _define(INTS, (types.uint32,), lambda b, x: _splat(b, x, _VI))
"""16 times one uint32."""
as_ints = _define(INTS, (FLOATS,), lambda b, x: b.bitcast(x, _VI))
as_floats = _define(FLOATS, (INTS,), lambda b, x: b.bitcast(x, _VF))
to_floats = _define(FLOATS, (INTS,), lambda b, x: b.sitofp(x, _VF))
"""int32 converted to fp32."""
lanes = _define(INTS, (types.uint32,), lambda b, x: b.add(_splat(b, x, _VI), ir.Constant(_VI, list(range(LANES)))))
"""x, x + 1, .. x + 15."""
float_bits = _define(types.uint32, (types.float32,), lambda b, x: b.bitcast(x, _I32))
bits_float = _define(types.float32, (types.uint32,), lambda b, x: b.bitcast(x, _F32))
magnitude_bits = _define(INTS, (FLOATS,), lambda b, x: b.and_(b.bitcast(x, _VI), _const(0x7FFFFFFF)))
"""Bits of |x|: as integers they order like the magnitudes, then inf, then NaN."""
magnitude = _define(FLOATS, (FLOATS,), lambda b, x: b.bitcast(b.and_(b.bitcast(x, _VI), _const(0x7FFFFFFF)), _VF))
largest = _define(INTS, (INTS, INTS), lambda b, x, y: b.select(b.icmp_signed(">", x, y), x, y))
shift_signed = _define(INTS, (INTS, INTS), lambda b, x, y: b.ashr(x, y))
lower = _define(FLOATS, (FLOATS, FLOATS), lambda b, x, y: b.select(b.fcmp_ordered("<", x, y), x, y))
higher = _define(FLOATS, (FLOATS, FLOATS), lambda b, x, y: b.select(b.fcmp_ordered(">", x, y), x, y))
floor = _define(FLOATS, (FLOATS,), lambda b, x: _call(b, "llvm.floor.v16f32", x))
fused = _define(FLOATS, (FLOATS, FLOATS, FLOATS), lambda b, x, y, z: _call(b, "llvm.fmuladd.v16f32", x, y, z))
"""x * y + z, in one rounding where the CPU can: for matrix products only."""


def _signed(b: Any, size: Any, sign: Any) -> Any:
    return b.bitcast(b.or_(b.bitcast(size, _VI), b.and_(b.bitcast(sign, _VI), _const(-0x80000000))), _VF)


signed = _define(FLOATS, (FLOATS, FLOATS), _signed)
"""Magnitude of x >= 0 with the sign bits of y."""


def _fold(b: Any, x: Any, combine: Callable[[Any, Any, Any], Any]) -> Any:
    width = LANES
    while width > 1:
        width //= 2
        low, high = (ir.Constant(ir.VectorType(_I32, width), list(range(at, at + width))) for at in (0, width))
        x = combine(b, b.shuffle_vector(x, x, low), b.shuffle_vector(x, x, high))
    return b.extract_element(x, ir.Constant(_I32, 0))


total = _define(types.float32, (FLOATS,), lambda b, x: _fold(b, x, lambda b, y, z: b.fadd(y, z)))
"""Sum of the lanes."""
top = _define(types.uint32, (INTS,), lambda b, x: _fold(b, x, lambda b, y, z: b.select(b.icmp_signed(">", y, z), y, z)))
"""Largest lane, as int32 (used for magnitudes: never negative)."""
count_bits = _define(types.intp, (types.uint64,), lambda b, x: b.ctpop(x))
trailing_zeros = _define(types.intp, (types.uint64,), lambda b, x: b.cttz(x, ir.Constant(ir.IntType(1), 1)))
"""Index of the lowest set bit; x is not 0."""

# --- memory -----------------------------------------------------------------------------------------------------------
# Addresses are plain integers in bytes (Tensor.data_ptr()): no array headers, no reference counts, no slices.


def _loader(result: Any, kind: Any, finish: Callable[[Any, Any], Any] = lambda b, x: x) -> Any:
    """load(address) from any alignment."""
    return _define(result, (types.intp,), lambda b, at: finish(b, b.load(b.inttoptr(at, kind.as_pointer()), align=1)))


def _storer(
    value: Any, kind: Any, prepare: Callable[[Any, Any], Any] = lambda b, x: x, align: int = 1, bypass: bool = False
) -> Any:
    """store(address, x); ``bypass``: past the cache."""

    def build(b: Any, at: Any, x: Any) -> None:
        done = b.store(prepare(b, x), b.inttoptr(at, kind.as_pointer()), align=align)
        if bypass:
            done.set_metadata("nontemporal", b.module.add_metadata([ir.Constant(_I32, 1)]))

    return _define(types.void, (types.intp, value), build)


def _spread(b: Any, mask: Any) -> Any:
    clear = b.zext(b.not_(b.bitcast(mask, ir.VectorType(ir.IntType(1), LANES))), _VI)
    return b.shl(clear, _const(31))


def _collect(b: Any, x: Any) -> Any:
    return b.bitcast(b.icmp_signed(">=", b.bitcast(x, _VI), _const(0)), ir.IntType(16))


load = _loader(FLOATS, _VF)
store = _storer(FLOATS, _VF)
stream = _storer(FLOATS, _VF, align=64, bypass=True)
"""store() that does not read the cache line first: the address must be a multiple of 64, and lines follow in order."""
load_bytes = _loader(INTS, _VB, lambda b, x: b.sext(x, _VI))
"""16 signed bytes."""
store_bytes = _storer(INTS, _VB, lambda b, x: b.trunc(x, _VB))
"""The low bytes of 16 lanes."""
load_signs = _loader(INTS, ir.IntType(16), _spread)
"""A sign bit in each lane whose bit of the two bytes is clear."""
store_signs = _storer(FLOATS, ir.IntType(16), _collect)
"""Two bytes, bit i set where the sign bit of lane i is clear."""
load_words = _loader(INTS, _VW, lambda b, x: b.zext(x, _VI))
"""16 unsigned 16-bit words."""
store_words = _storer(INTS, _VW, lambda b, x: b.trunc(x, _VW))
"""The low 16 bits of 16 lanes."""
# Where the conversion is missing, kernels still have a branch for it: something that compiles and is never run.
load_halves = _loader(FLOATS, _VH, lambda b, x: b.fpext(x, _VF)) if HALVES else _loader(FLOATS, _VF)
"""16 fp16; only where HALVES."""
store_halves = _storer(FLOATS, _VH, lambda b, x: b.fptrunc(x, _VH)) if HALVES else _storer(FLOATS, _VF)
"""16 fp16, rounded half to even; only where HALVES."""
load_float = _loader(types.float32, _F32)
store_float = _storer(types.float32, _F32)
load_int = _loader(types.uint32, _I32)
store_int = _storer(types.uint32, _I32)
load_word = _loader(types.uint16, ir.IntType(16))
store_word = _storer(types.uint16, ir.IntType(16))
load_byte = _loader(types.uint8, _I8)
store_byte = _storer(types.uint8, _I8)


def _fetch(b: Any, at: Any, write: int) -> None:
    pointer, word = _I8.as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [pointer, word, word, word])
    write_keep_data = [ir.Constant(word, x) for x in (write, 3, 1)]
    function = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    b.call(function, [b.inttoptr(at, pointer), *write_keep_data])


fence = _define(types.void, (), lambda b: b.fence("seq_cst"))
"""Finish stream(): until then another thread may not see what was written, even after a lock."""
fetch_to_read = _define(types.void, (types.intp,), lambda b, at: _fetch(b, at, 0))
"""Start to fetch the cache line at an address; any address is allowed, also outside of arrays."""
fetch_to_write = _define(types.void, (types.intp,), lambda b, at: _fetch(b, at, 1))
"""The same for a line that will be written."""


def _at_least(b: Any, at: Any, bound: Any) -> Any:
    wide = ir.VectorType(_I32, 64)
    bits = b.and_(b.load(b.inttoptr(at, wide.as_pointer()), align=1), ir.Constant(wide, [0x7FFFFFFF] * 64))
    empty = ir.Constant(wide, ir.Undefined)
    limit = b.shuffle_vector(b.insert_element(empty, bound, ir.Constant(_I32, 0)), empty, ir.Constant(wide, [0] * 64))
    return b.bitcast(b.icmp_signed(">=", bits, limit), ir.IntType(64))


mask_at_least = _define(types.uint64, (types.intp, types.uint32), _at_least)
"""mask_at_least(address, bits): bit i says that |x_i| >= the fp32 with these bits, for the 64 fp32 at the address."""


def scratch(count: int) -> Tensor:
    """fp32 [count] of zeros on a 64-byte boundary, for a kernel to work in. Kernels cannot make it themselves: numba
    frees an array after the last use of its name, whatever still points into it."""
    return torch.zeros(count)


@inline
def copy(target: int, source: int, count: int, bypass: bool) -> None:
    """Copy ``count`` fp32; ``bypass``: past the cache, except for partial cache lines."""
    j = 0
    if bypass:
        while j < count and (target + 4 * j) % 64 != 0:
            store_float(target + 4 * j, load_float(source + 4 * j))
            j += 1
        while j + LANES <= count:
            stream(target + 4 * j, load(source + 4 * j))
            j += LANES
    while j + LANES <= count:
        store(target + 4 * j, load(source + 4 * j))
        j += LANES
    while j < count:
        store_float(target + 4 * j, load_float(source + 4 * j))
        j += 1


@inline
def clear(target: int, count: int, bypass: bool) -> None:
    """Write ``count`` fp32 zeros; ``bypass`` as in copy()."""
    j, zero = 0, np.float32(0)
    if bypass:
        while j < count and (target + 4 * j) % 64 != 0:
            store_float(target + 4 * j, zero)
            j += 1
        while j + LANES <= count:
            stream(target + 4 * j, floats(zero))
            j += LANES
    while j + LANES <= count:
        store(target + 4 * j, floats(zero))
        j += LANES
    while j < count:
        store_float(target + 4 * j, zero)
        j += 1


@inline
def scaled_sum(flat: int, residual: int, gain: Vector, j: int) -> Vector:
    """v = gain * flat + residual at elements j .. j + 15, each operation rounded; ``residual`` 0: none."""
    v = load(flat + 4 * j) * gain
    if residual != 0:
        v = v + load(residual + 4 * j)
    return v


@inline
def put(target: int, v: Vector, bypass: bool) -> None:
    """stream() or store()."""
    if bypass:
        stream(target, v)
    else:
        store(target, v)
