// Kernels that take rows one by one: norms, rotary embedding with the K/V store, gated activations.
#pragma once

#include <algorithm>

#include "parallel.hpp"
#include "simd.hpp"

namespace infer {

constexpr int64_t ALONE = 1 << 14;  // elements that are not worth waking another thread for

// run(first, end) over rows of ``width`` elements, in parallel where there are many.
template <class F>
void over_rows(int64_t rows, int64_t width, F run) {
    int64_t each = std::max<int64_t>(1, ALONE / std::max<int64_t>(width, 1));
    parallel((rows + each - 1) / each, [&](int64_t i) { run(i * each, std::min(rows, (i + 1) * each)); });
}

// x [rows][heads][width], strided; the results lie end to end. With a residual, x + residual is stored and normed.
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
            vf squares{};
            over_vectors(width, [&](int64_t e, int n) {
                vf v = take(from + e, n);
                squares += v * v;
            });
            float scale = 1.0f / std::sqrt(sum(squares) / float(width) + eps);
            over_vectors(width, [&](int64_t e, int n) {
                vf v = take(from + e, n) * scale, w = take(weight + e, n);
                give(out + r * width + e, unit_offset ? v * (1.0f + w) : rounded<T>(v) * w, n);
            });
        }
    });
}

// Halves of ``from`` rotated by cos and sin [width / 2].
template <class T>
inline void rotate(const T* from, const float* cos, const float* sin, int64_t half, T* to) {
    over_vectors(half, [&](int64_t e, int n) {
        vf left = take(from + e, n), right = take(from + half + e, n), c = take(cos + e, n), s = take(sin + e, n);
        vf ls = left * s, rs = right * s;
        give(to + e, left * c - rs, n);
        give(to + half + e, right * c + ls, n);
    });
}

// q into ``out`` [T][H][E]; k, rotated, and v into the caches' rows ``places``.
template <class T>
void rope_store_kv(const T* q, int64_t stride_q, int64_t stride_qh, const T* k, int64_t stride_k, int64_t stride_kh,
                   const T* v, int64_t stride_v, int64_t stride_vh, const float* cos, const float* sin,
                   int64_t stride_angle, const int64_t* places, int64_t tokens, int64_t H, int64_t K, int64_t E, T* out,
                   T* k_cache, T* v_cache) {
    over_rows(tokens, (H + 2 * K) * E, [&](int64_t first, int64_t end) {
        for (int64_t t = first; t < end; t++) {
            const float *c = cos + t * stride_angle, *s = sin + t * stride_angle;
            for (int64_t h = 0; h < H; h++)
                rotate(q + t * stride_q + h * stride_qh, c, s, E / 2, out + (t * H + h) * E);
            for (int64_t h = 0; h < K; h++) {
                int64_t place = (places[t] * K + h) * E;
                rotate(k + t * stride_k + h * stride_kh, c, s, E / 2, k_cache + place);
                std::memcpy(v_cache + place, v + t * stride_v + h * stride_vh, E * sizeof(T));
            }
        }
    });
}

// activation(left half) * right half; ``gelu`` is the tanh form.
template <class T>
void gated(const T* x, int64_t stride, int64_t rows, int64_t width, bool gelu, T* out) {
    over_rows(rows, 2 * width, [&](int64_t first, int64_t end) {
        for (int64_t r = first; r < end; r++)
            over_vectors(width, [&](int64_t e, int n) {
                vf g = take(x + r * stride + e, n), up = take(x + r * stride + width + e, n);
                vf a = gelu ? 0.5f * g * (1.0f + tanh(0.7978845608028654f * (g + 0.044715f * g * g * g)))
                            : g / (1.0f + exp(-g));
                give(out + r * width + e, rounded<T>(a) * up, n);
            });
    });
}

}  // namespace infer
