"""Granite, dense: Llama with factors for embeddings, attention's scores, the residual stream and logits."""

from __future__ import annotations

from infer_layers import PositiveNumber
from infer_models.llama import LlamaConfig


class GraniteConfig(LlamaConfig):
    embedding_multiplier: PositiveNumber = 1.0
    attention_multiplier: PositiveNumber = 1.0
    residual_multiplier: PositiveNumber = 1.0
    logits_scaling: PositiveNumber = 1.0

    @property
    def attention_scale(self) -> float:
        return self.attention_multiplier

    @property
    def embedding_scale(self) -> float:
        return self.embedding_multiplier

    @property
    def residual_scale(self) -> float:
        return self.residual_multiplier

    @property
    def logits_divisor(self) -> float:
        return self.logits_scaling
