"""How a GGUF file says that rotations are stretched for long texts."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from infer.errors import CheckpointError
from infer_formats.gguf.header import TensorInfo
from infer_formats.gguf.metadata import Metadata

FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that say how far to stretch each wavelength, which is a matter of config.json."""


def rope_scaling(
    meta: Metadata, arch: str, tensors: Mapping[str, TensorInfo], read: Callable[[str], Tensor]
) -> dict[str, Any] | None:
    """config.json's ``rope_scaling``."""
    at = functools.partial("{}.rope.scaling.{}".format, arch)
    kind = meta.text(at("type")) or "none"
    factor, original = meta.number(at("factor")), meta.whole(at("original_context_length"), least=2)
    magnitude = meta.number(at("attn_factor"))
    one, long, short = (wavelength_factors(meta, name, tensors, read) for name in FACTORS)
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


def ministral(meta: Metadata, arch: str, scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    """What Ministral 3's config has beside the others. Where nothing is stretched by YaRN, it is Mistral's."""
    at = functools.partial("{}.{}".format, arch)
    beta, sharper = at("attention.temperature_scale"), meta.number(at("rope.scaling.yarn_log_multiplier"))
    growth = meta.number(beta, 0.0)
    if scaling is None or scaling["rope_type"] != "yarn":
        if growth:
            raise meta.bad(beta, "0, as rope.scaling.type is not yarn")
        return {"architectures": ["MistralForCausalLM"], "sliding_window": None}
    made = {**scaling, "llama_4_scaling_beta": growth}
    if sharper and "attention_factor" in made:
        made["attention_factor"] /= 1 + 0.1 * sharper * math.log(made["factor"])
    elif sharper:
        made |= {"mscale": 1.0, "mscale_all_dim": sharper}
    return {"rope_scaling": made}


def _follows(meta: Metadata, arch: str, magnitude: float, original: int | None) -> bool:
    factor = meta.size(f"{arch}.context_length") / (original or 4096)
    wanted = math.sqrt(1 + math.log(factor) / math.log(original or 4096)) if factor > 1 else 1.0
    return math.isclose(magnitude, wanted, rel_tol=1e-6)


def wavelength_factors(
    meta: Metadata, name: str, tensors: Mapping[str, TensorInfo], read: Callable[[str], Tensor]
) -> list[float] | None:
    """The tensor ``name``, which says by how much each wavelength is stretched; None if the file has none. Raises
    CheckpointError."""
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
