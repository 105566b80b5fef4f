// x @ w.T for packed w. Every result is one chain of multiply-adds in the order of K, whatever rows there are beside
// it and however the work is cut.
#pragma once

#include <algorithm>

#include "parallel.hpp"
#include "simd.hpp"

namespace infer {

constexpr int64_t LINE = 16;  // words of a cache line

// A packed matrix: panels of PANEL columns; in a panel, for every STEP of K, a word per column.
template <class T>
constexpr int64_t steps_of(int64_t K) {
    return (K + STEP<T> - 1) / STEP<T>;
}
inline int64_t panels_of(int64_t N) { return (N + PANEL - 1) / PANEL; }

// Cache lines of a packed matrix to fetch while computing: ``lines`` per step from ``from`` on.
struct Fetch {
    const uint32_t* from = nullptr;
    int64_t lines = 0;
};

// c[M][PANEL] += a[M][...] . w, for as many steps.
template <class T, int M>
inline void tile(const T* a, int64_t stride_a, const uint32_t* w, int64_t steps, float* c, int64_t stride_c,
                 Fetch fetch) {
    vf acc[M][VECTORS];  // unrolled throughout, or it would live in memory
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; j++) acc[m][j] = load(c + m * stride_c + j * LANES);
    for (int64_t s = 0; s < steps; s++) {
        vu words[VECTORS];
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; j++) words[j] = load_as<vu>(w + s * PANEL + j * LANES);
        for (int64_t l = 0; l < fetch.lines; l++) __builtin_prefetch(fetch.from + s * PANEL + l * LINE);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            uint32_t word = load_as<uint32_t>(a + m * stride_a + s * STEP<T>);
#pragma GCC unroll 8
            for (int j = 0; j < VECTORS; j++) acc[m][j] = accumulate<T>(acc[m][j], words[j], word);
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; j++) store(c + m * stride_c + j * LANES, acc[m][j]);
}

// The same for any number of rows. ``next`` is what will be multiplied after this, and comes closer meanwhile.
template <class T>
void tiles(const T* a, int64_t stride_a, int64_t rows, const uint32_t* w, int64_t steps, float* c, int64_t stride_c,
           const uint32_t* next = nullptr) {
    int64_t m = 0, line = 0, each = next ? (PANEL / LINE * ROWS + rows - 1) / rows : 0;
    auto fetch = [&] {
        Fetch f{next + line * LINE, std::max<int64_t>(0, std::min(each, PANEL / LINE - line))};
        line += each;
        return f;
    };
    for (; m + ROWS <= rows; m += ROWS)
        tile<T, ROWS>(a + m * stride_a, stride_a, w, steps, c + m * stride_c, stride_c, fetch());
    a += m * stride_a;
    c += m * stride_c;
    switch (rows - m) {
        case 5: tile<T, 5>(a, stride_a, w, steps, c, stride_c, fetch()); break;
        case 4: tile<T, 4>(a, stride_a, w, steps, c, stride_c, fetch()); break;
        case 3: tile<T, 3>(a, stride_a, w, steps, c, stride_c, fetch()); break;
        case 2: tile<T, 2>(a, stride_a, w, steps, c, stride_c, fetch()); break;
        case 1: tile<T, 1>(a, stride_a, w, steps, c, stride_c, fetch()); break;
    }
}

template <class T>
void pack(const T* w, int64_t N, int64_t K, uint32_t* packed) {
    int64_t steps = steps_of<T>(K);
    parallel(panels_of(N), [=](int64_t p) {
        uint32_t* panel = packed + p * steps * PANEL;
        for (int64_t n = 0; n < PANEL; n++) {
            bool real = p * PANEL + n < N;
            const T* row = w + (p * PANEL + n) * K;
            for (int64_t s = 0; s < steps; s++) {
                T word[STEP<T>] = {};
                if (real) std::memcpy(word, row + s * STEP<T>, sizeof(T) * (K - s * STEP<T> < STEP<T> ? 1 : STEP<T>));
                std::memcpy(panel + s * PANEL + n, word, 4);
            }
        }
    });
}

// Rows of the unpacked matrix.
template <class T>
void unpack_rows(const uint32_t* packed, int64_t K, const int64_t* ids, int64_t count, T* out) {
    int64_t steps = steps_of<T>(K);
    for (int64_t i = 0; i < count; i++) {
        const uint32_t* column = packed + ids[i] / PANEL * steps * PANEL + ids[i] % PANEL;
        T* row = out + i * K;
        for (int64_t s = 0; s < steps; s++)
            std::memcpy(row + s * STEP<T>, column + s * PANEL,
                        sizeof(T) * (K - s * STEP<T> < STEP<T> ? 1 : STEP<T>));
    }
}

constexpr int64_t TASKS = 4;         // per thread, so that nobody waits long for the last one
constexpr int64_t ROW_BLOCK = 96;    // rows whose sums stay in the first-level cache
constexpr int64_t STEPS = 128;       // of a panel that stay there meanwhile
constexpr int64_t FEW_STEPS = 64;    // where few rows leave little time to fetch the next

// Sums [rows][PANEL] plus bias, in T; of the panel's columns, ``columns`` are real.
template <class T>
void emit(const float* c, int64_t rows, const T* bias, int64_t columns, T* out, int64_t stride) {
    for (int64_t m = 0; m < rows; m++)
        for (int64_t j = 0; j < PANEL && j < columns; j += LANES) {
            int lanes = int(std::min<int64_t>(LANES, columns - j));
            vf value = load(c + m * PANEL + j);
            if (bias) value += take(bias + j, lanes);
            give(out + m * stride + j, value, lanes);
        }
}

template <class T>
void linear(const T* x, int64_t stride_x, int64_t rows, const uint32_t* packed, int64_t N, int64_t K, const T* bias,
            T* out) {
    int64_t steps = steps_of<T>(K), panels = panels_of(N);
    if (K % STEP<T>) {  // the last word would reach into the next row
        T* padded = scratch<T, struct Padded>(rows * (K + 1));
        for (int64_t m = 0; m < rows; m++) {
            std::memcpy(padded + m * (K + 1), x + m * stride_x, K * sizeof(T));
            std::memset(padded + m * (K + 1) + K, 0, sizeof(T));
        }
        x = padded;
        stride_x = K + 1;
    }
    // A task is a few panels next to each other, with all rows; where there are few panels, rows are shared out too.
    int64_t blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK, wanted = TASKS * threads();
    int64_t each = std::max<int64_t>(1, panels / wanted), groups = (panels + each - 1) / each;
    int64_t cuts = std::min(blocks, (wanted + groups - 1) / groups);
    int64_t block = rows > ROWS && rows <= 8 * ROWS ? FEW_STEPS : STEPS;
    parallel(groups * cuts, [=](int64_t task) {
        float* c = scratch<float, struct Sums>(ROW_BLOCK * PANEL);
        int64_t begin = task / cuts * each, end = std::min(panels, begin + each);
        for (int64_t p = begin; p < end; p++)
            for (int64_t b = task % cuts; b < blocks; b += cuts) {
                int64_t first = b * ROW_BLOCK, count = std::min(ROW_BLOCK, rows - first);
                const T* from = x + first * stride_x;
                std::memset(c, 0, count * PANEL * sizeof(float));
                for (int64_t s = 0; s < steps; s += block) {
                    // Panels lie end to end: after the last block of this one comes the first of the next.
                    const uint32_t* w = packed + (p * steps + s) * PANEL;
                    bool more = s + block < steps || p + 1 < end;
                    tiles<T>(from + s * STEP<T>, stride_x, count, w, std::min(block, steps - s), c, PANEL,
                             more ? w + block * PANEL : nullptr);
                }
                emit(c, count, bias ? bias + p * PANEL : nullptr, N - p * PANEL, out + first * N + p * PANEL, N);
            }
    });
}

}  // namespace infer
