"""Compiles gradcomp's CUDA sources with NVRTC, which needs neither a GPU nor a driver, and reads what they use."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import cudacpu
from cudacpu import STEMS, launch

# Where the wheels nvidia-cuda-nvrtc (CUDA 13) and nvidia-cuda-nvrtc-cu12 (CUDA 12, the last with sm_70) put the library.
LIBRARIES = {13: "cu13/lib/libnvrtc.so.13", 12: "cuda_nvrtc/lib/libnvrtc.so.12"}
ARCHITECTURES = (70, 75, 80, 86, 89, 90, 100, 120)

_ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for 'sm_(?P<arch>\d+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Usage:
    """What one kernel uses on one architecture: registers per thread, bytes per thread in memory, shared bytes."""

    registers: int
    stack: int
    spilled: int
    shared: int


def find(major: int) -> Path | None:
    """NVRTC of that CUDA version, if its wheel is installed."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / LIBRARIES[major]
        if path.exists():
            return path
    return None


@functools.cache
def load(major: int) -> tuple[ctypes.CDLL, str]:
    """The library and its version."""
    path = find(major)
    assert path is not None, f"NVRTC of CUDA {major} is not installed"
    library, high, low = ctypes.CDLL(str(path)), ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(high), ctypes.byref(low))
    return library, f"{high.value}.{low.value}"


def compile_source(text: str, name: str, arch: int) -> str:
    """Compile to a cubin; the assembler's log."""
    library, _ = load(12 if arch < 75 else 13)
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), 0, None, None)
    options = [f"-arch=sm_{arch}".encode(), b"--std=c++17", b"--ptxas-options=-v"]
    result = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    cubin = library.nvrtcGetCUBINSize(program, ctypes.byref(size)) if result == 0 else 1
    library.nvrtcDestroyProgram(ctypes.byref(program))
    message = log.value.decode()
    assert result == 0, f"{name}, sm_{arch}: {message[:3000]}"
    assert cubin == 0, f"{name}, sm_{arch}: no cubin"
    assert size.value > 0, f"{name}, sm_{arch}: an empty cubin"
    assert not re.search(r"\.cu\(\d+\): warning", message), f"{name}, sm_{arch}: {message[:3000]}"
    return message


def usage(stem: str, arch: int) -> dict[str, Usage]:
    """Per kernel of ``stem``.cu; kept in the temporary directory by the hash of source and compiler."""
    text, version = launch.source(stem), load(12 if arch < 75 else 13)[1]
    digest = hashlib.sha256(repr((text, arch, version)).encode()).hexdigest()[:24]
    kept = cudacpu.cache_folder() / f"{digest}.json"
    if not kept.exists():
        found = {}
        for entry in _ENTRY.finditer(compile_source(text, f"{stem}.cu", arch)):
            assert entry["arch"] == str(arch)
            shared = re.search(r"(\d+) bytes smem", entry["rest"])
            spilled = int(entry["stores"]) + int(entry["loads"])
            registers, stack = int(entry["registers"]), int(entry["stack"])
            found[entry["name"]] = asdict(Usage(registers, stack, spilled, int(shared[1]) if shared else 0))
        part = kept.with_suffix(".part")
        part.write_text(json.dumps(found))
        part.replace(kept)
    return {name: Usage(**values) for name, values in json.loads(kept.read_text()).items()}


def table(arch: int) -> dict[str, dict[str, Usage]]:
    """Every source on one architecture, two at a time: NVRTC is thread-safe and ctypes lets go of the GIL."""
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(STEMS, pool.map(lambda stem: usage(stem, arch), STEMS), strict=True))


def header(stem: str, usages: dict[int, dict[str, Usage]]) -> str:
    """The lines that a source's head comment holds (see test_cuda_compile.py)."""
    lines = [f"// Registers on sm_{'/'.join(str(arch) for arch in ARCHITECTURES)}; nothing spills:"]
    for name in usages[90]:
        row = "/".join(str(usages[arch][name].registers) for arch in ARCHITECTURES)
        lines.append(f"//   {name:<16} {row}")
    return "\n".join(lines)


if __name__ == "__main__":  # prints the lines for the heads of the sources
    every = {arch: table(arch) for arch in ARCHITECTURES}
    for source in STEMS:
        print(f"{source}.cu", header(source, {arch: every[arch][source] for arch in ARCHITECTURES}), sep="\n")
