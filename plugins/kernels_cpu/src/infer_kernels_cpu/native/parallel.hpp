// A team of threads that divides a kernel's tasks among them. The caller never waits for a member that is not running:
// on a busy machine the system may take a core away for milliseconds, and a barrier for all members would wait that
// long at every product.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include <system_error>
#include <thread>

namespace infer {

typedef int32_t (*NumThreads)(uint32_t* out);

inline NumThreads num_threads = nullptr;

// As many threads as torch uses, including this one.
inline int64_t threads() {
    uint32_t n = 1;
    if (num_threads) num_threads(&n);
    return n;
}

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Team {
   public:
    // Calls run(context) on this thread and on up to ``others`` members: those that enter before this thread is done.
    // Returns when all that entered have finished; returns false at once if another thread is using the team.
    bool run(int64_t others, void (*run)(void*), void* context) {
        if (taken.exchange(true, std::memory_order_acquire)) return false;
        for (; members < others; members++) try {
                std::thread(&Team::serve, this, members).detach();
            } catch (const std::system_error&) {  // the system has no room for it, so those that there are do the work
                break;
            }
        job = run, argument = context, wanted = others;
        epoch += EPOCH;
        state.store(epoch | OPEN);
        if (sleepers.load()) state.notify_all();
        run(context);
        uint32_t now = state.fetch_and(~OPEN) & ~OPEN;
        for (int spins = 0; now & INSIDE; now = state.load(std::memory_order_acquire))
            if (spins++ < SPINS)
                pause();
            else if (now & AWAITED || state.compare_exchange_weak(now, now | AWAITED))
                state.wait(now | AWAITED);
        taken.store(false, std::memory_order_release);
        return true;
    }

    static Team& instance() {
        alignas(Team) static char memory[sizeof(Team)];
        static Team* team = [] {
            // A forked process has a copy of this memory, but not the threads.
            pthread_atfork(nullptr, nullptr, [] { new (memory) Team; });
            return new (memory) Team;  // never destroyed: members may run longer than static objects live at exit
        }();
        return *team;
    }

   private:
    // The bits of ``state``: how many members are inside, whether others may enter, whether the caller sleeps until the
    // last one leaves, and the number of the job.
    static constexpr uint32_t INSIDE = 0xfff, OPEN = 0x1000, AWAITED = 0x2000, EPOCH = 0x4000;
    // How often a thread polls ``state`` before it sleeps, about 0.1 ms in all: longer than the time between two
    // kernels, and short compared with a scheduler's time slice for another process.
    static constexpr int SPINS = 5000;

    void serve(int64_t index) {
        for (uint32_t last = 0;;) {
            uint32_t now = await(last);
            if (!state.compare_exchange_strong(now, now + 1, std::memory_order_acquire)) continue;
            last = now & ~(EPOCH - 1);
            if (index < wanted) job(argument);
            if (((state.fetch_sub(1) - 1) & (INSIDE | AWAITED)) == AWAITED) state.notify_all();
        }
    }

    // Waits for a job other than ``last`` that can be entered, and returns ``state``.
    uint32_t await(uint32_t last) {
        auto there = [&](uint32_t now) { return now & OPEN && (now & ~(EPOCH - 1)) != last; };
        uint32_t now = state.load(std::memory_order_acquire);
        for (int spins = 0; spins < SPINS && !there(now); spins++) {
            pause();
            now = state.load(std::memory_order_acquire);
        }
        while (!there(now)) {
            sleepers++;
            state.wait(now);
            sleepers--;
            now = state.load(std::memory_order_acquire);
        }
        return now;
    }

    alignas(64) std::atomic<uint32_t> state{0};
    alignas(64) std::atomic<uint32_t> sleepers{0};
    std::atomic<bool> taken{false};
    uint32_t epoch = 0;
    int64_t members = 0, wanted = 0;
    void (*job)(void*) = nullptr;
    void* argument = nullptr;
};

// Calls run(i) for every i below n, each on whichever thread is free. Results must not depend on the thread.
template <class F>
void parallel(int64_t n, F run) {
    int64_t workers = n < 2 ? 1 : threads();
    if (workers > n) workers = n;
    std::atomic<int64_t> next{0};
    auto work = [&] {
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) run(i);
    };
    using Work = decltype(work);
    if (workers < 2 || !Team::instance().run(workers - 1, [](void* context) { (*static_cast<Work*>(context))(); }, &work))
        work();
}

// Uninitialized thread-local memory, which grows to the largest size requested.
template <class T, class Tag>
T* scratch(int64_t count) {
    struct Free {
        void operator()(void* p) const { std::free(p); }
    };
    thread_local std::unique_ptr<void, Free> memory;
    thread_local int64_t size = 0;
    int64_t bytes = (count * int64_t(sizeof(T)) + 63) / 64 * 64;
    if (bytes > size) {
        memory.reset(std::aligned_alloc(64, bytes));
        if (!memory) {  // the caller may be any thread of the team, and a kernel has no other way to fail
            std::fprintf(stderr, "infer: out of memory: a kernel needs %lld bytes\n", (long long)bytes);
            std::abort();
        }
        size = bytes;
    }
    return static_cast<T*>(memory.get());
}

}  // namespace infer
