"""LFM2-MoE: LFM2 with mixtures of experts behind some dense layers, chosen by sigmoids with a bias."""

from __future__ import annotations

from collections.abc import Callable

from pydantic import AliasChoices, Field, NonNegativeInt, PositiveInt
from torch import Tensor

from infer.contracts.kernels import Routing
from infer_layers import Experts, PositiveNumber, Weights
from infer_models.lfm2 import Lfm2Config, Lfm2Layer


class Lfm2MoeConfig(Lfm2Config):
    intermediate_size: PositiveInt = 7168
    moe_intermediate_size: PositiveInt = 1792
    num_dense_layers: NonNegativeInt = 2
    num_experts: PositiveInt = Field(32, validation_alias=AliasChoices("num_experts", "num_local_experts"))
    num_experts_per_tok: PositiveInt = 4
    use_expert_bias: bool = True
    routed_scaling_factor: PositiveNumber = 1.0
    norm_topk_prob: bool = True

    @property
    def mlp_width(self) -> int:
        return self.intermediate_size


class Lfm2MoeLayer(Lfm2Layer):
    def feed_forward(self, w: Weights, name: str, index: int, c: Lfm2MoeConfig) -> Callable[[Tensor], Tensor]:
        if index < c.num_dense_layers:
            return super().feed_forward(w, name, index, c)
        return Experts(
            w,
            f"{name}.feed_forward",
            c.hidden_size,
            c.moe_intermediate_size,
            c.num_experts,
            Routing(c.num_experts_per_tok, "sigmoid", c.norm_topk_prob, c.routed_scaling_factor),
            gate_up=c.gate_up,
            down=c.down,
            selection_bias="expert_bias" if c.use_expert_bias else None,
        )
