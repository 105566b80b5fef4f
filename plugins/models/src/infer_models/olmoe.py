"""OLMoE: Llama with a mixture of experts in every layer, and one norm over all heads of q and one over those of K."""

from __future__ import annotations

from typing import ClassVar

from pydantic import AliasChoices, Field, PositiveInt

from infer.contracts.kernels import Routing
from infer_layers import Experts, PositiveNumber, Weights
from infer_models.llama import LlamaConfig, LlamaLayer


class OlmoeConfig(LlamaConfig):
    qk_norm: ClassVar[bool] = True
    qk_norm_whole: ClassVar[bool] = True

    rms_norm_eps: PositiveNumber = 1e-5
    clip_qkv: None = None
    """Not supported: no published OLMoE clips q, K and V."""
    num_experts: PositiveInt = Field(64, validation_alias=AliasChoices("num_experts", "num_local_experts"))
    num_experts_per_tok: PositiveInt = 8
    norm_topk_prob: bool = False


class OlmoeLayer(LlamaLayer):
    def feed_forward(self, w: Weights, name: str, index: int, c: OlmoeConfig) -> Experts:
        routing = Routing(c.num_experts_per_tok, renormalize=c.norm_topk_prob)
        return Experts(w, f"{name}.mlp", c.hidden_size, c.intermediate_size, c.num_experts, routing, c.hidden_act)
