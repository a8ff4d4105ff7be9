// topk_threshold, topk_sample, topk_select: the k-th largest magnitude of every segment (or of a sample of it), exactly.
//
// A radix select over the 31 bits of |v|: three passes of histogram and pick, 11 + 10 + 10 bits.
//
// Bytes per element of the sample: 3 x 4 contiguous (stride 1), 3 x 32 strided (a sector for each; later passes mostly find
// it in cache). The sample is 1 / stride of the elements.
// Weighed, not timed: 4096 bins of the upper 12 bits give a threshold within 6 %, not the exact one; a full sort moves 16 times as
// much. 11 + 10 + 10 bits are three passes, as any split that fits shared memory at full occupancy. Segments share the
// launches: per segment launches would need the host to know their sizes and cost ten launches each.
// Registers on sm_70/75/80/86/89/90/100/120; nothing spills:
//   topk_pick        48/58/38/48/48/40/30/56
//   topk_histogram   32/30/30/32/32/30/27/27
//   topk_plan        42/50/40/40/40/38/38/38
#include "common.cuh"
#include "topk.cuh"

// One thread block: first tiles (of the segments and of their samples), ranks to look for, prefixes found so far.
// `aim`: per cent of k that a sampled threshold is aimed at. `given`: threshold bits to use as they are, or -1.
extern "C" __global__ void __launch_bounds__(256) topk_plan(
    SEGMENTS, int aim, int given, int* __restrict__ tiles, int* __restrict__ sample_tiles, int* __restrict__ rank,
    u32* __restrict__ prefix)
{
    __shared__ u64 part[8];
    u32 tile = 0, sample_tile = 0;
    for (int s0 = 0; s0 < segments; s0 += blockDim.x) {
        const int s = s0 + threadIdx.x;
        u64 mine = 0, all;
        if (s < segments) {
            const i64 count = sample_count(numel[s], stride[s]);
            mine = (u64)((numel[s] + TILE - 1) / TILE) << 32 | (u64)((count + TILE - 1) / TILE);
            const i64 k = ks[s], wanted = k * aim / 100 > 1 ? k * aim / 100 : 1;
            const double share = (double)wanted / (double)numel[s];
            const i64 sampled = (i64)rint(share * (double)count);
            rank[s] = (int)(stride[s] == 1 ? k : sampled > 1 ? sampled : 1);
            prefix[s] = given < 0 ? 0u : (u32)given;
        }
        const u64 before = block_scan(mine, part, &all);
        if (s < segments) {
            tiles[s] = tile + (u32)(before >> 32);
            sample_tiles[s] = sample_tile + (u32)before;
        }
        tile += (u32)(all >> 32);
        sample_tile += (u32)all;
        __syncthreads();
    }
    if (threadIdx.x == 0) tiles[segments] = tile, sample_tiles[segments] = sample_tile;
}

__device__ __forceinline__ void count_digit(float v, u32 prefix, int shift, int bits, u32* histogram)
{
    const u32 key = magnitude(v);
    // Zeros are not counted: they would all meet in one bin, and where the others do not suffice the answer is 0.
    if (key != 0 && key >> shift >> bits == prefix) atomicAdd(&histogram[key >> shift & ((1u << bits) - 1u)], 1u);
}

// Count the next digit of the elements that share the prefix found so far. `hist` is zero before (see topk_pick).
extern "C" __global__ void __launch_bounds__(256) topk_histogram(
    const float* __restrict__ values, SEGMENTS, const int* __restrict__ sample_tiles,
    const u32* __restrict__ prefix, u32* __restrict__ hist, int shift, int bits)
{
    __shared__ u32 local[BINS];
    const int total = sample_tiles[segments], t = threadIdx.x;
    for (int i = t; i < BINS; i += blockDim.x) local[i] = 0;
    for (int tile = blockIdx.x; tile < total; tile += gridDim.x) {
        const int s = segment_of(sample_tiles, segments, tile);
        const i64 step = stride[s], count = sample_count(numel[s], step), base = (i64)(tile - sample_tiles[s]) * TILE;
        const float* in = values + start[s] + step / 2;
        const int here = (int)(count - base < TILE ? count - base : TILE);
        const u32 wanted = prefix[s];
        __syncthreads();
        if (step == 1) {
            for (int i = 4 * t; i < here; i += 4 * blockDim.x) {
                float v[4];
                load4(in + base + i, here - i, v);
#pragma unroll
                for (int j = 0; j < 4; j++) count_digit(v[j], wanted, shift, bits, local);
            }
        } else {
            for (int i = t; i < here; i += blockDim.x) count_digit(in[(base + i) * step], wanted, shift, bits, local);
        }
        __syncthreads();
        for (int i = t; i < 1 << bits; i += blockDim.x) {
            if (local[i]) atomicAdd(&hist[(i64)s * BINS + i], local[i]);
            local[i] = 0;
        }
    }
}

// The digit in which the rank-th largest lies, by a scan from the top; the histogram is cleared for the next pass.
extern "C" __global__ void __launch_bounds__(256) topk_pick(
    int segments, int* __restrict__ rank, u32* __restrict__ prefix, u32* __restrict__ hist, int bits)
{
    __shared__ u64 part[8];
    const int each = (1 << bits) / 256, t = threadIdx.x;
    for (int s = blockIdx.x; s < segments; s += gridDim.x) {
        u32* bins = hist + (i64)s * BINS;
        const int top = (1 << bits) - 1 - t * each;
        const u32 wanted = rank[s], found = prefix[s] << bits;
        u64 sum = 0, total;
        for (int i = 0; i < each; i++) sum += bins[top - i];
        u64 before = block_scan(sum, part, &total);
        if (total < wanted) {
            if (t == 0) prefix[s] = 0, rank[s] = NONE;  // fewer than that are not zero: the threshold is 0
        } else if (before < wanted && before + sum >= wanted) {
            int bin = top;
            while (before + bins[bin] < wanted) before += bins[bin--];
            prefix[s] = found | (u32)bin;
            rank[s] = (int)(wanted - (u32)before);
        }
        for (int i = 0; i < each; i++) bins[top - i] = 0;
        __syncthreads();
    }
}
