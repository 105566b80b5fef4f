"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from typing import ClassVar

from pydantic import AliasChoices, Field, PositiveInt

from infer.contracts.kernels import Routing
from infer_layers import Experts, PositiveNumber, Weights
from infer_models.llama import LlamaLayer
from infer_models.mistral import MistralConfig


class MixtralConfig(MistralConfig):
    default_theta: ClassVar[float] = 1_000_000.0

    rms_norm_eps: PositiveNumber = 1e-5
    sliding_window: PositiveInt | None = None
    num_local_experts: PositiveInt = Field(8, validation_alias=AliasChoices("num_local_experts", "num_experts"))
    num_experts_per_tok: PositiveInt = 2


class MixtralLayer(LlamaLayer):
    def feed_forward(self, w: Weights, name: str, index: int, c: MixtralConfig) -> Experts:
        return Experts(
            w,
            (f"{name}.block_sparse_moe", f"{name}.mlp"),  # transformers 5 has another name for it
            c.hidden_size,
            c.intermediate_size,
            c.num_local_experts,
            Routing(c.num_experts_per_tok),
            c.hidden_act,
            gate_up=("w1", "w3"),
            down="w2",
        )
