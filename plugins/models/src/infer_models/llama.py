"""Llama 3.x, and what Qwen3 shares with it. Shapes: T tokens, D hidden, V vocabulary, N sampled rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, PositiveInt, model_validator
from torch import Tensor

from infer.layers import (
    Attention,
    Embedding,
    GatedMLP,
    Head,
    PositiveNumber,
    RMSNorm,
    RopeParameters,
    RotaryEmbedding,
    Weights,
    read_config,
    select,
)
from infer.protocols import AttentionSpec, KVCacheView, ModelContext, Pass, Rotary


class LlamaConfig(BaseModel, extra="ignore"):
    """The fields of config.json that change the arithmetic."""

    qk_norm: ClassVar[bool] = False

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    rms_norm_eps: PositiveNumber = 1e-6
    hidden_act: Literal["silu"] = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False

    @model_validator(mode="after")
    def _heads(self) -> Self:
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError("without head_dim, hidden_size has to be a multiple of num_attention_heads")
        return self

    def windows(self) -> list[int | None]:
        """Each layer's sliding window."""
        return [None] * self.num_hidden_layers

    def attention(self) -> list[AttentionSpec]:
        head_size = self.head_dim or self.hidden_size // self.num_attention_heads
        kv_heads = self.num_key_value_heads or self.num_attention_heads
        return [
            AttentionSpec(self.num_attention_heads, kv_heads, head_size, scale=head_size**-0.5, window=window)
            for window in self.windows()
        ]


class LlamaLayer:
    def __init__(self, w: Weights, name: str, index: int, c: LlamaConfig, spec: AttentionSpec) -> None:
        size, eps = c.hidden_size, c.rms_norm_eps
        self.input_norm = RMSNorm(w, f"{name}.input_layernorm", size, eps)
        self.attention = Attention(
            w, f"{name}.self_attn", index, size, spec, c.attention_bias, eps if c.qk_norm else None
        )
        self.mlp_norm = RMSNorm(w, f"{name}.post_attention_layernorm", size, eps)
        self.mlp = GatedMLP(w, f"{name}.mlp", size, c.intermediate_size, c.hidden_act, c.mlp_bias)

    def __call__(
        self,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        rotary: Rotary,
        cache: KVCacheView,
        rows_N: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The residual stream is x + residual; the sum is left to the next norm, which fuses it. ``rows_N`` drops the
        other rows after attention."""
        x_TD, residual_TD = self.input_norm.add(x_TD, residual_TD)
        x_ND = self.attention(x_TD, rotary, cache, rows_N)
        x_ND, residual_ND = self.mlp_norm.add(x_ND, select(residual_TD, rows_N))
        return self.mlp(x_ND), residual_ND


class Llama:
    """A ModelProtocol. ``schema`` says how config.json is read."""

    def __init__(
        self, config: Mapping[str, Any], context: ModelContext, schema: type[LlamaConfig] = LlamaConfig
    ) -> None:
        c = read_config(schema, config)
        w = self.weights = Weights(context)
        self.vocab_size = c.vocab_size
        self.attention: Sequence[AttentionSpec] = c.attention()
        self.embedding = Embedding(w, "model.embed_tokens", c.vocab_size, c.hidden_size)
        self.rotary = RotaryEmbedding(context, RopeParameters.read(config), self.attention[0].head_size)
        self.layers = [LlamaLayer(w, f"model.layers.{i}", i, c, spec) for i, spec in enumerate(self.attention)]
        self.norm = RMSNorm(w, "model.norm", c.hidden_size, c.rms_norm_eps)
        self.head = Head(w, self.embedding, "lm_head", c.vocab_size, c.hidden_size, c.tie_word_embeddings)

    def forward(self, batch: Pass) -> Tensor:
        rotary, cache = self.rotary(batch.positions_T), batch.cache
        x_TD, residual_TD = self.embedding(batch.token_ids_T), None
        for layer in self.layers[:-1]:
            x_TD, residual_TD = layer(x_TD, residual_TD, rotary, cache)
        x_ND, residual_ND = self.layers[-1](x_TD, residual_TD, rotary, cache, batch.rows_N)
        return self.norm.add(x_ND, residual_ND)[0]

    def logits(self, hidden_ND: Tensor) -> Tensor:
        return self.head(hidden_ND)

    def expected(self) -> Mapping[str, tuple[int, ...]]:
        return self.weights.shapes()

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        # Checkpoints with tied embeddings may hold the head a second time.
        self.weights.load(tensors, optional=[self.head.name])
