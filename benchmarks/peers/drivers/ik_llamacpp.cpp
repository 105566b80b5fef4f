// Times ik_llama.cpp on a GGUF file: FILE VOCABULARY, and a cell per line of standard input, "batch prompt steps".
// Prints a line of JSON for each, as the other drivers do.
#include <llama.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

using Clock = std::chrono::steady_clock;

static double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

struct Item {
    int position, sequence;
    bool wanted;
};

int main(int argc, char** argv) {
    if (argc != 4) return 2;
    const int vocabulary = std::atoi(argv[2]), threads = std::atoi(argv[3]);
    const auto begun = Clock::now();
    llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
    llama_backend_init();
    auto model_params = llama_model_default_params();
    model_params.repack_tensors = true;  // into the rows side by side that its fastest products read
    model_params.use_mmap = false;
    llama_model* model = llama_model_load_from_file(argv[1], model_params);
    if (!model) return 1;
    std::printf("{\"ready_s\": %.3f}\n", since(begun));
    std::fflush(stdout);
    std::mt19937 draw(0);
    llama_batch room = llama_batch_init(2048, 0, 1);
    int batch, prompt, steps;
    while (std::scanf("%d %d %d", &batch, &prompt, &steps) == 3) {
        auto params = llama_context_default_params();
        params.n_ctx = (prompt + steps + 8) * batch;
        params.n_batch = 2048;
        params.n_ubatch = 512;
        params.n_seq_max = batch;
        params.n_threads = params.n_threads_batch = threads;
        params.flash_attn = true;
        llama_context* context = llama_init_from_model(model, params);
        if (!context) return 1;
        const auto forward = [&](const std::vector<Item>& items, size_t from, size_t to) {
            room.n_tokens = static_cast<int>(to - from);
            for (size_t i = from; i < to; ++i) {
                const size_t at = i - from;
                room.token[at] = static_cast<int>(3 + draw() % (vocabulary - 3));
                room.pos[at] = items[i].position;
                room.n_seq_id[at] = 1;
                room.seq_id[at][0] = items[i].sequence;
                room.logits[at] = items[i].wanted;
            }
            if (llama_decode(context, room)) std::exit(1);
        };
        std::vector<Item> items;
        for (int sequence = 0; sequence < batch; ++sequence)
            for (int i = 0; i < prompt; ++i) items.push_back({i, sequence, i == prompt - 1});
        auto start = Clock::now();
        for (size_t from = 0; from < items.size(); from += 2048)
            forward(items, from, std::min(items.size(), from + 2048));
        llama_get_logits(context);  // waits for the result
        const double prefill = since(start);
        std::vector<double> gaps;
        for (int step = 0; step < steps; ++step) {
            items.clear();
            for (int sequence = 0; sequence < batch; ++sequence) items.push_back({prompt + step, sequence, true});
            start = Clock::now();
            forward(items, 0, items.size());
            llama_get_logits(context);
            gaps.push_back(since(start));
        }
        llama_free(context);
        std::sort(gaps.begin(), gaps.end());
        const double median = (gaps[(gaps.size() - 1) / 2] + gaps[gaps.size() / 2]) / 2;
        std::printf("{\"batch\": %d, \"prompt\": %d, \"prefill_s\": %.6f, \"decode_s\": %.6f}\n", batch, prompt, prefill,
                    median);
        std::fflush(stdout);
    }
}
