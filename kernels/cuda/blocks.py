"""1-bit, int8 and int4 blocks, and accumulation into block space, on CUDA."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradcomp.kernels.cuda.launch import aligned, grid, launch
from gradcomp.kernels.ops import Blocks, ShardLayout


def group(device: torch.device, count: int, size: int) -> tuple[str, int, int]:
    """Which threads share a block of ``size`` elements, for ``count`` of them: kind (see codes.cuh), grid, block."""
    if size in (32, 64, 128, 256):
        return "lanes", grid(device, count, 8 * (256 // size)), 256
    if size % 256 == 0 and size <= 8192:
        return "team", grid(device, count, 1, size // 8), size // 8
    return "any", grid(device, count, 8), 256


def _layout(blocks: Blocks, layout: ShardLayout) -> tuple[np.int64, np.int64, np.int64]:
    return np.int64(layout.nbytes), np.int64(layout.codes), np.int64(layout.scales)


def block_encode(
    flat: Tensor,
    blocks: Blocks,
    layout: ShardLayout,
    payload: Tensor,
    bits: int,
    residual: Tensor | None,
    residual_out: Tensor | None,
    gain: float,
    seed: int | None,
    finite: Tensor,
) -> None:
    """See :meth:`gradcomp.kernels.ops.Ops.block_encode`."""
    if blocks.count == 0:
        return
    aligned(payload=payload)
    kind, many, threads = group(flat.device, blocks.count, blocks.size)
    launch(
        "block_encode",
        f"encode{bits}_{kind}",
        flat.device,
        many,
        *(flat, blocks.start, blocks.length, blocks.position, blocks.number),
        *(np.int32(blocks.count), np.int32(blocks.size), np.int32(blocks.per_shard)),
        *(*_layout(blocks, layout), payload, residual, residual_out, np.float32(gain)),
        *(np.uint32((seed or 0) & 0xFFFFFFFF), np.int32(seed is not None), finite),
        block=threads,
    )


def block_server(
    received: Tensor,
    blocks: Blocks,
    layout: ShardLayout,
    out: Tensor,
    bits: int,
    residual: Tensor | None,
    residual_out: Tensor | None,
    seed: int | None,
    finite: Tensor,
) -> None:
    """See :meth:`gradcomp.kernels.ops.Ops.block_server`."""
    if blocks.per_shard == 0:
        return
    aligned(received=received, out=out)
    kind, many, threads = group(out.device, blocks.per_shard, blocks.size)
    launch(
        "block_server",
        f"server{bits}_{kind}",
        out.device,
        many,
        *(received, blocks.owned, blocks.owned_number),
        *(np.int32(blocks.per_shard), np.int32(blocks.size), np.int32(blocks.world)),
        *(*_layout(blocks, layout), out, residual, residual_out, np.float32(1.0 / blocks.world)),
        *(np.uint32((seed or 0) & 0xFFFFFFFF), np.int32(seed is not None), finite),
        block=threads,
    )


def block_decode(gathered: Tensor, blocks: Blocks, layout: ShardLayout, flat: Tensor, bits: int, gain: float) -> None:
    """See :meth:`gradcomp.kernels.ops.Ops.block_decode`."""
    if blocks.count == 0:
        return
    aligned(gathered=gathered)
    launch(
        "block_decode",
        f"decode{bits}",
        flat.device,
        grid(flat.device, blocks.count * blocks.size // 8, 256),
        *(gathered, blocks.start, blocks.length, blocks.position),
        *(np.int32(blocks.count), np.int32(blocks.size), np.int32(blocks.per_shard)),
        *(*_layout(blocks, layout), flat, np.float32(gain)),
    )


def accumulate(
    flat: Tensor, blocks: Blocks, residual: Tensor | None, out: Tensor, gain: float, finite: Tensor | None
) -> None:
    """See :meth:`gradcomp.kernels.ops.Ops.accumulate`. ``finite`` None: do not look (PowerSGD sees it in P)."""
    if blocks.count == 0:
        return
    launch(
        "accumulate",
        "accumulate",
        flat.device,
        grid(flat.device, blocks.count * blocks.size // 8, 256),
        *(flat, blocks.start, blocks.length, np.int32(blocks.count), np.int32(blocks.size)),
        *(residual, out, np.float32(gain), finite),
    )
