// accumulate: out (block space) = gain * flat + residual, padding zero, with the finite check (finite may be null).
//
// Bytes per element: 12 (flat, residual in, out), 8 without a residual. 128-bit accesses; a parameter that does not start
// at a multiple of 16 bytes is read by 4 bytes, which costs the first-level cache, not DRAM.
// Weighed, not timed: a warp per block of the table reads its row once, but leaves lanes idle for B < 256; this one gives each thread
// a pair and pays one 32-bit division for 8 elements, whatever B is.
// Registers on sm_70/75/80/86/89/90/100/120; nothing spills:
//   accumulate       36/34/34/34/34/35/35/36
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256) accumulate(
    const float* __restrict__ flat, const i64* __restrict__ start, const int* __restrict__ length, int count, int size,
    const float* __restrict__ residual, float* __restrict__ out, float gain, int* __restrict__ finite)
{
    const u32 pairs = size >> 3, total = (u32)count * pairs, step = gridDim.x * blockDim.x;
    u32 peak = 0;
    for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < total; i += step) {
        const int b = i / pairs, t = i - b * pairs;
        const i64 first = (i64)b * size;
        float v[8];
        load_pair(flat + start[b], residual ? residual + first : residual, gain, length[b], pairs, t, v);
        store4(out + first + 4 * t, 4, v);
        store4(out + first + 4 * (pairs + t), 4, v + 4);
#pragma unroll
        for (int j = 0; j < 8; j++) peak = magnitude(v[j]) > peak ? magnitude(v[j]) : peak;
    }
    if (finite && peak >= INF_BITS) atomicExch(finite, 0);
}
