"""Every op of :mod:`gradcomp.kernels.ops` in plain torch: any device, no compiler; the oracle for the other backends.

Written to be read and trusted: sums that become a scale are accumulated in fp64, every other operation is one fp32
rounding at a time, in the order that the op list gives. Temporaries stay below ``CHUNK`` elements each, because the
list forbids memory that grows with the bucket; only Top-K selection needs one copy of the magnitudes. Nothing here
waits for the device, except where an op returns a Python number or reads offsets of matrices.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gradcomp.kernels.ops import Blocks, Matrices, Segments, ShardLayout

name = "torch"

CHUNK = 1 << 22
"""Elements that one temporary holds at most (16 MiB of fp32)."""

TOP = {8: 127.0, 4: 7.0}
"""Largest code of the integer formats, by bits."""

TINY = 2.0**-100
"""Blocks with a smaller maximum are sent as zero, so that ``TOP / max`` stays finite."""


# --- shapes -----------------------------------------------------------------------------------------------------------


def _parts(count: int, width: int) -> Iterator[slice]:
    """Cut ``count`` rows of ``width`` elements into slices of at most CHUNK elements."""
    step = max(1, CHUNK // width)
    for first in range(0, count, step):
        yield slice(first, min(first + step, count))


def _inside(length: Tensor, size: int) -> Tensor:
    """bool [c, B]: the places that a block of ``length`` [c] elements fills."""
    return torch.arange(size, device=length.device) < length[:, None]


def _index(start: Tensor, length: Tensor, size: int) -> Tensor:
    """int64 [c, B]: the bucket element of each place; padding repeats the block's last element (always in range)."""
    place = torch.arange(size, device=length.device)
    return start[:, None] + torch.minimum(place, length[:, None].long() - 1)


def _values(
    flat: Tensor, blocks: Blocks, part: slice, residual: Tensor | None, gain: float, finite: Tensor | None
) -> Tensor:
    """v = gain * flat + residual, fp32 [c, B] with zero padding, for the blocks in ``part``."""
    length = blocks.length[part]
    v = flat[_index(blocks.start[part], length, blocks.size)] * gain
    if residual is not None:
        v = v + residual.view(-1, blocks.size)[part]
    v = torch.where(_inside(length, blocks.size), v, 0.0)
    if finite is not None:
        _check(v, finite)
    return v


def _check(v: Tensor, finite: Tensor) -> None:
    finite.mul_(torch.isfinite(v).all())


def _shards(payload: Tensor, count: int, blocks: Blocks, layout: ShardLayout, bits: int) -> tuple[Tensor, Tensor]:
    """Views of ``count`` shards: codes uint8 [count, per_shard, B * bits // 8], scales fp32 [count, per_shard]."""
    shards, width = payload.view(count, layout.nbytes), blocks.size * bits // 8
    codes = shards[:, layout.codes : layout.codes + blocks.per_shard * width].view(count, blocks.per_shard, width)
    scales = shards[:, layout.scales : layout.scales + 4 * blocks.per_shard].view(torch.float32)
    return codes, scales


# --- one block format -------------------------------------------------------------------------------------------------


def _uniform(seed: int, number: Tensor, size: int) -> Tensor:
    """u in [0, 1), fp32 [c, B]: the hash of the op list, uint32 arithmetic kept in the low half of int64."""
    low = 0xFFFFFFFF
    x = number[:, None].long() * size + torch.arange(size, device=number.device)
    x = ((x & low) * 0x9E3779B9 + (seed & low)) & low
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & low
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & low
    x = x ^ (x >> 16)
    return (x >> 8).to(torch.float32) * 2.0**-24


def _encode(v: Tensor, length: Tensor, number: Tensor, bits: int, seed: int | None) -> tuple[Tensor, Tensor]:
    """Encode v [c, B] (zero padding): codes uint8 [c, B * bits // 8] and scales fp32 [c]."""
    size = v.shape[1]
    if bits == 1:
        scale = (v.abs().sum(1, dtype=torch.float64) / length.clamp(min=1)).to(torch.float32)
        positive = ~torch.signbit(v) & _inside(length, size)
        weight = 1 << torch.arange(8, device=v.device)
        return (positive.view(-1, size // 8, 8) * weight).sum(2).to(torch.uint8), scale

    peak = v.abs().amax(1)
    # Tensors on both sides: torch computes a Python number / tensor as number * reciprocal, which rounds twice.
    top = torch.full_like(peak, TOP[bits])
    usable = peak >= TINY
    inverse, scale = torch.where(usable, top / peak, 0.0), torch.where(usable, peak / top, 0.0)
    x = v * inverse[:, None]
    x = torch.round(x) if seed is None else torch.floor(x + _uniform(seed, number, size))
    # Padding is +0, so x + u < 1 gives code 0 there as well.
    code = x.clamp(-TOP[bits], TOP[bits]).to(torch.int8).view(torch.uint8)
    if bits == 4:
        code = code & 15
        code = code[:, : size // 2] | code[:, size // 2 :] << 4
    return code, scale


def _decode(codes: Tensor, scale: Tensor, bits: int) -> Tensor:
    """fp32 [c, B] from codes uint8 [c, B * bits // 8] and scales fp32 [c]."""
    scale = scale[:, None]
    if bits == 1:
        bit = codes[:, :, None] >> torch.arange(8, device=codes.device, dtype=torch.uint8) & 1
        return torch.where(bit.flatten(1).bool(), scale, -scale)
    if bits == 4:
        nibbles = torch.cat((codes & 15, codes >> 4), 1)
        return ((nibbles ^ 8).to(torch.float32) - 8.0) * scale
    return codes.contiguous().view(torch.int8).to(torch.float32) * scale


# --- 1-bit, int8, int4 ------------------------------------------------------------------------------------------------


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
    all_codes, all_scales = _shards(payload, blocks.world, blocks, layout, bits)
    for part in _parts(blocks.count, blocks.size):
        length, position = blocks.length[part], blocks.position[part].long()
        v = _values(flat, blocks, part, residual, gain, finite)
        codes, scales = _encode(v, length, blocks.number[part], bits, seed)
        owner, place = position // blocks.per_shard, position % blocks.per_shard
        all_codes[owner, place] = codes
        all_scales[owner, place] = scales
        if residual_out is not None:
            left = v - _decode(codes, scales, bits)
            residual_out.view(-1, blocks.size)[part] = torch.where(_inside(length, blocks.size), left, 0.0)


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
    in_codes, in_scales = _shards(received, blocks.world, blocks, layout, bits)
    out_codes, out_scales = (x[0] for x in _shards(out, 1, blocks, layout, bits))
    for part in _parts(blocks.per_shard, blocks.size):
        owned = blocks.owned[part]
        inside, used = _inside(owned, blocks.size), owned > 0
        v = torch.zeros(inside.shape, device=out.device)
        for rank in range(blocks.world):
            v += _decode(in_codes[rank, part], in_scales[rank, part], bits)
        v *= 1.0 / blocks.world
        if residual is not None:
            v += residual.view(-1, blocks.size)[part]
        v = torch.where(inside, v, 0.0)
        _check(v, finite)
        codes, scales = _encode(v, owned, blocks.owned_number[part], bits, seed)
        # where, not indexing with a mask: that would wait for the device to count it.
        out_codes[part] = torch.where(used[:, None], codes, out_codes[part])
        out_scales[part] = torch.where(used, scales, out_scales[part])
        if residual_out is not None:
            left = v - _decode(codes, scales, bits)
            residual_out.view(-1, blocks.size)[part] = torch.where(inside, left, 0.0)


def block_decode(gathered: Tensor, blocks: Blocks, layout: ShardLayout, flat: Tensor, bits: int, gain: float) -> None:
    """See :meth:`gradcomp.kernels.ops.Ops.block_decode`."""
    all_codes, all_scales = _shards(gathered, blocks.world, blocks, layout, bits)
    for part in _parts(blocks.count, blocks.size):
        position = blocks.position[part].long()
        owner, place = position // blocks.per_shard, position % blocks.per_shard
        decoded = _decode(all_codes[owner, place], all_scales[owner, place], bits) * gain
        # Padding repeats the last element with its value: duplicates in the index agree.
        index = _index(blocks.start[part], blocks.length[part], blocks.size)
        flat[index] = decoded.gather(1, index - blocks.start[part, None])


# --- Top-K ------------------------------------------------------------------------------------------------------------


def accumulate(flat: Tensor, blocks: Blocks, residual: Tensor | None, out: Tensor, gain: float, finite: Tensor) -> None:
    """See :meth:`gradcomp.kernels.ops.Ops.accumulate`."""
    for part in _parts(blocks.count, blocks.size):
        out.view(-1, blocks.size)[part] = _values(flat, blocks, part, residual, gain, finite)


def topk_threshold(values: Tensor, k: int) -> float:
    """See :meth:`gradcomp.kernels.ops.Ops.topk_threshold`."""
    return float(values.abs().kthvalue(values.numel() - k + 1).values)


def topk_sample(values: Tensor, k: int, stride: int) -> float:
    """See :meth:`gradcomp.kernels.ops.Ops.topk_sample`."""
    sample = values[stride // 2 :: stride]
    return topk_threshold(sample, max(1, round(k / values.numel() * sample.numel())))


def topk_compact(values: Tensor, threshold: float, k: int, indices: Tensor, selected: Tensor) -> int:
    """See :meth:`gradcomp.kernels.ops.Ops.topk_compact`."""
    size = values.abs()
    chosen = (size >= threshold).nonzero().flatten()
    if chosen.numel() > k:
        above = (size > threshold).nonzero().flatten()[:k]
        ties = (size == threshold).nonzero().flatten()[: k - above.numel()]
        chosen = torch.cat((above, ties)).sort().values
    count = chosen.numel()
    indices[:count], indices[count:] = chosen.to(torch.int32), values.numel() - 1
    selected[:count], selected[count:] = values[chosen], 0.0
    return count


def topk_select(values: Tensor, segments: Segments, indices: Tensor, selected: Tensor) -> None:
    """See :meth:`gradcomp.kernels.ops.Ops.topk_select`."""
    columns = (segments.start, segments.numel, segments.k, segments.stride, segments.place)
    for start, numel, k, stride, place in zip(*(column.tolist() for column in columns), strict=True):
        part, out = values[start : start + numel], indices[place : place + k]
        threshold = topk_threshold(part, k) if stride == 1 else topk_sample(part, max(1, k * 97 // 100), stride)
        topk_compact(part, threshold, k, out, selected[place : place + k])
        out += start


def topk_decode(indices: Tensor, selected: Tensor, blocks: Blocks, flat: Tensor, gain: float) -> None:
    """See :meth:`gradcomp.kernels.ops.Ops.topk_decode`."""
    for part in _parts(blocks.count, blocks.size):
        flat[_index(blocks.start[part], blocks.length[part], blocks.size)] = 0.0
    block, place = indices.long() // blocks.size, indices.long() % blocks.size
    # An index into padding carries value 0: let it add that to the block's last element.
    place = torch.minimum(place, blocks.length[block].long() - 1)
    flat.index_add_(0, blocks.start[block] + place, selected * gain)


# --- fp16, bf16 -------------------------------------------------------------------------------------------------------


def _saturate(v: Tensor, dtype: torch.dtype) -> Tensor:
    """Clamp finite values of v to the range of ``dtype``; inf and NaN stay."""
    top = torch.finfo(dtype).max
    return torch.where(torch.isinf(v), v, v.clamp(-top, top))


def cast_encode(flat: Tensor, out: Tensor, gain: float, finite: Tensor, saturated: Tensor) -> None:
    """See :meth:`gradcomp.kernels.ops.Ops.cast_encode`."""
    top = torch.finfo(out.dtype).max
    for part in _parts(flat.numel(), 1):
        v = flat[part] * gain
        _check(v, finite)
        saturated.add_(((v.abs() > top) & torch.isfinite(v)).sum())
        out[part] = _saturate(v, out.dtype)


def cast_mean(received: Tensor, out: Tensor) -> None:
    """See :meth:`gradcomp.kernels.ops.Ops.cast_mean`."""
    world = received.shape[0]
    for part in _parts(out.numel(), 1):
        total = torch.zeros_like(out[part], dtype=torch.float32)
        for rank in range(world):
            total += received[rank, part].to(torch.float32)
        out[part] = _saturate(total * (1.0 / world), out.dtype)


def cast_decode(values: Tensor, flat: Tensor, gain: float) -> None:
    """See :meth:`gradcomp.kernels.ops.Ops.cast_decode`."""
    for part in _parts(flat.numel(), 1):
        flat[part] = values[part].to(torch.float32) * gain


# --- PowerSGD ---------------------------------------------------------------------------------------------------------


def matrix_batches(work: Tensor, matrices: Matrices, p: Tensor, q: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Views (M [c, m, n], P [c, m, r], Q transposed [c, r, n]) for each group of equal shapes."""
    for count, m, n, r, first, stride, at_p, at_q in matrices.batches:
        yield (
            work.as_strided((count, m, n), (stride, n, 1), work.storage_offset() + first),
            p[at_p : at_p + count * m * r].view(count, m, r),
            q[at_q : at_q + count * r * n].view(count, r, n),
        )


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
    for part in _parts(blocks.count, blocks.size):
        work.view(-1, blocks.size)[part] = _values(flat, blocks, part, residual, gain, None)
    for matrix, left, right in matrix_batches(work, matrices, p, q):
        torch.bmm(matrix, right.mT, out=left)


def lowrank_backproject(work: Tensor, matrices: Matrices, p: Tensor, q: Tensor) -> None:
    """See :meth:`gradcomp.kernels.ops.Ops.lowrank_backproject`."""
    for matrix, left, right in matrix_batches(work, matrices, p, q):
        torch.bmm(left.mT, matrix, out=right)


def lowrank_decode(
    work: Tensor, matrices: Matrices, p: Tensor, q: Tensor, flat: Tensor, gain: float, residual: bool
) -> None:
    """See :meth:`gradcomp.kernels.ops.Ops.lowrank_decode`."""
    offsets = iter(matrices.flat.tolist())
    for matrix, left, right in matrix_batches(work, matrices, p, q):
        for i in range(matrix.shape[0]):
            at = next(offsets)
            decoded = flat[at : at + matrix[i].numel()].view_as(matrix[i])
            torch.mm(left[i], right[i], out=decoded)
            if residual:
                matrix[i].sub_(decoded)
            decoded.mul_(gain)
