"""``gradcomp doctor``: what this machine has, which kernels would be used, whether they work, and what is missing.

Everything is returned as plain values by :func:`examine`; the command line prints them.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import gradcomp
from gradcomp.bucket import Parameter, ParameterTable, Slot
from gradcomp.engine import BucketExchange, Context
from gradcomp.errors import GradcompError
from gradcomp.kernels.select import available, backend_name, get_ops
from gradcomp.memory import Memory
from gradcomp.registry import compressor_names, get_compressor
from gradcomp.rules import choose
from gradcomp.virtual import VirtualGroup

_SHAPES = ((40, 64), (7,), (33, 50))
_RANKS = 2
_STEPS = 2
_INSTALL = "install it with: "

# import name, what it is for, how to get it
_OPTIONAL = (
    ("numba", "fused CPU kernels", "pip install 'gradcomp[cpu]'"),
    ("typer", "the command line", "pip install 'gradcomp[cli]'"),
    ("matplotlib", "the demo's picture", "pip install 'gradcomp[bench]'"),
    ("sklearn", "digits for `gradcomp demo --task images`", "pip install 'gradcomp[bench]'"),
    ("deepspeed", "DeepSpeed as the trainer", "pip install 'gradcomp[deepspeed]'"),
)
_CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")


@dataclass(frozen=True, slots=True)
class Check:
    """One compressor on one backend and device: whether its result equals the reference's, and if not, why."""

    backend: str
    device: str
    compressor: str
    ok: bool
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Missing:
    """Something optional that is not here. ``command`` adds it."""

    what: str
    purpose: str
    command: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What :func:`examine` found. ``usable``: gradients can be exchanged, and the chosen kernels work."""

    versions: dict[str, str | None]
    devices: list[str]
    distributed: dict[str, bool]
    kernels: dict[str, str]
    choice: dict[str, str]
    checks: list[Check]
    check_seconds: float
    missing: list[Missing]
    usable: bool

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def examine() -> Report:
    """Look at this machine. Takes some seconds when kernels have to be compiled for the self-test."""
    devices = {"cpu": f"{platform.machine()}, {os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads"}
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        major, minor = torch.cuda.get_device_capability(index)
        devices[f"cuda:{index}"] = f"{torch.cuda.get_device_name(index)}, compute capability {major}.{minor}"
    kernels = available()
    choice = {device: backend_name(torch.device(device)) for device in devices}
    begun = time.monotonic()
    checks = list(self_test(list(devices), [name for name, state in kernels.items() if state == "available"]))
    distributed = _distributed()
    chosen_work = all(check.ok for check in checks if choice[check.device] == check.backend)
    return Report(
        versions=_versions(),
        devices=[f"{device}: {text}" for device, text in devices.items()],
        distributed=distributed,
        kernels=kernels,
        choice=choice,
        checks=checks,
        check_seconds=round(time.monotonic() - begun, 2),
        missing=_missing(kernels),
        usable=(distributed["gloo"] or distributed["nccl"]) and chosen_work,
    )


def self_test(devices: list[str], backends: list[str]) -> Iterator[Check]:
    """Exchange a small bucket between two virtual ranks with every built-in compressor, compared with the reference.

    Two steps, so that error feedback is read as well as written. Backends that do not serve a device are left out.
    """
    names = [name for name in compressor_names() if _is_builtin(name)]
    expected = {name: _exchange(name, "torch", torch.device("cpu")) for name in names}
    for device in devices:
        for backend in backends:
            try:
                get_ops(torch.device(device), backend)
            except GradcompError:
                continue
            for name in names:
                try:
                    result = _exchange(name, backend, torch.device(device))
                    torch.testing.assert_close(result, expected[name], rtol=1e-4, atol=1e-5)
                except Exception as error:  # a broken backend is what is looked for: it is shown, whatever it raises
                    yield Check(backend, device, name, False, f"{type(error).__name__}: {error}".splitlines()[0])
                else:
                    yield Check(backend, device, name, True)


def _is_builtin(name: str) -> bool:
    """Whether ``name`` is a compressor of gradcomp itself; plug-ins are not run by the self-test."""
    try:
        return get_compressor(name).__module__.startswith("gradcomp.compressors.")
    except GradcompError:
        return False


def _exchange(spec: str, backend: str, device: torch.device) -> torch.Tensor:
    """What rank 0 holds after the last step."""
    shapes = [torch.Size(shape) for shape in _SHAPES]
    parameters = [Parameter(f"p{i}", shape.numel(), tuple(shape), torch.float32) for i, shape in enumerate(shapes)]
    slots, offset = [], 0
    for parameter in parameters:
        strides = tuple(torch.empty(parameter.shape, device="meta").stride())
        slots.append(Slot(parameter.name, offset, parameter.numel, parameter.shape, strides))
        offset += parameter.numel
    table, choices, ops = ParameterTable(parameters), choose(parameters, spec, ()), get_ops(device, backend)
    memories = [Memory(table, rank, _RANKS) for rank in range(_RANKS)]
    exchanges = [
        BucketExchange(slots, torch.zeros(offset, device=device), choices, Context(table, memory, rank, _RANKS, ops))
        for rank, memory in enumerate(memories)
    ]
    generator = torch.Generator().manual_seed(0)
    for step in range(_STEPS):
        buffers = [torch.randn(offset, generator=generator).to(device) for _ in range(_RANKS)]
        VirtualGroup(_RANKS).run([e.run(b, step, 1.0) for e, b in zip(exchanges, buffers, strict=True)])
        for exchange, memory in zip(exchanges, memories, strict=True):
            memory.commit()
            exchange.settle()
    return buffers[0].cpu()


def _distributed() -> dict[str, bool]:
    here = dist.is_available()
    return {
        "gloo": here and dist.is_gloo_available(),
        "nccl": here and dist.is_nccl_available(),
        "mpi": here and dist.is_mpi_available(),
        "ucc": here and dist.is_ucc_available(),
    }


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"gradcomp": gradcomp.__version__, "python": platform.python_version()}
    found["torch"] = str(torch.__version__)
    for name, distributions in (
        ("numpy", ("numpy",)),
        ("numba", ("numba",)),
        ("cupy", _CUPY),
        ("deepspeed", ("deepspeed",)),
    ):
        found[name] = next(filter(None, map(_version, distributions)), None)
    return found


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _missing(kernels: dict[str, str]) -> list[Missing]:
    missing = [Missing(what, purpose, command) for what, purpose, command in _OPTIONAL if find_spec(what) is None]
    absent = {entry.what for entry in missing}
    for name, state in kernels.items():
        # a backend that is installed but broken says itself what to do
        if _INSTALL in state and name not in absent:
            reason, _, command = state.partition(_INSTALL)
            missing.append(Missing(f"kernels {name!r}", reason.rstrip("; "), command))
    if not Path("/usr/share/datasets/fashion-mnist").is_dir():
        missing.append(
            Missing("Fashion-MNIST", "a larger `gradcomp demo --task images`", "apt install dataset-fashion-mnist")
        )
    return missing
