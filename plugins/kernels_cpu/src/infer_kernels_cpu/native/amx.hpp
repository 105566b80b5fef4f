// Products by Intel's Advanced Matrix Extensions: tile registers of 16 rows of 64 bytes. The compiler's intrinsics do not
// say which memory they read, so that GCC 12 leaves out stores before them; hence the assembly.
#pragma once

#include <algorithm>

#include "simd.hpp"

namespace infer {

#if defined(__AMX_BF16__)

constexpr int TILE = 16;  // rows of a tile register, and words of each
constexpr int64_t TILE_BYTES = 4 * TILE, PANEL_BYTES = 4 * PANEL;  // of a row
static_assert(PANEL == 4 * TILE && LANES == TILE);

// Which rows and bytes of each tile register are used.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};

    // For ``count`` rows in R tiles: registers 0 to 3 are sums, as many each for every tile of rows; the next R are rows
    // of ``words`` words, and the last ones weights.
    TileShapes(int R, int count, int words) {
        for (int i = 0; i < 8; i++) {
            int r = i < VECTORS ? i / (VECTORS / R) : i - VECTORS;
            rows[i] = uint8_t(r < R ? std::min(TILE, count - r * TILE) : words);
            bytes[i] = uint16_t(4 * (i < VECTORS || r >= R ? TILE : words));
        }
    }

    void load() const { asm volatile("ldtilecfg %0" ::"m"(*this)); }
};

// The shapes of the registers for the time being.
struct Tiles {
    int64_t count = 0, words = 0;

    Tiles() = default;
    Tiles(const Tiles&) = delete;
    ~Tiles() { asm volatile("tilerelease"); }

    // Changing them clears the registers.
    void shape(int64_t rows, int64_t wide) {
        if (rows != count || wide != words) TileShapes(rows > TILE ? 2 : 1, int(rows), int(wide)).load();
        count = rows, words = wide;
    }
};

template <int REGISTER>
inline void load_tile(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(REGISTER) : "memory");
}

template <int REGISTER>
inline void store_tile(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(REGISTER) : "memory");
}

template <int REGISTER>
inline void zero_tile() {
    asm volatile("tilezero %%tmm%c0" ::"i"(REGISTER));
}

// SUM += A . B: B has for every word of A's rows a row with a word per column.
template <int SUM, int A, int B>
inline void multiply_tiles() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(A), "i"(B));
}

// SUM += A . B in integers, where words consist of four bytes: A's are signed, and B's, too, if SIGNED.
template <int SUM, int A, int B, bool SIGNED>
inline void multiply_bytes() {
    if constexpr (SIGNED)
        asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(A), "i"(B));
    else
        asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(A), "i"(B));
}

// Calls f<r, c>() for R rows of tiles of sums, which registers 0 to 3 hold.
template <int R, class F>
inline void over_sums(F f) {
    constexpr int C = VECTORS / R;
    [&]<int... I>(std::integer_sequence<int, I...>) {
        (f.template operator()<I / C, I % C>(), ...);
    }(std::make_integer_sequence<int, VECTORS>{});
}

// Adds the products of R tiles of rows with VECTORS / R tiles of weights.
template <int R>
inline void add_products(const bf16* a, int64_t stride, const uint32_t* w) {
    constexpr int C = VECTORS / R, B = VECTORS + R;  // the first register with weights
    over_sums<R>([&]<int r, int c>() {
        constexpr int WEIGHTS = B + c % (8 - B);
        if constexpr (c == 0) load_tile<VECTORS + r>(a + r * TILE * stride, stride * int64_t(sizeof(bf16)));
        if constexpr (r == 0) load_tile<WEIGHTS>(w + c * TILE, PANEL_BYTES);
        multiply_tiles<r * C + c, VECTORS + r, WEIGHTS>();
    });
}

// How often ``amx_products`` calls ``fetch``.
inline int64_t amx_calls(int64_t rows, int64_t steps) {
    return (rows + TILE - 1) / TILE * ((steps + TILE - 1) / TILE);
}

// Adds the products of rows at ``a`` with ``steps`` steps of a panel to ``sums``, whose rows are ``stride`` apart, and
// which hold nothing yet if they ``begin`` here. If these are the ``last`` steps, each row's sums then go to
// end(row, sums). Calls fetch(weights) with the weights that it multiplies next, as often as ``amx_calls`` says. A
// product's sums begin anew every TILE steps and are then added to the row's, so that the chain of a row depends on K
// only.
template <class Fetch, class End>
void amx_products(Tiles& registers, const bf16* a, int64_t stride_a, int64_t rows, const uint32_t* w, int64_t steps, bool begin,
                  bool last, float* sums, int64_t stride, Fetch&& fetch, End end) {
    auto add = [&]<int R>(int64_t m, int64_t first, int64_t until, int words) {
        constexpr int C = VECTORS / R;
        int64_t count = std::min<int64_t>(R * TILE, rows - m), bytes = stride * int64_t(sizeof(float));
        registers.shape(count, words);
        for (int64_t column = 0; column < PANEL; column += C * TILE) {
            auto at = [&](int r, int c) { return sums + (m + r * TILE) * stride + column + c * TILE; };
            over_sums<R>([&]<int r, int c>() {
                if (begin && first == 0)
                    zero_tile<r * C + c>();
                else
                    load_tile<r * C + c>(at(r, c), bytes);
            });
            for (int64_t s = first; s < until; s += words) {
                fetch(w + s * PANEL);
                add_products<R>(a + m * stride_a + s * STEP<bf16>, stride_a, w + s * PANEL + column);
            }
            over_sums<R>([&]<int r, int c>() { store_tile<r * C + c>(at(r, c), bytes); });
        }
        for (int64_t i = m; last && until == steps && i < m + count; i++) {
            vf row[VECTORS];
            for (int j = 0; j < VECTORS; j++) row[j] = load(sums + i * stride + j * LANES);
            end(i, row);
        }
    };
    auto add_all = [&](int64_t first, int64_t until, int words) {
        int64_t m = 0;
        for (; rows - m > TILE; m += 2 * TILE) add.template operator()<2>(m, first, until, words);
        if (m < rows) add.template operator()<1>(m, first, until, words);
    };
    int64_t whole = steps / TILE * TILE;
    if (whole) add_all(0, whole, TILE);
    if (whole < steps) add_all(whole, steps, int(steps - whole));
}

#else
constexpr int TILE = 0;
struct Tiles {};
inline int64_t amx_calls(int64_t, int64_t) { return 1; }
#endif

}  // namespace infer
