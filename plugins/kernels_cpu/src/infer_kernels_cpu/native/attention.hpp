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
constexpr int64_t STEP_BYTES = 1 << 18;  // of K that a task prefetches for a step, and as much of V
// Rows of a tile, which share packed keys and values, and how few these may be so that threads are not idle.
template <class T>
constexpr int64_t TILE_ROWS = AMX<T> ? 256 : 96;
template <class T>
constexpr int64_t LEAST_ROWS = AMX<T> ? 64 : 96;
// Rows for which scores are computed up to the last key that any of them sees.
template <class T>
constexpr int64_t BAND = AMX<T> ? 2 * TILE : 4 * ROWS;
static_assert(KEYS % PANEL == 0 && SEGMENT % KEYS == 0);
constexpr float LOG2E = 1.44269504088896341f;
constexpr float LOWEST = -1e38f;  // the start of running maxima; finite, so that the difference of two is 0, not NaN

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

    // Prefetches neighboring heads' rows of K or V, a few cache lines at a time: a core can wait for few at once, so that
    // memory would be idle between bursts.
    struct Ahead {
        const S* head;
        const Places& places;
        int64_t E, heads;
        int64_t row = 0, line = 0;

        static int64_t lines_of(int64_t elements) { return (elements * int64_t(sizeof(S)) + 63) / 64; }
        int64_t lines() const { return lines_of(E); }  // of one head's row
        void fetch(int64_t count) {
            for (int64_t each = lines_of(E * heads); count > 0 && row < places.count; count--) {
                __builtin_prefetch(head + places.at[row] * E + line * 64 / int64_t(sizeof(S)), 0, 2);
                if (++line == each) line = 0, row++;
            }
        }
        void finish() { fetch(KEYS * lines_of(E * heads)); }
        // While tiles are computed, fetches a head's row in every other step.
        auto operator()(int64_t) {
            return [this, each = lines()](int64_t step) { fetch(step % 2 * each); };
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
            ahead.fetch(LANES / 2 * ahead.lines());
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
            if (s * STEP<T> % 2 == 0) ahead.fetch(ahead.lines());  // a head's row for every two
            auto at = [=](int64_t e) { return packed + (e / PANEL * steps + s) * PANEL + e % PANEL; };
            int64_t e = 0;
            if constexpr (!QUANTIZED)
                for (; e + 2 * LANES <= E; e += 2 * LANES) {
                    vu both[2];
                    many_words(low + e, high + e, both);
                    store_as(at(e), both[0]);
                    store_as(at(e + LANES), both[1]);
                }
            over_vectors(E - e, [&](int64_t i, int n) {
                if (n == LANES) {
                    store_as(at(e + i), words<T>(low + e + i, high + e + i));
                } else {
                    S ends[2][LANES] = {};
                    std::memcpy(ends[0], low + e + i, n * sizeof(S));
                    std::memcpy(ends[1], high + e + i, n * sizeof(S));
                    store_as(at(e + i), words<T>(ends[0], ends[1]));
                }
            });
        }
    }

    // One step of keys of heads [first, stop) for the rows that see some of them. Values are prefetched while the keys are
    // used, and then the keys at ``next``, which come after these.
    void step(const Queries& t, int64_t key, const Places& places, int64_t first, int64_t stop, const Factor<T>* queries,
              const Found& f, const Places& next) const {
        int64_t G = group(), count = places.count, heads = stop - first, of_head = t.count * G;
        // The first queries may see none of these keys because of causality, and the last ones because of the window.
        int64_t begin = std::max<int64_t>(0, key - t.position) * G, end = t.count * G;
        if (window) end = std::min(end, (key + count - 1 + window - t.position) * G);
        if (begin >= end) return;
        int64_t e_steps = steps_of<T>(E), k_steps = steps_of<T>(KEYS), rows = end - begin;
        auto* packed = scratch<uint32_t, struct PackedStep>(std::max(KEYS * e_steps, columns() * k_steps));
        auto* scores = scratch<float, struct Scores>(rows * KEYS);
        auto* all_weights = scratch<Factor<T>, struct Weights>(heads * rows * KEYS);
        float units = scale * LOG2E, *factors = scratch<float, struct Factors>(KEYS);
        float* value_factors = scratch<float, struct ValueFactors>(KEYS);
        if constexpr (!QUANTIZED) std::fill_n(factors, KEYS, units);
        Ahead values{v + first * E, places, E, heads}, keys{k + first * E, next, E, heads};
        // Among these keys, the index of the last one that each row sees, and how many the row's band sees.
        auto *last = scratch<int64_t, struct Last>(rows), *seen = scratch<int64_t, struct Seen>(rows);
        for (int64_t r = 0; r < rows; r += G) std::fill_n(last + r, G, t.position + (begin + r) / G - key);
        for (int64_t r = 0; r < rows; r += BAND<T>) {
            int64_t n = std::min(BAND<T>, rows - r);
            std::fill_n(seen + r, n, std::min(count, last[r + n - 1] + 1));
        }
        [[maybe_unused]] Tiles registers;
        bool direct = few(rows);
        auto weights_of = [=](int64_t head) { return all_weights + (head - first) * rows * KEYS; };
        auto found_of = [&](int64_t head) { return part(f, (head - first) * of_head + begin); };
        for (int64_t head = first; head < stop; head++) {
            const Factor<T>* own = queries + ((head - first) * of_head + begin) * width();
            if (direct)
                few_scores(registers, places, k + head * E, own, rows, scores, values);
            else
                pack_keys(places, k + head * E, packed, values);
            if constexpr (QUANTIZED) {
                gather_scales(places, k_scales + head, units, factors);
                gather_scales(places, v_scales + head, 1, value_factors);
            }
            for (int64_t n = 0; n < count && !direct; n += PANEL) {
                int64_t r = std::min(rows, std::max<int64_t>(0, key + n - t.position) * G - begin);
                r = std::max<int64_t>(0, r) / BAND<T> * BAND<T>;  // the first band of which a row sees some key of the panel
                row_products<T>(registers, own + r * width(), width(), rows - r, packed + n * e_steps, e_steps, true,
                                scores + r * KEYS + n, KEYS, values);
            }
            softmax(last, seen, rows, scores, factors, value_factors, weights_of(head), found_of(head));
        }
        values.finish();
        for (int64_t head = first; head < stop; head++) {
            const Factor<T>* weights = weights_of(head);
            float* acc = found_of(head).acc;
            if constexpr (DIRECT)
                if (direct) {
                    in_tiles<ROWS, ROWS>(rows, [&]<int R>(int64_t) {
                        few_values<R>(places, v + head * E, weights, steps_of<T>(seen[0]), acc, keys);
                    });
                    continue;
                }
            pack_values(places, v + head * E, packed, keys);
            for (int64_t e = 0, stride = columns(); e < stride; e += PANEL)
                for (int64_t r = 0, behind; r < rows; r = behind) {
                    for (behind = r; behind < rows && seen[behind] == seen[r];) behind++;
                    row_products<T>(registers, weights + r * KEYS, KEYS, behind - r, packed + e * k_steps,
                                    steps_of<T>(seen[r]), false, acc + r * stride + e, stride, keys);
                }
        }
        keys.finish();
    }

    // Turns products of queries and keys, which ``factors`` make logarithms to base 2, into weights of the values as they
    // are stored, whose scales are ``value_factors`` if they are quantized, and scales the rows' earlier sums to their new
    // maxima.
    // last[row] is the last key that a row sees, seen[row] how many scores have been computed for it. Going through
    // all rows three times is faster than going row by row, where every maximum and every sum would have to be awaited.
    void softmax(const int64_t* last, const int64_t* seen, int64_t rows, float* scores, const float* factors,
                 const float* value_factors, Factor<T>* weights, const Found& f) const {
        auto* now = scratch<float, struct Now>(rows);
        auto* decay = scratch<float, struct Decay>(rows + LANES);
        for (int64_t r = 0; r < rows; r++) {
            float* row = scores + r * KEYS;
            int64_t count = seen[r];
            bool some = hides(last[r], count);
            vf top = splat(-INFINITY);
            for (int64_t n = 0; n < count; n += LANES) {
                vf score = load(row + n) * load(factors + n);
                if (some) score = hide(last[r], count, n, score);
                store(row + n, score);
                top = maximum(top, score);
            }
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
                if constexpr (QUANTIZED) w *= load(value_factors + n);
                store(weights + r * KEYS + n, CONVERTS<T> ? rounded<T>(w) : w);
            }
            f.total[r] = f.total[r] * decay[r] + sum(total);
        }
        for (int64_t r = 0; r < rows; r++)
            if (float* acc = f.acc + r * columns(); decay[r] != 1.0f)
                for (int64_t e = 0; e < columns(); e += LANES) store(acc + e, load(acc + e) * decay[r]);
    }

    // Whether a soft cap or a mask changes any of the first ``count`` scores of a row whose last key is ``last``.
    bool hides(int64_t last, int64_t count) const {
        return soft_cap != 0 || last < count - 1 || count % LANES || (window && last >= window);
    }

    // Applies the soft cap to the scores of keys from ``n`` on, and masks those that the row does not see.
    vf hide(int64_t last, int64_t count, int64_t n, vf score) const {
        if (soft_cap != 0) score = soft_cap * LOG2E * tanh(score / (soft_cap * LOG2E));
        int32_t end = int32_t(std::min(last, count - 1));
        int32_t before = window ? int32_t(std::max<int64_t>(last - window, -1)) : -1;
        vi at = lanes_from([](int i) { return i; }) + int32_t(n), hidden = (at > end) | (at <= before);
        return hidden ? splat(-INFINITY) : score;
    }

    // Whether so few rows are multiplied by keys as they lie in the cache. Packing these would take longer.
    bool few(int64_t rows) const {
        if constexpr (AMX<T>)
            return rows <= TILE && E % (TILE * STEP<T>) == 0;
        else
            return DIRECT && rows <= ROWS && E % (2 * LANES * STEP<T>) == 0;
    }
    // Whether few rows are multiplied so by values, too.
    static constexpr bool DIRECT = !QUANTIZED && !CONVERTS<T> && !AMX<T>;

    // The products of few rows and keys, to scores[row][key]: the bits of a tile with packed keys. Prefetches as many rows
    // as there are keys.
    void few_scores([[maybe_unused]] Tiles& registers, const Places& places, const S* keys, const Factor<T>* queries,
                    int64_t rows, float* scores, Ahead& ahead) const {
        if constexpr (AMX<T>)
            tile_scores(registers, places, keys, queries, rows, scores, ahead);
        else if constexpr (DIRECT)
            in_tiles<ROWS, ROWS>(rows, [&]<int R>(int64_t) { register_scores<R>(places, keys, queries, scores, ahead); });
    }

#if defined(__AMX_BF16__)
    // By tiles of keys, whose products with the rows are transposed: the terms of a sum and their order are the same.
    void tile_scores(Tiles& registers, const Places& places, const S* keys, const T* queries, int64_t rows, float* scores,
                     Ahead& ahead) const {
        constexpr int64_t BLOCK = TILE * STEP<T>;
        uint32_t* asked = scratch<uint32_t, struct Asked>(E / STEP<T> * TILE);  // the queries as columns
        std::memset(asked, 0, E / STEP<T> * TILE * sizeof *asked);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t s = 0; s < E / STEP<T>; s++)
                asked[s * TILE + r] = load_as<uint32_t>(queries + r * width() + s * STEP<T>);
        T* copy = scratch<T, struct CopiedKeys>(VECTORS * TILE * E);
        alignas(64) float found[VECTORS][TILE][LANES];
        registers.shape(TILE, TILE);  // all registers are whole
        for (int64_t n = 0; n < places.count; n += VECTORS * TILE) {
            const T* from[VECTORS];
            int64_t stride[VECTORS];
            for (int j = 0; j < VECTORS; j++) {
                int64_t at = n + j * TILE;
                bool whole = at + TILE <= places.count && block_size % TILE == 0;  // then these follow one another
                stride[j] = whole && !QUANTIZED ? K * E : E;
                from[j] = copy + j * TILE * E;
                if constexpr (!QUANTIZED)
                    if (whole) from[j] = keys + places.at[at] * E;
                for (int64_t i = at; i < at + TILE && (QUANTIZED || !whole) && at < places.count; i++)
                    copy_key(keys + places.at[i] * E, copy + (i - n) * E);
            }
            over_sums<1>([&]<int, int J>() {
                constexpr int ROWS_AT = VECTORS + J % 2, COLUMNS_AT = VECTORS + 2 + J % 2;
                if (n + J * TILE >= places.count) return;
                zero_tile<J>();
                for (int64_t e = 0; e < E; e += BLOCK) {
                    load_tile<ROWS_AT>(from[J] + e, stride[J] * int64_t(sizeof(T)));
                    load_tile<COLUMNS_AT>(asked + e / STEP<T> * TILE, TILE_BYTES);
                    multiply_tiles<J, ROWS_AT, COLUMNS_AT>();
                    ahead.fetch(TILE * int64_t(sizeof(S)) / int64_t(sizeof(T)));  // as much as these keys took
                }
            });
            over_sums<1>([&]<int, int J>() { store_tile<J>(found[J], TILE_BYTES); });
            for (int j = 0; j < VECTORS && n + j * TILE < places.count; j++) {
                vu by_row[LANES];
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++) by_row[i] = load_as<vu>(found[j][i]);
                transpose(by_row);
#pragma GCC unroll 16
                for (int r = 0; r < LANES; r++)
                    if (r < rows) store_as(scores + r * KEYS + n + j * LANES, by_row[r]);
            }
        }
    }

    void copy_key(const S* key, T* to) const {
        if constexpr (QUANTIZED)
            over_vectors(E, [=](int64_t e, int n) { give(to + e, take(key + e, n), n); });
        else
            std::memcpy(to, key, E * sizeof(T));
    }
#endif

    // For R rows. Two groups of keys take turns, so that neither waits for its own sums.
    template <int R>
    void register_scores(const Places& places, const T* keys, const Factor<T>* queries, float* scores, Ahead& ahead) const {
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
                    for (due += LANES * BLOCK; due >= E; due -= E) ahead.fetch(ahead.lines());
#pragma GCC unroll 16
                    for (int i = 0; i < LANES; i++)
#pragma GCC unroll 6
                        for (int r = 0; r < R; r++)
                            sums[turn][r] = accumulate<T>(
                                sums[turn][r], words[i], load_as<uint32_t>(queries + r * width() + e + i * STEP<T>));
                }
            for (int turn = 0; turn < TURNS; turn++)
                for (int r = 0; r < R; r++) store(scores + r * KEYS + n + turn * LANES, sums[turn][r]);
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
                if (begin + W * LANES >= E) ahead.fetch(STEP<T> * ahead.lines());
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
            step(t, key, *places, first, end, queries, f, *after);
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
        int64_t G = group(), each = TILE_ROWS<T>, wanted = 2 * threads(), longest = 0, all_segments = 0;
        auto count_of = [&](int64_t most) {
            int64_t count = 0;
            for (int64_t b = 0; b < sequences; b++) count += (offsets[b + 1] - offsets[b] + most - 1) / most;
            return count;
        };
        while (each > LEAST_ROWS<T> && count_of(std::max<int64_t>(1, each / G)) * K < wanted) each /= 2;
        int64_t most = std::max<int64_t>(1, each / G);
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
        int64_t count = int64_t(tiles.size()), most_rows = 0;
        for (auto& t : tiles) most_rows = std::max(most_rows, t.count * G);
        // A task with a small tile takes several heads, whose K/V are adjacent in memory, unless threads would be idle, or
        // what is prefetched would leave the L2 cache. If few tiles have many segments, the tasks are segments rather than
        // heads.
        int64_t fit = STEP_BYTES / (KEYS * E * int64_t(sizeof(S)));
        int64_t heads = std::max<int64_t>(1, std::min({K, fit, each / most_rows, all_segments * K / wanted}));
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
