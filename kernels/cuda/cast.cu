// cast_encode, cast_mean, cast_decode: fp16 and bf16, converted by hand (no cuda_fp16.h), round half to even.
//
// Bytes per element: 6 (encode, decode), 2 W + 2 (mean). 8 elements per thread, 16-byte accesses.
// Weighed, not timed: cuda_fp16.h and cuda_bf16.h have single instructions, but NVRTC then needs a CUDA toolkit's headers; by hand it
// is some 10 integer instructions per element, where a device that copies 4 TB/s has time for about 40.
// Registers on sm_70/75/80/86/89/90/100/120; nothing spills:
//   cast_decode_bf16 32/36/32/36/36/26/32/24
//   cast_mean_bf16   30/36/31/34/34/39/37/35
//   cast_encode_bf16 32/44/40/40/40/34/32/36
//   cast_decode_f16  32/39/32/40/40/32/32/30
//   cast_mean_f16    32/39/30/36/36/36/39/39
//   cast_encode_f16  32/34/32/34/34/28/32/36
#include "common.cuh"

struct F16 {
    static const u32 top = 0x477fe000u;  // 65504
    static const u16 largest = 0x7bff;
    static __device__ __forceinline__ u16 narrow(float v)  // |v| <= top, or inf, or NaN
    {
        const u32 sign = __float_as_uint(v) >> 16 & 0x8000u, a = magnitude(v);
        u32 h;
        if (a >= INF_BITS) h = a > INF_BITS ? 0x7e00u : 0x7c00u;
        // below 2**-14 the result is subnormal: adding 0.5 leaves exactly the 24 bits after the point that it has
        else if (a < 0x38800000u) h = __float_as_uint(__fadd_rn(__uint_as_float(a), 0.5f)) - 0x3f000000u;
        else h = (a + 0xfffu + (a >> 13 & 1u) - 0x38000000u) >> 13;
        return (u16)(sign | h);
    }
    static __device__ __forceinline__ float widen(u16 h)
    {
        const u32 sign = (u32)(h & 0x8000u) << 16, a = h & 0x7fffu;
        if (a >= 0x7c00u) return __uint_as_float(sign | INF_BITS | (a & 0x3ffu) << 13);
        return __uint_as_float(sign | __float_as_uint(__fmul_rn(__uint_as_float(a << 13), 5.192296858534828e33f)));
    }
};

struct BF16 {
    static const u32 top = 0x7f7f0000u;
    static const u16 largest = 0x7f7f;
    static __device__ __forceinline__ u16 narrow(float v)
    {
        const u32 u = __float_as_uint(v);
        if (magnitude(v) > INF_BITS) return (u16)(u >> 16 | 0x40u);
        return (u16)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
    }
    static __device__ __forceinline__ float widen(u16 h) { return __uint_as_float((u32)h << 16); }
};

// One value; finite values beyond the type's range become its largest and are counted.
template <class T> __device__ __forceinline__ u16 saturate(float v, u32& count)
{
    const u32 a = magnitude(v);
    if (a > T::top && a < INF_BITS) {
        count++;
        return (u16)(T::largest | (__float_as_uint(v) >> 16 & 0x8000u));
    }
    return T::narrow(v);
}

__device__ __forceinline__ void store8(u16* p, i64 left, const u16* v)
{
    if (left >= 8 && aligned16(p)) {
        uint4 q;
        q.x = v[0] | (u32)v[1] << 16, q.y = v[2] | (u32)v[3] << 16;
        q.z = v[4] | (u32)v[5] << 16, q.w = v[6] | (u32)v[7] << 16;
        *(uint4*)p = q;
    } else {
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (j < left) p[j] = v[j];
    }
}

__device__ __forceinline__ void load8(const u16* __restrict__ p, i64 left, u16* v)
{
    if (left >= 8 && aligned16(p)) {
        const uint4 q = *(const uint4*)p;
        v[0] = (u16)q.x, v[1] = (u16)(q.x >> 16), v[2] = (u16)q.y, v[3] = (u16)(q.y >> 16);
        v[4] = (u16)q.z, v[5] = (u16)(q.z >> 16), v[6] = (u16)q.w, v[7] = (u16)(q.w >> 16);
    } else {
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = j < left ? p[j] : 0;
    }
}

template <class T>
__device__ __forceinline__ void encode(
    const float* __restrict__ flat, u16* __restrict__ out, i64 n, float gain, int* __restrict__ finite,
    u64* __restrict__ saturated)
{
    const i64 step = (i64)gridDim.x * blockDim.x * 8;
    u32 peak = 0, count = 0;
    for (i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * 8; i < n; i += step) {
        float v[8];
        u16 h[8];
        load4(flat + i, n - i, v);
        load4(flat + i + 4, n - i - 4, v + 4);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            v[j] = __fmul_rn(v[j], gain);
            peak = magnitude(v[j]) > peak ? magnitude(v[j]) : peak;
            h[j] = saturate<T>(v[j], count);
        }
        store8(out + i, n - i, h);
    }
    if (peak >= INF_BITS) atomicExch(finite, 0);
    if (count) atomicAdd(saturated, (u64)count);  // rare
}

template <class T>
__device__ __forceinline__ void mean(
    const u16* __restrict__ received, i64 apart, u16* __restrict__ out, i64 m, int world, float share)
{
    const i64 step = (i64)gridDim.x * blockDim.x * 8;
    u32 ignored = 0;
    for (i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * 8; i < m; i += step) {
        float v[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        u16 h[8];
#pragma unroll 4
        for (int w = 0; w < world; w++) {
            load8(received + w * apart + i, m - i, h);
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] = __fadd_rn(v[j], T::widen(h[j]));
        }
#pragma unroll
        for (int j = 0; j < 8; j++) h[j] = saturate<T>(__fmul_rn(v[j], share), ignored);
        store8(out + i, m - i, h);
    }
}

template <class T>
__device__ __forceinline__ void decode(const u16* __restrict__ values, float* __restrict__ flat, i64 n, float gain)
{
    const i64 step = (i64)gridDim.x * blockDim.x * 8;
    for (i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * 8; i < n; i += step) {
        float v[8];
        u16 h[8];
        load8(values + i, n - i, h);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = __fmul_rn(T::widen(h[j]), gain);
        store4(flat + i, n - i, v);
        store4(flat + i + 4, n - i - 4, v + 4);
    }
}

#define KERNELS(NAME, T)                                                                                                \
    extern "C" __global__ void __launch_bounds__(256) cast_encode_##NAME(                                               \
        const float* __restrict__ flat, u16* __restrict__ out, i64 n, float gain, int* __restrict__ finite,            \
        u64* __restrict__ saturated)                                                                                    \
    {                                                                                                                   \
        encode<T>(flat, out, n, gain, finite, saturated);                                                               \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(256) cast_mean_##NAME(                                                 \
        const u16* __restrict__ received, i64 apart, u16* __restrict__ out, i64 m, int world, float share)                        \
    {                                                                                                                   \
        mean<T>(received, apart, out, m, world, share);                                                                        \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(256) cast_decode_##NAME(                                               \
        const u16* __restrict__ values, float* __restrict__ flat, i64 n, float gain)                                   \
    {                                                                                                                   \
        decode<T>(values, flat, n, gain);                                                                               \
    }

KERNELS(f16, F16)
KERNELS(bf16, BF16)
