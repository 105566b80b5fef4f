"""What the settings of a GGUF file with recurrent layers have beside a Llama's."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from infer.errors import CheckpointError
from infer_formats.gguf.header import TensorInfo
from infer_formats.gguf.metadata import Metadata
from infer_formats.gguf.names import NEMOTRON


def state_space(
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
    if arch in NEMOTRON:
        wide = "moe" if arch == "nemotron_h_moe" else "mlp"
        kinds = [
            "full_attention" if kv else wide if mlp else "linear_attention"
            for kv, mlp in zip(kv_heads, widths, strict=True)
        ]
        kinds = kinds[: len(kinds) - (drafting_layers(meta, arch) if wide == "moe" else 0)]
        return {
            "num_hidden_layers": len(kinds),
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
    if arch == "falcon-h1" and "output.weight" not in tensors:
        raise CheckpointError(
            f"{meta.path} lacks 'output.weight', and a file of {arch} does not say what its logits are multiplied by."
        )
    if arch == "falcon-h1":  # its factors are in the weights, and its gate comes before the norm
        normed = {"mamba_rms_norm": "ssm_norm.weight" in names, "mamba_norm_before_gate": False}
        return sizes | normed | {"mamba_d_ssm": size, "projectors_bias": "ssm_out.bias" in names}
    if size % hidden:
        raise meta.bad(at("ssm.inner_size"), f"a multiple of embedding_length, {hidden}")
    shared = meta.whole(at("expert_shared_feed_forward_length"), 0) or config["intermediate_size"]
    return {
        **sizes,
        **granite(meta, arch),
        "mamba_expand": size // hidden,
        "layer_types": ["attention" if kv else "mamba" for kv in kv_heads],
        "position_embedding_type": "rope" if meta.truth(at("rope.scaling.finetuned"), True) else None,
        "shared_intermediate_size": shared,
        "num_local_experts": meta.whole(at("expert_count"), 0),
    }


def squared_experts(meta: Metadata, arch: str) -> dict[str, Any]:
    """What the config of Nemotron 3's experts has beside the others."""
    at = functools.partial("{}.{}".format, arch)
    if meta.whole(at("expert_group_count"), 1) not in (0, 1):
        raise meta.bad(at("expert_group_count"), "1: infer chooses no groups of experts")
    if meta.whole(at("expert_gating_func"), 2) != 2:
        raise meta.bad(at("expert_gating_func"), "2, a sigmoid")
    meta.read.update(map(at, ("expert_shared_count", "expert_group_used_count")))
    return {
        "moe_shared_expert_intermediate_size": meta.size(at("expert_shared_feed_forward_length")),
        "moe_latent_size": meta.whole(at("moe_latent_size")) or None,
        "norm_topk_prob": meta.truth(at("expert_weights_norm"), True),
        "routed_scaling_factor": meta.number(at("expert_weights_scale"), 1.0),
    }


def drafting_layers(meta: Metadata, arch: str) -> int:
    """How many of a file's last layers draft tokens."""
    layers, drafting = meta.size(f"{arch}.block_count"), meta.whole(f"{arch}.nextn_predict_layers", 0) or 0
    if drafting >= layers:
        raise meta.bad(f"{arch}.nextn_predict_layers", f"fewer than block_count, {layers}")
    return drafting


def delta_nets(meta: Metadata, arch: str, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """What a config with gated delta nets has beside the others. A layer that has q apart has attention."""
    at = functools.partial("{}.{}".format, arch)
    size, key_heads, value_heads = (meta.size(at(f"ssm.{k}")) for k in ("inner_size", "group_count", "time_step_rank"))
    if value_heads % key_heads:
        raise meta.bad(at("ssm.time_step_rank"), f"a multiple of ssm.group_count, {key_heads}")
    if size % value_heads:
        raise meta.bad(at("ssm.inner_size"), f"a multiple of ssm.time_step_rank, {value_heads}")
    # Text has one position in all sections of its rotation, and layers say themselves what they are.
    meta.read.update(map(at, ("rope.dimension_sections", "full_attention_interval", "attention.recurrent_layers")))
    layers, drafting = meta.size(at("block_count")), drafting_layers(meta, arch)
    full = [f"blk.{i}.attn_q.weight" in tensors for i in range(layers - drafting)]
    return {
        "num_hidden_layers": len(full),
        "mtp_num_hidden_layers": drafting,
        "num_key_value_heads": max(meta.each(at("attention.head_count_kv"), meta.size(at("attention.head_count")))),
        "layer_types": ["full_attention" if attends else "linear_attention" for attends in full],
        "attention_bias": any(name.endswith(".attn_q.bias") for name in tensors),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": meta.size(at("ssm.state_size")),
        "linear_value_head_dim": size // value_heads,
        "linear_conv_kernel_dim": meta.size(at("ssm.conv_kernel")),
    }


def short_convolutions(meta: Metadata, arch: str, config: Mapping[str, Any], kv_heads: list[int]) -> dict[str, Any]:
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


def granite(meta: Metadata, arch: str) -> dict[str, Any]:
    """Granite's factors."""
    names = {
        "embedding_multiplier": "embedding_scale",
        "attention_multiplier": "attention.scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    return {name: meta.needed(f"{arch}.{key}") for name, key in names.items()}
