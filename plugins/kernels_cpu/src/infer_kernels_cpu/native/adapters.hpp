// What adapters add to products: scale * B (A x), for each row that has one. Rows are grouped by adapter, so that A and B
// are read once for all rows of a block. All sums are in floats, and each row's in an order that does not depend on which
// other rows there are.
#pragma once

#include "rows.hpp"

namespace infer {

// An adapter's change of the columns [begin, begin + N) of a product; Python's ``AdapterPart``.
struct AdapterPart {
    const void *a, *b;  // A [R][K] and B transposed, [R][N]
    int64_t begin, N, R;
    float scale;
};

// An adapter's changes of one product; Python's ``Adapter``.
struct Adapter {
    const AdapterPart* parts;
    int64_t count, ranks;  // ``ranks`` is the sum of the parts' R
};

constexpr int ADAPTED = 8;                  // rows that share what is read of A and B
constexpr int64_t RANKS = 16, WIDTH = 512;  // of a task

// Up to ADAPTED rows with the same adapter.
struct Adapted {
    const Adapter* adapter;
    int64_t first, rows;  // in ``order``
};

// Calls run<M>() for M rows, 1 to ADAPTED.
template <class Run>
inline void with_rows(int64_t rows, Run run) {
    [&]<int... M>(std::integer_sequence<int, M...>) {
        ((rows == M + 1 ? run.template operator()<M + 1>() : void()), ...);
    }(std::make_integer_sequence<int, ADAPTED>{});
}

// to[m] = the sums of a[k] x[m][k], for M rows.
template <class T, int M>
inline void dots(const T* a, const T* const* x, int64_t K, float* to) {
    vf sums[M] = {};
    over_vectors(K, [&](int64_t k, int n) {
        vf now = take(a + k, n);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) sums[m] = fma(now, take(x[m] + k, n), sums[m]);
    });
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) to[m] = sum(sums[m]);
}

// Adds to columns [begin, end) of M rows the sums of h[m][r] b[r][n].
template <class T, int M>
inline void add_columns(const T* b, int64_t R, int64_t N, const float* const* h, int64_t begin, int64_t end, T* const* to) {
    over_vectors(end - begin, [&](int64_t c, int n) {
        vf sums[M] = {};
        for (int64_t r = 0; r < R; r++) {
            vf now = take(b + r * N + begin + c, n);
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) sums[m] = fma(now, splat(h[m][r]), sums[m]);
        }
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) give(to[m] + begin + c, take(to[m] + begin + c, n) + sums[m], n);
    });
}

// Adds to each row t of ``product`` [rows][stride] what the adapter in slot slots[t] of the table makes of row t of x.
template <class T>
void add_adapters(const T* x, int64_t stride_x, int64_t rows, int64_t K, const int32_t* slots,
                  const Adapter* const* table, int64_t table_size, T* product, int64_t stride) {
    int64_t* order = scratch<int64_t, struct AdaptedOrder>(rows);
    Adapted* blocks = scratch<Adapted, struct AdaptedBlocks>(rows);
    int64_t count = 0, placed = 0, width = 1, most = 1, columns = 1;
    for (int64_t s = 0; s < table_size; s++) {
        if (!table[s]) continue;
        int64_t first = placed;
        for (int64_t t = 0; t < rows; t++)
            if (slots[t] == s) order[placed++] = t;
        for (int64_t f = first; f < placed; f += ADAPTED)
            blocks[count++] = {table[s], f, std::min<int64_t>(ADAPTED, placed - f)};
        if (first == placed) continue;
        width = std::max(width, table[s]->ranks);
        most = std::max(most, (table[s]->ranks + RANKS - 1) / RANKS);
        int64_t wide = 0;
        for (int64_t p = 0; p < table[s]->count; p++) wide += (table[s]->parts[p].N + WIDTH - 1) / WIDTH;
        columns = std::max(columns, wide);
    }
    if (!count) return;
    float* hidden = scratch<float, struct AdaptedHidden>(placed * width);
    parallel(count * most, [=](int64_t task) {  // hidden = scale * A x
        const Adapted& block = blocks[task / most];
        const T* from[ADAPTED];
        for (int64_t m = 0; m < block.rows; m++) from[m] = x + order[block.first + m] * stride_x;
        int64_t before = 0, begin = task % most * RANKS, end = begin + RANKS;
        for (int64_t p = 0; p < block.adapter->count; p++) {
            const AdapterPart& part = block.adapter->parts[p];
            for (int64_t r = std::max(begin - before, int64_t(0)); r < std::min(end - before, part.R); r++) {
                float found[ADAPTED];
                const T* a = static_cast<const T*>(part.a) + r * K;
                with_rows(block.rows, [&]<int M>() { dots<T, M>(a, from, K, found); });
                for (int64_t m = 0; m < block.rows; m++)
                    hidden[(block.first + m) * width + before + r] = part.scale * found[m];
            }
            before += part.R;
        }
    });
    parallel(count * columns, [=](int64_t task) {  // product += B hidden
        const Adapted& block = blocks[task / columns];
        int64_t left = task % columns, before = 0;
        for (int64_t p = 0; p < block.adapter->count; p++) {
            const AdapterPart& part = block.adapter->parts[p];
            int64_t own = (part.N + WIDTH - 1) / WIDTH;
            if (left < own) {
                const float* from[ADAPTED];
                T* to[ADAPTED];
                for (int64_t m = 0; m < block.rows; m++) {
                    from[m] = hidden + (block.first + m) * width + before;
                    to[m] = product + order[block.first + m] * stride + part.begin;
                }
                int64_t begin = left * WIDTH, end = std::min(part.N, begin + WIDTH);
                with_rows(block.rows, [&]<int M>() {
                    add_columns<T, M>(static_cast<const T*>(part.b), part.R, part.N, from, begin, end, to);
                });
                return;
            }
            left -= own;
            before += part.R;
        }
    });
}

}  // namespace infer
