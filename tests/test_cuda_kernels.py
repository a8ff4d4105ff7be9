"""The CUDA kernels on the CPU: the contract tests of every backend, every order of threads, and mutants that must be found.

The sources run as fibers (cudacpu.py), one launch at a time, driven by the backend's own Python code.
"""

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import cuda_mutants
import numpy as np
import pytest
import torch
from cuda_device import on_device
from cuda_scenarios import SCENARIOS
from cudacpu import COMPILER, ORDERS, STEMS, CpuDriver, KernelError, Library, library, on_cpu
from test_kernels import (  # noqa: F401  they run here again, with the fixtures below
    compare,
    cut,
    normal,
    round_trip,
    test_a_fused_multiply_add_would_show,
    test_accumulate_and_topk_decode,
    test_accumulate_finds_inf_and_nan,
    test_backends_have_every_op_with_the_same_arguments,
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

from gradcomp.kernels import reference
from gradcomp.kernels.cuda import blocks, launch

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
CPU = torch.device("cpu")


@pytest.fixture
def ops() -> Iterator[ModuleType]:
    with on_cpu(CpuDriver(order="random")) as backend:
        yield backend


@pytest.fixture
def other(ops: ModuleType) -> ModuleType:
    return ops


@pytest.fixture
def stores() -> str:
    """A choice of the numba backend's; here there is one way to write."""
    return "one way"


# --- orders and launches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("stem", [stem for stem in STEMS if stem != "topk_compact"])  # topk_threshold's runs it as well
def test_every_order_of_threads(stem: str, order: str) -> None:
    for multiprocessors in (1, 100):  # thread blocks that walk on, and one piece each
        driver = CpuDriver(multiprocessors, order)
        with on_cpu(driver) as backend:
            SCENARIOS[stem](backend)  # type: ignore[arg-type]
        expected = {"topk_threshold": {"topk_threshold", "topk_compact"}}.get(stem, {stem})
        assert driver.launched == {name for source in expected for name in library(source).names}


@pytest.mark.parametrize("bits", [1, 4, 8])
def test_blocks_for_the_largest_groups(ops: ModuleType, bits: int) -> None:
    for size in (8192, 16384):  # a team of 1024 threads; above it one warp
        n, table = cut([size + 5], size, gap=1)
        compare(round_trip(reference, normal(n), table, bits), round_trip(ops, normal(n), table, bits), size)  # type: ignore[arg-type]


def test_grids_hold_no_more_than_the_device() -> None:
    with on_cpu(CpuDriver(multiprocessors=10)):
        assert launch.grid(CPU, 0) == 1
        assert launch.grid(CPU, 17, 8) == 3
        assert launch.grid(CPU, 10**9) == 80
        assert launch.grid(CPU, 10**9, threads=1024) == 20
        assert blocks.group(CPU, 1000, 128) == ("lanes", 63, 256)
        assert blocks.group(CPU, 1000, 2048) == ("team", 80, 256)
        assert blocks.group(CPU, 1000, 8192) == ("team", 20, 1024)
        assert blocks.group(CPU, 1000, 96) == blocks.group(CPU, 1000, 16384) == ("any", 80, 256)


def test_memory_is_made_once_per_stream_and_size(ops: ModuleType) -> None:
    values = torch.randn(1000)
    driver = launch.driver
    assert isinstance(driver, CpuDriver)
    ops.topk_threshold(values, 5)
    made = len(driver.scratch)
    assert made == 9
    ops.topk_threshold(values * 2, 7)
    assert len(driver.scratch) == made
    ops.topk_threshold(values[:999], 5)
    assert len(driver.scratch) == 2 * made


def test_the_cupy_driver_passes_pointers_on_torchs_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a CuPy and a device that only write down what they are told."""
    told: list[tuple[object, ...]] = []

    def context(*what: object) -> contextlib.AbstractContextManager[None]:
        told.append(what)
        return contextlib.nullcontext()

    class RawModule:
        def __init__(self, code: str, options: tuple[str, ...]) -> None:
            told.append(("compile", "topk_zero" in code, "#include" in code, options))

        def get_function(self, name: str) -> object:
            return lambda grid, block, values: told.append((name, grid, block, [(x.dtype.name, x) for x in values]))

    kinds = SimpleNamespace(Device=lambda i: context("cupy", i), ExternalStream=lambda *x: context("stream", *x))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(RawModule=RawModule, cuda=kinds))
    monkeypatch.setattr(torch.cuda, "device", lambda i: context("torch", i))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=1000 + device.index))
    driver, x = launch.CupyDriver(), torch.zeros(4)
    call = ("launch", (3,), (256,), [("uint64", x.data_ptr()), ("uint64", 0), ("int32", 5), ("float32", 0.5)])
    for device in (1, 1, 0):
        arguments = (x, None, np.int32(5), np.float32(0.5))
        driver.launch("topk_decode", "launch", torch.device("cuda", device), 3, 256, arguments)
    compiled = ("compile", True, False, ("--std=c++17",))
    on = [[("torch", i), ("cupy", i), ("stream", 1000 + i, i), call] for i in (1, 1, 0)]
    assert told == [*on[0][:2], compiled, *on[0][2:], *on[1], *on[2][:2], compiled, *on[2][2:]]


def test_payloads_must_be_aligned(ops: ModuleType) -> None:
    with pytest.raises(ValueError, match="payload must start at a multiple of 16 bytes"):
        launch.aligned(payload=torch.zeros(8, dtype=torch.uint8)[1:])


def test_what_the_gpu_benchmark_times_runs(ops: ModuleType) -> None:
    """On a GPU it also says how fast; this says that no case is broken."""
    path = Path(__file__).resolve().parent.parent / "benchmarks" / "gpu_check.py"
    spec = importlib.util.spec_from_file_location("gpu_check", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
        for n in (4096, 1024 * 1024):
            found = module.cases(ops, n, CPU)
            assert len(found) >= 24
            for case in found if n == 4096 else found[-3:]:
                case.run()
                if case.torch is not None:
                    case.torch()
    finally:
        del sys.modules["gpu_check"]


def test_ops_on_copies_of_their_arguments() -> None:
    """What the GPU tests call the kernels through, with the CPU as the other device."""
    for test in (test_accumulate_and_topk_decode, test_topk_select_works_within_each_segment):
        arguments = (on_device(reference, CPU), "one way")
        test(*arguments[: test.__code__.co_argcount])
    before = torch.zeros(8)
    on_device(reference, CPU).cast_decode(torch.ones(3, dtype=torch.float16), before[4:7], 2.0)
    assert before.tolist() == [0, 0, 0, 0, 2, 2, 2, 0]


# --- the checker checked ----------------------------------------------------------------------------------------------

FAULTS = {
    "threads of one block meet at different barriers": "if (threadIdx.x < 32)\n__syncthreads(); else\n__syncthreads();",
    "a barrier after some threads have ended": "if (threadIdx.x < 32) return; __syncthreads();",
    "lanes of one warp meet in different collectives": """
        if (threadIdx.x % 2) p[0] = __ballot_sync(~0u, 1); else p[0] = __shfl_xor_sync(~0u, 1, 1);""",
    "a collective after lanes of the warp have ended": "if (threadIdx.x % 2) return; p[0] = __ballot_sync(~0u, 1);",
    "a collective of a part of the warp": "p[0] = __ballot_sync(1u, 1);",
    "deadlock": "if (threadIdx.x % 2) __syncthreads(); else p[0] = __ballot_sync(~0u, 1);",
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("message", FAULTS)
def test_what_cuda_forbids_is_reported(message: str, order: str) -> None:
    kernel = f'extern "C" __global__ void bad(unsigned* p)\n{{\n{FAULTS[message]}\n}}\n'
    both = (message, "a lane ended while others") if "have ended" in message else (message,)
    with pytest.raises(KernelError, match="|".join(both)):
        Library(kernel).launch("bad", 2, 64, (torch.zeros(1, dtype=torch.int32),), order)


RIGHT = """
extern "C" __global__ void rotate(unsigned* p, long long n, float scale)
{
    __shared__ unsigned all[64];
    const unsigned t = threadIdx.x, poison = all[t];
    all[t] = __shfl_up_sync(~0u, p[t], 1) + __shfl_sync(~0u, t, 3);
    __syncthreads();
    if (t < n) p[t] = poison == ~0u ? all[63 - t] : 0;
}
"""


@pytest.mark.parametrize("runtime", [(), ("-DCUDA_CPU_PORTABLE",)], ids=["own switch", "ucontext"])
def test_shared_memory_shuffles_and_either_way_to_switch(runtime: tuple[str, ...]) -> None:
    for order in ORDERS:
        p = torch.arange(64, dtype=torch.int32)
        Library(RIGHT, runtime_flags=runtime).launch("rotate", 1, 64, (p, np.int64(60), np.float32(1)), order)
        want = [(t if t % 32 == 0 else t - 1) + 3 + t // 32 * 32 for t in range(64)]
        assert p.tolist() == [*want[::-1][:60], 60, 61, 62, 63]


def test_arguments_must_have_the_types_of_the_signature() -> None:
    p, n, scale = torch.zeros(64, dtype=torch.int32), np.int64(60), np.float32(1)
    for bad in ((p, np.int32(60), scale), (p.double(), n, scale), (p, n, np.int32(1)), (n, n, scale), (p, n)):
        with pytest.raises(AssertionError, match="argument"):
            Library(RIGHT).launch("rotate", 1, 64, bad)
    with pytest.raises(KernelError, match="a launch of 1 blocks of 40 threads"):
        Library(RIGHT).launch("rotate", 1, 40, (p, n, scale))


# --- mutants ----------------------------------------------------------------------------------------------------------


def finish(rows: list[dict[str, str]], expected: set[str]) -> None:
    """Every kernel as it is passes, every mutant in ``expected`` ran, and was found."""
    assert {row["stem"]: row["result"] for row in rows if row["mutant"] == "none"} == dict.fromkeys(STEMS, "survived")
    found = cuda_mutants.found_in(rows)
    assert set(found) == expected, "mutants that no scenario reaches"
    assert all(found.values()), [name for name in found if not found[name]]


@pytest.mark.timeout(280)
def test_every_mutant_is_found() -> None:
    every = {name for stem in STEMS for name in cuda_mutants.mutate(stem)[1]}
    assert set(cuda_mutants.HARMLESS) | cuda_mutants.RACES <= every
    assert len(every) >= 60  # the pattern still finds them
    finish(cuda_mutants.run(tsan=False), every - set(cuda_mutants.HARMLESS) - cuda_mutants.RACES)


@pytest.mark.timeout(280)
def test_no_kernel_has_a_data_race_and_a_missing_barrier_is_one() -> None:
    if cuda_mutants.sanitizer() is None:
        pytest.skip("libtsan is absent or does not run here")
    finish(cuda_mutants.run(tsan=True), cuda_mutants.RACES)
