"""Kernel backends: the reference against naive Python, every other backend against the reference, properties, limits."""

import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import gradcomp.kernels.cuda
from gradcomp.errors import UnsupportedError
from gradcomp.kernels import reference, select
from gradcomp.kernels.ops import Blocks, Matrices, Ops, Segments, ShardLayout

# "cuda" is tested by test_cuda_kernels.py, which runs the tests of this file once more.
AVAILABLE = [name for name, state in select.available().items() if state == "available" and name != "cuda"]
CPU = torch.device("cpu")
BITS = (1, 4, 8)
INF, NAN = math.inf, math.nan


@pytest.fixture(params=AVAILABLE)
def ops(request: pytest.FixtureRequest) -> Ops:
    return select.get_ops(CPU, request.param)


@pytest.fixture(params=[name for name in AVAILABLE if name != "torch"])
def other(request: pytest.FixtureRequest) -> Ops:
    """A backend that is compared with the reference."""
    return select.get_ops(CPU, request.param)


@pytest.fixture(params=["cached", "streamed"])
def stores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Force each way in which the numba backend writes: small tests would never write past the cache."""
    for module in ("blocks", "cast", "lowrank", "topk"):
        found = sys.modules.get(f"gradcomp.kernels.cpu.{module}")
        if found is not None:
            monkeypatch.setattr(found, "STREAM", 0 if request.param == "streamed" else 1 << 60)
    return str(request.param)


# --- data -------------------------------------------------------------------------------------------------------------


def cut(
    lengths: list[int], size: int, world: int = 1, rank: int = 0, gap: int = 0, mirrored: bool = False
) -> tuple[int, Blocks]:
    """Blocks of parameters that lie ``gap`` elements apart, owners round robin; and the size of the bucket.

    ``mirrored``: each shard holds its blocks in the opposite order, so that unused places come first.
    """
    start, length, offset = [], [], gap
    for n in lengths:
        for i in range(0, n, size):
            start.append(offset + i)
            length.append(min(size, n - i))
        offset += n + gap
    per_shard = -(-len(start) // world)
    places = [per_shard - 1 - b // world if mirrored else b // world for b in range(len(start))]
    position = [b % world * per_shard + places[b] for b in range(len(start))]
    owned, owned_number = [0] * per_shard, [0] * per_shard
    for b in range(rank, len(start), world):
        owned[places[b]], owned_number[places[b]] = length[b], b + 7
    as_int = {"dtype": torch.int32}
    return offset, Blocks(
        size,
        world,
        per_shard,
        torch.tensor(start),
        torch.tensor(length, **as_int),
        torch.tensor(position, **as_int),
        torch.tensor(owned, **as_int),
        torch.arange(7, 7 + len(start), **as_int),
        torch.tensor(owned_number, **as_int),
    )


def lay_out(blocks: Blocks, bits: int) -> ShardLayout:
    """Scales before codes and 16 bytes unused in front, so that no offset is 0 by accident."""
    codes = 16 + -(-4 * blocks.per_shard // 16) * 16
    return ShardLayout(codes + -(-blocks.per_shard * blocks.size * bits // 128) * 16, codes, 16)


def inside(length: Tensor, size: int) -> Tensor:
    """bool [count * B]: which places of block space hold elements."""
    return (torch.arange(size) < length[:, None]).flatten()


class Guarded:
    """Outputs between canaries: ``new`` makes one, ``check`` finds writes outside."""

    def __init__(self) -> None:
        self.made: list[Tensor] = []

    def new(self, count: int, dtype: torch.dtype = torch.float32, fill: float = 7) -> Tensor:
        whole = torch.full((count + 128,), fill, dtype=dtype)  # 64 in front keep the alignment
        self.made.append(whole)
        return whole[64 : 64 + count]

    def check(self) -> None:
        for whole in self.made:
            assert bool((whole[:64] == whole[0]).all()), "written before the start"
            assert bool((whole[-64:] == whole[0]).all()), "written past the end"


def flag() -> Tensor:
    return torch.ones(1, dtype=torch.int32)


def normal(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def codes_and_scales(payload: Tensor, blocks: Blocks, layout: ShardLayout, bits: int) -> tuple[Tensor, Tensor]:
    """[shards, per_shard, bytes] and [shards, per_shard], copied out by slicing."""
    shards = payload.view(-1, layout.nbytes)
    width = blocks.size * bits // 8
    codes = shards[:, layout.codes : layout.codes + blocks.per_shard * width].reshape(-1, blocks.per_shard, width)
    scales = shards[:, layout.scales : layout.scales + 4 * blocks.per_shard].contiguous().view(torch.float32)
    return codes, scales


def equal(a: Any, b: Any, what: str, slack: float = 0.0) -> None:
    """Integers must be equal, fp32 within rtol 1e-5, or 1e-6 of the largest of them; None equals None."""
    assert (a is None) == (b is None), what
    if a is None:
        return
    if not a.is_floating_point():
        assert torch.equal(a, b), f"{what}: {(a != b).nonzero()[:5].tolist()}"
        return
    size = float(a[torch.isfinite(a)].abs().max()) if bool(torch.isfinite(a).any()) else 0.0
    torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6 * size + slack, equal_nan=True, msg=lambda m: f"{what}: {m}")


def round_trip(
    ops: Ops,
    flat: Tensor,
    blocks: Blocks,
    bits: int,
    *,
    feedback: bool = True,
    gain: float = 1.0,
    seed: int | None = None,
    old: Tensor | None = None,
) -> dict[str, Any]:
    """Encode, decode and run the server stage on the own payload; everything that was written."""
    guard, layout = Guarded(), lay_out(blocks, bits)
    payload = guard.new(blocks.world * layout.nbytes, torch.uint8)
    space, shard = blocks.count * blocks.size, blocks.per_shard * blocks.size
    if feedback and old is None:
        old = normal(space, 3) * inside(blocks.length, blocks.size)
    out = guard.new(space) if feedback else None
    finite = flag()
    ops.block_encode(flat, blocks, layout, payload, bits, old if feedback else None, out, gain, seed, finite)
    decoded = guard.new(flat.numel())
    ops.block_decode(payload, blocks, layout, decoded, bits, 0.75)
    averaged, server_finite = guard.new(layout.nbytes, torch.uint8), flag()
    server_old = normal(shard, 4) * inside(blocks.owned, blocks.size) if feedback else None
    server_out = guard.new(shard) if feedback else None
    ops.block_server(payload, blocks, layout, averaged, bits, server_old, server_out, seed, server_finite)
    guard.check()
    codes, scales = codes_and_scales(payload, blocks, layout, bits)
    server_codes, server_scales = codes_and_scales(averaged, blocks, layout, bits)
    return {
        "codes": codes,
        "scales": scales,
        "residual": out,
        "finite": finite,
        "decoded": decoded,
        "server codes": server_codes,
        "server scales": server_scales,
        "server residual": server_out,
        "server finite": server_finite,
    }


def compare(a: dict[str, Any], b: dict[str, Any], case: object) -> None:
    for key, value in a.items():
        # A residual is the difference of a value and a scale that agrees within 1e-5: it may be all rounding error.
        scales = a.get({"residual": "scales", "server residual": "server scales"}.get(key, ""))
        equal(value, b[key], f"{key} {case}", 0.0 if scales is None else 1e-6 * float(scales[scales < INF].max()))


# --- the reference against naive Python -------------------------------------------------------------------------------


def hash32(seed: int, counter: int) -> int:
    x = (counter * 0x9E3779B9 + seed) % 2**32
    x ^= x >> 16
    x = x * 0x85EBCA6B % 2**32
    x ^= x >> 13
    x = x * 0xC2B2AE35 % 2**32
    return x ^ x >> 16


def naive_encode(v: np.ndarray, size: int, bits: int, seed: int | None, first: int) -> tuple[bytes, np.float32, list]:
    """Code, scale and decoded values of one block, an element at a time."""
    f4 = np.float32
    if bits == 1:
        scale = f4(sum(abs(float(x)) for x in v) / len(v))
        positive = [not math.copysign(1, float(x)) < 0 for x in v]
        padded = positive + [False] * (size - len(v))
        return np.packbits(padded, bitorder="little").tobytes(), scale, [scale if p else -scale for p in positive]
    top = f4(127 if bits == 8 else 7)
    peak = f4(max(abs(x) for x in v))
    scale, inverse = (f4(0), f4(0)) if peak < 2.0**-100 else (peak / top, top / peak)
    codes = []
    for i, x in enumerate(v):
        y = x * inverse
        u = None if seed is None else f4((hash32(seed, (first + i) % 2**32) >> 8) * 2.0**-24)
        code = round(float(y)) if u is None else math.floor(y + u)  # Python rounds half to even
        codes.append(int(max(-top, min(top, code))))
    decoded = [f4(c) * scale for c in codes]
    codes += [0] * (size - len(v))
    if bits == 4:
        half = size // 2
        codes = [(a & 15) | (b & 15) << 4 for a, b in zip(codes[:half], codes[half:], strict=True)]
    return bytes(c & 255 for c in codes), scale, decoded


@pytest.mark.parametrize("seed", [None, 0, 12345, 2**32 - 1])
@pytest.mark.parametrize("bits", BITS)
def test_reference_is_the_specification(bits: int, seed: int | None) -> None:
    size, world, gain = 32, 3, 1.7
    n, blocks = cut([1, 31, 32, 33, 70], size, world, gap=5, mirrored=True)
    flat = normal(n)
    flat[blocks.start[2]] = -0.0
    old = normal(blocks.count * size, 1) * inside(blocks.length, size)
    got = round_trip(reference, flat, blocks, bits, gain=gain, seed=seed, old=old)
    for b in range(blocks.count):
        start, length, position = (int(x[b]) for x in (blocks.start, blocks.length, blocks.position))
        v = flat.numpy()[start : start + length] * np.float32(gain) + old.numpy()[b * size : b * size + length]
        code, scale, decoded = naive_encode(v, size, bits, seed, int(blocks.number[b]) * size)
        owner, place = divmod(position, blocks.per_shard)
        assert bytes(got["codes"][owner, place].tolist()) == code
        assert float(got["scales"][owner, place]) == scale
        block = got["residual"][b * size : (b + 1) * size]
        assert np.array_equal(block[:length].numpy(), v - np.array(decoded))
        assert not block[length:].any()
        assert np.array_equal(got["decoded"].numpy()[start : start + length], np.array(decoded) * np.float32(0.75))


@pytest.mark.parametrize("bits", BITS)
def test_server_is_the_specification(ops: Ops, bits: int) -> None:
    size, world, rank = 32, 3, 1
    _, blocks = cut([40, 32, 7, 9], size, world, rank)  # 5 blocks: the last place of rank 2 is unused
    layout, f4 = lay_out(blocks, bits), np.float32
    width = size * bits // 8
    received = torch.randint(0, 256, (world * layout.nbytes,), dtype=torch.uint8)
    codes, scales = codes_and_scales(received, blocks, layout, bits)
    for w in range(world):  # any bytes are codes, but a scale must be a number
        at = w * layout.nbytes + layout.scales
        scales[w] = normal(blocks.per_shard, w).abs()
        received[at : at + 4 * blocks.per_shard] = scales[w].clone().view(torch.uint8)
    old = normal(blocks.per_shard * size) * inside(blocks.owned, size)
    out, new = torch.full((layout.nbytes,), 9, dtype=torch.uint8), torch.full_like(old, 9.0)
    ops.block_server(received, blocks, layout, out, bits, old, new, None, flag())
    for place in range(blocks.per_shard):
        length = int(blocks.owned[place])
        v = np.zeros(length, f4)
        for w in range(world):
            raw = codes[w, place].numpy()
            if bits == 1:
                values = np.where(np.unpackbits(raw, bitorder="little"), 1.0, -1.0)
            elif bits == 8:
                values = raw.view(np.int8)
            else:
                nibbles = np.concatenate([raw & 15, raw >> 4]).astype(np.int64)
                values = np.where(nibbles < 8, nibbles, nibbles - 16)
            v = v + values[:length].astype(f4) * f4(scales[w, place])
        v = v * f4(1 / world) + old.numpy()[place * size : place * size + length]
        code, scale, decoded = naive_encode(v, size, bits, None, 0)
        at = layout.codes + place * width
        assert bytes(out[at : at + width].tolist()) == code
        got = out[layout.scales + 4 * place : layout.scales + 4 * place + 4].clone().view(torch.float32)
        assert float(got) == pytest.approx(float(scale), rel=1e-6)
        left = new[place * size : place * size + length].numpy()
        assert np.allclose(left, v - np.array(decoded), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bits", BITS)
def test_unused_places_are_left_alone(ops: Ops, bits: int) -> None:
    size, world, rank = 32, 4, 3
    n, blocks = cut([100, 32], size, world, rank)  # 5 blocks: ranks 1 to 3 have an unused place
    layout = lay_out(blocks, bits)
    payload, finite = torch.full((world * layout.nbytes,), 9, dtype=torch.uint8), flag()
    ops.block_encode(normal(n), blocks, layout, payload, bits, None, None, 1.0, None, finite)
    codes, scales = codes_and_scales(payload, blocks, layout, bits)
    nine = torch.full((4,), 9, dtype=torch.uint8).view(torch.float32)
    assert bool((codes[1:, 1] == 9).all())
    assert bool((scales[1:, 1] == nine).all())
    assert not bool((scales[:, 0] == nine).any())
    out, new = torch.full((layout.nbytes,), 9, dtype=torch.uint8), torch.full((2 * size,), 9.0)
    ops.block_server(payload, blocks, layout, out, bits, torch.zeros(2 * size), new, None, finite)
    codes, scales = codes_and_scales(out, blocks, layout, bits)
    assert bool((codes[0, 1] == 9).all())
    assert float(scales[0, 1]) == float(nine)
    assert not new[size:].any()
    assert int(finite) == 1


# --- blocks against the reference -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [None, 99])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", [32, 64, 256])
def test_blocks_match_the_reference(other: Ops, stores: str, size: int, bits: int, seed: int | None) -> None:
    shapes = [[1], [31], [32], [33, 63, 64, 65], [size - 1, size, size + 1], [5 * size], [3 * size, 2, 1000], [2049]]
    for lengths in shapes:
        for world in (1, 2, 3, 5):
            for gap, feedback, gain in ((0, True, 1.0), (3, True, 0.3), (16, False, 2.0)):
                n, blocks = cut(lengths, size, world, world - 1, gap, mirrored=gap == 3)
                flat = normal(n, n)
                case = (lengths, world, gap, feedback)
                kwargs: dict[str, Any] = {"feedback": feedback, "gain": gain, "seed": seed}
                compare(
                    round_trip(reference, flat, blocks, bits, **kwargs),
                    round_trip(other, flat, blocks, bits, **kwargs),
                    case,
                )


@pytest.mark.parametrize("bits", BITS)
def test_large_blocks_match_the_reference(other: Ops, stores: str, bits: int) -> None:
    for size in (1024, 2048):
        n, blocks = cut([100003, 64, 2049], size, 2, gap=1)
        compare(round_trip(reference, normal(n), blocks, bits), round_trip(other, normal(n), blocks, bits), size)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    "values",
    [
        [0.0],
        [-0.0],
        [1e-40, -1e-42],
        [3e38, -3e38],
        [3.4e38],
        [1e-31, -1e-32],
        [7.8e-31, 7.9e-31],
        [2.0**-100],
        [1.0],
        [0.0, 1e30],
    ],
    ids=str,
)
def test_extreme_values(other: Ops, bits: int, values: list[float]) -> None:
    n, blocks = cut([300, 64, 5], 64, 2)
    flat = torch.tensor((values * n)[:n])
    for feedback in (False, True):
        kwargs: dict[str, Any] = {"feedback": feedback, "old": torch.zeros(blocks.count * 64) if feedback else None}
        want = round_trip(reference, flat, blocks, bits, **kwargs)
        assert int(want["finite"]) == 1
        compare(want, round_trip(other, flat, blocks, bits, **kwargs), values)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("bad", [INF, -INF, NAN], ids=str)
def test_inf_and_nan_are_found_wherever_they_are(ops: Ops, stores: str, bits: int, bad: float) -> None:
    size = 64
    n, blocks = cut([300, 64, 5], size, 2, gap=3)
    layout, space = lay_out(blocks, bits), blocks.count * size
    used = inside(blocks.length, size)

    def finite_after(flat: Tensor, old: Tensor, seed: int | None) -> int:
        guard, finite = Guarded(), flag()
        payload = guard.new(2 * layout.nbytes, torch.uint8)
        ops.block_encode(flat, blocks, layout, payload, bits, old, guard.new(space), 1.0, seed, finite)
        guard.check()
        return int(finite)

    good, zero = normal(n), torch.zeros(space)
    assert finite_after(good, zero, None) == 1
    ends = (blocks.start + blocks.length - 1).tolist()
    for at in sorted({*blocks.start.tolist(), *ends, 3 + 17, 3 + 299 - 20, n - 4}):
        for seed in (None, 5):
            flat = good.clone()
            flat[at] = bad
            assert finite_after(flat, zero, seed) == 0, at
    for at in used.nonzero().flatten().tolist()[::29]:
        old = zero.clone()
        old[at] = bad
        assert finite_after(good, old, None) == 0, at
    for at in (0, 2, 303, n - 1):  # between the blocks: not encoded, not looked at
        flat = good.clone()
        flat[at] = bad
        assert finite_after(flat, zero, None) == 1, at


@pytest.mark.parametrize("bits", BITS)
def test_server_finds_a_scale_that_is_not_finite(ops: Ops, bits: int) -> None:
    n, blocks = cut([300], 64, 2)
    layout = lay_out(blocks, bits)
    for bad in (INF, NAN):
        payload, finite = torch.zeros(2 * layout.nbytes, dtype=torch.uint8), flag()
        ops.block_encode(torch.ones(n), blocks, layout, payload, bits, None, None, 1.0, None, finite)
        at = layout.nbytes + layout.scales + 4
        payload[at : at + 4] = torch.tensor([bad]).view(torch.uint8)
        ops.block_server(payload, blocks, layout, payload[: layout.nbytes].clone(), bits, None, None, None, finite)
        assert int(finite) == 0


def test_a_fused_multiply_add_would_show(other: Ops) -> None:
    """gain * flat rounds to -residual, so v is 0; fused, it would be a rounding error with a sign of its own."""
    n, blocks = cut([4096], 64)
    flat, gain = normal(n), 1.1
    old = -(flat * gain)
    for bits in BITS:
        want, got = (round_trip(x, flat, blocks, bits, gain=gain, old=old) for x in (reference, other))
        assert not want["scales"].any()
        compare(want, got, bits)


# --- properties -------------------------------------------------------------------------------------------------------

floats = st.floats(-(2.0**100), 2.0**100, width=32)
vectors = st.lists(floats, min_size=1, max_size=200)


@pytest.mark.parametrize("name", AVAILABLE)
@given(values=vectors, data=st.data())
def test_decoded_plus_residual_is_the_value(name: str, values: list[float], data: st.DataObject) -> None:
    bits = data.draw(st.sampled_from(BITS))
    seed = data.draw(st.sampled_from([None, 1]))
    ops = select.get_ops(CPU, name)
    n, blocks = cut([len(values)], 32)
    flat = torch.tensor(values)
    layout = lay_out(blocks, bits)
    payload, new = torch.zeros(layout.nbytes, dtype=torch.uint8), torch.zeros(blocks.count * 32)
    ops.block_encode(flat, blocks, layout, payload, bits, torch.zeros_like(new), new, 1.0, seed, flag())
    decoded = torch.zeros(n)
    ops.block_decode(payload, blocks, layout, decoded, bits, 1.0)
    left = new[inside(blocks.length, 32)]
    assert torch.equal(left, flat - decoded)  # exactly: the residual is what the receivers will miss
    if bits > 1:
        scales = codes_and_scales(payload, blocks, layout, bits)[1][0].repeat_interleave(32)[:n]
        bound = scales * (0.5 if seed is None else 1.0) * (1 + 1e-5) + 2.0**-100
        assert bool((left.abs() <= bound).all())


def test_stochastic_rounding_is_unbiased_and_deterministic(ops: Ops) -> None:
    n, blocks = cut([256 * 64], 256, 2)
    flat = (torch.arange(n) % 256 - 128) / 128 * 0.9
    for bits in (8, 4):
        layout = lay_out(blocks, bits)
        step = 1 / (127 if bits == 8 else 7)
        mean = torch.zeros(n)
        seen = []
        for seed in [*range(32), 0]:
            payload = torch.zeros(2 * layout.nbytes, dtype=torch.uint8)
            ops.block_encode(flat, blocks, layout, payload, bits, None, None, 1.0, seed, flag())
            decoded = torch.zeros(n)
            ops.block_decode(payload, blocks, layout, decoded, bits, 1.0)
            seen.append(payload)
            mean += decoded / 33
        assert torch.equal(seen[0], seen[-1])
        assert not torch.equal(seen[0], seen[1])
        # 64 blocks x 32 seeds per value: the error of a mean is below step / 2 / sqrt(2048), 5 of which are 0.055 step
        assert float((mean - flat).view(-1, 256).mean(0).abs().max()) < 0.06 * step


# --- Top-K ------------------------------------------------------------------------------------------------------------


def spread(kind: str, count: int) -> Tensor:
    values = normal(count, count)
    if kind == "ties":
        return (values * 2).round()
    if kind == "zeros":
        return torch.zeros(count)
    if kind == "mostly zero":
        return values * (values > 2)
    if kind == "wide":
        return values * 10.0 ** (30 * normal(count, 1).clamp(-1.2, 1.2))
    return values


@pytest.mark.parametrize("kind", ["normal", "ties", "zeros", "mostly zero", "wide"])
def test_topk_matches_a_stable_sort(ops: Ops, kind: str) -> None:
    for count in (1, 31, 32, 33, 63, 64, 65, 2049, 100003):
        values = spread(kind, count)
        order = values.abs().sort(descending=True, stable=True)
        for k in sorted({1, max(1, count // 100), max(1, count // 3), count}):
            threshold = ops.topk_threshold(values, k)
            assert threshold == float(order.values[k - 1])
            guard = Guarded()
            indices, selected = guard.new(k, torch.int32), guard.new(k)
            assert ops.topk_compact(values, threshold, k, indices, selected) == k
            want = order.indices[:k].sort().values
            assert torch.equal(indices.long(), want)
            assert torch.equal(selected, values[want])
            guard.check()


@given(data=st.data())
@pytest.mark.parametrize("name", AVAILABLE)
def test_topk_compact_keeps_its_guarantee(name: str, data: st.DataObject) -> None:
    ops = select.get_ops(CPU, name)
    few = st.sampled_from([0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 2.0, 1e-40])
    values = torch.tensor(data.draw(st.lists(few, min_size=1, max_size=200)))
    k = data.draw(st.integers(1, values.numel()))
    threshold = data.draw(st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0, 3.0]))
    above = [i for i, v in enumerate(values.tolist()) if abs(v) > threshold]
    ties = [i for i, v in enumerate(values.tolist()) if abs(v) == threshold]
    want = sorted([*above[:k], *ties[: max(0, k - len(above))]])
    guard = Guarded()
    indices, selected = guard.new(k, torch.int32), guard.new(k)
    count = ops.topk_compact(values, threshold, k, indices, selected)
    assert count == len(want)
    assert indices.tolist() == want + [values.numel() - 1] * (k - count)
    assert selected.tolist() == [float(values[i]) for i in want] + [0.0] * (k - count)
    guard.check()


def test_topk_compact_when_the_threshold_is_too_low(other: Ops) -> None:
    """The common case with a sampled threshold: more than k qualify, and one of them equals it."""
    for kind in ("normal", "ties"):
        values = spread(kind, 50000)
        for k in (1, 500, 20000):
            for threshold in (ops_t := other.topk_threshold(values, k), ops_t * 0.9, ops_t * 1.1, 0.0):
                results = []
                for backend in (reference, other):
                    indices, selected = torch.zeros(k, dtype=torch.int32), torch.zeros(k)
                    count = backend.topk_compact(values, threshold, k, indices, selected)
                    results.append({"count": torch.tensor(count), "indices": indices, "selected": selected})
                compare(results[0], results[1], (kind, k, threshold))


def test_topk_sample_is_the_specification(ops: Ops) -> None:
    for count in (1, 100, 2049, 300000):
        values = normal(count)
        for stride in sorted({1, min(7, count), min(100, count), count}):
            sample = values.abs()[stride // 2 :: stride].sort(descending=True).values
            for k in {1, max(1, count // 50), count}:
                rank = max(1, round(k / count * len(sample)))
                assert ops.topk_sample(values, k, stride) == float(sample[rank - 1])


def test_topk_select_works_within_each_segment(ops: Ops) -> None:
    numels, ks = [1, 64, 100, 2049, 30000, 200000, 7], [1, 3, 100, 20, 300, 2000, 2]
    strides = [1, 1, 1, 10, 1, 100, 7]
    starts = [0, 32, 128, 256, 2336, 32384, 232384]
    size, places = 232400, [sum(ks[:i]) for i in range(len(ks))]
    columns = torch.tensor([starts, numels, ks, strides, places])
    for kind in ("normal", "ties", "mostly zero"):
        values, guard = spread(kind, size), Guarded()
        indices, selected = guard.new(sum(ks), torch.int32), guard.new(sum(ks))
        ops.topk_select(values, Segments(*columns), indices, selected)
        guard.check()
        for start, numel, k, stride, place in columns.T.tolist():
            part, want, want_values = values[start : start + numel], torch.zeros(k).int(), torch.zeros(k)
            aim = max(1, k * 97 // 100)
            at = reference.topk_threshold(part, k) if stride == 1 else reference.topk_sample(part, aim, stride)
            reference.topk_compact(part, at, k, want, want_values)
            assert torch.equal(indices[place : place + k], want + start)
            assert torch.equal(selected[place : place + k], want_values)


def test_topk_threshold_with_a_misleading_sample(ops: Ops) -> None:
    """All large values where the sample does not look, then all where it does: the bounds fail, the answer does not."""
    count = 200000
    for at in (slice(1, None, 12), slice(6, None, 12)):
        values = normal(count) * 1e-3
        values[at] = normal(values[at].numel(), 1) + 10
        for k in (10, 2000, 18000, 150000):
            assert ops.topk_threshold(values, k) == float(values.abs().topk(k).values[-1])


def test_accumulate_and_topk_decode(ops: Ops, stores: str) -> None:
    for size, world in ((32, 1), (64, 3), (256, 2)):
        n, blocks = cut([100, 1, 64, 257, 1000], size, world, gap=3)
        flat, guard, used = normal(n), Guarded(), inside(blocks.length, size)
        old = normal(used.numel(), 1) * used
        flat[0], flat[n - 1] = NAN, INF  # between the blocks
        for before in (None, old):
            out, finite = guard.new(used.numel()), flag()
            ops.accumulate(flat, blocks, before, out, 0.3, finite)
            elements = torch.cat([torch.arange(s, s + m) for s, m in zip(blocks.start, blocks.length, strict=True)])
            want = flat[elements] * 0.3 + (0 if before is None else before[used])
            assert torch.equal(out[used], want)
            assert not out[~used].any()
            assert int(finite) == 1
        places = torch.randint(0, used.numel(), (300,), generator=torch.Generator().manual_seed(0))
        places = torch.cat([places, places[:50], torch.tensor([used.numel() - 1])])  # twice the same; padding
        values = normal(len(places), 2) * used[places]
        decoded = guard.new(n, fill=5)
        ops.topk_decode(places.to(torch.int32), values, blocks, decoded, 0.7)
        dense = torch.zeros(used.numel(), dtype=torch.float64).index_add_(0, places, (values * 0.7).double())
        torch.testing.assert_close(decoded[elements], dense[used].float(), rtol=1e-5, atol=1e-6)
        outside = torch.ones(n, dtype=torch.bool)
        outside[elements] = False
        assert bool((decoded[outside] == 5).all())
        guard.check()


@pytest.mark.parametrize("bad", [INF, -INF, NAN], ids=str)
def test_accumulate_finds_inf_and_nan(ops: Ops, bad: float) -> None:
    n, blocks = cut([100, 5, 64], 32)
    for at in [0, 31, 95, 96, 99, 100, 104, 105, n - 1]:
        flat, finite = normal(n), flag()
        flat[at] = bad
        ops.accumulate(flat, blocks, None, torch.zeros(blocks.count * 32), 1.0, finite)
        assert int(finite) == 0, at


@pytest.mark.skipif("numba" not in AVAILABLE, reason=select.available()["numba"])
def test_numba_does_not_follow_a_broken_index() -> None:
    ops, guard = select.get_ops(CPU, "numba"), Guarded()
    n, blocks = cut([100], 32)
    flat = guard.new(n)
    indices = torch.tensor([-1, -(2**31), 2**31 - 1, 4 * 32, 3 * 32 + 4, 5], dtype=torch.int32)
    ops.topk_decode(indices, torch.ones(6), blocks, flat, 1.0)
    guard.check()
    assert flat.nonzero().flatten().tolist() == [5]


# --- casts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_casts(ops: Ops, stores: str, dtype: torch.dtype) -> None:
    top = torch.finfo(dtype).max
    special = [0.0, -0.0, 1e-45, -1e-40, 6e-8, 2.9e-8, 1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8]
    special += [top, -top, 3.4e38, -3.4e38, 65519.0, 65520.0, -65504.1]
    for count in (0, 1, 15, 16, 17, 255, 256, 257, 1000, 100003):
        for gain in (1.0, 0.5):
            flat = normal(count) * 100
            some = torch.tensor(special)[:count]
            flat[: len(some)] = some
            flat[count // 2 : count // 2 + len(some)] = some[: count - count // 2]
            guard, finite, saturated = Guarded(), flag(), torch.full((1,), 5)
            out = guard.new(count, dtype)
            ops.cast_encode(flat, out, gain, finite, saturated)
            v = flat * gain
            assert torch.equal(out, v.clamp(-top, top).to(dtype))
            assert int(saturated) == 5 + int((v.abs() > top).sum())
            assert int(finite) == 1
            back = guard.new(count)
            ops.cast_decode(out, back, 0.3)
            assert torch.equal(back, out.float() * 0.3)
            for world in (1, 2, 3):
                rows = torch.stack([out, out.flip(0), -out][:world])
                received = torch.zeros(world, count + 5, dtype=dtype)[:, 3 : 3 + count].copy_(rows)  # rows apart
                mean = guard.new(count, dtype)
                ops.cast_mean(received, mean)
                total = torch.zeros(count)
                for part in received:
                    total += part.float()
                assert torch.equal(mean, (total * (1 / world)).to(dtype)), (count, world)
            guard.check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_16_bit_value_survives(ops: Ops, dtype: torch.dtype) -> None:
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    flat, again, finite, saturated = torch.zeros(2**16), torch.zeros_like(values), flag(), torch.zeros(1).long()
    ops.cast_decode(values, flat, 1.0)
    assert torch.equal(flat.isnan(), values.isnan())
    ops.cast_encode(flat, again, 1.0, finite, saturated)
    assert int(finite) == 0
    assert int(saturated) == 0
    assert torch.equal(again.isnan(), values.isnan())
    number = ~values.isnan()
    assert torch.equal(again.view(torch.int16)[number], values.view(torch.int16)[number])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bad", [INF, -INF, NAN], ids=str)
def test_casts_keep_and_report_inf_and_nan(ops: Ops, dtype: torch.dtype, bad: float) -> None:
    for count in (1, 16, 300, 512):
        for at in {0, count // 2, count - 1}:
            flat, out, finite, saturated = normal(count), torch.zeros(count, dtype=dtype), flag(), torch.zeros(1).long()
            flat[at] = bad
            ops.cast_encode(flat, out, 1.0, finite, saturated)
            assert int(finite) == 0
            assert int(saturated) == 0
            torch.testing.assert_close(out, flat.to(dtype), rtol=0, atol=0, equal_nan=True)


# --- PowerSGD ---------------------------------------------------------------------------------------------------------


def tabulate(shapes: list[tuple[int, int]], rank: int, size: int, gap: int) -> tuple[int, Matrices, Blocks]:
    """Matrices of these shapes (equal ones next to each other) in one bucket, and its blocks."""
    columns: list[list[int]] = []
    batches: list[tuple[int, int, int, int, int, int, int, int]] = []
    at, work, p, q = gap, 0, 0, 0
    for m, n in shapes:
        r, stride = min(rank, m, n), -(-m * n // size) * size
        columns.append([at, work, m, n, r, p, q])
        if batches and batches[-1][1:3] == (m, n):
            batches[-1] = (batches[-1][0] + 1, *batches[-1][1:])
        else:
            batches.append((1, m, n, r, work, stride, p, q))
        at, work, p, q = at + m * n + gap, work + stride, p + m * r, q + r * n
    total, blocks = cut([m * n for m, n in shapes], size, gap=gap)
    return total, Matrices(*torch.tensor(columns).T.contiguous(), batches=tuple(batches)), blocks


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5, 8, 11, 64])
def test_lowrank(ops: Ops, stores: str, rank: int) -> None:
    size, gain = 256, 1.3
    # The first one is aligned, its rows are not.
    shapes = [(33, 17), (5, 7), (5, 7), *[(64, 64)] * 3, (1, 40), (40, 1), (16, 3), (70, 300), (128, 96)]
    for gap in (0, 3):
        n, matrices, blocks = tabulate(shapes, rank, size, gap)
        last = [int(x[-1]) for x in (matrices.p, matrices.q, matrices.rows, matrices.cols, matrices.rank)]
        p_size, q_size = last[0] + last[2] * last[4], last[1] + last[3] * last[4]
        used = inside(blocks.length, size)
        flat, old, q = normal(n), normal(used.numel(), 1) * used, normal(q_size, 2)
        for before in (old, None):
            guard = Guarded()
            work, p, new_q, out = guard.new(used.numel()), guard.new(p_size), guard.new(q_size), guard.new(n)
            ops.lowrank_project(flat, matrices, blocks, before, work, q, p, gain)
            want = torch.zeros_like(work)
            reference.accumulate(flat, blocks, before, want, gain, flag())
            assert torch.equal(work, want)
            ops.lowrank_backproject(work, matrices, p, new_q)
            ops.lowrank_decode(work, matrices, p, new_q, out, 0.6, before is not None)
            outside = torch.ones(n, dtype=torch.bool)
            for i, (rows, cols) in enumerate(shapes):
                at, place, r, at_p, at_q = (
                    int(x[i]) for x in (matrices.flat, matrices.work, matrices.rank, matrices.p, matrices.q)
                )
                matrix = want[place : place + rows * cols].view(rows, cols).double()
                left = p[at_p : at_p + rows * r].view(rows, r)
                right = new_q[at_q : at_q + r * cols].view(r, cols)
                close(left, matrix, q[at_q : at_q + r * cols].view(r, cols).T)
                close(right, left.T, matrix)
                close(out[at : at + rows * cols].view(rows, cols), left * 0.6, right)
                product = left.double() @ right.double()
                rest = matrix - product if before is not None else matrix
                assert float((work[place : place + rows * cols].view(rows, cols) - rest).abs().max()) <= 1e-5 * max(
                    1.0, float(product.abs().max())
                )
                outside[at : at + rows * cols] = False
            assert not work[~used].any()
            assert bool((out[outside] == 7).all())
            guard.check()


def close(got: Tensor, left: Tensor, right: Tensor) -> None:
    """got = left @ right, within 2e-6 of what the sums would be without cancellation."""
    left, right = left.double(), right.double()
    assert bool(((got - left @ right).abs() <= 2e-6 * (left.abs() @ right.abs())).all())


@pytest.mark.parametrize("bad", [INF, NAN], ids=str)
def test_lowrank_shows_inf_and_nan_in_p(ops: Ops, bad: float) -> None:
    shapes = [(8, 37), (6, 5)]
    n, matrices, blocks = tabulate(shapes, 4, 64, 0)
    for at in (0, 8 * 37 - 1, 8 * 37, n - 1):
        flat, work, p = normal(n), torch.zeros(blocks.count * 64), torch.zeros(8 * 4 + 6 * 4)
        flat[at] = bad
        ops.lowrank_project(flat, matrices, blocks, None, work, normal(37 * 4 + 5 * 4), p, 1.0)
        first, second = p[: 8 * 4].isfinite().all(), p[8 * 4 :].isfinite().all()
        assert (bool(first), bool(second)) == ((False, True) if at < 8 * 37 else (True, False))


# --- other machines ---------------------------------------------------------------------------------------------------


def smoke(backend: str = "numba") -> None:
    """One case of every op, compared with the reference; run by the tests below on other instruction sets."""
    ops = select.get_ops(CPU, backend)
    n, blocks = cut([300, 64, 5], 64, 2, gap=1)
    for bits in BITS:
        for seed in (None, 3) if bits > 1 else (None,):
            compare(*(round_trip(x, normal(n), blocks, bits, seed=seed) for x in (reference, ops)), (bits, seed))
    for dtype in (torch.float16, torch.bfloat16):
        results = []
        for x in (reference, ops):
            out, back, mean = torch.zeros(300, dtype=dtype), torch.zeros(300), torch.zeros(100, dtype=dtype)
            saturated = torch.zeros(1).long()
            x.cast_encode(normal(300) * 1e5, out, 1.0, flag(), saturated)
            x.cast_decode(out, back, 1.0)
            x.cast_mean(out.view(3, 100), mean)
            results.append({"bits": out.view(torch.int16), "back": back, "mean": mean.float(), "saturated": saturated})
        compare(results[0], results[1], dtype)
    values = normal(1000)
    assert ops.topk_threshold(values, 100) == reference.topk_threshold(values, 100)
    shape = [(33, 37), (20, 64)]
    n, matrices, blocks = tabulate(shape, 4, 64, 1)
    results = []
    for x in (reference, ops):
        work, p, q, out = torch.zeros(blocks.count * 64), torch.zeros(53 * 4), normal(101 * 4), torch.zeros(n)
        x.lowrank_project(normal(n), matrices, blocks, None, work, q, p, 1.0)
        x.lowrank_backproject(work, matrices, p, q)
        x.lowrank_decode(work, matrices, p, q, out, 1.0, True)
        indices, selected = torch.zeros(10, dtype=torch.int32), torch.zeros(10)
        x.topk_compact(values, 2.0, 10, indices, selected)
        sparse = torch.zeros(n)
        x.topk_decode(indices, selected, blocks, sparse, 1.0)
        results.append({"work": work, "p": p, "q": q, "out": out, "indices": indices, "sparse": sparse})
    compare(results[0], results[1], "lowrank and topk")


@pytest.mark.skipif("numba" not in AVAILABLE, reason=select.available()["numba"])
@pytest.mark.parametrize("processor", ["haswell", "generic"])  # AVX2; the plain instruction set, without F16C
def test_numba_without_avx512(processor: str) -> None:
    root = Path(__file__).parents[1]
    features = {"haswell": "+avx2,+fma,+f16c", "generic": ""}[processor]
    environment = {**os.environ, "NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": features}
    environment["PYTHONPATH"] = os.pathsep.join([str(root), str(root / "tests")])
    code = "import test_kernels; test_kernels.smoke()"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, cwd="/", timeout=100)


# --- selection --------------------------------------------------------------------------------------------------------


def test_backends_are_chosen_by_name_and_device() -> None:
    assert select.get_ops(CPU, "torch") is reference
    gpu = torch.device("cuda", 0)
    assert select.get_ops(gpu, "torch") is reference
    assert select.backend_name(torch.device("meta")) == "torch"
    assert select.backend_name(CPU) == ("numba" if "numba" in AVAILABLE else "torch")
    assert set(select.available()) == set(select.BACKENDS) - {"auto"}
    with pytest.raises(ValueError, match="backend='fortran': allowed are auto, torch, numba, cuda"):
        select.get_ops(CPU, "fortran")
    with pytest.raises(UnsupportedError, match="serves CPU tensors, not cuda:0"):
        select.get_ops(gpu, "numba")
    with pytest.raises(UnsupportedError, match="serves CUDA tensors, not cpu"):
        select.get_ops(CPU, "cuda")


@pytest.mark.parametrize("version", ["12.9", "13.0", None])
def test_without_cupy(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    select._load_cuda.cache_clear()
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(torch.version, "cuda", version)
    gpu, extra = torch.device("cuda", 0), "cuda12" if version == "12.9" else "cuda13"
    try:
        assert select.get_ops(gpu) is reference
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        assert f"pip install 'gradcomp[{extra}]'" in select.available()["cuda"]
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        reason = "torch was built without CUDA" if version is None else "torch sees no CUDA device"
        assert select.available()["cuda"] == reason
        with pytest.raises(UnsupportedError, match=rf"'cuda' cannot be used: .*pip install 'gradcomp\[{extra}\]'"):
            select.get_ops(gpu, "cuda")
    finally:
        select._load_cuda.cache_clear()


def test_with_cupy_cuda_tensors_get_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    select._load_cuda.cache_clear()
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(gradcomp.kernels.cuda, "missing", lambda: None)
    try:
        assert select.backend_name(gpu) == select.backend_name(gpu, "cuda") == "cuda"
        assert select.get_ops(gpu, "torch") is reference
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        assert select.available()["cuda"] == "available"
    finally:
        select._load_cuda.cache_clear()


def test_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    select._load_numba.cache_clear()
    monkeypatch.delattr(gradcomp.kernels, "cpu", raising=False)
    monkeypatch.setitem(sys.modules, "gradcomp.kernels.cpu", None)
    try:
        assert select.backend_name(CPU) == "torch"
        assert "pip install 'gradcomp[cpu]'" in select.available()["numba"]
        with pytest.raises(UnsupportedError, match=r"pip install 'gradcomp\[cpu\]'"):
            select.get_ops(CPU, "numba")
    finally:
        select._load_numba.cache_clear()


def test_backends_have_every_op_with_the_same_arguments(ops: Ops) -> None:
    assert isinstance(ops, ModuleType)
    names = [name for name in vars(Ops) if not name.startswith("_")]
    assert "block_encode" in names
    for name in names:
        ours, theirs = getattr(ops, name).__code__, getattr(reference, name).__code__
        assert ours.co_varnames[: ours.co_argcount] == theirs.co_varnames[: theirs.co_argcount], name
