"""A GGUF file's tensors by the names, and in the forms, that the hub's models have."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from infer.weight import GroupedWeight, Weight

NEMOTRON = ("nemotron_h", "nemotron_h_moe")
"""Nemotron-H without experts, and with them."""
TURNED = ("llama", "mistral3", "granite", "granitemoe", "smollm3", "granitehybrid", *NEMOTRON)
"""Architectures whose q and k rotate neighbors instead of halves."""
CONVOLVED = ("lfm2", "lfm2moe")
"""Architectures with short convolutions."""
DELTA = ("qwen35", "qwen35moe", "qwen3next")
"""Those with gated delta nets."""
LATENT = ("deepseek2", "kimi-linear")
"""Those with latent attention."""
DRAFTING = (*DELTA, "nemotron_h_moe")
"""Those whose last layers may be a draft head."""
TILED = ("qwen35", "qwen35moe")
"""Those of them whose value heads are in another order than the hub's."""
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
    **{
        arch: {"token_embd.weight": "backbone.embeddings.weight", "output_norm.weight": "backbone.norm_f.weight"}
        for arch in NEMOTRON
    },
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
NEXT = {
    "nextn.eh_proj": "nextn.fc",
    "nextn.enorm": "nextn.pre_fc_norm_embedding",
    "nextn.hnorm": "nextn.pre_fc_norm_hidden",
    "nextn.shared_head_norm": "nextn.norm",
}
"""What a draft head has beside its layers."""
NEMOTRON_H = {
    "attn_norm": "norm",
    **{f"attn_{part}": f"mixer.{part}_proj" for part in "qkv"},
    "attn_output": "mixer.o_proj",
    **{f"ffn_{part}": f"mixer.{part}_proj" for part in ("up", "down")},
    **{f"ffn_{part}_shexp": f"mixer.shared_experts.{part}_proj" for part in ("up", "down")},
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b": "mixer.gate.e_score_correction_bias",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
    **{part: f"mixer.{hub}" for part, hub in STATE_SPACE.items()},
    **NEXT,
}
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
BARE = (
    *("sinks", "layer_scalar", "dt_bias", "A_log", "D", "scale", "per_expert_scale"),
    *("expert_bias", "e_score_correction_bias"),
)
"""Ends of the hub's names that have no "weight" or "bias" behind them."""
DELTA_NET = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
    **NEXT,
}
"""Names within Qwen3.5."""
GATE_AND_UP, QKVZ = "shared_mlp.input_linear.weight", "linear_attn.in_proj_qkvz.weight"
KV_B = "self_attn.kv_b_proj.weight"
PAIRS = (GATE_AND_UP, QKVZ, KV_B)
"""The ends of the hub's names of tensors that are two in a file."""
SECOND = (".ffn_up", ".attn_gate", ".attn_v_b")
"""What the names of the second of two such tensors contain."""
LATENT_ATTENTION = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    **{f"attn_{part}_b": KV_B.removesuffix(".weight") for part in ("k", "v", "kv")},
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    **{f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
}
"""Names within DeepSeek's models."""
KIMI_LINEAR = {
    **LATENT_ATTENTION,
    **{f"ssm_conv1d_{part}": f"self_attn.{part}_conv1d" for part in "qkv"},
    **{f"ssm_{part}": f"self_attn.{part}_proj" for part in ("f_a", "f_b", "g_a", "g_b")},
    "ssm_beta": "self_attn.b_proj",
    "ssm_dt": "self_attn.dt_bias",
    "ssm_a": "self_attn.A_log",
    "ssm_norm": "self_attn.o_norm",
}
WITHIN_OF = {
    **dict.fromkeys(TILED, DELTA_NET),
    "qwen3next": {
        **DELTA_NET,
        **dict.fromkeys(("attn_qkv", "attn_gate", "ssm_in"), QKVZ.removesuffix(".weight")),
        "ssm_ba": "linear_attn.in_proj_ba",
    },
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
    **dict.fromkeys(NEMOTRON, NEMOTRON_H),
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
        "ffn_gate_inp": "router.proj",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        **{f"post_ffw_norm_{i}": f"post_feedforward_layernorm_{i}" for i in (1, 2)},
    },
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "deepseek2": LATENT_ATTENTION,
    "kimi-linear": KIMI_LINEAR,
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
    "qwen35moe": Mixture(),
    "qwen3next": Mixture(),
    "olmoe": Mixture(),
    "granitemoe": Mixture("block_sparse_moe.experts", "gate_up_proj", "gate_up_proj"),
    "granitehybrid": Mixture("block_sparse_moe.experts", "gate_up_proj", "gate_up_proj"),
    "lfm2moe": Mixture("feed_forward.experts", "w1", "w3", "w2"),
    "gpt-oss": Mixture("mlp.experts", "gate_up_proj", "gate_up_proj", interleaved=True),
    "gemma4": Mixture("experts"),
    "nemotron_h_moe": Mixture("mixer.experts"),
    "deepseek2": Mixture(),
    "kimi-linear": Mixture(),
}


def layer_of(name: str) -> int | None:
    """The number of the layer that a tensor belongs to; None if it belongs to none."""
    match = re.match(r"blk\.(\d{1,9})\.", name)
    return None if match is None else int(match[1])


def hub_name(arch: str, name: str) -> str:
    """A tensor's name in the hub's checkpoints; a name that is not known is left as it is."""
    if match := re.fullmatch(r"blk\.(\d+)\.([\w.]+?)(?:\.(weight|bias))?", name):
        layer, part, kind = match.groups()
        if hub := WITHIN_OF.get(arch, {}).get(part) or WITHIN.get(part):
            bare = hub.split(".")[-1] in BARE
            return f"{_layer(arch, layer)}.{hub}" + ("" if bare else f".{kind or 'weight'}")
    return OUTSIDE_OF.get(arch, {}).get(name) or OUTSIDE.get(name, name)


def _layer(arch: str, number: str) -> str:
    return f"{'backbone' if arch in NEMOTRON else 'model'}.layers.{int(number)}"


def drafting_name(name: str, layers: int) -> str:
    """A tensor's name in the hub's checkpoints, in which a draft head is apart from the ``layers`` of the model, rather
    than behind them."""
    match = re.match(r"(?:model|backbone)\.layers\.(\d+)\.(nextn\.)?", name)
    if match is None or int(match[1]) < layers:
        return name
    return ("mtp." if match[2] else f"mtp.layers.{int(match[1]) - layers}.") + name[match.end() :]


def expert_names(arch: str, name: str) -> list[Callable[[int], str]]:
    """The hub's names of each expert's part of a stack, by the parts that its rows are equally divided between; none if
    the tensor is no stack."""
    match = re.fullmatch(r"blk\.(\d+)\.ffn_(gate|up|down|gate_up)_exps\.(weight|bias)", name)
    if match is None or arch not in MIXTURES:
        return []
    mixture = MIXTURES[arch]
    place, parts = f"{_layer(arch, match[1])}.{mixture.experts}", match[2].split("_")
    ends = [f"{getattr(mixture, part)}.{match[3]}" for part in parts]
    return [lambda index, end=end: f"{place}.{index}.{end}" for end in ends]  # type: ignore[misc]


def row_order(rows: int, head_size: int) -> Tensor:
    """The order that brings the rows of a Llama's q or k back into that of the hub. GGUF has the two values that are
    rotated against each other as neighbors; the hub has them half a head apart."""
    if rows % head_size or head_size % 2:
        return torch.arange(rows)  # the model says what is wrong with the shape
    return torch.arange(rows).view(-1, head_size // 2, 2).transpose(1, 2).flatten()


class DeltaHeads(NamedTuple):
    """How many heads of keys and of values a gated delta net has, and their sizes."""

    keys: int
    values: int
    key_size: int
    value_size: int

    def grouped(self, name: str, weight: Weight) -> Weight:
        """A tensor in the hub's order, in which a key head's value heads stand together. A file of ``TILED`` has the
        first value head of each key head, then the second of each, and so on."""
        part = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
        order_H = torch.arange(self.values).view(-1, self.keys).t().flatten()
        if part == "ssm_out":
            return _columns(weight, order_H)
        if part not in ("attn_qkv", "attn_gate", "ssm_conv1d", "ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt"):
            return weight
        before = 2 * self.keys * self.key_size if part in ("attn_qkv", "ssm_conv1d") else 0
        rows = torch.arange(weight.shape[0])
        if (weight.shape[0] - before) % self.values:
            return weight  # the model says what is wrong with the shape
        order_N = torch.cat((rows[:before], rows[before:].view(self.values, -1)[order_H].flatten()))
        return weight.rows(order_N) if isinstance(weight, GroupedWeight) else weight[order_N]

    def interleaved(self, rows: int) -> Tensor:
        """The order that brings the rows of q, K, V and gates into that of ``QKVZ``: each key head with all its own."""
        sizes = (self.keys * self.key_size,) * 2 + (self.values * self.value_size,) * 2
        if sum(sizes) != rows:
            return torch.arange(rows)  # the model says what is wrong with the shape
        return by_head(sizes, self.keys)


def by_head(sizes: Sequence[int], heads: int) -> Tensor:
    """The order that brings the rows of parts, which so many heads share equally, into that of the heads: each with its
    own of all parts."""
    parts = torch.split_with_sizes(torch.arange(sum(sizes)), list(sizes))
    return torch.cat([part.view(heads, -1) for part in parts], dim=1).flatten()


def _columns(weight: Weight, order: Tensor) -> Weight:
    """So many equal parts of each row, in that order."""
    if weight.shape[-1] % len(order):
        return weight
    if isinstance(weight, GroupedWeight):
        if weight.scales_NG.shape[1] % len(order) == 0:
            return weight.columns(order)
        weight = weight.dequantize()
    return weight.view(len(weight), len(order), -1)[:, order].flatten(1)


def hub_tensor(name: str, weight: Weight) -> Weight:
    """A tensor of a recurrent layer as the hub has it; others as they are."""
    part = name.removesuffix(".weight").rpartition(".")[2]
    convolves = "ssm_conv1d" in part or name.endswith("shortconv.conv.weight")
    if part not in ("ssm_a", "ssm_d", "ssm_norm") and not convolves:
        return weight
    plain = weight.dequantize() if isinstance(weight, GroupedWeight) else weight
    if convolves:
        return plain.reshape(-1, 1, plain.shape[-1])  # which may have dimensions of 1 besides
    return plain.float().neg().log().flatten() if part == "ssm_a" else plain.flatten()
