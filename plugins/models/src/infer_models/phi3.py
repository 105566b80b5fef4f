"""Phi-3, Phi-3.5 and Phi-4 (including mini): Llama's decoder with stacked projections and partly rotated heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import PositiveInt

from infer_layers import LongRope, PositiveNumber, RopeParameters
from infer_models.llama import LlamaConfig


class Phi3Config(LlamaConfig):
    rope_kinds = {"default": RopeParameters, "longrope": LongRope, "su": LongRope, "yarn": LongRope}  # noqa: RUF012
    partial_rotary: ClassVar[bool] = True
    qkv: ClassVar[tuple[str, ...]] = ("qkv_proj",)
    gate_up: ClassVar[tuple[str, ...]] = ("gate_up_proj",)

    rms_norm_eps: PositiveNumber = 1e-5
    sliding_window: PositiveInt | None = None

    def windows(self) -> list[int | None]:
        return [self.sliding_window] * self.num_hidden_layers

    def ropes(self, config: Mapping[str, Any]) -> Sequence[RopeParameters | None]:
        return super().ropes({"original_max_position_embeddings": 4096, **config})
