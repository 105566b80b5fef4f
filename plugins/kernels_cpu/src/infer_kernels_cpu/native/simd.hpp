// Vectors as wide as the target's registers, and the element types. GCC and Clang compile the vector extensions used
// here for any target; intrinsics are used only for what the extensions cannot express.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace infer {

#if defined(__AVX512F__)
constexpr int LANES = 16;
constexpr int VECTORS = 4;  // per panel; 6 x 4 vectors of sums, 4 of weights and a broadcast one fill 32 registers
#elif defined(__AVX2__)
constexpr int LANES = 8;
constexpr int VECTORS = 2;  // 16 registers
#elif defined(__aarch64__)
constexpr int LANES = 4;
constexpr int VECTORS = 4;  // 32 registers
#else
constexpr int LANES = 4;
constexpr int VECTORS = 2;
#endif
constexpr int ROWS = 6;                   // rows of a register tile
constexpr int PANEL = VECTORS * LANES;    // columns of a register tile
constexpr float LEAST = 0x1p-100f;         // values of no greater magnitude than any below this are quantized to zeros

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));
typedef int8_t vb __attribute__((vector_size(LANES)));

struct bf16 {
    uint16_t bits;
};

// How many elements share a 32-bit word of a packed matrix; they are consecutive along K, the dimension that is summed.
template <class T>
constexpr int STEP = std::is_same_v<T, bf16> ? 2 : 1;

template <class V, class P>
inline V load_as(const P* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

template <class V, class P>
inline void store_as(P* p, V v) {
    std::memcpy(p, &v, sizeof v);
}

inline vf splat(float x) { return x - vf{}; }

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    return load_as<float>(&bits);
}

inline vu widen(vh x) {
#if defined(__AVX512F__)
    return (vu)_mm512_cvtepu16_epi32((__m256i)x);  // GCC compiles the generic form to two halves
#else
    return __builtin_convertvector(x, vu);
#endif
}

inline vf load(const float* p) { return load_as<vf>(p); }
inline vf load(const bf16* p) { return (vf)(widen(load_as<vh>(p)) << 16); }
inline vf load(const int8_t* p) {
#if defined(__AVX512F__)
    vi x = (vi)_mm512_cvtepi8_epi32((__m128i)load_as<vb>(p));
#elif defined(__AVX2__)
    vi x = (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));  // GCC compiles the generic form lane by lane
#else
    vi x = __builtin_convertvector(load_as<vb>(p), vi);
#endif
    return __builtin_convertvector(x, vf);
}

// Rounds to nearest even; NaN stays NaN.
inline vh narrow(vf x) {
#if defined(__AVX512BF16__)
    return (vh)_mm512_cvtneps_pbh((__m512)x);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return (vh)vcvt_bf16_f32((float32x4_t)x);
#else
    vu bits = (vu)x;
    vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    vi nan = x != x;
    return __builtin_convertvector(nan ? (bits >> 16) | 0x40u : rounded, vh);
#endif
}

inline void store(float* p, vf x) { store_as(p, x); }
inline void store(bf16* p, vf x) { store_as(p, narrow(x)); }
inline void store(int8_t* p, vf x) {  // integers
    vi integers = __builtin_convertvector(x, vi);
#if defined(__AVX512F__)
    store_as(p, _mm512_cvtepi32_epi8((__m512i)integers));
#else
    store_as(p, __builtin_convertvector(integers, vb));
#endif
}

template <class T>
inline vf load_some(const T* p, int n) {
    T some[LANES] = {};
    std::memcpy(some, p, n * sizeof(T));
    return load(some);
}

template <class T>
inline void store_some(T* p, vf x, int n) {
    T some[LANES];
    store(some, x);
    std::memcpy(p, some, n * sizeof(T));
}

// Loads and stores of a whole vector, or of its first lanes only.
template <class T>
inline vf take(const T* p, int lanes) {
    return lanes == LANES ? load(p) : load_some(p, lanes);
}

template <class T>
inline void give(T* p, vf x, int lanes) {
    if (lanes == LANES)
        store(p, x);
    else
        store_some(p, x, lanes);
}

// Calls body(offset, lanes) for a row, vector by vector; the last vector may be partial.
template <class F>
inline void over_vectors(int64_t width, F body) {
    int64_t e = 0;
    for (; e + LANES <= width; e += LANES) body(e, LANES);
    if (e < width) body(e, int(width - e));
}

// Fills a row with NaN.
template <class T>
inline void fill_nan(T* row, int64_t width) {
    over_vectors(width, [&](int64_t e, int n) { give(row + e, splat(NAN), n); });
}

// What x becomes when it is stored and loaded again.
template <class T>
inline vf rounded(vf x) {
    if constexpr (std::is_same_v<T, float>) return x;
    return (vf)(widen(narrow(x)) << 16);
}

// Lane i of the result is lane ``lanes[i]`` of the concatenation of a and b.
inline vu shuffle(vu a, vu b, vi lanes) {
#if defined(__AVX512F__)
    return (vu)_mm512_permutex2var_epi32((__m512i)a, (__m512i)lanes, (__m512i)b);
#elif defined(__clang__)
    vu out;
    for (int i = 0; i < LANES; i++) out[i] = lanes[i] < LANES ? a[lanes[i]] : b[lanes[i] - LANES];
    return out;
#else
    return __builtin_shuffle(a, b, lanes);
#endif
}

inline vf maximum(vf a, vf b) { return a > b ? a : b; }

// a * b + c, rounded once where there are instructions for it.
inline vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// Whether a comparison is true in any lane.
inline bool any(vi x) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)x, (__m512i)x);
#else
    int32_t found = 0;
    for (int i = 0; i < LANES; i++) found |= x[i];
    return found;
#endif
}

// f(lane) in every lane, as a compile-time constant; assigned lane by lane, the vector would be built at run time.
template <class F, int... LANE>
inline vi lanes_from(F f, std::integer_sequence<int, LANE...>) {
    return vi{f(LANE)...};
}
template <class F>
inline vi lanes_from(F f) {
    return lanes_from(f, std::make_integer_sequence<int, LANES>{});
}

// Reduces the lanes by ``join``: the halves of the vector first, then quarters, and so on.
template <int HALF = LANES / 2, class F>
inline float fold(vf x, F join) {
    vi other = lanes_from([](int lane) { return lane ^ HALF; });
    x = join(x, (vf)shuffle((vu)x, (vu)x, other));
    if constexpr (HALF > 1)
        return fold<HALF / 2>(x, join);
    else
        return x[0];
}

inline float sum(vf x) {
    return fold(x, [](vf a, vf b) { return a + b; });
}

inline float highest(vf x) { return fold(x, maximum); }

// p * 2^n for integers n from -126 to 127. With AVX-512 also beyond, with denormal results, 0 and infinity.
inline vf scaled(vf p, vf n) {
#if defined(__AVX512F__)
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    return p * (vf)((__builtin_convertvector(n, vi) + 127) << 23);
#endif
}

inline vf nearest(vf x) {
#if defined(__AVX512F__)
    return (vf)_mm512_roundscale_ps((__m512)x, 0);
#else
    return x + 12582912.0f - 12582912.0f;  // floats of this magnitude have no fraction bits
#endif
}

// 2^x for x <= 0, within 2 units in the last place; 0 if the result would be denormal. By the series of the
// exponential.
inline vf exp2(vf x) {
    vi tiny = x < -126.0f;
#if !defined(__AVX512F__)
    x = tiny ? vf{} : x;  // the integer of a very negative one would not fit
#endif
    vf n = nearest(x), r = x - n;
    vf p = splat(1.5403530e-4f);
    p = p * r + 1.3333558e-3f;
    p = p * r + 9.6181291e-3f;
    p = p * r + 5.5504109e-2f;
    p = p * r + 2.4022651e-1f;
    p = p * r + 6.9314718e-1f;
    p = p * r + 1.0f;
    p = scaled(p, n);
    return tiny ? vf{} : p;
}

// e^x within 2 units in the last place; 0 below -87.3 (the results there are denormal), infinite above 88.
// Cody-Waite reduction and the minimax polynomial of Cephes' expf (Moshier, 1992). All levels with fused instructions
// yield the same bits.
inline vf exp(vf x) {
    constexpr float MAGIC = 12582912.0f;  // floats of this magnitude have no fraction bits
    vi tiny = x < -87.3f, huge = x > 88.0f;
    x = tiny | huge ? vf{} : x;
    vf n = fma(x, splat(1.44269504088896341f), splat(MAGIC)) - MAGIC;
    vf r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    vf p = splat(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = fma(p, r, splat(c));
    p = fma(p, r * r, r) + 1.0f;
    p = huge ? splat(INFINITY) : scaled(p, n);
    return tiny ? vf{} : p;
}

inline vf tanh(vf x) { return 1.0f - 2.0f / (exp(2.0f * x) + 1.0f); }

inline vf sigmoid(vf x) { return 1.0f / (1.0f + exp(-x)); }

inline vf silu(vf x) { return x / (1.0f + exp(-x)); }

// log(1 + e^x) = max(x, 0) + log(1 + y) for y = e^-|x|; log(1 + y) = 2 artanh(y / (2 + y)), by its series.
inline vf softplus(vf x) {
    vf y = exp(x < 0 ? x : -x), s = y / (2.0f + y), square = s * s, p = splat(2.0f / 17);
    for (float n : {15, 13, 11, 9, 7, 5, 3, 1}) p = fma(p, square, splat(2.0f / n));
    return fma(p, s, x < 0 ? vf{} : x);
}

// SQUARE is that of experts without a gate, and the last two are for gates that are not an MLP's.
enum class Gate { NONE, SILU, GELU, CLAMPED, SQUARE, SIGMOID, SOFTPLUS };

// activation(gate) * through; gelu in its tanh form.
template <class T>
inline vf gated(vf gate, vf through, Gate kind) {
    if (kind == Gate::CLAMPED) {
        gate = gate > 7.0f ? splat(7.0f) : gate;
        through = through > 7.0f ? splat(7.0f) : through < -7.0f ? splat(-7.0f) : through;
        return rounded<T>(gate / (1.0f + exp(-1.702f * gate))) * rounded<T>(through + 1.0f);
    }
    vf open = kind == Gate::GELU
                  ? 0.5f * gate * (1.0f + tanh(0.7978845608028654f * (gate + 0.044715f * gate * gate * gate)))
              : kind == Gate::SIGMOID  ? sigmoid(gate)
              : kind == Gate::SOFTPLUS ? softplus(gate)
                                       : silu(gate);
    return rounded<T>(open) * through;
}

// Whether there are instructions for products of pairs of bfloat16.
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr bool PAIRS = true;
#else
constexpr bool PAIRS = false;
#endif

// The first or the second one of the pair of bfloat16 in each word.
template <int HALF>
inline vf half_of(vu words) {
    return (vf)(HALF ? words & 0xffff0000u : words << 16);
}

// acc + a . w for one step: w has a word per lane, a is one word for all lanes. Pairs of bfloat16 only if there are PAIRS.
template <class T>
inline vf accumulate(vf acc, vu w, uint32_t a) {
    static_assert(PAIRS || std::is_same_v<T, float>);
    // Fused in so many words: a compiler may leave out the fusing in some loops, as GCC does in single chains for Zen 2.
    if constexpr (std::is_same_v<T, float>) return fma((vf)w, splat(load_as<float>(&a)), acc);
#if defined(__AVX512BF16__)
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)_mm512_set1_epi32(int(a)));
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return (vf)vbfdotq_f32((float32x4_t)acc, (bfloat16x8_t)w, (bfloat16x8_t)vdupq_n_u32(a));
#endif
}

}  // namespace infer
