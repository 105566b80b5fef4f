"""A GGUF file's settings in the terms of the hub's config.json, and its tensors' names in those of the hub's models."""

from __future__ import annotations

import functools
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from infer.errors import CheckpointError
from infer.weight import GroupedWeight, Weight
from infer_formats.gguf.header import TensorInfo
from infer_formats.gguf.metadata import Metadata

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
    "olmo2": "Olmo2ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2moe": "Lfm2MoeForCausalLM",
    "granitehybrid": "GraniteMoeHybridForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "falcon-h1": "FalconH1ForCausalLM",
}
DTYPES = {"F32": "float32", "F16": "float16"}
"""The dtype to compute in, by the type of most weights; bfloat16 for all others."""
FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that say how far to stretch each wavelength, which is a matter of config.json."""
TURNED = ("llama", "granite", "granitemoe", "smollm3", "granitehybrid", "nemotron_h")
"""Architectures whose q and k rotate neighbors instead of halves."""
MAMBA = ("granitehybrid", "nemotron_h", "falcon-h1")
"""Architectures with Mamba 2."""
CONVOLVED = ("lfm2", "lfm2moe")
"""Those with short convolutions."""
MIXED = ("granitehybrid", "nemotron_h", *CONVOLVED)
"""Those with layers of several kinds. K/V heads are counted for each, and layers without attention have none."""
WINDOWLESS = (
    *("qwen2", "qwen3", "qwen3moe", "olmo2", "olmoe", "granite", "granitemoe", "smollm3"),
    *MAMBA,
    *CONVOLVED,
)
"""Architectures that are read without sliding windows only."""
GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
"""The sizes whose attention is scaled by hidden_size / heads instead of by the size of a head."""
HYBRID_KEYS = tuple(
    f"ssm.{name}" for name in ("conv_kernel", "inner_size", "state_size", "time_step_rank", "group_count")
)
"""Keys that files of Granite 4 have even where no layer has Mamba."""
UNUSED_KEYS = ("vocab_size", "rope.scaling.finetuned", "tensor_data_layout", "attention.causal")

OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
OUTSIDE_OF = {
    **{arch: {"token_embd_norm.weight": "model.embedding_norm.weight"} for arch in CONVOLVED},
    "nemotron_h": {"token_embd.weight": "backbone.embeddings.weight", "output_norm.weight": "backbone.norm_f.weight"},
    "falcon-h1": {"output_norm.weight": "model.final_layernorm.weight"},
}
WITHIN = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
STATE_SPACE = {
    "ssm_in": "in_proj",
    "ssm_conv1d": "conv1d",
    "ssm_dt": "dt_bias",
    "ssm_a": "A_log",
    "ssm_d": "D",
    "ssm_norm": "norm",
    "ssm_out": "out_proj",
}
"""Names within Mamba 2."""
LFM2 = {
    "attn_norm": "operator_norm",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_output": "self_attn.out_proj",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b": "feed_forward.expert_bias",
}
BARE = ("sinks", "layer_scalar", "dt_bias", "A_log", "D", "expert_bias")
"""Ends of the hub's names that have no "weight" or "bias" behind them."""
GATE_AND_UP = "shared_mlp.input_linear.weight"
"""The end of the hub's names of tensors that are two in a file."""
WITHIN_OF = {
    "lfm2": LFM2,
    "lfm2moe": LFM2,
    "granitehybrid": {
        "ffn_gate_inp": "block_sparse_moe.router.layer",
        **{
            f"ffn_{part}{end}": GATE_AND_UP.removesuffix(".weight") for part in ("gate", "up") for end in ("", "_shexp")
        },
        **{f"ffn_down{end}": "shared_mlp.output_linear" for end in ("", "_shexp")},
        **{part: f"mamba.{hub}" for part, hub in STATE_SPACE.items()},
    },
    "nemotron_h": {
        "attn_norm": "norm",
        **{f"attn_{part}": f"mixer.{part}_proj" for part in "qkv"},
        "attn_output": "mixer.o_proj",
        "ffn_up": "mixer.up_proj",
        "ffn_down": "mixer.down_proj",
        **{part: f"mixer.{hub}" for part, hub in STATE_SPACE.items()},
    },
    "falcon-h1": {
        "ffn_norm": "pre_ff_layernorm",
        **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
        **{part: f"mamba.{hub}" for part, hub in STATE_SPACE.items()},
    },
    "gemma2": {"ffn_norm": "pre_feedforward_layernorm"},
    "gemma3": {"ffn_norm": "pre_feedforward_layernorm"},
    "gemma4": {
        "ffn_norm": "pre_feedforward_layernorm",
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
        "layer_output_scale": "layer_scalar",
    },
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "llama": {"ffn_gate_inp": "block_sparse_moe.gate"},
    "qwen3moe": {"ffn_gate_inp": "mlp.gate"},
    "olmoe": {"ffn_gate_inp": "mlp.gate"},
    "granitemoe": {"ffn_gate_inp": "block_sparse_moe.router.layer"},
    "gpt-oss": {"ffn_gate_inp": "mlp.router", "attn_sinks": "self_attn.sinks"},
}


class Mixture(NamedTuple):
    """What the hub's models call the experts of a layer, and their projections; gate and up of one name are one
    tensor, gate first or, if ``interleaved``, row by row in turns."""

    experts: str = "mlp.experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    interleaved: bool = False


MIXTURES = {
    "llama": Mixture("block_sparse_moe.experts", "w1", "w3", "w2"),
    "qwen3moe": Mixture(),
    "olmoe": Mixture(),
    "granitemoe": Mixture("block_sparse_moe.experts", "gate_up_proj", "gate_up_proj"),
    "granitehybrid": Mixture("block_sparse_moe.experts", "gate_up_proj", "gate_up_proj"),
    "lfm2moe": Mixture("feed_forward.experts", "w1", "w3", "w2"),
    "gpt-oss": Mixture("mlp.experts", "gate_up_proj", "gate_up_proj", interleaved=True),
}
MAX_EXPERTS = 4096


def architecture(meta: Metadata) -> str:
    name = meta.text("general.architecture")
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"{meta.path} is of the architecture {name!r}; infer reads GGUF files of {', '.join(ARCHITECTURES)}."
        )
    return name


def hub_name(arch: str, name: str) -> str:
    """A tensor's name in the hub's checkpoints; a name that is not known is left as it is."""
    if match := re.fullmatch(r"blk\.(\d+)\.([\w.]+?)(?:\.(weight|bias))?", name):
        layer, part, kind = match.groups()
        if hub := WITHIN_OF.get(arch, {}).get(part) or WITHIN.get(part):
            layers = "backbone.layers" if arch == "nemotron_h" else "model.layers"
            bare = hub.split(".")[-1] in BARE
            return f"{layers}.{int(layer)}.{hub}" + ("" if bare else f".{kind or 'weight'}")
    return OUTSIDE_OF.get(arch, {}).get(name) or OUTSIDE.get(name, name)


def expert_name(arch: str, name: str) -> Callable[[int], str] | None:
    """The hub's name of each expert's part of a stack; None if the tensor is none."""
    match = re.fullmatch(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.(weight|bias)", name)
    if match is None or arch not in MIXTURES:
        return None
    mixture, kind = MIXTURES[arch], match[3]
    place, part = f"model.layers.{int(match[1])}.{mixture.experts}", getattr(mixture, match[2])
    return lambda index: f"{place}.{index}.{part}.{kind}"


def row_order(rows: int, head_size: int) -> Tensor:
    """The order that brings the rows of a Llama's q or k back into that of the hub. GGUF has the two values that are
    rotated against each other as neighbors; the hub has them half a head apart."""
    if rows % head_size or head_size % 2:
        return torch.arange(rows)  # the model says what is wrong with the shape
    return torch.arange(rows).view(-1, head_size // 2, 2).transpose(1, 2).flatten()


def hub_tensor(name: str, weight: Weight) -> Weight:
    """A tensor of a recurrent layer as the hub has it; others as they are."""
    part = name.removesuffix(".weight").rpartition(".")[2]
    convolves = name.endswith(("ssm_conv1d.weight", "shortconv.conv.weight"))
    if part not in ("ssm_a", "ssm_d", "ssm_norm") and not convolves:
        return weight
    plain = weight.dequantize() if isinstance(weight, GroupedWeight) else weight
    if convolves:
        return plain.unsqueeze(1)
    return plain.float().neg().log().flatten() if part == "ssm_a" else plain.flatten()


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
    head_dim = meta.whole(at("attention.key_length"), least=1) or hidden // heads
    if not head_dim or meta.whole(at("attention.value_length"), head_dim) != head_dim:
        raise CheckpointError(
            f"{meta.path}: the heads' keys have {head_dim} values; infer needs as many as the values have, and one at "
            "least."
        )
    window = meta.whole(at("attention.sliding_window")) or None
    layers, kv_key, width_key = meta.size(at("block_count")), at("attention.head_count_kv"), at("feed_forward_length")
    kv_heads = meta.layers(kv_key, layers) if arch in MIXED else []
    widths = meta.layers(width_key, layers) if arch == "nemotron_h" else []
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[arch]],
        "quantization_config": {"quant_method": "gguf"},
        "dtype": _dtype(tensors),
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": max(widths) if widths else _each(meta, width_key)[0],
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(kv_heads) if kv_heads else _each(meta, kv_key, heads)[0],
        "head_dim": head_dim,
        "max_position_embeddings": meta.size(at("context_length")),
        "rms_norm_eps": _needed(meta, at("attention.layer_norm_rms_epsilon")),
        "rope_theta": meta.number(at("rope.freq_base"), 10_000.0),
        "rope_scaling": _scaling(meta, arch, tensors, read),
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    rotated = meta.whole(at("rope.dimension_count"), head_dim, least=1)
    assert rotated is not None
    if rotated != head_dim and arch != "nemotron_h":  # which rotates nothing
        if arch != "phi3" or rotated > head_dim:
            raise meta.bad(at("rope.dimension_count"), f"the size of a head, {head_dim}")
        config["partial_rotary_factor"] = (
            rotated + 0.5
        ) / head_dim  # rounded down to ``rotated``, whatever head_dim is
    if experts:
        config |= _mixture(meta, arch, experts)
    if arch in TURNED:
        biased = {"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"}
        ends = {name.split(".", 2)[-1] for name in tensors if name.startswith("blk.")}
        config |= {key: name in ends for key, name in biased.items()}
    if arch == "llama" and experts:
        config |= {"architectures": ["MixtralForCausalLM"], "sliding_window": window}
    elif arch == "llama" and window is not None:
        config |= {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    elif arch in ("granite", "granitemoe"):
        config |= _granite(meta)
        meta.read.update(map(at, HYBRID_KEYS))
    elif arch == "gpt-oss":
        config |= {"sliding_window": window, "attention_bias": "blk.0.attn_output.bias" in tensors}
        if config["rope_scaling"]:
            config["rope_scaling"] |= {"truncate": False}
    elif arch == "phi3":
        made_for = meta.whole(at("rope.scaling.original_context_length"), 4096, least=2)
        config |= {"sliding_window": window, "original_max_position_embeddings": made_for}
    elif arch in GEMMA_27B_LAYERS:
        config |= _gemma(meta, arch, head_dim, hidden // heads) | ({} if window is None else {"sliding_window": window})
    elif arch in MAMBA:
        config |= _state_space(meta, arch, tensors, config, kv_heads, widths)
    elif arch in CONVOLVED:
        config |= _short_convolutions(meta, arch, config, kv_heads)
    elif arch == "gemma4":
        config |= _gemma4(meta, tensors, read) | {"sliding_window": window}
    elif arch not in TURNED:
        config["attention_bias"] = "blk.0.attn_output.bias" in tensors
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


def _needed(meta: Metadata, key: str) -> float:
    value = meta.number(key)
    if value is None:
        raise CheckpointError(f"{meta.path} does not say {key}.")
    return value


def _dtype(tensors: Mapping[str, TensorInfo]) -> str:
    counts: Counter[str] = Counter()
    for info in tensors.values():
        if len(info.shape) > 1:
            counts[info.type.name] += math.prod(info.shape)
    return DTYPES.get(counts.most_common(1)[0][0], "bfloat16") if counts else "float32"


def _gemma(meta: Metadata, arch: str, head_dim: int, even_split: int) -> dict[str, Any]:
    """What a Gemma's config has beside a Llama's. Local layers of Gemma 3 have a base of their own, which llama.cpp
    knows rather than reads, like the pattern of layers and the scale of the largest model."""
    at = functools.partial("{}.{}".format, arch)
    scalar: float = even_split if meta.size(at("block_count")) == GEMMA_27B_LAYERS[arch] else head_dim
    if scale := meta.number(at("attention.scale")):
        scalar = scale**-2
    caps = {name: meta.number(at(name)) or None for name in ("attn_logit_softcapping", "final_logit_softcapping")}
    config: dict[str, Any] = {"query_pre_attn_scalar": scalar, **caps}
    if arch == "gemma2":
        return config
    config["rope_local_base_freq"] = meta.number(at("rope.freq_base_swa"), 10_000.0)
    pattern = meta.values.get(at("attention.sliding_window_pattern"))
    if isinstance(pattern, list):
        kinds = {True: "sliding_attention", False: "full_attention"}
        windows = meta.several(at("attention.sliding_window_pattern"), bool) or []
        config["layer_types"] = [kinds[windowed] for windowed in windows]
    else:
        config["sliding_window_pattern"] = meta.whole(at("attention.sliding_window_pattern"), 6, least=1)
    return config


def _each(meta: Metadata, key: str, default: int | None = None) -> list[int]:
    """A number per layer, or one for all of them."""
    if isinstance(meta.values.get(key), list):
        return meta.several(key, int) or []
    value = meta.size(key) if default is None else meta.whole(key, default, least=1)
    assert value is not None
    return [value]


def _gemma4(meta: Metadata, tensors: Mapping[str, TensorInfo], read: Callable[[str], Tensor]) -> dict[str, Any]:
    """What a Gemma 4's config has beside a Llama's. A tensor of factors stops the rotation of a head's last pairs."""
    layers = meta.size("gemma4.block_count")
    windows = meta.several("gemma4.attention.sliding_window_pattern", bool) or []
    kv_heads, widths = _each(meta, "gemma4.attention.head_count_kv"), _each(meta, "gemma4.feed_forward_length")
    for key, values in (
        ("attention.sliding_window_pattern", windows),
        ("attention.head_count_kv", kv_heads * (layers if len(kv_heads) == 1 else 1)),
        ("feed_forward_length", widths * (layers if len(widths) == 1 else 1)),
    ):
        if len(values) != layers:
            raise meta.bad(f"gemma4.{key}", f"a value for each of the {layers} layers")
    full, sliding = meta.size("gemma4.attention.key_length"), meta.size("gemma4.attention.key_length_swa")
    if meta.whole("gemma4.attention.value_length_swa", sliding) != sliding:
        raise meta.bad("gemma4.attention.value_length_swa", f"the size of a key, {sliding}")
    if meta.whole("gemma4.rope.dimension_count_swa", sliding) != sliding:
        raise meta.bad("gemma4.rope.dimension_count_swa", f"the size of a head, {sliding}")
    kv_heads = kv_heads * layers if len(kv_heads) == 1 else kv_heads
    rotated = 1.0
    if (factors := _factors(meta, FACTORS[0], tensors, read)) is not None:
        still = sum(factor > 1e20 for factor in factors)
        if factors != [1.0] * (len(factors) - still) + factors[len(factors) - still :]:
            raise CheckpointError(f"{meta.path}: {FACTORS[0]!r} has factors other than 1 and, after these, 1e30.")
        rotated = 1 - still / len(factors)
    ropes = {
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": meta.number("gemma4.rope.freq_base_swa", 10_000.0),
        },
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": meta.number("gemma4.rope.freq_base", 1_000_000.0),
            "partial_rotary_factor": rotated,
        },
    }
    shared = meta.whole("gemma4.attention.shared_kv_layers", 0) or 0
    own = [i for i in range(layers - shared) if not windows[i]]
    return {
        "head_dim": sliding,
        "num_key_value_heads": next(
            (n for n, windowed in zip(kv_heads, windows, strict=True) if windowed), kv_heads[0]
        ),
        "per_layer_config": {
            i: {"head_dim": full, "num_key_value_heads": kv_heads[i]} for i in range(layers) if not windows[i]
        },
        "layer_types": ["sliding_attention" if windowed else "full_attention" for windowed in windows],
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "num_kv_shared_layers": shared,
        "attention_k_eq_v": any(f"blk.{i}.attn_v.weight" not in tensors for i in own),
        "hidden_size_per_layer_input": meta.whole("gemma4.embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": tensors["token_embd.weight"].shape[0],
        "final_logit_softcapping": meta.number("gemma4.final_logit_softcapping") or None,
        "rope_parameters": ropes,
        "rope_scaling": None,
    }


def _mixture(meta: Metadata, arch: str, experts: int) -> dict[str, Any]:
    """What the config of a mixture of experts has beside the others. Whether shares add up to 1 follows from the
    architecture."""
    at = functools.partial("{}.{}".format, arch)
    for key in ("expert_shared_feed_forward_length", "expert_shared_count"):
        if arch != "granitehybrid" and meta.whole(at(key), 0):
            raise meta.bad(at(key), f"0: infer reads no shared experts of {arch} from GGUF")
    config: dict[str, Any] = {"num_experts_per_tok": meta.size(at("expert_used_count"))}
    if width := meta.whole(at("expert_feed_forward_length")):
        config |= {"moe_intermediate_size": width} if arch in ("qwen3moe", "lfm2moe") else {"intermediate_size": width}
    if arch in ("qwen3moe", "olmoe"):
        return config | {"num_experts": experts, "norm_topk_prob": arch == "qwen3moe"}
    return config | {"num_local_experts": experts}


def _state_space(
    meta: Metadata,
    arch: str,
    tensors: Mapping[str, TensorInfo],
    config: Mapping[str, Any],
    kv_heads: list[int],
    widths: list[int],
) -> dict[str, Any]:
    """What a config with Mamba 2 has beside the others. Where a layer has no K/V heads, it has Mamba, or an MLP."""
    at = functools.partial("{}.{}".format, arch)
    names = {name.split(".", 2)[-1] for name in tensors if name.startswith("blk.")}
    size, heads, hidden = (meta.size(at(k)) for k in ("ssm.inner_size", "ssm.time_step_rank", "embedding_length"))
    groups, state, width = (meta.size(at(f"ssm.{k}")) for k in ("group_count", "state_size", "conv_kernel"))
    if size % heads:
        raise meta.bad(at("ssm.inner_size"), f"a multiple of ssm.time_step_rank, {heads}")
    biased, conv_biased = ("ssm_in.bias" in names), ("ssm_conv1d.bias" in names)
    if arch == "nemotron_h":
        kinds = [
            "full_attention" if kv else "mlp" if mlp else "linear_attention"
            for kv, mlp in zip(kv_heads, widths, strict=True)
        ]
        return {
            "layers_block_type": kinds,
            "layer_norm_epsilon": config["rms_norm_eps"],
            "mamba_num_heads": heads,
            "mamba_head_dim": size // heads,
            "n_groups": groups,
            "ssm_state_size": state,
            "conv_kernel": width,
            "use_conv_bias": conv_biased,
            "use_bias": biased,
        }
    sizes = {
        "mamba_n_heads": heads,
        "mamba_d_head": size // heads,
        "mamba_n_groups": groups,
        "mamba_d_state": state,
        "mamba_d_conv": width,
        "mamba_conv_bias": conv_biased,
        "mamba_proj_bias": biased,
    }
    if arch == "falcon-h1":  # its factors are in the weights, and its gate comes before the norm
        normed = {"mamba_rms_norm": "ssm_norm.weight" in names, "mamba_norm_before_gate": False}
        return sizes | normed | {"mamba_d_ssm": size, "projectors_bias": "ssm_out.bias" in names}
    if size % hidden:
        raise meta.bad(at("ssm.inner_size"), f"a multiple of embedding_length, {hidden}")
    shared = meta.whole(at("expert_shared_feed_forward_length"), 0) or config["intermediate_size"]
    return {
        **sizes,
        **_granite(meta),
        "mamba_expand": size // hidden,
        "layer_types": ["attention" if kv else "mamba" for kv in kv_heads],
        "position_embedding_type": "rope" if meta.truth(at("rope.scaling.finetuned"), True) else None,
        "shared_intermediate_size": shared,
        "num_local_experts": meta.whole(at("expert_count"), 0),
    }


def _short_convolutions(meta: Metadata, arch: str, config: Mapping[str, Any], kv_heads: list[int]) -> dict[str, Any]:
    """What LFM2's config has beside the others. Where a layer has no K/V heads, it has a convolution."""
    at = functools.partial("{}.{}".format, arch)
    made = {
        "norm_eps": config["rms_norm_eps"],
        "layer_types": ["full_attention" if kv else "conv" for kv in kv_heads],
        "conv_L_cache": meta.size(at("shortconv.l_cache")),
        "block_auto_adjust_ff_dim": False,
    }
    if arch == "lfm2moe":
        if meta.whole(at("expert_gating_func"), 2) != 2:
            raise meta.bad(at("expert_gating_func"), "2, a sigmoid")
        made["num_dense_layers"] = meta.whole(at("leading_dense_block_count"), 0)
    return made


def _granite(meta: Metadata) -> dict[str, Any]:
    """Granite's factors."""
    names = {
        "embedding_multiplier": "embedding_scale",
        "attention_multiplier": "attention.scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    arch = architecture(meta)
    return {name: _needed(meta, f"{arch}.{key}") for name, key in names.items()}


def _scaling(
    meta: Metadata, arch: str, tensors: Mapping[str, TensorInfo], read: Callable[[str], Tensor]
) -> dict[str, Any] | None:
    """config.json's ``rope_scaling``."""
    at = functools.partial("{}.rope.scaling.{}".format, arch)
    kind = meta.text(at("type")) or "none"
    factor, original = meta.number(at("factor")), meta.whole(at("original_context_length"), least=2)
    magnitude = meta.number(at("attn_factor"))
    one, long, short = (_factors(meta, name, tensors, read) for name in FACTORS)
    if long and short:
        return {
            "rope_type": "longrope",
            "long_factor": long,
            "short_factor": short,
            "original_max_position_embeddings": original or 4096,
            # Left out where it is what follows from the lengths, of which it is a rounded copy.
            **(
                {}
                if magnitude is None or _follows(meta, arch, magnitude, original)
                else {"attention_factor": magnitude}
            ),
        }
    if one:  # Llama 3's stretch, as a factor for each wavelength
        return {
            "rope_type": "longrope",
            "long_factor": one,
            "short_factor": one,
            "original_max_position_embeddings": meta.size(f"{arch}.context_length"),
            "attention_factor": 1.0,
        }
    if kind == "none" and (old := meta.number(f"{arch}.rope.scale_linear")) not in (None, 1.0):
        kind, factor = "linear", old
    if kind in ("none", "longrope"):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        fast, slow = (meta.number(at(f"yarn_beta_{name}")) for name in ("fast", "slow"))
        scaling = {"rope_type": "yarn", "factor": factor, "beta_fast": fast, "beta_slow": slow}
        if magnitude not in (None, 1.0) and factor:
            scaling["attention_factor"] = magnitude * (1 + 0.1 * math.log(factor))
        return scaling | ({} if original is None else {"original_max_position_embeddings": original})
    raise meta.bad(at("type"), "none, linear, yarn or longrope")


def _follows(meta: Metadata, arch: str, magnitude: float, original: int | None) -> bool:
    factor = meta.size(f"{arch}.context_length") / (original or 4096)
    wanted = math.sqrt(1 + math.log(factor) / math.log(original or 4096)) if factor > 1 else 1.0
    return math.isclose(magnitude, wanted, rel_tol=1e-6)


def _factors(
    meta: Metadata, name: str, tensors: Mapping[str, TensorInfo], read: Callable[[str], Tensor]
) -> list[float] | None:
    info = tensors.get(name)
    if info is None:
        return None
    if len(info.shape) != 1 or info.type.name != "F32" or info.shape[0] > 1 << 16:
        raise CheckpointError(
            f"{meta.path}: the tensor {name!r} has shape {list(info.shape)} and type {info.type.name}; it has to be a "
            "list in F32."
        )
    factors: list[float] = read(name).tolist()
    return factors
