// Quantizes plain weights while a checkpoint is loaded, to the bits of Python's infer/kernels/quantize.py.
#pragma once

#include "grouped.hpp"
#include "rows.hpp"

namespace infer {

constexpr float PARTS[] = {1.0f, 0.96f, 0.92f, 0.88f, 0.84f, 0.8f, 0.76f, 0.7f};  // of the scale that represents the greatest value, as in Python

// A group's values, filled up with zeros, which change none of the sums below.
template <int BITS>
struct Group {
    static constexpr int SIZE = BITS == 4 ? 32 : 64, COUNT = SIZE / LANES;
    vf x[COUNT];

    // The codes for a scale, from -2^(BITS - 1) on.
    vi code(int i, float inverse) const {
        constexpr int32_t END = 1 << (BITS - 1);
        vi q = integers(x[i] * inverse), low = vi{} - END, high = vi{} + (END - 1);
        q = q < low ? low : q;
        return q > high ? high : q;
    }

    // The sum of the products with f(i): the halves are added, then the halves of what that yields, and so on. The
    // products have to be exact, so that it makes no difference whether an addition is fused with one.
    template <class F>
    float products(F f) const {
        vf parts[COUNT];
        for (int i = 0; i < COUNT; i++) parts[i] = x[i] * f(i);
        for (int half = COUNT / 2; half; half /= 2)
            for (int i = 0; i < half; i++) parts[i] += parts[i + half];
        return sum(parts[0]);
    }
};

inline float inverse_of(float scale) { return scale == 0 ? 0 : 1 / scale; }

// ``scale`` in bfloat16, or NaN if a value is not finite.
template <int BITS>
inline bf16 stored(const Group<BITS>& group, float scale) {
    vf strange{};
    for (vf v : group.x) strange += v - v;
    bf16 out;
    store_some(&out, splat(scale + sum(strange)), 1);
    return out;
}

inline bf16 fitted(const Group<8>& group) {
    vf top{};
    for (vf v : group.x) top = maximum(v < 0 ? -v : v, top);
    float most = highest(top);
    return stored(group, most < LEAST ? 0 : most / 127);
}

inline bf16 fitted(const Group<4>& group) {
    vf least{}, most{};
    for (vf v : group.x) least = maximum(-v, least), most = maximum(v, most);
    float low = highest(least), high = highest(most), top = low > high ? -low : high;
    top = std::max(low, high) < LEAST ? 0 : top / -8;
    constexpr int COUNT = std::size(PARTS);
    float fit[COUNT], gain[COUNT];
#pragma GCC unroll 8
    for (int s = 0; s < COUNT; s++) {
        float inverse = inverse_of(top * PARTS[s]);
        vi squares{};
        float product = group.products([&](int i) {
            vi q = group.code(i, inverse);
            squares += q * q;
            return __builtin_convertvector(q, vf);
        });
        float square = float(std::max(total(squares), 1));
        fit[s] = product / square, gain[s] = product * product / square;
    }
    return stored(group, fit[std::max_element(gain, gain + COUNT) - gain]);
}

// The weight [N][K] in groups of ``size`` neighbors: codes [N][K * BITS / 8] and scales [N][K / size].
template <int BITS, class T>
void quantize_weight(const T* weight, int64_t N, int64_t K, int64_t size, uint8_t* codes, bf16* scales) {
    using G = Group<BITS>;
    over_rows(N * (K / size), size, [&](int64_t first, int64_t end) {
        for (int64_t g = first; g < end; g++) {
            G group;
            for (int i = 0; i < G::COUNT; i++) {
                int lanes = int(std::clamp<int64_t>(size - i * LANES, 0, LANES));
                group.x[i] = take(weight + g * size + i * LANES, lanes);
                // Rounded to bfloat16, values have exact products with codes of 4 bits.
                if constexpr (BITS == 4) group.x[i] = rounded<bf16>(group.x[i]);
            }
            scales[g] = fitted(group);
            float scale = to_float(scales[g]), inverse = inverse_of(scale);
            if (scale == 0) scales[g].bits = 0;  // a zero has no sign
            int8_t q[G::SIZE];
            for (int i = 0; i < G::COUNT; i++) store_int8(q + i * LANES, group.code(i, inverse), LANES);
            uint8_t* to = codes + g * size * BITS / 8;
            if constexpr (BITS == 8)
                for (int64_t k = 0; k < size; k++) to[k] = uint8_t(q[k] + 128);
            else
                for (int64_t k = 0; k < size / 2; k++) to[k] = uint8_t((q[2 * k] + 8) | (q[2 * k + 1] + 8) << 4);
        }
    });
}

}  // namespace infer
