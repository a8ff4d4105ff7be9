"""Which backend serves a device: by name, or the fastest that works there.

A backend asked for by name is used or refused, never replaced silently; only ``auto`` falls back, and
:func:`available` (shown by ``gradcomp doctor``) says why.
"""

from __future__ import annotations

import functools

import torch

from gradcomp.errors import ConfigError, UnsupportedError
from gradcomp.kernels import reference
from gradcomp.kernels.ops import Ops

BACKENDS = ("auto", "torch", "numba", "cuda")
"""Names that :func:`get_ops` takes."""


@functools.cache
def _load_numba() -> tuple[Ops | None, str]:
    """The numba backend, or None and the reason. Importing it costs 0.2 to 0.4 s, so it happens on first use."""
    try:
        from gradcomp.kernels import cpu
    except ImportError as error:
        return None, f"{error}; install it with: pip install 'gradcomp[cpu]'"
    return cpu, "available"


@functools.cache
def _load_cuda() -> tuple[Ops | None, str]:
    """The CUDA backend, or None and the reason. It imports CuPy, which costs 0.4 s, so it happens on first use."""
    from gradcomp.kernels import cuda

    reason = cuda.missing()
    return (cuda, "available") if reason is None else (None, reason)


_LOADERS = {"cpu": ("numba", _load_numba), "cuda": ("cuda", _load_cuda)}
"""The fast backend of each type of device."""


def backend_name(device: torch.device, backend: str = "auto") -> str:
    """Name of the backend that :func:`get_ops` returns for the same arguments: ``torch``, ``numba`` or ``cuda``."""
    return get_ops(device, backend).name


def get_ops(device: torch.device, backend: str = "auto") -> Ops:
    """The kernels for tensors on ``device``. ``auto``: numba (CPU) or cuda (CUDA) where it imports, else torch."""
    if backend not in BACKENDS:
        raise ConfigError(f"backend={backend!r}: allowed are {', '.join(BACKENDS)}")
    fast, load = _LOADERS.get(device.type, ("torch", None))
    if backend == "torch" or (backend == "auto" and load is None):
        return reference
    if backend not in ("auto", fast) or load is None:
        served = "CPU" if backend == "numba" else "CUDA"
        raise UnsupportedError(
            f"backend {backend!r} serves {served} tensors, not {device}; use backend='torch' or 'auto'"
        )
    ops, reason = load()
    if ops is not None:
        return ops
    if backend == fast:
        raise UnsupportedError(f"backend {backend!r} cannot be used: {reason}")
    return reference


def available() -> dict[str, str]:
    """Each backend and ``available``, or the reason why not."""
    if torch.cuda.is_available():
        cuda = _load_cuda()[1]
    else:
        cuda = "torch was built without CUDA" if torch.version.cuda is None else "torch sees no CUDA device"
    return {"torch": "available", "numba": _load_numba()[1], "cuda": cuda}
