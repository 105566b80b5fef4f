// The functions that Python calls. This one source is built once per instruction set level. The caller has checked
// pointers and sizes.
#include <functional>
#include <vector>

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

#include "adapters.hpp"
#include "attention.hpp"
#include "experts.hpp"
#include "grouped.hpp"
#include "matmul.hpp"
#include "quantize.hpp"
#include "rows.hpp"
#include "sampling.hpp"
#include "states.hpp"

using namespace infer;

namespace {

template <class T>
struct Type {
    using type = T;
};

// Calls run(Type<T>) with the element type of ``kind``: 0 is float, 1 is bfloat16.
template <class F>
void typed(int kind, F run) {
    if (kind == 0)
        run(Type<float>{});
    else
        run(Type<bf16>{});
}

using Tape = std::vector<std::function<void()>>;
thread_local Tape* recording = nullptr;

// Runs ``run`` now, and records it, so that it runs again whenever the tape is replayed.
template <class F>
void call(F run) {
    run();
    if (recording) recording->push_back(run);
}

#if defined(__x86_64__)
// Whether there is AMX. Linux lets a process use its registers once it has asked for them.
bool amx() {
#if defined(__linux__)
    unsigned eax, ebx, ecx, edx;
    constexpr unsigned NEEDED = 1u << 25 | 1u << 24 | 1u << 22;  // AMX-INT8, AMX-TILE, AMX-BF16
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || (edx & NEEDED) != NEEDED) return false;
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
#else
    return false;
#endif
}
#endif

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))
#define TYPED(kind) call([=] { typed(kind, [&](auto type) { using T = typename decltype(type)::type;
#define END }); });

// What this processor supports, a bit for each of native.py's FEATURES.
EXPORT int infer_features() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    unsigned eax = 0, ebx, ecx, edx;
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
    bool vnni = __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && eax >> 4 & 1;  // older compilers cannot be asked
    bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    bool bf16 = __builtin_cpu_supports("avx512bf16");  // Intel's take twice as long as multiplying floats
    return 1 | vnni << 1 | avx512 << 2 | !!__builtin_cpu_supports("avx512vnni") << 3 |
           (bf16 && !__builtin_cpu_is("intel")) << 4 | (bf16 && amx()) << 5;
#elif defined(__aarch64__) && defined(__linux__)
    constexpr unsigned long NEEDED = 1ul << 14 | 1ul << 13;  // HWCAP2_BF16, HWCAP2_I8MM
    return (getauxval(AT_HWCAP2) & NEEDED) == NEEDED;
#else
    return 0;
#endif
}

EXPORT void infer_bind(NumThreads count) { num_threads = count; }

EXPORT int64_t infer_packed_words(int kind, int64_t N, int64_t K, int gated) {
    return panels_of(N, gated) * PANEL * (kind == 0 ? steps_of<float>(K) : steps_of<bf16>(K));
}

EXPORT void infer_pack(int kind, const void* w, int64_t N, int64_t K, int gated, uint32_t* packed) {
    TYPED(kind) pack(static_cast<const T*>(w), N, K, gated, packed); END
}

EXPORT void infer_rows(int kind, const uint32_t* packed, int64_t N, int64_t K, const int64_t* ids, int64_t count,
                       void* out) {
    TYPED(kind) unpack_rows(packed, N, K, ids, count, static_cast<T*>(out)); END
}

EXPORT void infer_linear(int kind, const void* x, int64_t stride, int64_t rows, const uint32_t* packed, int64_t N,
                         int64_t K, const void* bias, int gate, void* out) {
    TYPED(kind)
        linear(static_cast<const T*>(x), stride, rows, packed, N, K, static_cast<const T*>(bias), Gate(gate),
               static_cast<T*>(out));
    END
}

EXPORT void infer_quantize(int kind, const void* weight, int64_t N, int64_t K, int64_t group, int bits, uint8_t* codes,
                           void* scales) {
    TYPED(kind)
        auto run = bits == 4 ? quantize_weight<4, T> : quantize_weight<8, T>;
        run(static_cast<const T*>(weight), N, K, group, codes, static_cast<bf16*>(scales));
    END
}

EXPORT int64_t infer_grouped_bytes(const Grouped* w) { return w->panels() * w->panel_bytes(); }

EXPORT void infer_pack_grouped(int kind, const Grouped* w, const uint8_t* codes, const void* scales, const void* minima,
                               int64_t G) {
    TYPED(kind)
        if (w->int8) pack_grouped<int8_t>(*w, codes, scales, minima, G);
        else pack_grouped<Factor<T>>(*w, codes, scales, minima, G);
    END
}

EXPORT void infer_grouped_rows(int kind, const Grouped* w, const int64_t* ids, int64_t count, void* out) {
    TYPED(kind)
        if (w->int8) unpack_grouped<int8_t>(*w, ids, count, static_cast<T*>(out));
        else unpack_grouped<Factor<T>>(*w, ids, count, static_cast<T*>(out));
    END
}

EXPORT void infer_grouped_linear(int kind, const Grouped* w, const void* x, int64_t stride, int64_t rows,
                                 const void* bias, int gate, void* out) {
    TYPED(kind)
        auto product = w->int8 ? grouped_linear<T, int8_t> : grouped_linear<T, Factor<T>>;
        product(*w, static_cast<const T*>(x), stride, rows, static_cast<const T*>(bias), Gate(gate), static_cast<T*>(out));
    END
}

EXPORT void infer_route(int kind, const void* logits, int64_t rows, int64_t X, int64_t top, int sigmoid, int renormalize,
                        float scale, const float* bias, int32_t* experts, float* shares) {
    TYPED(kind)
        route(static_cast<const T*>(logits), rows, X, Routing{top, sigmoid != 0, renormalize != 0, scale}, bias, experts,
              shares);
    END
}

EXPORT void infer_gated_experts(int kind, const Mixture* m, const void* x, int64_t stride, int64_t tokens,
                                const int32_t* experts, const float* shares, int64_t J, int gate, void* out) {
    TYPED(kind)
        gated_experts(*m, static_cast<const T*>(x), stride, tokens, experts, shares, J, Gate(gate), static_cast<T*>(out));
    END
}

EXPORT void infer_add_adapters(int kind, const void* x, int64_t stride, int64_t rows, int64_t K, const int32_t* slots,
                               const Adapter* const* table, int64_t table_size, void* product, int64_t stride_product) {
    TYPED(kind)
        add_adapters(static_cast<const T*>(x), stride, rows, K, slots, table, table_size, static_cast<T*>(product),
                     stride_product);
    END
}

EXPORT void infer_rms_norm(int kind, const void* x, int64_t stride_row, int64_t stride_head, int64_t rows,
                           int64_t heads, int64_t width, const void* weight, float eps, int unit_offset,
                           const void* residual, void* out, void* total) {
    TYPED(kind)
        rms_norm(static_cast<const T*>(x), stride_row, stride_head, rows, heads, width, static_cast<const T*>(weight),
                 eps, unit_offset != 0, static_cast<const T*>(residual), static_cast<T*>(out), static_cast<T*>(total));
    END
}

EXPORT void infer_rope_store_kv(int kind, const void* q, int64_t stride_q, int64_t stride_qh, const void* k,
                                int64_t stride_k, int64_t stride_kh, const void* v, int64_t stride_v,
                                int64_t stride_vh, const float* cos, const float* sin, int64_t stride_angle,
                                const void* q_weight, const void* k_weight, float eps, int unit_offset,
                                const int64_t* places, int64_t tokens, int64_t H, int64_t K, int64_t E, void* out,
                                void* k_cache, float* k_scales, void* v_cache, float* v_scales) {
    TYPED(kind)
        rope_store_kv(static_cast<const T*>(q), stride_q, stride_qh, static_cast<const T*>(k), stride_k, stride_kh,
                      static_cast<const T*>(v), stride_v, stride_vh, cos, sin, stride_angle,
                      HeadNorms<T>{static_cast<const T*>(q_weight), static_cast<const T*>(k_weight), eps, unit_offset != 0},
                      places, tokens, H, K, E, static_cast<T*>(out), Stored{k_cache, k_scales}, Stored{v_cache, v_scales});
    END
}

EXPORT void infer_gated(int kind, const void* gate, int64_t stride_gate, const void* up, int64_t stride_up, int64_t rows,
                        int64_t width, int activation, void* out) {
    TYPED(kind)
        gated_rows(static_cast<const T*>(gate), stride_gate, static_cast<const T*>(up), stride_up, rows, width,
                   Gate(activation), static_cast<T*>(out));
    END
}

EXPORT void infer_extend_attention(int kind, const void* q, int64_t stride_q, int64_t stride_qh, const void* k_cache,
                                   const float* k_scales, const void* v_cache, const float* v_scales, void* out,
                                   const int32_t* starts, const int32_t* offsets, const int32_t* table,
                                   int64_t stride_table, int64_t sequences, int64_t H, int64_t K, int64_t E,
                                   int64_t block_size, int64_t window, float scale, float soft_cap, const float* sinks) {
    TYPED(kind)
        auto attend = [&](auto stored) {
            using S = typename decltype(stored)::type;
            Attention<T, S>{static_cast<const T*>(q), static_cast<const S*>(k_cache), static_cast<const S*>(v_cache),
                            k_scales, v_scales, static_cast<T*>(out), starts, offsets, table, stride_q, stride_qh,
                            stride_table, H, K, E, block_size, window, scale, soft_cap, sinks}
                .run(sequences);
        };
        if (k_scales)
            attend(Type<int8_t>{});
        else
            attend(type);
    END
}

EXPORT void infer_causal_conv(int kind, const void* x, int64_t stride, int64_t tokens, int64_t C, const void* weight,
                              const void* bias, int64_t W, int with_silu, void* states, int64_t stride_state,
                              const int32_t* offsets, const int64_t* read, const int64_t* save, int64_t sequences,
                              void* out) {
    TYPED(kind)
        causal_conv(static_cast<const T*>(x), stride, tokens, C, static_cast<const T*>(weight),
                    static_cast<const T*>(bias), W, with_silu != 0, static_cast<T*>(states), stride_state,
                    static_cast<T*>(out), StateRows{offsets, read, save, sequences});
    END
}

EXPORT void infer_gated_delta_rule(int kind, const void* qkv, int64_t stride, const void* a, int64_t stride_a,
                                   const void* b, int64_t stride_b, int64_t tokens, int64_t key_heads, int64_t H,
                                   int64_t K, int64_t V, const float* rate, const float* dt_bias, int channel_decay,
                                   float max_beta, float* states, int64_t stride_state, const int32_t* offsets,
                                   const int64_t* read, const int64_t* save, int64_t sequences, void* out) {
    TYPED(kind)
        auto rule = channel_decay ? gated_delta_rule<true, T> : gated_delta_rule<false, T>;
        rule(static_cast<const T*>(qkv), stride, static_cast<const T*>(a), stride_a, static_cast<const T*>(b), stride_b,
             tokens, key_heads, rate, dt_bias, max_beta,
             Recurrent<T>{states, stride_state, H, K, V, static_cast<T*>(out), StateRows{offsets, read, save, sequences}});
    END
}

EXPORT void infer_state_space(int kind, const void* xbc, int64_t stride, const void* dt, int64_t stride_dt,
                              int64_t tokens, int64_t groups, int64_t H, int64_t N, int64_t P, const float* rate,
                              const float* dt_bias, const float* skip, float dt_min, float dt_max, float* states,
                              int64_t stride_state, const int32_t* offsets, const int64_t* read, const int64_t* save,
                              int64_t sequences, void* out) {
    TYPED(kind)
        state_space(static_cast<const T*>(xbc), stride, static_cast<const T*>(dt), stride_dt, tokens, groups, rate,
                    dt_bias, skip, dt_min, dt_max,
                    Recurrent<T>{states, stride_state, H, N, P, static_cast<T*>(out),
                                 StateRows{offsets, read, save, sequences}});
    END
}

EXPORT void infer_gated_rms_norm(int kind, const void* x, int64_t stride, const void* gate, int64_t stride_gate,
                                 int64_t tokens, int64_t D, const void* weight, int64_t W, float eps, int64_t group,
                                 int gate_first, void* out) {
    TYPED(kind)
        gated_rms_norm(static_cast<const T*>(x), stride, static_cast<const T*>(gate), stride_gate, tokens, D,
                       static_cast<const T*>(weight), W, eps, group, gate_first != 0, static_cast<T*>(out));
    END
}

EXPORT void infer_sample(int kind, const void* logits, int64_t rows, int64_t size, const float* temperature,
                         const int64_t* top_k, const float* top_p, const float* min_p, const double* uniform,
                         int64_t* out) {
    TYPED(kind) sample(static_cast<const T*>(logits), rows, size, temperature, top_k, top_p, min_p, uniform, out); END
}

EXPORT void* infer_tape() { return new Tape; }

EXPORT void infer_free_tape(void* tape) { delete static_cast<Tape*>(tape); }

// Records this thread's calls on ``tape`` from now on; null stops recording.
EXPORT void infer_record(void* tape) { recording = static_cast<Tape*>(tape); }

EXPORT int64_t infer_tape_length(void* tape) { return int64_t(static_cast<Tape*>(tape)->size()); }

EXPORT void infer_replay(void* tape, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) (*static_cast<Tape*>(tape))[i]();
}
