"""Qwen3.5, dense: gated delta nets in three of four layers, and gated attention with norms of q and K in the rest. Text
has one position in all three parts of its rotation, which is then a plain one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import NonNegativeInt, PositiveInt

from infer_layers import DeltaSizes, RopeParameters
from infer_models.delta import DeltaConfig


class Qwen3_5Config(DeltaConfig):  # noqa: N801
    norm_unit_offset: ClassVar[bool] = True
    qk_norm: ClassVar[bool] = True
    attention_gated: ClassVar[bool] = True
    partial_rotary: ClassVar[bool] = True

    head_dim: PositiveInt = 256
    linear_conv_kernel_dim: PositiveInt = 4
    linear_key_head_dim: PositiveInt = 128
    linear_value_head_dim: PositiveInt = 128
    linear_num_key_heads: PositiveInt = 16
    linear_num_value_heads: PositiveInt = 32
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

    def ropes(self, config: Mapping[str, Any]) -> Sequence[RopeParameters | None]:
        return super().ropes({"partial_rotary_factor": 0.25, **config})
