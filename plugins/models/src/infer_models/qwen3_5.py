"""Qwen3.5, dense: gated delta nets in three of four layers, and gated attention with norms of q and K in the rest. Text
has one position in all three parts of its rotation, which is then a plain one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import NonNegativeInt, PositiveInt

from infer.contracts.attention import AttentionSpec
from infer.contracts.states import StateSpec
from infer_layers import DeltaSizes, GatedDeltaNet, RopeParameters, Weights, nth
from infer_models.llama import LlamaConfig, LlamaLayer, Mixer


class Qwen3_5Config(LlamaConfig):  # noqa: N801
    per_layer: ClassVar[tuple[str, ...]] = ("layer_types",)
    norm_unit_offset: ClassVar[bool] = True
    qk_norm: ClassVar[bool] = True
    attention_gated: ClassVar[bool] = True
    partial_rotary: ClassVar[bool] = True
    delta_interleaved: ClassVar[bool] = False
    """As ``GatedDeltaNet``'s ``interleaved``."""

    head_dim: PositiveInt = 256
    linear_conv_kernel_dim: PositiveInt = 4
    linear_key_head_dim: PositiveInt = 128
    linear_value_head_dim: PositiveInt = 128
    linear_num_key_heads: PositiveInt = 16
    linear_num_value_heads: PositiveInt = 32
    full_attention_interval: PositiveInt = 4
    layer_types: list[Literal["linear_attention", "full_attention"]] | None = None
    """Without it, every ``full_attention_interval``-th layer has attention."""
    mtp_num_hidden_layers: NonNegativeInt | None = None

    @property
    def delta(self) -> DeltaSizes:
        return DeltaSizes(
            self.linear_num_key_heads,
            self.linear_num_value_heads,
            self.linear_key_head_dim,
            self.linear_value_head_dim,
            self.linear_conv_kernel_dim,
        )

    def attends(self, index: int) -> bool:
        """Whether the layer has attention; if not, it has a gated delta net."""
        if self.layer_types is not None:
            return self.layer_types[index] == "full_attention"
        return (index + 1) % self.full_attention_interval == 0

    def attention(self) -> Sequence[AttentionSpec | None]:
        return [spec if self.attends(i) else None for i, spec in enumerate(super().attention())]

    def states(self, dtype: torch.dtype) -> Sequence[StateSpec | None]:
        spec = self.delta.state(dtype)
        return [None if self.attends(i) else spec for i in range(self.num_hidden_layers)]

    def ropes(self, config: Mapping[str, Any]) -> Sequence[RopeParameters | None]:
        return super().ropes({"partial_rotary_factor": 0.25, **config})


class Qwen3_5Layer(LlamaLayer):  # noqa: N801
    def mixes(
        self, w: Weights, name: str, index: int, c: Any, spec: AttentionSpec | None, rope: RopeParameters | None
    ) -> Mixer:
        if spec is not None:
            return super().mixes(w, name, index, c, spec, rope)
        return GatedDeltaNet(
            w,
            f"{name}.linear_attn",
            nth(c.states(w.context.dtype), index),
            c.hidden_size,
            c.delta,
            norm_eps=c.rms_norm_eps,
            interleaved=c.delta_interleaved,
        )
