"""LFM2: Llama with norms of q and K, in which short convolutions stand in the place of most layers' attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import AliasChoices, Field, NonNegativeInt, PositiveInt
from torch import Tensor

from infer.contracts.attention import AttentionSpec
from infer.contracts.states import StateSpec
from infer_layers import GatedMLP, PositiveNumber, RopeParameters, ShortConv, Weights, nth
from infer_models.llama import LlamaConfig, LlamaLayer, Mixer


class Lfm2Config(LlamaConfig):
    per_layer: ClassVar[tuple[str, ...]] = ("layer_types",)
    default_theta: ClassVar[float] = 1_000_000.0
    norm_name: ClassVar[str] = "model.embedding_norm"
    norms_before: ClassVar[tuple[str, ...]] = ("operator_norm", "ffn_norm")
    qk_norm: ClassVar[bool] = True
    attention_out: ClassVar[str] = "out_proj"
    qk_norms: ClassVar[tuple[str, str]] = ("q_layernorm", "k_layernorm")
    mlp: ClassVar[str] = "feed_forward"
    gate_up: ClassVar[tuple[str, ...]] = ("w1", "w3")
    down: ClassVar[str] = "w2"

    intermediate_size: PositiveInt = Field(validation_alias=AliasChoices("block_ff_dim", "intermediate_size"))
    rms_norm_eps: PositiveNumber = Field(1e-5, validation_alias="norm_eps")
    tie_word_embeddings: bool = Field(True, validation_alias=AliasChoices("tie_embedding", "tie_word_embeddings"))
    conv_bias: bool = False
    conv_L_cache: PositiveInt = 3
    block_auto_adjust_ff_dim: bool = True
    """Whether ``intermediate_size`` is that of an MLP without a gate; one with a gate has about two thirds of it."""
    block_ffn_dim_multiplier: PositiveNumber | None = 1.0
    block_multiple_of: PositiveInt = 256
    full_attn_idxs: list[NonNegativeInt] | None = None
    layer_types: list[Literal["conv", "full_attention"]] | None = None
    """Without it, ``full_attn_idxs`` says which layers have attention; without that, all have."""

    @property
    def mlp_width(self) -> int:
        width = self.intermediate_size
        if self.block_auto_adjust_ff_dim:
            width = int(2 * width / 3)
            if self.block_ffn_dim_multiplier is not None:
                width = int(self.block_ffn_dim_multiplier * width)
                width = -(-width // self.block_multiple_of) * self.block_multiple_of
        return width

    def attends(self, index: int) -> bool:
        if self.layer_types is not None:
            return self.layer_types[index] == "full_attention"
        return self.full_attn_idxs is None or index in self.full_attn_idxs

    def attention(self) -> Sequence[AttentionSpec | None]:
        return [spec if self.attends(i) else None for i, spec in enumerate(super().attention())]

    def states(self, dtype: torch.dtype) -> Sequence[StateSpec | None]:
        spec = ShortConv.state(self.hidden_size, self.conv_L_cache, dtype)
        return [None if self.attends(i) else spec for i in range(self.num_hidden_layers)]


class Lfm2Layer(LlamaLayer):
    def mixes(
        self, w: Weights, name: str, index: int, c: Any, spec: AttentionSpec | None, rope: RopeParameters | None
    ) -> Mixer:
        if spec is not None:
            return super().mixes(w, name, index, c, spec, rope)
        layer = nth(c.states(w.context.dtype), index)
        return ShortConv(w, f"{name}.conv", layer, c.hidden_size, c.conv_L_cache, c.conv_bias)

    def feed_forward(self, w: Weights, name: str, index: int, c: Any) -> Callable[[Tensor], Tensor]:
        return GatedMLP(
            w, f"{name}.{c.mlp}", c.hidden_size, c.mlp_width, gate_up=c.gate_up, down=c.down, activation="silu"
        )
