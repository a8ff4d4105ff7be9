// Runs a kernel launch on the CPU: each CUDA thread is a fiber, blocks run one after another. See cuda_cpu.h.
//
// A fiber runs until it ends, or meets a barrier or a warp collective, where it waits until all that must meet there have
// come. The order in which runnable fibers get their turn is forward, reverse, or random (drawn anew for every round), and
// so is the order of blocks: code that relies on an order that CUDA does not promise fails in one of them.
#include "cuda_cpu.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

// Present only when the process runs under ThreadSanitizer.
extern "C" {
void* __tsan_create_fiber(unsigned flags) __attribute__((weak));
void __tsan_switch_to_fiber(void* fiber, unsigned flags) __attribute__((weak));
void* __tsan_get_current_fiber() __attribute__((weak));
void __tsan_acquire(void* address) __attribute__((weak));
void __tsan_release(void* address) __attribute__((weak));
}

#if defined(__x86_64__) && !defined(CUDA_CPU_PORTABLE)
// Save the callee-saved registers, exchange the stack pointers. swapcontext would ask the kernel at every switch.
typedef void* Context;
extern "C" void cuda_cpu_switch(Context* from, Context* to);
asm(".text\n.hidden cuda_cpu_switch\n.globl cuda_cpu_switch\n.type cuda_cpu_switch,@function\ncuda_cpu_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp,(%rdi)\nmovq (%rsi),%rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n");
static void prepare(Context* context, char* stack, size_t size, void (*entry)())
{
    void** top = (void**)((uintptr_t)(stack + size) & ~15ull);
    *--top = nullptr;  // where a return from `entry` would go: never
    *--top = (void*)entry;
    *context = top - 6;
}
#else
#include <ucontext.h>
typedef ucontext_t Context;
static void cuda_cpu_switch(Context* from, Context* to) { swapcontext(from, to); }
static void prepare(Context* context, char* stack, size_t size, void (*entry)())
{
    getcontext(context);
    context->uc_stack.ss_sp = stack;
    context->uc_stack.ss_size = size;
    context->uc_link = nullptr;
    makecontext(context, entry, 0);
}
#endif

namespace {

enum State { RUNNABLE, AT_BARRIER, IN_COLLECTIVE, ENDED };
const size_t STACK = 64 * 1024, GUARD = 4096;

struct Fiber {
    Context context;
    cuda_cpu::Here here;
    State state;
    char* stack;
    void* tsan;
};

struct Warp {
    uint64_t words[2][32];  // two sets: a lane may still read one while others fill the next
    unsigned arrived, exited;
    int set, collective;
};

std::vector<Fiber> fibers;
std::vector<Warp> warps;
Fiber* running;
Context scheduler;
void* scheduler_tsan;
void (*body)(void**);
void** body_arguments;
unsigned count, alive, arrived;
int barrier_line;
char error[256];
char start_sync, barrier_sync[2];  // addresses for ThreadSanitizer's happens-before
int barrier_set;
uint64_t random_state;

void fail(const char* what)
{
    if (error[0]) return;
    const cuda_cpu::Here& here = running->here;
    snprintf(error, sizeof error, "%s (block %u, thread %u)", what, here.block.x, here.thread.x);
}

void to_scheduler()
{
    if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(scheduler_tsan, 1);  // 1: implies no synchronisation
    cuda_cpu_switch(&running->context, &scheduler);
}

void entry()
{
    if (__tsan_acquire) __tsan_acquire(&start_sync);
    body(body_arguments);
    if (__tsan_release) __tsan_release(&start_sync);
    const unsigned thread = running->here.thread.x;
    Warp& warp = warps[thread / 32];
    if (warp.arrived) fail("a lane ended while others of its warp wait in a collective");
    warp.exited |= 1u << thread % 32;
    running->state = ENDED;
    alive--;
    to_scheduler();
    abort();
}

unsigned draw(unsigned below)
{
    random_state ^= random_state << 13, random_state ^= random_state >> 7, random_state ^= random_state << 17;
    return random_state % below;
}

std::vector<unsigned> turns(unsigned n, int order)
{
    std::vector<unsigned> out(n);
    for (unsigned i = 0; i < n; i++) out[i] = order == 1 ? n - 1 - i : i;
    if (order == 2)
        for (unsigned i = n; i > 1; i--) std::swap(out[i - 1], out[draw(i)]);
    return out;
}

void run_block(int order)
{
    alive = count, arrived = 0, barrier_set = 0;
    for (Warp& warp : warps) warp.arrived = warp.exited = 0, warp.set = 0;
    for (unsigned i = 0; i < count; i++) {
        fibers[i].state = RUNNABLE;
        prepare(&fibers[i].context, fibers[i].stack, STACK, entry);
    }
    while (alive && !error[0]) {
        bool progress = false;
        for (unsigned turn : turns(count, order)) {
            if (fibers[turn].state != RUNNABLE) continue;
            progress = true;
            running = &fibers[turn];
            if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(running->tsan, 1);
            cuda_cpu_switch(&scheduler, &running->context);
            if (error[0]) return;
        }
        if (arrived && alive < count) fail("a barrier after some threads have ended");
        if (arrived && arrived == alive) {
            arrived = 0, barrier_set ^= 1, progress = true;
            for (unsigned i = 0; i < count; i++)
                if (fibers[i].state == AT_BARRIER) fibers[i].state = RUNNABLE;
        }
        if (!progress) fail("deadlock: some threads wait at a barrier, others in a warp collective");
    }
}

}  // namespace

extern "C" {

const cuda_cpu::Here* cuda_cpu_here() { return &running->here; }

void cuda_cpu_barrier(int line)
{
    Fiber* me = running;
    if (!arrived) barrier_line = line;
    else if (barrier_line != line) fail("threads of one block meet at different barriers");
    const int set = barrier_set;
    if (__tsan_release) __tsan_release(&barrier_sync[set]);
    arrived++;
    me->state = AT_BARRIER;
    to_scheduler();
    if (__tsan_acquire) __tsan_acquire(&barrier_sync[set]);
}

// Publish `value`, wait for the whole warp, return all 32 values. It orders no memory: CUDA does not promise that either.
const uint64_t* cuda_cpu_meet(unsigned mask, uint64_t value, int collective)
{
    Fiber* me = running;
    const unsigned thread = me->here.thread.x, lane = thread % 32;
    Warp& warp = warps[thread / 32];
    if (mask != 0xffffffffu) fail("a collective of a part of the warp, which no kernel here needs");
    if (warp.exited) fail("a collective after lanes of the warp have ended");
    if (!warp.arrived) warp.collective = collective;
    else if (warp.collective != collective) fail("lanes of one warp meet in different collectives");
    if (error[0]) to_scheduler();
    const int set = warp.set;
    warp.words[set][lane] = value;
    warp.arrived |= 1u << lane;
    if (warp.arrived == 0xffffffffu) {
        warp.arrived = 0, warp.set ^= 1;
        for (unsigned i = thread - lane; i < thread - lane + 32; i++)
            if (fibers[i].state == IN_COLLECTIVE) fibers[i].state = RUNNABLE;
    } else {
        me->state = IN_COLLECTIVE;
        to_scheduler();
    }
    return warp.words[set];
}

const char* cuda_cpu_error() { return error; }

void cuda_cpu_launch(
    void (*kernel)(void**), void** arguments, unsigned grid, unsigned block, int order, uint64_t seed, char* shared,
    char* shared_end)
{
    error[0] = 0;
    body = kernel, body_arguments = arguments, count = block;
    random_state = seed * 2654435761u + 88172645463325252ull;
    if (grid < 1 || block < 32 || block > 1024 || block % 32) {
        snprintf(error, sizeof error, "a launch of %u blocks of %u threads", grid, block);
        return;
    }
    warps.resize(block / 32);
    while (fibers.size() < block) {
        Fiber fiber = Fiber();
        void* memory = mmap(nullptr, STACK + GUARD, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) abort();
        mprotect(memory, GUARD, PROT_NONE);
        fiber.stack = (char*)memory + GUARD;
        if (__tsan_create_fiber) fiber.tsan = __tsan_create_fiber(0);
        fibers.push_back(fiber);  // kept for all launches
    }
    if (__tsan_get_current_fiber) scheduler_tsan = __tsan_get_current_fiber();
    for (unsigned i = 0; i < block; i++) fibers[i].here = {{i, 0, 0}, {0, 0, 0}, {block, 1, 1}, {grid, 1, 1}};
    for (unsigned b : turns(grid, order)) {
        for (unsigned i = 0; i < block; i++) fibers[i].here.block.x = b;
        if (__tsan_acquire) __tsan_acquire(&start_sync);
        if (shared) memset(shared, 0xFF, shared_end - shared);
        if (__tsan_release) __tsan_release(&start_sync);
        run_block(order);
        if (error[0]) break;
    }
    if (__tsan_acquire) __tsan_acquire(&start_sync);
}
}
