"""CPU kernels against a memory copy and against torch operations: one thread, thread CPU time.

    python benchmarks/kernels.py                     # 25 M elements, about 3 minutes
    python benchmarks/kernels.py --quick             # 1 M elements, a few repetitions: does it run?
    python benchmarks/kernels.py --out FILE          # also append the rows as JSON lines

Every repetition is paired with a copy of as many fp32 elements in the same process, so that a busy machine slows both.

``of copy``  bytes that the kernel must move per second / bytes that the copy moves per second. Must move: each input and
output once, although a processor reads an output's cache line before it writes it, which the copy suffers as well.
``copies``   time of a whole PowerSGD step / time to copy the same matrices.
``torch``    the same result by torch operations (tuned ones: in place where that is possible, packing by multiplication),
divided by the kernel's time. ``default``: as users have it, where every large temporary costs page faults.
``tuned``: in a process whose malloc keeps its memory, so that only arithmetic and memory traffic count.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import schema
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from gradcomp.kernels.ops import Blocks, Matrices, Ops, ShardLayout
from gradcomp.kernels.select import get_ops

WORLD = 2
LARGE = 10_000_000
"""Elements from which on whole models are measured in PowerSGD's steps."""
TUNED = {
    "MALLOC_TOP_PAD_": str(1 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
}


def resnet50() -> list[tuple[int, int]]:
    """Its convolutions and its head as matrices, equal ones next to each other as in the library."""
    shapes, before = [(64, 147), (1000, 2048)], 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += [(width, before), (width, 9 * width), (4 * width, width)]
            shapes += [(4 * width, before)] * (block == 0)
            before = 4 * width
    return sorted(shapes)


TRANSFORMER = [*[(768, 768)] * 24, *[(3072, 768)] * 6, *[(768, 3072)] * 6]


@dataclass
class Case:
    """One row: what is run, what it must move, and the same by torch operations."""

    name: str
    config: dict[str, Any]
    run: Callable[[], object]
    moved: float
    target: float | None = None
    torch_ops: Callable[[], object] | None = None
    copy_of: int | None = None
    """For PowerSGD: number of elements whose copy is the unit; ``target`` is then the most copies."""


# --- inputs -----------------------------------------------------------------------------------------------------------


def cut(n: int, size: int) -> Blocks:
    """Blocks of one parameter of n elements, a multiple of size * WORLD; owners round robin."""
    count = n // size
    number = torch.arange(count, dtype=torch.int32)
    length = torch.full((count,), size, dtype=torch.int32)
    position = number % WORLD * (count // WORLD) + number // WORLD
    shard = slice(0, count, WORLD)
    start = number.long() * size
    return Blocks(
        size, WORLD, count // WORLD, start, length, position, length[shard].clone(), number, number[shard].clone()
    )


def lay_out(blocks: Blocks, bits: int) -> ShardLayout:
    codes = -(-blocks.per_shard * blocks.size * bits // 128) * 16
    return ShardLayout(codes + -(-4 * blocks.per_shard // 16) * 16, 0, codes)


def tabulate(shapes: list[tuple[int, int]], rank: int, size: int) -> tuple[Matrices, Blocks, list[int]]:
    """The kernels' tables for these matrices; and the sizes of the bucket, block space, P and Q."""
    columns, batches, start, length = [], [], [], []
    at = work = p = q = 0
    for m, n in shapes:
        r, stride = min(rank, m, n), -(-m * n // size) * size
        columns.append((at, work, m, n, r, p, q))
        if batches and batches[-1][1:3] == (m, n):
            batches[-1] = (batches[-1][0] + 1, *batches[-1][1:])
        else:
            batches.append((1, m, n, r, work, stride, p, q))
        start += range(at, at + m * n, size)
        length += [min(size, m * n - i) for i in range(0, m * n, size)]
        at, work, p, q = at + m * n, work + stride, p + m * r, q + r * n
    number = torch.arange(len(start), dtype=torch.int32)
    lengths = torch.tensor(length, dtype=torch.int32)
    blocks = Blocks(size, 1, len(start), torch.tensor(start), lengths, number, lengths, number, number)
    return Matrices(*torch.tensor(columns).T.contiguous(), batches=tuple(batches)), blocks, [at, work, p, q]


# --- the same by torch operations -------------------------------------------------------------------------------------


def torch_onebit(flat: Tensor, residual: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Tuned: in place, and 8 bytes of 0 or 1 become the bits of one byte by one multiplication."""
    v = residual.add_(flat)
    scale = v.view(-1, size).abs().mean(1)
    positive = v.ge(0)
    bits = (positive.view(torch.int64) * 0x0102040810204080 >> 56).to(torch.uint8)
    v.view(-1, size).sub_(torch.where(positive.view(-1, size), scale[:, None], -scale[:, None]))
    return bits, scale


def torch_onebit_decode(bits: Tensor, scale: Tensor, table: Tensor, out: Tensor, size: int) -> None:
    torch.mul(table[bits.int()].view(-1, size), scale[:, None], out=out.view(-1, size))


def torch_integer(flat: Tensor, size: int, bits: int) -> tuple[Tensor, Tensor]:
    top = 127.0 if bits == 8 else 7.0
    v = flat.view(-1, size)
    peak = v.abs().amax(1)
    code = (v * (top / peak)[:, None]).round_().to(torch.int8)
    if bits == 4:
        code = (code[:, : size // 2] & 15) | code[:, size // 2 :] << 4
    return code, peak / top


def torch_threshold_select(flat: Tensor, k: int, stride: int) -> tuple[Tensor, Tensor]:
    sample = flat[stride // 2 :: stride].abs()
    threshold = sample.topk(max(1, round(k / flat.numel() * sample.numel()))).values[-1]
    index = flat.abs().ge(threshold).nonzero().flatten()[:k]
    return index.int(), flat[index]


def torch_powersgd(grads: list[Tensor], errors: list[Tensor], qs: list[Tensor]) -> None:
    for grad, error, q in zip(grads, errors, qs, strict=True):
        matrix = error.add_(grad)
        p = torch.linalg.qr(matrix @ q)[0]
        out = p @ (matrix.T @ p).T
        error.sub_(out)


# --- cases ------------------------------------------------------------------------------------------------------------


def block_cases(ops: Ops, n: int, gen: torch.Generator) -> Iterator[Case]:
    data = [torch.randn(n, generator=gen) for _ in range(2)]
    for bits, size in ((1, 256), (1, 1024), (1, 2048), (8, 256), (4, 256)):
        yield from one_block_size(ops, bits, size, *data)


def one_block_size(ops: Ops, bits: int, size: int, flat: Tensor, old: Tensor) -> Iterator[Case]:
    n = flat.numel()
    blocks = cut(n, size)
    layout, own = lay_out(blocks, bits), blocks.per_shard * size
    payload, shard = torch.zeros(WORLD * layout.nbytes, dtype=torch.uint8), torch.zeros(layout.nbytes).byte()
    new, out, finite = torch.zeros(n), torch.zeros(n), torch.ones(1, dtype=torch.int32)
    code = bits / 8 + 4 / size
    name, config = "1-bit" if bits == 1 else f"int{bits}", {"bits": bits, "block": size}

    def encode(feedback: bool, seed: int | None = None) -> None:
        before, after = (old, new) if feedback else (None, None)
        ops.block_encode(flat, blocks, layout, payload, bits, before, after, 1.0, seed, finite)

    def serve() -> None:
        ops.block_server(payload, blocks, layout, shard, bits, old[:own], new[:own], None, finite)

    def decode() -> None:
        ops.block_decode(payload, blocks, layout, out, bits, 1.0)

    compared = size == 256  # torch operations do not care about the block size
    if bits == 1:
        ours = (lambda: torch_onebit(flat, old, size)) if compared else None
        yield Case("1-bit encode, error feedback", config, lambda: encode(True), n * (12 + code), 1.0, ours)
    else:
        target = {8: 0.6, 4: 0.5}[bits]
        ours = lambda: torch_integer(flat, size, bits)  # noqa: E731
        yield Case(f"{name} encode", config, lambda: encode(False), n * (4 + code), target, ours)
        yield Case(f"{name} encode, stochastic", config, lambda: encode(False, 1), n * (4 + code))
        yield Case(f"{name} encode, error feedback", config, lambda: encode(True), n * (12 + code))
    encode(False)
    yield Case(f"{name} server stage, {WORLD} ranks", config, serve, n * code + own * (8 + code))
    table = (torch.arange(256)[:, None] >> torch.arange(8) & 1) * 2.0 - 1.0
    packed, scale = torch_onebit(flat, old.clone(), size)
    ours = (lambda: torch_onebit_decode(packed, scale, table, out, size)) if compared and bits == 1 else None
    yield Case(f"{name} decode", config, decode, n * (4 + code), 0.6 if bits == 1 else None, ours)


def topk_cases(ops: Ops, n: int, gen: torch.Generator) -> Iterator[Case]:
    flat, old, values = torch.randn(n, generator=gen), torch.randn(n, generator=gen), torch.zeros(n)
    blocks, finite = cut(n, 256), torch.ones(1, dtype=torch.int32)

    def accumulate() -> None:
        ops.accumulate(flat, blocks, old, values, 1.0, finite)

    yield Case("Top-K accumulate", {}, accumulate, 12 * n, None, lambda: torch.add(flat, old, out=values))
    for ratio in (0.01, 0.001):
        yield from one_ratio(ops, flat, values, blocks, ratio)


def one_ratio(ops: Ops, flat: Tensor, out: Tensor, blocks: Blocks, ratio: float) -> Iterator[Case]:
    n, stride = flat.numel(), 100
    k = max(1, int(n * ratio))
    indices, selected, config = torch.zeros(k, dtype=torch.int32), torch.zeros(k), {"ratio": ratio}

    def select() -> int:
        return ops.topk_compact(flat, ops.topk_sample(flat, k, stride), k, indices, selected)

    def decode() -> None:
        ops.topk_decode(indices, selected, blocks, out, 1.0)

    same = lambda: torch_threshold_select(flat, k, stride)  # noqa: E731
    yield Case("Top-K sample + compact", {**config, "stride": stride}, select, 4 * n + 8 * k, 0.6, same)
    exact = lambda: torch.topk(flat.abs(), k, sorted=False).values.min()  # noqa: E731
    yield Case("Top-K exact threshold", config, lambda: ops.topk_threshold(flat, k), 4 * n, None, exact)
    select()
    long = indices.long()
    sparse = lambda: out.zero_().index_add_(0, long, selected)  # noqa: E731
    yield Case("Top-K decode", config, decode, 4 * n + 12 * k, None, sparse)


def cast_cases(ops: Ops, n: int, gen: torch.Generator) -> Iterator[Case]:
    flat = torch.randn(n, generator=gen)
    yield from one_type(ops, flat, torch.float16, "fp16")
    yield from one_type(ops, flat, torch.bfloat16, "bf16")


def one_type(ops: Ops, flat: Tensor, dtype: torch.dtype, name: str) -> Iterator[Case]:
    n, out = flat.numel(), torch.zeros_like(flat)
    half, shard = torch.zeros(n, dtype=dtype), torch.zeros(n // 2, dtype=dtype)
    finite, saturated = torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)

    def encode() -> None:
        ops.cast_encode(flat, half, 1.0, finite, saturated)

    yield Case(f"{name} encode", {}, encode, 6 * n, 0.85, lambda: flat.to(dtype))
    yield Case(f"{name} mean, 2 ranks", {}, lambda: ops.cast_mean(half.view(2, -1), shard), 3 * n, 0.85)
    yield Case(f"{name} decode", {}, lambda: ops.cast_decode(half, out, 1.0), 6 * n, 0.85, lambda: half.to(flat.dtype))


def powersgd_cases(ops: Ops, n: int, gen: torch.Generator) -> Iterator[Case]:
    small = n < LARGE
    yield one_model(ops, "ResNet-50", resnet50()[:4] if small else resnet50(), gen)
    yield one_model(ops, "6 x 768 transformer", TRANSFORMER[:1] if small else TRANSFORMER, gen)


def one_model(ops: Ops, model: str, shapes: list[tuple[int, int]], gen: torch.Generator) -> Case:
    matrices, blocks, (size, space, p_size, q_size) = tabulate(shapes, 4, 256)
    flat, out = torch.randn(size, generator=gen), torch.zeros(size)
    old, work = torch.zeros(space), torch.zeros(space)
    p, q, start_q = torch.zeros(p_size), torch.zeros(q_size), torch.randn(q_size, generator=gen)

    def step() -> None:
        ops.lowrank_project(flat, matrices, blocks, old, work, start_q, p, 1.0)
        for count, m, _, r, _, _, at, _ in matrices.batches:
            view = p[at : at + count * m * r].view(count, m, r)
            view.copy_(torch.linalg.qr(view)[0])
        ops.lowrank_backproject(work, matrices, p, q)
        ops.lowrank_decode(work, matrices, p, q, out, 1.0, residual=True)

    offsets = torch.tensor([0, *[m * c for m, c in shapes]]).cumsum(0).tolist()
    grads = [flat[at : at + m * c].view(m, c) for at, (m, c) in zip(offsets, shapes, strict=False)]
    errors = [torch.zeros_like(grad) for grad in grads]
    qs = [torch.randn(c, min(4, m, c), generator=gen) for m, c in shapes]
    config = {"model": model, "rank": 4, "matrices": len(shapes), "elements": size}
    same = lambda: torch_powersgd(grads, errors, qs)  # noqa: E731
    return Case("PowerSGD step", config, step, 28 * size, 5.0, same, copy_of=size)


# --- measuring --------------------------------------------------------------------------------------------------------


def timed(run: Callable[[], object]) -> float:
    """CPU time of this thread in ms: other processes do not count, page faults do."""
    start = time.thread_time()
    run()
    return (time.thread_time() - start) * 1e3


def measure(run: Callable[[], object], copy: Callable[[], object], reps: int) -> tuple[list[float], list[float]]:
    run()
    pairs = [(timed(copy), timed(run)) for _ in range(reps)]
    return [c for c, _ in pairs], [t for _, t in pairs]


def cases(n: int, seed: int, only: str) -> Iterator[Case]:
    ops = get_ops(torch.device("cpu"), "numba")
    for group in (block_cases, topk_cases, cast_cases, powersgd_cases):
        for case in group(ops, n, torch.Generator().manual_seed(seed)):
            if only.lower() in case.name.lower():
                yield case


def torch_times(n: int, seed: int, only: str, reps: int) -> Iterator[list[float]]:
    for case in cases(n, seed, only):
        if case.torch_ops is not None:
            yield measure(case.torch_ops, lambda: None, reps)[1]


def torch_by_allocator(n: int, args: argparse.Namespace, reps: int) -> dict[str, Iterator[list[float]]]:
    """Times of the torch operations of all cases, in a fresh process for each allocator.

    Fresh for the default one as well: a process that has freed large blocks keeps them.
    """
    command = [sys.executable, __file__, "--torch-only", f"--elements={n}", f"--reps={reps}"]
    command += [f"--seed={args.seed}", f"--only={args.only}"]
    plain = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    found = {}
    for allocator, extra in (("default", {}), ("tuned", TUNED)):
        text = subprocess.run(command, env={**plain, **extra}, check=True, stdout=subprocess.PIPE, text=True).stdout
        found[allocator] = iter(json.loads(text))
    return found


def measure_case(
    case: Case, config: dict[str, Any], by_allocator: dict[str, Iterator[list[float]]], source: Tensor, target: Tensor
) -> schema.Row:
    copied = config["elements"] if case.copy_of is None else case.copy_of
    here, there = source[:copied], target[:copied]
    copies, times = measure(case.run, lambda: there.copy_(here), config["reps"])
    pairs = list(zip(copies, times, strict=True))
    measured: dict[str, Any] = {
        "kernel_ms": schema.quantiles(times),
        "copy_ms": schema.quantiles(copies),
        "must_move_bytes": round(case.moved),
        "of_copy": schema.quantiles([case.moved / t / (8 * copied / c) for c, t in pairs]),
    }
    if case.copy_of is not None:
        measured["copies"] = schema.quantiles([t / c for c, t in pairs])
    if case.torch_ops is not None:
        for allocator, results in by_allocator.items():
            slow = schema.quantiles(next(results))
            measured[f"torch_{allocator}_ms"] = slow
            measured[f"torch_{allocator}_ratio"] = float(f"{slow.p50 / measured['kernel_ms'].p50:.3g}")
    config = {"kernel": case.name, "backend": "numba", "threads": 1, **config, **case.config}
    return schema.Row.make("kernels", config=config, seed=config.pop("seed"), measured=measured)


# --- output -----------------------------------------------------------------------------------------------------------


def cells(row: schema.Row, case: Case) -> list[str]:
    met, unit, sign = ("copies", " copies", "<=") if case.copy_of else ("of_copy", "", ">=")
    score = row.measured[met]
    assert isinstance(score, schema.Quantiles)
    passed = case.target is None or (score.p50 <= case.target if case.copy_of else score.p50 >= case.target)
    return [
        case.name + "".join(f", {k} {v}" for k, v in case.config.items() if k not in ("bits", "matrices", "elements")),
        f"{row.number('kernel_ms'):.2f}",
        f"{row.number('copy_ms'):.2f}",
        f"{score.p20:.2f}/{score.p50:.2f}/{score.p80:.2f}{unit}",
        "" if case.target is None else f"{sign} {case.target:g} {'yes' if passed else 'NO'}",
        *(
            f"{row.number(key):.1f}x" if (key := f"torch_{a}_ratio") in row.measured else ""
            for a in ("default", "tuned")
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=25_000_000, help="fp32 elements of the bucket")
    parser.add_argument("--reps", type=int, default=21, help="repetitions per kernel")
    parser.add_argument("--quick", action="store_true", help="1 M elements, 3 repetitions")
    parser.add_argument("--only", default="", help="only rows whose name contains this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="append the rows to this file, as JSON lines")
    parser.add_argument("--torch-only", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    n, reps = (1_000_000, 3) if args.quick else (args.elements, args.reps)
    n = n // (2048 * WORLD) * 2048 * WORLD
    torch.set_num_threads(1)
    few = max(3, reps // 4)
    if args.torch_only:
        print(json.dumps(list(torch_times(n, args.seed, args.only, args.reps))))
        return
    by_allocator = torch_by_allocator(n, args, few)
    largest = max(n, sum(m * c for m, c in TRANSFORMER)) if n >= LARGE else max(n, 768 * 768)
    source, target = torch.randn(largest), torch.zeros(largest)
    headings = ["kernel", "ms", "copy ms", "of copy p20/p50/p80", "target", "torch default", "torch tuned"]
    table = Table(*headings, title=f"{schema.machine().cpu}, 1 thread, {n:,} elements")
    rows = []
    for case in cases(n, args.seed, args.only):
        config = {"elements": n, "reps": reps, "seed": args.seed}
        rows.append(measure_case(case, config, by_allocator, source, target))
        table.add_row(*cells(rows[-1], case))
        print("  ".join(cells(rows[-1], case)), file=sys.stderr, flush=True)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    if args.out is not None:
        schema.append(args.out, rows)


if __name__ == "__main__":
    main()
