"""PowerSGD on CUDA: own kernels where torch would make extra passes, torch's batched products where it does not.

``M Q`` and ``P^T M`` read M once and write little: torch.bmm (cuBLAS) does that, so they stay with it; like any product of
torch's they follow ``torch.backends.cuda.matmul.allow_tf32``. Fusing ``M Q`` into the accumulation before it would save
one more read of M (4 of 16 bytes per element), but needs its own reduction over rows; it was not tried, as there was no
device to show a gain on. The decode, though, is five passes in torch (product, subtract, scale; 24 bytes per element and
a wait for offsets that lie on the device) and one here (12 bytes).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradcomp.kernels.cuda.blocks import accumulate
from gradcomp.kernels.cuda.launch import grid, launch
from gradcomp.kernels.ops import Blocks, Matrices
from gradcomp.kernels.reference import lowrank_backproject as lowrank_backproject
from gradcomp.kernels.reference import matrix_batches

_WARP_ROWS, _WARP_COLS = 8, 128  # of a matrix, that one warp decodes


def lowrank_project(
    flat: Tensor,
    matrices: Matrices,
    blocks: Blocks,
    residual: Tensor | None,
    work: Tensor,
    q: Tensor,
    p: Tensor,
    gain: float,
) -> None:
    """See :meth:`gradcomp.kernels.ops.Ops.lowrank_project`."""
    accumulate(flat, blocks, residual, work, gain, None)
    for matrix, left, right in matrix_batches(work, matrices, p, q):
        torch.bmm(matrix, right.mT, out=left)


def lowrank_decode(
    work: Tensor, matrices: Matrices, p: Tensor, q: Tensor, flat: Tensor, gain: float, residual: bool
) -> None:
    """See :meth:`gradcomp.kernels.ops.Ops.lowrank_decode`."""
    done = 0
    for count, m, n, r, first, stride, at_p, at_q in matrices.batches:
        tiles = count * -(-m // _WARP_ROWS) * -(-n // _WARP_COLS)
        launch(
            "lowrank_decode",
            "lowrank_decode",
            flat.device,
            grid(flat.device, tiles, 8),
            *(work[first:], p[at_p:], q[at_q:], flat, matrices.flat[done:]),
            *(np.int32(count), np.int32(m), np.int32(n), np.int32(r), np.int64(stride)),
            *(np.float32(gain), np.int32(residual)),
        )
        done += count
