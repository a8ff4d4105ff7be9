// What every kernel here shares: exact fp32 steps, 16-byte access to rows of any alignment, reductions.
//
// The sources include nothing but this folder's own headers, so NVRTC needs no CUDA toolkit; the launcher pastes the
// headers in. The same sources are compiled by g++ for the tests (tests/cuda_cpu.h), so everything is plain C++17 plus
// the few intrinsics that header knows.
//
// Layout of work: "pair" t of a block of B elements is its quads t and t + B/8, elements 4t.. and B/2 + 4t... One
// thread holds both (8 values): loads and stores of fp32 are 16 bytes wide and contiguous over the warp, and the two
// nibbles of an int4 byte (elements i and i + B/2) meet in one thread.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define FULL 0xffffffffu   // every lane of a warp takes part
#define INF_BITS 0x7f800000u

// The formulas of the op list round after every step: a fused multiply-add would change signs, codes and residuals.
__device__ __forceinline__ float times_plus(float a, float b, float c) { return __fadd_rn(__fmul_rn(a, b), c); }

__device__ __forceinline__ u32 magnitude(float v) { return __float_as_uint(v) & 0x7fffffffu; }

__device__ __forceinline__ bool aligned16(const void* p) { return ((u64)p & 15u) == 0; }

// v[0..3] = p[0..3]; elements from `left` on are 0 and not touched.
__device__ __forceinline__ void load4(const float* __restrict__ p, i64 left, float* v)
{
    if (left >= 4 && aligned16(p)) {
        const float4 q = *(const float4*)p;
        v[0] = q.x, v[1] = q.y, v[2] = q.z, v[3] = q.w;
    } else {
#pragma unroll
        for (int j = 0; j < 4; j++) v[j] = j < left ? p[j] : 0.0f;
    }
}

// p[0..3] = v[0..3], as far as `left` goes.
__device__ __forceinline__ void store4(float* __restrict__ p, i64 left, const float* v)
{
    if (left >= 4 && aligned16(p)) {
        float4 q;
        q.x = v[0], q.y = v[1], q.z = v[2], q.w = v[3];
        *(float4*)p = q;
    } else {
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (j < left) p[j] = v[j];
    }
}

// Pair t of gain * flat + residual (residual may be null); 0 past `length`. `pairs` is B/8.
__device__ __forceinline__ void load_pair(
    const float* __restrict__ flat, const float* __restrict__ residual, float gain, int length, int pairs, int t, float* v)
{
    float e[8];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int q = 4 * (t + h * pairs);
        load4(flat + q, length - q, v + 4 * h);
        if (residual) load4(residual + q, length - q, e + 4 * h);
    }
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = residual ? times_plus(gain, v[j], e[j]) : __fmul_rn(gain, v[j]);
}

// Reductions over `width` neighbouring lanes, a power of two; every lane gets the result, in a fixed order of adding.
__device__ __forceinline__ float lane_sum(float v, int width = 32)
{
    for (int o = width >> 1; o; o >>= 1) v += __shfl_xor_sync(FULL, v, o);
    return v;
}

__device__ __forceinline__ u32 lane_max(u32 v, int width = 32)
{
    for (int o = width >> 1; o; o >>= 1) {
        const u32 other = __shfl_xor_sync(FULL, v, o);
        v = other > v ? other : v;
    }
    return v;
}

// Sum over all smaller threads of the block (exclusive), and over the whole block. `part`: shared, one per warp; the
// caller puts a barrier between two calls that use the same part.
__device__ __forceinline__ u64 block_scan(u64 v, u64* part, u64* total)
{
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    u64 sum = v;
    for (int o = 1; o < 32; o <<= 1) {
        const u64 below = __shfl_up_sync(FULL, sum, o);
        if (lane >= o) sum += below;
    }
    if (lane == 31) part[warp] = sum;
    __syncthreads();
    u64 before = 0, all = 0;
    for (int w = 0; w < warps; w++) {
        if (w < warp) before += part[w];
        all += part[w];
    }
    *total = all;
    return before + sum - v;
}
