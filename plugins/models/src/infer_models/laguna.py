"""Laguna: gates by softplus, more heads in layers with windows, and mixtures of experts behind a dense layer, chosen by
sigmoids with a bias; an MLP for all tokens is added."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt
from torch import Tensor

from infer.contracts.attention import AttentionSpec
from infer.contracts.kernels import Routing
from infer_layers import (
    Experts,
    Gate,
    GatedMLP,
    LayerType,
    PositiveNumber,
    RopeParameters,
    Weights,
    layer_windows,
)
from infer_models.llama import LlamaConfig, LlamaLayer

ROPES: Mapping[str, Any] = {
    "full_attention": {"rope_type": "default", "rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}


class LagunaConfig(LlamaConfig):
    per_layer: ClassVar[tuple[str, ...]] = ("num_attention_heads_per_layer", "mlp_layer_types")

    head_dim: PositiveInt = 128
    num_attention_heads_per_layer: list[PositiveInt] | None = None
    sliding_window: PositiveInt | None = 512
    layer_types: list[LayerType] | None = None
    mlp_layer_types: list[Literal["dense", "sparse"]] | None = None
    """Without it, the first layer is dense."""
    gating: bool | Literal["per-head", "per-element"] = True
    num_experts: PositiveInt = 256
    num_experts_per_tok: PositiveInt = 8
    moe_intermediate_size: PositiveInt = 512
    shared_expert_intermediate_size: PositiveInt = 512
    moe_routed_scaling_factor: PositiveNumber = 1.0
    moe_apply_router_weight_on_input: Literal[False] = False
    moe_router_logit_softcapping: Annotated[float, Field(ge=0, le=0)] = 0.0

    @property
    def has_qk_norm(self) -> bool:
        return True

    @property
    def attention_gate(self) -> Gate | None:
        return Gate("g_proj", "softplus", each=self.gating == "per-element") if self.gating else None

    def sparse(self, index: int) -> bool:
        """Whether the layer has experts."""
        return index > 0 if self.mlp_layer_types is None else self.mlp_layer_types[index] == "sparse"

    def windows(self) -> list[int | None]:
        count = self.num_hidden_layers
        types: list[LayerType] = ["full_attention"] * count
        return layer_windows(self.layer_types or types, self.sliding_window, count)

    def attention(self) -> Sequence[AttentionSpec | None]:
        heads = self.num_attention_heads_per_layer or [self.num_attention_heads] * self.num_hidden_layers
        kv_heads = self.num_key_value_heads or self.num_attention_heads
        return [
            AttentionSpec(count, kv_heads, self.head_size, self.attention_scale, window)
            for count, window in zip(heads, self.windows(), strict=True)
        ]

    def ropes(self, config: Mapping[str, Any]) -> Sequence[RopeParameters | None]:
        config = {**config, "rope_parameters": config.get("rope_parameters") or ROPES}
        full, sliding = (RopeParameters.read(config, kind, partial=True) for kind in ROPES)
        return [full if window is None else sliding for window in self.windows()]


class LagunaLayer(LlamaLayer):
    def feed_forward(self, w: Weights, name: str, index: int, c: LagunaConfig) -> Callable[[Tensor], Tensor]:
        if not c.sparse(index):
            return super().feed_forward(w, name, index, c)
        shared_width = c.shared_expert_intermediate_size
        return Experts(
            w,
            f"{name}.mlp",
            c.hidden_size,
            c.moe_intermediate_size,
            c.num_experts,
            Routing(c.num_experts_per_tok, "sigmoid", True, c.moe_routed_scaling_factor),
            c.hidden_act,
            selection_bias="experts.e_score_correction_bias",
            shared=GatedMLP(w, f"{name}.mlp.shared_expert", c.hidden_size, shared_width, c.hidden_act),
        )
