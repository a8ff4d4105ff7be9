"""Every CUDA source compiles to machine code for every architecture, spills nothing, and uses the registers it says."""

import re

import cuda_nvrtc
import pytest
from cuda_nvrtc import ARCHITECTURES, Usage, launch
from cudacpu import STEMS

# Registers per thread at most. 64: a multiprocessor of 64 Ki registers holds 1024 threads, which hides the latency of
# memory. The others do more arithmetic per byte, or serve block sizes that nobody uses by default.
CAP = 64
CAPS = {"lowrank_decode": 128, **{f"{kind}{bits}_any": 84 for kind in ("encode", "server") for bits in (1, 4, 8)}}
SLACK = 8  # another NVRTC may use as many more than the head of a source says


def needed(arch: int) -> int:
    """The CUDA version whose NVRTC compiles for ``arch``; skips where its wheel has no build for this platform."""
    major = 12 if arch < 75 else 13
    if cuda_nvrtc.find(major) is None:
        pytest.skip(f"NVRTC of CUDA {major} is not installed (pip install 'gradcomp[dev]' on x86-64 Linux)")
    return major


def documented(stem: str) -> dict[str, list[int]]:
    """The rows of the table in the head of a source."""
    text = (launch.FOLDER / f"{stem}.cu").read_text()
    assert f"// Registers on sm_{'/'.join(map(str, ARCHITECTURES))}; nothing spills:" in text
    rows = re.findall(r"^//   (\w+) +(\d+(?:/\d+)+)$", text, re.MULTILINE)
    return {name: [int(x) for x in row.split("/")] for name, row in rows}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_sources_compile_within_their_registers(arch: int) -> None:
    needed(arch)
    found: dict[str, Usage] = {}
    for stem, kernels in cuda_nvrtc.table(arch).items():
        rows = documented(stem)
        assert set(rows) == set(kernels), f"{stem}.cu: its head names other kernels than it has"
        for name, usage in kernels.items():
            assert usage.spilled == usage.stack == 0, f"{name} spills on sm_{arch}: {usage}"
            assert usage.registers <= CAPS.get(name, CAP), f"{name} on sm_{arch}: {usage}"
            assert usage.shared <= 16384, f"{name} on sm_{arch}: {usage}"
            row = rows[name][ARCHITECTURES.index(arch)]
            assert usage.registers <= row + SLACK, f"{name} on sm_{arch}: {usage.registers}, its head says {row}"
        found |= kernels
    assert len(found) == 37


def test_a_source_that_spills_or_fails_is_noticed() -> None:
    needed(90)
    lines = ["float v[64];", *(f"v[{i}] = p[{i} * 64 + threadIdx.x];" for i in range(64)), "__syncthreads();"]
    lines += [
        "for (int j = 0; j < n; j++)",
        "{",
        *(f"v[{i}] = v[{i}] * v[{(i + 7) % 64}] + p[j];" for i in range(64)),
        "}",
    ]
    lines += [f"p[{i} * 64 + threadIdx.x] = v[{i}];" for i in range(64)]
    kernel = 'extern "C" __global__ void __launch_bounds__(1024, 2) greedy(float* p, int n)\n{' + "\n".join(lines) + "}"
    entry = cuda_nvrtc._ENTRY.search(cuda_nvrtc.compile_source(kernel, "greedy.cu", 90))
    assert entry is not None
    assert int(entry["stores"]) > 0
    with pytest.raises(AssertionError, match='identifier "nothing" is undefined'):
        cuda_nvrtc.compile_source('extern "C" __global__ void broken() { nothing(); }', "broken.cu", 90)


def test_sources_need_no_header_but_their_own() -> None:
    for stem in STEMS:
        assert "#include" not in launch.source(stem)
