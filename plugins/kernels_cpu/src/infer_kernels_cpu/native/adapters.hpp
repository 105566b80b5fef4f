// What adapters add to products: scale * B (A x), for each row that has one. Rows are grouped by adapter, so that A and B
// are read once for all rows of a block, in the order in which they are stored. All sums are in floats, and each row's in
// an order that does not depend on which other rows there are.
#pragma once

#include "matmul.hpp"

namespace infer {

// An adapter's change of the columns [begin, begin + N) of a product; Python's ``AdapterPart``.
struct AdapterPart {
    const uint32_t* b;  // B [N][R] as ``pack`` packs it
    int64_t begin, N, R;
};

// An adapter's changes of one product; Python's ``Adapter``. All R are multiples of TOGETHER.
struct Adapter {
    const void* a;        // the parts' A, one below the other: [ranks / TOGETHER][K / PIECE][TOGETHER][PIECE]
    const float* scales;  // [ranks]
    const AdapterPart* parts;
    int64_t count, ranks;  // ``ranks`` is the sum of the parts' R
};

constexpr int64_t TOGETHER = 4, PIECE = 32;  // rows of A that are stored together, by PIECE columns; K is padded with zeros
constexpr int64_t RANKS = 16, WIDTH = 512;   // of a task
constexpr int64_t EARLY = 2048;              // how many bytes before they are read A and B are fetched

// Up to ROWS rows with the same adapter.
struct Adapted {
    const Adapter* adapter;
    int64_t first, rows;  // in ``order``
};

// Calls run<M>() for M rows, 1 to ROWS.
template <class Run>
inline void with_rows(int64_t rows, Run run) {
    [&]<int... M>(std::integer_sequence<int, M...>) {
        ((rows == M + 1 ? run.template operator()<M + 1>() : void()), ...);
    }(std::make_integer_sequence<int, ROWS>{});
}

// The elements of T at the same place of all words, and a call of run<PLACE>() for each place.
template <class T, int PLACE>
inline vf at(vu words) {
    if constexpr (STEP<T> == 1)
        return (vf)words;
    else
        return half_of<PLACE>(words);
}
template <class T, class Run>
inline void over_places(Run run) {
    run.template operator()<0>();
    if constexpr (STEP<T> > 1) run.template operator()<1>();
}

// A row of x as floats in the order in which ``dots`` takes them: vector by vector of words, first all elements at the
// words' first place. ``wide`` is K with the padding.
template <class T>
inline void spread(const T* x, int64_t K, int64_t wide, float* to) {
    for (int64_t k = 0; k < wide; k += PIECE) {
        T some[PIECE] = {};
        const T* from = k + PIECE <= K ? x + k : some;
        if (from == some) std::memcpy(some, x + k, (K - k) * sizeof(T));
        for (int64_t i = 0; i < PIECE; i += LANES * STEP<T>)
            over_places<T>([&]<int PLACE>() {
                store(to + k + i + PLACE * LANES, at<T, PLACE>(load_as<vu>(from + i)));
            });
    }
}

// Calls found(b, m, sum) with the sums of a[b][k] x[m][k], for B of the rows of A that are stored together, and M rows.
template <class T, int M, int B, class Found>
inline void dots(const T* a, const float* x, int64_t wide, Found found) {
    vf sums[B][M] = {};
    for (int64_t k = 0; k < wide; k += PIECE, a += TOGETHER * PIECE) {
#pragma GCC unroll 8
        for (int b = 0; b < B; b++)
            for (int64_t i = 0; i < int64_t(PIECE * sizeof(T)); i += 64)
                __builtin_prefetch(reinterpret_cast<const char*>(a + b * PIECE) + i + EARLY);
#pragma GCC unroll 8
        for (int64_t i = 0; i < PIECE; i += LANES * STEP<T>)
            over_places<T>([&]<int PLACE>() {
                vf now[B];
#pragma GCC unroll 8
                for (int b = 0; b < B; b++) now[b] = at<T, PLACE>(load_as<vu>(a + b * PIECE + i));
#pragma GCC unroll 8
                for (int m = 0; m < M; m++) {
                    vf own = load(x + m * wide + k + i + PLACE * LANES);
#pragma GCC unroll 8
                    for (int b = 0; b < B; b++) sums[b][m] = fma(now[b], own, sums[b][m]);
                }
            });
    }
#pragma GCC unroll 8
    for (int b = 0; b < B; b++)
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) found(b, m, sum(sums[b][m]));
}

// Adds to the ``columns`` columns of a panel, of M rows, the sums of h[m][r] b[n][r]. The panel begins at ``w``.
template <class T, int M>
inline void add_panel(const uint32_t* w, int64_t R, const float* const* h, int64_t columns, T* const* to) {
    vf sums[M][VECTORS] = {};
    for (int64_t r = 0; r < R; r += STEP<T>, w += PANEL) {
        for (int64_t i = 0; i < PANEL; i += LINE) __builtin_prefetch(reinterpret_cast<const char*>(w + i) + EARLY);
        over_places<T>([&]<int PLACE>() {
            vf now[VECTORS];
#pragma GCC unroll 8
            for (int j = 0; j < VECTORS; j++) now[j] = at<T, PLACE>(load_as<vu>(w + j * LANES));
#pragma GCC unroll 8
            for (int m = 0; m < M; m++)
#pragma GCC unroll 8
                for (int j = 0; j < VECTORS; j++) sums[m][j] = fma(now[j], splat(h[m][r + PLACE]), sums[m][j]);
        });
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; j++) {
            int n = int(std::clamp<int64_t>(columns - j * LANES, 0, LANES));
            give(to[m] + j * LANES, take(to[m] + j * LANES, n) + sums[m][j], n);
        }
}

// Adds to each row t of ``product`` [rows][stride] what the adapter in slot slots[t] of the table makes of row t of x.
template <class T>
void add_adapters(const T* x, int64_t stride_x, int64_t rows, int64_t K, const int32_t* slots,
                  const Adapter* const* table, int64_t table_size, T* product, int64_t stride) {
    int64_t* order = scratch<int64_t, struct AdaptedOrder>(rows);
    Adapted* blocks = scratch<Adapted, struct AdaptedBlocks>(rows);
    int64_t count = 0, placed = 0, width = 1, columns = 1;
    for (int64_t s = 0; s < table_size; s++) {
        if (!table[s]) continue;
        int64_t first = placed;
        for (int64_t t = 0; t < rows; t++)
            if (slots[t] == s) order[placed++] = t;
        for (int64_t f = first; f < placed; f += ROWS)
            blocks[count++] = {table[s], f, std::min<int64_t>(ROWS, placed - f)};
        if (first == placed) continue;
        width = std::max(width, table[s]->ranks);
        int64_t wide = 0;
        for (int64_t p = 0; p < table[s]->count; p++) wide += (table[s]->parts[p].N + WIDTH - 1) / WIDTH;
        columns = std::max(columns, wide);
    }
    if (!count) return;
    float* hidden = scratch<float, struct AdaptedHidden>(placed * width);
    int64_t slices = (width + RANKS - 1) / RANKS, wide = (K + PIECE - 1) / PIECE * PIECE;
    parallel(count * slices, [=](int64_t task) {  // hidden = scale * A x
        const Adapted& block = blocks[task / slices];
        int64_t begin = task % slices * RANKS, end = std::min(begin + RANKS, block.adapter->ranks);
        if (begin >= end) return;
        float* from = scratch<float, struct AdaptedRows>(ROWS * wide);
        for (int64_t m = 0; m < block.rows; m++) spread(x + order[block.first + m] * stride_x, K, wide, from + m * wide);
        with_rows(block.rows, [&]<int M>() {
            constexpr int B = M > 2 ? 2 : TOGETHER;  // the sums fit into 16 registers
            for (int64_t r = begin; r < end; r += B) {
                const T* a = static_cast<const T*>(block.adapter->a) + r / TOGETHER * TOGETHER * wide + r % TOGETHER * PIECE;
                dots<T, M, B>(a, from, wide, [&](int b, int m, float sum) {
                    hidden[(block.first + m) * width + r + b] = block.adapter->scales[r + b] * sum;
                });
            }
        });
    });
    parallel(count * columns, [=](int64_t task) {  // product += B hidden
        const Adapted& block = blocks[task / columns];
        int64_t left = task % columns, before = 0;
        for (int64_t p = 0; p < block.adapter->count; p++) {
            const AdapterPart& part = block.adapter->parts[p];
            int64_t own = (part.N + WIDTH - 1) / WIDTH;
            if (left < own) {
                const float* from[ROWS];
                T* to[ROWS];
                int64_t begin = left * WIDTH, end = std::min(part.N, begin + WIDTH);
                for (int64_t m = 0; m < block.rows; m++) {
                    from[m] = hidden + (block.first + m) * width + before;
                    to[m] = product + order[block.first + m] * stride + part.begin + begin;
                }
                const uint32_t* w = part.b + begin / PANEL * steps_of<T>(part.R) * PANEL;
                with_rows(block.rows, [&]<int M>() {
                    for (int64_t n = begin; n < end; n += PANEL, w += steps_of<T>(part.R) * PANEL) {
                        add_panel<T, M>(w, part.R, from, end - n, to);
                        for (int m = 0; m < M; m++) to[m] += PANEL;
                    }
                });
                return;
            }
            left -= own;
            before += part.R;
        }
    });
}

}  // namespace infer
