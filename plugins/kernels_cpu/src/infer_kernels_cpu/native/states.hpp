// Kernels of recurrent layers, which walk each sequence token by token. All arithmetic is in fp32 with explicit fused
// operations in an order that the sequence alone determines, so bits depend neither on how it is cut into chunks nor on
// the vectors' width.
#pragma once

#include "rows.hpp"

namespace infer {

constexpr int64_t AHEAD = 32;         // tokens whose q, k and factors are prepared at a time
constexpr int64_t IN_PLACE = 8;       // tokens of a sequence, at most, whose state is not worth a copy
static_assert(IN_PLACE <= AHEAD);     // these are one block
constexpr int COLUMNS = VECTORS * 2;  // vectors of a state's columns that are walked together, at most
constexpr int SLICE = 4;              // the same of a copied state, whose slices lie in L1 meanwhile

// In which rows of the states the sequences find and leave theirs; ``StateRows`` of the Python contract.
struct StateRows {
    const int32_t* offsets;
    const int64_t *read, *save;
    int64_t sequences;
};

// The sum of products of a(e, lanes) and b(e, lanes) over a row, as 16 chains whatever the vectors' width.
template <class A, class B>
inline float dot(int64_t width, A a, B b) {
    constexpr int CHAINS = LANES < 16 ? 16 / LANES : 1;
    vf chains[CHAINS] = {};
    over_vectors(width, [&](int64_t e, int n) {
        vf& chain = chains[e / LANES % CHAINS];
        chain = fma(a(e, n), b(e, n), chain);
    });
    for (int half = CHAINS / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) chains[i] += chains[i + half];
    return sum(chains[0]);
}

// Copies a row as floats.
template <class T>
inline void to_floats(const T* from, int64_t width, float* to) {
    over_vectors(width, [&](int64_t e, int n) { give(to + e, take(from + e, n), n); });
}

// ``from`` divided by the root of the sum of its squares plus 1e-6, times ``factor``.
template <class T>
inline void unit(const T* from, int64_t width, float factor, float* to) {
    auto at = [&](int64_t e, int n) { return take(from + e, n); };
    float scale = factor / std::sqrt(dot(width, at, at) + 1e-6f);
    over_vectors(width, [&](int64_t e, int n) { give(to + e, take(from + e, n) * scale, n); });
}

// Prefetches a row's values, to read them or to write them.
template <int WRITE, class T>
inline void fetch(const T* row, int64_t width) {
    for (int64_t e = 0; e < width; e += 64 / int64_t(sizeof(T))) __builtin_prefetch(row + e, WRITE);
}

// Calls body(N, first, lanes) for a state's columns: as many vectors at a time as there are, then the last lanes.
template <int N = COLUMNS, class F>
inline void over_columns(int64_t width, F body, int64_t e = 0) {
    for (; e + N * LANES <= width; e += N * LANES) body(std::integral_constant<int, N>{}, e, LANES);
    if constexpr (N > 1)
        over_columns<N / 2>(width, body, e);
    else if (e < width)
        body(std::integral_constant<int, 1>{}, e, int(width - e));
}

// Some columns of a head's state [rows][stride]: N vectors, or the first lanes of one.
template <int N>
struct Columns {
    int64_t rows, stride;
    int lanes;

    template <class T>
    vf at(const T* p, int i) const {
        return N > 1 ? load(p + i * LANES) : take(p, lanes);
    }
    template <class T>
    void put(T* p, int i, vf x) const {
        if (N > 1)
            store(p + i * LANES, x);
        else
            give(p, x, lanes);
    }

    // Row r of S becomes decay(r) S + add change^T if UPDATE, and is then stored in ``to``. Each of READS sums becomes
    // S^T by.
    template <bool UPDATE, int READS, class D>
    void sweep(const float* from, float* to, D decay, const float* add, const vf* change, const float* const (&by)[2],
               vf (&sums)[2][N]) const {
        vf total[2][N] = {}, d[N];
        for (int i = 0; UPDATE && i < N; i++) d[i] = change[i];
        for (int64_t r = 0; r < rows; r++) {
            vf factors[2] = {}, added = UPDATE ? splat(add[r]) : vf{};
            for (int j = 0; j < READS; j++) factors[j] = splat(by[j][r]);
            for (int i = 0; i < N; i++) {
                vf s = at(from + r * stride, i);
                if constexpr (UPDATE) {
                    s = fma(added, d[i], decay(r) * s);
                    put(to + r * stride, i, s);
                }
                for (int j = 0; j < READS; j++) total[j][i] = fma(factors[j], s, total[j][i]);
            }
        }
        for (int j = 0; j < READS; j++)
            for (int i = 0; i < N; i++) sums[j][i] = total[j][i];
    }

    void copy(const float* from, int64_t from_stride, float* to, int64_t to_stride) const {
        for (int64_t r = 0; r < rows; r++)
            for (int i = 0; i < N; i++) put(to + r * to_stride, i, at(from + r * from_stride, i));
    }
};

// The recurrent states of a layer, [rows][heads][state_rows][width], and its outputs [tokens][heads][width].
template <class T>
struct Recurrent {
    float* states;
    int64_t stride_state, heads, state_rows, width;
    T* out;
    StateRows rows;

    float* state(int64_t row, int64_t head) const { return states + row * stride_state + head * state_rows * width; }
    T* result(int64_t token, int64_t head) const { return out + (token * heads + head) * width; }

    // For each head of each sequence, calls prepare(head, first, count) for one block of tokens after the other, and
    // then walk(columns, head, first, count, e, from, to, saved), which leaves some columns of the state in ``to`` and
    // calls saved(i) after the block's token i. Meanwhile need(head, token) prefetches what the next block reads. A
    // sequence of at most IN_PLACE tokens, which is one block, is walked where it leaves its state. A longer one is walked
    // in a copy, whose columns lie slice by slice in one piece: the state's rows are often a power of two apart, so a slice of
    // them would share few sets of the L1 cache.
    template <class P, class F, class W>
    void run(int64_t tokens, P prepare, F need, W walk) const {
        int64_t size = state_rows * width * std::max<int64_t>(1, tokens / std::max<int64_t>(1, rows.sequences));
        int64_t each = std::min(heads, std::max<int64_t>(1, ALONE / std::max<int64_t>(1, size)));
        int64_t parts = (heads + each - 1) / each;
        parallel(rows.sequences * parts, [&](int64_t task) {
            int64_t b = task / parts, first_head = task % parts * each, begin = rows.offsets[b], end = rows.offsets[b + 1];
            bool sliced = end - begin > IN_PLACE;
            float* slices = sliced ? scratch<float, struct Slices>(state_rows * (width + LANES)) : nullptr;
            for (int64_t h = first_head; begin < end && h < std::min(heads, first_head + each); h++) {
                const float* from = state(rows.read[b], h);
                float* to = state(rows.save[end - 1], h);
                for (int64_t first = begin, stop; first < end; first = stop) {
                    stop = std::min(first + AHEAD, end);
                    prepare(h, first, stop - first);
                    for (int64_t token = stop; token < std::min(stop + AHEAD, end); token++) {
                        need(h, token);
                        fetch<1>(result(token, h), width);
                    }
                    auto some = [&](auto n, int64_t e, int lanes) {
                        int64_t stride = sliced ? n * LANES : width;
                        Columns<n> columns{state_rows, stride, lanes};
                        float* own = sliced ? slices + e * state_rows : to + e;
                        if (sliced && first == begin) columns.copy(from + e, width, own, stride);
                        const float* now = sliced ? own : from + e;
                        walk(columns, h, first, stop - first, e, now, own, [&](int64_t i) {
                            int64_t row = rows.save[first + i];
                            if (row < 0 || (!sliced && first + i + 1 == end)) return;
                            columns.copy(own, stride, state(row, h) + e, width);
                        });
                    };
                    if (sliced)
                        over_columns<SLICE>(width, some);
                    else
                        over_columns(width, some);
                }
            }
        });
    }
};

// A gated delta rule. With m = S^T k and p = S^T q, a token's change is d = (v - decay m) beta, its output
// decay p + (k q) d, and its state decay S + k d^T; so one sweep changes the state for a token and reads it for the next.
// Where each row decays by itself, m and p are sums of decaying rows: k and q are multiplied by the decays before.
template <bool CHANNEL_DECAY, class T>
void gated_delta_rule(const T* qkv, int64_t stride, const T* a, int64_t stride_a, const T* b, int64_t stride_b,
                      int64_t tokens, int64_t key_heads, const float* rate, const float* dt_bias, float max_beta,
                      Recurrent<T> layer) {
    int64_t K = layer.state_rows, V = layer.width, each = layer.heads / key_heads;
    struct Factors {
        float decay[AHEAD], beta[AHEAD], kq[AHEAD];
    };
    float root = 1.0f / std::sqrt(float(K));
    constexpr int64_t KINDS = CHANNEL_DECAY ? 5 : 2;  // k, q, decays, and k and q times the decays
    auto factors = [&]() -> Factors& { return *scratch<Factors, struct DeltaFactors>(1); };
    auto keys = [&] { return scratch<float, struct Keys>(KINDS * AHEAD * K); };
    auto prepare = [&](int64_t h, int64_t first, int64_t count) {
        float *k = keys(), *q = k + AHEAD * K, *decays = q + AHEAD * K;
        Factors& f = factors();
        for (int64_t i = 0; i < count; i++) {
            const T* row = qkv + (first + i) * stride + h / each * K;
            unit(row, K, root, q + i * K);
            unit(row + key_heads * K, K, 1.0f, k + i * K);
            f.kq[i] = dot(K, [&](int64_t e, int n) { return take(k + i * K + e, n); },
                          [&](int64_t e, int n) { return take(q + i * K + e, n); });
            const T* own = a + (first + i) * stride_a + h * (CHANNEL_DECAY ? K : 1);
            if constexpr (CHANNEL_DECAY)
                over_vectors(K, [&](int64_t e, int n) {
                    vf decay = exp(-rate[h] * softplus(take(own + e, n) + take(dt_bias + h * K + e, n)));
                    float* to = decays + i * K + e;
                    give(to, decay, n);
                    give(to + AHEAD * K, decay * take(k + i * K + e, n), n);
                    give(to + 2 * AHEAD * K, decay * take(q + i * K + e, n), n);
                });
            else
                f.decay[i] = to_float(*own);
            f.beta[i] = to_float(b[(first + i) * stride_b + h]);
        }
        over_vectors(count, [&](int64_t e, int n) {
            if (!CHANNEL_DECAY) give(f.decay + e, exp(-rate[h] * softplus(take(f.decay + e, n) + dt_bias[h])), n);
            give(f.beta + e, max_beta * sigmoid(take(f.beta + e, n)), n);
        });
    };
    auto need = [&](int64_t h, int64_t token) {
        const T* row = qkv + token * stride;
        fetch<0>(row + h / each * K, K);
        fetch<0>(row + (key_heads + h / each) * K, K);
        fetch<0>(row + 2 * key_heads * K + h * V, V);
    };
    layer.run(tokens, prepare, need, [&]<int N>(Columns<N> columns, int64_t h, int64_t first, int64_t count, int64_t e,
                                                const float* from, float* to, auto saved) {
        const float *k = keys(), *decays = k + 2 * AHEAD * K, *by_k = CHANNEL_DECAY ? decays + AHEAD * K : k;
        const float* by_q = by_k + AHEAD * K;
        const Factors& f = factors();
        vf sums[2][N], change[N];
        columns.template sweep<false, 2>(from, to, nullptr, nullptr, nullptr, {by_k, by_q}, sums);
        for (int64_t i = 0; i < count; i++, k += K, from = to) {
            const T* v = qkv + (first + i) * stride + 2 * key_heads * K + h * V + e;
            auto decay = [&] {
                if constexpr (CHANNEL_DECAY)
                    return [own = decays + i * K](int64_t r) { return own[r]; };
                else
                    return [all = f.decay[i]](int64_t) { return all; };
            }();
            for (int j = 0; j < N; j++) {
                vf left = columns.at(v, j), kept = sums[1][j];
                left = CHANNEL_DECAY ? left - sums[0][j] : fma(splat(-f.decay[i]), sums[0][j], left);
                if (!CHANNEL_DECAY) kept = f.decay[i] * kept;
                change[j] = left * f.beta[i];
                columns.put(layer.result(first + i, h) + e, j, fma(splat(f.kq[i]), change[j], kept));
            }
            if (i + 1 < count)
                columns.template sweep<true, 2>(from, to, decay, k, change, {by_k += K, by_q += K}, sums);
            else
                columns.template sweep<true, 0>(from, to, decay, k, change, {}, sums);
            saved(i);
        }
    });
}

// A state space of scalar decays.
template <class T>
void state_space(const T* xbc, int64_t stride, const T* dt, int64_t stride_dt, int64_t tokens, int64_t groups,
                 const float* rate, const float* dt_bias, const float* skip, float dt_min, float dt_max,
                 Recurrent<T> layer) {
    int64_t N = layer.state_rows, P = layer.width, H = layer.heads;
    struct Factors {
        float decay[AHEAD], step[AHEAD];
    };
    auto factors = [&]() -> Factors& { return *scratch<Factors, struct SpaceFactors>(1); };
    auto inputs = [&] { return scratch<float, struct Inputs>(2 * AHEAD * N); };
    auto prepare = [&](int64_t h, int64_t first, int64_t count) {
        float *b = inputs(), *c = b + AHEAD * N;
        Factors& f = factors();
        for (int64_t i = 0; i < count; i++) {
            const T* row = xbc + (first + i) * stride + H * P + h / (H / groups) * N;
            to_floats(row, N, b + i * N);
            to_floats(row + groups * N, N, c + i * N);
            f.step[i] = to_float(dt[(first + i) * stride_dt + h]);
        }
        over_vectors(count, [&](int64_t e, int n) {
            vf step = softplus(take(f.step + e, n) + dt_bias[h]);
            step = step < dt_min ? splat(dt_min) : step > dt_max ? splat(dt_max) : step;
            give(f.step + e, step, n);
            give(f.decay + e, exp(-rate[h] * step), n);
        });
    };
    auto need = [&](int64_t h, int64_t token) {
        const T* row = xbc + token * stride;
        fetch<0>(row + h * P, P);
        fetch<0>(row + H * P + h / (H / groups) * N, N);
        fetch<0>(row + H * P + (groups + h / (H / groups)) * N, N);
    };
    layer.run(tokens, prepare, need, [&]<int M>(Columns<M> columns, int64_t h, int64_t first, int64_t count, int64_t e,
                                                const float* from, float* to, auto saved) {
        const float *b = inputs(), *c = b + AHEAD * N;
        const Factors& f = factors();
        vf sums[2][M], change[M];
        for (int64_t i = 0; i < count; i++, b += N, c += N, from = to) {
            const T* x = xbc + (first + i) * stride + h * P + e;
            for (int j = 0; j < M; j++) change[j] = columns.at(x, j) * f.step[i];
            auto decay = [all = f.decay[i]](int64_t) { return all; };
            columns.template sweep<true, 1>(from, to, decay, b, change, {c, nullptr}, sums);
            for (int j = 0; j < M; j++)
                columns.put(layer.result(first + i, h) + e, j, fma(splat(skip[h]), columns.at(x, j), sums[0][j]));
            saved(i);
        }
    });
}

// Vector i of ``to`` gets the i-th of W weights of each of LANES channels.
template <class T>
inline void turn_weights(const T* weight, int64_t W, int lanes, float* to, int64_t stride) {
    if (W == 4 && lanes == LANES) {
        static const vi even = lanes_from([](int lane) { return 2 * lane; });
        static const vi odd = lanes_from([](int lane) { return 2 * lane + 1; });
        vu x[4];
        for (int i = 0; i < 4; i++) x[i] = (vu)load(weight + i * LANES);
        vu evens[2] = {shuffle(x[0], x[1], even), shuffle(x[2], x[3], even)};
        vu odds[2] = {shuffle(x[0], x[1], odd), shuffle(x[2], x[3], odd)};
        store(to, (vf)shuffle(evens[0], evens[1], even));
        store(to + stride, (vf)shuffle(odds[0], odds[1], even));
        store(to + 2 * stride, (vf)shuffle(evens[0], evens[1], odd));
        store(to + 3 * stride, (vf)shuffle(odds[0], odds[1], odd));
        return;
    }
    for (int64_t i = 0; i < W; i++)
        for (int lane = 0; lane < lanes; lane++) to[i * stride + lane] = to_float(weight[lane * W + i]);
}

// A depthwise causal convolution of W weights per channel, ``weight`` [C][W]. The states are [rows][W - 1][C].
template <class T>
void causal_conv(const T* x, int64_t stride, int64_t tokens, int64_t C, const T* weight, const T* bias, int64_t W,
                 bool with_silu, T* states, int64_t stride_state, T* out, StateRows rows) {
    constexpr int CONVOLVED = 4;  // tokens that share what is loaded
    auto convolve = [&](int64_t first, int64_t width) {  // some channels of all tokens
        float* turned = scratch<float, struct ConvWeights>(W * width);
        over_vectors(width, [&](int64_t e, int n) { turn_weights(weight + (first + e) * W, W, n, turned + e, width); });
        const T** inputs = scratch<const T*, struct ConvInputs>(W - 1 + CONVOLVED);  // the oldest first
        auto some = [&](auto count, int64_t b, int64_t t) {                         // tokens of a sequence
            constexpr int N = count;
            int64_t begin = rows.offsets[b], next = std::min<int64_t>(N, rows.offsets[b + 1] - t - N);
            const T* columns = states + rows.read[b] * stride_state;
            for (int64_t i = 0; i < W - 1 + N; i++) {
                int64_t from = t - begin + i - (W - 1);
                inputs[i] = first + (from < 0 ? columns + (t - begin + i) * C : x + (begin + from) * stride);
            }
            over_vectors(width, [&](int64_t e, int n) {
                for (int64_t i = t + N; i < t + N + next; i++) {
                    __builtin_prefetch(x + i * stride + first + e);
                    __builtin_prefetch(out + i * C + first + e, 1);
                }
                vf totals[N] = {};
                for (int64_t j = 0; j < W; j++) {
                    vf factor = take(turned + j * width + e, n);
                    for (int i = 0; i < N; i++) totals[i] = fma(factor, take(inputs[i + j] + e, n), totals[i]);
                }
                for (int i = 0; i < N; i++) {
                    if (bias) totals[i] += take(bias + first + e, n);
                    give(out + (t + i) * C + first + e, with_silu ? silu(totals[i]) : totals[i], n);
                }
            });
            for (int i = 0; i < N; i++) {
                if (rows.save[t + i] < 0) continue;
                T* saved = states + rows.save[t + i] * stride_state + first;  // may be where we read: the oldest goes first
                for (int64_t j = 1; j < W; j++) std::memcpy(saved + (j - 1) * C, inputs[i + j], width * sizeof(T));
            }
        };
        for (int64_t b = 0; b < rows.sequences; b++) {
            int64_t t = rows.offsets[b], end = rows.offsets[b + 1];
            for (; t + CONVOLVED <= end; t += CONVOLVED) some(std::integral_constant<int, CONVOLVED>{}, b, t);
            for (; t < end; t++) some(std::integral_constant<int, 1>{}, b, t);
        }
    };
    constexpr int64_t MOST = 1024;  // channels whose weights stay in L1
    int64_t each = std::max<int64_t>(256, ALONE / std::max<int64_t>(1, tokens) / LANES * LANES);
    parallel((C + each - 1) / each, [&](int64_t task) {
        int64_t end = std::min(C, (task + 1) * each);
        for (int64_t first = task * each; first < end; first += MOST) convolve(first, std::min(MOST, end - first));
    });
}

// RMS norms of groups of neighboring values, and a gate before or after the norm. Value d has the weight d % W.
template <class T>
void gated_rms_norm(const T* x, int64_t stride, const T* gate, int64_t stride_gate, int64_t tokens, int64_t D,
                    const T* weight, int64_t W, float eps, int64_t group, bool gate_first, T* out) {
    int64_t groups = D / group, part = std::min(group, W);
    over_rows(tokens * groups, group, [&](int64_t first, int64_t end) {
        float* values = scratch<float, struct Gated>(group);
        for (int64_t r = first; r < end; r++) {
            int64_t t = r / groups, d = r % groups * group;
            const T *from = x + t * stride + d, *open = gate + t * stride_gate + d;
            over_vectors(group, [&](int64_t e, int n) {
                vf v = take(from + e, n);
                give(values + e, gate_first ? v * silu(take(open + e, n)) : v, n);
            });
            auto at = [&](int64_t e, int n) { return take(values + e, n); };
            float scale = 1.0f / std::sqrt(dot(group, at, at) / float(group) + eps);
            for (int64_t o = 0; o < group; o += part)
                over_vectors(part, [&](int64_t e, int n) {
                    vf v = take(values + o + e, n) * scale * take(weight + (d + o) % W + e, n);
                    give(out + t * D + d + o + e, gate_first ? v : v * silu(take(open + o + e, n)), n);
                });
        }
    });
}

}  // namespace infer
