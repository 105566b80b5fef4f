"""What the settings of a GGUF file of Gemma have beside a Llama's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from infer.errors import CheckpointError
from infer_formats.gguf.header import TensorInfo
from infer_formats.gguf.metadata import Metadata
from infer_formats.gguf.rope import FACTORS, wavelength_factors

GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
"""The sizes whose attention is scaled by hidden_size / heads instead of by the size of a head."""


def gemma(meta: Metadata, arch: str, head_dim: int, even_split: int) -> dict[str, Any]:
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
    if (kinds := meta.layer_types(arch)) is not None:
        config["layer_types"] = kinds
    else:
        config["sliding_window_pattern"] = meta.whole(at("attention.sliding_window_pattern"), 6, least=1)
    return config


def gemma4(meta: Metadata, tensors: Mapping[str, TensorInfo], read: Callable[[str], Tensor]) -> dict[str, Any]:
    """What a Gemma 4's config has beside a Llama's. A tensor of factors stops the rotation of a head's last pairs."""
    layers = meta.size("gemma4.block_count")
    windows = meta.several("gemma4.attention.sliding_window_pattern", bool) or []
    kv_heads, widths = meta.each("gemma4.attention.head_count_kv"), meta.each("gemma4.feed_forward_length")
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
    if (factors := wavelength_factors(meta, FACTORS[0], tensors, read)) is not None:
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
