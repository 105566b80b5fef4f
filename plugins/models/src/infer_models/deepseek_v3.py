"""DeepSeek-V3's shape as smaller models have it, such as Moonlight and GLM-4.7-Flash: latent attention, and mixtures of
experts behind some dense layers, without groups of experts."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import AliasChoices, Field, NonNegativeInt, PositiveInt

from infer_layers import PositiveNumber
from infer_models.glm4_moe import Glm4MoeConfig, Glm4MoeLayer
from infer_models.latent import LatentConfig, LatentLayer


class DeepseekV3Config(LatentConfig, Glm4MoeConfig):
    rms_norm_eps: PositiveNumber = 1e-6
    moe_intermediate_size: PositiveInt = 2048
    n_routed_experts: PositiveInt = Field(256, validation_alias=AliasChoices("n_routed_experts", "num_local_experts"))
    n_group: int | None = Field(8, validate_default=True)
    q_lora_rank: PositiveInt | None = 1536
    first_k_dense_replace: NonNegativeInt = 3
    routed_scaling_factor: PositiveNumber = 2.5


class Glm4MoeLiteConfig(LatentConfig, Glm4MoeConfig):
    per_layer: ClassVar[tuple[str, ...]] = ("mlp_layer_types",)

    rms_norm_eps: PositiveNumber = 1e-5
    n_routed_experts: PositiveInt = Field(64, validation_alias=AliasChoices("n_routed_experts", "num_local_experts"))
    moe_intermediate_size: PositiveInt = 1536
    q_lora_rank: PositiveInt | None = 768
    qk_nope_head_dim: PositiveInt = 192
    v_head_dim: PositiveInt = 256
    num_experts_per_tok: PositiveInt = 4
    routed_scaling_factor: PositiveNumber = 1.8
    mlp_layer_types: list[Literal["dense", "sparse"]] | None = None
    """Without it, the first ``first_k_dense_replace`` layers are dense."""

    def sparse(self, index: int) -> bool:
        types = self.mlp_layer_types
        return super().sparse(index) if types is None else types[index] == "sparse"

    def of_next_layer(self) -> Self:
        return super().of_next_layer().model_copy(update={"mlp_layer_types": None})


class DeepseekV3Layer(LatentLayer, Glm4MoeLayer):
    """Latent attention, and the experts of GLM-4.5."""
