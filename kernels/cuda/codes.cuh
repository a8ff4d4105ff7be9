// The block format of 1-bit, int4 and int8: one pair of quads to codes and back, and the encoding of one block.
//
// A group of threads encodes a block: it reduces the block to a scale, then every thread writes its own codes and
// residual. Three groups exist, and the launcher picks by block size:
//   lanes  B = 32, 64, 128, 256: B/8 neighbouring lanes, values stay in registers; 256/B blocks per warp;
//   team   B = 512, 768 .. 8192: a thread block of B/8 threads, values stay in registers;
//   any    other sizes: one warp, which reads the values twice (the second time mostly from cache).

struct Lanes {
    static const bool once = true;
    int width;
    __device__ __forceinline__ float sum(float v) { return lane_sum(v, width); }
    __device__ __forceinline__ u32 max(u32 v) { return lane_max(v, width); }
    __device__ __forceinline__ bool any(bool p) { return __any_sync(FULL, p); }
};

// Two parts are used in turn, so one barrier per reduction is enough: whoever writes a part again has passed the
// barrier of the reduction between, hence everybody has read it.
struct Team {
    static const bool once = true;
    u32 (*part)[32];
    int turn;
    __device__ __forceinline__ u32 gather(u32 v)
    {
        const int lane = threadIdx.x & 31, warps = blockDim.x >> 5;
        turn ^= 1;
        if (lane == 0) part[turn][threadIdx.x >> 5] = v;
        __syncthreads();
        return lane < warps ? part[turn][lane] : 0u;
    }
    __device__ __forceinline__ float sum(float v) { return lane_sum(__uint_as_float(gather(__float_as_uint(lane_sum(v))))); }
    __device__ __forceinline__ u32 max(u32 v) { return lane_max(gather(lane_max(v))); }
    __device__ __forceinline__ bool any(bool p) { return p; }  // asked only about a reduced value
};

struct Any : Lanes {
    static const bool once = false;
};

__device__ __forceinline__ u32 hash32(u32 seed, u32 counter)
{
    u32 x = counter * 0x9E3779B9u + seed;
    x ^= x >> 16;
    x *= 0x85EBCA6Bu;
    x ^= x >> 13;
    x *= 0xC2B2AE35u;
    return x ^ x >> 16;
}

template <int BITS> __device__ __forceinline__ void decode_pair(const u8* __restrict__ codes, float scale, int pairs, int t, float* v)
{
    if (BITS == 1) {
        const u32 low = codes[t >> 1] >> 4 * (t & 1), high = codes[(pairs + t) >> 1] >> 4 * (t & 1);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            v[j] = low >> j & 1 ? scale : -scale;
            v[4 + j] = high >> j & 1 ? scale : -scale;
        }
    } else if (BITS == 4) {
        const u32 word = *(const u32*)(codes + 4 * t);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            v[j] = __fmul_rn((float)((int)(word << (28 - 8 * j)) >> 28), scale);
            v[4 + j] = __fmul_rn((float)((int)(word << (24 - 8 * j)) >> 28), scale);
        }
    } else {
        const u32 low = *(const u32*)(codes + 4 * t), high = *(const u32*)(codes + 4 * (pairs + t));
#pragma unroll
        for (int j = 0; j < 4; j++) {
            v[j] = __fmul_rn((float)((int)(low << (24 - 8 * j)) >> 24), scale);
            v[4 + j] = __fmul_rn((float)((int)(high << (24 - 8 * j)) >> 24), scale);
        }
    }
}

// Where one block's encoding goes. `counter` is the number of its first element for the random hash.
struct Target {
    u8* codes;
    float* scale;
    float* residual;
    u32 counter, seed;
    int length, stochastic;
};

__device__ __forceinline__ int element(int t, int pairs, int j) { return 4 * (t + (j >> 2) * pairs) + (j & 3); }

// Codes of one pair, written where `used`; v becomes what the receivers will decode. All lanes of the warp call it.
template <int BITS>
__device__ __forceinline__ void encode_pair(const Target& to, float scale, float inverse, int pairs, int t, bool used, float* v)
{
    if (BITS == 1) {
        u32 nibble[2] = {0, 0};
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const u32 positive = ~__float_as_uint(v[j]) >> 31;
            if (element(t, pairs, j) < to.length) nibble[j >> 2] |= positive << (j & 3);
            v[j] = positive ? scale : -scale;
        }
        // Two neighbours hold the halves of two bytes: the even one writes the first, the odd one the second.
        const bool odd = t & 1;
        const u32 mine = odd ? nibble[1] : nibble[0];
        const u32 theirs = __shfl_xor_sync(FULL, odd ? nibble[0] : nibble[1], 1);
        const u32 byte = odd ? theirs | mine << 4 : mine | theirs << 4;
        if (used) to.codes[(t + (odd ? pairs : 0)) >> 1] = (u8)byte;
        return;
    }
    const float top = BITS == 8 ? 127.0f : 7.0f;
    u32 word[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float x = __fmul_rn(v[j], inverse);
        if (to.stochastic) {
            const u32 h = hash32(to.seed, to.counter + element(t, pairs, j));
            x = floorf(__fadd_rn(x, __fmul_rn((float)(h >> 8), 5.9604644775390625e-08f)));
        } else {
            x = rintf(x);
        }
        x = x < -top ? -top : x > top ? top : x;  // not fminf, which would turn NaN into a code
        word[j >> 2] |= ((u32)(int)x & (BITS == 8 ? 255u : 15u)) << 8 * (j & 3);
        v[j] = __fmul_rn(x, scale);
    }
    if (BITS == 8) {
        if (used) *(u32*)(to.codes + 4 * t) = word[0], *(u32*)(to.codes + 4 * (pairs + t)) = word[1];
    } else if (used) {
        *(u32*)(to.codes + 4 * t) = word[0] | word[1] << 4;
    }
}

// Encode the block whose pair t is value.load(t, v): 0 past the length. `t` is the thread's place in its group, `used`
// false where there is no block; all lanes of the warp call it, those of a block with the same length.
template <int BITS, class Group, class Value>
__device__ __forceinline__ void encode_block(Group& group, const Value& value, const Target& to, int pairs, int t0, bool used, int* finite)
{
    const int rounds = Group::once ? 1 : (pairs + 31) >> 5;
    float v[8], sum = 0.0f, scale, inverse = 0.0f;
    u32 peak = 0;
    for (int r = 0; r < rounds; r++) {
        const int t = t0 + 32 * r;
        if (Group::once || t < pairs) {
            value.load(t, v);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                if (BITS == 1) sum += fabsf(v[j]);
                else peak = magnitude(v[j]) > peak ? magnitude(v[j]) : peak;
            }
        }
    }
    if (BITS == 1) {
        sum = group.sum(sum);
        float unit = 1.0f;
        if (group.any(!(sum < __uint_as_float(INF_BITS)))) {
            // inf, NaN, or large values whose sum overflowed: look again, with the sum in units of 2**16.
            sum = 0.0f;
            for (int r = 0; r < rounds; r++) {
                const int t = t0 + 32 * r;
                if (Group::once || t < pairs) {
                    if (!Group::once) value.load(t, v);
#pragma unroll
                    for (int j = 0; j < 8; j++) {
                        sum += __fmul_rn(fabsf(v[j]), 1.0f / 65536.0f);
                        peak = magnitude(v[j]) > peak ? magnitude(v[j]) : peak;
                    }
                }
            }
            sum = group.sum(sum);
            unit = 65536.0f;
            if (peak >= INF_BITS) atomicExch(finite, 0);
        }
        scale = __fmul_rn(__fdiv_rn(sum, (float)(to.length > 0 ? to.length : 1)), unit);
    } else {
        peak = group.max(peak);
        if (peak >= INF_BITS) atomicExch(finite, 0);
        const float top = BITS == 8 ? 127.0f : 7.0f, largest = __uint_as_float(peak);
        const bool usable = largest >= 7.888609052210118e-31f;  // 2**-100: below it, top / largest might overflow
        inverse = usable ? __fdiv_rn(top, largest) : 0.0f;
        scale = usable ? __fdiv_rn(largest, top) : 0.0f;
    }
    if (used && t0 == 0) *to.scale = scale;
    for (int r = 0; r < rounds; r++) {
        const int t = t0 + 32 * r;
        const bool here = used && (Group::once || t < pairs);
        float left[8];
        if (!Group::once && here) value.load(t, v);
#pragma unroll
        for (int j = 0; j < 8; j++) left[j] = v[j];
        encode_pair<BITS>(to, scale, inverse, pairs, t, here, v);
        if (to.residual && here) {
#pragma unroll
            for (int j = 0; j < 8; j++)
                left[j] = element(t, pairs, j) < to.length ? __fadd_rn(left[j], -v[j]) : 0.0f;
            store4(to.residual + 4 * t, 4, left);
            store4(to.residual + 4 * (pairs + t), 4, left + 4);
        }
    }
}
