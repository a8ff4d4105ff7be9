// The part of CUDA that gradcomp's kernels use, for g++: included before a .cu, it lets the tests run the kernel itself.
// Types, qualifiers and intrinsics are here; threads, barriers and warp collectives are in cuda_cpu.cpp, which is compiled
// without ThreadSanitizer even where the kernels are compiled with it, so that only kernel code is watched.
//
// What it checks: every lane of a warp reaches the same collective, every thread of a block the same barrier; shared memory
// is full of 0xFF (NaN, -1) when a block starts; argument sizes are those of the kernel's signature. What it cannot see:
// races between blocks (they run one after another), memory order between blocks, speed.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __restrict__ __restrict
#define __shared__ static __attribute__((section("cuda_shared")))

struct uint3 {
    unsigned x, y, z;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

namespace cuda_cpu {
struct Here {  // the built-in variables of the running thread
    uint3 thread, block, threads, blocks;
};
enum Collective { BALLOT = 1, SHUFFLE, SHUFFLE_UP, SHUFFLE_XOR };
}  // namespace cuda_cpu

extern "C" {
const cuda_cpu::Here* cuda_cpu_here();
void cuda_cpu_barrier(int line);
const uint64_t* cuda_cpu_meet(unsigned mask, uint64_t value, int collective);
void cuda_cpu_launch(
    void (*kernel)(void**), void** arguments, unsigned grid, unsigned block, int order, uint64_t seed, char* shared,
    char* shared_end);
}
extern char __start_cuda_shared[] __attribute__((weak)), __stop_cuda_shared[] __attribute__((weak));

#define threadIdx (cuda_cpu_here()->thread)
#define blockIdx (cuda_cpu_here()->block)
#define blockDim (cuda_cpu_here()->threads)
#define gridDim (cuda_cpu_here()->blocks)
#define __syncthreads() cuda_cpu_barrier(__LINE__)

// --- warp collectives -----------------------------------------------------------------------------------------------

namespace cuda_cpu {
inline int lane() { return threadIdx.x & 31; }

template <class T> T exchange(unsigned mask, T value, int from, int collective)
{
    static_assert(sizeof(T) <= 8, "");
    uint64_t word = 0;
    memcpy(&word, &value, sizeof value);
    const uint64_t* words = cuda_cpu_meet(mask, word, collective);
    memcpy(&value, &words[from], sizeof value);
    return value;
}
}  // namespace cuda_cpu

inline unsigned __ballot_sync(unsigned mask, int predicate)
{
    const uint64_t* words = cuda_cpu_meet(mask, predicate != 0, cuda_cpu::BALLOT);
    unsigned votes = 0;
    for (int i = 0; i < 32; i++) votes |= (unsigned)words[i] << i;
    return votes;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
template <class T> T __shfl_sync(unsigned mask, T value, int from)
{
    return cuda_cpu::exchange(mask, value, from & 31, cuda_cpu::SHUFFLE);
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int bits)
{
    return cuda_cpu::exchange(mask, value, cuda_cpu::lane() ^ bits, cuda_cpu::SHUFFLE_XOR);
}
template <class T> T __shfl_up_sync(unsigned mask, T value, int by)
{
    const int lane = cuda_cpu::lane();
    return cuda_cpu::exchange(mask, value, lane < by ? lane : lane - by, cuda_cpu::SHUFFLE_UP);
}

// --- arithmetic and atomics -----------------------------------------------------------------------------------------

inline unsigned __float_as_uint(float v)
{
    unsigned u;
    memcpy(&u, &v, 4);
    return u;
}
inline float __uint_as_float(unsigned u)
{
    float v;
    memcpy(&v, &u, 4);
    return v;
}
// g++ is told not to contract, so each of these rounds once.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }

template <class T> T atomicAdd(T* p, T v)
{
    if constexpr (std::is_integral<T>::value) {
        return __atomic_fetch_add(p, v, __ATOMIC_RELAXED);
    } else {
        unsigned* word = (unsigned*)p;
        unsigned old = __atomic_load_n(word, __ATOMIC_RELAXED);
        while (!__atomic_compare_exchange_n(
            word, &old, __float_as_uint(__uint_as_float(old) + v), true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
        }
        return __uint_as_float(old);
    }
}
template <class T> T atomicExch(T* p, T v) { return __atomic_exchange_n(p, v, __ATOMIC_RELAXED); }

// --- calling a kernel -----------------------------------------------------------------------------------------------

namespace cuda_cpu {
template <class... A, size_t... I> void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>)
{
    kernel(*(A*)arguments[I]...);
}
template <class... A> void call(void (*kernel)(A...), void** arguments)
{
    call(kernel, arguments, std::index_sequence_for<A...>{});
}
// Per argument its size, negative for a pointer (then of what it points to).
template <class A> int size_of()
{
    if constexpr (std::is_pointer<A>::value) return -(int)sizeof(typename std::remove_pointer<A>::type);
    else return std::is_floating_point<A>::value ? 64 + (int)sizeof(A) : (int)sizeof(A);
}
template <class... A> int sizes(void (*)(A...), int* out)
{
    int i = 0;
    ((out[i++] = size_of<A>()), ...);
    return i;
}
}  // namespace cuda_cpu

#define CUDA_CPU_KERNEL(NAME)                                                                                           \
    extern "C" void launch_##NAME(void** arguments, unsigned grid, unsigned block, int order, uint64_t seed)           \
    {                                                                                                                   \
        cuda_cpu_launch(                                                                                                \
            [](void** a) { cuda_cpu::call(&NAME, a); }, arguments, grid, block, order, seed, __start_cuda_shared,      \
            __stop_cuda_shared);                                                                                        \
    }                                                                                                                   \
    extern "C" int sizes_##NAME(int* out) { return cuda_cpu::sizes(&NAME, out); }
