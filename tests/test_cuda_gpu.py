"""The CUDA backend on a GPU: the contract tests, streams, threads, graph capture, no waiting, NCCL, compute-sanitizer.

Skipped, with the reason, where there is no device. ``python benchmarks/gpu_check.py`` runs them and then times the kernels.
"""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from cuda_device import on_device
from cuda_scenarios import SCENARIOS
from test_kernels import (  # noqa: F401  the tests run here again, with the fixtures below
    compare,
    cut,
    flag,
    lay_out,
    normal,
    test_a_fused_multiply_add_would_show,
    test_accumulate_and_topk_decode,
    test_accumulate_finds_inf_and_nan,
    test_blocks_match_the_reference,
    test_casts,
    test_casts_keep_and_report_inf_and_nan,
    test_every_16_bit_value_survives,
    test_extreme_values,
    test_inf_and_nan_are_found_wherever_they_are,
    test_large_blocks_match_the_reference,
    test_lowrank,
    test_lowrank_shows_inf_and_nan_in_p,
    test_server_finds_a_scale_that_is_not_finite,
    test_server_is_the_specification,
    test_stochastic_rounding_is_unbiased_and_deterministic,
    test_topk_compact_when_the_threshold_is_too_low,
    test_topk_matches_a_stable_sort,
    test_topk_sample_is_the_specification,
    test_topk_select_works_within_each_segment,
    test_topk_threshold_with_a_misleading_sample,
    test_unused_places_are_left_alone,
)
from torch import Tensor

import gradcomp
from gradcomp.kernels import reference, select
from gradcomp.kernels.ops import Ops, Segments

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parent.parent


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(params=["cuda", "torch"])
def ops(request: pytest.FixtureRequest) -> Any:
    """The own kernels, and the reference that serves CUDA tensors without CuPy."""
    return on_device(select.get_ops(device(), request.param), device())


@pytest.fixture
def other(ops: Any) -> Any:
    return ops


@pytest.fixture
def stores() -> str:
    return "one way"


@pytest.fixture
def own() -> Ops:
    return select.get_ops(device(), "cuda")


class Work:
    """A bucket on the device, and one step of every op that does not return a number."""

    def __init__(self, n: int = 300_003) -> None:
        at = device()
        n, here = cut([n, 64, 5], 256, 1, gap=1)
        layout = lay_out(here, 8)
        self.blocks = type(here)(
            here.size, here.world, here.per_shard,
            *(getattr(here, x).to(at) for x in ("start", "length", "position", "owned", "number", "owned_number")),
        )  # fmt: skip
        self.layout, self.flat = layout, normal(n).to(at)
        space = here.count * 256
        self.old, self.new, self.values = (torch.zeros(space, device=at) for _ in range(3))
        self.payload = torch.zeros(layout.nbytes, dtype=torch.uint8, device=at)
        self.mine = torch.zeros_like(self.payload)
        self.finite, self.saturated = flag().to(at), torch.zeros(1, dtype=torch.int64, device=at)
        self.out, self.half = torch.zeros(n, device=at), torch.zeros(n, dtype=torch.float16, device=at)
        columns = [[0], [here.count * 256 - 256], [1000], [3], [0]]
        self.segments = Segments(*torch.tensor(columns, device=at))
        self.indices, self.selected = torch.zeros(1000, dtype=torch.int32, device=at), torch.zeros(1000, device=at)

    def step(self, ops: Ops) -> None:
        b, lay = self.blocks, self.layout
        for bits in (1, 4, 8):
            ops.block_encode(self.flat, b, lay, self.payload, bits, self.old, self.new, 1.0, None, self.finite)
            ops.block_server(self.payload, b, lay, self.mine, bits, None, None, 3, self.finite)
            ops.block_decode(self.mine, b, lay, self.out, bits, 1.0)
        ops.accumulate(self.flat, b, self.old, self.values, 1.0, self.finite)
        ops.topk_select(self.values, self.segments, self.indices, self.selected)
        ops.topk_decode(self.indices, self.selected, b, self.out, 1.0)
        ops.cast_encode(self.flat, self.half, 1.0, self.finite, self.saturated)

    def results(self) -> dict[str, Tensor]:
        names = ("new", "payload", "mine", "out", "indices", "selected", "finite")
        found = {name: getattr(self, name).cpu().clone() for name in names}
        return {**found, "half": self.half.view(torch.int16).cpu()}


def test_a_side_stream_is_followed(own: Ops) -> None:
    want, work = Work(), Work()
    want.step(own)
    source, stream = work.flat.clone(), torch.cuda.Stream()
    work.flat.zero_()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # launches on another stream would overtake this and see zeros
        work.flat.copy_(source)
        work.step(own)
    torch.cuda.current_stream().wait_stream(stream)
    for key, value in want.results().items():
        assert torch.equal(value, work.results()[key]), key


def test_threads_and_streams_at_once(own: Ops) -> None:
    want = Work()
    want.step(own)
    works, errors = [Work() for _ in range(4)], []

    def run(work: Work) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(20):
                    work.step(own)
                torch.cuda.current_stream().synchronize()
        except Exception as error:
            errors.append(error)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for work in works:
        for key, value in want.results().items():
            assert torch.equal(value, work.results()[key]), key


def test_nothing_waits_and_nothing_is_allocated(own: Ops) -> None:
    work = Work()
    work.step(own)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(200_000_000)  # a tenth of a second or so
        end = torch.cuda.Event()
        work.step(own)
        end.record()
        assert not end.query(), "the host waited for the device"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_graph_capture(own: Ops) -> None:
    work, want = Work(), Work()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work.step(own)  # compiles, loads, allocates
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work.step(own)
    for factor in (1.0, -2.0):
        work.flat.copy_(normal(work.flat.numel(), 9).to(work.flat.device) * factor)
        want.flat.copy_(work.flat)
        graph.replay()
        want.step(own)
        for key, value in want.results().items():
            assert torch.equal(value, work.results()[key]), key


def test_large_buckets_match_the_reference(own: Ops) -> None:
    work, want = Work(40_000_001), Work(40_000_001)
    work.step(own)
    want.step(reference)
    compare({k: v for k, v in want.results().items() if k != "mine"}, work.results(), "40 M elements")


def test_another_device_than_the_current_one(own: Ops) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    with torch.cuda.device(1):
        work = Work()
    with torch.cuda.device(0):
        work.step(own)
    want = Work()
    want.step(own)
    for key, value in want.results().items():
        assert torch.equal(value, work.results()[key]), key


def _rank(rank: int, world: int, path: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{path}", rank=rank, world_size=world)
    try:
        for spec in ("onebit", "int8", "int4", "topk", "fp16", "powersgd"):
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)).cuda()
            ddp = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank])
            handle = gradcomp.register(ddp, spec)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
            generator = torch.Generator().manual_seed(rank)
            x = torch.randn(128, 64, generator=generator).cuda()
            y = x[:, :8].sin()
            losses = []
            for _ in range(40):
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(ddp(x), y)
                loss.backward()
                optimizer.step()
                losses.append(float(loss))
            handle.close()
            assert losses[-1] < 0.8 * losses[0], (spec, losses[0], losses[-1])
            total = torch.cat([p.detach().flatten() for p in model.parameters()])
            everyone = [torch.zeros_like(total) for _ in range(world)]
            dist.all_gather(everyone, total)
            assert all(torch.equal(total, one) for one in everyone), spec
    finally:
        dist.destroy_process_group()


@pytest.mark.timeout(120)
def test_training_on_nccl(tmp_path: Path) -> None:
    if not dist.is_nccl_available():
        pytest.skip("torch was built without NCCL")
    world = min(2, torch.cuda.device_count())
    mp.spawn(_rank, (world, str(tmp_path / "rendezvous")), nprocs=world)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_compute_sanitizer(tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, __file__]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, cwd="/", timeout=190)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]


if __name__ == "__main__":  # under compute-sanitizer
    for scenario in SCENARIOS.values():
        scenario(on_device(select.get_ops(device(), "cuda"), device()))
