"""What families with latent attention share: sizes, scale and rotation by config.json, and the layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, Field, NonNegativeFloat, PositiveInt, model_validator

from infer.contracts.attention import AttentionSpec
from infer_layers import LatentAttention, LatentSizes, PositiveNumber, RopeParameters, Weights, config_table, nth
from infer_models.llama import LlamaConfig, LlamaLayer, Mixer

Whole = Annotated[float, Field(ge=1, le=1)]


class Stretch(BaseModel, extra="ignore"):
    """How positions are stretched, and attention is sharpened for it (YaRN)."""

    rope_type: str | None = None
    type: str | None = None
    factor: PositiveNumber = 1.0
    mscale_all_dim: NonNegativeFloat | None = None
    partial_rotary_factor: Whole | None = None
    """Of the rotated part."""

    @property
    def sharpening(self) -> float:
        if (self.rope_type or self.type or "default") == "default":
            return 1.0
        return max(1.0, 0.1 * (self.mscale_all_dim or 0.0) * math.log(self.factor) + 1.0)


class LatentConfig(LlamaConfig):
    partial_rotary: ClassVar[bool] = True

    kv_lora_rank: PositiveInt = 512
    q_lora_rank: PositiveInt | None = None
    qk_rope_head_dim: PositiveInt = 64
    qk_nope_head_dim: PositiveInt = 128
    v_head_dim: PositiveInt = 128
    rope_interleave: bool = True
    rope_parameters: Stretch | None = None
    rope_scaling: Stretch | None = None
    partial_rotary_factor: Whole | None = None

    @model_validator(mode="after")
    def _heads(self) -> Self:
        """The size of a head does not follow from the hidden size."""
        return self

    @property
    def latent(self) -> LatentSizes:
        return LatentSizes(
            self.kv_lora_rank, self.qk_rope_head_dim, self.qk_nope_head_dim, self.v_head_dim, self.q_lora_rank
        )

    @property
    def attention_scale(self) -> float:
        stretches = [each for each in (self.rope_parameters, self.rope_scaling) if each is not None]
        sharper = max((each.sharpening for each in stretches), default=1.0)
        return float((self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5 * sharper**2)

    def attention(self) -> Sequence[AttentionSpec | None]:
        return [self.latent.spec(self.num_attention_heads, self.attention_scale)] * self.num_hidden_layers

    def ropes(self, config: Mapping[str, Any]) -> Sequence[RopeParameters | None]:
        """Of vectors that have the latent part besides, which is not rotated."""
        given, rotated = config_table(config, "rope_parameters"), self.qk_rope_head_dim
        whole = rotated + self.kv_lora_rank
        share = rotated / whole
        if int(whole * share) < rotated:  # the quotient was rounded down
            share = math.nextafter(share, 1.0)
        part = {"partial_rotary_factor": share}
        return super().ropes({**config, **part, **({"rope_parameters": {**given, **part}} if given else {})})


class LatentLayer(LlamaLayer):
    def mixes(
        self, w: Weights, name: str, index: int, c: Any, spec: AttentionSpec | None, rope: RopeParameters | None
    ) -> Mixer:
        assert spec is not None
        return LatentAttention(
            w,
            f"{name}.{c.attention_name}",
            nth(c.attention(), index),
            c.hidden_size,
            spec,
            c.latent,
            bias=c.attention_bias,
            interleaved=c.rope_interleave,
        )
