"""Qwen2-MoE: Qwen2 with mixtures of experts, to which an MLP for all tokens is added with a share of its own."""

from __future__ import annotations

from collections.abc import Callable

from pydantic import AliasChoices, Field, NonNegativeInt, PositiveInt
from torch import Tensor

from infer.contracts.kernels import Routing
from infer_layers import Experts, GatedMLP, LayerType, Weights, layer_windows
from infer_models.llama import LlamaLayer
from infer_models.qwen2 import Qwen2Config


class Qwen2MoeConfig(Qwen2Config):
    sliding_window: NonNegativeInt | None = None
    """transformers 5 writes 0 where there are no windows."""
    moe_intermediate_size: PositiveInt
    shared_expert_intermediate_size: PositiveInt = 5632
    num_experts: PositiveInt = Field(60, validation_alias=AliasChoices("num_experts", "num_local_experts"))
    num_experts_per_tok: PositiveInt = 4
    norm_topk_prob: bool = False
    decoder_sparse_step: PositiveInt = 1
    """Every layer whose number, counted from 1, is a multiple of this one has experts,"""
    mlp_only_layers: list[int] | None = None
    """except these, counted from 0."""
    qkv_bias: bool = True

    @property
    def biases(self) -> str:
        return "qkv" if self.qkv_bias else ""

    def windows(self) -> list[int | None]:
        """Every other layer before ``max_window_layers`` has a window, unless ``layer_types`` says otherwise."""
        window, count = (self.sliding_window or None) if self.use_sliding_window else None, self.num_hidden_layers
        end = 0 if window is None else self.max_window_layers
        types: list[LayerType] = [
            "sliding_attention" if i % 2 == 0 and i < end else "full_attention" for i in range(count)
        ]
        return layer_windows(self.layer_types or types, window, count)

    def sparse(self, index: int) -> bool:
        return index not in (self.mlp_only_layers or ()) and (index + 1) % self.decoder_sparse_step == 0


class Qwen2MoeLayer(LlamaLayer):
    def feed_forward(self, w: Weights, name: str, index: int, c: Qwen2MoeConfig) -> Callable[[Tensor], Tensor]:
        if not c.sparse(index):
            return super().feed_forward(w, name, index, c)
        shared_width = c.shared_expert_intermediate_size
        return Experts(
            w,
            f"{name}.mlp",
            c.hidden_size,
            c.moe_intermediate_size,
            c.num_experts,
            Routing(c.num_experts_per_tok, renormalize=c.norm_topk_prob),
            c.hidden_act,
            shared=GatedMLP(w, f"{name}.mlp.shared_expert", c.hidden_size, shared_width, c.hidden_act),
            shared_gate="shared_expert_gate",
        )
