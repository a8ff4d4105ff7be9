"""CUDA backend: own kernels (the ``.cu`` files here), compiled by NVRTC and launched through CuPy on torch's stream.

Importing it needs neither CuPy nor a device; :func:`missing` says what running it lacks. No op waits for the device but
those that return a Python number. The first call of an op on a machine compiles its file (0.1 to 3 s); CuPy keeps the
machine code in ``~/.cupy`` (or CUPY_CACHE_DIR) for later processes.
"""

from gradcomp.kernels.cuda.blocks import accumulate, block_decode, block_encode, block_server
from gradcomp.kernels.cuda.cast import cast_decode, cast_encode, cast_mean
from gradcomp.kernels.cuda.launch import missing
from gradcomp.kernels.cuda.lowrank import lowrank_backproject, lowrank_decode, lowrank_project
from gradcomp.kernels.cuda.topk import topk_compact, topk_decode, topk_sample, topk_select, topk_threshold

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
    "missing",
    "name",
    "topk_compact",
    "topk_decode",
    "topk_sample",
    "topk_select",
    "topk_threshold",
]

name = "cuda"
