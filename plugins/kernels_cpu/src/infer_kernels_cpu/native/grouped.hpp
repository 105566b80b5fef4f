// x @ w.T for packed weights with a code per value and a scale per group. Every result is one chain of multiply-adds
// over the groups, in the order of K, whatever other rows there are and however the work is divided.
//
// With activations rounded to int8, a group's sum is an integer, so that the order of its terms does not matter, and
// all instruction set levels compute the same bits.
#pragma once

#include "matmul.hpp"

namespace infer {

enum class Scale : int32_t { FLOAT, BF16, HALF };

// A packed weight [N][K]; Python's ``GroupedMatrix``. It consists of panels of PANEL columns. A panel has, group by
// group: a scale per column; a minimum per column, if there are minima; and words with the codes, one per column for
// every ``per_word`` elements of K, the last one padded.
struct Grouped {
    uint8_t* packed;
    int64_t N, K, group;
    int32_t bits;
    Scale scales;
    int32_t minimum, table, int8, gated;
    float values[16];  // of the codes, if ``table``

    int64_t per_word() const { return 32 / bits; }
    int64_t groups() const { return K / group; }
    int64_t words() const { return (group + per_word() - 1) / per_word(); }
    int64_t padded() const { return words() * per_word(); }
    int64_t scale_bytes() const { return PANEL * (scales == Scale::FLOAT ? 4 : 2); }
    int64_t header_bytes() const { return scale_bytes() * (1 + minimum); }
    int64_t group_bytes() const { return header_bytes() + words() * PANEL * 4; }
    int64_t panel_bytes() const { return groups() * group_bytes(); }
    int64_t panels() const { return panels_of(N, gated); }
    // What is subtracted from a code.
    int32_t zero() const { return minimum ? 0 : table ? 128 : 1 << (bits - 1); }
};

// Where in a word a code is, counted in bits. A word is decoded into parts, each of which meets a 32-bit word of
// activations of type A.
template <class A>
constexpr int code_shift(int64_t k, int bits) {
    constexpr int64_t each = 4 / sizeof(A);
    return int(k % each * (32 / each) + k / each * bits);
}

inline float half_to_float(uint16_t h) {
    uint32_t bits = uint32_t(h & 0x7fffu) << 13;
    float value = load_as<float>(&bits) * 0x1p112f;  // exact; also for denormal halves
    return h & 0x8000u ? -value : value;
}

inline vf load_scales(const uint8_t* p, Scale kind, int j) {
    if (kind == Scale::FLOAT) return load((const float*)p + j * LANES);
    if (kind == Scale::BF16) return load((const bf16*)p + j * LANES);
    vh half = load_as<vh>((const uint16_t*)p + j * LANES);
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps((__m256i)half);
#else
    vu wide = widen(half);
    return (vf)((vu)((vf)((wide & 0x7fffu) << 13) * 0x1p112f) | (wide & 0x8000u) << 16);
#endif
}

inline float scale_at(const uint8_t* p, Scale kind, int64_t n) {
    if (kind == Scale::FLOAT) return ((const float*)p)[n];
    return kind == Scale::BF16 ? to_float(((const bf16*)p)[n]) : half_to_float(((const uint16_t*)p)[n]);
}

// The codes of a word as they lie in a row, one after the other, each at its ``code_shift``.
template <class A>
constexpr uint32_t shifted(uint32_t word, int bits) {
    auto swap = [&](int by, uint32_t of) {  // the parts ``of`` a word with those ``by`` bits further up
        uint32_t change = (word ^ word >> by) & of;
        word ^= change ^ change << by;
    };
    if (sizeof(A) == 1 && bits == 4) swap(8, 0x0000ff00u), swap(4, 0x00f000f0u);
    if (sizeof(A) == 2 && bits == 4) swap(4, 0x00f000f0u), swap(8, 0x0000ff00u);
    if (sizeof(A) == 2 && bits == 8) swap(8, 0x0000ff00u);
    return word;
}

template <class A>
constexpr bool shifted_as_told(int bits) {
    for (int k = 0; k < 32 / bits; k++)
        if (shifted<A>(1u << k * bits, bits) != 1u << code_shift<A>(k, bits)) return false;
    return true;
}
static_assert(shifted_as_told<int8_t>(4) && shifted_as_told<bf16>(4) && shifted_as_told<float>(4));
static_assert(shifted_as_told<int8_t>(8) && shifted_as_told<bf16>(8) && shifted_as_told<float>(8));

// Packs ``codes`` [N][K * bits / 8], and scales and perhaps minima [N][G], where K / G is a multiple of the group.
template <class A>
void pack_grouped(const Grouped& to, const uint8_t* codes, const void* scales, const void* minima, int64_t G) {
    int64_t parts = to.gated ? 2 : 1, columns = PANEL / parts, rows = to.N / parts, per = to.per_word();
    int64_t size = to.scales == Scale::FLOAT ? 4 : 2, wide = to.K / G / to.group, bytes = to.group * to.bits / 8;
    bool whole = to.group % per == 0;
    parallel(to.panels(), [&](int64_t p) {
        for (int64_t g = 0; g < to.groups(); g++) {
            uint8_t* at = to.packed + p * to.panel_bytes() + g * to.group_bytes();
            std::memset(at, 0, to.group_bytes());
            uint32_t* words = (uint32_t*)(at + to.header_bytes());
            for (int64_t n = 0; n < PANEL; n++) {
                int64_t within = p * columns + n % columns, row = n / columns * rows + within;
                if (within >= rows) continue;
                int64_t place = (row * G + g / wide) * size;
                std::memcpy(at + n * size, (const uint8_t*)scales + place, size);
                if (to.minimum) std::memcpy(at + to.scale_bytes() + n * size, (const uint8_t*)minima + place, size);
                if (whole) {
                    const uint8_t* from = codes + row * (to.K * to.bits / 8) + g * bytes;
                    for (int64_t s = 0; s < to.words(); s++)
                        words[s * PANEL + n] = shifted<A>(load_as<uint32_t>(from + 4 * s), to.bits);
                    continue;
                }
                for (int64_t k = 0; k < to.group; k++) {
                    int64_t i = row * to.K + g * to.group + k;
                    uint32_t code = to.bits == 8 ? codes[i] : codes[i / 2] >> (i % 2 * 4) & 15;
                    words[k / per * PANEL + n] |= code << code_shift<A>(k % per, to.bits);
                }
            }
        }
    });
}

// Rows ``ids`` of the weight, dequantized; NaN for an id that is none of its rows. The scale is applied and rounded before the minimum is added.
template <class A, class T>
void unpack_grouped(const Grouped& w, const int64_t* ids, int64_t count, T* out) {
    parallel(count, [&](int64_t i) {
        if (ids[i] < 0 || ids[i] >= w.N) return fill_nan(out + i * w.K, w.K);
        int64_t n = ids[i] % PANEL, per = w.per_word();
        const uint8_t* at = w.packed + ids[i] / PANEL * w.panel_bytes();
        for (int64_t g = 0; g < w.groups(); g++, at += w.group_bytes()) {
            float scale = scale_at(at, w.scales, n), least = w.minimum ? scale_at(at + w.scale_bytes(), w.scales, n) : 0;
            const uint32_t* words = (const uint32_t*)(at + w.header_bytes());
            for (int64_t k = 0; k < w.group; k++) {
                uint32_t code = words[k / per * PANEL + n] >> code_shift<A>(k % per, w.bits) & ((1u << w.bits) - 1);
                float value = w.table ? w.values[code] : float(int32_t(code) - w.zero());
                volatile float product = value * scale;  // not to be fused with the addition
                float sum = w.minimum ? product + least : product;
                vf all = splat(sum);
                store_some(out + i * w.K + g * w.group + k, all, 1);
            }
        }
    });
}

// The activations of a product: rows of groups, each group padded to whole words of the weight.
template <class A>
struct Activations {
    const A* values;
    int64_t stride;
    const float* scales;    // int8: of each row and group
    const int32_t* starts;  // int8: minus the weight's zero times the group's sum
    const float* sums;      // if there are minima: the group's sum
};

inline vi integers(vf x) {  // to nearest, halves to even
#if defined(__AVX512F__)
    return (vi)_mm512_cvtps_epi32((__m512)x);
#elif defined(__aarch64__)
    return (vi)vcvtnq_s32_f32((float32x4_t)x);
#else
    vi out;
    for (int i = 0; i < LANES; i++) out[i] = int32_t(__builtin_lrintf(x[i]));
    return out;
#endif
}

inline int32_t total(vi x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)x);
#else
    int32_t sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
#endif
}

inline float greatest_bits(vi x) {
#if defined(__AVX512F__)
    int32_t top = _mm512_reduce_max_epi32((__m512i)x);
#else
    int32_t top = 0;
    for (int i = 0; i < LANES; i++) top = std::max(top, x[i]);
#endif
    return load_as<float>(&top);
}

inline void store_int8(int8_t* to, vi x, int lanes) {
#if defined(__AVX512F__)
    __m128i bytes = _mm512_cvtepi32_epi8((__m512i)x);
    if (lanes == LANES)
        _mm_storeu_si128((__m128i*)to, bytes);
    else
        std::memcpy(to, &bytes, lanes);
#else
    for (int i = 0; i < lanes; i++) to[i] = int8_t(x[i]);
#endif
}

// Rounds a row of groups to int8. A scale is the greatest absolute value / 127; not finite if a value is not.
template <class T>
void quantize_row(const Grouped& w, const T* x, int8_t* q, float* scales, int32_t* starts, float* sums) {
    for (int64_t g = 0; g < w.groups(); g++, x += w.group, q += w.padded()) {
        vi top = {};
        over_vectors(w.group, [&](int64_t k, int lanes) {
            vi bits = (vi)((vu)take(x + k, lanes) & 0x7fffffffu);  // of floats without sign, in their order; NaN last
            top = bits > top ? bits : top;
        });
        float greatest = greatest_bits(top), inverse = greatest < LEAST ? 0 : 127 / greatest;
        vi sum = {};
        over_vectors(w.group, [&](int64_t k, int lanes) {
            vi rounded = integers(take(x + k, lanes) * inverse);
            sum += rounded;
            store_int8(q + k, rounded, lanes);
        });
        for (int64_t k = w.group; k < w.padded(); k++) q[k] = 0;
        int32_t whole = total(sum);
        scales[g] = greatest / 127;
        starts[g] = -w.zero() * whole;
        sums[g] = float(whole) * scales[g];
    }
}

template <class T>
Activations<int8_t> activations(const Grouped& w, const T* x, int64_t stride, int64_t rows, int8_t*) {
    int64_t G = w.groups(), wide = G * w.padded();
    int8_t* q = scratch<int8_t, struct Rounded>(rows * wide);
    float* scales = scratch<float, struct RowScales>(2 * rows * G);
    int32_t* starts = scratch<int32_t, struct Starts>(rows * G);
    auto row = [=, &w](int64_t m) {
        quantize_row(w, x + m * stride, q + m * wide, scales + m * G, starts + m * G, scales + (rows + m) * G);
    };
    if (rows * w.K < 1 << 14)
        for (int64_t m = 0; m < rows; m++) row(m);
    else
        parallel(rows, row);
    return {q, wide, scales, starts, scales + rows * G};
}

template <class T>
Activations<Factor<T>> activations(const Grouped& w, const T* x, int64_t stride, int64_t rows, Factor<T>*) {
    int64_t G = w.groups(), wide = G * w.padded();
    float* sums = scratch<float, struct RowScales>(rows * G);
    if (w.minimum)
        for (int64_t i = 0; i < rows * G; i++) {
            const T* from = x + i / G * stride + i % G * w.group;
            float sum = 0;
            for (int64_t k = 0; k < w.group; k++) sum += to_float(from[k]);
            sums[i] = sum;
        }
    if constexpr (!CONVERTS<T>)
        if (w.padded() == w.group) return {x, stride, nullptr, nullptr, sums};
    auto* copy = scratch<Factor<T>, struct Rounded>(rows * wide);
    std::memset((void*)copy, 0, rows * wide * sizeof *copy);
    for (int64_t i = 0; i < rows * G; i++)
        to_factors(x + i / G * stride + i % G * w.group, w.group, copy + i * w.padded());
    return {copy, wide, nullptr, nullptr, sums};
}

enum class Form { BYTES, NIBBLES, TABLE };

// What decodes a word of codes: for activations of type A, the parts of a word.
template <class A, Form FORM>
struct Decoder {
    static constexpr int PARTS = int(sizeof(A)) * (FORM == Form::BYTES ? 1 : 2);
    vi zero;
#if defined(__AVX512F__)
    __m512i lookup;
#endif
    float values[16];

    explicit Decoder(const Grouped& w) : zero(vi{} + w.zero()) {
        for (int c = 0; c < 16; c++) values[c] = FORM == Form::TABLE ? w.values[c] : float(c - w.zero());
#if defined(__AVX512F__)
        if constexpr (sizeof(A) == 1) {
            int8_t bytes[64];
            for (int i = 0; i < 64; i++) bytes[i] = int8_t(int(values[i % 16]) + 128);
            lookup = _mm512_loadu_si512(bytes);
        } else if constexpr (sizeof(A) == 2) {
            uint16_t halves[32];
            for (int i = 0; i < 32; i++) {
                vf all = splat(values[i % 16]);
                halves[i] = narrow(all)[0];
            }
            lookup = _mm512_loadu_si512(halves);
        } else
            lookup = _mm512_loadu_si512(values);
#endif
    }

    vf looked_up(vu codes) const {
        vf out;
        for (int i = 0; i < LANES; i++) out[i] = values[codes[i]];
        return out;
    }

    template <int PART>
    vu part(vu w) const {
        if constexpr (sizeof(A) == 1) {
            if constexpr (FORM == Form::BYTES) return w;
            vu codes = (PART ? w >> 4 : w) & 0x0f0f0f0fu;
            if constexpr (FORM == Form::NIBBLES) return codes;
#if defined(__AVX512F__)
            return (vu)_mm512_shuffle_epi8(lookup, (__m512i)codes);
#else
            vu out = {};
            for (int b = 0; b < 32; b += 8)
                for (int i = 0; i < LANES; i++)
                    out[i] |= uint32_t(uint8_t(int(values[codes[i] >> b & 15]) + 128)) << b;
            return out;
#endif
        } else if constexpr (FORM == Form::BYTES) {
            vu bytes = w >> (8 * PART);
            vf low = __builtin_convertvector((vi)(bytes & 0xffu) - zero, vf);
            if constexpr (sizeof(A) == 4) return (vu)low;
            // Integers of 8 bits are exact in bfloat16, so cutting their floats is not rounding.
            vf high = __builtin_convertvector((vi)(bytes >> 16 & 0xffu) - zero, vf);
            return (vu)low >> 16 | ((vu)high & 0xffff0000u);
        } else {
            vu codes = PART ? w >> (4 * PART) : w;
#if defined(__AVX512F__)
            if constexpr (sizeof(A) == 2) return (vu)_mm512_permutexvar_epi16((__m512i)codes, lookup);
            return (vu)_mm512_permutexvar_epi32((__m512i)codes, lookup);
#else
            vf low = value(codes & 15u);
            if constexpr (sizeof(A) == 4) return (vu)low;
            vf high = value(codes >> 16 & 15u);
            return widen(narrow(low)) | widen(narrow(high)) << 16;
#endif
        }
    }

    vf value(vu codes) const {
        if constexpr (FORM == Form::TABLE) return looked_up(codes);
        return __builtin_convertvector((vi)codes - zero, vf);
    }
};

// acc + the sum of four products of unsigned bytes and the signed bytes of ``a``.
inline vi accumulate(vi acc, vu w, uint32_t a) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(int(a)));
#elif defined(__AVX512BW__)
    __m512i x = _mm512_set1_epi32(int(a)), even = _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8);
    __m512i low = _mm512_madd_epi16((__m512i)(w & 0x00ff00ffu), even);
    __m512i high = _mm512_madd_epi16((__m512i)(w >> 8 & 0x00ff00ffu), _mm512_srai_epi16(x, 8));
    return acc + (vi)low + (vi)high;
#elif defined(__AVXVNNI__)
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)w, _mm256_set1_epi32(int(a)));
#elif defined(__AVX2__)
    __m256i x = _mm256_set1_epi32(int(a)), even = _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8);
    __m256i low = _mm256_madd_epi16((__m256i)(w & 0x00ff00ffu), even);
    __m256i high = _mm256_madd_epi16((__m256i)(w >> 8 & 0x00ff00ffu), _mm256_srai_epi16(x, 8));
    return acc + (vi)low + (vi)high;
#elif defined(__ARM_FEATURE_MATMUL_INT8)
    return (vi)vusdotq_s32((int32x4_t)acc, (uint8x16_t)w, (int8x16_t)vdupq_n_u32(a));
#else
    for (int b = 0; b < 32; b += 8) acc += (vi)(w >> b & 0xffu) * int32_t(int8_t(a >> b));
    return acc;
#endif
}

// a * b + c with one rounding, on every level.
inline vf fused(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

// The sums of M rows from ``row`` on with the panel at ``at``; each row's go to end(row, sums). Unless DISTANCE is 0, codes
// are fetched so many words before they are read.
template <class A, Form FORM, int M, int64_t DISTANCE, class End>
inline void grouped_tile(const Grouped& w, const Decoder<A, FORM>& decoder, const Activations<A>& x, int64_t row,
                         const uint8_t* at, Fetch fetch, End end) {
    constexpr int PARTS = Decoder<A, FORM>::PARTS;
    using Sum = std::conditional_t<sizeof(A) == 1, vi, vf>;
    int64_t words = w.words(), G = w.groups();
    vf c[M][VECTORS];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; j++) c[m][j] = vf{};
    for (int64_t g = 0; g < G; g++, at += w.group_bytes()) {
        for (int64_t l = 0; l < fetch.lines; l++, fetch.from += LINE) fetch_line(fetch.from);
        const A* a = x.values + row * x.stride + g * w.padded();
        const uint32_t* codes = (const uint32_t*)(at + w.header_bytes());
        Sum acc[M][VECTORS];
#pragma GCC unroll 8
        for (int m = 0; m < M; m++)
#pragma GCC unroll 8
            for (int j = 0; j < VECTORS; j++)
                if constexpr (sizeof(A) == 1)
                    acc[m][j] = vi{} + x.starts[(row + m) * G + g];
                else
                    acc[m][j] = vf{};
        for (int64_t s = 0; s < words; s++, codes += PANEL) {
            vu word[VECTORS];
#pragma GCC unroll 8
            for (int j = 0; j < VECTORS; j++) word[j] = load_as<vu>(codes + j * LANES);
            for (int64_t l = 0; DISTANCE && l < PANEL; l += LINE) fetch_line(codes + DISTANCE + l);
            auto part = [&]<int PART>() {
                vu now[VECTORS];
#pragma GCC unroll 8
                for (int j = 0; j < VECTORS; j++) now[j] = decoder.template part<PART>(word[j]);
#pragma GCC unroll 8
                for (int m = 0; m < M; m++) {
                    uint32_t activation = load_as<uint32_t>(a + m * x.stride + (s * PARTS + PART) * (4 / int64_t(sizeof(A))));
#pragma GCC unroll 8
                    for (int j = 0; j < VECTORS; j++)
                        if constexpr (sizeof(A) == 1)
                            acc[m][j] = accumulate(acc[m][j], now[j], activation);
                        else
                            acc[m][j] = accumulate<A>(acc[m][j], now[j], activation);
                }
            };
            [&]<int... PART>(std::integer_sequence<int, PART...>) {
                (part.template operator()<PART>(), ...);
            }(std::make_integer_sequence<int, PARTS>{});
        }
        vf scale[VECTORS];
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; j++) scale[j] = load_scales(at, w.scales, j);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++)
#pragma GCC unroll 8
            for (int j = 0; j < VECTORS; j++)
                if constexpr (sizeof(A) == 1)
                    c[m][j] = fused(__builtin_convertvector(acc[m][j], vf) * x.scales[(row + m) * G + g], scale[j], c[m][j]);
                else
                    c[m][j] = fused(acc[m][j], scale[j], c[m][j]);
        if (w.minimum) {
#pragma GCC unroll 8
            for (int j = 0; j < VECTORS; j++) scale[j] = load_scales(at + w.scale_bytes(), w.scales, j);
#pragma GCC unroll 8
            for (int m = 0; m < M; m++)
#pragma GCC unroll 8
                for (int j = 0; j < VECTORS; j++)
                    c[m][j] = fused(splat(x.sums[(row + m) * G + g]), scale[j], c[m][j]);
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) end(row + m, c[m]);
}

// A function for ``over_panels`` that multiplies ``rows`` rows by a panel.
template <class T, class A, Form FORM>
auto register_panel_product(const Grouped& w, Activations<A> from, int64_t rows, const T* bias, Gate gate, T* out) {
    Decoder<A, FORM> decoder(w);
    int64_t stride_out = gate == Gate::NONE ? w.N : w.N / 2;
    // Three rows' sums of integers and of floats fit into the registers, but then the panel is read twice as often.
    constexpr int EACH = sizeof(A) == 1 && FORM != Form::BYTES ? 3 : ROWS;
    return [=, &w](int64_t p, int64_t first, int64_t count, int64_t following) {
        const uint8_t* panel = w.packed + p * w.panel_bytes();
        auto end = [=](int64_t m, const vf(&sums)[VECTORS]) { emit(sums, p, w.N, bias, gate, out + m * stride_out); };
        bool near = NEARBY && rows <= STREAMED_ROWS, later = rows > STREAMED_ROWS && rows <= ROW_BLOCK && following >= 0;
        const uint8_t* next = later ? w.packed + following * w.panel_bytes() : nullptr;
        int64_t left = next ? w.panel_bytes() / 64 : 0, passes = w.groups() * ((count + EACH - 1) / EACH);
        Fetch fetch{(const uint32_t*)next, (left + passes - 1) / passes};
        in_tiles<EACH, EACH == 3 ? 4 : EACH>(count, [&]<int M>(int64_t m) {
            if (left <= 0) fetch.lines = 0;
            auto run = [&](auto distance) {
                grouped_tile<A, FORM, M, distance>(w, decoder, from, first + m, panel, fetch, end);
            };
            if (near)
                run(std::integral_constant<int64_t, M <= MOST_STREAMED ? NEAR : 0>{});
            else
                run(std::integral_constant<int64_t, 0>{});
            fetch.from += fetch.lines * w.groups() * LINE;
            left -= fetch.lines * w.groups();
        });
    };
}

// Decodes ``count`` words of each column's codes to ``to`` [count * PARTS][PANEL], what ``each`` makes of a part.
template <class A, Form FORM, class Each>
inline void decode_words(const Decoder<A, FORM>& decoder, const uint32_t* codes, int64_t count, uint32_t* to, Each each) {
    constexpr int PARTS = Decoder<A, FORM>::PARTS;
    for (int64_t s = 0; s < count; s++, codes += PANEL, to += PARTS * PANEL)
#pragma GCC unroll 8
        for (int j = 0; j < VECTORS; j++) {
            vu word = load_as<vu>(codes + j * LANES);
            [&]<int... PART>(std::integer_sequence<int, PART...>) {
                (store_as(to + PART * PANEL + j * LANES, each(decoder.template part<PART>(word))), ...);
            }(std::make_integer_sequence<int, PARTS>{});
        }
}

// The same by AMX: the codes are decoded, a few groups at a time, into a panel of words, whose products with all rows are
// summed group by group.
template <Form FORM>
auto decoded_panel_product(const Grouped& w, Activations<bf16> x, const bf16* bias, Gate gate, bf16* out) {
    constexpr int PARTS = Decoder<bf16, FORM>::PARTS;
    static_assert(AMX_STEPS % PARTS == 0 && FEW_STEPS % PARTS == 0);
    Decoder<bf16, FORM> decoder(w);
    int64_t stride_out = gate == Gate::NONE ? w.N : w.N / 2, G = w.groups(), steps = w.words() * PARTS;
    return [=, &w](int64_t p, int64_t first, int64_t count, int64_t) {
        float* sums = scratch<float, struct Sums>(ROW_BLOCK * PANEL);
        float* of_group = scratch<float, struct GroupSums>(ROW_BLOCK * PANEL);
        uint32_t* plain = scratch<uint32_t, struct Plain>(AMX_STEPS * PANEL);
        int64_t most = count > TILE ? AMX_STEPS : FEW_STEPS, piece = std::min(steps, most), at_once = most / piece;
        Tiles registers;
        auto decode = [&](int64_t g, int64_t s, int64_t length, uint32_t* to) {
            const uint8_t* at = w.packed + p * w.panel_bytes() + g * w.group_bytes() + w.header_bytes();
            const uint32_t* codes = (const uint32_t*)at + s / PARTS * PANEL;
            decode_words(decoder, codes, length / PARTS, to, [](vu part) { return part; });
        };
        auto multiply = [&](int64_t g, int64_t s, int64_t length, const uint32_t* words, int64_t m, int64_t rows) {
            const uint8_t* at = w.packed + p * w.panel_bytes() + g * w.group_bytes();
            vf scale[VECTORS], least[VECTORS];
            for (int j = 0; j < VECTORS; j++) scale[j] = load_scales(at, w.scales, j);
            for (int j = 0; w.minimum && j < VECTORS; j++) least[j] = load_scales(at + w.scale_bytes(), w.scales, j);
            auto end = [&](int64_t i, const vf(&row)[VECTORS]) {
                vf c[VECTORS];
                float* to = sums + (m + i) * PANEL;
#pragma GCC unroll 8
                for (int j = 0; j < VECTORS; j++) {
                    c[j] = fused(row[j], scale[j], g ? load(to + j * LANES) : vf{});
                    if (w.minimum) c[j] = fused(splat(x.sums[(first + m + i) * G + g]), least[j], c[j]);
                    store(to + j * LANES, c[j]);
                }
                if (g + 1 == G) emit(c, p, w.N, bias, gate, out + (first + m + i) * stride_out);
            };
            const auto* next = (const uint32_t*)(rows <= TILE ? at + at_once * w.group_bytes() : nullptr);
            Stream fetch(next, w.group_bytes() / 64, amx_calls(rows, length), false);
            amx_products(registers, x.values + (first + m) * x.stride + g * w.padded() + s * STEP<bf16>, x.stride, rows, words,
                         length, s == 0, s + length == steps, of_group + (piece < steps ? m : 0) * PANEL, PANEL, fetch, end);
        };
        for (int64_t g = 0; g < G; g += at_once)
            for (int64_t s = 0; s < steps; s += piece) {
                int64_t groups = std::min(at_once, G - g), length = std::min(piece, steps - s);
                for (int64_t i = 0; i < groups; i++) decode(g + i, s, length, plain + i * length * PANEL);
                for (int64_t m = 0; m < count; m += 2 * TILE)
                    for (int64_t i = 0; i < groups; i++)
                        multiply(g + i, s, length, plain + i * length * PANEL, m, std::min<int64_t>(2 * TILE, count - m));
            }
    };
}

#if defined(__AMX_INT8__)
constexpr int64_t BYTE_WORDS = 96;  // of each column, that are decoded at a time: they stay in the L1 cache

// Products of bytes by AMX, for any number of rows. Codes are decoded, a few groups at a time, to bytes from which zero is
// subtracted. A tile of sums is that of one group, and its integers are those of ``grouped_tile``; so are the chains of
// floats, which stay in registers from group to group.
template <class T, Form FORM>
struct ByteProduct {
    const Grouped& w;
    Activations<int8_t> x;
    const T* bias;
    Gate gate;
    T* out;
    Decoder<int8_t, FORM> decoder;

    static constexpr int PARTS = Decoder<int8_t, FORM>::PARTS;

    // How many words of a group a tile register takes.
    int64_t step() const {
        int64_t words = w.words() * PARTS, most = std::min<int64_t>(words, TILE);
        while (words % most) most--;
        return most;
    }

    // Decodes a group to ``to`` [words][PANEL].
    void decode(const uint8_t* group, uint32_t* to) const {
        const uint32_t* codes = (const uint32_t*)(group + w.header_bytes());
        __m512i zero = _mm512_set1_epi8(char(w.zero()));
        decode_words(decoder, codes, w.words(), to, [=](vu part) { return (vu)_mm512_sub_epi8((__m512i)part, zero); });
    }

    // c += the integers of a group, scaled by row and by column.
    template <bool WHOLE>
    static inline void add_group(vf (&c)[TILE], const int32_t (*found)[LANES], const float* by_row, int64_t stride, vf by_column,
                                 int64_t rows) {
#pragma GCC unroll 16
        for (int i = 0; i < TILE; i++)
            if (WHOLE || i < rows)
                c[i] = fused(__builtin_convertvector(load_as<vi>(found[i]), vf) * by_row[i * stride], by_column, c[i]);
    }

    // c += a group's minima, times the rows' sums.
    template <bool WHOLE>
    static inline void add_minima(vf (&c)[TILE], const float* totals, int64_t stride, vf minima, int64_t rows) {
#pragma GCC unroll 16
        for (int i = 0; i < TILE; i++)
            if (WHOLE || i < rows) c[i] = fused(splat(totals[i * stride]), minima, c[i]);
    }

    // Groups [first, first + count) of a panel, which were decoded to ``plain``: ``words`` of each, of which a tile takes
    // ``step``.
    struct Groups {
        const uint8_t* panel;
        int64_t first, count;
        const uint32_t* plain;
        int64_t words, step;
    };

    // Adds the products of ``rows`` rows from ``row`` on, at most TILE, with the ``j``th LANES columns to sums [rows][PANEL].
    // Codes are SIGNED unless groups have minima.
    template <bool WHOLE, bool SIGNED>
    void add(int64_t row, int64_t rows, int j, const Groups& groups, float* sums, Stream& fetch) const {
        alignas(64) int32_t found[VECTORS][TILE][LANES];
        const int64_t G = w.groups(), first = groups.first, count = groups.count, words = groups.words, step = groups.step;
        const int64_t wide = 4 * words, size = w.group_bytes(), stride = x.stride;
        const int8_t* a = x.values + row * stride + first * wide;
        const uint32_t* plain = groups.plain + j * LANES;
        const uint8_t *scales = groups.panel + first * size, *minima = scales + w.scale_bytes();
        const float *by_row = x.scales + row * G + first, *totals = x.sums + row * G + first;
        const Scale kind = w.scales;
        auto multiply = [=](int64_t begin) {
            over_sums<1>([=]<int, int SUM>() {
                constexpr int WEIGHTS = VECTORS + 1 + SUM % 3;
                int64_t n = begin + SUM;
                if (n >= count) return;
                zero_tile<SUM>();
                for (int64_t s = 0; s < words; s += step) {
                    load_tile<VECTORS>(a + n * wide + 4 * s, stride);
                    load_tile<WEIGHTS>(plain + (n * words + s) * PANEL, PANEL_BYTES);
                    multiply_bytes<SUM, VECTORS, WEIGHTS, SIGNED>();
                }
            });
        };
        vf c[TILE];  // all loops over it are unrolled, and no lambda refers to it, or it would live in memory
#pragma GCC unroll 16
        for (int i = 0; i < TILE; i++) c[i] = first && (WHOLE || i < rows) ? load(sums + i * PANEL) : vf{};
        multiply(0);
        for (int64_t n = 0; n < count; n += VECTORS) {
            over_sums<1>([&found]<int, int SUM>() { store_tile<SUM>(found[SUM], TILE_BYTES); });
            multiply(n + VECTORS);  // which takes place while the sums of these are scaled
            for (int64_t i = n, end = std::min(count, n + VECTORS); i < end; i++) {
                add_group<WHOLE>(c, found[i - n], by_row + i, G, load_scales(scales + i * size, kind, j), rows);
                if constexpr (!SIGNED)
                    add_minima<WHOLE>(c, totals + i, G, load_scales(minima + i * size, kind, j), rows);
                fetch();
            }
        }
#pragma GCC unroll 16
        for (int i = 0; i < TILE; i++)
            if (WHOLE || i < rows) store(sums + i * PANEL, c[i]);
    }

    template <bool SIGNED>
    void run(int64_t p, int64_t first, int64_t count, int64_t following) const {
        float* sums = scratch<float, struct Sums>(ROW_BLOCK * PANEL);
        int64_t words = w.words() * PARTS, most = std::max<int64_t>(1, BYTE_WORDS / words), G = w.groups();
        int64_t stride_out = gate == Gate::NONE ? w.N : w.N / 2;
        uint32_t* plain = scratch<uint32_t, struct Plain>(most * words * PANEL);
        Groups groups{w.packed + p * w.panel_bytes(), 0, 0, plain, words, step()};
        Tiles registers;
        for (; groups.first < G; groups.first += groups.count) {
            groups.count = std::min(most, G - groups.first);
            const uint8_t* at = groups.panel + groups.first * w.group_bytes();
            for (int64_t n = 0; n < groups.count; n++, at += w.group_bytes()) decode(at, plain + n * words * PANEL);
            // What is decoded next is fetched in the meantime.
            int64_t done = groups.first + groups.count, next = std::min(most, G - done);
            if (done == G && following >= 0) at = w.packed + following * w.panel_bytes(), next = std::min(most, G);
            Stream fetch((const uint32_t*)at, next * w.group_bytes() / 64, (count + TILE - 1) / TILE * VECTORS * groups.count, true);
            for (int64_t m = 0; m < count; m += TILE) {
                int64_t rows = std::min<int64_t>(TILE, count - m);
                registers.shape(rows, groups.step);
                for (int j = 0; j < VECTORS; j++) {
                    float* to = sums + m * PANEL + j * LANES;
                    if (rows == TILE)
                        add<true, SIGNED>(first + m, rows, j, groups, to, fetch);
                    else
                        add<false, SIGNED>(first + m, rows, j, groups, to, fetch);
                }
                for (int64_t i = m; done == G && i < m + rows; i++) {
                    vf row[VECTORS];
                    for (int j = 0; j < VECTORS; j++) row[j] = load(sums + i * PANEL + j * LANES);
                    emit(row, p, w.N, bias, gate, out + (first + i) * stride_out);
                }
            }
        }
    }

    void operator()(int64_t p, int64_t first, int64_t count, int64_t following) const {
        if (w.minimum)
            run<false>(p, first, count, following);
        else
            run<true>(p, first, count, following);
    }
};
#endif

template <class T, class A, Form FORM>
auto grouped_panel_product(const Grouped& w, Activations<A> from, int64_t rows, const T* bias, Gate gate, T* out) {
    if constexpr (AMX<A>)
        return decoded_panel_product<FORM>(w, from, bias, gate, out);
#if defined(__AMX_INT8__)
    else if constexpr (sizeof(A) == 1) {
        auto few = register_panel_product<T, A, FORM>(w, from, rows, bias, gate, out);
        ByteProduct<T, FORM> many{w, from, bias, gate, out, Decoder<A, FORM>(w)};
        // Vectors need bytes not to be decoded, so that tiles pay off from more rows on. A last tile that is less than half
        // full goes to vectors, too, and groups that no tile register is filled with.
        int64_t enough = FORM == Form::BYTES ? 2 * TILE : TILE;
        if (many.step() < std::min<int64_t>(w.words() * many.PARTS, TILE / 2)) enough = ROW_BLOCK + 1;
        return [=](int64_t p, int64_t first, int64_t count, int64_t following) {
            int64_t rest = count < enough ? count : count % TILE < TILE / 2 ? count % TILE : 0, whole = count - rest;
            if (whole) many(p, first, whole, following);
            if (rest) few(p, first + whole, rest, whole ? -1 : following);
        };
    }
#endif
    else
        return register_panel_product<T, A, FORM>(w, from, rows, bias, gate, out);
}

template <class T, class A, Form FORM>
void grouped_product(const Grouped& w, const T* x, int64_t stride, int64_t rows, const T* bias, Gate gate, T* out) {
    int64_t each = CONVERTS<T> && sizeof(A) > 1 ? MANY_ROWS : rows, stride_out = gate == Gate::NONE ? w.N : w.N / 2;
    for (int64_t m = 0; m < rows; m += each) {
        int64_t count = std::min(each, rows - m);
        Activations<A> from = activations(w, x + m * stride, stride, count, (A*)nullptr);
        over_panels(count, w.panels(), row_block<A>(w.K), grouped_panel_product<T, A, FORM>(w, from, count, bias, gate, out + m * stride_out));
    }
}

template <class T, class A>
void grouped_linear(const Grouped& w, const T* x, int64_t stride, int64_t rows, const T* bias, Gate gate, T* out) {
    if (w.bits == 8)
        grouped_product<T, A, Form::BYTES>(w, x, stride, rows, bias, gate, out);
    else if (w.table)
        grouped_product<T, A, Form::TABLE>(w, x, stride, rows, bias, gate, out);
    else
        grouped_product<T, A, Form::NIBBLES>(w, x, stride, rows, bias, gate, out);
}

}  // namespace infer
