"""A GGUF file's settings in the terms of the hub's config.json."""

from __future__ import annotations

import functools
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from infer.errors import CheckpointError
from infer_formats.gguf.gemma import GEMMA_27B_LAYERS, gemma, gemma4
from infer_formats.gguf.header import TensorInfo
from infer_formats.gguf.hybrids import delta_nets, granite, short_convolutions, squared_experts, state_space
from infer_formats.gguf.latent import chosen_experts, kimi_linear, latent_attention
from infer_formats.gguf.metadata import Metadata
from infer_formats.gguf.names import CONVOLVED, DELTA, LATENT, MIXTURES, NEMOTRON, TURNED
from infer_formats.gguf.rope import ministral, rope_scaling

log = logging.getLogger(__name__)

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
    "granite": "GraniteForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "mistral3": "Ministral3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2moe": "Lfm2MoeForCausalLM",
    "granitehybrid": "GraniteMoeHybridForCausalLM",
    **dict.fromkeys(NEMOTRON, "NemotronHForCausalLM"),
    "falcon-h1": "FalconH1ForCausalLM",
    "qwen35": "Qwen3_5ForCausalLM",
    "qwen35moe": "Qwen3_5MoeForCausalLM",
    "qwen3next": "Qwen3NextForCausalLM",
    "deepseek2": "DeepseekV3ForCausalLM",
    "kimi-linear": "KimiLinearForCausalLM",
}
DTYPES = {"F32": "float32", "F16": "float16"}
"""The dtype to compute in, by the type of most weights; bfloat16 for all others."""
MAMBA = ("granitehybrid", "falcon-h1", *NEMOTRON)
"""Architectures with Mamba 2."""
MIXED = ("granitehybrid", "kimi-linear", *NEMOTRON, *CONVOLVED)
"""Those with layers of several kinds. K/V heads are counted for each, and layers without attention have none."""
VARIED = ("gemma4", *DELTA)
"""Those that may have another number of K/V heads, or another width, in each layer."""
WINDOWLESS = (
    *("mistral3", "qwen2", "qwen3", "qwen3moe", "olmoe", "granite", "granitemoe", "smollm3"),
    *MAMBA,
    *CONVOLVED,
    *DELTA,
    *LATENT,
)
"""Architectures that are read without sliding windows only."""
HYBRID_KEYS = tuple(
    f"ssm.{name}" for name in ("conv_kernel", "inner_size", "state_size", "time_step_rank", "group_count")
)
"""Keys that files of Granite 4 have even where no layer has Mamba."""
UNUSED_KEYS = ("vocab_size", "rope.scaling.finetuned", "tensor_data_layout")
MAX_EXPERTS = 4096


def architecture(meta: Metadata) -> str:
    name = meta.text("general.architecture")
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"{meta.path} is of the architecture {name!r}; infer reads GGUF files of {', '.join(ARCHITECTURES)}."
        )
    return name


def hub_config(meta: Metadata, tensors: Mapping[str, TensorInfo], read: Callable[[str], Tensor]) -> dict[str, Any]:
    """config.json. ``read`` reads a tensor. Raises CheckpointError."""
    arch = architecture(meta)
    at = functools.partial("{}.{}".format, arch)
    experts = meta.whole(at("expert_count"), 0)
    assert experts is not None
    if experts and (arch not in MIXTURES or experts > MAX_EXPERTS):
        raise meta.bad(at("expert_count"), f"at most {MAX_EXPERTS if arch in MIXTURES else 0} for {arch}")
    if "token_embd.weight" not in tensors:
        raise CheckpointError(f"{meta.path} lacks 'token_embd.weight'.")
    heads, hidden = meta.size(at("attention.head_count")), meta.size(at("embedding_length"))
    if arch in LATENT:
        head_dim = meta.size(at("rope.dimension_count"))
    else:
        head_dim = meta.whole(at("attention.key_length"), least=1) or hidden // heads
    if not head_dim or (arch not in LATENT and meta.whole(at("attention.value_length"), head_dim) != head_dim):
        raise CheckpointError(
            f"{meta.path}: the heads' keys have {head_dim} values; infer needs as many as the values have, and one at "
            "least."
        )
    if not meta.truth(at("attention.causal"), True):
        raise meta.bad(at("attention.causal"), "true: infer serves models whose tokens see those before them only")
    window = meta.whole(at("attention.sliding_window")) or None
    layers, kv_key, width_key = meta.size(at("block_count")), at("attention.head_count_kv"), at("feed_forward_length")
    kv_heads = meta.layers(kv_key, layers) if arch in MIXED else []
    widths = meta.layers(width_key, layers) if arch in NEMOTRON else []
    sizes = meta.each if arch in VARIED else meta.alike
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[arch]],
        "quantization_config": {"quant_method": "gguf"},
        "dtype": _dtype(tensors),
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": max(widths)
        if widths
        else sizes(width_key, meta.whole(at("expert_feed_forward_length")))[0],
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(kv_heads) if kv_heads else sizes(kv_key, heads)[0],
        "head_dim": head_dim,
        "max_position_embeddings": meta.size(at("context_length")),
        "rms_norm_eps": meta.needed(at("attention.layer_norm_rms_epsilon")),
        "rope_theta": meta.number(at("rope.freq_base"), 10_000.0),
        "rope_scaling": rope_scaling(meta, arch, tensors, read),
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    rotated = meta.whole(at("rope.dimension_count"), head_dim, least=1)
    assert rotated is not None
    if rotated != head_dim and arch not in NEMOTRON:  # which rotate nothing
        if arch not in ("phi3", *DELTA) or rotated > head_dim:
            raise meta.bad(at("rope.dimension_count"), f"the size of a head, {head_dim}")
        config["partial_rotary_factor"] = (
            rotated + 0.5
        ) / head_dim  # rounded down to ``rotated``, whatever head_dim is
    if experts:
        config |= _mixture(meta, arch, experts, tensors)
    if arch in TURNED:
        biased = {"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"}
        ends = {name.split(".", 2)[-1] for name in tensors if name.startswith("blk.")}
        config |= {key: name in ends for key, name in biased.items()}
    if arch == "llama" and experts:
        config |= {"architectures": ["MixtralForCausalLM"], "sliding_window": window}
    elif arch == "llama" and window is not None:
        config |= {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    elif arch == "mistral3":
        config |= ministral(meta, arch, config["rope_scaling"])
    elif arch in ("granite", "granitemoe"):
        config |= granite(meta, arch)
        if not meta.truth(at("rope.scaling.finetuned"), True):
            raise meta.bad(at("rope.scaling.finetuned"), f"true: infer reads no {arch} without rotations")
        meta.read.update(map(at, HYBRID_KEYS))
    elif arch == "gpt-oss":
        config |= {"sliding_window": window, "attention_bias": "blk.0.attn_output.bias" in tensors}
        if config["rope_scaling"]:
            config["rope_scaling"] |= {"truncate": False}
    elif arch == "phi3":
        made_for = meta.whole(at("rope.scaling.original_context_length"), 4096, least=2)
        config |= {"sliding_window": window, "original_max_position_embeddings": made_for}
    elif arch in GEMMA_27B_LAYERS:
        config |= gemma(meta, arch, head_dim, hidden // heads) | ({} if window is None else {"sliding_window": window})
    elif arch in MAMBA:
        config |= state_space(meta, arch, tensors, config, kv_heads, widths)
    elif arch in DELTA:
        config |= delta_nets(meta, arch, tensors)
    elif arch in CONVOLVED:
        config |= short_convolutions(meta, arch, config, kv_heads)
    elif arch in LATENT:
        config |= latent_attention(meta, arch, tensors, config)
        if arch == "kimi-linear":
            config |= kimi_linear(meta, arch, kv_heads)
    elif arch == "gemma4":
        config |= gemma4(meta, tensors, read) | {"sliding_window": window}
    elif arch not in TURNED:
        config["attention_bias"] = "blk.0.attn_output.bias" in tensors
        if arch == "olmo2" and window is not None:
            config |= _windowed(meta, arch, config) | {"sliding_window": window}
    if window is not None and arch in WINDOWLESS:
        raise CheckpointError(
            f"{meta.path}: {at('attention.sliding_window')} is {window}; of {arch}, infer reads GGUF files without "
            "sliding windows only."
        )
    unread = sorted(
        key
        for key in meta.values.keys() - meta.read - set(map(at, UNUSED_KEYS))
        if key.startswith(f"{arch}.") and meta.values[key]
    )
    if unread:
        log.warning("%s: infer does not know what these settings mean: %s", meta.path, ", ".join(unread))
    return config


def _windowed(meta: Metadata, arch: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """What the config of OLMo 3 has beside that of OLMo 2. ``yarn_attn_factor`` follows from other settings, and
    llama.cpp rotates by one base in all layers."""
    at, base = functools.partial("{}.{}".format, arch), config["rope_theta"]
    meta.read.add(at("rope.scaling.yarn_attn_factor"))
    if meta.number(at("rope.freq_base_swa"), base) != base:
        raise meta.bad(at("rope.freq_base_swa"), f"rope.freq_base, {base:g}")
    kinds = meta.layer_types(arch)
    if kinds is None:
        every = meta.whole(at("attention.sliding_window_pattern"), 4, least=1) or 4
        layers = range(1, config["num_hidden_layers"] + 1)
        kinds = ["sliding_attention" if i % every else "full_attention" for i in layers]
    return {"architectures": ["Olmo3ForCausalLM"], "layer_types": kinds}


def _dtype(tensors: Mapping[str, TensorInfo]) -> str:
    counts: Counter[str] = Counter()
    for info in tensors.values():
        if len(info.shape) > 1:
            counts[info.type.name] += math.prod(info.shape)
    return DTYPES.get(counts.most_common(1)[0][0], "bfloat16") if counts else "float32"


def _mixture(meta: Metadata, arch: str, experts: int, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """What the config of a mixture of experts has beside the others. Whether shares add up to 1 follows from the
    architecture."""
    at = functools.partial("{}.{}".format, arch)
    for key in ("expert_shared_feed_forward_length", "expert_shared_count"):
        if arch not in ("granitehybrid", "nemotron_h_moe", *DELTA, *LATENT) and meta.whole(at(key), 0):
            raise meta.bad(at(key), f"0: infer reads no shared experts of {arch} from GGUF")
    config: dict[str, Any] = {"num_experts_per_tok": meta.size(at("expert_used_count"))}
    if width := meta.whole(at("expert_feed_forward_length")):
        apart = arch in ("qwen3moe", "lfm2moe", "gemma4", "nemotron_h_moe", *DELTA, *LATENT)
        config |= {"moe_intermediate_size" if apart else "intermediate_size": width}
    if arch in DELTA:
        shared = meta.size(at("expert_shared_feed_forward_length"))
        return config | {"num_experts": experts, "shared_expert_intermediate_size": shared}
    if arch == "nemotron_h_moe":
        config |= squared_experts(meta, arch)
    if arch in LATENT:
        config |= chosen_experts(meta, arch, tensors)
    if arch == "gemma4":
        top = config.pop("num_experts_per_tok")
        return config | {"num_experts": experts, "top_k_experts": top, "enable_moe_block": True}
    if arch in ("qwen3moe", "olmoe"):
        return config | {"num_experts": experts, "norm_topk_prob": arch == "qwen3moe"}
    return config | {"num_local_experts": experts}
