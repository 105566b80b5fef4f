"""Gemma 3's language model, alone or within a checkpoint that also has a vision tower (which is not used).

Shapes: T tokens, D hidden, V vocabulary, N sampled rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from pydantic import BaseModel, PositiveInt
from torch import Tensor

from infer.layers import (
    Attention,
    Embedding,
    GatedMLP,
    Head,
    LayerType,
    PositiveNumber,
    RMSNorm,
    RopeParameters,
    RotaryEmbedding,
    Weights,
    config_table,
    layer_windows,
    read_config,
    select,
)
from infer.protocols import AttentionSpec, KVCacheView, ModelContext, Pass, Rotary


class Gemma3Config(BaseModel, extra="ignore"):
    """The fields of config.json that change the arithmetic. Google's files leave out what has its default.

    ``attn_logit_softcapping`` is none of them: Gemma 2 capped attention scores, and transformers reads the field of a
    Gemma 3 without using it.
    """

    vocab_size: PositiveInt = 262_208
    hidden_size: PositiveInt = 2304
    intermediate_size: PositiveInt = 9216
    num_hidden_layers: PositiveInt = 26
    num_attention_heads: PositiveInt = 8
    num_key_value_heads: PositiveInt = 4
    head_dim: PositiveInt = 256
    rms_norm_eps: PositiveNumber = 1e-6
    hidden_activation: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
    attention_bias: bool = False
    tie_word_embeddings: bool = True
    query_pre_attn_scalar: PositiveNumber = 256
    sliding_window: PositiveInt | None = 4096
    sliding_window_pattern: PositiveInt = 6
    layer_types: list[LayerType] | None = None
    final_logit_softcapping: PositiveNumber | None = None
    use_bidirectional_attention: Literal[False] | None = None

    def attention(self) -> list[AttentionSpec]:
        count, every = self.num_hidden_layers, self.sliding_window_pattern
        types: list[LayerType] = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(count)]
        windows = layer_windows(self.layer_types or types, self.sliding_window, count)
        heads = (self.num_attention_heads, self.num_key_value_heads, self.head_dim)
        scale = self.query_pre_attn_scalar**-0.5
        return [AttentionSpec(*heads, scale, window) for window in windows]


class Gemma3Layer:
    def __init__(self, w: Weights, name: str, index: int, c: Gemma3Config, spec: AttentionSpec) -> None:
        def norm(part: str) -> RMSNorm:
            return RMSNorm(w, f"{name}.{part}_layernorm", c.hidden_size, c.rms_norm_eps, unit_offset=True)

        self.sliding = spec.window is not None
        self.input_norm = norm("input")
        self.attention = Attention(
            w,
            f"{name}.self_attn",
            index,
            c.hidden_size,
            spec,
            c.attention_bias,
            qk_norm_eps=c.rms_norm_eps,
            qk_norm_unit_offset=True,
        )
        self.attention_out_norm = norm("post_attention")
        self.mlp_norm = norm("pre_feedforward")
        self.mlp = GatedMLP(w, f"{name}.mlp", c.hidden_size, c.intermediate_size, c.hidden_activation)
        self.mlp_out_norm = norm("post_feedforward")

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
        x_ND = self.attention_out_norm(self.attention(x_TD, rotary, cache, rows_N))
        x_ND, residual_ND = self.mlp_norm.add(x_ND, select(residual_TD, rows_N))
        return self.mlp_out_norm(self.mlp(x_ND)), residual_ND


class Gemma3:
    """A ModelProtocol."""

    def __init__(self, config: Mapping[str, Any], context: ModelContext) -> None:
        text = config
        if nested := config_table(config, "text_config"):
            text = nested | {"tie_word_embeddings": config.get("tie_word_embeddings", True)}
        c = read_config(Gemma3Config, text)
        w = self.weights = Weights(context)
        size, eps = c.hidden_size, c.rms_norm_eps
        self.vocab_size = c.vocab_size
        self.attention: Sequence[AttentionSpec] = c.attention()
        self.embedding = Embedding(w, "model.embed_tokens", c.vocab_size, size, scale=size**0.5)
        full = RopeParameters.read(text, "full_attention", default_theta=1_000_000.0)
        sliding = RopeParameters.read(text, "sliding_attention", theta_key="rope_local_base_freq")
        self.full_rotary = RotaryEmbedding(context, full, c.head_dim)
        self.sliding_rotary = RotaryEmbedding(context, sliding, c.head_dim)
        self.layers = [Gemma3Layer(w, f"model.layers.{i}", i, c, spec) for i, spec in enumerate(self.attention)]
        self.norm = RMSNorm(w, "model.norm", size, eps, unit_offset=True)
        self.head = Head(w, self.embedding, "lm_head", c.vocab_size, size, c.tie_word_embeddings)
        self.soft_cap = c.final_logit_softcapping

    def forward(self, batch: Pass) -> Tensor:
        full, sliding = self.full_rotary(batch.positions_T), self.sliding_rotary(batch.positions_T)
        x_TD, residual_TD, cache = self.embedding(batch.token_ids_T), None, batch.cache
        for layer in self.layers[:-1]:
            x_TD, residual_TD = layer(x_TD, residual_TD, sliding if layer.sliding else full, cache)
        last = self.layers[-1]
        x_ND, residual_ND = last(x_TD, residual_TD, sliding if last.sliding else full, cache, batch.rows_N)
        return self.norm.add(x_ND, residual_ND)[0]

    def logits(self, hidden_ND: Tensor) -> Tensor:
        logits_NV = self.head(hidden_ND)
        return logits_NV if self.soft_cap is None else self.soft_cap * torch.tanh(logits_NV / self.soft_cap)

    def expected(self) -> Mapping[str, tuple[int, ...]]:
        return self.weights.shapes()

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        # Checkpoints with tied embeddings may hold the head a second time.
        self.weights.load(_language_model(tensors), optional=[self.head.name])


def _language_model(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Names as in a checkpoint without vision: transformers 4 wrote "language_model.model.", 5 writes
    "model.language_model."."""
    for name, tensor in tensors:
        if not name.removeprefix("model.").startswith(("vision_tower.", "multi_modal_projector.")):
            short = name.removeprefix("language_model.")
            yield short.replace("model.language_model.", "model.", 1), tensor
