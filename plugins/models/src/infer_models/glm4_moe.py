"""GLM-4.5 and 4.6: Llama with half of each head rotated, and mixtures of experts behind some dense layers, chosen by
sigmoids with a bias; an MLP for all tokens is added."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import AliasChoices, Field, NonNegativeInt, PositiveInt
from torch import Tensor

from infer.contracts.kernels import Routing
from infer.contracts.model import ModelContext
from infer.weight import Weight
from infer_layers import Decoder, Experts, GatedMLP, PositiveNumber, RopeParameters, Weights
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
    # No published model of this architecture chooses among groups of experts.
    n_group: Literal[1] = 1
    topk_group: Literal[1] = 1

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
        if index < c.first_k_dense_replace:
            return super().feed_forward(w, name, index, c)
        shared_width = c.moe_intermediate_size * c.n_shared_experts
        return Experts(
            w,
            f"{name}.mlp",
            c.hidden_size,
            c.moe_intermediate_size,
            c.n_routed_experts,
            Routing(c.num_experts_per_tok, "sigmoid", c.norm_topk_prob, c.routed_scaling_factor),
            c.hidden_act,
            router_dtype=torch.float32,
            selection_bias="gate.e_score_correction_bias",
            shared=GatedMLP(w, f"{name}.mlp.shared_experts", c.hidden_size, shared_width, c.hidden_act),
        )


class Glm4Moe(Decoder):
    def __init__(self, config: Mapping[str, Any], context: ModelContext) -> None:
        super().__init__(config, context, Glm4MoeConfig, Glm4MoeLayer)

    def unstack(self, tensors: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
        return super().unstack(self._served(tensors))

    def load(self, tensors: Iterable[tuple[str, Weight]]) -> None:
        super().load(self._served(tensors))

    def _served(self, tensors: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
        """Without the layers behind the last one, which predict further tokens."""
        beyond = f"model.layers.{len(self.layers)}."
        return ((name, tensor) for name, tensor in tensors if not name.startswith(beyond))
