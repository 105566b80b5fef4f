// Tries one compiled level of the kernels without Python, so that an emulator can run it: `native LIBRARY`. Products,
// norms, attention and a gated delta rule are compared with sums in double, and each row alone with the same row among
// others, to the bit.
// Prints a hash of what int8 products yield, which is the same for all levels.
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

void* library;
int failures = 0;

template <class... A>
void call(const char* name, A... args) {
    auto function = reinterpret_cast<void (*)(A...)>(dlsym(library, (std::string("infer_") + name).c_str()));
    if (!function) std::printf("no %s\n", name), std::exit(2);
    function(args...);
}

template <class... A>
int64_t ask(const char* name, A... args) {
    return reinterpret_cast<int64_t (*)(A...)>(dlsym(library, (std::string("infer_") + name).c_str()))(args...);
}

uint64_t state = 1;
float random_value() {  // from -1 to 1
    state = state * 6364136223846793005u + 1442695040888963407u;
    return float(int32_t(state >> 32)) * 0x1p-31f;
}

// Values as the kernels get them: floats, or the upper halves of floats.
struct Array {
    int kind;
    std::vector<uint8_t> bytes;

    Array(int kind, int64_t size, bool filled = true) : kind(kind), bytes(size * width()) {
        for (int64_t i = 0; filled && i < size; i++) set(i, random_value());
    }
    int64_t width() const { return kind ? 2 : 4; }
    int64_t size() const { return int64_t(bytes.size()) / width(); }
    void set(int64_t i, float value) {
        uint32_t bits;
        std::memcpy(&bits, &value, 4);
        if (kind) bits >>= 16;
        std::memcpy(&bytes[i * width()], &bits, width());
    }
    double operator[](int64_t i) const {
        uint32_t bits = 0;
        std::memcpy(&bits, &bytes[i * width()], width());
        if (kind) bits <<= 16;
        float value;
        std::memcpy(&value, &bits, 4);
        return value;
    }
    void* at(int64_t i) { return &bytes[i * width()]; }
};

int32_t two(uint32_t* out) {
    *out = 2;
    return 0;
}

void near(const char* what, const Array& found, const std::vector<double>& expected) {
    double apart = 0, all = 0;
    for (int64_t i = 0; i < found.size(); i++) {
        apart += std::pow(found[i] - expected[i], 2), all += expected[i] * expected[i];
    }
    if (std::sqrt(apart) <= (found.kind ? 1e-2 : 2e-6) * std::sqrt(all)) return;
    std::printf("%s, kind %d: off by %g of %g\n", what, found.kind, std::sqrt(apart), std::sqrt(all)), failures++;
}

void same(const char* what, const Array& a, int64_t from_a, const Array& b, int64_t from_b, int64_t count) {
    if (!std::memcmp(&a.bytes[from_a * a.width()], &b.bytes[from_b * b.width()], count * a.width())) return;
    std::printf("%s, kind %d: other bits than alone\n", what, a.kind), failures++;
}

void products(int kind, int64_t rows, int64_t N, int64_t K, int gate) {
    Array x(kind, rows * K), w(kind, N * K), out(kind, rows * (gate ? N / 2 : N), false);
    std::vector<uint32_t> packed(ask("packed_words", kind, N, K, int(gate != 0)));
    call("pack", kind, (const void*)w.at(0), N, K, int(gate != 0), packed.data());
    auto run = [&](int64_t row, int64_t count, Array& to) {
        call("linear", kind, (const void*)x.at(row * K), K, count, (const uint32_t*)packed.data(), N, K, (const void*)nullptr,
             gate, to.at(0));
    };
    run(0, rows, out);
    int64_t columns = gate ? N / 2 : N;
    std::vector<double> expected(rows * columns);
    for (int64_t m = 0; m < rows; m++)
        for (int64_t n = 0; n < columns; n++) {
            double open = 0, through = 0;
            for (int64_t k = 0; k < K; k++) {
                open += x[m * K + k] * w[n * K + k];
                if (gate) through += x[m * K + k] * w[(columns + n) * K + k];
            }
            expected[m * columns + n] = gate ? open / (1 + std::exp(-open)) * through : open;
        }
    near(gate ? "gated linear" : "linear", out, expected);
    Array one(kind, columns, false);
    for (int64_t m = 0; m < rows; m++) run(m, 1, one), same("linear", out, m * columns, one, 0, columns);
}

struct Grouped {
    uint8_t* packed;
    int64_t N, K, group;
    int32_t bits, scales, minimum, table, int8, gated;
    float values[16];
};

// The hash of a product by a weight of ``bits`` with activations rounded to int8.
uint64_t int8_product(int bits) {
    int64_t rows = 9, N = 45, K = 96, group = 32, groups = K / group;
    Array x(0, rows * K), w(0, N * K), out(0, rows * N, false);
    std::vector<uint8_t> codes(N * K * bits / 8), scales(N * groups * 2);
    call("quantize", 0, (const void*)w.at(0), N, K, group, bits, codes.data(), (void*)scales.data());
    Grouped weight{nullptr, N, K, group, bits, 1, 0, 0, 1, 0, {}};
    std::vector<uint8_t> packed(ask("grouped_bytes", (const Grouped*)&weight) + 64);
    weight.packed = packed.data();
    call("pack_grouped", 0, (const Grouped*)&weight, (const uint8_t*)codes.data(), (const void*)scales.data(),
         (const void*)nullptr, groups);
    call("grouped_linear", 0, (const Grouped*)&weight, (const void*)x.at(0), K, rows, (const void*)nullptr, 0, out.at(0));
    std::vector<double> expected(rows * N);
    for (int64_t m = 0; m < rows; m++)
        for (int64_t n = 0; n < N; n++)
            for (int64_t k = 0; k < K; k++) {
                int64_t i = n * K + k;
                int code = bits == 8 ? codes[i] - 128 : int(codes[i / 2] >> (i % 2 * 4) & 15) - 8;
                uint32_t scale = (scales[i / group * 2] | scales[i / group * 2 + 1] << 8) << 16;
                float real;
                std::memcpy(&real, &scale, 4);
                expected[m * N + n] += x[m * K + k] * code * real;
            }
    double apart = 0, all = 0;
    for (int64_t i = 0; i < rows * N; i++) apart += std::pow(out[i] - expected[i], 2), all += expected[i] * expected[i];
    if (!(apart < 1e-3 * all)) std::printf("int8 product of %d bits: off by %g of %g\n", bits, apart, all), failures++;
    uint64_t hash = 14695981039346656037u;
    for (uint8_t byte : out.bytes) hash = (hash ^ byte) * 1099511628211u;
    return hash;
}

void norm(int kind) {
    int64_t rows = 3, width = 77;
    Array x(kind, rows * width), weight(kind, width), out(kind, rows * width, false);
    call("rms_norm", kind, (const void*)x.at(0), width, width, rows, int64_t(1), width, (const void*)weight.at(0), 1e-5f, 0,
         (const void*)nullptr, out.at(0), (void*)nullptr);
    std::vector<double> expected(rows * width);
    for (int64_t m = 0; m < rows; m++) {
        double squares = 0;
        for (int64_t e = 0; e < width; e++) squares += x[m * width + e] * x[m * width + e];
        for (int64_t e = 0; e < width; e++)
            expected[m * width + e] = x[m * width + e] / std::sqrt(squares / width + 1e-5) * weight[e];
    }
    near("rms_norm", out, expected);
}

// One sequence over shuffled blocks: the last ``count`` positions of ``length`` attend, at once and one by one.
void attention(int kind, int64_t length, int64_t count, int64_t window, int64_t G = 3, int64_t E = 40) {
    int64_t K = 2, H = G * K, block = 16, blocks = (length + block - 1) / block;
    Array q(kind, count * H * E), k(kind, blocks * block * K * E), v(kind, blocks * block * K * E);
    Array out(kind, q.size(), false);
    std::vector<int32_t> table(blocks);
    for (int64_t b = 0; b < blocks; b++) table[b] = int32_t(blocks - 1 - b);
    float scale = 1 / std::sqrt(float(E));
    auto run = [&](int64_t first, int64_t rows, Array& to) {
        int32_t start = int32_t(length - count + first), offsets[2] = {0, int32_t(rows)};
        call("extend_attention", kind, (const void*)q.at(first * H * E), H * E, E, (const void*)k.at(0),
             (const float*)nullptr, (const void*)v.at(0), (const float*)nullptr, to.at(0), (const int32_t*)&start,
             (const int32_t*)offsets, (const int32_t*)table.data(), blocks, int64_t(1), H, K, E, block, window, scale, 0.0f,
             (const float*)nullptr);
    };
    run(0, count, out);
    std::vector<double> expected(out.size());
    for (int64_t t = 0; t < count; t++)
        for (int64_t h = 0; h < H; h++) {
            int64_t last = length - count + t, first = window ? std::max<int64_t>(0, last - window + 1) : 0;
            double total = 0;
            for (int64_t p = first; p <= last; p++) {
                int64_t place = ((table[p / block] * block + p % block) * K + h / (H / K)) * E;
                double score = 0;
                for (int64_t e = 0; e < E; e++) score += q[(t * H + h) * E + e] * k[place + e];
                double weight = std::exp(score * scale);
                total += weight;
                for (int64_t e = 0; e < E; e++) expected[(t * H + h) * E + e] += weight * v[place + e];
            }
            for (int64_t e = 0; e < E; e++) expected[(t * H + h) * E + e] /= total;
        }
    near("attention", out, expected);
    Array one(kind, H * E, false);
    for (int64_t t = 0; t < count; t++) run(t, 1, one), same("attention", out, t * H * E, one, 0, H * E);
}

// A gated delta rule over one sequence, at once and token by token, each of which begins where the one before ended. A
// head's state decays as a whole, or each of its rows by itself.
void delta_rule(int kind, int64_t K, int64_t V, bool by_row, float max_beta) {
    int64_t tokens = 20, H = 2, width = 2 * K + H * V, decays = by_row ? K : 1;
    Array qkv(kind, tokens * width), a(kind, tokens * H * decays), b(kind, tokens * H), out(kind, tokens * H * V, false);
    Array states(0, 2 * H * K * V);
    Array begun = states;
    float rate[2] = {0.3f, 1.2f};
    std::vector<float> dt_bias(H * decays);
    for (int64_t i = 0; i < H * decays; i++) dt_bias[i] = i < decays ? 0.5f : -0.5f;
    auto run = [&](int64_t first, int64_t count, int64_t row, Array& from, Array& to) {
        int32_t offsets[2] = {0, int32_t(count)};
        int64_t read = first ? row : 0;
        std::vector<int64_t> save(count, -1);
        save[count - 1] = row;
        call("gated_delta_rule", kind, (const void*)qkv.at(first * width), width, 
             (const void*)a.at(first * H * decays), H * decays, (const void*)b.at(first * H), H, count, int64_t(1), H, K,
             V, (const float*)rate, (const float*)dt_bias.data(), int(by_row), max_beta, (float*)from.at(0), H * K * V, (const int32_t*)offsets, (const int64_t*)&read, (const int64_t*)save.data(),
             int64_t(1), to.at(0));
    };
    run(0, tokens, 1, states, out);
    std::vector<double> expected(out.size()), state(H * K * V);
    for (int64_t i = 0; i < H * K * V; i++) state[i] = begun[i];
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < H; h++) {
            double q2 = 1e-6, k2 = 1e-6;
            for (int64_t k = 0; k < K; k++)
                q2 += std::pow(qkv[t * width + k], 2), k2 += std::pow(qkv[t * width + K + k], 2);
            auto decay = [&](int64_t k) {
                int64_t i = by_row ? h * K + k : h;
                return std::exp(-rate[h] * std::log1p(std::exp(a[t * H * decays + i] + dt_bias[i])));
            };
            double beta = max_beta / (1 + std::exp(-b[t * H + h]));
            for (int64_t v = 0; v < V; v++) {
                double known = 0;
                for (int64_t k = 0; k < K; k++)
                    known += (state[(h * K + k) * V + v] *= decay(k)) * qkv[t * width + K + k] / std::sqrt(k2);
                double change = (qkv[t * width + 2 * K + h * V + v] - known) * beta;
                for (int64_t k = 0; k < K; k++) {
                    double& s = state[(h * K + k) * V + v];
                    s += qkv[t * width + K + k] / std::sqrt(k2) * change;
                    expected[(t * H + h) * V + v] += s * qkv[t * width + k] / std::sqrt(q2 * double(K));
                }
            }
        }
    near("gated delta rule", out, expected);
    Array one(kind, H * V, false), moving = begun;
    for (int64_t t = 0; t < tokens; t++) run(t, 1, 1, moving, one), same("delta", out, t * H * V, one, 0, H * V);
    same("a state", states, H * K * V, moving, H * K * V, H * K * V);
}

}  // namespace

int main(int count, char** arguments) {
    library = count == 2 ? dlopen(arguments[1], RTLD_NOW) : nullptr;
    if (!library) return std::printf("%s\n", dlerror()), 2;
    std::printf("features: %d\n", int(ask("features")));
    call("bind", &two);  // threads
    for (int kind = 0; kind < 2; kind++) {
        for (int64_t rows : {1, 7, 100})
            for (int64_t N : {2, 38, 130})
                for (int64_t K : {1, 33, 257})
                    for (int gate = 0; gate < 2; gate++) products(kind, rows, N, K, gate);
        norm(kind);
        attention(kind, 5, 5, 0);
        attention(kind, 700, 40, 0);
        attention(kind, 700, 40, 100);
        delta_rule(kind, 16, 8, false, 1);
        delta_rule(kind, 13, 101, false, 2);
        delta_rule(kind, 16, 8, true, 1);
        delta_rule(kind, 13, 101, true, 2);
    }
    for (int kind = 0; kind < 2; kind++)
        for (int64_t G = 1; G <= 7; G++)  // few rows take another way than many, if a head's size is one of these
            for (int64_t E : {64, 192}) attention(kind, 150, 30, G % 2 ? 0 : 70, G, E);
    for (int bits : {4, 8}) std::printf("int8, %d bits: %016llx\n", bits, (unsigned long long)int8_product(bits));
    return failures != 0;
}
