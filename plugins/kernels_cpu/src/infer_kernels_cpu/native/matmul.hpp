// x @ w.T for packed w. Every result is one chain of multiply-adds in the order of K, whatever other rows there are and
// however the work is divided.
#pragma once

#include <algorithm>

#include "amx.hpp"
#include "parallel.hpp"
#include "simd.hpp"

namespace infer {

constexpr int64_t LINE = 16;  // words of a cache line

// A packed matrix consists of panels of PANEL columns; a panel has, for every STEP elements of K, one word per column.
template <class T>
constexpr int64_t steps_of(int64_t K) {
    return (K + STEP<T> - 1) / STEP<T>;
}
// How many bytes of a step's word are not padding.
template <class T>
constexpr int64_t word_bytes(int64_t K, int64_t step) {
    return std::min<int64_t>(STEP<T>, K - step * STEP<T>) * int64_t(sizeof(T));
}
inline int64_t panels_of(int64_t N, bool gated = false) {
    int64_t columns = gated ? PANEL / 2 : PANEL, rows = gated ? N / 2 : N;
    return (rows + columns - 1) / columns;
}

// Cores of AMD wait for fewer lines at once on their way into the L1 cache than on that into the L2 cache.
#if defined(__x86_64__)
inline const bool INTO_L2 = [] {
    __builtin_cpu_init();
    return __builtin_cpu_is("amd") != 0;
}();
#else
constexpr bool INTO_L2 = false;
#endif

// Fetches the cache line of a weight that is needed soon.
inline void fetch_line(const uint32_t* line, bool into_l2 = INTO_L2) {
    if (into_l2)
        __builtin_prefetch(line, 0, 2);
    else
        __builtin_prefetch(line);
}

// Cache lines of a packed matrix to fetch while computing: ``lines`` per step from ``from`` on, one after the other.
struct Fetch {
    const uint32_t* from = nullptr;
    int64_t lines = 0;

    void operator()(int64_t step) const {
        for (int64_t l = 0; l < lines; l++) fetch_line(from + (step * lines + l) * LINE);
    }
};

// ``lines`` such lines in ``calls`` equal parts, one per call. If ``many`` rows fill the L1 cache, they go into the L2
// cache, and that from STREAMS places at a time: the hardware runs ahead of each of these, so that few of our own fetches
// wait for memory, and hold the buffers that rows on their way from the L2 cache need.
struct Stream {
    const uint32_t* from;
    int64_t streams, apart, left, each, next = 0;

    static constexpr int64_t STREAMS = 8;

    Stream(const uint32_t* from, int64_t lines, int64_t calls, bool many)
        : from(from), streams(many ? STREAMS : 1), apart((lines + streams - 1) / streams), left(from ? apart * streams : 0),
          each((left + calls - 1) / calls) {}

    void operator()(const uint32_t* = nullptr) {
        for (int64_t l = std::min(each, left); l > 0; l--, left--, next++)
            fetch_line(from + (next % streams * apart + next / streams) * LINE, streams > 1 || INTO_L2);
    }
};

// Whether rows of T are multiplied by AMX.
template <class T>
constexpr bool AMX = TILE > 0 && std::is_same_v<T, bf16>;

// Fetches ``steps`` steps of a packed matrix, if ``from`` is not null, while as many are computed for ``rows`` rows.
struct Following {
    const uint32_t* from;
    int64_t steps, rows;

    Fetch operator()(int64_t row) const {
        int64_t each = from ? (PANEL / LINE * ROWS + rows - 1) / rows : 0, line = row / ROWS * each;
        return {from + line * steps * LINE, std::max<int64_t>(0, std::min(each, PANEL / LINE - line))};
    }
};

// What rows consist of while they are multiplied by a matrix of T. Without instructions for pairs of bfloat16 these are
// floats, which are then made once, and not again for each panel.
template <class T>
using Factor = std::conditional_t<std::is_same_v<T, bf16> && !PAIRS, float, T>;
template <class T>
constexpr bool CONVERTS = !std::is_same_v<Factor<T>, T>;

template <class T>
inline void to_factors(const T* from, int64_t count, Factor<T>* to) {
    if constexpr (CONVERTS<T>)
        over_vectors(count, [=](int64_t i, int n) { give(to + i, take(from + i, n), n); });
    else
        std::memcpy(to, from, count * sizeof(T));
}

// A register tile of M rows. Sums start with begin(row, vector), a . w is added step by step, and each row's sums go
// together to end(row, sums). Calls fetch(step), which may prefetch what is needed later.
template <class T, int M, class Begin, class End, class Fetch>
inline void tile(const Factor<T>* a, int64_t stride_a, const uint32_t* w, int64_t steps, int64_t row, Begin begin, End end,
                 Fetch fetch) {
    vf acc[M][VECTORS];  // all loops over it are unrolled, or it would live in memory
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; j++) acc[m][j] = begin(row + m, j);
    for (int64_t s = 0; s < steps; s++) {
        vu words[VECTORS];
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; j++) words[j] = load_as<vu>(w + s * PANEL + j * LANES);
        fetch(s);
        if constexpr (!CONVERTS<T>) {
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) {
                uint32_t word = load_as<uint32_t>(a + m * stride_a + s * STEP<T>);
#pragma GCC unroll 8
                for (int j = 0; j < VECTORS; j++) acc[m][j] = accumulate<T>(acc[m][j], words[j], word);
            }
        } else {
            auto half = [&]<int HALF>() {
                vf now[VECTORS];
#pragma GCC unroll 8
                for (int j = 0; j < VECTORS; j++) now[j] = half_of<HALF>(words[j]);
#pragma GCC unroll 8
                for (int m = 0; m < M; m++)
#pragma GCC unroll 8
                    for (int j = 0; j < VECTORS; j++) acc[m][j] += now[j] * a[m * stride_a + s * STEP<T> + HALF];
            };
            half.template operator()<0>();
            half.template operator()<1>();
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) end(row + m, acc[m]);
}

// An ``end`` for ``tile`` that calls f(row, vector, sum) for each vector.
template <class F>
inline auto one_by_one(F f) {
    return [=](int64_t row, const vf(&sums)[VECTORS]) {
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; j++) f(row, j, sums[j]);
    };
}

// Calls run<M>(m) for rows m .. m+M-1: tiles of EACH rows, and a last one of at most LAST.
template <int EACH, int LAST, class Run>
inline void in_tiles(int64_t rows, Run run) {
    int64_t m = 0;
    for (; rows - m > LAST; m += EACH) run.template operator()<EACH>(m);
    [&]<int... M>(std::integer_sequence<int, M...>) {
        ((rows - m == M + 1 ? run.template operator()<M + 1>(m) : void()), ...);
    }(std::make_integer_sequence<int, LAST>{});
}

// ``tile`` for any number of rows; ahead(row) is the ``fetch`` of the tile that begins with a row.
template <class T, class Begin, class End, class Ahead>
void tiles(const Factor<T>* a, int64_t stride_a, int64_t rows, const uint32_t* w, int64_t steps, Begin begin, End end,
           Ahead&& ahead) {
    in_tiles<ROWS, ROWS>(rows, [&]<int M>(int64_t m) {
        tile<T, M>(a + m * stride_a, stride_a, w, steps, m, begin, end, ahead(m));
    });
}

// a . w, or that added to what is in ``sums``, whose rows are ``stride`` apart. ``ahead`` as above.
template <class T, class Ahead>
void row_products([[maybe_unused]] Tiles& registers, const Factor<T>* a, int64_t stride_a, int64_t rows, const uint32_t* w,
                  int64_t steps, bool begin, float* sums, int64_t stride, Ahead&& ahead) {
    auto at = [=](int64_t m, int j) { return sums + m * stride + j * LANES; };
    if constexpr (AMX<T>) {
        auto fetch = ahead(0);
        amx_products(
            registers, a, stride_a, rows, w, steps, begin, false, sums, stride,
            [&](const uint32_t*) {
                for (int64_t i = 0; rows <= TILE && i < TILE; i++) fetch(i);
            },
            [](int64_t, const vf(&)[VECTORS]) {});
    } else
        tiles<T>(
            a, stride_a, rows, w, steps, [=](int64_t m, int j) { return begin ? vf{} : load(at(m, j)); },
            one_by_one([=](int64_t m, int j, vf sum) { store(at(m, j), sum); }), ahead);
}

// Packs w [N][K]. The first half of the rows of a ``gated`` matrix compute gates, the second half values. Each of its
// panels takes half of its columns from either, so that a tile has the sums of both.
template <class T>
void pack(const T* w, int64_t N, int64_t K, bool gated, uint32_t* packed) {
    int64_t steps = steps_of<T>(K), whole = K / STEP<T>, columns = gated ? PANEL / 2 : PANEL, rows = gated ? N / 2 : N;
    parallel(panels_of(N, gated), [=](int64_t p) {
        uint32_t* panel = packed + p * steps * PANEL;
        // As many steps at a time as read a cache line of each row; what they write stays in the L1 cache meanwhile.
        for (int64_t begin = 0; begin < steps; begin += LINE)
            for (int64_t n = 0; n < PANEL; n++) {
                int64_t within = p * columns + n % columns;
                const T* row = w + (n / columns * rows + within) * K;
                uint32_t* to = panel + begin * PANEL + n;
                if (within < rows && begin + LINE <= whole) {
#pragma GCC unroll 16
                    for (int64_t s = 0; s < LINE; s++) std::memcpy(to + s * PANEL, row + (begin + s) * STEP<T>, 4);
                    continue;
                }
                for (int64_t s = begin; s < std::min(begin + LINE, steps); s++, to += PANEL) {
                    T word[STEP<T>] = {};
                    if (within < rows) std::memcpy(word, row + s * STEP<T>, word_bytes<T>(K, s));
                    std::memcpy(to, word, 4);
                }
            }
    });
}

// Rows ``ids`` of the unpacked matrix [N, K]; NaN for an id that is none of its rows.
template <class T>
void unpack_rows(const uint32_t* packed, int64_t N, int64_t K, const int64_t* ids, int64_t count, T* out) {
    int64_t steps = steps_of<T>(K);
    parallel(count, [=](int64_t i) {
        T* row = out + i * K;
        if (ids[i] < 0 || ids[i] >= N) return fill_nan(row, K);
        const uint32_t* column = packed + ids[i] / PANEL * steps * PANEL + ids[i] % PANEL;
        for (int64_t s = 0; s < steps; s++)
            std::memcpy(row + s * STEP<T>, column + s * PANEL, word_bytes<T>(K, s));
    });
}

constexpr int64_t TASKS = 4;         // tasks per thread, so that no thread waits long for the last one
constexpr int64_t ROW_BLOCK = TILE ? 256 : 96;  // rows whose sums fit into the L1 cache, with AMX into the L2 cache
constexpr int64_t ROW_BYTES = 3 << 18;  // of rows, which share the L2 cache with their sums and with weights
constexpr int64_t STEPS = 128;       // steps of a panel that fit there, too
constexpr int64_t AMX_STEPS = 192;   // the same of half a panel
constexpr int64_t FEW_STEPS = 64;    // the same for few rows, which leave less time to prefetch the next steps
constexpr int64_t MANY_ROWS = 4 * ROW_BLOCK;  // more are not converted, or given to one task, at once
// Up to STREAMED_ROWS, a block fetches nothing of the next one: the hardware prefetches what follows sooner. Where
// weights are not fetched into L2 (Intel's, ARM's), such rows fetch what is NEAR words ahead, with which Intel's read
// faster; only those were measured.
constexpr int64_t MOST_STREAMED = 4;  // the largest STREAMED_ROWS, as a constant for templates
inline const int64_t STREAMED_ROWS = INTO_L2 ? MOST_STREAMED : 3;
inline const bool NEARBY = !INTO_L2;
constexpr int64_t NEAR = 512;

// Turns a row's sums in panel p of a product [rows][N] into results in ``to``, a row of the output. With a gate, the
// first half of the sums are gates and the second half values; both are rounded as if they had been stored.
template <class T>
inline void emit(const vf (&sums)[VECTORS], int64_t p, int64_t N, const T* bias, Gate gate, T* to) {
    constexpr int HALF = VECTORS / 2;
    auto lanes = [](int64_t left, int j) { return int(std::clamp<int64_t>(left - j * LANES, 0, LANES)); };
    if (gate == Gate::NONE) {
        int64_t column = p * PANEL;
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; j++) {
            int n = lanes(N - column, j);
            give(to + column + j * LANES, bias ? sums[j] + take(bias + column + j * LANES, n) : sums[j], n);
        }
        return;
    }
    int64_t column = p * (PANEL / 2);
#pragma GCC unroll 8
    for (int j = 0; j < HALF; j++) {
        int n = lanes(N / 2 - column, j);
        vf open = sums[j], through = sums[j + HALF];
        if (bias) {
            open += take(bias + column + j * LANES, n);
            through += take(bias + N / 2 + column + j * LANES, n);
        }
        give(to + column + j * LANES, gated<T>(rounded<T>(open), rounded<T>(through), gate), n);
    }
}

// How many rows of K elements of T are multiplied at a time: with AMX, half as many if they would leave the L2 cache.
template <class T>
inline int64_t row_block(int64_t K) {
    return TILE && K * ROW_BLOCK * int64_t(sizeof(T)) > ROW_BYTES ? ROW_BLOCK / 2 : ROW_BLOCK;
}

// Calls run(panel, first row, rows, the panel that the thread multiplies next or -1) for every panel and ``block`` rows.
template <class Run>
void over_panels(int64_t rows, int64_t panels, int64_t block, Run run) {
    // A task is a few neighboring panels with all rows. If there are few panels, the rows are divided, too.
    int64_t blocks = (rows + block - 1) / block, wanted = TASKS * threads();
    int64_t each = std::max<int64_t>(1, panels / wanted), groups = (panels + each - 1) / each;
    int64_t cuts = std::min(blocks, (wanted + groups - 1) / groups);
    parallel(groups * cuts, [=](int64_t task) {
        int64_t begin = task / cuts * each, end = std::min(panels, begin + each);
        for (int64_t b = task % cuts; b < blocks; b += cuts)  // the rows stay in the L2 cache, the panels stream through
            for (int64_t p = begin; p < end; p++) {
                int64_t first = b * block, next = p + 1 < end ? p + 1 : b + cuts < blocks ? begin : -1;
                run(p, first, std::min(block, rows - first), next);
            }
    });
}

// The rows as ``tile`` takes them, padded if K is no multiple of a word: the last word would reach into the next row.
template <class T>
const Factor<T>* padded_rows(const T* x, int64_t& stride, int64_t rows, int64_t K) {
    int64_t wide = steps_of<T>(K) * STEP<T>;
    if constexpr (!CONVERTS<T>)
        if (wide == K) return x;
    auto* padded = scratch<Factor<T>, struct Padded>(rows * wide);
    for (int64_t m = 0; m < rows; m++) {
        to_factors(x + m * stride, K, padded + m * wide);
        std::memset((void*)(padded + m * wide + K), 0, (wide - K) * sizeof(Factor<T>));
    }
    stride = wide;
    return padded;
}

// A function for ``over_panels`` that multiplies ``rows`` padded rows of x by a panel.
template <class T>
auto panel_product(const Factor<T>* x, int64_t stride_x, int64_t rows, const uint32_t* packed, int64_t N, int64_t K,
                   const T* bias, Gate gate, T* out) {
    bool halved = gate != Gate::NONE;
    int64_t steps = steps_of<T>(K), columns = halved ? PANEL / 2 : PANEL;
    int64_t stride_out = halved ? N / 2 : N;
    int64_t block = AMX<T> ? AMX_STEPS : rows > ROWS && rows <= 8 * ROWS ? FEW_STEPS : STEPS;
    if (AMX<T> && rows <= TILE) block = steps;  // their sums stay in registers, except for last steps that fill no tile
    return [=](int64_t p, int64_t first, int64_t count, int64_t following) {
        float* c = scratch<float, struct Sums>(ROW_BLOCK * PANEL);
        const Factor<T>* from = x + first * stride_x;
        T* to = out + first * stride_out;
        for (int64_t m = 0; m < count; m++)  // stores that miss the cache wait as long as loads do
            for (int64_t e = 0; e < columns; e += 64 / int64_t(sizeof(T)))
                __builtin_prefetch(to + m * stride_out + p * columns + e, 1);
        [[maybe_unused]] Tiles registers;
        for (int64_t s = 0; s < steps; s += block) {
            const uint32_t *w = packed + (p * steps + s) * PANEL, *next = w + block * PANEL;
            bool last = s + block >= steps;
            if (last) next = following < 0 ? nullptr : packed + following * steps * PANEL;
            if (rows <= STREAMED_ROWS) next = NEARBY ? w + NEAR : nullptr;
            auto sums = [=](int64_t m, int j) { return s ? load(c + m * PANEL + j * LANES) : vf{}; };
            int64_t length = std::min(block, steps - s);
            Following ahead{next, length, count};
            auto end = [=](int64_t m, const vf(&row)[VECTORS]) { emit(row, p, N, bias, gate, to + m * stride_out); };
            if constexpr (AMX<T>) {
                auto multiply = [&](auto fetch) {
                    amx_products(registers, from + s * STEP<T>, stride_x, count, w, length, s == 0, last, c, PANEL, fetch, end);
                };
                int64_t lines = std::min(block, last ? steps : steps - s - block) * PANEL / LINE;
                if (rows > TILE)
                    multiply(Stream(next, lines, amx_calls(count, length), true));
                else
                    multiply([](const uint32_t* now) {  // the next steps but one
                        for (int64_t l = 0; l < TILE * PANEL; l += LINE) fetch_line(now + 2 * TILE * PANEL + l);
                    });
            } else if (last)
                tiles<T>(from + s * STEP<T>, stride_x, count, w, steps - s, sums, end, ahead);
            else
                tiles<T>(
                    from + s * STEP<T>, stride_x, count, w, block, sums,
                    one_by_one([=](int64_t m, int j, vf sum) { store(c + m * PANEL + j * LANES, sum); }), ahead);
        }
    };
}

template <class T>
void linear(const T* x, int64_t stride_x, int64_t rows, const uint32_t* packed, int64_t N, int64_t K, const T* bias,
            Gate gate, T* out) {
    int64_t each = CONVERTS<T> ? MANY_ROWS : rows, stride_out = gate == Gate::NONE ? N : N / 2;
    for (int64_t m = 0; m < rows; m += each) {
        int64_t count = std::min(each, rows - m), stride = stride_x;
        const Factor<T>* some = padded_rows(x + m * stride_x, stride, count, K);
        over_panels(count, panels_of(N, gate != Gate::NONE), row_block<T>(K),
                    panel_product<T>(some, stride, count, packed, N, K, bias, gate, out + m * stride_out));
    }
}

}  // namespace infer
