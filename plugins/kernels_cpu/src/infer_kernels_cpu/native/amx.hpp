// Products by Intel's Advanced Matrix Extensions: tile registers of 16 rows of 64 bytes. The compiler's intrinsics do not
// say which memory they read, so that GCC 12 leaves out stores before them; hence the assembly.
#pragma once

#include <algorithm>

#include "simd.hpp"

namespace infer {

#if defined(__AMX_BF16__)

constexpr int TILE = 16;  // rows of a tile register, and words of each
constexpr int64_t PANEL_BYTES = 4 * PANEL;
static_assert(PANEL == 4 * TILE && LANES == TILE);

// Which rows and bytes of each tile register are used.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};

    // Registers 0 to 3 are sums [rows][TILE], 4 is of ``rows`` rows with ``words`` words, 5 to 7 have ``words`` rows.
    TileShapes(int count, int words) {
        for (int i = 0; i < 4; i++) rows[i] = uint8_t(count), bytes[i] = 4 * TILE;
        rows[4] = uint8_t(count), bytes[4] = uint16_t(4 * words);
        for (int i = 5; i < 8; i++) rows[i] = uint8_t(words), bytes[i] = 4 * TILE;
    }

    void load() const { asm volatile("ldtilecfg %0" ::"m"(*this)); }
};

inline void release_tiles() { asm volatile("tilerelease"); }

template <int REGISTER>
inline void load_tile(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(REGISTER) : "memory");
}

template <int REGISTER>
inline void store_tile(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(REGISTER) : "memory");
}

// SUM += A . B: B has for every word of A's rows a row with a word per column.
template <int SUM, int A, int B>
inline void multiply_tiles() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(A), "i"(B));
}

// Adds the products of rows of words at ``a``, ``stride`` bytes apart, with a panel's words at ``w`` to registers 0 to 3.
inline void add_products(const bf16* a, int64_t stride, const uint32_t* w) {
    load_tile<4>(a, stride);
    load_tile<5>(w, PANEL_BYTES);
    load_tile<6>(w + TILE, PANEL_BYTES);
    multiply_tiles<0, 4, 5>();
    load_tile<7>(w + 2 * TILE, PANEL_BYTES);
    multiply_tiles<1, 4, 6>();
    load_tile<5>(w + 3 * TILE, PANEL_BYTES);
    multiply_tiles<2, 4, 7>();
    multiply_tiles<3, 4, 5>();
}

// Calls move<J>(address) for registers 0 to 3 and the parts [rows][TILE] of sums [rows][PANEL].
template <class Move>
inline void over_sums(float (*sums)[PANEL], Move move) {
    [&]<int... J>(std::integer_sequence<int, J...>) {
        (move.template operator()<J>(&sums[0][J * TILE]), ...);
    }(std::make_integer_sequence<int, VECTORS>{});
}
inline void load_sums(float (*sums)[PANEL]) {
    over_sums(sums, []<int J>(float* at) { load_tile<J>(at, PANEL_BYTES); });
}
inline void store_sums(float (*sums)[PANEL]) {
    over_sums(sums, []<int J>(float* at) { store_tile<J>(at, PANEL_BYTES); });
}

// As ``tiles`` in matmul.hpp. A product's sums begin anew every TILE steps and are then added to the row's, so that
// the chain of a row depends on K only.
template <class Begin, class End, class Ahead>
void amx_tiles(const bf16* a, int64_t stride_a, int64_t rows, const uint32_t* w, int64_t steps, Begin begin, End end,
               Ahead&& ahead) {
    alignas(64) float c[TILE][PANEL];
    for (int64_t m = 0, count; m < rows; m += count) {
        count = std::min<int64_t>(TILE, rows - m);
        auto fetch = ahead(m);
        for (int64_t i = 0; i < count; i++)
            for (int j = 0; j < VECTORS; j++) store(c[i] + j * LANES, begin(m + i, j));
        for (int64_t s = 0, words; s < steps; s += words) {
            words = std::min<int64_t>(TILE, steps - s);
            if (s == 0 || words < TILE) {
                TileShapes(int(count), int(words)).load();
                load_sums(c);
            }
            for (int64_t i = 0; i < words; i++) fetch(s + i);
            add_products(a + m * stride_a + s * STEP<bf16>, stride_a * int64_t(sizeof(bf16)), w + s * PANEL);
            if (s + words == steps || s + 2 * TILE > steps) store_sums(c);
        }
        for (int64_t i = 0; i < count; i++) {
            vf row[VECTORS];
            for (int j = 0; j < VECTORS; j++) row[j] = load(c[i] + j * LANES);
            end(m + i, row);
        }
    }
    release_tiles();
}

#else
constexpr int TILE = 0;
#endif

}  // namespace infer
