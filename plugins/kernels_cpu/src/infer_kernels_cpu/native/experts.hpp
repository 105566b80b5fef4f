// Mixtures of experts: the router's choice, and the products of each expert with the rows that chose it. A row's bits
// do not depend on which other rows chose the same expert, because those of products do not, and a token's experts are
// added up in the order in which its own row names them.
#pragma once

#include "grouped.hpp"
#include "rows.hpp"

namespace infer {

// The packed weights of a layer's experts; Python's ``Mixture``. Each entry points to a packed plain weight, or to a
// ``Grouped``; those of all experts have the same form.
struct Mixture {
    int64_t count, D, I;
    const void *const *gate_up, *const *down;
    const void *const *gate_up_bias, *const *down_bias;  // null if there are no biases
    int32_t gate_up_grouped, down_grouped;
};

struct Routing {
    int64_t top;
    bool sigmoid, renormalize;
    float scale;
};

// Each row's experts and their shares, as Python's ``Routing`` describes them.
template <class T>
void route(const T* logits, int64_t rows, int64_t X, Routing routing, const float* bias, int32_t* experts, float* shares) {
    over_rows(rows, 8 * X, [=](int64_t first, int64_t end) {
        float* by = scratch<float, struct Scores>(X);
        for (int64_t r = first; r < end; r++) {
            const T* from = logits + r * X;
            int32_t* chosen = experts + r * routing.top;
            float* share = shares + r * routing.top;
            int64_t found = 0;
            for (int64_t x = 0; x < X; x++) {
                float score = to_float(from[x]);
                if (routing.sigmoid) score = 1 / (1 + std::exp(-score));
                by[x] = bias ? score + bias[x] : score;
                int64_t place = found < routing.top ? found++ : routing.top;
                for (; place > 0 && by[x] > by[chosen[place - 1]]; place--)  // of equal ones, the earlier stays first
                    if (place < routing.top) chosen[place] = chosen[place - 1];
                if (place < routing.top) chosen[place] = int32_t(x);
            }
            float top = by[chosen[0]], sum = 0;
            for (int64_t j = 0; j < routing.top; j++) {
                float score = to_float(from[chosen[j]]);
                share[j] = routing.sigmoid ? 1 / (1 + std::exp(-score)) : std::exp(score - top);
                sum += share[j];
            }
            if (routing.sigmoid)
                sum += 1e-20f;
            else if (!routing.renormalize) {
                sum = 0;
                for (int64_t x = 0; x < X; x++) sum += std::exp(by[x] - top);
            }
            for (int64_t j = 0; j < routing.top; j++) {
                if (routing.renormalize || !routing.sigmoid) share[j] /= sum;
                share[j] *= routing.scale;
            }
        }
    });
}

constexpr int64_t MOST_PAIRS = 1 << 15;              // of a token and an expert, that are computed at a time
constexpr int64_t BUCKET = MANY_ROWS;                // rows of a bucket, so that a popular expert is divided, too
constexpr int64_t LIGHT_TASKS = 8, HEAVY_TASKS = 32; // per thread; heavy ones are of many rows, and unequal

// Consecutive rows with the same expert.
struct Bucket {
    int64_t expert, first, rows;
};

// Calls run(bucket, begin, end) for ranges of panels of each bucket, those of many rows first.
template <class Run>
void over_buckets(const Bucket* buckets, int64_t count, int64_t panels, Run run) {
    int64_t wanted = threads() * (count && buckets[0].rows > ROWS ? HEAVY_TASKS : LIGHT_TASKS);
    int64_t cuts = std::clamp<int64_t>((wanted + count - 1) / std::max<int64_t>(count, 1), 1, panels);
    int64_t each = (panels + cuts - 1) / cuts;
    cuts = (panels + each - 1) / each;
    parallel(count * cuts, [=](int64_t task) {
        int64_t begin = task % cuts * each;
        run(buckets[task / cuts], begin, std::min(panels, begin + each));
    });
}

// Calls product(panel, first row, rows, the panel that is multiplied next or -1) for the panels [begin, end) and all of
// a bucket's rows, ``block`` at a time.
template <class Product>
void over_blocks(int64_t rows, int64_t begin, int64_t end, int64_t block, Product product) {
    for (int64_t first = 0; first < rows; first += block)
        for (int64_t p = begin; p < end; p++) {
            int64_t next = p + 1 < end ? p + 1 : first + block < rows ? begin : -1;
            product(p, first, std::min(block, rows - first), next);
        }
}

// The product of each bucket's rows of x [P][K] with its expert's weight.
template <class T>
void plain_products(const Bucket* buckets, int64_t count, const void* const* weights, const void* const* biases,
                    const T* x, int64_t N, int64_t K, Gate gate, T* out) {
    int64_t width = gate == Gate::NONE ? N : N / 2;
    over_buckets(buckets, count, panels_of(N, gate != Gate::NONE), [=](Bucket b, int64_t begin, int64_t end) {
        int64_t stride = K;
        const Factor<T>* own = padded_rows(x + b.first * K, stride, b.rows, K);
        over_blocks(b.rows, begin, end, row_block<T>(K),
                    panel_product<T>(own, stride, b.rows, static_cast<const uint32_t*>(weights[b.expert]), N, K,
                                     static_cast<const T*>(biases ? biases[b.expert] : nullptr), gate, out + b.first * width));
    });
}

template <class T, class A, Form FORM>
void grouped_products(const Bucket* buckets, int64_t count, const void* const* weights, const void* const* biases,
                      const T* x, int64_t rows, Gate gate, T* out) {
    const Grouped& any = *static_cast<const Grouped*>(weights[0]);
    int64_t width = gate == Gate::NONE ? any.N : any.N / 2, G = any.groups();
    constexpr bool EACH = CONVERTS<T> && sizeof(A) > 1;  // floats of all rows would take much memory
    Activations<A> all = activations(any, x, any.K, EACH ? 0 : rows, (A*)nullptr);
    over_buckets(buckets, count, any.panels(), [=](Bucket b, int64_t begin, int64_t end) {
        const Grouped& w = *static_cast<const Grouped*>(weights[b.expert]);
        Activations<A> own = EACH ? activations(w, x + b.first * w.K, w.K, b.rows, (A*)nullptr) : all;
        if (!EACH) own.values += b.first * own.stride, own.sums += b.first * G;
        if (own.scales) own.scales += b.first * G, own.starts += b.first * G;
        over_blocks(b.rows, begin, end, row_block<A>(w.K),
                    grouped_panel_product<T, A, FORM>(w, own, b.rows, static_cast<const T*>(biases ? biases[b.expert] : nullptr),
                                                      gate, out + b.first * width));
    });
}

template <class T, class A>
void grouped_products(const Bucket* buckets, int64_t count, const void* const* weights, const void* const* biases,
                      const T* x, int64_t rows, Gate gate, T* out) {
    const Grouped& w = *static_cast<const Grouped*>(weights[0]);
    auto run = w.bits == 8 ? grouped_products<T, A, Form::BYTES>
               : w.table   ? grouped_products<T, A, Form::TABLE>
                           : grouped_products<T, A, Form::NIBBLES>;
    run(buckets, count, weights, biases, x, rows, gate, out);
}

template <class T>
void products(const Bucket* buckets, int64_t count, bool grouped, const void* const* weights, const void* const* biases,
              const T* x, int64_t rows, int64_t N, int64_t K, Gate gate, T* out) {
    if (!grouped)
        plain_products(buckets, count, weights, biases, x, N, K, gate, out);
    else if (static_cast<const Grouped*>(weights[0])->int8)
        grouped_products<T, int8_t>(buckets, count, weights, biases, x, rows, gate, out);
    else
        grouped_products<T, Factor<T>>(buckets, count, weights, biases, x, rows, gate, out);
}

// out [tokens][D]: the results of each token's J experts, summed with their shares.
template <class T>
void some_experts(const Mixture& m, const T* x, int64_t stride, int64_t tokens, const int32_t* experts,
                  const float* shares, int64_t J, Gate gate, T* out) {
    int64_t P = tokens * J, most = std::min(P, m.count) + P / BUCKET;
    // Pairs of a token and an expert are sorted by expert, and by token within it.
    int64_t* ends = scratch<int64_t, struct Ends>(m.count);
    int64_t* place = scratch<int64_t, struct Places>(P);
    Bucket* buckets = scratch<Bucket, struct Buckets>(most);
    std::fill(ends, ends + m.count, 0);
    for (int64_t i = 0; i < P; i++) ends[experts[i]]++;
    int64_t count = 0, first = 0;
    for (int64_t e = 0; e < m.count; e++) {
        int64_t rows = ends[e];
        ends[e] = first;
        for (int64_t done = 0; done < rows; done += BUCKET)
            buckets[count++] = {e, first + done, std::min(BUCKET, rows - done)};
        first += rows;
    }
    std::stable_sort(buckets, buckets + count, [](const Bucket& a, const Bucket& b) { return a.rows > b.rows; });
    T* gathered = scratch<T, struct Gathered>(P * m.D);
    T* hidden = scratch<T, struct Hidden>(P * m.I);
    T* results = scratch<T, struct Results>(P * m.D);
    for (int64_t i = 0; i < P; i++) place[i] = ends[experts[i]]++;
    over_rows(P, m.D, [=](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++)
            std::memcpy((void*)(gathered + place[i] * m.D), x + i / J * stride, m.D * sizeof(T));
    });
    bool gated = gate != Gate::SQUARE;
    products(buckets, count, m.gate_up_grouped, m.gate_up, m.gate_up_bias, gathered, P, gated ? 2 * m.I : m.I, m.D,
             gated ? gate : Gate::NONE, hidden);
    if (!gated)
        over_rows(P, m.I, [=](int64_t begin, int64_t end) {
            over_vectors((end - begin) * m.I, [&](int64_t i, int n) {
                T* at = hidden + begin * m.I + i;
                vf value = take(at, n);
                value = value < 0.0f ? vf{} : value;  // NaN stays what it is
                give(at, value * value, n);
            });
        });
    products(buckets, count, m.down_grouped, m.down, m.down_bias, hidden, P, m.D, m.I, Gate::NONE, results);
    over_rows(tokens, J * m.D, [=](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; t++)
            over_vectors(m.D, [&](int64_t d, int n) {
                vf sum{};
                for (int64_t j = 0; j < J; j++)
                    sum += shares[t * J + j] * take(results + place[t * J + j] * m.D + d, n);
                give(out + t * m.D + d, sum, n);
            });
    });
}

template <class T>
void gated_experts(const Mixture& m, const T* x, int64_t stride, int64_t tokens, const int32_t* experts,
                   const float* shares, int64_t J, Gate gate, T* out) {
    int64_t each = std::max<int64_t>(1, MOST_PAIRS / J);
    for (int64_t t = 0; t < tokens; t += each)
        some_experts(m, x + t * stride, stride, std::min(each, tokens - t), experts + t * J, shares + t * J, J, gate,
                     out + t * m.D);
}

}  // namespace infer
