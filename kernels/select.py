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

_NO_CUDA = "CUDA kernels are not in this release; use backend='torch', which runs on CUDA tensors"


@functools.cache
def _load_numba() -> tuple[Ops | None, str]:
    """The numba backend, or None and the reason. Importing it costs 0.2 to 0.4 s, so it happens on first use."""
    try:
        from gradcomp.kernels import cpu
    except ImportError as error:
        return None, f"{error}; install it with: pip install 'gradcomp[cpu]'"
    return cpu, "available"


def backend_name(device: torch.device, backend: str = "auto") -> str:
    """Name of the backend that :func:`get_ops` returns for the same arguments: ``torch`` or ``numba``."""
    return get_ops(device, backend).name


def get_ops(device: torch.device, backend: str = "auto") -> Ops:
    """The kernels for tensors on ``device``. ``auto``: numba for CPU tensors where it imports, else torch."""
    if backend not in BACKENDS:
        raise ConfigError(f"backend={backend!r}: allowed are {', '.join(BACKENDS)}")
    if backend == "torch":
        return reference
    if backend == "cuda":
        raise UnsupportedError(_NO_CUDA)
    if device.type != "cpu":
        if backend == "numba":
            raise UnsupportedError(f"backend 'numba' serves CPU tensors, not {device}; use backend='torch' or 'auto'")
        return reference
    ops, reason = _load_numba()
    if ops is not None:
        return ops
    if backend == "numba":
        raise UnsupportedError(f"backend 'numba' cannot be used: {reason}")
    return reference


def available() -> dict[str, str]:
    """Each backend and ``available``, or the reason why not."""
    return {"torch": "available", "numba": _load_numba()[1], "cuda": _NO_CUDA}
