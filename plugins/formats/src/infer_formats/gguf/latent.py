"""What a GGUF file with latent attention has beside a Llama's: settings, and K and V of the heads in tensors of their
own."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from infer.errors import CheckpointError
from infer.weight import GroupedWeight, Weight
from infer_formats.gguf.blocks import weight_of
from infer_formats.gguf.header import TensorInfo
from infer_formats.gguf.hybrids import drafting_layers
from infer_formats.gguf.metadata import Metadata

SOFTMAX, SIGMOID = 1, 2
"""How experts are chosen, as files number it."""


class LatentHeads(NamedTuple):
    """How many heads share a latent vector, and the sizes of that vector, of a head's K without the rotated part, and
    of its V."""

    heads: int
    latent: int
    plain: int
    value: int

    def rows(self, name: str, info: TensorInfo, raw: Tensor) -> Weight | None:
        """The rows of ``KV_B`` that the tensor of these bytes holds; None if it holds none. Raises CheckpointError."""
        part = name.removesuffix(".weight").rpartition(".")[2]
        shape = {
            "attn_k_b": (self.heads, self.latent, self.plain),  # transposed, since queries are multiplied by it
            "attn_v_b": (self.heads, self.value, self.latent),
            "attn_kv_b": (self.heads * (self.plain + self.value), self.latent),
        }.get(part)
        if shape is None:
            return None
        if info.shape != shape:
            raise CheckpointError(
                f"The tensor {name!r} has shape {list(info.shape)}; by the settings of the file, it has to be "
                f"{list(shape)}."
            )
        if part == "attn_kv_b":
            return weight_of(name, info, raw)
        weight = weight_of(name, replace(info, shape=(shape[0] * shape[1], shape[2])), raw.flatten(0, 1))
        each = (weight.dequantize() if isinstance(weight, GroupedWeight) else weight).view(shape)
        return (each.mT if part == "attn_k_b" else each).flatten(0, 1)


def latent_attention(
    meta: Metadata, arch: str, tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]
) -> dict[str, Any]:
    """What a config with latent attention has beside the others."""
    at = functools.partial("{}.{}".format, arch)
    # Where K and V of the heads are one tensor, the lengths are those of the heads, and otherwise of what is cached.
    end = "_mla" if any(name.endswith(".attn_k_b.weight") for name in tensors) else ""
    rotated, key_length = meta.size(at("rope.dimension_count")), meta.size(at(f"attention.key_length{end}"))
    if key_length <= rotated:
        raise meta.bad(at(f"attention.key_length{end}"), f"more than rope.dimension_count, {rotated}")
    if meta.number(at("attention.temperature_scale"), 0.0):
        raise meta.bad(at("attention.temperature_scale"), "0: infer reads no attention that is scaled by positions")
    unneeded = ("attention.key_length", "attention.value_length", "expert_shared_count")
    meta.read.update(map(at, (*unneeded, "expert_gating_func", "leading_dense_block_count")))
    drafting = drafting_layers(meta, arch)
    made = {
        "num_hidden_layers": config["num_hidden_layers"] - drafting,
        "num_nextn_predict_layers": drafting,
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": meta.whole(at("attention.q_lora_rank")) or None,
        "kv_lora_rank": meta.size(at("attention.kv_lora_rank")),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key_length - rotated,
        "v_head_dim": meta.size(at(f"attention.value_length{end}")),
    }
    if not meta.whole(at("expert_count"), 0):
        made["architectures"] = ["YoutuForCausalLM"]
    sharper = meta.number(at("rope.scaling.yarn_log_multiplier"))
    if sharper and config["rope_scaling"]:
        # The file has a tenth of it, in fp32. That cosines and sines are not scaled follows from the two being equal.
        scale = round(10 * sharper, 6)
        made["rope_scaling"] = {**config["rope_scaling"], "mscale": scale, "mscale_all_dim": scale}
    return made


def kimi_linear(meta: Metadata, arch: str, kv_heads: list[int]) -> dict[str, Any]:
    """What a config with delta attention has beside that of latent attention. Where a layer has no K/V heads, it has
    delta attention. That shares of experts add up to 1 follows from the architecture."""
    at = functools.partial("{}.{}".format, arch)
    if meta.whole(at("expert_gating_func"), SIGMOID) != SIGMOID:
        raise meta.bad(at("expert_gating_func"), f"{SIGMOID}, a sigmoid")
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "layer_types": ["full_attention" if kv else "linear_attention" for kv in kv_heads],
        "linear_head_dim": meta.size(at("kda.head_dim")),
        "linear_num_heads": meta.size(at("attention.head_count")),
        "linear_conv_kernel_dim": meta.size(at("ssm.conv_kernel")),
        "norm_topk_prob": True,
    }


def chosen_experts(meta: Metadata, arch: str, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """What the config of DeepSeek's experts has beside the others."""
    at = functools.partial("{}.{}".format, arch)
    biased = any(name.endswith(".exp_probs_b.bias") for name in tensors)
    # Files of GLM-4.7-Flash and older ones do not say it. Only sigmoids have a bias for the choice.
    gating = meta.whole(at("expert_gating_func")) or (SIGMOID if biased else SOFTMAX)
    if gating not in (SOFTMAX, SIGMOID):
        raise meta.bad(at("expert_gating_func"), f"{SOFTMAX}, a softmax, or {SIGMOID}, a sigmoid")
    return {
        "architectures": ["DeepseekV3ForCausalLM" if gating == SIGMOID else "DeepseekV2ForCausalLM"],
        "n_routed_experts": meta.size(at("expert_count")),
        "n_shared_experts": meta.size(at("expert_shared_count")),
        "n_group": meta.whole(at("expert_group_count")),
        "topk_group": meta.whole(at("expert_group_used_count")),
        "first_k_dense_replace": meta.whole(at("leading_dense_block_count"), 0),
        "norm_topk_prob": meta.truth(at("expert_weights_norm"), False),
        "routed_scaling_factor": meta.number(at("expert_weights_scale"), 0.0) or 1.0,
    }
