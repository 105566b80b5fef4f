"""OLMo 2: norms after attention and MLP instead of before them, and one norm over all heads of q and one over those of
K."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from infer.layers import Attention, DecoderConfig, GatedMLP, PositiveNumber, RMSNorm, RopeParameters, Weights, select
from infer.protocols import AttentionSpec, KVCacheView, Rotary


class Olmo2Config(DecoderConfig):
    """The fields of config.json that change the arithmetic."""

    rms_norm_eps: PositiveNumber = 1e-5
    hidden_act: Literal["silu"] = "silu"
    attention_bias: bool = False


class Olmo2Layer:
    def __init__(
        self, w: Weights, name: str, index: int, c: Olmo2Config, spec: AttentionSpec, rope: RopeParameters
    ) -> None:
        size, eps, biases = c.hidden_size, c.rms_norm_eps, "qkvo" if c.attention_bias else ""
        self.attention = Attention(
            w, f"{name}.self_attn", index, size, spec, rope, biases=biases, qk_norm_eps=eps, qk_norm_whole=True
        )
        self.attention_norm = RMSNorm(w, f"{name}.post_attention_layernorm", size, eps)
        self.mlp = GatedMLP(w, f"{name}.mlp", size, c.intermediate_size, c.hidden_act)
        self.mlp_norm = RMSNorm(w, f"{name}.post_feedforward_layernorm", size, eps)

    def __call__(
        self,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        rotary: Rotary,
        cache: KVCacheView,
        rows_N: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        attended_ND = self.attention_norm(self.attention(x_TD, rotary, cache, rows_N))
        x_ND = select(x_TD, rows_N) + attended_ND
        return x_ND + self.mlp_norm(self.mlp(x_ND)), None
