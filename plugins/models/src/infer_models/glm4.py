"""GLM-4 of 2025: Llama with stacked gates, half of each head rotated, neighbor against neighbor, and norms of the
results of attention and MLP, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import PositiveInt

from infer_layers import PositiveNumber, RopeParameters
from infer_models.llama import LlamaConfig


class Glm4Config(LlamaConfig):
    partial_rotary: ClassVar[bool] = True
    rotary_interleaved: ClassVar[bool] = True
    gate_up: ClassVar[tuple[str, ...]] = ("gate_up_proj",)
    norms_after: ClassVar[tuple[str, ...]] = ("post_self_attn_layernorm", "post_mlp_layernorm")

    head_dim: PositiveInt = 128
    rms_norm_eps: PositiveNumber = 1.5625e-07
    attention_bias: bool = True

    @property
    def biases(self) -> str:
        return "qkv" if self.attention_bias else ""

    def ropes(self, config: Mapping[str, Any]) -> Sequence[RopeParameters | None]:
        return super().ropes({"partial_rotary_factor": 0.5, **config})
