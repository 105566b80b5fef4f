"""Gemma 2: Gemma 3 without norms of q and K, with caps on the scores of attention and one base for all layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import PositiveInt

from infer_layers import PositiveNumber, RopeParameters
from infer_models.gemma3 import Gemma3Config
from infer_models.llama import LlamaConfig


class Gemma2Config(Gemma3Config):
    qk_norm: ClassVar[bool] = False

    vocab_size: PositiveInt = 256_000
    sliding_window_pattern: PositiveInt = 2
    attn_logit_softcapping: PositiveNumber | None = 50.0
    final_logit_softcapping: PositiveNumber | None = 30.0

    @property
    def attention_soft_cap(self) -> float | None:
        return self.attn_logit_softcapping

    def ropes(self, config: Mapping[str, Any]) -> Sequence[RopeParameters | None]:
        return LlamaConfig.ropes(self, config)
