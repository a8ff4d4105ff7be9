// The work list of Top-K: segments are cut into tiles, which a persistent grid walks. All of it lives on the device, so
// the host never waits to learn how large a segment is.

#define TILE 16384    // elements of a tile: 128 groups of 128, a group being one 16-byte load of a warp
#define BINS 2048     // of a histogram: 11 bits of a magnitude, then 10 and 10
#define NONE 0x7fffffff

// One column per segment, from gradcomp.kernels.ops.Segments.
#define SEGMENTS                                                                                                        \
    const i64 *__restrict__ start, const i64 *__restrict__ numel, const i64 *__restrict__ ks,                          \
        const i64 *__restrict__ stride, const i64 *__restrict__ place, int segments

// Segment of a tile: the last one whose first tile is not behind it. `first` has segments + 1 entries.
__device__ __forceinline__ int segment_of(const int* __restrict__ first, int segments, int tile)
{
    int low = 0, high = segments;
    while (high - low > 1) {
        const int middle = (low + high) >> 1;
        if (first[middle] <= tile) low = middle;
        else high = middle;
    }
    return low;
}

__device__ __forceinline__ i64 sample_count(i64 numel, i64 stride) { return (numel - stride / 2 + stride - 1) / stride; }
