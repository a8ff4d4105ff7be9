// block_encode: gain * flat + residual, blockwise to 1, 4 or 8 bits, with the new residual, in one pass.
//
// Bytes per element, fp32 gradient and residual: 12.13, 12.52, 13.02 for 1, 4, 8 bits in blocks of 256 (read both, write
// residual and payload); 4.13, 4.52, 5.02 without feedback. Values stay in registers between the reduction to a scale and
// the encoding, so each byte moves once (`any` reads twice, mostly from cache).
// Weighed, not timed: (1) 4-byte loads and a ballot per 32 elements: 4 times the load instructions. (2) 8 neighbouring elements per
// thread: a byte of signs without any exchange, but each 16-byte load of a warp spans 1 KiB, twice the cache lines. (3)
// this: two quads half a block apart, contiguous over the warp; one shuffle makes bytes of nibbles. (4) fp64 sums as in the
// reference: 1/64 of the rate on most devices; fp32, and a second look where they overflow, agrees to 1e-6.
// Registers on sm_70/75/80/86/89/90/100/120; nothing spills:
//   encode8_any      64/64/64/52/52/64/63/64
//   encode8_team     45/49/46/49/49/47/53/55
//   encode8_lanes    48/53/48/48/48/48/48/48
//   encode4_any      59/61/59/62/62/62/63/64
//   encode4_team     50/50/51/49/49/48/55/57
//   encode4_lanes    55/55/47/48/48/48/58/57
//   encode1_any      48/48/48/48/48/61/70/68
//   encode1_team     55/55/56/55/55/56/56/60
//   encode1_lanes    50/53/48/50/50/47/57/56
#include "common.cuh"
#include "codes.cuh"

struct Gradient {
    const float* flat;
    const float* residual;
    float gain;
    int length, pairs;
    __device__ __forceinline__ void load(int t, float* v) const { load_pair(flat, residual, gain, length, pairs, t, v); }
};

#define PARAMETERS                                                                                                      \
    const float *__restrict__ flat, const i64 *__restrict__ start, const int *__restrict__ length,                     \
        const int *__restrict__ position, const int *__restrict__ number, int count, int size, int per_shard,          \
        i64 shard, i64 codes, i64 scales, u8 *__restrict__ payload, const float *__restrict__ residual,                \
        float *__restrict__ residual_out, float gain, u32 seed, int stochastic, int *__restrict__ finite
#define ARGUMENTS                                                                                                       \
    flat, start, length, position, number, count, size, per_shard, shard, codes, scales, payload, residual,            \
        residual_out, gain, seed, stochastic, finite

template <int BITS, class Group>
__device__ __forceinline__ void encode(Group& group, int b, int t, PARAMETERS)
{
    const bool used = b < count;
    const int pairs = size >> 3, place = used ? position[b] : 0;
    const int owner = place / per_shard, local = place - owner * per_shard;
    const int filled = used ? length[b] : 0;
    const i64 first = (i64)b * size;
    u8* out = payload + owner * shard;
    const Gradient value = {
        flat + (used ? start[b] : 0), residual ? residual + first : residual, gain, filled, pairs};
    const Target to = {
        out + codes + (i64)local * size * BITS / 8,
        (float*)(out + scales) + local,
        residual_out ? residual_out + first : residual_out,
        (used ? (u32)number[b] : 0u) * (u32)size, seed, filled, stochastic};
    encode_block<BITS>(group, value, to, pairs, t, used, finite);
}

// b runs until the whole warp is past the end: its lanes meet in shuffles.
#define KERNELS(BITS)                                                                                                   \
    extern "C" __global__ void __launch_bounds__(256) encode##BITS##_lanes(PARAMETERS)                                  \
    {                                                                                                                   \
        Lanes group = {size >> 3};                                                                                      \
        const int shift = __ffs(group.width) - 1, per_warp = 32 >> shift, lane = threadIdx.x & 31;                     \
        const int warp = (blockIdx.x * blockDim.x + threadIdx.x) >> 5, warps = gridDim.x * blockDim.x >> 5;            \
        for (int b = warp * per_warp; b < count; b += warps * per_warp)                                                 \
            encode<BITS>(group, b + (lane >> shift), lane & (group.width - 1), ARGUMENTS);                             \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(1024) encode##BITS##_team(PARAMETERS)                                  \
    {                                                                                                                   \
        __shared__ u32 part[2][32];                                                                                     \
        Team group = {part, 0};                                                                                         \
        for (int b = blockIdx.x; b < count; b += gridDim.x) encode<BITS>(group, b, threadIdx.x, ARGUMENTS);            \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(256) encode##BITS##_any(PARAMETERS)                                    \
    {                                                                                                                   \
        Any group;                                                                                                      \
        group.width = 32;                                                                                               \
        const int warp = (blockIdx.x * blockDim.x + threadIdx.x) >> 5, warps = gridDim.x * blockDim.x >> 5;            \
        for (int b = warp; b < count; b += warps) encode<BITS>(group, b, threadIdx.x & 31, ARGUMENTS);                 \
    }

KERNELS(1)
KERNELS(4)
KERNELS(8)
