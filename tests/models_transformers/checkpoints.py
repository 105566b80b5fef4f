"""Tiny checkpoints of architectures that only transformers knows, written by transformers with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models

transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]

VOCAB, LAYERS, POSITIONS = 128, 3, 256
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
OLD: dict[str, Any] = {"n_embd": 64, "n_layer": LAYERS, "n_head": 4, "n_positions": POSITIONS, "n_inner": 112}
EXPERTS: dict[str, Any] = {
    "num_experts": 5,
    "num_local_experts": 5,
    "n_routed_experts": 5,
    "moe_num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_intermediate_size": 48,
    "shared_intermediate_size": 48,
}
ASKED = (
    *("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"),
    *("Ministral3ForCausalLM", "Olmo3ForCausalLM"),
)
"""Architectures that another family knows, too."""
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "GPTNeoXForCausalLM": {"rotary_pct": 0.25},
    "StableLmForCausalLM": {},
    "FalconForCausalLM": {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False, "bias": False},
    "Starcoder2ForCausalLM": {"sliding_window": 9},
    "CohereForCausalLM": {},
    "Cohere2ForCausalLM": {"sliding_window": 9, "head_dim": 16},
    "OlmoForCausalLM": {"clip_qkv": 1.5},
    "Olmo3ForCausalLM": {"sliding_window": 9},
    "PhiForCausalLM": {"partial_rotary_factor": 0.5},
    "NemotronForCausalLM": {"head_dim": 16},
    "GlmForCausalLM": {"head_dim": 16},
    "GPT2LMHeadModel": OLD,
    "GPTBigCodeForCausalLM": OLD,
    "GPTJForCausalLM": OLD | {"rotary_dim": 8},
    "CodeGenForCausalLM": OLD | {"rotary_dim": 8},
    "OPTForCausalLM": {"ffn_dim": 112, "word_embed_proj_dim": 64},
    "BloomForCausalLM": {"n_layer": LAYERS, "n_head": 4},
    "MptForCausalLM": {"d_model": 64, "n_layers": LAYERS, "n_heads": 4, "max_seq_len": POSITIONS},
    "PersimmonForCausalLM": {},
    "HeliumForCausalLM": {"head_dim": 16},
    "ArceeForCausalLM": {},
    "Ernie4_5ForCausalLM": {"head_dim": 16},
    "HunYuanDenseV1ForCausalLM": {"head_dim": 16},
    "ApertusForCausalLM": {},
    "GemmaForCausalLM": {"head_dim": 16},
    "VaultGemmaForCausalLM": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 9},
    "CwmForCausalLM": {"head_dim": 16, "sliding_window": 9},
    "NanoChatForCausalLM": {"head_dim": 16},
    "BitNetForCausalLM": {},
    "BioGptForCausalLM": {},
    "Jais2ForCausalLM": {"head_dim": 16},
    "HyperCLOVAXForCausalLM": {"head_dim": 16},
    "Ministral3ForCausalLM": {"head_dim": 16},
    "MiniCPM3ForCausalLM": LATENT,
    "DiffLlamaForCausalLM": {"head_dim": 16},
    "ModernBertDecoderForCausalLM": {"local_attention": 9},
    "DogeForCausalLM": {"head_dim": 16},
    "GraniteMoeSharedForCausalLM": EXPERTS,
    "JetMoeForCausalLM": EXPERTS | {"kv_channels": 16},
    "DeepseekV2ForCausalLM": LATENT | EXPERTS | {"topk_method": "greedy"},
    "DeepseekV3ForCausalLM": LATENT | EXPERTS,
    "Glm4MoeLiteForCausalLM": LATENT | EXPERTS,
    "PhimoeForCausalLM": EXPERTS,
    "Ernie4_5_MoeForCausalLM": EXPERTS,
    "DbrxForCausalLM": {"d_model": 64, "n_layers": LAYERS, "n_heads": 4, "max_seq_len": POSITIONS},
    "HunYuanMoEV1ForCausalLM": EXPERTS | {"head_dim": 16, "moe_topk": 2},
    "Dots1ForCausalLM": EXPERTS | {"head_dim": 16, "n_group": 1, "topk_group": 1},
    "FlexOlmoForCausalLM": EXPERTS,
    "MambaForCausalLM": {},
    "BambaForCausalLM": {"mamba_n_heads": 4, "mamba_d_head": 32},
    "RecurrentGemmaForCausalLM": {},
    "Lfm2ForCausalLM": {"layer_types": ["conv", "full_attention", "conv"]},
    "XGLMForCausalLM": {"d_model": 64, "num_layers": LAYERS, "attention_heads": 4, "ffn_dim": 112},
    "GPTNeoForCausalLM": {
        "num_layers": LAYERS,
        "num_heads": 4,
        "attention_types": [[["global", "local", "global"], 1]],
    },
    "Llama4ForCausalLM": EXPERTS | {"head_dim": 16, "intermediate_size_mlp": 112, "attention_chunk_size": 16},
    "BartForCausalLM": {"d_model": 64, "decoder_layers": 2, "encoder_layers": 2, "decoder_attention_heads": 4},
}


def _made(architecture: str, more: dict[str, Any]) -> Any:
    made = getattr(transformers, architecture).config_class(**SIZES | ARCHITECTURES.get(architecture, {}) | more)
    made.architectures = [architecture]
    return made


def config(architecture: str, **more: Any) -> dict[str, Any]:
    """config.json."""
    fields: dict[str, Any] = json.loads(_made(architecture, more).to_json_string())
    return fields


def write(folder: Path, architecture: str, dtype: torch.dtype = torch.float32, seed: int = 0, **more: Any) -> Path:
    """A checkpoint with a tokenizer of one token per letter. Raises what transformers raises."""
    torch.manual_seed(seed)
    model = getattr(transformers, architecture)(_made(architecture, more))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.copy_(0.2 * noise + name.endswith("weight"))
            else:
                parameter.copy_(noise * (1.5 / parameter.shape[-1] ** 0.5))
    model.to(dtype).save_pretrained(folder)
    letters = Tokenizer(models.WordLevel({chr(0x100 + id): id for id in range(VOCAB)}))
    letters.decoder = decoders.Fuse()
    letters.save(str(folder / "tokenizer.json"))
    return folder


def family_of(name: str) -> str:
    """``model.family``, by which modules of transformers run an architecture."""
    return "transformers" if name in ASKED else "auto"
