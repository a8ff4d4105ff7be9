// topk_compact, topk_select: elements at or above each segment's threshold, exactly k places, ascending.
//
// Mark (one bit per element for above, one for equal, and their counts per tile), scan the counts, write. With G above
// and E equal: of the first min(G, k) above and the first min(E, max(0, k - G)) equal, place = number of those before.
//
// Bytes per element: 4.5 (values once; 2 mask bits written and read), and 12 per selected one.
// Weighed, not timed: (1) count, scan, read values again: 8 bytes. (2) one pass with an atomic per tile: 4 bytes, but the order is
// whichever tile came first, and k places cannot be kept to the lowest indices. (3) this: the second pass reads masks.
// A ballot per quarter of a quad gives masks in a permuted order that the writer undoes, without a shuffle.
// Registers on sm_70/75/80/86/89/90/100/120; nothing spills:
//   topk_write       40/42/40/40/40/32/40/48
//   topk_scan        46/48/37/40/40/36/32/34
//   topk_mark        32/34/32/33/33/35/32/40
#include "common.cuh"
#include "topk.cuh"

// masks: 8 words per group of 128 elements. Bit L of word j is element 4 L + j: above; word 4 + j: equal.
extern "C" __global__ void __launch_bounds__(256) topk_mark(
    const float* __restrict__ values, SEGMENTS, const int* __restrict__ tiles, const u32* __restrict__ threshold,
    u32* __restrict__ masks, u64* __restrict__ counts)
{
    __shared__ u64 part[8];
    const int total = tiles[segments], lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    for (int tile = blockIdx.x; tile < total; tile += gridDim.x) {
        const int s = segment_of(tiles, segments, tile);
        const i64 base = (i64)(tile - tiles[s]) * TILE;
        const int here = (int)(numel[s] - base < TILE ? numel[s] - base : TILE);
        const float* in = values + start[s] + base;
        const u32 at = threshold[s];
        u64 sum = 0;
#pragma unroll 4
        for (int g = warp; 128 * g < here; g += 8) {
            const int first = g * 128 + 4 * lane;
            float v[4];
            u32 above[4], equal[4], word = 0;
            load4(in + first, here - first, v);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const u32 key = magnitude(v[j]);
                const bool inside = first + j < here;
                above[j] = __ballot_sync(FULL, inside && key > at);
                equal[j] = __ballot_sync(FULL, inside && key == at);
                sum += (u64)__popc(above[j]) << 32 | (u64)__popc(equal[j]);
            }
#pragma unroll
            for (int j = 0; j < 4; j++) word = lane == j ? above[j] : lane == 4 + j ? equal[j] : word;
            if (lane < 8) masks[((i64)tile * (TILE / 128) + g) * 8 + lane] = word;
        }
        if (lane == 0) part[warp] = sum;
        __syncthreads();
        if (threadIdx.x == 0) {
            u64 both = 0;
            for (int w = 0; w < 8; w++) both += part[w];
            counts[tile] = both;
        }
        __syncthreads();
    }
}

// Per segment: counts of its tiles to counts before each tile; how many equal ones may go; unused places filled.
extern "C" __global__ void __launch_bounds__(256) topk_scan(
    const float* __restrict__ values, SEGMENTS, const int* __restrict__ tiles, u64* __restrict__ counts,
    int* __restrict__ quota, int* __restrict__ found, int* __restrict__ indices, float* __restrict__ selected)
{
    __shared__ u64 part[8];
    for (int s = blockIdx.x; s < segments; s += gridDim.x) {
        u64 sum = 0, all;
        for (int tile = tiles[s]; tile < tiles[s + 1]; tile += blockDim.x) {
            const int mine = tile + threadIdx.x;
            const bool inside = mine < tiles[s + 1];
            const u64 before = block_scan(inside ? counts[mine] : 0, part, &all);
            if (inside) counts[mine] = sum + before;
            sum += all;
            __syncthreads();
        }
        const i64 k = ks[s], above = (i64)(sum >> 32), equal = (i64)(sum & FULL);
        const i64 room = above < k ? k - above : 0, ties = equal < room ? equal : room;
        const i64 used = (above < k ? above : k) + ties;
        if (threadIdx.x == 0) quota[s] = (int)ties, found[s] = (int)used;
        for (i64 i = used + threadIdx.x; i < k; i += blockDim.x) {
            indices[place[s] + i] = (int)(start[s] + numel[s] - 1);
            selected[place[s] + i] = 0.0f;
        }
    }
}

extern "C" __global__ void __launch_bounds__(128) topk_write(
    const float* __restrict__ values, SEGMENTS, const int* __restrict__ tiles, const u32* __restrict__ masks,
    const u64* __restrict__ counts, const int* __restrict__ quota, int* __restrict__ indices,
    float* __restrict__ selected)
{
    __shared__ u64 part[4];
    const int total = tiles[segments], t = threadIdx.x;
    for (int tile = blockIdx.x; tile < total; tile += gridDim.x) {
        const int s = segment_of(tiles, segments, tile);
        const i64 left = numel[s] - (i64)(tile - tiles[s]) * TILE;
        uint4 a = {0, 0, 0, 0}, e = a;
        if (128 * t < left) {
            const uint4* group = (const uint4*)masks + ((i64)tile * (TILE / 128) + t) * 2;
            a = group[0], e = group[1];
        }
        const u32 above[4] = {a.x, a.y, a.z, a.w}, equal[4] = {e.x, e.y, e.z, e.w};
        u64 sum = 0, all;
#pragma unroll
        for (int j = 0; j < 4; j++) sum += (u64)__popc(above[j]) << 32 | (u64)__popc(equal[j]);
        const u64 before = counts[tile] + block_scan(sum, part, &all);
        const int k = (int)ks[s], ties = quota[s];
        int above_before = (int)(before >> 32), equal_before = (int)(before & FULL);
        const i64 base = start[s] + (i64)(tile - tiles[s]) * TILE + 128 * t, to = place[s];
        u32 lanes = above[0] | above[1] | above[2] | above[3] | equal[0] | equal[1] | equal[2] | equal[3];
        while (lanes) {
            const int lane = __ffs(lanes) - 1;
            lanes &= lanes - 1;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const bool is_above = above[j] >> lane & 1, is_equal = equal[j] >> lane & 1;
                if (is_above ? above_before < k : is_equal && equal_before < ties) {
                    const i64 at = base + 4 * lane + j;
                    const int slot = (above_before < k ? above_before : k) + (equal_before < ties ? equal_before : ties);
                    indices[to + slot] = (int)at;
                    selected[to + slot] = values[at];
                }
                above_before += is_above;
                equal_before += is_equal;
            }
        }
        __syncthreads();
    }
}
