"""fp16 and bf16 casts on CUDA."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradcomp.kernels.cuda.launch import grid, launch

_NAME = {torch.float16: "f16", torch.bfloat16: "bf16"}


def _many(tensor: Tensor) -> int:
    return grid(tensor.device, tensor.numel(), 8 * 256)


def cast_encode(flat: Tensor, out: Tensor, gain: float, finite: Tensor, saturated: Tensor) -> None:
    """See :meth:`gradcomp.kernels.ops.Ops.cast_encode`."""
    if flat.numel():
        n, scale = np.int64(flat.numel()), np.float32(gain)
        kernel = f"cast_encode_{_NAME[out.dtype]}"
        launch("cast", kernel, flat.device, _many(flat), flat, out, n, scale, finite, saturated)


def cast_mean(received: Tensor, out: Tensor) -> None:
    """See :meth:`gradcomp.kernels.ops.Ops.cast_mean`."""
    if out.numel():
        world = received.shape[0]
        n, apart, share = np.int64(out.numel()), np.int64(received.stride(0)), np.float32(1.0 / world)
        kernel = f"cast_mean_{_NAME[out.dtype]}"
        launch("cast", kernel, out.device, _many(out), received, apart, out, n, np.int32(world), share)


def cast_decode(values: Tensor, flat: Tensor, gain: float) -> None:
    """See :meth:`gradcomp.kernels.ops.Ops.cast_decode`."""
    if flat.numel():
        n, scale = np.int64(flat.numel()), np.float32(gain)
        launch("cast", f"cast_decode_{_NAME[values.dtype]}", flat.device, _many(flat), values, flat, n, scale)
