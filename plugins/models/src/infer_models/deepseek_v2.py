"""DeepSeek-V2-Lite: latent attention, and mixtures of experts that are chosen by softmax, without groups."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import AliasChoices, Field, NonNegativeInt, PositiveInt

from infer.contracts.kernels import Routing
from infer_layers import PositiveNumber
from infer_models.glm4_moe import Glm4MoeConfig
from infer_models.latent import LatentConfig


class DeepseekV2Config(LatentConfig, Glm4MoeConfig):
    selection_bias: ClassVar[str | None] = None

    rms_norm_eps: PositiveNumber = 1e-6
    moe_intermediate_size: PositiveInt = 1407
    n_routed_experts: PositiveInt = Field(64, validation_alias=AliasChoices("n_routed_experts", "num_experts"))
    num_experts_per_tok: PositiveInt
    n_group: int | None = None
    n_shared_experts: PositiveInt = 2
    q_lora_rank: PositiveInt | None = 1536
    first_k_dense_replace: NonNegativeInt = 0
    topk_method: Literal["greedy"] = "greedy"
    norm_topk_prob: Literal[False] = False

    @property
    def routing(self) -> Routing:
        return Routing(self.num_experts_per_tok, renormalize=False, scale=self.routed_scaling_factor)
