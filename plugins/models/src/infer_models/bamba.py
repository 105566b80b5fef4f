"""Bamba: Llama with Mamba 2 in the place of most layers' attention, and half of each head rotated in the others'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import NonNegativeInt, PositiveInt

from infer_layers import PositiveNumber, RopeParameters
from infer_models.hybrid import HybridConfig


class BambaConfig(HybridConfig):
    partial_rotary: ClassVar[bool] = True
    norm_name: ClassVar[str] = "model.final_layernorm"
    norms_before: ClassVar[tuple[str, ...]] = ("input_layernorm", "pre_ff_layernorm")
    mlp: ClassVar[str] = "feed_forward"

    num_key_value_heads: PositiveInt | None = 8
    rms_norm_eps: PositiveNumber = 1e-5
    attn_layer_indices: list[NonNegativeInt] | None = None

    def attends(self, index: int) -> bool:
        return index in (self.attn_layer_indices or ())

    def ropes(self, config: Mapping[str, Any]) -> Sequence[RopeParameters | None]:
        # As transformers has it, only rope_parameters may say otherwise.
        return super().ropes({**config, "partial_rotary_factor": 0.5})
