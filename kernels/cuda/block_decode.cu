// block_decode: gathered payloads into the bucket, flat = gain * decoded.
//
// Bytes per element: 4.13, 4.52, 5.02 for 1, 4, 8 bits in blocks of 256 (codes and scale in, fp32 out).
// Weighed, not timed: a warp per block, as in accumulate.cu; a 1-bit word per 32 elements would need 32 scattered 4-byte stores, or
// shuffles, where a nibble per thread is read as a byte that its neighbour finds in cache.
// Registers on sm_70/75/80/86/89/90/100/120; nothing spills:
//   decode8          32/34/32/32/32/31/32/39
//   decode4          32/34/31/30/30/32/31/39
//   decode1          28/27/27/26/26/30/28/34
#include "common.cuh"
#include "codes.cuh"

template <int BITS>
__device__ __forceinline__ void decode(
    const u8* __restrict__ gathered, const i64* __restrict__ start, const int* __restrict__ length,
    const int* __restrict__ position, int count, int size, int per_shard, i64 shard, i64 codes, i64 scales,
    float* __restrict__ flat, float gain)
{
    const u32 pairs = size >> 3, total = (u32)count * pairs, step = gridDim.x * blockDim.x;
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < total; i += step) {
        const int b = i / pairs, t = i - b * pairs, place = position[b];
        const int owner = place / per_shard, local = place - owner * per_shard, filled = length[b];
        const u8* in = gathered + owner * shard;
        float v[8];
        decode_pair<BITS>(in + codes + (i64)local * size * BITS / 8, ((const float*)(in + scales))[local], pairs, t, v);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = __fmul_rn(v[j], gain);
        float* out = flat + start[b];
        const int q = 4 * t, r = 4 * (pairs + t);
        store4(out + q, filled - q, v);
        store4(out + r, filled - r, v + 4);
    }
}

#define KERNEL(BITS)                                                                                                    \
    extern "C" __global__ void __launch_bounds__(256) decode##BITS(                                                     \
        const u8* __restrict__ gathered, const i64* __restrict__ start, const int* __restrict__ length,                \
        const int* __restrict__ position, int count, int size, int per_shard, i64 shard, i64 codes, i64 scales,        \
        float* __restrict__ flat, float gain)                                                                           \
    {                                                                                                                   \
        decode<BITS>(                                                                                                   \
            gathered, start, length, position, count, size, per_shard, shard, codes, scales, flat, gain);              \
    }

KERNEL(1)
KERNEL(4)
KERNEL(8)
