// lowrank_decode: D = P Q^T of a group of equal matrices, flat = gain * D and (optionally) work -= D, in one pass.
//
// Bytes per element: 12 with residual (work in and out, flat out), 4 without; torch's product, subtraction and scaling move
// 28 and 12. 2 r multiply-adds per element: memory-bound up to about r = 16.
// Weighed, not timed: one row per warp reads Q once per row; 8 rows share it and keep 32 sums in registers; 16 rows would
// need 64. P and Q are small and come from cache.
// Registers on sm_70/75/80/86/89/90/100/120; nothing spills:
//   lowrank_decode   124/98/104/99/99/94/104/101
#include "common.cuh"

#define ROWS 8

// A warp computes ROWS rows of 128 columns. Lane L has columns 4 L .. 4 L + 3 (VECTOR: rows are multiples of 4 long, so
// every quad can be one load), else L, L + 32, L + 64, L + 96, which keeps 4-byte accesses contiguous.
template <bool VECTOR>
__device__ __forceinline__ void block_of(
    float* __restrict__ work, const float* __restrict__ p, const float* __restrict__ q, float* __restrict__ flat, int m,
    int n, int r, int row, int col, float gain, int residual)
{
    const int lane = threadIdx.x & 31, first = col + (VECTOR ? 4 * lane : lane), apart = VECTOR ? 1 : 32;
    float sum[ROWS][4];
#pragma unroll
    for (int i = 0; i < ROWS; i++)
#pragma unroll
        for (int c = 0; c < 4; c++) sum[i][c] = 0.0f;
    for (int j = 0; j < r; j++) {
        float right[4];
        if (VECTOR) load4(q + (i64)j * n + first, n - first, right);
        else
#pragma unroll
            for (int c = 0; c < 4; c++) right[c] = first + 32 * c < n ? q[(i64)j * n + first + 32 * c] : 0.0f;
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const float left = row + i < m ? p[(i64)(row + i) * r + j] : 0.0f;
#pragma unroll
            for (int c = 0; c < 4; c++) sum[i][c] += left * right[c];
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        if (row + i < m) {
            const i64 at = (i64)(row + i) * n + first;
            float old[4] = {0.0f, 0.0f, 0.0f, 0.0f}, out[4];
            if (residual) {
                if (VECTOR) load4(work + at, n - first, old);
                else
#pragma unroll
                    for (int c = 0; c < 4; c++) old[c] = first + 32 * c < n ? work[at + 32 * c] : 0.0f;
            }
#pragma unroll
            for (int c = 0; c < 4; c++) {
                out[c] = __fmul_rn(sum[i][c], gain);
                old[c] = __fadd_rn(old[c], -sum[i][c]);
            }
            if (VECTOR) {
                store4(flat + at, n - first, out);
                if (residual) store4(work + at, n - first, old);
            } else {
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    if (first + apart * c < n) {
                        flat[at + apart * c] = out[c];
                        if (residual) work[at + apart * c] = old[c];
                    }
                }
            }
        }
    }
}

// offsets: of the group's matrices in the bucket. Matrix i of the group: work + i * stride, p + i * m * r, q + i * r * n.
extern "C" __global__ void __launch_bounds__(256) lowrank_decode(
    float* __restrict__ work, const float* __restrict__ p, const float* __restrict__ q, float* __restrict__ flat,
    const i64* __restrict__ offsets, int count, int m, int n, int r, i64 stride, float gain, int residual)
{
    const int across = (n + 127) / 128, down = (m + ROWS - 1) / ROWS, warps = gridDim.x * blockDim.x >> 5;
    const i64 each = (i64)across * down, total = each * count;
    for (i64 i = (blockIdx.x * blockDim.x + threadIdx.x) >> 5; i < total; i += warps) {
        const int matrix = (int)(i / each), rest = (int)(i - matrix * each);
        // neighbours of a column block share its part of Q: rows run fastest
        const int row = rest % down * ROWS, col = rest / down * 128;
        float *w = work + matrix * stride, *out = flat + offsets[matrix];
        const float *left = p + (i64)matrix * m * r, *right = q + (i64)matrix * r * n;
        if (n % 4 == 0) block_of<true>(w, left, right, out, m, n, r, row, col, gain, residual);
        else block_of<false>(w, left, right, out, m, n, r, row, col, gain, residual);
    }
}
