"""Times llama.cpp on a checkpoint, which it gets as a GGUF file without a vocabulary: CHECKPOINT CELLS [TYPE], where
CELLS is JSON, [[batch, prompt tokens, decode steps], ...]; then standard input has one of them per line. With a TYPE
(Q8_0, Q4_K_M, ...), its own quantizer makes the file first."""

from __future__ import annotations

import json
import os
import statistics
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

ARCHITECTURES = {"llama": "llama", "qwen3": "qwen3", "granitemoe": "granitemoe", "olmoe": "olmoe"}
ARCHITECTURES |= {"qwen3_5_text": "qwen35"}
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
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.output_linear": "ffn_down_exps",
}
DELTA_NET = {
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.A_log": "ssm_a",
    "post_attention_layernorm": "post_attention_norm",
}
"""Names that differ in models with gated delta nets. Norms and the order of V's heads are left as they are, which is
right for times only: a real file has 1 added to the norms, and V's heads in another order."""
FUSED = "block_sparse_moe.input_linear"
"""Gate and up projections of all experts."""
WHOLE = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}


def tensors(file: Path) -> Any:
    """Each tensor's name, shape and raw bfloat16 words, from a safetensors file."""
    words = np.memmap(file, dtype=np.uint8, mode="r")
    (size,) = struct.unpack("<Q", words[:8].tobytes())
    for name, entry in json.loads(words[8 : 8 + size].tobytes()).items():
        if name != "__metadata__":
            begin, end = (8 + size + offset for offset in entry["data_offsets"])
            yield name, entry["shape"], words[begin:end]


def named(folder: Path, names: Mapping[str, str], experts: int | None) -> Iterator[tuple[str, Any]]:
    """The tensors as llama.cpp has them, by its names, in words of bfloat16: a layer's experts stacked, and gate and up
    projections apart."""
    apart: dict[str, dict[int, Any]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for key, shape, raw in tensors(file):
            words, parts = (
                raw.view(np.uint16).reshape(shape),
                key.removeprefix("model.").removesuffix(".weight").split(".", 2),
            )
            if len(parts) == 1:
                yield WHOLE[parts[0]], words
            elif parts[2].startswith("mlp.experts."):
                index, part = parts[2].removeprefix("mlp.experts.").split(".")
                name = f"blk.{parts[1]}.{names[f'mlp.{part}']}_exps"
                own = apart.setdefault(name, {})
                own[int(index)] = words
                if len(own) == experts:
                    yield name, np.stack([own[i] for i in range(experts)])
                    del apart[name]
            elif parts[2] == FUSED:
                for part, half in zip(("ffn_gate_exps", "ffn_up_exps"), np.split(words, 2, axis=1), strict=True):
                    yield f"blk.{parts[1]}.{part}", np.ascontiguousarray(half)
            else:
                yield f"blk.{parts[1]}.{names[parts[2]]}", words


def write_gguf(folder: Path, out: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(str(out), ARCHITECTURES[config["model_type"]], use_temp_file=True)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    rope = {"rope_theta": config.get("rope_theta")} | (config.get("rope_parameters") or {})
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(config["head_dim"] * rope.get("partial_rotary_factor", 1)))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    if experts := config.get("num_experts", config.get("num_local_experts")):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if config["model_type"] == "granitemoe":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    names = LAYER
    if interval := config.get("full_attention_interval"):
        names = LAYER | DELTA_NET
        heads = config["linear_num_value_heads"]
        writer.add_full_attention_interval(interval)
        writer.add_rope_dimension_sections([11, 11, 10, 0])
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_inner_size(heads * config["linear_value_head_dim"])
        writer.add_ssm_time_step_rank(heads)
    for name, words in named(folder, names, experts):
        whole = name if name.endswith((".bias", "ssm_a")) else f"{name}.weight"
        if words.ndim == 1 or name.endswith(("ffn_gate_inp", "ssm_conv1d")):  # llama.cpp has these as float32
            taps = words.squeeze(1) if words.ndim == 3 else words
            floats = (taps.astype(np.uint32) << 16).view(np.float32)
            writer.add_tensor(whole, -np.exp(floats) if name.endswith("ssm_a") else floats)
        else:
            writer.add_tensor(whole, words.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize(file: Path, kind: str) -> Path:
    out = file.with_name(f"model-{kind}.gguf")
    if not out.exists():
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
        if llama_cpp.llama_model_quantize(str(file).encode(), str(out).encode(), params):
            raise RuntimeError(f"llama.cpp cannot quantize {file} to {kind}")
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
        file = quantize(file, sys.argv[3])
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    began = time.perf_counter()
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
    print(json.dumps({"ready_s": time.perf_counter() - began}), flush=True)
    for batch, prompt, count in map(json.loads, sys.stdin):
        print(json.dumps(run(model, batch, prompt, count, vocab)), flush=True)


if __name__ == "__main__":
    main()
