"""Granite 4: Granite with an MLP for all tokens beside the experts, if there are any, with Mamba 2 in the place of most
layers' attention, or of none, and mostly without rotation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor

from infer_layers import GatedMLP, RopeParameters, Weights
from infer_models.granite import GraniteConfig
from infer_models.granite_moe import granite_experts
from infer_models.hybrid import HybridConfig, HybridLayer, HybridLayerType


class GraniteMoeHybridConfig(HybridConfig, GraniteConfig):
    per_layer: ClassVar[tuple[str, ...]] = ("layer_types",)

    num_local_experts: NonNegativeInt = 8
    num_experts_per_tok: NonNegativeInt = 2
    shared_intermediate_size: PositiveInt = 1024
    position_embedding_type: str | None = None
    """``rope``; anything else rotates nothing."""
    layer_types: list[HybridLayerType] | None = None
    """Without it, all layers have Mamba."""

    def attends(self, index: int) -> bool:
        return self.layer_types is not None and self.layer_types[index] == "attention"

    def ropes(self, config: Mapping[str, Any]) -> Sequence[RopeParameters | None]:
        return super().ropes(config) if self.position_embedding_type == "rope" else [None] * self.num_hidden_layers


class GraniteMoeHybridLayer(HybridLayer):
    def feed_forward(self, w: Weights, name: str, index: int, c: GraniteMoeHybridConfig) -> Callable[[Tensor], Tensor]:
        shared = GatedMLP(
            w,
            f"{name}.shared_mlp",
            c.hidden_size,
            c.shared_intermediate_size,
            c.hidden_act,
            gate_up=("input_linear",),
            down="output_linear",
        )
        if not c.num_local_experts:
            return shared
        return granite_experts(w, name, c, shared)
