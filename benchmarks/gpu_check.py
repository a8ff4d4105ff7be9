"""The CUDA kernels on this machine's GPU: tests, then times as a share of the device's copy rate, and against torch.

    python benchmarks/gpu_check.py                    # under 4 minutes; rows appended to benchmarks/results/gpu.jsonl
    python benchmarks/gpu_check.py --no-tests --millions 25

``of_copy``  bytes that the kernel must move per second / bytes that a device copy of as many fp32 elements moves per second.
``torch``    time of the same result by torch operations, tuned (in place, outputs given), divided by the kernel's time.

Times are medians over CUDA events; caches hold part of a 25 M-element bucket (100 MB), so quote the 256 M rows.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor

from gradcomp.kernels.ops import Blocks, Matrices, Ops, Segments, ShardLayout
from gradcomp.kernels.select import available, get_ops

ROOT = Path(__file__).resolve().parent.parent
WORLD, BLOCK, RANK = 8, 256, 4
GOALS = {"1-bit": 0.8, "int8": 0.8, "int4": 0.8, "fp16": 0.8, "bf16": 0.8, "top-k": 0.6}


@dataclass(frozen=True)
class Case:
    """A kernel: bytes it must move, and the same by torch operations, if there is a fair comparison."""

    name: str
    moved: float
    run: Callable[[], object]
    torch: Callable[[], object] | None = None


def seconds(run: Callable[[], object], budget: float = 0.4) -> float:
    """Median time of one call, after a warm-up that also compiles."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    times: list[float] = []
    while sum(times) < budget and len(times) < 50:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def cut(n: int, device: torch.device) -> Blocks:
    """One parameter of n elements (a multiple of BLOCK * WORLD), blocks dealt out round robin; this is rank 0."""
    count = n // BLOCK
    number = torch.arange(count, dtype=torch.int32, device=device)
    share = count // WORLD
    full = torch.full((count,), BLOCK, dtype=torch.int32, device=device)
    position = number % WORLD * share + number // WORLD
    owned_number = (torch.arange(share, dtype=torch.int32, device=device) * WORLD).to(torch.int32)
    return Blocks(BLOCK, WORLD, share, number.long() * BLOCK, full, position, full[:share], number, owned_number)


def onebit_by_torch(flat: Tensor, residual: Tensor, new: Tensor, packed: Tensor) -> Callable[[], object]:
    """Tuned: the sum in place, signs packed by a product of bits, residual by one addcmul."""
    weight = (2 ** torch.arange(8, device=flat.device)).to(torch.float16)
    rows = new.view(-1, BLOCK)

    def run() -> None:
        torch.add(flat, residual, out=new)
        scale = torch.linalg.vector_norm(rows, 1, dim=1, keepdim=True).div_(BLOCK)
        positive = new >= 0
        packed.copy_((positive.view(-1, 8).to(torch.float16) @ weight).to(torch.uint8))
        rows.sub_(torch.where(positive.view_as(rows), scale, -scale))

    return run


def int8_by_torch(flat: Tensor, codes: Tensor) -> Callable[[], object]:
    rows = flat.view(-1, BLOCK)

    def run() -> None:
        scale = rows.abs().amax(1, keepdim=True)
        codes.copy_((rows * (127 / scale)).round_().view(-1))

    return run


def cases(ops: Ops, n: int, device: torch.device) -> list[Case]:
    """Every op at n elements."""
    blocks = cut(n, device)
    flat, old = torch.randn(n, device=device), torch.randn(n, device=device) * 0.1
    new, out = torch.zeros(n, device=device), torch.zeros(n, device=device)
    finite = torch.ones(1, dtype=torch.int32, device=device)
    saturated = torch.zeros(1, dtype=torch.int64, device=device)
    found: list[Case] = []
    for bits, name in ((1, "1-bit"), (4, "int4"), (8, "int8")):
        codes, scales = blocks.per_shard * BLOCK * bits // 8, blocks.per_shard * 4
        layout = ShardLayout(64 + codes + -(-scales // 16) * 16, 64, 64 + codes)
        payload = torch.zeros(WORLD * layout.nbytes, dtype=torch.uint8, device=device)
        mine = torch.zeros(layout.nbytes, dtype=torch.uint8, device=device)
        wire, own = bits / 8 + 4 / BLOCK, n / WORLD
        one = torch.empty(n // 8 if bits == 1 else n, dtype=torch.uint8 if bits == 1 else torch.int8, device=device)
        against = {1: onebit_by_torch(flat, old, new, one), 8: int8_by_torch(flat, one), 4: None}[bits]

        def encode(
            a: Tensor | None, b: Tensor | None, seed: int | None, bits: int = bits, layout: ShardLayout = layout,
            payload: Tensor = payload,
        ) -> Callable[[], object]:  # fmt: skip
            return lambda: ops.block_encode(flat, blocks, layout, payload, bits, a, b, 1.0, seed, finite)

        feedback = against if bits == 1 else None
        found.append(Case(f"{name} encode, feedback", (12 + wire) * n, encode(old, new, None), feedback))
        plain = against if bits == 8 else None
        found.append(Case(f"{name} encode", (4 + wire) * n, encode(None, None, None), plain))
        if bits > 1:
            found.append(Case(f"{name} encode, stochastic", (4 + wire) * n, encode(None, None, 5)))

        def server(
            bits: int = bits, layout: ShardLayout = layout, payload: Tensor = payload, mine: Tensor = mine
        ) -> None:
            a, b = old[: n // WORLD], new[: n // WORLD]
            ops.block_server(payload, blocks, layout, mine, bits, a, b, None, finite)

        def decode(bits: int = bits, layout: ShardLayout = layout, payload: Tensor = payload) -> None:
            ops.block_decode(payload, blocks, layout, out, bits, 1.0)

        found.append(Case(f"{name} server, {WORLD} ranks", (WORLD * wire + 8 + wire) * own, server))
        found.append(Case(f"{name} decode", (4 + wire) * n, decode))

    k = n // 100
    stride = max(1, k // 1024)
    columns = [[0], [n], [k], [stride], [0]]
    sampled, exact = (Segments(*torch.tensor([*columns[:3], [s], [0]], device=device)) for s in (stride, 1))
    indices, selected = torch.zeros(k, dtype=torch.int32, device=device), torch.zeros(k, device=device)

    def select_by_torch() -> None:
        indices.copy_(flat.abs().topk(k, sorted=False).indices)

    found += [
        Case("accumulate", 12 * n, lambda: ops.accumulate(flat, blocks, old, new, 1.0, finite)),
        Case("top-k 1 %, sampled", 4.5 * n, lambda: ops.topk_select(flat, sampled, indices, selected), select_by_torch),
        Case("top-k 1 %, exact", 16.5 * n, lambda: ops.topk_select(flat, exact, indices, selected), select_by_torch),
        Case("sparse decode 1 %", 4 * n + 72 * k, lambda: ops.topk_decode(indices, selected, blocks, out, 1.0)),
    ]
    for dtype, name in ((torch.float16, "fp16"), (torch.bfloat16, "bf16")):
        half = torch.zeros(n, dtype=dtype, device=device)

        def narrow(half: Tensor = half) -> None:
            ops.cast_encode(flat, half, 1.0, finite, saturated)

        def widen(half: Tensor = half) -> None:
            ops.cast_decode(half, out, 1.0)

        def mean(half: Tensor = half) -> None:
            ops.cast_mean(half.view(WORLD, -1), half[: n // WORLD])

        found.append(Case(f"{name} cast", 6 * n, narrow, lambda half=half: half.copy_(flat)))  # type: ignore[misc]
        found.append(Case(f"{name} uncast", 6 * n, widen, lambda half=half: out.copy_(half)))  # type: ignore[misc]
        found.append(Case(f"{name} mean, {WORLD} ranks", (2 * WORLD + 2) * n / WORLD, mean))

    size = 1024
    many = n // size**2
    p, q = (torch.randn(many * size * RANK, device=device) for _ in range(2))
    index = torch.arange(many, device=device)
    like = torch.ones_like(index)
    place = index * size * size
    matrices = Matrices(
        place, place, like * size, like * size, like * RANK, index * size * RANK, index * size * RANK,
        batches=((many, size, size, RANK, 0, size * size, 0, 0),),
    )  # fmt: skip
    used = many * size * size
    shape = (many, size, size)

    def lowrank_by_torch() -> None:
        target = out[:used].view(shape)
        torch.bmm(p.view(many, size, RANK), q.view(many, RANK, size), out=target)
        new[:used].view(shape).sub_(target)
        target.mul_(1.0)

    if many:
        found += [
            Case("low rank, project", 16 * n, lambda: ops.lowrank_project(flat, matrices, blocks, old, new, q, p, 1.0)),
            Case("low rank, backproject", 4 * used, lambda: ops.lowrank_backproject(new, matrices, p, q)),
            Case(
                "low rank, decode", 12 * used, lambda: ops.lowrank_decode(new, matrices, p, q, out, 1.0, True),
                lowrank_by_torch,
            ),
        ]  # fmt: skip
    return found


def machine() -> dict[str, object]:
    properties = torch.cuda.get_device_properties(0)
    versions = {}
    for name in ("torch", "cupy-cuda12x", "cupy-cuda13x", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gb": round(properties.total_memory / 1e9),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        **versions,
    }


def main() -> int:
    """Run the tests, time the kernels, print and append rows; 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--millions", type=int, nargs="+", default=[25, 256], help="elements of a bucket")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu.jsonl")
    options = parser.parse_args()
    state = available()["cuda"]
    if state != "available":
        print(f"the CUDA backend cannot be used: {state}", file=sys.stderr)
        return 2
    failed = False
    if not options.no_tests:
        # not `python -m pytest`, which would put this folder's `kernels` on sys.path
        start = "import sys; sys.path.pop(0); import pytest; sys.exit(pytest.main())"
        command = [sys.executable, "-c", start, "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests/test_cuda_gpu.py"]
        failed = subprocess.run(command, cwd=ROOT).returncode != 0

    device, about = torch.device("cuda", 0), machine()
    ops = get_ops(device, "cuda")
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("a") as file:
        for millions in options.millions:
            n = millions * 10**6 // (BLOCK * WORLD) * BLOCK * WORLD
            if n * 4 * 8 > torch.cuda.mem_get_info(device)[0]:
                print(f"{millions} M elements do not fit this device")
                continue
            a, b = torch.randn(n, device=device), torch.zeros(n, device=device)
            rate = 8 * n / seconds(lambda a=a, b=b: b.copy_(a))  # type: ignore[misc]
            del a, b
            print(f"\n{n:,} elements; copy {rate / 1e9:.0f} GB/s, {about['gpu']}")
            for case in cases(ops, n, device):
                time = seconds(case.run)
                ratio = seconds(case.torch) / time if case.torch else None
                share = case.moved / time / rate
                goal = next((GOALS[key] for key in GOALS if case.name.startswith(key)), None)
                row = {
                    "date": today, "kernel": case.name, "elements": n, "seconds": time, "of_copy": round(share, 3),
                    "torch": None if ratio is None else round(ratio, 2), "copy_gb_per_s": round(rate / 1e9), **about,
                }  # fmt: skip
                file.write(json.dumps(row) + "\n")
                below = "" if goal is None or share >= goal else f"   below {goal:.0%}"
                against = "" if ratio is None else f"   torch {ratio:.1f}x"
                print(f"{case.name:<28} {time * 1e6:10.1f} us  {share:6.1%} of copy{against}{below}", flush=True)
            torch.cuda.empty_cache()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
