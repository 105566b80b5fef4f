// Attention of ragged chunks over block-structured K/V. Online softmax (Milakov and Gimelshein, 2018) goes over steps
// of KEYS keys within segments of SEGMENT keys, both counted from position 0; then the segments' results are merged in
// order. No bit of a result depends on which thread computes a segment, or on steps and segments that the query does
// not attend to.
//
// H query heads, K key/value heads, G = H / K query heads that share a key/value head, E head size. The queries of such
// a group are rows of one tile, so that keys and values are packed once for all of them.
#pragma once

#include <vector>

#include "matmul.hpp"

namespace infer {

constexpr int64_t KEYS = 128;
constexpr int64_t SEGMENT = 512;
constexpr int64_t TILE_ROWS = 96;
constexpr int64_t BAND = 4 * ROWS;  // rows for which scores are computed up to the last key that any of them sees
constexpr float LOG2E = 1.44269504088896341f;
constexpr float LOWEST = -1e38f;  // the start of running maxima; finite, so that the difference of two is 0, not NaN
static_assert(KEYS % PANEL == 0 && SEGMENT % KEYS == 0 && TILE_ROWS % BAND == 0);

template <int HALF>
inline void exchange(vu (&x)[LANES]) {
    vi low = lanes_from([](int i) { return i & HALF ? LANES + i - HALF : i; });
    vi high = lanes_from([](int i) { return i & HALF ? LANES + i : i + HALF; });
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        if (!(i & HALF)) {
            vu a = x[i], b = x[i + HALF];
            x[i] = shuffle(a, b, low);
            x[i + HALF] = shuffle(a, b, high);
        }
}

// Transposes by exchanging smaller and smaller off-diagonal squares (Eklundh, 1972).
inline void transpose(vu (&x)[LANES]) {
    if constexpr (LANES > 8) exchange<8>(x);
    if constexpr (LANES > 4) exchange<4>(x);
    exchange<2>(x);
    exchange<1>(x);
}

// Two vectors of codes as one of words; codes are bfloat16s without rounding.
inline vu two_codes(vf low, vf high) { return (vu)low >> 16 | (vu)high; }

// Combines LANES elements of STEP consecutive rows, stored as S, into words of Ts: elements of the same column share a
// word.
template <class T, class S>
inline vu words(const S* low, const S* high) {
    if constexpr (STEP<T> == 1)
        return (vu)load(low);
    else if constexpr (std::is_same_v<S, T>)
        return widen(load_as<vh>(low)) | widen(load_as<vh>(high)) << 16;
    else
        return two_codes(load(low), load(high));
}

// ``words`` of 2 * LANES elements.
template <class T>
inline void many_words(const T* low, const T* high, vu (&out)[2]) {
#if defined(__AVX512BW__)
    if constexpr (STEP<T> == 2) {
        constexpr auto source = [](int i) { return uint16_t(i / 2 + i % 2 * 32); };
        auto order = [&]<int... I>(std::integer_sequence<int, I...>, int from) {
            alignas(64) static const uint16_t halves[2][32] = {{source(I)...}, {uint16_t(source(I) + 16)...}};
            return _mm512_load_si512(halves[from]);
        };
        __m512i a = load_as<__m512i>(low), b = load_as<__m512i>(high);
        for (int i = 0; i < 2; i++)
            out[i] = (vu)_mm512_permutex2var_epi16(a, order(std::make_integer_sequence<int, 32>{}, i), b);
        return;
    }
#endif
    for (int i = 0; i < 2; i++) out[i] = words<T>(low + i * LANES, high + i * LANES);
}

// How many elements, stored as S, share a 32-bit word.
template <class S>
constexpr int64_t SHARING = 4 / sizeof(S);

// Stores a word of consecutive elements per lane as words of Ts, PANEL words from one to the next.
template <class T, class S>
inline void spread(vu word, uint32_t* to) {
    if constexpr (std::is_same_v<S, T>) {
        store_as(to, word);
    } else {
        vf codes[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) codes[i] = __builtin_convertvector((vi)(word << (24 - 8 * i)) >> 24, vf);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i += STEP<T>)
            store_as(to + i / STEP<T> * PANEL, STEP<T> == 1 ? (vu)codes[i] : two_codes(codes[i], codes[(i + 1) % 4]));
    }
}

template <class T, class S>
inline T element(S x) {
    if constexpr (std::is_same_v<T, bf16> && std::is_same_v<S, int8_t>) {
        float code = x;
        return {uint16_t(load_as<uint32_t>(&code) >> 16)};
    } else {
        return x;
    }
}

// Where the K/V of a step's keys are in the cache, for the first head and counted in heads. Those past the last key
// repeat the last one.
struct Places {
    int64_t at[KEYS];
    int64_t count;
};

// K and V are stored as S: as T, or as codes of 8 bits, whose scales enter into the scores and the weights.
template <class T, class S>
struct Attention {
    static constexpr bool QUANTIZED = !std::is_same_v<S, T>;

    const T* q;
    const S* k;
    const S* v;
    const float* k_scales;  // [positions][K], if they are quantized
    const float* v_scales;
    T* out;
    const int32_t* starts;
    const int32_t* offsets;
    const int32_t* table;
    int64_t stride_q, stride_q_head, stride_table;
    int64_t H, K, E, block_size;
    int64_t window;         // 0 for none
    float scale, soft_cap;  // 0 for none
    const float* sinks;     // per query head, a logit without a value; null for none

    // Consecutive queries of one sequence.
    struct Queries {
        int64_t sequence, first, count, position;
    };

    // The state of a tile's online softmax: per row, the maximum score, the sum of weights and the weighted values.
    struct Found {
        float* top;    // [rows]
        float* total;  // [rows]
        float* acc;    // [rows][columns]
    };

    int64_t group() const { return H / K; }
    int64_t tile_rows() const { return std::max(TILE_ROWS, group()); }
    int64_t width() const { return steps_of<T>(E) * STEP<T>; }
    int64_t columns() const { return panels_of(E) * PANEL; }
    int64_t first_key(const Queries& t) const { return window ? std::max<int64_t>(0, t.position - window + 1) : 0; }
    int64_t last_key(const Queries& t) const { return t.position + t.count - 1; }
    int64_t first_segment(const Queries& t) const { return first_key(t) / SEGMENT; }
    int64_t segments(const Queries& t) const { return last_key(t) / SEGMENT - first_segment(t) + 1; }

    int64_t size(int64_t rows) const { return rows * (2 + columns()); }
    static Found carve(float* memory, int64_t rows) { return {memory, memory + rows, memory + 2 * rows}; }
    Found part(const Found& f, int64_t row) const { return {f.top + row, f.total + row, f.acc + row * columns()}; }

    void clear(const Found& f, int64_t rows) const {
        std::fill_n(f.top, rows, LOWEST);
        std::fill_n(f.total, rows, 0.0f);
        std::fill_n(f.acc, rows * columns(), 0.0f);
    }

    void locate(const Queries& t, int64_t key, Places& places) const {
        const int32_t* blocks = table + t.sequence * stride_table;
        int64_t block = key / block_size, within = key % block_size;
        places.count = std::max<int64_t>(0, std::min(KEYS, last_key(t) + 1 - key));
        for (int64_t n = 0; n < KEYS; n++) {
            places.at[n] = n < places.count ? (blocks[block] * block_size + within) * K : n ? places.at[n - 1] : 0;
            if (++within == block_size) within = 0, block++;
        }
    }

    // Prefetches a head's rows of K or V, a few at a time: a core can wait for few cache lines at once, so that memory
    // would be idle between bursts.
    struct Ahead {
        const S* head;
        const Places& places;
        int64_t E, next = 0;

        void until(int64_t end) {
            for (end = std::min(end, places.count); next < end; next++)
                for (int64_t e = 0; e < E; e += 64 / int64_t(sizeof(S)))
                    __builtin_prefetch(head + places.at[next] * E + e, 0, 2);
        }
        // While tiles are computed, fetches a row in every other step.
        auto operator()(int64_t) {
            return [this](int64_t step) { until(next + step % 2); };
        }
    };

    // The factors of a step's keys: their scales times ``factor``.
    void gather_scales(const Places& places, const float* scales, float factor, float* to) const {
        for (int64_t n = 0; n < KEYS; n++) to[n] = scales[places.at[n]] * factor;
    }

    // Packs keys as the columns of a matrix [E, KEYS]. Columns past the last key repeat it, and are masked later.
    // Prefetches half as many rows.
    void pack_keys(const Places& places, const S* keys, uint32_t* packed, Ahead& ahead) const {
        int64_t steps = steps_of<T>(E);
        for (int64_t n = 0; n < places.count; n += LANES) {
            const S* rows[LANES];
            for (int64_t i = 0; i < LANES; i++) rows[i] = keys + places.at[n + i] * E;
            ahead.until((n + LANES) / 2);
            uint32_t* to = packed + n / PANEL * steps * PANEL + n % PANEL;
            int64_t e = 0;
            for (; e + LANES * SHARING<S> <= E; e += LANES * SHARING<S>) {
                vu words[LANES];
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++) words[i] = load_as<vu>(rows[i] + e);
                transpose(words);
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++)
                    spread<T, S>(words[i], to + (e + i * SHARING<S>) / STEP<T> * PANEL);
            }
            for (; e < E; e += STEP<T>)
                for (int i = 0; i < LANES; i++) {
                    T word[STEP<T>] = {};
                    for (int64_t j = 0; j < std::min<int64_t>(STEP<T>, E - e); j++) word[j] = element<T>(rows[i][e + j]);
                    std::memcpy(to + e / STEP<T> * PANEL + i, word, 4);
                }
        }
    }

    // Packs values as a matrix [KEYS, E]. Rows past the last key repeat it, and get weight 0. Prefetches as above.
    void pack_values(const Places& places, const S* values, uint32_t* packed, Ahead& ahead) const {
        int64_t steps = steps_of<T>(KEYS), used = steps_of<T>(places.count);
        for (int64_t s = 0; s < used; s++) {
            const S *low = values + places.at[s * STEP<T>] * E, *high = values + places.at[s * STEP<T> + STEP<T> - 1] * E;
            ahead.until((s + 1) * STEP<T> / 2);
            over_vectors(E, [&](int64_t e, int n) {
                uint32_t* to = packed + (e / PANEL * steps + s) * PANEL + e % PANEL;
                if (n == LANES) {
                    store_as(to, words<T>(low + e, high + e));
                } else {
                    S ends[2][LANES] = {};
                    std::memcpy(ends[0], low + e, n * sizeof(S));
                    std::memcpy(ends[1], high + e, n * sizeof(S));
                    store_as(to, words<T>(ends[0], ends[1]));
                }
            });
        }
    }

    // One step of keys for the rows that see some of them. Their values are prefetched while the keys are used, and then
    // the keys of head ``then`` at ``next``, which come after these.
    void step(const Queries& t, int64_t key, const Places& places, int64_t head, const Factor<T>* queries, const Found& f,
              const Places& next, int64_t then) const {
        int64_t G = group(), count = places.count;
        // The first queries may see none of these keys because of causality, and the last ones because of the window.
        int64_t begin = std::max<int64_t>(0, key - t.position) * G, end = t.count * G;
        if (window) end = std::min(end, (key + count - 1 + window - t.position) * G);
        if (begin >= end) return;
        int64_t e_steps = steps_of<T>(E), k_steps = steps_of<T>(KEYS), rows = end - begin;
        auto* packed = scratch<uint32_t, struct PackedStep>(std::max(KEYS * e_steps, columns() * k_steps));
        auto* scores = scratch<float, struct Scores>(tile_rows() * KEYS);
        auto* weights = scratch<Factor<T>, struct Weights>(tile_rows() * KEYS);
        float units = scale * LOG2E, *factors = scratch<float, struct Factors>(KEYS);
        if constexpr (QUANTIZED) gather_scales(places, k_scales + head, units, factors);
        auto factor = [=](int64_t n) { return QUANTIZED ? load(factors + n) : splat(units); };
        Ahead values{v + head * E, places, E}, keys{k + then * E, next, E};
        // Among these keys, the index of the last one that each row sees, and how many the row's band sees.
        auto *last = scratch<int64_t, struct Last>(tile_rows()), *seen = scratch<int64_t, struct Seen>(tile_rows());
        for (int64_t r = 0; r < rows; r += G) std::fill_n(last + r, G, t.position + (begin + r) / G - key);
        for (int64_t r = 0; r < rows; r += BAND) {
            int64_t n = std::min(BAND, rows - r);
            std::fill_n(seen + r, n, std::min(count, last[r + n - 1] + 1));
        }
        bool few = direct(rows);
        if constexpr (DIRECT)
            if (few)
                in_tiles<ROWS, ROWS>(rows, [&]<int R>(int64_t) {
                    few_scores<R>(places, k + head * E, queries + begin * width(), scores, factor, values);
                });
        if (!few) pack_keys(places, k + head * E, packed, values);
        for (int64_t n = 0; n < count && !few; n += PANEL) {
            int64_t r = std::min(rows, std::max<int64_t>(0, key + n - t.position) * G - begin);
            r = std::max<int64_t>(0, r) / BAND * BAND;  // the first band of which a row sees some key of the panel
            float* to = scores + r * KEYS + n;
            tiles<T>(
                queries + (begin + r) * width(), width(), rows - r, packed + n * e_steps, e_steps,
                [](int64_t, int) { return vf{}; },
                one_by_one([=](int64_t m, int j, vf sum) { store(to + m * KEYS + j * LANES, sum * factor(n + j * LANES)); }),
                values);
        }
        if constexpr (QUANTIZED) gather_scales(places, v_scales + head, 1, factors);
        softmax(last, seen, rows, scores, factors, weights, part(f, begin));
        values.until(KEYS);
        if constexpr (DIRECT)
            if (few)
                in_tiles<ROWS, ROWS>(rows, [&]<int R>(int64_t) {
                    float* acc = f.acc + begin * columns();
                    few_values<R>(places, v + head * E, weights, steps_of<T>(seen[0]), acc, keys);
                });
        if (!few) pack_values(places, v + head * E, packed, keys);
        for (int64_t e = 0, stride = columns(); e < stride && !few; e += PANEL)
            for (int64_t r = 0, next; r < rows; r = next) {
                for (next = r; next < rows && seen[next] == seen[r];) next++;
                float* acc = f.acc + (begin + r) * stride + e;
                tiles<T>(
                    weights + r * KEYS, KEYS, next - r, packed + e * k_steps, steps_of<T>(seen[r]),
                    [=](int64_t m, int j) { return load(acc + m * stride + j * LANES); },
                    one_by_one([=](int64_t m, int j, vf sum) { store(acc + m * stride + j * LANES, sum); }), keys);
            }
        keys.until(KEYS);
    }

    // Turns scores, as logarithms to base 2, into weights of the values as they are stored, whose scales are
    // ``factors`` if they are quantized, and scales the rows' earlier sums to their new maxima.
    // last[row] is the last key that a row sees, seen[row] how many scores have been computed for it. Going through
    // all rows three times is faster than going row by row, where every maximum and every sum would have to be awaited.
    void softmax(const int64_t* last, const int64_t* seen, int64_t rows, float* scores, const float* factors,
                 Factor<T>* weights, const Found& f) const {
        auto* now = scratch<float, struct Now>(tile_rows());
        auto* decay = scratch<float, struct Decay>(tile_rows() + LANES);
        for (int64_t r = 0; r < rows; r++) {
            float* row = scores + r * KEYS;
            int64_t count = seen[r];
            hide(last[r], count, row);
            vf top = load(row);
            for (int64_t n = LANES; n < count; n += LANES) top = maximum(top, load(row + n));
            now[r] = std::max(f.top[r], highest(top));
            decay[r] = f.top[r] - now[r];
            f.top[r] = now[r];
        }
        for (int64_t r = 0; r < rows; r += LANES) store(decay + r, exp2(load(decay + r)));
        for (int64_t r = 0; r < rows; r++) {
            vf total{}, top = splat(now[r]);
            int64_t count = seen[r];
            for (int64_t n = 0; n < count; n += LANES) {
                vf w = exp2(load(scores + r * KEYS + n) - top);
                total += w;
                if constexpr (QUANTIZED) w *= load(factors + n);
                store(weights + r * KEYS + n, CONVERTS<T> ? rounded<T>(w) : w);
            }
            f.total[r] = f.total[r] * decay[r] + sum(total);
        }
        for (int64_t r = 0; r < rows; r++)
            if (float* acc = f.acc + r * columns(); decay[r] != 1.0f)
                for (int64_t e = 0; e < columns(); e += LANES) store(acc + e, load(acc + e) * decay[r]);
    }

    // Applies the soft cap, and masks the keys that a row does not see whose last key is ``last``.
    void hide(int64_t last, int64_t count, float* row) const {
        if (soft_cap == 0 && last >= count - 1 && count % LANES == 0 && (!window || last < window)) return;
        vi lane = lanes_from([](int i) { return i; });
        int32_t end = int32_t(std::min(last, count - 1));
        int32_t before = window ? int32_t(std::max<int64_t>(last - window, -1)) : -1;
        for (int64_t n = 0; n < count; n += LANES) {
            vf s = load(row + n);
            if (soft_cap != 0) s = soft_cap * LOG2E * tanh(s / (soft_cap * LOG2E));
            vi at = lane + int32_t(n), hidden = (at > end) | (at <= before);
            store(row + n, hidden ? splat(-INFINITY) : s);
        }
    }

    // Whether so few rows are multiplied by keys and values as they lie in the cache. Packing these would take longer.
    static constexpr bool DIRECT = std::is_same_v<S, T> && !CONVERTS<T> && !AMX<T>;
    bool direct(int64_t rows) const { return DIRECT && rows <= ROWS && E % (2 * LANES * STEP<T>) == 0; }

    // The scores of R rows, to scores[row][key]: the bits of a tile with packed keys. Two groups of keys take turns, so
    // that neither waits for its own sums. Prefetches as many rows as there are keys.
    template <int R, class Factors>
    void few_scores(const Places& places, const T* keys, const Factor<T>* queries, float* scores, Factors factor,
                    Ahead& ahead) const {
        constexpr int TURNS = 2;
        constexpr int64_t BLOCK = LANES * STEP<T>;
        for (int64_t n = 0; n < places.count; n += TURNS * LANES) {
            vf sums[TURNS][R] = {};
            int64_t due = 0;
            for (int64_t e = 0; e < E; e += BLOCK)
#pragma GCC unroll 2
                for (int turn = 0; turn < TURNS; turn++) {
                    asm volatile("" ::: "memory");  // or the queries' words would be kept for the other turn, in memory
                    vu words[LANES];
                    const int64_t* at = places.at + n + turn * LANES;
#pragma GCC unroll 16
                    for (int i = 0; i < LANES; i++) words[i] = load_as<vu>(keys + at[i] * E + e);
                    transpose(words);
                    for (due += LANES * BLOCK; due >= E; due -= E) ahead.until(ahead.next + 1);
#pragma GCC unroll 16
                    for (int i = 0; i < LANES; i++)
#pragma GCC unroll 6
                        for (int r = 0; r < R; r++)
                            sums[turn][r] = accumulate<T>(
                                sums[turn][r], words[i], load_as<uint32_t>(queries + r * width() + e + i * STEP<T>));
                }
            for (int turn = 0; turn < TURNS; turn++)
                for (int r = 0; r < R; r++) {
                    int64_t key = n + turn * LANES;
                    store(scores + r * KEYS + key, sums[turn][r] * factor(key));
                }
        }
    }

    // Adds R rows' weighted values to acc[row][column]: the bits of a tile with packed values. Prefetches as above.
    template <int R>
    void few_values(const Places& places, const T* values, const Factor<T>* weights, int64_t steps, float* acc,
                    Ahead& ahead) const {
        constexpr int V = R * 8 <= ROWS * VECTORS ? 8 : R * 4 <= ROWS * VECTORS ? 4 : 2;
        auto run = [&]<int W>(int64_t begin) {
            vf sums[R][W];
#pragma GCC unroll 6
            for (int r = 0; r < R; r++)
#pragma GCC unroll 8
                for (int j = 0; j < W; j++) sums[r][j] = load(acc + r * columns() + begin + j * LANES);
            for (int64_t s = 0; s < steps; s++) {
                const T *low = values + places.at[s * STEP<T>] * E + begin;
                const T *high = values + places.at[s * STEP<T> + STEP<T> - 1] * E + begin;
                if (begin + W * LANES >= E) ahead.until((s + 1) * STEP<T>);
#pragma GCC unroll 4
                for (int j = 0; j < W; j += 2) {
                    vu both[2];
                    many_words(low + j * LANES, high + j * LANES, both);
#pragma GCC unroll 6
                    for (int r = 0; r < R; r++) {
                        uint32_t weight = load_as<uint32_t>(weights + r * KEYS + s * STEP<T>);
                        sums[r][j] = accumulate<T>(sums[r][j], both[0], weight);
                        sums[r][j + 1] = accumulate<T>(sums[r][j + 1], both[1], weight);
                    }
                }
            }
#pragma GCC unroll 6
            for (int r = 0; r < R; r++)
#pragma GCC unroll 8
                for (int j = 0; j < W; j++) store(acc + r * columns() + begin + j * LANES, sums[r][j]);
        };
        int64_t e = 0;
        for (; e + V * LANES <= E; e += V * LANES) run.template operator()<V>(e);
        for (; e < E; e += 2 * LANES) run.template operator()<2>(e);
    }

    // Copies the queries of K/V heads [first, end) to rows, [heads][count * G][width].
    void gather(const Queries& t, int64_t first, int64_t end, Factor<T>* queries) const {
        int64_t G = group();
        for (int64_t head = first; head < end; head++)
            for (int64_t r = 0; r < t.count * G; r++, queries += width()) {
                int64_t row = offsets[t.sequence] + t.first + r / G;
                to_factors(q + row * stride_q + (head * G + r % G) * stride_q_head, E, queries);
                if (width() > E) queries[E] = {};
            }
    }

    // Attention over the keys of one segment that the tile sees, for K/V heads [first, end).
    void segment(const Queries& t, int64_t first, int64_t end, int64_t index, const Factor<T>* queries, const Found& f) const {
        int64_t begin = std::max(index * SEGMENT, first_key(t) / KEYS * KEYS);
        int64_t stop = std::min((index + 1) * SEGMENT, last_key(t) + 1), rows = t.count * group();
        Places both[2], *places = both, *after = both + 1;
        clear(f, (end - first) * rows);
        locate(t, begin, *places);
        for (int64_t key = begin; key < stop; key += KEYS) {
            locate(t, key + KEYS, *after);
            for (int64_t head = first; head < end; head++)
                step(t, key, *places, head, queries + (head - first) * rows * width(), part(f, (head - first) * rows),
                     head + 1 < end ? *places : *after, head + 1 < end ? head + 1 : first);
            std::swap(places, after);
        }
    }

    void merge(const Found& into, const Found& from, int64_t rows) const {
        for (int64_t r = 0; r < rows; r++) {
            float top = std::max(into.top[r], from.top[r]);
            float decay = exp2(splat(into.top[r] - top))[0], decay_from = exp2(splat(from.top[r] - top))[0];
            into.top[r] = top;
            into.total[r] = into.total[r] * decay + from.total[r] * decay_from;
            float *a = into.acc + r * columns(), *b = from.acc + r * columns();
            for (int64_t e = 0; e < columns(); e += LANES) {
                vf scaled = load(b + e) * decay_from;
                store(a + e, load(a + e) * decay + scaled);
            }
        }
    }

    void finish(const Queries& t, int64_t first, int64_t end, const Found& f) const {
        int64_t G = group(), rows = t.count * G;
        for (int64_t i = 0; i < (end - first) * rows; i++) {
            int64_t head = (first + i / rows) * G + i % rows % G, row = offsets[t.sequence] + t.first + i % rows / G;
            float scale = 1.0f / f.total[i];
            if (sinks) {
                float sink = sinks[head] * LOG2E, top = std::max(f.top[i], sink);
                float decay = exp2(splat(f.top[i] - top))[0];
                scale = decay / (f.total[i] * decay + exp2(splat(sink - top))[0]);
            }
            over_vectors(E, [&](int64_t e, int n) {
                // Merging turns -0 into 0, but not every row has been merged: do the same to all.
                vf sum = load(f.acc + i * columns() + e) + 0.0f;
                give(out + (row * H + head) * E + e, sum * scale, n);
            });
        }
    }

    void run(int64_t sequences) const {
        int64_t G = group(), most = std::max<int64_t>(1, TILE_ROWS / G), longest = 0, all_segments = 0;
        std::vector<Queries> tiles;
        for (int64_t b = 0; b < sequences; b++)
            for (int64_t i = 0, n = offsets[b + 1] - offsets[b]; i < n; i += most) {
                tiles.push_back({b, i, std::min(most, n - i), starts[b] + i});
                longest = std::max(longest, segments(tiles.back()));
                all_segments += segments(tiles.back());
            }
        // The tiles with the most keys go first, so that no thread is left with a long one at the end.
        std::stable_sort(tiles.begin(), tiles.end(),
                         [&](const Queries& a, const Queries& b) { return segments(a) > segments(b); });
        int64_t count = int64_t(tiles.size()), wanted = 2 * threads(), most_rows = 0;
        for (auto& t : tiles) most_rows = std::max(most_rows, t.count * G);
        // A task with a small tile takes several heads, whose K/V are adjacent in memory, unless threads would be idle. If
        // few tiles have many segments, the tasks are segments rather than heads.
        int64_t heads = std::max<int64_t>(1, std::min({K, TILE_ROWS / most_rows, all_segments * K / wanted}));
        int64_t groups = (K + heads - 1) / heads, rows = heads * most_rows;
        bool split = longest > 1 && threads() > 1 && count * groups < wanted;
        int64_t parts = split ? longest : 1;
        std::vector<float> found(split ? count * groups * parts * size(rows) : 0);
        parallel(count * groups * parts, [&](int64_t task) {
            const Queries& t = tiles[task / parts / groups];
            int64_t first = task / parts % groups * heads, end = std::min(K, first + heads);
            int64_t own = (end - first) * t.count * G;
            auto* queries = scratch<Factor<T>, struct Gathered>(rows * width());
            if (split && task % parts >= segments(t)) return;
            gather(t, first, end, queries);
            if (split) {
                segment(t, first, end, first_segment(t) + task % parts, queries,
                        carve(found.data() + task * size(rows), own));
                return;
            }
            Found all = carve(scratch<float, struct All>(size(rows)), own);
            segment(t, first, end, first_segment(t), queries, all);
            for (int64_t i = 1; i < segments(t); i++) {
                Found one = carve(scratch<float, struct One>(size(rows)), own);
                segment(t, first, end, first_segment(t) + i, queries, one);
                merge(all, one, own);
            }
            finish(t, first, end, all);
        });
        if (!split) return;
        parallel(count * groups, [&](int64_t task) {
            const Queries& t = tiles[task / groups];
            int64_t first = task % groups * heads, end = std::min(K, first + heads);
            int64_t own = (end - first) * t.count * G;
            Found all = carve(found.data() + task * parts * size(rows), own);
            for (int64_t i = 1; i < segments(t); i++)
                merge(all, carve(found.data() + (task * parts + i) * size(rows), own), own);
            finish(t, first, end, all);
        });
    }
};

}  // namespace infer
