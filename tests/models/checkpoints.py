"""Tiny checkpoints with random weights, written by ``transformers`` with a tokenizer trained on the spot."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]

Family = Literal[
    "llama",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "mistral",
    "mixtral",
    "phi3",
    "olmo2",
    "olmo3",
    "olmo_hybrid",
    "olmoe",
    "gemma3",
    "gemma3_vision",
    "gemma4",
    "gemma4_vision",
    "gemma4_unified",
    "gemma4_unified_vision",
    "mistral3",
    "qwen3_vl",
    "qwen3_5",
    "qwen3_5_vision",
    "qwen3_5_moe",
    "qwen3_next",
    "ministral",
    "ministral3",
    "ministral3_vision",
    "gpt_oss",
    "glm4_moe",
    "glm4_moe_lite",
    "deepseek_v2",
    "deepseek_v3",
    "youtu",
    "kimi_linear",
    "granite",
    "granite_moe",
    "granite_swa",
    "smollm3",
    "glm4",
    "exaone4",
    "seed_oss",
    "gemma2",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "laguna",
    "lfm2_vl",
    "lfm3_vl",
    "granite_hybrid",
    "nemotron_h",
    "falcon_h1",
    "bamba",
]
Rope = Literal["default", "linear", "llama3", "dynamic", "yarn", "longrope"]

VOCAB, HEADS, LAYERS, MAX_POSITIONS, EOS = 320, 4, 4, 512, 0
TEXT = """The kettle began it. Do not tell me what the neighbors said: the kettle began it, full five minutes
by the little clock in the corner before the cricket uttered a chirp. If it had not been so, and it was so,
the clock would have finished striking, and the small mower at the top of it would have cut down half an acre
of imaginary grass."""
ROPES: dict[Rope, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 8.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 8.0,
    },
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
        "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 16.0],
        "original_max_position_embeddings": 64,
    },
}

DELTA: dict[str, Any] = {
    "head_dim": 16,
    "rms_norm_eps": 1e-2,  # a head's first results may be small differences, whose rounding a norm would magnify
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}
TEMPERED = ROPES["yarn"] | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
LATENT = {"kv_lora_rank": 20, "q_lora_rank": 28, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
MAMBA = {"mamba_n_heads": 6, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 64}


@functools.cache
def tokenizer() -> Tokenizer:
    """Byte-level pairs: every text has an encoding and every id below ``VOCAB`` a decoding. 0 ends a text."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<eos>", "<bos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator([TEXT], trainer)
    assert trained.get_vocab_size() == VOCAB
    return trained


def write_checkpoint(
    folder: Path,
    family: Family,
    *,
    tied: bool = True,
    kv_heads: int = 2,
    rope: Rope = "default",
    window: int | None = None,
    layer_types: Sequence[str] | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    sharded: bool = False,
    **config: Any,
) -> Path:
    """A checkpoint in ``folder``, which is made. ``window`` slides in every other layer unless ``layer_types``
    says otherwise; further arguments are fields of its config. The weights are large enough for every part
    to matter."""
    model = make_model(
        family,
        tied=tied,
        kv_heads=kv_heads,
        rope=rope,
        window=window,
        layer_types=layer_types,
        seed=seed,
        **config,
    )
    model.to(dtype).save_pretrained(folder, max_shard_size="60KB" if sharded else "1GB")
    tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def make_model(
    family: Family,
    *,
    tied: bool,
    kv_heads: int,
    rope: Rope,
    window: int | None,
    layer_types: Sequence[str] | None,
    seed: int,
    **config: Any,
) -> Any:
    """A ``transformers`` model with random weights."""
    made: Any
    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": tied,
        "eos_token_id": EOS,
        "bos_token_id": 1,
        "pad_token_id": None,
        "rope_parameters": dict(ROPES[rope]),
        "attn_implementation": "eager",
    }
    if window is not None:
        fields |= {
            "sliding_window": window,
            "layer_types": list(layer_types or ["sliding_attention", "full_attention"] * (LAYERS // 2)),
        }
    whole: dict[str, Any] = {"tie_word_embeddings": tied, "eos_token_id": EOS, "attn_implementation": "eager"}
    seen: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 16}
    seen |= {"num_attention_heads": 1}
    match family:
        case "llama":
            made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields | config))
        case "qwen3":
            fields |= {"head_dim": 16, "use_sliding_window": window is not None}
            made = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**fields | config))
        case "qwen2":
            fields |= {"use_sliding_window": window is not None}
            made = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**fields | config))
        case "mistral":
            fields |= {"head_dim": 16, "sliding_window": window}
            fields.pop("layer_types", None)
            made = transformers.MistralForCausalLM(transformers.MistralConfig(**fields | config))
        case "phi3":
            fields |= {"original_max_position_embeddings": 64, "sliding_window": window}
            fields.pop("layer_types", None)
            made = transformers.Phi3ForCausalLM(transformers.Phi3Config(**fields | config))
        case "olmo2":
            made = transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**fields | config))
        case "olmo3":
            ropes = {"full_attention": ROPES["yarn"], "sliding_attention": ROPES["default"]}
            fields |= {"sliding_window": 9, "rope_parameters": ropes}
            made = transformers.Olmo3ForCausalLM(transformers.Olmo3Config(**fields | config))
        case "olmo_hybrid":
            fields |= DELTA | {"pad_token_id": 0}
            if layer_types:
                fields["layer_types"] = list(layer_types)
            made = transformers.OlmoHybridForCausalLM(transformers.OlmoHybridConfig(**fields | config))
        case "granite_swa":
            fields |= {"sliding_window": 9, "layer_rope_theta": [1e4, 0.0, 1e3, 1e4], "attention_multiplier": 0.4}
            made = transformers.GraniteSWAForCausalLM(transformers.GraniteSWAConfig(**fields | config))
        case "granite":
            factors = {"attention_multiplier": 0.4, "residual_multiplier": 1.4, "logits_scaling": 1.5}
            fields |= {"embedding_multiplier": 0.7, **factors}
            made = transformers.GraniteForCausalLM(transformers.GraniteConfig(**fields | config))
        case "gpt_oss":
            fields |= {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2}
            made = transformers.GptOssForCausalLM(transformers.GptOssConfig(**fields | config))
        case "qwen2_moe":
            fields |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
            fields |= {"shared_expert_intermediate_size": 40}
            made = transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(**fields | config))
        case "glm4_moe":
            fields |= {"head_dim": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_routed_experts": 6}
            fields |= {"routed_scaling_factor": 1.5, "n_shared_experts": 2}
            made = transformers.Glm4MoeForCausalLM(transformers.Glm4MoeConfig(**fields | config))
            for layer in made.model.layers[made.config.first_k_dense_replace :]:
                layer.mlp.gate.e_score_correction_bias.copy_(torch.linspace(-0.3, 0.3, 6))
        case "glm4_moe_lite" | "deepseek_v2" | "deepseek_v3":
            fields |= {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_routed_experts": 6}
            fields |= {"num_key_value_heads": HEADS, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1} | LATENT
            stem = {"glm4_moe_lite": "Glm4MoeLite", "deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3"}[family]
            made = getattr(transformers, f"{stem}ForCausalLM")(
                getattr(transformers, f"{stem}Config")(**fields | config)
            )
            for layer in made.model.layers if family != "deepseek_v2" else ():
                if hasattr(layer.mlp, "gate"):
                    layer.mlp.gate.e_score_correction_bias.copy_(torch.linspace(-0.3, 0.3, 6))
        case "youtu":
            fields |= {"num_key_value_heads": HEADS} | LATENT
            made = transformers.YoutuForCausalLM(transformers.YoutuConfig(**fields | config))
        case "kimi_linear":
            fields |= {"num_key_value_heads": HEADS, "pad_token_id": 0} | LATENT
            fields["layer_types"] = list(layer_types or DELTA["layer_types"])
            fields |= {"linear_num_heads": 3, "linear_head_dim": 16, "q_lora_rank": None, "rms_norm_eps": 1e-2}
            fields |= {"num_experts": 6, "num_experts_per_token": 2, "moe_intermediate_size": 24}
            fields["tie_word_embeddings"] = False  # transformers never ties them
            made = transformers.KimiLinearForCausalLM(transformers.KimiLinearConfig(**fields | config))
            for layer in made.model.layers:
                if hasattr(layer.mlp, "gate"):
                    layer.mlp.gate.e_score_correction_bias.copy_(torch.linspace(-0.3, 0.3, 6))
        case "granite_moe":
            factors = {"attention_multiplier": 0.4, "residual_multiplier": 1.4, "logits_scaling": 1.5}
            fields |= {"embedding_multiplier": 0.7, "num_local_experts": 6, "num_experts_per_tok": 2, **factors}
            made = transformers.GraniteMoeForCausalLM(transformers.GraniteMoeConfig(**fields | config))
        case "smollm3":
            made = transformers.SmolLM3ForCausalLM(transformers.SmolLM3Config(**fields | config))
        case "ministral":
            fields |= {"head_dim": 16, "sliding_window": window}
            made = transformers.MinistralForCausalLM(transformers.MinistralConfig(**fields | config))
        case "seed_oss":
            fields |= {"head_dim": 16}
            made = transformers.SeedOssForCausalLM(transformers.SeedOssConfig(**fields | config))
        case "glm4":
            fields |= {"head_dim": 16}
            made = transformers.Glm4ForCausalLM(transformers.Glm4Config(**fields | config))
        case "exaone4":
            made = transformers.Exaone4ForCausalLM(transformers.Exaone4Config(**fields | config))
        case "gemma2":
            fields |= {"head_dim": 16, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0}
            made = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**fields | config))
        case "qwen3_moe":
            fields |= {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
            made = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**fields | config))
        case "mixtral":
            fields |= {"num_local_experts": 6, "num_experts_per_tok": 2}
            made = transformers.MixtralForCausalLM(transformers.MixtralConfig(**fields | config))
        case "olmoe":
            fields |= {"num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24}
            made = transformers.OlmoeForCausalLM(transformers.OlmoeConfig(**fields | config))
        case "lfm2":
            if "full_attn_idxs" not in config:
                fields |= {"layer_types": layer_types or ["conv", "full_attention", "conv", "conv"]}
            fields |= {"intermediate_size": 108, "block_multiple_of": 8}
            made = transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**fields | config))
        case "lfm2_moe":
            fields |= {"layer_types": ["conv", "full_attention", "conv", "conv"], "num_dense_layers": 1}
            fields |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
            fields |= {"routed_scaling_factor": 1.5}
            made = transformers.Lfm2MoeForCausalLM(transformers.Lfm2MoeConfig(**fields | config))
            for layer in made.model.layers[made.config.num_dense_layers :] if made.config.use_expert_bias else ():
                layer.feed_forward.expert_bias.copy_(torch.linspace(-0.3, 0.3, 6))
        case "lfm3":
            if rope == "default":
                del fields["rope_parameters"]
            if "num_hidden_layers" not in config:
                fields |= {"layer_types": layer_types or ["conv", "sliding_attention", "full_attention", "conv"]}
            fields |= {"head_dim": 16, "sliding_window": 9}
            made = transformers.Lfm3ForCausalLM(transformers.Lfm3Config(**fields | config))
        case "laguna":
            if rope == "default":
                del fields["rope_parameters"]
            fields |= {"head_dim": 16, "sliding_window": 9, "num_experts": 6, "num_experts_per_tok": 2}
            fields |= {"layer_types": ["full_attention", "sliding_attention"] * 2}
            fields |= {"num_attention_heads_per_layer": [HEADS, 2 * HEADS] * 2, "moe_routed_scaling_factor": 1.5}
            fields |= {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
            made = transformers.LagunaForCausalLM(transformers.LagunaConfig(**fields | config))
            for layer in made.model.layers:
                if hasattr(layer.mlp, "experts"):
                    layer.mlp.gate.e_score_correction_bias.copy_(torch.linspace(-0.3, 0.3, 6))
        case "lfm2_vl":
            fields |= {"layer_types": ["conv", "full_attention", "conv", "conv"], "block_multiple_of": 8}
            made = transformers.Lfm2VlForConditionalGeneration(
                transformers.Lfm2VlConfig(
                    text_config=transformers.Lfm2Config(**fields | config),
                    vision_config=transformers.Siglip2VisionConfig(**seen, num_patches=16, patch_size=4),
                    **whole,
                )
            )
        case "lfm3_vl":
            kinds = ["conv", "sliding_attention", "full_attention", "conv"]
            fields |= {"head_dim": 16, "layer_types": kinds, "sliding_window": 9}
            del fields["rope_parameters"]
            made = transformers.Lfm3VlForConditionalGeneration(
                transformers.Lfm3VlConfig(
                    text_config=transformers.Lfm3Config(**fields | config),
                    vision_config=transformers.Lfm3VlVisionConfig(**seen | {"num_key_value_heads": 1}),
                    **whole,
                )
            )
        case "granite_hybrid":
            factors = {"attention_multiplier": 0.4, "residual_multiplier": 1.4, "logits_scaling": 1.5}
            fields |= {"embedding_multiplier": 0.7, "num_local_experts": 6, "num_experts_per_tok": 2, **factors}
            fields |= {
                "shared_intermediate_size": 40,
                "layer_types": layer_types or ["mamba", "attention"] + ["mamba"] * 2,
            }
            fields |= MAMBA
            made = transformers.GraniteMoeHybridForCausalLM(transformers.GraniteMoeHybridConfig(**fields | config))
        case "nemotron_h":
            fields |= {"head_dim": 16, "hybrid_override_pattern": "M-*M", "mamba_num_heads": 6, "mamba_head_dim": 8}
            fields |= {"n_groups": 2, "ssm_state_size": 16, "time_step_min": 1e-30}
            fields |= {"n_routed_experts": 6, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40}
            fields |= {"routed_scaling_factor": 1.5}
            fields["tie_word_embeddings"] = False  # transformers never ties them
            made = transformers.NemotronHForCausalLM(transformers.NemotronHConfig(**fields | config))
            for layer in made.model.layers:
                if layer.block_type == "moe":
                    layer.mixer.gate.e_score_correction_bias.copy_(torch.linspace(-0.3, 0.3, 6))
        case "falcon_h1":
            fields |= {"head_dim": 16, "mamba_d_ssm": 72, "key_multiplier": 0.6, "lm_head_multiplier": 0.8} | MAMBA
            fields |= {"attention_in_multiplier": 1.2, "attention_out_multiplier": 0.9, "embedding_multiplier": 1.3}
            fields |= {"ssm_in_multiplier": 1.1, "ssm_out_multiplier": 0.8, "mlp_multipliers": [0.9, 1.2]}
            fields |= {"ssm_multipliers": [0.8, 1.1, 0.9, 1.3, 0.7]}
            made = transformers.FalconH1ForCausalLM(transformers.FalconH1Config(**fields | config))
        case "bamba":
            fields |= {"attn_layer_indices": [1]} | MAMBA
            made = transformers.BambaForCausalLM(transformers.BambaConfig(**fields | config))
        case "gemma3" | "gemma3_vision":
            local = {"rope_type": "default", "rope_theta": 100.0}
            fields |= {
                "head_dim": 16,
                "query_pre_attn_scalar": 24,
                "rope_parameters": {"full_attention": dict(ROPES[rope]), "sliding_attention": local},
            }
            text = transformers.Gemma3TextConfig(**fields | config)
            if family == "gemma3":
                made = transformers.Gemma3ForCausalLM(text)
            else:
                vision = transformers.SiglipVisionConfig(
                    hidden_size=16,
                    intermediate_size=16,
                    num_hidden_layers=1,
                    num_attention_heads=1,
                    image_size=28,
                    patch_size=14,
                )
                made = transformers.Gemma3ForConditionalGeneration(
                    transformers.Gemma3Config(  # type: ignore[call-arg]
                        text_config=text,
                        vision_config=vision,
                        mm_tokens_per_image=4,
                        tie_word_embeddings=tied,
                        eos_token_id=EOS,
                        attn_implementation="eager",
                    )
                )
        case "gemma4" | "gemma4_vision" | "gemma4_unified" | "gemma4_unified_vision":
            fields |= {
                "head_dim": 16,
                "global_head_dim": 32,
                "sliding_window": window or 512,
                "pad_token_id": 0,
                "hidden_size_per_layer_input": 8,
                "vocab_size_per_layer_input": VOCAB,
                "rope_parameters": {
                    "full_attention": {
                        "rope_type": "proportional",
                        "partial_rotary_factor": 0.25,
                        "rope_theta": 1000.0,
                    },
                    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                },
            }
            seen |= {"num_key_value_heads": 1, "global_head_dim": 16, "patch_size": 4}
            stem = "Gemma4"
            if family.startswith("gemma4_unified"):
                stem, seen = "Gemma4Unified", {"patch_size": 4, "mm_embed_dim": 16, "mm_posemb_size": 8}
                for name in ("hidden_size_per_layer_input", "vocab_size_per_layer_input"):
                    del fields[name]
            configs = {kind: getattr(transformers, f"{stem}{kind}Config") for kind in ("Text", "Vision", "")}
            language: Any = configs["Text"](**fields | config)
            made = (
                getattr(transformers, f"{stem}ForConditionalGeneration")(
                    configs[""](text_config=language, vision_config=configs["Vision"](**seen), **whole)
                )
                if family.endswith("_vision")
                else getattr(transformers, f"{stem}ForCausalLM")(language)
            )
        case "ministral3":
            fields |= {"head_dim": 16, "sliding_window": window, "rope_parameters": dict(TEMPERED)}
            fields.pop("layer_types", None)
            made = transformers.Ministral3ForCausalLM(transformers.Ministral3Config(**fields | config))
        case "mistral3" | "ministral3_vision":
            fields |= {"head_dim": 16, "sliding_window": window}
            fields.pop("layer_types", None)
            seen |= {"image_size": 28, "patch_size": 14}
            written: Any = transformers.MistralConfig
            if family == "ministral3_vision":
                fields["rope_parameters"], written = dict(TEMPERED), transformers.Ministral3Config
            made = transformers.Mistral3ForConditionalGeneration(
                transformers.Mistral3Config(
                    text_config=written(**fields | config),
                    vision_config=transformers.PixtralVisionConfig(**seen),
                    **whole,
                )
            )
        case "qwen3_vl":
            fields |= {"head_dim": 16}
            fields["rope_parameters"] |= {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
            seeing: dict[str, Any] = {
                "hidden_size": 16,
                "intermediate_size": 16,
                "depth": 1,
                "num_heads": 1,
                "out_hidden_size": 48,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
            }
            made = transformers.Qwen3VLForConditionalGeneration(
                transformers.Qwen3VLConfig(
                    text_config=transformers.Qwen3VLTextConfig(**fields | config), vision_config=seeing, **whole
                )
            )
        case "qwen3_5" | "qwen3_5_vision":
            fields |= DELTA | ({"layer_types": list(layer_types)} if layer_types else {})
            spoken: Any = transformers.Qwen3_5TextConfig(**fields | config)
            seeing = {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 1, "out_hidden_size": 48}
            made = (
                transformers.Qwen3_5ForCausalLM(spoken)
                if family == "qwen3_5"
                else transformers.Qwen3_5ForConditionalGeneration(
                    transformers.Qwen3_5Config(
                        text_config=spoken, vision_config=seeing | {"num_position_embeddings": 16}, **whole
                    )
                )
            )
        case "qwen3_5_moe" | "qwen3_next":
            fields |= DELTA | ({"layer_types": list(layer_types)} if layer_types else {})
            fields |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
            fields |= {"shared_expert_intermediate_size": 40}
            made = (
                transformers.Qwen3_5MoeForCausalLM(transformers.Qwen3_5MoeTextConfig(**fields | config))
                if family == "qwen3_5_moe"
                else transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**fields | config))
            )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith((".sinks", "router.bias")):
                parameter.copy_(noise)
            elif name.endswith("linear_attn.A_log"):  # which transformers draws
                parameter.copy_(torch.linspace(-1, 2.5, len(parameter)) + 0.3 * noise)
            elif name.endswith("dt_bias") and family in ("olmo_hybrid", "kimi_linear"):  # which transformers draws, too
                parameter.copy_(noise - 4)
            elif parameter.ndim == 1:
                parameter.add_(0.3 * noise)
            elif name.endswith(".conv1d.weight") and "linear_attn" not in name:
                parameter.copy_(0.2 * noise)  # x, B and C are multiplied, and so would be what is rounded away
            else:
                parameter.copy_(noise * (1.2 / parameter.shape[-1] ** 0.5))
            if family.startswith("gemma") and ".post_" in name:
                parameter.add_(4.0)  # or else the scaled embedding outweighs the layers and every token repeats
            if family.startswith("gemma4") and name.endswith("q_norm.weight"):
                parameter.mul_(0.1)  # scores are not scaled
        for name, buffer in made.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(0.7 + 0.3 * torch.rand(buffer.shape, generator=generator))
    return made.eval()


def as_transformers_4(folder: Path) -> None:
    """Rewrite config.json to what transformers 4 wrote."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    for part in (config, config.get("text_config", {})):
        if "dtype" in part:
            part["torch_dtype"] = part.pop("dtype")
        rope = part.pop("rope_parameters", None)
        if rope is None:
            continue
        if "full_attention" in rope:
            types = part.pop("layer_types")
            part["sliding_window_pattern"] = types.index("full_attention") + 1
            part["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
            rope = rope["full_attention"]
        part["rope_theta"] = rope.pop("rope_theta")
        part["rope_scaling"] = None if rope == {"rope_type": "default"} else rope
    file.write_text(json.dumps(config))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Rewrite model.safetensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def with_head(folder: Path, family: Family, *, seed: int = 3, **config: Any) -> Path:
    """A tiny checkpoint whose tensors include a head. The head's layer is shaped like the model's layer 1, which has
    attention."""
    write_checkpoint(folder, family, **config)
    generator = torch.Generator().manual_seed(seed)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        D = tensors["model.norm.weight"].shape[0]
        shapes = {
            "mtp.fc.weight": (D, 2 * D),
            **{f"mtp.{name}.weight": (D,) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")},
            **{
                name.replace("model.layers.1.", "mtp.layers.0."): tuple(x.shape)
                for name, x in tensors.items()
                if name.startswith("model.layers.1.")
            },
        }
        for name, shape in shapes.items():
            noise = torch.randn(shape, generator=generator)
            scale = 0.3 if len(shape) == 1 else 1.2 / shape[-1] ** 0.5
            tensors[name] = (scale * noise).to(tensors["model.norm.weight"].dtype)

    edit_tensors(folder, add)
    return folder


def with_next_layer(folder: Path, family: Family, **config: Any) -> Any:
    """A tiny checkpoint with a draft head behind its last layer, as DeepSeek-V3 and GLM have one. Returns the model
    of ``transformers`` that has the head's layer as its last one."""
    whole = make_model(
        family,
        tied=False,
        kv_heads=2,
        rope="default",
        window=None,
        layer_types=None,
        seed=6,
        num_hidden_layers=4,
        **config,
    )
    whole.save_pretrained(folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    generator = torch.Generator().manual_seed(7)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        D = tensors["model.norm.weight"].shape[0]
        for name, shape in {"enorm": (D,), "hnorm": (D,), "eh_proj": (D, 2 * D), "shared_head.norm": (D,)}.items():
            noise = torch.randn(shape, generator=generator)
            tensors[f"model.layers.3.{name}.weight"] = 1 + 0.3 * noise if len(shape) == 1 else noise / shape[-1] ** 0.5
        tensors["model.layers.3.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.3.shared_head.head.weight"] = tensors["lm_head.weight"].clone()

    edit_tensors(folder, add)
    file = folder / "config.json"
    fields = {"num_hidden_layers": 3, "num_nextn_predict_layers": 1, "mlp_layer_types": None}
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return whole.eval()


def write_eagle(
    folder: Path,
    *,
    size: int = 48,
    reads: int = 3,
    target: int = 48,
    drafted: int | None = 64,
    kv_heads: int = 2,
    seed: int = 5,
    **config: Any,
) -> Path:
    """A tiny EAGLE-3 head of ``size`` for a model of hidden size ``target``, of which it reads ``reads`` hidden states,
    as EAGLE's authors write it. It drafts ``drafted`` tokens at random places; all if that is None. Further arguments
    are fields of its config."""
    generator = torch.Generator().manual_seed(seed)
    fields: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": size,
        "intermediate_size": 80,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "draft_vocab_size": drafted,
        **({} if size == target else {"target_hidden_size": target}),
        **config,
    }
    q, k = size, size // HEADS * kv_heads
    layer: dict[str, tuple[int, ...]] = {"self_attn.q_proj": (q, 2 * size), "self_attn.k_proj": (k, 2 * size)}
    layer |= {"self_attn.v_proj": (k, 2 * size)}
    layer |= {"self_attn.o_proj": (size, q), "mlp.gate_proj": (80, size), "mlp.up_proj": (80, size)}
    layer |= {"mlp.down_proj": (size, 80), "input_layernorm": (size,), "hidden_norm": (size,)}
    layer |= {"post_attention_layernorm": (size,)}
    shapes = {f"midlayer.{name}.weight": shape for name, shape in layer.items()}
    shapes |= {"fc.weight": (size, reads * target), "norm.weight": (size,), "lm_head.weight": (drafted or VOCAB, size)}
    if fields.get("attention_bias"):
        for part, rows in (("q", q), ("k", k), ("v", k), ("o", size)):
            shapes[f"midlayer.self_attn.{part}_proj.bias"] = (rows,)
    if fields.get("norm_before_fc"):
        shapes["input_norm.weight"] = (reads * target,)
    if fields.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (target,) for i in range(reads)}
    if size != target or fields.get("embed_requires_grad"):
        shapes["embed_tokens.weight"] = (VOCAB, size)
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.3 * noise if "norm" in name else noise * (1.2 / shape[-1] ** 0.5)
    if drafted is not None:
        chosen = torch.randperm(VOCAB, generator=generator)[:drafted].sort().values
        tensors["d2t"] = chosen - torch.arange(drafted)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, chosen, True)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def as_speculators(folder: Path) -> Path:
    """Rewrite a head of ``write_eagle`` to what speculators write, which have an embedding in any case."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    own = {"draft_vocab_size", "target_hidden_size", "norm_before_residual", "norm_before_fc", "norm_output"}
    own |= {"eagle_aux_hidden_state_layer_ids", "embed_requires_grad", "fc_norm"}
    whole = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "somewhere"}},
        "transformer_layer_config": {key: value for key, value in config.items() if key not in own},
        "dtype": "float32",
        **{key: config.get(key) for key in own},
        "norm_before_residual": config.get("norm_before_residual", False),
    }
    file.write_text(json.dumps(whole))

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("midlayer.")]:
            tensors[name.replace("midlayer.", "layers.0.")] = tensors.pop(name)
        tensors.setdefault("embed_tokens.weight", torch.full((VOCAB, config["hidden_size"]), torch.nan))

    edit_tensors(folder, change)
    return folder


def stacked(tensors: dict[str, torch.Tensor]) -> None:
    """The experts as transformers 5 has them in memory."""
    for name in [name for name in tensors if ".experts.0." in name]:
        first, part = name.rsplit(".experts.0.", 1)
        if part in ("up_proj.weight", "w3.weight"):
            continue
        also = {"gate_proj.weight": "up_proj.weight", "w1.weight": "w3.weight"}.get(part)
        whole: list[torch.Tensor] = []
        while (index := f"{first}.experts.{len(whole)}.") + part in tensors:
            whole.append(torch.cat([tensors.pop(index + each) for each in (part, also) if each]))
        place = first.replace("block_sparse_moe", "mlp")
        tensors[f"{place}.experts.{'gate_up_proj' if also else 'down_proj'}"] = torch.stack(whole)
    for name in [name for name in tensors if ".block_sparse_moe.gate." in name]:
        tensors[name.replace("block_sparse_moe", "mlp")] = tensors.pop(name)
