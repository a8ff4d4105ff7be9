"""The op list: what every kernel backend implements, with the same names, arguments and results.

Legend: ``n`` elements of a flat bucket, ``nb`` blocks, ``B`` elements per block, ``W`` world size, ``S`` bytes per
shard, ``k`` selected elements, ``r`` rank of a low-rank factor.

Rules that hold for every op and backend:

* Arrays are one-dimensional and contiguous. Nothing is allocated that grows with ``n``: outputs are passed in.
* ``flat`` is fp32: the bucket. Its unit may be a loss scale; ``gain`` converts. Encoding computes
  ``v = gain * flat + residual``; decoding writes ``flat = gain * decoded``. So residuals and payloads are unscaled.
* Every fp32 operation of a formula rounds by itself: no fused multiply-add, no reciprocal for a division. Only sums and
  matrix products may be reordered or fused. So signs, codes and residuals do not depend on the machine.
* B is a multiple of 32.
* ``residual`` (old, read) and ``residual_out`` (new, written) live in *block space*: fp32 ``[nb * B]``, element ``i``
  of block ``b`` at ``b * B + i``, padding zero (as are unused places of a server's residual). Both are None without
  error feedback. They never alias.
* ``finite`` is int32 ``[1]``; an op clears it (writes 0) when a value v that it encodes is inf or NaN, and never sets
  it. After that its outputs are unspecified, but nothing out of bounds is touched.
* Bits, indices and integers are equal on all backends; floating sums agree within rtol 1e-5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Blocks:
    """How a flat bucket is cut into blocks that never span parameters, and which rank owns each block.

    ``start`` int64 [nb]: first element of the block in the flat bucket. ``length`` int32 [nb]: 1..B elements.
    ``position`` int32 [nb]: the block's place in a payload, ``owner * per_shard + index within the owner's shard``.
    ``owned`` int32 [per_shard]: length of the block at each place of *this* rank's shard, 0 for an unused place.
    ``number`` int32 [nb] and ``owned_number`` int32 [per_shard]: the blocks' numbers in the whole model, which do not
    depend on the bucket; stochastic rounding counts from them.
    """

    size: int
    world: int
    per_shard: int
    start: Tensor
    length: Tensor
    position: Tensor
    owned: Tensor
    number: Tensor
    owned_number: Tensor

    @property
    def count(self) -> int:
        """Number of blocks nb."""
        return self.start.numel()


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """Byte offsets inside one shard of a payload; all multiples of 16, so that 16-byte loads and fp32 views are legal.

    The code of place ``l`` starts at ``codes + l * B * bits // 8``, its fp32 scale at ``scales + 4 * l``.
    """

    nbytes: int
    codes: int
    scales: int


@dataclass(frozen=True, slots=True)
class Segments:
    """Parameters in block space for Top-K within each of them; int64 tensors of equal length.

    ``start`` first element in block space, ``numel`` elements, ``k`` how many are selected, ``stride`` of the sample that
    the threshold comes from (1: exact), ``place`` of the first selected element in the output.
    """

    start: Tensor
    numel: Tensor
    k: Tensor
    stride: Tensor
    place: Tensor


@dataclass(frozen=True, slots=True)
class Matrices:
    """Matrices of a bucket for low-rank ops, equal shapes next to each other.

    Per matrix (int64 tensors of equal length): ``flat`` offset in the bucket, ``work`` offset in block space, ``rows``
    m, ``cols`` n, ``rank`` r = min(rank, m, n), ``p`` offset of P [m, r] row-major, ``q`` offset of Q transposed
    [r, n]. ``batches``: one tuple per group of equal shapes, (count, m, n, r, first work offset, work stride, p offset,
    q offset): within a group work offsets grow by the stride, P by m*r and Q by r*n.
    """

    flat: Tensor
    work: Tensor
    rows: Tensor
    cols: Tensor
    rank: Tensor
    p: Tensor
    q: Tensor
    batches: tuple[tuple[int, int, int, int, int, int, int, int], ...]


class Ops(Protocol):
    """A kernel backend (a module: ``reference``, ``cpu``, ``cuda``). ``name``: ``torch``, ``numba``, ``cuda``."""

    name: str

    def block_encode(
        self,
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
        """Encode the bucket blockwise into ``payload`` uint8 [W * S]; ``bits`` is 1, 4 or 8.

        ``v = gain * flat + residual`` per block of ``length`` elements, and ``residual_out = v - decoded(v)``.

        * 1 bit: scale = mean |v| over the block; bit i (little-endian in its byte) is set where the sign bit of v is
          clear; bits past the length are 0. Decoded: +scale or -scale. [EF-SignSGD, Karimireddy et al. 2019]
        * 8 bits: scale = max|v| / 127, code = int8 round-half-even(v * (127 / max|v|)), all in fp32; codes past the
          length are 0. 4 bits: the same with 7; element i < B/2 in the low, i + B/2 in the high nibble of byte i, two's
          complement. A block with max|v| < 2**-100 has scale 0 and codes 0. Decoded: code * scale.
        * with ``seed`` (8 and 4 bits): stochastic rounding, code = floor(v * inv + u), clipped to +-127 / +-7, where
          u = (h >> 8) * 2**-24, h = hash32(seed, counter), counter = number * B + i as uint32;
          hash32: x = counter * 0x9E3779B9 + seed; x ^= x>>16; x *= 0x85EBCA6B; x ^= x>>13; x *= 0xC2B2AE35; x ^= x>>16
          (all uint32). The product v * inv and the sum are rounded separately (no fused multiply-add).

        Places of the payload that no block uses are left alone.
        """

    def block_server(
        self,
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
        """The server stage of a two-phase exchange: decode W shards, average, add the server residual, encode again.

        ``received`` uint8 [W * S] (rank w's encoding of my shard at w * S), ``out`` uint8 [S]. For each place l with
        ``owned[l]`` > 0: v = (0 + decoded_0 + decoded_1 ..., fp32, in rank order) * fp32(1 / W) + residual[l*B + i];
        encoded as in block_encode (counter = owned_number[l] * B + i). ``residual``, ``residual_out``: fp32
        [per_shard * B] or None.
        """

    def block_decode(
        self, gathered: Tensor, blocks: Blocks, layout: ShardLayout, flat: Tensor, bits: int, gain: float
    ) -> None:
        """Decode ``gathered`` uint8 [W * S] into the bucket: flat[start + i] = gain * decoded. Other elements stay."""

    def accumulate(
        self, flat: Tensor, blocks: Blocks, residual: Tensor | None, out: Tensor, gain: float, finite: Tensor
    ) -> None:
        """out (block space) = gain * flat + residual, padding zero; clears ``finite`` on inf or NaN."""

    def topk_threshold(self, values: Tensor, k: int) -> float:
        """The k-th largest magnitude of ``values`` fp32 [m], exactly (1 <= k <= m). Finite input."""

    def topk_sample(self, values: Tensor, k: int, stride: int) -> float:
        """Estimate of :meth:`topk_threshold` from every ``stride``-th element, starting at stride // 2.

        The max(1, round(k / m * number of samples))-th largest magnitude of the sample. 1 <= stride <= m.
        """

    def topk_compact(self, values: Tensor, threshold: float, k: int, indices: Tensor, selected: Tensor) -> int:
        """Compact elements with |v| >= threshold, at most k, in ascending index order; the count is returned.

        threshold >= 0. When more than k qualify: all with |v| > threshold come first and ties at the threshold fill up
        by lowest index; if even those exceed k, the k lowest indices among |v| > threshold are taken. ``indices`` int32
        [k] and ``selected`` fp32 [k] are filled; unused places at the end hold index m - 1 and value 0.
        """

    def topk_select(self, values: Tensor, segments: Segments, indices: Tensor, selected: Tensor) -> None:
        """Select within each segment of ``values`` (block space), as :meth:`topk_compact` does.

        The threshold is :meth:`topk_threshold` where stride is 1, else :meth:`topk_sample` aimed at max(1, k * 97 // 100).
        ``indices`` int32 [sum of k], in block space, and ``selected`` fp32 [sum of k] are filled segment after segment;
        unused places at a segment's end hold its last element's index and value 0.
        """

    def topk_decode(self, indices: Tensor, selected: Tensor, blocks: Blocks, flat: Tensor, gain: float) -> None:
        """Write the sum of sparse payloads: every element of every block of flat is zeroed, then
        flat[start[i // B] + i % B] += gain * value for each (index i in block space, value), in the order given.

        ``indices`` int32 [W * k], ``selected`` fp32 [W * k]. An index that points at padding has value 0.
        """

    def cast_encode(self, flat: Tensor, out: Tensor, gain: float, finite: Tensor, saturated: Tensor) -> None:
        """out (fp16 or bf16, [n]) = gain * flat, rounded half to even.

        Finite values beyond the type's largest finite value become that value with their sign and are counted into
        ``saturated`` int64 [1] (added); inf stays inf and NaN stays NaN, and both clear ``finite``.
        """

    def cast_mean(self, received: Tensor, out: Tensor) -> None:
        """out (fp16 or bf16, [m]) = mean over W of ``received`` [W, m], summed in fp32 in rank order, times fp32(1/W),
        then saturated as in :meth:`cast_encode` (not counted)."""

    def cast_decode(self, values: Tensor, flat: Tensor, gain: float) -> None:
        """flat = gain * values (fp16 or bf16)."""

    def lowrank_project(
        self,
        flat: Tensor,
        matrices: Matrices,
        blocks: Blocks,
        residual: Tensor | None,
        work: Tensor,
        q: Tensor,
        p: Tensor,
        gain: float,
    ) -> None:
        """work (block space) = gain * flat + residual; P_i = M_i Q_i for every matrix M_i of work. [PowerSGD, alg. 1]

        A matrix with inf or NaN gives a P with inf or NaN. ``blocks`` cuts the same elements as ``matrices``.
        """

    def lowrank_backproject(self, work: Tensor, matrices: Matrices, p: Tensor, q: Tensor) -> None:
        """Q_i^T = P_i^T M_i, written to ``q``."""

    def lowrank_decode(
        self, work: Tensor, matrices: Matrices, p: Tensor, q: Tensor, flat: Tensor, gain: float, residual: bool
    ) -> None:
        """flat = gain * P_i Q_i^T at each matrix; with ``residual``, work -= P_i Q_i^T in the same pass."""
