// torch's own threads: a second pool would spin against the first.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>

namespace infer {

typedef void (*Range)(int64_t begin, int64_t end, void* context);
typedef int32_t (*ParallelFor)(int64_t begin, int64_t end, int64_t grain, Range run, void* context);
typedef int32_t (*NumThreads)(uint32_t* out);

inline ParallelFor parallel_for = nullptr;
inline NumThreads num_threads = nullptr;

inline int64_t threads() {
    uint32_t n = 1;
    if (num_threads) num_threads(&n);
    return n;
}

// run(i) for every i below n, each by whoever is free. What run computes may not depend on who runs it.
template <class F>
void parallel(int64_t n, F run) {
    int64_t workers = n < 2 ? 1 : threads();
    if (workers > n) workers = n;
    if (workers < 2) {
        for (int64_t i = 0; i < n; i++) run(i);
        return;
    }
    std::atomic<int64_t> next{0};
    auto work = [&] {
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) run(i);
    };
    using Work = decltype(work);
    parallel_for(
        0, workers, 1, [](int64_t, int64_t, void* context) { (*static_cast<Work*>(context))(); }, &work);
}

// Memory of a thread's own that grows to the largest size asked for; uninitialised.
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
        size = bytes;
    }
    return static_cast<T*>(memory.get());
}

}  // namespace infer
