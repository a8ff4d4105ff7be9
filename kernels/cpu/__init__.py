"""numba backend for CPU tensors: every op in one pass over memory, without the GIL, on the calling thread.

Importing it imports numba (0.2 to 0.4 s). The first call of an op on a machine compiles it (0.5 to 2 s); the machine
code is kept in ``__pycache__`` (or NUMBA_CACHE_DIR) for later processes.
"""

from gradcomp.kernels.cpu.blocks import block_decode, block_encode, block_server
from gradcomp.kernels.cpu.cast import cast_decode, cast_encode, cast_mean
from gradcomp.kernels.cpu.lowrank import lowrank_backproject, lowrank_decode, lowrank_project
from gradcomp.kernels.cpu.topk import accumulate, topk_compact, topk_decode, topk_sample, topk_select, topk_threshold

__all__ = [
    "accumulate",
    "block_decode",
    "block_encode",
    "block_server",
    "cast_decode",
    "cast_encode",
    "cast_mean",
    "lowrank_backproject",
    "lowrank_decode",
    "lowrank_project",
    "name",
    "topk_compact",
    "topk_decode",
    "topk_sample",
    "topk_select",
    "topk_threshold",
]

name = "numba"
