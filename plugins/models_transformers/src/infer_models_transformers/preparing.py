"""What is made of transformers' model before it is loaded."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from infer.errors import CheckpointError
from infer_models_transformers.attention import adaptable

MAX_LAYERS, MAX_EXPERTS = 1024, 1 << 15
"""Each layer and each expert takes memory before a weight is read."""
MAX_NAMES, MAX_NAME = 4, 80
"""How many of a config's architectures a message repeats, and how many characters of each."""
MAX_BUFFERS = 1 << 30
"""The most bytes of buffers that no checkpoint holds."""
ELSEWHERE = {"auto_map", "quantization_config", "attn_implementation", "_attn_implementation", "experts_implementation"}
"""Fields of config.json, in any of its tables, that say who computes, or name code."""
EXPERTS_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
STATE = "it keeps a state besides K and V (a state-space model or linear attention), for which infer has no cache"
ATTENTION = frozenset(
    ["full_attention", "sliding_attention", "chunked_attention", "global", "local", "dense", "sparse"]
)
"""The types of layers that attend over K and V."""
OTHERS = ("vision", "audio", "speech", "image", "video")


def architecture(config: Mapping[str, Any]) -> str:
    """The architecture, one that transformers has for decoder-only language models. Raises CheckpointError."""
    names = config.get("architectures") or []
    known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    if found := [name for name in names if name in known]:
        return str(found[0])
    if not names:
        raise CheckpointError("config.json names no architecture, by which infer finds a model family.")
    ours = ", ".join(repr(str(name)[:MAX_NAME]) for name in names[:MAX_NAMES])
    why = "transformers has it, but not as a decoder-only language model with an output head"
    if not any(hasattr(transformers, str(name)) for name in names):
        why = f"no installed plugin knows it, nor does transformers {transformers.__version__}"
        if config.get("auto_map"):
            why += ", and the code that the checkpoint brings (auto_map) is never run"
    raise CheckpointError(f"config.json names the architecture {ours}: {why}.")


def plain(config: Any) -> Any:
    """config.json without the fields of ``ELSEWHERE``, in any of its tables."""
    if isinstance(config, Mapping):
        return {key: plain(value) for key, value in config.items() if key not in ELSEWHERE}
    return [plain(value) for value in config] if isinstance(config, list) else config


def unfit(kind: Any, config: Any) -> str | None:
    """Why an architecture cannot be run; None if it may be."""
    if transformers.AutoConfig in config.sub_configs.values():
        return "its config.json may name any other architecture as a part of it"
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        return "it has an encoder, and infer serves decoders only"
    tables = (getattr(config, key, None) for key in config.sub_configs)
    parts = [config, *(table for table in tables if hasattr(table, "num_hidden_layers"))]
    for layers in [getattr(part, "num_hidden_layers", None) for part in parts]:
        if not (isinstance(layers, int) and 0 < layers <= MAX_LAYERS):
            return f"it has {layers} layers, and infer runs 1 to {MAX_LAYERS}"
    for part, field in itertools.product(parts, EXPERTS_FIELDS):
        if isinstance(count := getattr(part, field, None), int) and count > MAX_EXPERTS:
            return f"it has {count} experts, and infer runs up to {MAX_EXPERTS}"
    odd = sorted(set(getattr(config, "layer_types", None) or ()) - ATTENTION)
    if odd:
        return f"it has layers of type {odd[0]!r}, which are no attention over K and V"
    others = [key for key in config.sub_configs if key.startswith(OTHERS) and getattr(config, key, None) is not None]
    if others:
        return f"it has parts for other things than text ({others[0]})"
    if not kind._can_set_attn_implementation() and not adaptable(kind):
        return "its attention does not go through transformers' attention interface"
    return None


def widen(whole: Any, dtype: torch.dtype) -> None:
    """Give another dtype to the parameters and buffers that transformers holds in one of their own, as it does when it
    loads a model: float32, mostly for what routers choose by."""
    plan = [(re.compile(glob.replace("*", ".*")), kept) for glob, kept in whole._get_dtype_plan(dtype).items()]
    made: dict[int, Tensor] = {}
    for prefix, module in whole.named_modules():
        kept_apart = module._non_persistent_buffers_set
        for held in (module._parameters, module._buffers):
            for own, x in held.items():
                name = f"{prefix}.{own}".removeprefix(".")
                wide = next((kept for pattern, kept in plan if pattern.search(name)), None)
                if x is None or wide is None or own in kept_apart or not x.is_floating_point():
                    continue
                if id(x) not in made:  # weights that are tied stay so
                    empty = torch.empty_like(x, dtype=wide)
                    made[id(x)] = nn.Parameter(empty, requires_grad=False) if held is module._parameters else empty
                held[own] = made[id(x)]


def fill_buffers(whole: Any, modules: Sequence[nn.Module], device: torch.device) -> None:
    """Compute the buffers that no checkpoint holds, such as rotary frequencies, as transformers does when it loads a
    model; on the meta device they have no values."""
    size = sum(x.nbytes for m in modules for n, x in m._buffers.items() if x is not None and x.is_meta)
    if size > MAX_BUFFERS:
        raise ValueError(f"it has tables of {size >> 20} MiB, and infer makes them up to {MAX_BUFFERS >> 20} MiB")
    for module in modules:
        held = {n: x for n, x in module._buffers.items() if x is not None and x.is_meta}
        held = {n: x for n, x in held.items() if n in module._non_persistent_buffers_set}
        if not held:
            continue
        for name, old in held.items():
            fill = float("nan") if old.is_floating_point() else 0
            module._buffers[name] = torch.full_like(old, fill, device="cpu")
        with torch.no_grad():
            whole._init_weights(module)
        for name, old in held.items():
            new = module._buffers[name]
            assert new is not None
            if old.is_floating_point() and new.isnan().any():
                raise ValueError(f"{type(module).__name__} does not say what its buffer {name} holds")
            module._buffers[name] = new.to(device)
