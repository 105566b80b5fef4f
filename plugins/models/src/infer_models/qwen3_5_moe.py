"""Qwen3.5 with Qwen2-MoE's mixtures of experts."""

from __future__ import annotations

from typing import ClassVar

from pydantic import AliasChoices, Field, PositiveInt

from infer_models.delta import DeltaLayer
from infer_models.qwen2_moe import Qwen2MoeLayer
from infer_models.qwen3_5 import Qwen3_5Config


class Qwen3_5MoeConfig(Qwen3_5Config):  # noqa: N801
    norm_topk_prob: ClassVar[bool] = True

    intermediate_size: PositiveInt = 5632
    """No layer has an MLP of this size."""
    moe_intermediate_size: PositiveInt = 512
    shared_expert_intermediate_size: PositiveInt = 512
    num_experts: PositiveInt = Field(256, validation_alias=AliasChoices("num_experts", "num_local_experts"))
    num_experts_per_tok: PositiveInt = 8

    def sparse(self, index: int) -> bool:
        return True


class Qwen3_5MoeLayer(DeltaLayer, Qwen2MoeLayer):  # noqa: N801
    """Qwen3.5's mixers and Qwen2-MoE's experts."""
