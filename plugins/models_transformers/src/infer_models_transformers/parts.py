"""Modules and calls of transformers' model that are replaced."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from infer_layers import Weights
from infer_models_transformers.modules import Team

EXPERTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
"""Other names of an expert's weights."""
IDLE = (nn.Dropout, nn.Identity, nn.ModuleList, nn.ModuleDict)


@dataclass
class _Hidden(ModelOutput):
    """What base models return, as far as output heads hand it on."""

    last_hidden_state: Tensor | None = None
    past_key_values: None = None
    hidden_states: None = None
    attentions: None = None
    cross_attentions: None = None
    router_logits: None = None


class Head(nn.Module):
    """Stands in for the base model when logits are computed: it has the hidden states already."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor

    def __getattr__(self, name: str) -> Any:
        return self  # some models call a part of their base model

    def forward(self, *_: Any, **__: Any) -> _Hidden:
        return _Hidden(last_hidden_state=self.hidden)


class Renaming:
    """A checkpoint's names -> those of the module, where they differ."""

    def __init__(self, whole: Any, prefix: str) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, rename_source_key

        transforms: list[Any] = get_model_conversion_mapping(whole)
        self._renamings = [each for each in transforms if not isinstance(each, WeightConverter)]
        self._rename = rename_source_key
        self._prefix = prefix

    def __call__(self, name: str, expected: Mapping[str, Any]) -> str:
        found: str = self._rename(name, self._renamings, [])[0]
        for theirs, ours in EXPERTS.items():
            found = re.sub(rf"(\.experts\.\d+)\.{theirs}\.", rf"\1.{ours}.", found)
        return f"{self._prefix}.{found}" if f"{self._prefix}.{found}" in expected else found


class Loose:
    """``Loose`` of ``exact``: the parameters that modules multiply by themselves, as routers do."""

    def __init__(self, weights: Weights, team: Team) -> None:
        self._team = team
        self.names: dict[int, str] = {}
        """The names of the module's own parameters by their ids."""
        self.expected: set[int] = set()
        self._weights = weights
        self._known: dict[int, list[Any]] = {}
        """By the id of a parameter or its conversion: its kernels' weight, once it is loaded."""
        self._converted: dict[tuple[int, torch.dtype], Tensor] = {}
        self._of: dict[int, int] = {}
        """The id of a conversion -> that of its parameter."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor | None:
        if (held := self._known.get(id(weight))) is None:
            origin = self._of.get(id(weight), id(weight))
            if not weight.is_meta or weight.dim() != 2 or origin not in self.names or origin in self.expected:
                return None
            held = self._known[id(weight)] = []
            kernels = self._weights.context.kernels
            name, shape = self.names[origin], tuple(weight.shape)
            self._weights.expect(name, shape, lambda w: held.append(kernels.pack(w)), weight.dtype)
            self.expected.add(origin)
        shape = (*x.shape[:-1], weight.shape[0])
        if x.is_meta:
            return x.new_empty(shape) if x.dtype == weight.dtype else None
        with self._team:
            out: Tensor = self._weights.context.kernels.linear(x.reshape(-1, x.shape[-1]), held[0])
        return out.view(shape)

    def converted(self, weight: Tensor, dtype: torch.dtype) -> Tensor | None:
        if id(weight) not in self.names or weight.dim() != 2:
            return None
        if weight.dtype == dtype:
            return weight
        key = id(weight), dtype
        if key not in self._converted:
            self._converted[key] = torch.empty_like(weight, dtype=dtype)
            self._of[id(self._converted[key])] = id(weight)
        return self._converted[key]


def computes(module: nn.Module) -> bool:
    """Whether a module is a leaf that plain torch computes."""
    ours = type(module).__module__.startswith("infer_models_transformers")
    return not ours and not isinstance(module, IDLE) and not any(True for _ in module.children())
