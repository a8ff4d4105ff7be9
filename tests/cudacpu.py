"""Runs gradcomp's CUDA kernels on the CPU: compiles the very .cu files with g++ and stands in for the CuPy driver.

:class:`CpuDriver` takes the place of ``launch.driver``, so that the backend's own Python code is tested with the kernels.
Compiled objects are kept in a folder of the temporary directory, by the hash of everything that went into them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import mmap
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradcomp.kernels import cuda
from gradcomp.kernels.cuda import launch

HERE = Path(__file__).resolve().parent
ORDERS = ("forward", "reverse", "random")
_CANARY = 0x5EA1
COMPILER = shutil.which(os.environ.get("CXX", "g++"))
STEMS = sorted(path.stem for path in launch.FOLDER.glob("*.cu"))
FLAGS = ("-std=c++17", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-w")


class KernelError(RuntimeError):
    """Threads of a kernel did what CUDA forbids."""


def kernel_names(text: str) -> list[str]:
    """Kernels that a source defines, macros expanded by the compiler."""
    assert COMPILER is not None
    command = [COMPILER, "-E", "-P", "-x", "c++", "-"]
    expanded = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    return re.findall(r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\(\d+\)\s+)?(\w+)\(', expanded)


def cache_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"gradcomp-cuda-cpu-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def compile_once(text: str, flags: tuple[str, ...], suffix: str, inputs: tuple[Path, ...] = ()) -> Path:
    """Compile C++ ``text`` to a kept file; ``inputs`` go into the hash and, if objects, to the linker."""
    assert COMPILER is not None, "no C++ compiler"
    digest = hashlib.sha256(repr((text, flags, COMPILER)).encode())
    for path in (HERE / "cuda_cpu.h", *inputs):
        digest.update(path.read_bytes())
    target = cache_folder() / (digest.hexdigest()[:24] + suffix)
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
            made = Path(folder) / f"out{suffix}"
            objects = [str(path) for path in inputs if path.suffix == ".o"]
            command = [COMPILER, *FLAGS, *flags, f"-I{HERE}", "-x", "c++", "-", "-x", "none", *objects, "-o", str(made)]
            result = subprocess.run(command, input=text, capture_output=True, text=True)
            assert result.returncode == 0, result.stderr[:4000]
            made.replace(target)  # at once, because another process may compile the same
    return target


def runtime(*flags: str) -> Path:
    """The scheduler of fibers, compiled without a sanitizer."""
    return compile_once((HERE / "cuda_cpu.cpp").read_text(), ("-O2", "-c", *flags), ".o")


class Fence:
    """A copy of a tensor's storage that ends at a page which nobody may touch."""

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.start, self.count = storage.data_ptr(), storage.nbytes()
        pages = -(-self.count // mmap.PAGESIZE) + 1
        self.memory = mmap.mmap(-1, pages * mmap.PAGESIZE)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        end = base + (pages - 1) * mmap.PAGESIZE
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mprotect(ctypes.c_void_p(end), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
        self.place = end - -(-self.count // 16) * 16
        self.shift = self.place - self.start
        ctypes.memmove(self.place, self.start, self.count)

    def copy_back(self) -> None:
        ctypes.memmove(self.start, self.place, self.count)


class Library:
    """The kernels of one source."""

    def __init__(self, text: str, flags: tuple[str, ...] = ("-O1",), runtime_flags: tuple[str, ...] = ()) -> None:
        self.names = kernel_names(text)
        whole = '#include "cuda_cpu.h"\n' + text + "".join(f"CUDA_CPU_KERNEL({name})\n" for name in self.names)
        path = compile_once(whole, ("-shared", *flags), ".so", (runtime(*runtime_flags),))
        self.dll = ctypes.CDLL(str(path))
        self.dll.cuda_cpu_error.restype = ctypes.c_char_p
        self.sizes: dict[str, list[int]] = {}
        for name in self.names:
            sizes = (ctypes.c_int * 64)()
            self.sizes[name] = sizes[: getattr(self.dll, f"sizes_{name}")(sizes)]

    def launch(
        self,
        name: str,
        grid: int,
        block: int,
        arguments: tuple[Any, ...],
        order: str = "forward",
        seed: int = 1,
        fences: dict[int, Fence] | None = None,
    ) -> None:
        """Run one launch; the types of the arguments must be those of the signature."""
        sizes = self.sizes[name]
        assert len(arguments) == len(sizes), f"{name} takes {len(sizes)} arguments, not {len(arguments)}"
        values = (ctypes.c_uint64 * len(sizes))()
        for i, (argument, size) in enumerate(zip(arguments, sizes, strict=True)):
            if size < 0:
                assert argument is None or isinstance(argument, Tensor), f"{name}: argument {i} must be a tensor"
                if argument is not None:
                    assert argument.dim() == 0 or argument.stride(-1) == 1
                    assert argument.element_size() == -size, f"{name}: argument {i} has elements of another size"
                    fence = (fences or {}).get(argument.untyped_storage().data_ptr())
                    values[i] = argument.data_ptr() + (fence.shift if fence else 0)
            else:
                assert isinstance(argument, np.generic), f"{name}: argument {i} must be a numpy scalar"
                kind = argument.nbytes + (64 if argument.dtype.kind == "f" else 0)
                assert kind == size, f"{name}: argument {i} is {argument.dtype}"
                ctypes.memmove(ctypes.addressof(values) + 8 * i, argument.tobytes(), argument.nbytes)
        pointers = (ctypes.c_void_p * len(sizes))(*(ctypes.addressof(values) + 8 * i for i in range(len(sizes))))
        function = getattr(self.dll, f"launch_{name}")
        function(pointers, grid, block, ORDERS.index(order), ctypes.c_uint64(seed))
        message = self.dll.cuda_cpu_error().decode()
        if message:
            raise KernelError(f"{name}: {message}")


@functools.cache
def library(stem: str) -> Library:
    """The kernels of ``stem``.cu, as they are."""
    return Library(launch.source(stem))


class CpuDriver:
    """Runs launches on CPU tensors. ``multiprocessors``: few, so that small tests walk a persistent grid.

    ``fenced``: on copies of the arguments that end (to 15 bytes) at a page that must not be touched, so that reading past
    the end of an array ends the process. Use it in a child.
    """

    def __init__(self, multiprocessors: int = 1, order: str = "forward", seed: int = 1, fenced: bool = False) -> None:
        self.multiprocessors, self.order, self.seed, self.fenced = multiprocessors, order, seed, fenced
        self.launched: set[str] = set()
        self.scratch: list[Tensor] = []

    def processors(self, device: torch.device) -> int:
        return self.multiprocessors

    def stream(self, device: torch.device) -> int:
        return 0

    def zeros(self, device: torch.device, count: int, dtype: torch.dtype) -> Tensor:
        whole = torch.full((count + 32,), _CANARY, dtype=dtype, device=device)
        self.scratch.append(whole)
        return whole[16:-16].zero_()

    def library(self, stem: str) -> Library:
        return library(stem)

    def launch(
        self, stem: str, kernel: str, device: torch.device, grid: int, block: int, arguments: tuple[Any, ...]
    ) -> None:
        assert device.type == "cpu"
        self.launched.add(kernel)
        fences: dict[int, Fence] = {}
        if self.fenced:
            for x in arguments:
                if isinstance(x, Tensor) and x.numel():
                    fences.setdefault(x.untyped_storage().data_ptr(), Fence(x))
        self.library(stem).launch(kernel, grid, block, arguments, self.order, self.seed, fences)
        for fence in fences.values():
            fence.copy_back()
        for whole in self.scratch:
            edges = torch.cat((whole[:16], whole[-16:]))
            assert bool((edges == _CANARY).all()), f"{kernel} wrote outside its scratch memory"


@contextlib.contextmanager
def on_cpu(driver: CpuDriver) -> Iterator[ModuleType]:
    """Within it the CUDA backend runs on CPU tensors by ``driver``."""
    before = launch.driver
    launch.driver = driver
    try:
        yield cuda
    finally:
        launch.driver = before
