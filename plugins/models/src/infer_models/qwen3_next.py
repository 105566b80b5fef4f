"""Qwen3-Next: Qwen3.5 with mixtures of experts in all layers or in some, and other tensors for its delta nets."""

from __future__ import annotations

from typing import ClassVar

from pydantic import AliasChoices, Field, PositiveInt

from infer_models.qwen3_5 import Qwen3_5Config


class Qwen3NextConfig(Qwen3_5Config):
    delta_qkvz: ClassVar[tuple[str, ...]] = ("in_proj_qkvz",)
    delta_ba: ClassVar[tuple[str, ...]] = ("in_proj_ba",)
    delta_interleaved: ClassVar[bool] = True

    intermediate_size: PositiveInt = 5632
    moe_intermediate_size: PositiveInt = 512
    shared_expert_intermediate_size: PositiveInt = 512
    num_experts: PositiveInt = Field(512, validation_alias=AliasChoices("num_experts", "num_local_experts"))
    num_experts_per_tok: PositiveInt = 10
    norm_topk_prob: bool = True
    decoder_sparse_step: PositiveInt = 1
    """Every layer whose number, counted from 1, is a multiple of this one has experts,"""
    mlp_only_layers: list[int] | None = None
    """except these, counted from 0."""

    def sparse(self, index: int) -> bool:
        return index not in (self.mlp_only_layers or ()) and (index + 1) % self.decoder_sparse_step == 0
