// block_server: decode W payloads of my shard, average, add the server residual, encode again: one launch.
//
// Bytes per own element: W times 0.13, 0.52 or 1.02 in (1, 4, 8 bits, blocks of 256), 8 for the residual, 0.13 to 1.02 out:
// 9.1 for 1 bit and W = 8. The mean lives in registers; no fp32 copy of it is ever written.
// Tried: the loop over ranks unrolled 4 times used more registers and took twice as long to compile than 2 times.
// Registers on sm_70/75/80/86/89/90/100/120; nothing spills:
//   server8_any      64/64/64/64/64/59/76/76
//   server8_team     50/51/44/46/46/32/56/62
//   server8_lanes    64/64/64/64/64/63/62/63
//   server4_any      63/64/63/63/63/64/60/64
//   server4_team     50/53/32/47/47/32/58/64
//   server4_lanes    58/64/57/48/48/62/64/64
//   server1_any      58/58/58/60/60/59/80/80
//   server1_team     52/52/52/52/52/56/59/62
//   server1_lanes    64/64/64/64/64/64/60/62
#include "common.cuh"
#include "codes.cuh"

template <int BITS> struct Mean {
    const u8* codes;      // of the first rank, at this place
    const float* scales;
    const float* residual;
    i64 shard;            // bytes between ranks
    float share;          // fp32(1 / W)
    int world, length, pairs;
    __device__ __forceinline__ void load(int t, float* v) const
    {
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = 0.0f;
#pragma unroll 2
        for (int w = 0; w < world; w++) {
            float one[8];
            decode_pair<BITS>(codes + w * shard, *(const float*)((const u8*)scales + w * shard), pairs, t, one);
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] = __fadd_rn(v[j], one[j]);
        }
        float e[8];
        if (residual) {
            load4(residual + 4 * t, 4, e);
            load4(residual + 4 * (pairs + t), 4, e + 4);
        }
#pragma unroll
        for (int j = 0; j < 8; j++) {
            v[j] = residual ? times_plus(v[j], share, e[j]) : __fmul_rn(v[j], share);
            if (element(t, pairs, j) >= length) v[j] = 0.0f;
        }
    }
};

#define PARAMETERS                                                                                                      \
    const u8 *__restrict__ received, const int *__restrict__ owned, const int *__restrict__ number, int count,         \
        int size, int world, i64 shard, i64 codes, i64 scales, u8 *__restrict__ out,                                   \
        const float *__restrict__ residual, float *__restrict__ residual_out, float share, u32 seed, int stochastic,   \
        int *__restrict__ finite
#define ARGUMENTS                                                                                                       \
    received, owned, number, count, size, world, shard, codes, scales, out, residual, residual_out, share, seed,       \
        stochastic, finite

template <int BITS, class Group>
__device__ __forceinline__ void serve(Group& group, int b, int t, PARAMETERS)
{
    // An unused place has length 0: nothing is read or sent for it, but its residual is cleared.
    const bool inside = b < count;
    const int pairs = size >> 3, place = inside ? b : 0, length = inside ? owned[b] : 0;
    const i64 first = (i64)place * size, at = codes + first * BITS / 8;
    const Mean<BITS> value = {
        received + at, (const float*)(received + scales) + place, residual ? residual + first : residual, shard, share,
        length > 0 ? world : 0, length, pairs};
    const Target to = {
        out + at, (float*)(out + scales) + place, residual_out ? residual_out + first : residual_out,
        (u32)number[place] * (u32)size, seed, length, stochastic};
    if (inside && length == 0 && residual_out) {
        const float zero[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        for (int q = t; q < 2 * pairs; q += Group::once ? pairs : 32) store4(to.residual + 4 * q, 4, zero);
    }
    encode_block<BITS>(group, value, to, pairs, t, length > 0, finite);
}

#define KERNELS(BITS)                                                                                                   \
    extern "C" __global__ void __launch_bounds__(256) server##BITS##_lanes(PARAMETERS)                                  \
    {                                                                                                                   \
        Lanes group = {size >> 3};                                                                                      \
        const int shift = __ffs(group.width) - 1, per_warp = 32 >> shift, lane = threadIdx.x & 31;                     \
        const int warp = (blockIdx.x * blockDim.x + threadIdx.x) >> 5, warps = gridDim.x * blockDim.x >> 5;            \
        for (int b = warp * per_warp; b < count; b += warps * per_warp)                                                 \
            serve<BITS>(group, b + (lane >> shift), lane & (group.width - 1), ARGUMENTS);                              \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(1024) server##BITS##_team(PARAMETERS)                                  \
    {                                                                                                                   \
        __shared__ u32 part[2][32];                                                                                     \
        Team group = {part, 0};                                                                                         \
        for (int b = blockIdx.x; b < count; b += gridDim.x) serve<BITS>(group, b, threadIdx.x, ARGUMENTS);             \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(256) server##BITS##_any(PARAMETERS)                                    \
    {                                                                                                                   \
        Any group;                                                                                                      \
        group.width = 32;                                                                                               \
        const int warp = (blockIdx.x * blockDim.x + threadIdx.x) >> 5, warps = gridDim.x * blockDim.x >> 5;            \
        for (int b = warp; b < count; b += warps) serve<BITS>(group, b, threadIdx.x & 31, ARGUMENTS);                  \
    }

KERNELS(1)
KERNELS(4)
KERNELS(8)
