"""Kimi Linear: Kimi Delta Attention in three of four layers, in the rest latent attention that rotates nothing, and
DeepSeek-V3's mixtures of experts behind the first layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AliasChoices, BaseModel, Field, NonNegativeInt, PositiveInt, model_validator

from infer.contracts.attention import AttentionSpec
from infer_layers import DeltaSizes, KimiDelta, PositiveNumber, RopeParameters, Weights, nth
from infer_layers.config import LARGEST
from infer_models.deepseek_v3 import DeepseekV3Layer, Glm4MoeLiteConfig
from infer_models.delta import DeltaConfig, DeltaModel
from infer_models.llama import Mixer

Size = Annotated[int, Field(gt=0, le=LARGEST)]


class LinearAttention(BaseModel, extra="ignore"):
    """The sizes of delta attention as published configs have them, and the numbers of layers, counted from 1."""

    head_dim: Size | None = None
    num_heads: Size | None = None
    short_conv_kernel_size: Size | None = None
    full_attn_layers: list[Size] | None = None
    kda_layers: list[Size] | None = None


class KimiLinearConfig(DeltaConfig, Glm4MoeLiteConfig):
    per_layer: ClassVar[tuple[str, ...]] = ("layer_types", "mlp_layer_types")

    rms_norm_eps: PositiveNumber = 1e-5
    tie_word_embeddings: Literal[False] = False
    """transformers does not tie them, whatever config.json says."""
    q_lora_rank: PositiveInt | None = None
    qk_nope_head_dim: PositiveInt = 128
    v_head_dim: PositiveInt = 128
    mla_use_nope: Literal[True] = True
    moe_intermediate_size: PositiveInt = 1024
    moe_router_activation_func: Literal["sigmoid"] = "sigmoid"
    moe_layer_freq: Literal[1] = 1
    n_routed_experts: PositiveInt = Field(
        256, validation_alias=AliasChoices("num_experts", "num_local_experts", "n_routed_experts")
    )
    n_shared_experts: PositiveInt = Field(1, validation_alias=AliasChoices("num_shared_experts", "n_shared_experts"))
    num_experts_per_tok: PositiveInt = Field(
        8, validation_alias=AliasChoices("num_experts_per_token", "num_experts_per_tok")
    )
    norm_topk_prob: bool = Field(True, validation_alias=AliasChoices("moe_renormalize", "norm_topk_prob"))
    n_group: int | None = Field(1, validation_alias=AliasChoices("num_expert_group", "n_group"))
    routed_scaling_factor: PositiveNumber = 2.446
    first_k_dense_replace: NonNegativeInt = 1
    linear_head_dim: PositiveInt = 128
    linear_num_heads: PositiveInt = 32
    linear_conv_kernel_dim: PositiveInt = 4
    linear_attn_config: LinearAttention = LinearAttention()
    """What it says of sizes goes before the fields above; ``layer_types`` goes before its numbers."""

    @property
    def delta(self) -> DeltaSizes:
        own = self.linear_attn_config
        heads, size = own.num_heads or self.linear_num_heads, own.head_dim or self.linear_head_dim
        width = own.short_conv_kernel_size or self.linear_conv_kernel_dim
        return DeltaSizes(heads, heads, size, size, width, channel_decay=True)

    @property
    def attention_scale(self) -> float:
        return float((self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5)

    @model_validator(mode="after")
    def _numbers(self) -> Self:
        """Published lists name each layer once."""
        own = self.linear_attn_config
        if own.full_attn_layers is not None and own.kda_layers is not None:
            named, layers = sorted(own.full_attn_layers + own.kda_layers), range(1, self.num_hidden_layers + 1)
            if len(named) != len(layers) or any(a != b for a, b in zip(named, layers, strict=True)):
                raise ValueError(f"linear_attn_config has to name each layer from 1 to {len(layers)} once")
        return self

    def attends(self, index: int) -> bool:
        if self.layer_types is not None:
            return super().attends(index)
        if self.linear_attn_config.full_attn_layers is not None:
            return index + 1 in self.linear_attn_config.full_attn_layers
        return index > 0 and index % 4 == 0

    def ropes(self, config: Mapping[str, Any]) -> Sequence[RopeParameters | None]:
        return [None] * self.num_hidden_layers


class KimiLinearLayer(DeepseekV3Layer):
    def mixes(
        self, w: Weights, name: str, index: int, c: Any, spec: AttentionSpec | None, rope: RopeParameters | None
    ) -> Mixer:
        if spec is not None:
            return super().mixes(w, name, index, c, spec, rope)
        layer = nth(c.states(w.context.dtype), index)
        return KimiDelta(w, f"{name}.self_attn", layer, c.hidden_size, c.delta, norm_eps=c.rms_norm_eps)


class KimiLinear(DeltaModel):
    renamed: ClassVar[tuple[tuple[str, str], ...]] = (
        (r"\.block_sparse_moe\.", ".mlp."),
        (r"(\.experts\.\d+)\.w1\.", r"\1.gate_proj."),
        (r"(\.experts\.\d+)\.w2\.", r"\1.down_proj."),
        (r"(\.experts\.\d+)\.w3\.", r"\1.up_proj."),
        (r"\.self_attn\.(f_[ab]_proj\.|dt_bias$|A_log$)", r".self_attn.forget_gate.\1"),
    )
