// topk_decode: the bucket's blocks to zero, then one launch per rank's payload, in rank order, adds its entries.
//
// Bytes per element: 4 (zeros), and 8 + 2 x 32 (a sector each way) per entry.
// Weighed, not timed: all ranks in one launch is one launch instead of W, but atomics of different ranks then come in any order and
// the sum's last bit with them. A block per range of the bucket, which adds the ranks' entries in shared memory, would write
// every element once, but needs sorted indices, which the op list does not promise.
// Registers on sm_70/75/80/86/89/90/100/120; nothing spills:
//   topk_add         19/15/17/17/17/19/32/40
//   topk_zero        16/14/14/14/14/19/18/20
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256) topk_zero(
    const i64* __restrict__ start, const int* __restrict__ length, int count, int size, float* __restrict__ flat)
{
    const u32 quads = size >> 2, total = (u32)count * quads, step = gridDim.x * blockDim.x;
    const float zero[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < total; i += step) {
        const int b = i / quads, q = 4 * (i - b * quads);
        store4(flat + start[b] + q, length[b] - q, zero);
    }
}

// A rank's indices are distinct but for entries of value 0, which are skipped: one atomic per address and launch, so
// the order of adding is that of the launches. An index outside the blocks is not followed.
extern "C" __global__ void __launch_bounds__(256) topk_add(
    const int* __restrict__ indices, const float* __restrict__ selected, i64 k, const i64* __restrict__ start,
    const int* __restrict__ length, int count, int size, float* __restrict__ flat, float gain)
{
    const i64 step = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < k; i += step) {
        const int index = indices[i];
        const float value = selected[i];
        const int b = index / size, e = index - b * size;
        if (value != 0.0f && index >= 0 && b < count && e < length[b]) atomicAdd(&flat[start[b] + e], __fmul_rn(value, gain));
    }
}
