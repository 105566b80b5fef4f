"""What families with latent attention share: sizes, scale and rotation by config.json, and the layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from pydantic import BaseModel, NonNegativeFloat, PositiveInt, model_validator

from infer.contracts.attention import AttentionSpec
from infer_layers import LatentAttention, LatentSizes, PositiveNumber, RopeParameters, Weights, config_table, nth
from infer_models.llama import LlamaConfig, LlamaLayer, Mixer


class Sharpening(BaseModel, extra="ignore"):
    """How much steeper attention is made for stretched positions (YaRN)."""

    factor: PositiveNumber = 1.0
    mscale_all_dim: NonNegativeFloat | None = None

    def __call__(self) -> float:
        return max(1.0, 0.1 * (self.mscale_all_dim or 0.0) * math.log(self.factor) + 1.0)


class LatentConfig(LlamaConfig):
    partial_rotary: ClassVar[bool] = True

    kv_lora_rank: PositiveInt = 512
    q_lora_rank: PositiveInt | None = None
    qk_rope_head_dim: PositiveInt = 64
    qk_nope_head_dim: PositiveInt = 128
    v_head_dim: PositiveInt = 128
    rope_interleave: bool = True
    rope_parameters: Sharpening | None = None
    rope_scaling: Sharpening | None = None

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
        sharper = (self.rope_scaling or self.rope_parameters or Sharpening())()
        return float((self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5 * sharper**2)

    def attention(self) -> Sequence[AttentionSpec]:
        return [self.latent.spec(self.num_attention_heads, self.attention_scale)] * self.num_hidden_layers

    def ropes(self, config: Mapping[str, Any]) -> Sequence[RopeParameters | None]:
        """Of vectors that have the latent part besides, which is not rotated."""
        given = config_table(config, "rope_parameters")
        rotated = int(self.qk_rope_head_dim * given.get("partial_rotary_factor", 1))
        whole = self.qk_rope_head_dim + self.kv_lora_rank
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
