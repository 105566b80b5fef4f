"""Qwen3-MoE: Qwen3 with a mixture of experts in most layers, or in all."""

from __future__ import annotations

from collections.abc import Callable

from pydantic import AliasChoices, Field, PositiveInt
from torch import Tensor

from infer.contracts.kernels import Routing
from infer_layers import Experts, Weights
from infer_models.llama import LlamaLayer
from infer_models.qwen3 import Qwen3Config


class Qwen3MoeConfig(Qwen3Config):
    moe_intermediate_size: PositiveInt
    num_experts: PositiveInt = Field(128, validation_alias=AliasChoices("num_experts", "num_local_experts"))
    num_experts_per_tok: PositiveInt = 8
    norm_topk_prob: bool = False
    decoder_sparse_step: PositiveInt = 1
    """Every layer whose number, counted from 1, is a multiple of this one has experts,"""
    mlp_only_layers: list[int] | None = None
    """except these, counted from 0."""

    def windows(self) -> list[int | None]:
        """In all layers or in none."""
        return [self.sliding_window if self.use_sliding_window else None] * self.num_hidden_layers

    def sparse(self, index: int) -> bool:
        return index not in (self.mlp_only_layers or ()) and (index + 1) % self.decoder_sparse_step == 0


class Qwen3MoeLayer(LlamaLayer):
    def feed_forward(self, w: Weights, name: str, index: int, c: Qwen3MoeConfig) -> Callable[[Tensor], Tensor]:
        if not c.sparse(index):
            return super().feed_forward(w, name, index, c)
        routing = Routing(c.num_experts_per_tok, renormalize=c.norm_topk_prob)
        return Experts(w, f"{name}.mlp", c.hidden_size, c.moe_intermediate_size, c.num_experts, routing, c.hidden_act)
