// Kernels that work row by row: norms, rotary embedding with the K/V store, gated activations.
#pragma once

#include <algorithm>

#include "parallel.hpp"
#include "simd.hpp"

namespace infer {

constexpr int64_t ALONE = 1 << 14;  // elements per task: fewer are not worth waking another thread

// Calls run(first, end) for ranges of rows of ``width`` elements, in parallel if there are many.
template <class F>
void over_rows(int64_t rows, int64_t width, F run) {
    int64_t each = std::max<int64_t>(1, ALONE / std::max<int64_t>(width, 1));
    parallel((rows + each - 1) / each, [&](int64_t i) { run(i * each, std::min(rows, (i + 1) * each)); });
}

template <class T>
inline void norm_row(const T* from, const T* weight, float eps, bool unit_offset, int64_t width, T* to) {
    vf squares{};
    over_vectors(width, [&](int64_t e, int n) {
        vf v = take(from + e, n);
        squares += v * v;
    });
    float scale = 1.0f / std::sqrt(sum(squares) / float(width) + eps);
    over_vectors(width, [&](int64_t e, int n) {
        vf v = take(from + e, n) * scale, w = take(weight + e, n);
        give(to + e, unit_offset ? v * (1.0f + w) : rounded<T>(v) * w, n);
    });
}

// RMS norms of x [rows][heads][width], which may be strided; ``out`` is contiguous. With a residual, x + residual is
// stored in ``total`` and normalized.
template <class T>
void rms_norm(const T* x, int64_t stride_row, int64_t stride_head, int64_t rows, int64_t heads, int64_t width,
              const T* weight, float eps, bool unit_offset, const T* residual, T* out, T* total) {
    over_rows(rows * heads, width, [&](int64_t first, int64_t end) {
        for (int64_t r = first; r < end; r++) {
            const T* from = x + r / heads * stride_row + r % heads * stride_head;
            if (residual) {
                T* sum_row = total + r * width;
                over_vectors(width, [&](int64_t e, int n) {
                    give(sum_row + e, take(from + e, n) + take(residual + r * width + e, n), n);
                });
                from = sum_row;
            }
            norm_row(from, weight, eps, unit_offset, width, out + r * width);
        }
    });
}

// Rotates the two halves of ``from`` against each other, by cos and sin [half].
template <class T>
inline void rotate(const T* from, const float* cos, const float* sin, int64_t half, T* to) {
    over_vectors(half, [&](int64_t e, int n) {
        vf left = take(from + e, n), right = take(from + half + e, n), c = take(cos + e, n), s = take(sin + e, n);
        vf ls = left * s, rs = right * s;
        give(to + e, left * c - rs, n);
        give(to + half + e, right * c + ls, n);
    });
}

// Quantizes a head's values to codes, and returns their scale; both as Python's QuantizedKV describes them.
template <class T>
inline float quantize(const T* from, int64_t width, int8_t* to) {
    vf top{}, strange{};
    over_vectors(width, [&](int64_t e, int n) {
        vf v = take(from + e, n);
        top = maximum(v < 0 ? -v : v, top);
        strange += v - v;  // NaN if v is NaN or infinite, and 0 otherwise
    });
    float most = highest(top), scale = (most < LEAST ? 0.0f : most / 127.0f) + sum(strange);
    if (!(scale > 0)) {
        std::memset(to, 0, width);
        return scale;
    }
    over_vectors(width, [&](int64_t e, int n) { give(to + e, nearest(take(from + e, n) / scale), n); });
    return scale;
}

// K, or V, in the cache, [positions][K][E]: values of type T, or, if there are scales, codes of 8 bits.
struct Stored {
    void* memory;
    float* scales;  // [positions][K], or null
};

// Writes a head's values to its place, counted in heads.
template <class T>
inline void keep(const T* from, int64_t width, Stored cache, int64_t place) {
    if (cache.scales)
        cache.scales[place] = quantize(from, width, static_cast<int8_t*>(cache.memory) + place * width);
    else
        std::memcpy(static_cast<T*>(cache.memory) + place * width, from, width * sizeof(T));
}

// RMS norms of each head of q and k; null weights mean no norms.
template <class T>
struct HeadNorms {
    const T *q_weight, *k_weight;
    float eps;
    bool unit_offset;
};

// Normalizes and rotates q and k; writes q to ``out`` [T][H][E], and k and v to rows ``places`` of the caches, quantized
// if the caches are. If the caches are one, v is left out.
template <class T>
void rope_store_kv(const T* q, int64_t stride_q, int64_t stride_qh, const T* k, int64_t stride_k, int64_t stride_kh,
                   const T* v, int64_t stride_v, int64_t stride_vh, const float* cos, const float* sin,
                   int64_t stride_angle, HeadNorms<T> norms, const int64_t* places, int64_t tokens, int64_t H, int64_t K,
                   int64_t E, T* out, Stored k_cache, Stored v_cache) {
    over_rows(tokens, (H + 2 * K) * E, [&](int64_t first, int64_t end) {
        T *normed = scratch<T, struct Normed>(E), *turned = scratch<T, struct Turned>(E);
        for (int64_t t = first; t < end; t++) {
            const float *c = cos + t * stride_angle, *s = sin + t * stride_angle;
            auto turn = [&](const T* from, const T* weight, T* to) {
                if (weight) norm_row(from, weight, norms.eps, norms.unit_offset, E, normed);
                rotate(weight ? normed : from, c, s, E / 2, to);
            };
            for (int64_t h = 0; h < H; h++)
                turn(q + t * stride_q + h * stride_qh, norms.q_weight, out + (t * H + h) * E);
            for (int64_t h = 0; h < K; h++) {
                int64_t place = places[t] * K + h;
                turn(k + t * stride_k + h * stride_kh, norms.k_weight, turned);
                keep(turned, E, k_cache, place);
                if (v_cache.memory != k_cache.memory) keep(v + t * stride_v + h * stride_vh, E, v_cache, place);
            }
        }
    });
}

// out = activation(gate) * up.
template <class T>
void gated_rows(const T* gate, int64_t stride_gate, const T* up, int64_t stride_up, int64_t rows, int64_t width, Gate kind,
                T* out) {
    over_rows(rows, 2 * width, [&](int64_t first, int64_t end) {
        for (int64_t r = first; r < end; r++) {
            const T *gates = gate + r * stride_gate, *ups = up + r * stride_up;
            over_vectors(width, [&](int64_t e, int n) {
                give(out + r * width + e, gated<T>(take(gates + e, n), take(ups + e, n), kind), n);
            });
        }
    });
}

}  // namespace infer
