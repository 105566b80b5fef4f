"""Times llama.cpp on a checkpoint, which it gets as a GGUF file without a vocabulary: CHECKPOINT CELLS [TYPE], where
CELLS is JSON, [[batch, prompt tokens, decode steps], ...]; then standard input has one of them per line. With a TYPE
(Q8_0, Q4_K_M, ...), its own quantiser makes the file first."""

from __future__ import annotations

import json
import os
import statistics
import struct
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3"}
LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
WHOLE = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}


def tensors(file: Path) -> Any:
    """Each tensor's name, shape and raw bfloat16 words, from a safetensors file."""
    words = np.memmap(file, dtype=np.uint8, mode="r")
    (size,) = struct.unpack("<Q", words[:8].tobytes())
    for name, entry in json.loads(words[8 : 8 + size].tobytes()).items():
        if name != "__metadata__":
            begin, end = (8 + size + offset for offset in entry["data_offsets"])
            yield name, entry["shape"], words[begin:end]


def write_gguf(folder: Path, out: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(str(out), ARCHITECTURES[config["model_type"]])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    for file in sorted(folder.glob("*.safetensors")):
        for key, shape, raw in tensors(file):
            parts = key.removeprefix("model.").removesuffix(".weight").split(".", 2)
            name = WHOLE[parts[0]] if len(parts) == 1 else f"blk.{parts[1]}.{LAYER[parts[2]]}"
            if len(shape) == 1:
                values = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
                writer.add_tensor(f"{name}.weight", values)
            else:
                kind = gguf.GGMLQuantizationType.BF16
                writer.add_tensor(f"{name}.weight", raw.reshape(shape[0], 2 * shape[1]), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantise(file: Path, kind: str) -> Path:
    out = file.with_name(f"model-{kind}.gguf")
    if not out.exists():
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
        if llama_cpp.llama_model_quantize(str(file).encode(), str(out).encode(), params):
            raise RuntimeError(f"llama.cpp cannot quantise {file} to {kind}")
    return out


def run(model: Any, batch: int, prompt: int, count: int, vocab: int) -> dict[str, Any]:
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = (prompt + count + 8) * batch
    params.n_batch, params.n_ubatch, params.n_seq_max = 2048, 512, batch
    params.n_threads = params.n_threads_batch = os.cpu_count()
    context = llama_cpp.llama_init_from_model(model, params)
    room, draw = llama_cpp.llama_batch_init(2048, 0, 1), np.random.default_rng(0)

    def forward(items: list[tuple[int, int, bool]]) -> None:
        """Run a pass over random tokens, each given as (position, sequence, whether its logits are wanted)."""
        room.n_tokens = len(items)
        for i, (position, sequence, wanted) in enumerate(items):
            room.token[i], room.pos[i], room.n_seq_id[i] = int(draw.integers(3, vocab)), position, 1
            room.seq_id[i][0], room.logits[i] = sequence, wanted
        if llama_cpp.llama_decode(context, room):
            raise RuntimeError("llama_decode failed")

    start = time.perf_counter()
    items = [(i, sequence, i == prompt - 1) for sequence in range(batch) for i in range(prompt)]
    for begin in range(0, len(items), 2048):
        forward(items[begin : begin + 2048])
    llama_cpp.llama_get_logits(context)  # waits for the result
    prefill, gaps = time.perf_counter() - start, []
    for step in range(count):
        start = time.perf_counter()
        forward([(prompt + step, sequence, True) for sequence in range(batch)])
        llama_cpp.llama_get_logits(context)
        gaps.append(time.perf_counter() - start)
    llama_cpp.llama_free(context)
    return {"batch": batch, "prompt": prompt, "prefill_s": prefill, "decode_s": statistics.median(gaps)}


def main() -> None:
    folder = Path(sys.argv[1])
    file = folder / "model.gguf"
    if not file.exists():
        write_gguf(folder, file)
    if sys.argv[3:]:
        file = quantise(file, sys.argv[3])
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    began = time.perf_counter()
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
    print(json.dumps({"ready_s": time.perf_counter() - began}), flush=True)
    for batch, prompt, count in map(json.loads, sys.stdin):
        print(json.dumps(run(model, batch, prompt, count, vocab)), flush=True)


if __name__ == "__main__":
    main()
