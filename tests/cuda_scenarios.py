"""One small run of every CUDA source on the CPU that reaches each of its kernels, paths and bounds, against the reference.

The runs are small because they are repeated: for every order of threads, for every mutant of a kernel, and under
ThreadSanitizer. Each takes the backend that runs on CPU tensors and raises where a result or a canary is wrong.
"""

from collections.abc import Callable
from typing import Any

import torch
from test_kernels import Guarded, compare, cut, equal, flag, inside, lay_out, normal, tabulate
from torch import Tensor

from gradcomp.kernels import reference
from gradcomp.kernels.ops import Blocks, Ops, Segments

# Sizes for each group of threads (codes.cuh), lengths that end inside a quad and a pair, and more blocks than one grid.
SHAPES = ((32, [1, 31, 70]), (128, [129, 3]), (256, [2303, 5]), (512, [1030]), (1024, [2100]), (96, [200, 5]))


def _each_format(ops: Ops, check: Callable[[int, Blocks, int, int | None, Tensor], None]) -> None:
    for size, lengths in SHAPES:
        n, blocks = cut(lengths, size, 2, gap=3)
        for bits in (1, 4, 8):
            for seed in (None, 5) if bits > 1 else (None,):
                check(n, blocks, bits, seed, normal(n, size))
    n, blocks = cut([2700], 864, 2)  # more pairs than lanes, and more than a second round of them
    for bits in (1, 4, 8):
        check(n, blocks, bits, None, normal(n))


def block_encode(ops: Ops) -> None:
    def check(n: int, blocks: Blocks, bits: int, seed: int | None, flat: Tensor) -> None:
        for scale in (1.0, 3e37):  # the second: sums overflow, nothing is infinite
            results = []
            for backend in (reference, ops):
                guard, layout, used = Guarded(), lay_out(blocks, bits), inside(blocks.length, blocks.size)
                payload = guard.new(2 * layout.nbytes, torch.uint8)
                old, new = normal(used.numel(), 3) * used * scale, guard.new(used.numel())
                v = (flat * scale).clamp(-3.4e38, 3.4e38)
                backend.block_encode(v, blocks, layout, payload, bits, old, new, 0.7, seed, flag())
                guard.check()
                results.append({"payload": payload[: 0 if bits == 1 else None], "residual": new})
                codes = payload.view(2, -1)[:, layout.codes :].clone()
                results[-1]["codes"] = codes
            slack = 1e-5 * scale
            for key, value in results[0].items():
                if key == "payload":  # scales of equal codes agree to the bit but for sums
                    assert torch.equal(value, results[1][key])
                equal(value, results[1][key], f"{key} {blocks.size} {bits} {seed}", slack)
        broken, finite = flat.clone(), flag()
        broken[3 + int(blocks.length[0]) - 1 if blocks.start[0] else 0] = float("nan")
        layout = lay_out(blocks, bits)
        ops.block_encode(
            broken, blocks, layout, torch.zeros(2 * layout.nbytes, dtype=torch.uint8), bits, None, None, 1, seed, finite
        )
        assert int(finite) == 0

    _each_format(ops, check)


def block_server(ops: Ops) -> None:
    def check(n: int, blocks: Blocks, bits: int, seed: int | None, flat: Tensor) -> None:
        results = []
        layout, used = lay_out(blocks, bits), inside(blocks.owned, blocks.size)
        payload = torch.full((2 * layout.nbytes,), 9, dtype=torch.uint8)
        reference.block_encode(flat, blocks, layout, payload, bits, None, None, 1.0, seed, flag())
        dirty = payload.view(2, -1)  # codes past a block's length may be anything
        dirty[:, layout.codes :] |= 3
        for backend in (reference, ops):
            guard, finite = Guarded(), flag()
            out, new = guard.new(layout.nbytes, torch.uint8), guard.new(used.numel())
            backend.block_server(payload, blocks, layout, out, bits, normal(used.numel()) * used, new, seed, finite)
            guard.check()
            results.append({"codes": out[layout.codes :], "residual": new, "finite": finite})
        compare(results[0], results[1], (blocks.size, bits, seed))

    _each_format(ops, check)


def block_decode(ops: Ops) -> None:
    def check(n: int, blocks: Blocks, bits: int, seed: int | None, flat: Tensor) -> None:
        layout = lay_out(blocks, bits)
        payload = torch.zeros(2 * layout.nbytes, dtype=torch.uint8)
        reference.block_encode(flat, blocks, layout, payload, bits, None, None, 1.0, seed, flag())
        results = []
        for backend in (reference, ops):
            guard = Guarded()
            out = guard.new(n)
            backend.block_decode(payload, blocks, layout, out, bits, 0.7)
            guard.check()
            results.append({"flat": out})
        compare(results[0], results[1], (blocks.size, bits))

    _each_format(ops, check)


def accumulate(ops: Ops) -> None:
    for gap in (0, 3):
        for size, lengths in SHAPES:
            n, blocks = cut(lengths, size, 1, gap=gap)
            used = inside(blocks.length, size)
            for old in (None, normal(used.numel(), 1)):
                results = []
                for backend in (reference, ops):
                    guard, finite = Guarded(), flag()
                    out = guard.new(used.numel())
                    flat = torch.cat((normal(n), torch.full((4,), float("nan"))))[:n]
                    backend.accumulate(flat, blocks, old, out, 0.3, finite)
                    guard.check()
                    results.append({"out": out, "finite": finite})
                compare(results[0], results[1], (size, gap))


def topk(ops: Ops) -> None:
    """Both topk_threshold and topk_compact."""
    numels, ks = [1, 64, 100, 23680, 16384, 7], [1, 3, 100, 1200, 300, 2]
    strides, starts = [1, 1, 1, 1, 3, 7], [0, 32, 128, 256, 25000, 41504]
    places = [sum(ks[:i]) for i in range(len(ks))]
    longer = [*numels[:3], numels[3] + 600, *numels[4:]]
    for values in (normal(41511), (normal(41511) * 2).round(), normal(41511).clamp(min=2.0) - 2.0):
        results = []
        for backend in (reference, ops):
            guard = Guarded()
            indices, selected = guard.new(sum(ks), torch.int32), guard.new(sum(ks))
            for some in (longer, numels):  # the second time finds what the first left in scratch memory
                table = Segments(*torch.tensor([starts, some, ks, strides, places]))
                backend.topk_select(values, table, indices, selected)
            guard.check()
            results.append({"indices": indices, "selected": selected})
        compare(results[0], results[1], "select")
    many = torch.arange(270)  # more segments than threads that plan
    ones = torch.ones_like(many)
    table = Segments(many * 32, ones * 5, ones * 2, ones, many * 2)
    values, results = normal(270 * 32), []
    for backend in (reference, ops):
        indices, selected = torch.zeros(540, dtype=torch.int32), torch.zeros(540)
        backend.topk_select(values, table, indices, selected)
        results.append({"indices": indices, "selected": selected})
    compare(results[0], results[1], "many segments")
    for threshold in (0.0, 1.0, 9.0):
        for k in (1, 400, 17000) if threshold == 0 else (400,):
            results = []
            for backend in (reference, ops):
                guard = Guarded()
                indices, selected = guard.new(k, torch.int32), guard.new(k)
                count = backend.topk_compact(normal(17003), threshold, k, indices, selected)
                guard.check()
                results.append({"count": torch.tensor(count), "indices": indices, "selected": selected})
            compare(results[0], results[1], (threshold, k))


def topk_decode(ops: Ops) -> None:
    for size, world in ((32, 1), (64, 3), (96, 2)):
        n, blocks = cut([100, 1, 64, 257, 1000], size, world, gap=3)
        used = inside(blocks.length, size)
        k = 300
        order = [torch.randperm(used.numel(), generator=torch.Generator().manual_seed(w))[:k] for w in range(world)]
        indices = torch.cat([x.sort().values for x in order]).to(torch.int32)
        values = normal(world * k) * used[indices.long()]
        results = []
        for backend in (reference, ops):
            guard = Guarded()
            flat = guard.new(n)
            backend.topk_decode(indices, values, blocks, flat, 0.7)
            guard.check()
            results.append(flat)
        assert torch.equal(results[0], results[1])
        guard = Guarded()
        flat = guard.new(n)
        last = blocks.count * size
        end = last - size + int(blocks.length[-1])  # the first place of the padding
        broken = torch.tensor([-1, -(2**31), 2**31 - 1, last, end, 5], dtype=torch.int32)
        ops.topk_decode(broken.repeat(world), torch.ones(6 * world), blocks, flat, 1.0)
        guard.check()
        assert flat[3 + 5] == world  # 3: the gap in front
        assert bool(((flat == 0) | (flat == 7))[torch.arange(n) != 3 + 5].all())


def cast(ops: Ops) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        for count in (1, 7, 8, 9, 2049, 4100):
            flat = torch.cat((normal(count) * 40000, torch.full((8,), float("nan"))))[:count]
            flat[0] = 3.4e38
            results: list[dict[str, Any]] = []
            for backend in (reference, ops):
                guard, finite, saturated = Guarded(), flag(), torch.full((1,), 5)
                out, back, mean = guard.new(count, dtype), guard.new(count), guard.new(count // 3 or 1, dtype)
                backend.cast_encode(flat, out, 0.5, finite, saturated)
                backend.cast_decode(torch.cat((out[:1], out))[1:], back, 0.3)  # not aligned, ends where it ends
                m = mean.numel()
                backend.cast_mean(out[: (count // m) * m].view(-1, m), mean)
                guard.check()
                results.append({"saturated": saturated, "finite": finite, "back": back})
                results[-1] |= {"out": out.view(torch.int16), "mean": mean.view(torch.int16)}
            compare(results[0], results[1], (dtype, count))


def lowrank_decode(ops: Ops) -> None:
    shapes = [(33, 17), (8, 128), (1, 40), (40, 1), (9, 260), (17, 132), (17, 132), (5, 7), (5, 7)]
    for rank, gap in ((1, 0), (3, 3), (11, 4)):
        n, matrices, blocks = tabulate(shapes, rank, 256, gap)
        p_size = sum(count * m * r for count, m, _, r, *_ in matrices.batches)
        q_size = sum(count * k * r for count, _, k, r, *_ in matrices.batches)
        q = normal(q_size + -q_size % 4, 2)[-q_size % 4 :]  # ends at a multiple of 16 bytes
        for residual in (True, False):
            results = []
            for backend in (reference, ops):
                guard = Guarded()
                work, out = guard.new(blocks.count * 256), guard.new(n)
                work.copy_(normal(work.numel(), 5))
                backend.lowrank_decode(work, matrices, normal(p_size, 1), q, out, 0.6, residual)
                guard.check()
                results.append({"work": work, "flat": out})
            for key in ("work", "flat"):
                torch.testing.assert_close(results[1][key], results[0][key], rtol=1e-5, atol=1e-5)


SCENARIOS: dict[str, Callable[[Ops], None]] = {
    "accumulate": accumulate,
    "block_decode": block_decode,
    "block_encode": block_encode,
    "block_server": block_server,
    "cast": cast,
    "lowrank_decode": lowrank_decode,
    "topk_compact": topk,
    "topk_decode": topk_decode,
    "topk_threshold": topk,
}
"""By source file."""
