"""Llama 3.x, and the layer that most families share. Shapes: T tokens, D hidden size, N wanted rows."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from infer.layers import Attention, DecoderConfig, GatedMLP, RMSNorm, RopeParameters, Weights, select
from infer.protocols import AttentionSpec, KVCacheView, Rotary


class LlamaConfig(DecoderConfig):
    """The fields of config.json that change the arithmetic."""

    qk_norm: ClassVar[bool] = False
    qkv: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj")
    gate_up: ClassVar[tuple[str, ...]] = ("gate_proj", "up_proj")

    hidden_act: Literal["silu"] = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False

    @property
    def biases(self) -> str:
        """The ``biases`` argument of ``Attention``."""
        return "qkvo" if self.attention_bias else ""


class LlamaLayer:
    def __init__(
        self, w: Weights, name: str, index: int, c: LlamaConfig, spec: AttentionSpec, rope: RopeParameters
    ) -> None:
        size, eps = c.hidden_size, c.rms_norm_eps
        qk_norm_eps = eps if c.qk_norm else None
        self.input_norm = RMSNorm(w, f"{name}.input_layernorm", size, eps)
        self.attention = Attention(
            w, f"{name}.self_attn", index, size, spec, rope, biases=c.biases, qk_norm_eps=qk_norm_eps, qkv=c.qkv
        )
        self.mlp_norm = RMSNorm(w, f"{name}.post_attention_layernorm", size, eps)
        self.mlp = GatedMLP(w, f"{name}.mlp", size, c.intermediate_size, c.hidden_act, c.mlp_bias, gate_up=c.gate_up)

    def __call__(
        self,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        rotary: Rotary,
        cache: KVCacheView,
        rows_N: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        x_TD, residual_TD = self.input_norm.add(x_TD, residual_TD)
        x_ND = self.attention(x_TD, rotary, cache, rows_N)
        x_ND, residual_ND = self.mlp_norm.add(x_ND, select(residual_TD, rows_N))
        return self.mlp(x_ND), residual_ND
