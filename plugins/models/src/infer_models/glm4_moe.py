"""GLM-4.5 and 4.6: Llama with half of each head rotated, and mixtures of experts behind some dense layers, chosen by
sigmoids with a bias; an MLP for all tokens is added."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from pydantic import AliasChoices, Field, NonNegativeInt, PositiveInt, field_validator
from torch import Tensor

from infer.contracts.kernels import Routing
from infer_layers import Experts, GatedMLP, PositiveNumber, RopeParameters, Weights
from infer_models.llama import LlamaConfig, LlamaLayer


class Glm4MoeConfig(LlamaConfig):
    partial_rotary: ClassVar[bool] = True

    rms_norm_eps: PositiveNumber = 1e-5
    use_qk_norm: bool = False
    moe_intermediate_size: PositiveInt = 1408
    n_routed_experts: PositiveInt = Field(128, validation_alias=AliasChoices("n_routed_experts", "num_local_experts"))
    n_shared_experts: PositiveInt = 1
    num_experts_per_tok: PositiveInt = 8
    norm_topk_prob: bool = True
    routed_scaling_factor: PositiveNumber = 1.0
    first_k_dense_replace: NonNegativeInt = 1
    n_group: int | None = 1
    num_nextn_predict_layers: NonNegativeInt | None = None
    """Of the draft head."""
    selection_bias: ClassVar[str | None] = "gate.e_score_correction_bias"

    @field_validator("n_group")
    @classmethod
    def _no_groups(cls, count: int | None) -> int | None:
        if count not in (None, 1):
            raise ValueError('this family has no groups of experts; set model.family = "transformers"')
        return count

    @property
    def routing(self) -> Routing:
        return Routing(self.num_experts_per_tok, "sigmoid", self.norm_topk_prob, self.routed_scaling_factor)

    def sparse(self, index: int) -> bool:
        """Whether the layer has experts."""
        return index >= self.first_k_dense_replace

    def of_next_layer(self) -> Self:
        """The config of a model of the draft head's layer alone, which has experts."""
        return self.model_copy(update={"num_hidden_layers": 1, "first_k_dense_replace": 0})

    @property
    def biases(self) -> str:
        return "qkv" if self.attention_bias else ""

    @property
    def has_qk_norm(self) -> bool:
        return self.use_qk_norm

    def ropes(self, config: Mapping[str, Any]) -> Sequence[RopeParameters | None]:
        return super().ropes({"partial_rotary_factor": 0.5, **config})


class Glm4MoeLayer(LlamaLayer):
    def feed_forward(self, w: Weights, name: str, index: int, c: Glm4MoeConfig) -> Callable[[Tensor], Tensor]:
        if not c.sparse(index):
            return super().feed_forward(w, name, index, c)
        shared_width = c.moe_intermediate_size * c.n_shared_experts
        return Experts(
            w,
            f"{name}.mlp",
            c.hidden_size,
            c.moe_intermediate_size,
            c.n_routed_experts,
            c.routing,
            c.hidden_act,
            router_dtype=torch.float32,
            selection_bias=c.selection_bias,
            shared=GatedMLP(w, f"{name}.mlp.shared_experts", c.hidden_size, shared_width, c.hidden_act),
        )
