// Draws a token per row. Filters are thresholds on probability, found by bisection; the draw is an inverse transform in
// vocabulary order.
#pragma once

#include "rows.hpp"

namespace infer {

constexpr int64_t BLOCK = 1024;  // tokens whose masses are summed in fp32 before they are added to the total

struct Draw {
    float temperature;
    int64_t top_k;  // 0 for all
    float top_p, min_p;
    double uniform;
};

// Tokens of a row in vocabulary order, with their unnormalized probabilities; the row's likeliest token has mass 1.
// Sums over the tokens above a threshold are taken in one fixed order.
struct Candidates {
    float* mass;
    int32_t* token;  // null if candidate i is token i
    int64_t count;

    struct Kept {
        double mass;
        int64_t count;
    };

    double block(int64_t begin, float threshold) const {
        vf total{};
        over_vectors(std::min(BLOCK, count - begin), [&](int64_t e, int n) {
            vf m = take(mass + begin + e, n);
            total += m >= threshold ? m : vf{};
        });
        return sum(total);
    }
    Kept kept(float threshold) const {
        double total = 0;
        vi found{};
        for (int64_t b = 0; b < count; b += BLOCK) total += block(b, threshold);
        int64_t whole = count / LANES * LANES, n = 0;
        for (int64_t e = 0; e < whole; e += LANES) found -= load(mass + e) >= threshold;
        for (int i = 0; i < LANES; i++) n += found[i];
        for (int64_t e = whole; e < count; e++) n += mass[e] >= threshold;
        return {total, n};
    }
    // Keeps ``most`` of those that reach the threshold: of those equal to it, the ones with the highest logits, and of
    // equal logits the lowest ids.
    template <class T>
    void cut(const T* logits, float threshold, int64_t most) {
        int64_t over = kept(threshold).count - most;
        if (over <= 0) return;
        int32_t* tied = scratch<int32_t, struct TiedOfARow>(count);
        int64_t ties = 0;
        for (int64_t e = 0; e < count; e++)
            if (mass[e] == threshold) tied[ties++] = int32_t(e);
        std::nth_element(tied, tied + (ties - over), tied + ties, [&](int32_t a, int32_t b) {
            float x = to_float(logits[token[a]]), y = to_float(logits[token[b]]);
            return x > y || (x == y && a < b);
        });
        for (int64_t i = ties - over; i < ties; i++) mass[tied[i]] = 0;
    }
    // Drops all candidates below the threshold.
    void drop(float threshold) {
        int64_t left = 0;
        over_vectors(count, [&](int64_t e, int n) {
            vi stays = take(mass + e, n) >= threshold;
            if (!any(stays)) return;
            for (int i = 0; i < n; i++) {
                mass[left] = mass[e + i];
                token[left] = token[e + i];
                left -= stays[i];
            }
        });
        count = left;
    }
    // The largest threshold for which enough(kept(threshold)), at least ``least``, for which it must be true.
    // Candidates below it may go on the way, so that few are looked at often.
    template <class F>
    float largest(float least, F enough) {
        uint32_t low, high;  // the bits of positive floats have the same order as their values
        float one = 1.0f;
        std::memcpy(&low, &least, 4);
        std::memcpy(&high, &one, 4);
        while (low < high) {
            uint32_t middle = low + (high - low + 1) / 2;
            float threshold;
            std::memcpy(&threshold, &middle, 4);
            Kept now = kept(threshold);
            if (enough(now)) {
                low = middle;
                if (now.count < count / 2) drop(threshold);
            } else {
                high = middle - 1;
            }
        }
        float threshold;
        std::memcpy(&threshold, &low, 4);
        return threshold;
    }
};

constexpr int CHAINS = 4;  // independent chains of comparisons: a vector waits only for the one before it in its chain

struct Top {
    float value;
    bool nan;  // the row contains a NaN
};

template <class T>
Top top_of(const T* row, int64_t size) {
    vf tops[CHAINS];
    vi nan{};
    for (vf& top : tops) top = splat(-INFINITY);
    int64_t e = 0;
    for (; e + CHAINS * LANES <= size; e += CHAINS * LANES)
        for (int c = 0; c < CHAINS; c++) {
            vf x = load(row + e + c * LANES);
            nan |= x != x;
            tops[c] = maximum(x, tops[c]);
        }
    over_vectors(size - e, [&](int64_t more, int n) {
        vf x = take(row + e + more, n);
        for (int i = n; i < LANES; i++) x[i] = -INFINITY;
        nan |= x != x;
        tops[0] = maximum(x, tops[0]);
    });
    for (int c = 1; c < CHAINS; c++) tops[0] = maximum(tops[0], tops[c]);
    return {highest(tops[0]), any(nan)};
}

// The first index of the value, which must be in the row.
template <class T>
int64_t first_of(const T* row, int64_t size, float value) {
    int64_t e = 0;
    for (; e + CHAINS * LANES <= size; e += CHAINS * LANES) {
        vi found{};
        for (int c = 0; c < CHAINS; c++) found |= load(row + e + c * LANES) == value;
        if (any(found)) break;
    }
    while (to_float(row[e]) != value) e++;
    return e;
}

// The tokens that can be among the top_k likeliest: those within a distance of the top logit that leaves enough of
// them, but few, or else all tokens.
template <class T>
int64_t near_top(const T* logits, int64_t size, float top, const Draw& draw, int32_t* token) {
    for (float reach : {3.0f, 8.0f, INFINITY}) {  // e^-3 of the top one's probability, and so on
        float least = top - reach * draw.temperature;
        int64_t count = 0;
        over_vectors(size, [&](int64_t e, int n) {
            vi near = take(logits + e, n) >= least;
            if (!any(near)) return;
            for (int i = 0; i < n; i++) {
                token[count] = int32_t(e + i);
                count -= near[i];
            }
        });
        if (count >= draw.top_k) return count;
    }
    return size;
}

template <class T>
Candidates candidates(const T* logits, int64_t size, float top, const Draw& draw) {
    Candidates all{scratch<float, struct MassesOfARow>(size), nullptr, size};
    bool ranked = draw.top_k > 0;
    if (ranked || draw.top_p < 1) all.token = scratch<int32_t, struct TokensOfARow>(size);
    if (ranked) {
        all.count = near_top(logits, size, top, draw, all.token);
        for (int64_t e = 0; e < all.count; e++) all.mass[e] = to_float(logits[all.token[e]]);
    } else if (all.token) {
        for (int64_t e = 0; e < size; e++) all.token[e] = int32_t(e);
    }
    auto masses = [&](auto* from) {
        over_vectors(all.count, [&](int64_t e, int n) {
            give(all.mass + e, exp((take(from + e, n) - top) / draw.temperature), n);
        });
    };
    if (ranked)
        masses(all.mass);
    else
        masses(logits);
    return all;
}

template <class T>
int64_t sample_row(const T* logits, int64_t size, const Draw& draw) {
    auto [top, nan] = top_of(logits, size);
    if (nan || !(std::fabs(top) < INFINITY)) return -1;
    if (draw.temperature == 0) return first_of(logits, size, top);
    Candidates all = candidates(logits, size, top, draw);
    // Tokens of mass 0 are never drawn, so the smallest threshold is above 0.
    float threshold = 1.17549435e-38f;
    if (draw.top_k > 0 && all.kept(threshold).count > draw.top_k) {
        threshold = all.largest(threshold, [&](auto kept) { return kept.count >= draw.top_k; });
        all.cut(logits, threshold, draw.top_k);
    }
    if (draw.top_p < 1) {
        double wanted = double(draw.top_p) * all.kept(threshold).mass;
        threshold = all.largest(threshold, [&](auto kept) { return kept.mass >= wanted; });
    }
    threshold = std::max(threshold, draw.min_p);  // min_p is relative to the likeliest token, whose mass is 1
    double target = draw.uniform * all.kept(threshold).mass, reached = 0;
    int64_t last = -1;
    for (int64_t b = 0; b < all.count; b += BLOCK) {
        int64_t end = std::min(all.count, b + BLOCK);
        double here = all.block(b, threshold);
        if (here > 0 && reached + here > target) {
            for (int64_t e = b; e < end; e++)
                if (all.mass[e] >= threshold) {
                    reached += all.mass[e];
                    last = e;
                    if (reached > target) break;
                }
            if (reached > target) break;
        } else {
            reached += here;
            if (here > 0)
                for (int64_t e = end; e-- > b;)
                    if (all.mass[e] >= threshold) {
                        last = e;
                        break;
                    }
        }
    }
    // By rounding, the sum token by token may fall short of the sum by blocks; then this is the last token kept.
    return last < 0 || !all.token ? last : all.token[last];
}

template <class T>
void sample(const T* logits, int64_t rows, int64_t size, const float* temperature, const int64_t* top_k,
            const float* top_p, const float* min_p, const double* uniform, int64_t* out) {
    parallel(rows, [=](int64_t r) {
        int64_t k = top_k[r] < size ? top_k[r] : 0;
        out[r] = sample_row(logits + r * size, size, {temperature[r], k, top_p[r], min_p[r], uniform[r]});
    });
}

}  // namespace infer
