// Drawing a token per row: thresholds on probability found by bisection, inverse transform in vocabulary order.
#pragma once

#include "rows.hpp"

namespace infer {

constexpr int64_t BLOCK = 1024;  // tokens whose mass is added up before it joins the total

struct Draw {
    float temperature;
    int64_t top_k;  // 0 for all
    float top_p, min_p;
    double uniform;
};

// Unnormalised probabilities of a row: their sum over a set in one fixed order, and how many are in it.
struct Masses {
    const float* mass;
    int64_t size;

    struct Kept {
        double mass;
        int64_t count;
    };

    double block(int64_t begin, float threshold) const {
        vf total{};
        over_vectors(std::min(BLOCK, size - begin), [&](int64_t e, int n) {
            vf m = take(mass + begin + e, n);
            total += m >= threshold ? m : vf{};
        });
        return sum(total);
    }
    Kept kept(float threshold) const {
        double total = 0;
        vi count{};
        for (int64_t b = 0; b < size; b += BLOCK) total += block(b, threshold);
        int64_t whole = size / LANES * LANES, n = 0;
        for (int64_t e = 0; e < whole; e += LANES) count -= load(mass + e) >= threshold;
        for (int i = 0; i < LANES; i++) n += count[i];
        for (int64_t e = whole; e < size; e++) n += mass[e] >= threshold;
        return {total, n};
    }
    // The largest threshold, at least ``least``, for which enough(kept); one that keeps everything has to be enough.
    template <class F>
    float largest(float least, F enough) const {
        uint32_t low, high;  // of positive floats, the bits order as the values do
        float one = 1.0f;
        std::memcpy(&low, &least, 4);
        std::memcpy(&high, &one, 4);  // the likeliest has mass 1
        while (low < high) {
            uint32_t middle = low + (high - low + 1) / 2;
            float threshold;
            std::memcpy(&threshold, &middle, 4);
            if (enough(kept(threshold)))
                low = middle;
            else
                high = middle - 1;
        }
        float threshold;
        std::memcpy(&threshold, &low, 4);
        return threshold;
    }
};

template <class T>
int64_t sample_row(const T* logits, int64_t size, const Draw& draw) {
    vf tops = splat(-INFINITY);
    vi nan{};
    over_vectors(size, [&](int64_t e, int n) {
        vf x = take(logits + e, n);
        if (n < LANES)
            for (int i = n; i < LANES; i++) x[i] = -INFINITY;
        nan |= x != x;
        tops = maximum(tops, x);
    });
    float top = highest(tops);
    for (int i = 0; i < LANES; i++)
        if (nan[i]) return -1;
    if (!(std::fabs(top) < INFINITY)) return -1;
    if (draw.temperature == 0) {
        for (int64_t e = 0;; e++)
            if (to_float(logits[e]) == top) return e;
    }
    float* mass = scratch<float, struct MassesOfARow>(size);
    over_vectors(size, [&](int64_t e, int n) {
        vf scaled = (take(logits + e, n) - top) / draw.temperature;
        give(mass + e, exp(scaled), n);
    });
    Masses masses{mass, size};
    // Infinitely unlikely tokens have mass 0 and are never drawn, so the smallest threshold is above it.
    float threshold = 1.17549435e-38f;
    if (draw.top_k > 0 && draw.top_k < size) {
        if (masses.kept(threshold).count > draw.top_k)
            threshold = masses.largest(threshold, [&](auto kept) { return kept.count >= draw.top_k; });
    }
    if (draw.top_p < 1) {
        double wanted = double(draw.top_p) * masses.kept(threshold).mass;
        threshold = masses.largest(threshold, [&](auto kept) { return kept.mass >= wanted; });
    }
    threshold = std::max(threshold, draw.min_p);  // of the likeliest, whose mass is 1
    double target = draw.uniform * masses.kept(threshold).mass, reached = 0;
    int64_t last = -1;
    for (int64_t b = 0; b < size; b += BLOCK) {
        double here = masses.block(b, threshold);
        if (here > 0 && reached + here > target) {
            for (int64_t e = b; e < std::min(size, b + BLOCK); e++)
                if (mass[e] >= threshold) {
                    reached += mass[e];
                    last = e;
                    if (reached > target) return e;
                }
        } else {
            reached += here;
            if (here > 0)
                for (int64_t e = std::min(size, b + BLOCK); e-- > b;)
                    if (mass[e] >= threshold) {
                        last = e;
                        break;
                    }
        }
    }
    return last;  // where adding one by one falls short of adding by blocks
}

template <class T>
void sample(const T* logits, int64_t rows, int64_t size, const float* temperature, const int64_t* top_k,
            const float* top_p, const float* min_p, const double* uniform, int64_t* out) {
    parallel(rows, [=](int64_t r) {
        out[r] = sample_row(logits + r * size, size, {temperature[r], top_k[r], top_p[r], min_p[r], uniform[r]});
    });
}

}  // namespace infer
