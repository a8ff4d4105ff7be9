"""How a kernel reaches the device: its source, its compiled form, torch's stream, and memory that is kept.

Everything runs on torch's current stream of the tensors' device, from whatever thread calls (hooks run on autograd's
threads). So the kernels order themselves like torch's own operators, and as with those no ``record_stream`` is needed:
arguments belong to the caller, who holds them for this stream anyway, and scratch memory is used on one stream only.
Pointers are passed as they are; CuPy copies nothing and allocates nothing.

Under CUDA graph capture: run once before, because the first call compiles, loads the module and allocates scratch.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

FOLDER = Path(__file__).resolve().parent

THREADS = 256
"""Threads of a block, where a kernel does not say otherwise."""

PER_PROCESSOR = 8
"""Blocks of 256 threads that a multiprocessor holds at most (2048 threads); more would only queue."""

Argument: TypeAlias = Tensor | np.generic | None


@functools.cache
def source(stem: str) -> str:
    """The text of ``stem``.cu with its headers pasted in: NVRTC gets one string, and CuPy's cache sees all of it."""
    text = (FOLDER / f"{stem}.cu").read_text()
    return re.sub(r'^#include "(.+)"$', lambda match: (FOLDER / match[1]).read_text(), text, flags=re.MULTILINE)


class Driver(Protocol):
    """What runs kernels: CuPy, or in the tests the CPU."""

    def processors(self, device: torch.device) -> int:
        """Multiprocessors of the device."""

    def stream(self, device: torch.device) -> int:
        """An id of torch's current stream there."""

    def zeros(self, device: torch.device, count: int, dtype: torch.dtype) -> Tensor:
        """Scratch memory, from torch's allocator."""

    def launch(
        self, stem: str, kernel: str, device: torch.device, grid: int, block: int, arguments: tuple[Argument, ...]
    ) -> None:
        """Launch ``kernel`` of ``stem``.cu on the current stream."""


def _value(argument: Argument) -> np.generic:
    """A kernel's argument as CuPy takes it: a numpy scalar has the size that the signature wants, a pointer 8 bytes."""
    if argument is None:
        return np.uint64(0)
    return np.uint64(argument.data_ptr()) if isinstance(argument, Tensor) else argument


class CupyDriver:
    """Compiles with NVRTC on first use (CuPy keeps the machine code on disk), once per file; functions per device."""

    def __init__(self) -> None:
        self._modules: dict[tuple[int, str], Any] = {}
        self._functions: dict[tuple[int, str], Any] = {}
        self._lock = threading.Lock()

    def processors(self, device: torch.device) -> int:
        """See :meth:`Driver.processors`."""
        return int(torch.cuda.get_device_properties(device).multi_processor_count)

    def stream(self, device: torch.device) -> int:
        """See :meth:`Driver.stream`."""
        return int(torch.cuda.current_stream(device).cuda_stream)

    def zeros(self, device: torch.device, count: int, dtype: torch.dtype) -> Tensor:
        """See :meth:`Driver.zeros`."""
        return torch.zeros(count, dtype=dtype, device=device)

    def launch(
        self, stem: str, kernel: str, device: torch.device, grid: int, block: int, arguments: tuple[Argument, ...]
    ) -> None:
        """See :meth:`Driver.launch`."""
        import cupy

        index = torch.cuda.current_device() if device.index is None else device.index
        values = tuple(_value(x) for x in arguments)
        # Both libraries keep a current device and stream per thread.
        with torch.cuda.device(index), cupy.cuda.Device(index):
            function = self._functions.get((index, kernel)) or self._load(index, stem, kernel)
            with cupy.cuda.ExternalStream(self.stream(torch.device("cuda", index)), index):
                function((grid,), (block,), values)

    def _load(self, index: int, stem: str, kernel: str) -> Any:
        import cupy

        with self._lock:
            if (index, stem) not in self._modules:
                self._modules[index, stem] = cupy.RawModule(code=source(stem), options=("--std=c++17",))
            function = self._modules[index, stem].get_function(kernel)
            self._functions[index, kernel] = function
            return function


driver: Driver = CupyDriver()


def missing() -> str | None:
    """What this process lacks to compile and launch kernels, and how to install it; None: nothing."""
    extra = "cuda12" if (torch.version.cuda or "").startswith("12.") else "cuda13"
    try:
        import cupy  # noqa: F401
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()
    except (ImportError, RuntimeError, OSError) as error:  # CuPy finds libraries late, and says so in several ways
        return f"{error}; install it with: pip install 'gradcomp[{extra}]'"
    return None


def launch(stem: str, kernel: str, device: torch.device, grid: int, *arguments: Argument, block: int = THREADS) -> None:
    """Launch on the current driver. Tensors go as pointers, numbers as the numpy type that they have."""
    driver.launch(stem, kernel, device, grid, block, arguments)


def grid(device: torch.device, pieces: int, per_block: int = 1, threads: int = THREADS) -> int:
    """Blocks for ``pieces`` of work, ``per_block`` at a time: no more than the device holds, as each walks on."""
    resident = driver.processors(device) * max(1, PER_PROCESSOR * THREADS // threads)
    return max(1, min(-(-pieces // per_block), resident))


def zeros(device: torch.device, count: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """Scratch memory that is kept (see :func:`keep`)."""
    return driver.zeros(device, count, dtype)


Kept = TypeVar("Kept")
_kept: dict[tuple[object, ...], Any] = {}
_kept_lock = threading.Lock()


def keep(device: torch.device, key: tuple[object, ...], make: Callable[[], Kept]) -> Kept:
    """What ``make`` made when first asked with this key on the device's current stream. It is never freed.

    Per stream, because two streams may run at the same time; never freed, because a captured graph holds addresses.
    """
    full = (driver, device, driver.stream(device), *key)
    with _kept_lock:
        if full not in _kept:
            _kept[full] = make()
        made: Kept = _kept[full]
        return made


def aligned(**tensors: Tensor | None) -> None:
    """Refuse what 16-byte access cannot serve. Parameters in a bucket may start anywhere; these may not."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.data_ptr() % 16:
            raise ValueError(f"{name} must start at a multiple of 16 bytes")
