"""Writes a checkpoint of the hub's form as a GGUF file, by the ``gguf`` package and what llama.cpp's converter does.

Nothing of infer is used. Rows of a Llama's q and k are reordered for its way of rotating, Gemma's norms get the 1 that
the model adds, Llama 3's stretch becomes a tensor; names come from the package's own map.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

ARCHITECTURES = {
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "MistralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Ministral3ForCausalLM": gguf.MODEL_ARCH.MISTRAL3,
    "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
    "Gemma2ForCausalLM": gguf.MODEL_ARCH.GEMMA2,
    "Gemma3ForCausalLM": gguf.MODEL_ARCH.GEMMA3,
    "Gemma4ForCausalLM": gguf.MODEL_ARCH.GEMMA4,
    "GraniteForCausalLM": gguf.MODEL_ARCH.GRANITE,
    "SmolLM3ForCausalLM": gguf.MODEL_ARCH.SMOLLM3,
    "Phi3ForCausalLM": gguf.MODEL_ARCH.PHI3,
    "Olmo2ForCausalLM": gguf.MODEL_ARCH.OLMO2,
    "Olmo3ForCausalLM": gguf.MODEL_ARCH.OLMO2,
    "MixtralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Qwen3MoeForCausalLM": gguf.MODEL_ARCH.QWEN3MOE,
    "OlmoeForCausalLM": gguf.MODEL_ARCH.OLMOE,
    "GraniteMoeForCausalLM": gguf.MODEL_ARCH.GRANITE_MOE,
    "GptOssForCausalLM": gguf.MODEL_ARCH.GPT_OSS,
    "Lfm2ForCausalLM": gguf.MODEL_ARCH.LFM2,
    "Lfm2MoeForCausalLM": gguf.MODEL_ARCH.LFM2MOE,
    "GraniteMoeHybridForCausalLM": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "NemotronHForCausalLM": gguf.MODEL_ARCH.NEMOTRON_H,
    "FalconH1ForCausalLM": gguf.MODEL_ARCH.FALCON_H1,
    "Qwen3_5ForCausalLM": gguf.MODEL_ARCH.QWEN35,
    "Qwen3_5MoeForCausalLM": gguf.MODEL_ARCH.QWEN35MOE,
    "Qwen3NextForCausalLM": gguf.MODEL_ARCH.QWEN3NEXT,
    "DeepseekV2ForCausalLM": gguf.MODEL_ARCH.DEEPSEEK2,
    "DeepseekV3ForCausalLM": gguf.MODEL_ARCH.DEEPSEEK2,
    "Glm4MoeLiteForCausalLM": gguf.MODEL_ARCH.DEEPSEEK2,
    "YoutuForCausalLM": gguf.MODEL_ARCH.DEEPSEEK2,
    "KimiLinearForCausalLM": gguf.MODEL_ARCH.KIMI_LINEAR,
}
SCORES = {
    "DeepseekV2ForCausalLM": gguf.ExpertGatingFuncType.SOFTMAX,
    "DeepseekV3ForCausalLM": gguf.ExpertGatingFuncType.SIGMOID,
    "KimiLinearForCausalLM": gguf.ExpertGatingFuncType.SIGMOID,
}
"""How experts are chosen, where config.json says it."""
GRANITES = (gguf.MODEL_ARCH.GRANITE, gguf.MODEL_ARCH.GRANITE_MOE, gguf.MODEL_ARCH.GRANITE_HYBRID)
NEMOTRON = (gguf.MODEL_ARCH.NEMOTRON_H, gguf.MODEL_ARCH.NEMOTRON_H_MOE)
LLAMAS = (gguf.MODEL_ARCH.LLAMA, gguf.MODEL_ARCH.MISTRAL3, *GRANITES, gguf.MODEL_ARCH.SMOLLM3, *NEMOTRON)
LFM2 = (gguf.MODEL_ARCH.LFM2, gguf.MODEL_ARCH.LFM2MOE)
MAMBA = (gguf.MODEL_ARCH.GRANITE_HYBRID, gguf.MODEL_ARCH.FALCON_H1, *NEMOTRON)
DELTA = (gguf.MODEL_ARCH.QWEN35, gguf.MODEL_ARCH.QWEN35MOE, gguf.MODEL_ARCH.QWEN3NEXT)
KIMI_LINEAR = gguf.MODEL_ARCH.KIMI_LINEAR
LATENT = (gguf.MODEL_ARCH.DEEPSEEK2, KIMI_LINEAR)
UNIT_OFFSET = (gguf.MODEL_ARCH.GEMMA2, gguf.MODEL_ARCH.GEMMA3, *DELTA)
NORMS = ("norm.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight")
DRAFTING = {
    "mtp.fc.weight": gguf.MODEL_TENSOR.NEXTN_EH_PROJ,
    "mtp.pre_fc_norm_embedding.weight": gguf.MODEL_TENSOR.NEXTN_ENORM,
    "mtp.pre_fc_norm_hidden.weight": gguf.MODEL_TENSOR.NEXTN_HNORM,
    "mtp.norm.weight": gguf.MODEL_TENSOR.NEXTN_SHARED_HEAD_NORM,
}
"""What a draft head has beside its layer, which the converter makes the last one."""
TYPE: Any = gguf.GGMLQuantizationType
Quantize = Callable[[Tensor, str], np.ndarray]


def quantized(values: Tensor, type: str) -> np.ndarray:
    """The bytes of a tensor in a type, [..., bytes of a row]."""
    made: np.ndarray = gguf.quants.quantize(values.float().numpy(), TYPE[type])
    return made


def write_gguf(
    folder: Path,
    file: Path,
    type: str = "F32",
    *,
    quantize: Quantize = quantized,
    edit: Callable[[gguf.GGUFWriter, dict[str, Any]], None] = lambda writer, config: None,
    tokenizer: Callable[[gguf.GGUFWriter, Path], None] | None = None,
    part: int = 0,
    fused: bool = False,
    whole: bool = False,
) -> dict[str, Tensor]:
    """Matrices get the ``type``, all others are F32. Returns the weights that the file holds, by the hub's
    names; ``edit`` may add to the file before it is written. A ``part`` has so many tensors at most. If ``fused``,
    experts' gates and ups are one tensor, as the converter's ``--fuse-gate-up-exps`` has them; if ``whole``, so are K
    and V of latent attention, as older converters had them."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    arch = ARCHITECTURES[config["architectures"][0]]
    if arch == gguf.MODEL_ARCH.GRANITE_HYBRID and set(config["layer_types"]) == {"full_attention"}:
        arch = gguf.MODEL_ARCH.GRANITE
    if "moe" in config.get("layers_block_type", ()):
        arch = gguf.MODEL_ARCH.NEMOTRON_H_MOE
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[arch], split_max_tensors=part)
    config = known_as(config)
    config["head_dim"] = config["head_dim"] or config["hidden_size"] // config["num_attention_heads"]
    tensors = load_file(folder / "model.safetensors")
    # transformers calls dense MLPs of Kimi Linear as it calls mixtures.
    tensors = {re.sub(r"block_sparse_moe\.(\w+_proj\.)", r"mlp.\1", name): tensor for name, tensor in tensors.items()}
    layers, drafting = config["num_hidden_layers"], int(any(name.startswith("mtp.") for name in tensors))
    write_config(writer, arch, config, drafting)
    if arch in LATENT:
        write_latent(writer, config, whole)
    (tokenizer or byte_level)(writer, folder)
    edit(writer, config)
    names = gguf.get_tensor_name_map(arch, layers + drafting)
    held: dict[str, Tensor] = {}
    for name, given in mixed(tensors, config, fused, whole).items():
        dim, order = reordered(arch, name, given, config)
        offset = arch in UNIT_OFFSET and name.endswith(NORMS) and not name.endswith("linear_attn.norm.weight")
        stored = given.float() + 1 if offset else given.index_select(dim, order)
        stored = recurrent(arch, name, stored, config)
        own = own_name(names, name, layers)
        convolves = name.endswith(("conv.conv.weight", "conv1d.weight"))
        kind = type if given.ndim > 1 and not name.endswith((".bias", "A_log")) and not convolves else "F32"
        raw = quantize(stored, kind)
        back = torch.from_numpy(np.array(gguf.quants.dequantize(raw, TYPE[kind])))
        if name.endswith("A_log"):
            back = back.neg().log()
        back = back.reshape(given.shape)
        back = back - 1 if offset else back.index_select(dim, order.argsort())
        if ".experts." in name and not name.endswith("_proj"):
            held |= {name.replace("experts.", f"experts.{index}."): each for index, each in enumerate(back)}
        else:
            held[name] = back
        writer.add_tensor(own, raw, raw_dtype=TYPE[kind])
    for name in [name for name in held if name.endswith("k_b_proj.weight")]:
        parts = held.pop(name).mT, held.pop(name.replace("k_b_proj", "v_b_proj"))
        held[name.replace("k_b_proj", "kv_b_proj")] = torch.cat(parts, dim=1).flatten(0, 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def own_name(names: gguf.TensorNameMap, name: str, layers: int) -> str:
    """A tensor's name in the file."""
    if name.startswith("blk."):
        return name
    for scale, place in {"router.scale": "ffn_gate_inp", "router.per_expert_scale": "ffn_down_exps"}.items():
        if name.endswith(scale):
            return f"blk.{name.split('.')[2]}.{place}.scale"
    if name in DRAFTING:
        return gguf.TENSOR_NAMES[DRAFTING[name]].format(bid=layers) + ".weight"
    name = name.replace("mtp.layers.0", f"model.layers.{layers}")
    if ".experts.gate_up_proj." in name:
        return f"blk.{name.split('.')[2]}.ffn_gate_up_exps.{name.rpartition('.')[2]}"
    if ".mixer.experts." in name:
        name = name.replace("backbone.layers", "model.layers").replace("mixer", "mlp")
    alias = name.replace("dt_bias", "dt_proj.bias").replace("expert_bias", "expert_bias.bias")
    alias = alias.replace("correction_bias", "correction.bias")
    own = names.get_name(alias, try_suffixes=(".weight", ".bias"))
    assert own is not None, name
    return own + (".weight" if name.endswith(("sinks", "layer_scalar", "_proj")) else "")


def known_as(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the fields of others in place of those that only its own family has."""
    config = {"head_dim": None, **config}
    config.setdefault("num_hidden_layers", len(config.get("layers_block_type", ())))
    config.setdefault("rms_norm_eps", config.get("norm_eps", config.get("layer_norm_epsilon")))
    config.setdefault("rope_parameters", {"rope_theta": 10_000.0})
    if config["architectures"] == ["KimiLinearForCausalLM"]:
        names = {"num_experts": "n_routed_experts", "num_experts_per_token": "num_experts_per_tok"}
        names |= {"num_shared_experts": "n_shared_experts", "num_expert_group": "n_group"}
        names |= {"model_max_length": "max_position_embeddings"}
        config = {names.get(key, key): value for key, value in config.items()}
        config["first_k_dense_replace"] = config["mlp_layer_types"].count("dense")
    if "kv_lora_rank" in config:
        config |= {"head_dim": config["qk_rope_head_dim"], "num_key_value_heads": 1}
    if config["architectures"] == ["Lfm2ForCausalLM"]:
        of, width = config["block_multiple_of"], int(2 * config["intermediate_size"] / 3)
        config["intermediate_size"] = (width + of - 1) // of * of
    return config


def reordered(arch: gguf.MODEL_ARCH, name: str, tensor: Tensor, config: Mapping[str, Any]) -> tuple[int, Tensor]:
    """A dimension, and the order along it in which the converter stores a tensor."""
    rows = torch.arange(tensor.shape[0])
    if arch in LLAMAS and ("q_proj" in name or "k_proj" in name):
        return 0, rows.view(-1, 2, config["head_dim"] // 2).transpose(1, 2).flatten()
    if arch not in DELTA[:2] or ".linear_attn." not in name or name.endswith("norm.weight"):
        return 0, rows
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if name.endswith("out_proj.weight"):
        return 1, torch.arange(tensor.shape[1]).view(keys, values // keys, -1).transpose(0, 1).flatten()
    before = 2 * keys * config["linear_key_head_dim"] if name.endswith(("in_proj_qkv.weight", "conv1d.weight")) else 0
    return 0, torch.cat((rows[:before], rows[before:].view(keys, values // keys, -1).transpose(0, 1).flatten()))


def recurrent(arch: gguf.MODEL_ARCH, name: str, tensor: Tensor, config: Mapping[str, Any]) -> Tensor:
    """A tensor of a recurrent layer as the converter stores it; others as they are."""
    if name.endswith(("conv.conv.weight", "conv1d.weight")):
        return tensor[None].transpose(1, 2) if arch == KIMI_LINEAR else tensor.squeeze(1)
    if name.endswith("A_log"):
        return -(tensor.float().exp() if arch in (*DELTA, KIMI_LINEAR) else tensor.float().exp().reshape(-1, 1))
    if name.endswith(("mamba.D", "mixer.D")):
        return tensor.reshape(-1, 1)
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        return tensor.reshape(config.get("mamba_n_groups") or config["n_groups"], -1)
    if arch == gguf.MODEL_ARCH.FALCON_H1:
        return tensor if (factors := falcon_factors(name, tensor, config)) is None else tensor * factors
    return tensor


def falcon_factors(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Any:
    """What the converter multiplies a tensor of Falcon-H1 by; None for nothing."""
    attention, (gate, down) = config["attention_in_multiplier"], config["mlp_multipliers"]
    if name.endswith("in_proj.weight"):
        x, groups = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        widths = torch.tensor([x, x, groups, groups, config["mamba_n_heads"]])
        whole = torch.tensor(config["ssm_multipliers"]).repeat_interleave(widths)[:, None]
        return whole * config["ssm_in_multiplier"]
    factors = {
        "gate_proj": gate,
        "down_proj": down,
        "q_proj": attention,
        "k_proj": attention * config["key_multiplier"],
        "v_proj": attention,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    return factors.get(name.removesuffix(".weight").split(".")[-1])


def mixed(tensors: dict[str, Tensor], config: Mapping[str, Any], fused: bool, whole: bool) -> dict[str, Tensor]:
    """Experts stacked as the package names them, gate and up apart unless they are ``fused`` or Gemma 4's, and K and V
    of latent attention apart unless they are ``whole``."""
    made: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name):
            stacked, part = match[1].replace("block_sparse_moe", "mlp"), match[3]
            for old, new in {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}.items():
                part = part.replace(old, new)
            rows = [tensors[f"{match[1]}.{index}.{match[3]}"] for index in range(6)]
            made[f"{stacked}.{part}"] = torch.stack(rows)
        elif match := re.fullmatch(r"model.layers.(\d+).shared_mlp.(in|out)put_linear.weight", name):
            shared = "_shexp" if config["num_local_experts"] else ""
            kinds = {"in": ("gate", "up"), "out": ("down",)}[match[2]]
            names = [f"blk.{match[1]}.ffn_{kind}{shared}.weight" for kind in kinds]
            made |= dict(zip(names, tensor.chunk(len(names)), strict=True))
        elif name.endswith("input_linear.weight"):
            place = name.replace("block_sparse_moe.input_linear", "mlp.experts.{}_proj")
            made |= dict(zip(map(place.format, ("gate", "up")), tensor.chunk(2, 1), strict=True))
        elif match := re.fullmatch(r"model.layers.(\d+).linear_attn.in_proj_qkvz.weight", name):
            keys, times = config["linear_num_key_heads"], config["linear_num_value_heads"]
            each = [config["linear_key_head_dim"]] * 2 + [config["linear_value_head_dim"] * times // keys] * 2
            *qkv, z = torch.split_with_sizes(tensor.view(keys, sum(each), -1), each, dim=1)
            made[f"blk.{match[1]}.attn_qkv.weight"] = torch.cat([part.flatten(0, 1) for part in qkv])
            made[f"blk.{match[1]}.attn_gate.weight"] = z.flatten(0, 1)
        elif ".experts.gate_up_proj" in name and "linear_num_key_heads" in config:
            place = name.replace("gate_up_proj", "{}_proj.weight")
            made |= dict(zip(map(place.format, ("gate", "up")), tensor.chunk(2, 1), strict=True))
        elif name.endswith(".experts.down_proj") and "linear_num_key_heads" in config:
            made[f"{name}.weight"] = tensor
        elif match := re.fullmatch(r"(.*\.mlp\.experts\.)(gate_up|down)_proj(_bias)?", name):
            kind, values = "bias" if match[3] else "weight", tensor if match[3] else tensor.mT
            halves = {"down": values} if match[2] == "down" else {"gate": values[:, ::2], "up": values[:, 1::2]}
            made |= {f"{match[1]}{part}_proj.{kind}": half.contiguous() for part, half in halves.items()}
        elif name.endswith("kv_b_proj.weight") and not whole:
            heads = tensor.view(config["num_attention_heads"], -1, tensor.shape[1])
            k, v = torch.split_with_sizes(heads, [config["qk_nope_head_dim"], config["v_head_dim"]], dim=1)
            # V first, since nothing says which is.
            made |= {name.replace("kv_b", "v_b"): v, name.replace("kv_b", "k_b"): k.mT}
        else:
            made[name] = tensor
    for gate in [name for name in made if fused and ".experts.gate_proj." in name]:
        place, kind = gate.split(".experts.gate_proj.")
        both = torch.cat((made.pop(gate), made.pop(f"{place}.experts.up_proj.{kind}")), dim=1)
        made[f"{place}.experts.gate_up_proj.{kind}"] = both
    return {name: tensor.contiguous() for name, tensor in made.items()}


def write_config(writer: gguf.GGUFWriter, arch: gguf.MODEL_ARCH, config: Mapping[str, Any], drafting: int) -> None:
    if drafting:
        writer.add_nextn_predict_layers(drafting)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"] + drafting)
    kinds = config.get("layers_block_type") or config.get("layer_types") or []
    width, kv_heads = config["intermediate_size"], config["num_key_value_heads"]
    hybrid = "full_attention" in kinds and arch in (*LFM2, *GRANITES, *NEMOTRON, KIMI_LINEAR)
    widths = {"mlp": width, "moe": config.get("moe_intermediate_size")}
    writer.add_head_count(config["num_attention_heads"])
    if arch == gguf.MODEL_ARCH.GEMMA4:
        write_gemma4(writer, config)
    else:
        writer.add_feed_forward_length([widths.get(kind, 0) for kind in kinds] if arch in NEMOTRON else width)
        writer.add_head_count_kv(
            [kv_heads if kind == "full_attention" else 0 for kind in kinds] if hybrid else kv_heads
        )
        if arch not in LATENT:
            writer.add_key_length(config["head_dim"])
            writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_bos_token_id(config["bos_token_id"])
    ropes = config["rope_parameters"]
    rope = ropes.get("full_attention", ropes)
    size = config["head_dim"]
    if arch != gguf.MODEL_ARCH.GEMMA4:
        writer.add_rope_dimension_count(int(size * rope.get("partial_rotary_factor", 1)))
    writer.add_rope_freq_base(rope["rope_theta"])
    if arch == gguf.MODEL_ARCH.NEMOTRON_H_MOE:
        writer.add_expert_count(config["n_routed_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_group_count(config["n_group"])
        if latent := config["moe_latent_size"]:
            writer.add_moe_latent_size(latent)
    elif experts := config.get("num_experts") or config.get("num_local_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.get("top_k_experts") or config["num_experts_per_tok"])
    if arch in LFM2:
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    if arch == gguf.MODEL_ARCH.LFM2MOE:
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if arch in MAMBA or "mamba_n_heads" in config:
        heads = config.get("mamba_n_heads") or config["mamba_num_heads"]
        writer.add_ssm_conv_kernel(config.get("mamba_d_conv") or config["conv_kernel"])
        writer.add_ssm_state_size(config.get("mamba_d_state") or config["ssm_state_size"])
        writer.add_ssm_group_count(config.get("mamba_n_groups") or config["n_groups"])
        writer.add_ssm_inner_size(heads * (config.get("mamba_d_head") or config["mamba_head_dim"]))
        writer.add_ssm_time_step_rank(heads)
    if arch == KIMI_LINEAR:
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_kda_head_dim(config["linear_head_dim"])
    if arch in DELTA:
        heads, size_v = config["linear_num_value_heads"], config["linear_value_head_dim"]
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_inner_size(heads * size_v)
        writer.add_ssm_time_step_rank(heads)
        writer.add_full_attention_interval(4)
        writer.add_rope_dimension_sections([11, 11, 10, 0])
        if "shared_expert_intermediate_size" in config:
            writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
            writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "position_embedding_type" in config:
        writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    if arch in (gguf.MODEL_ARCH.QWEN3MOE, gguf.MODEL_ARCH.LFM2MOE) or config.get("enable_moe_block"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if arch == gguf.MODEL_ARCH.GPT_OSS:
        writer.add_sliding_window(config["sliding_window"])
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if arch == gguf.MODEL_ARCH.GEMMA3:
        assert config["query_pre_attn_scalar"] == size
        writer.add_sliding_window(config["sliding_window"])
        writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
        if (kinds := config["layer_types"]) != gemma_pattern(len(kinds)):
            writer.add_array("gemma3.attention.sliding_window_pattern", [kind == "sliding_attention" for kind in kinds])
        if cap := config.get("final_logit_softcapping"):
            writer.add_final_logit_softcapping(cap)
    elif arch == gguf.MODEL_ARCH.GEMMA2:
        assert config["query_pre_attn_scalar"] == size
        writer.add_sliding_window(config["sliding_window"])
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    elif arch in GRANITES:
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    elif arch in (gguf.MODEL_ARCH.LLAMA, gguf.MODEL_ARCH.PHI3) and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    elif arch == gguf.MODEL_ARCH.PHI3:
        writer.add_sliding_window(0)
    elif arch == gguf.MODEL_ARCH.OLMO2 and "sliding_window" in config:
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
    match rope.get("rope_type"):
        case "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope["factor"])
        case "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
            if arch == gguf.MODEL_ARCH.MISTRAL3:
                writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
                writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
        case "llama3":
            writer.add_tensor("rope_freqs.weight", llama3_factors(rope, size))
        case "longrope":
            length, made_for = rope["original_max_position_embeddings"], config["max_position_embeddings"]
            factor = made_for / length
            writer.add_rope_scaling_orig_ctx_len(length)
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(factor) / math.log(length)))
            for kind in ("long", "short"):
                writer.add_tensor(f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32))


def write_latent(writer: gguf.GGUFWriter, config: dict[str, Any], whole: bool) -> None:
    """K and V are those of the one head that is cached, or, if they are ``whole``, those of the heads."""
    latent, rotated, value = config["kv_lora_rank"], config["qk_rope_head_dim"], config["v_head_dim"]
    key = config["qk_nope_head_dim"] + rotated
    if query := config["q_lora_rank"]:
        writer.add_q_lora_rank(query)
    writer.add_kv_lora_rank(latent)
    writer.add_key_length(key if whole else latent + rotated)
    writer.add_value_length(value if whole else latent)
    if not whole:
        writer.add_key_length_mla(key)
        writer.add_value_length_mla(value)
    experts = config.get("n_routed_experts")
    writer.add_leading_dense_block_count(config["first_k_dense_replace"] if experts else config["num_hidden_layers"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"] if experts else config["intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"] if experts else 0)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        if config.get("norm_topk_prob"):
            writer.add_expert_weights_norm(True)
        if (scores := SCORES.get(config["architectures"][0])) is not None:
            writer.add_expert_gating_func(scores)
    if (steeper := config["rope_parameters"].get("mscale_all_dim")) is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * steeper)


def write_gemma4(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """What differs from layer to layer is a list. The pairs of a head that do not rotate are stretched by 1e30."""
    layers, shared = config["num_hidden_layers"], config["num_kv_shared_layers"]
    kinds, own = [kind == "sliding_attention" for kind in config["layer_types"]], config["per_layer_config"]
    full = next(iter(own.values()))["head_dim"]
    wide = [2 if config["use_double_wide_mlp"] and i >= layers - shared else 1 for i in range(layers)]
    writer.add_feed_forward_length([config["intermediate_size"] * times for times in wide])
    heads = [own.get(str(i), {}).get("num_key_value_heads", config["num_key_value_heads"]) for i in range(layers)]
    writer.add_head_count_kv(heads)
    writer.add_key_length(full)
    writer.add_value_length(full)
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    writer.add_rope_dimension_count(full)
    writer.add_uint32("gemma4.rope.dimension_count_swa", config["head_dim"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(kinds)
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    ropes = config["rope_parameters"]
    writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    if cap := config["final_logit_softcapping"]:
        writer.add_final_logit_softcapping(cap)
    rotated = int(full * ropes["full_attention"]["partial_rotary_factor"]) // 2
    factors = np.array([1.0] * rotated + [1e30] * (full // 2 - rotated), np.float32)
    writer.add_tensor("rope_freqs.weight", factors)


def gemma_pattern(layers: int) -> list[str]:
    return ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(layers)]


def llama3_factors(rope: Mapping[str, Any], size: int) -> np.ndarray:
    """By how much each wavelength is stretched."""
    length, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    made = []
    for i in range(0, size, 2):
        turns = length / (2 * math.pi * rope["rope_theta"] ** (i / size))
        smooth = min(max((turns - low) / (high - low), 0), 1)
        made.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(made, np.float32)


def byte_level(writer: gguf.GGUFWriter, folder: Path, pre: str = "gpt-2") -> None:
    """The folder's tokenizer.json, a BPE of bytes."""
    state = json.loads((folder / "tokenizer.json").read_text())
    texts = {id: text for text, id in state["model"]["vocab"].items()}
    added = {token["id"]: token for token in state["added_tokens"]}
    texts |= {id: token["content"] for id, token in added.items()}
    size = json.loads((folder / "config.json").read_text())["vocab_size"] if (folder / "config.json").exists() else 0
    tokens, kinds = [], []
    for id in range(max(*texts, size - 1) + 1):
        tokens.append(texts.get(id, f"[PAD{id}]"))
        if id not in texts:
            kinds.append(gguf.TokenType.UNUSED)
        elif id in added:
            kinds.append(gguf.TokenType.CONTROL if added[id]["special"] else gguf.TokenType.USER_DEFINED)
        else:
            kinds.append(gguf.TokenType.NORMAL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in state["model"]["merges"]])
