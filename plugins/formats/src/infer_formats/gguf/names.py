"""A GGUF file's tensors by the names, and in the forms, that the hub's models have."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from infer.weight import GroupedWeight, Weight

TURNED = ("llama", "granite", "granitemoe", "smollm3", "granitehybrid", "nemotron_h")
"""Architectures whose q and k rotate neighbors instead of halves."""
CONVOLVED = ("lfm2", "lfm2moe")
"""Those with short convolutions."""
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
