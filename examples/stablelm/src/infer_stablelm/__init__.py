"""StableLM: layer norms in place of RMS norms, heads that are rotated in part, and layers whose attention and MLP may
stand side by side. Shapes: T tokens, D hidden size, N wanted rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from infer import hookimpl
from infer.contracts.attention import AttentionSpec, Rotary
from infer.contracts.cache import KVCacheView
from infer.contracts.model import ModelRegistration
from infer_layers import (
    Attention,
    Decoder,
    DecoderConfig,
    GatedMLP,
    HiddenAct,
    Norm,
    PositiveNumber,
    RopeParameters,
    Weights,
    select,
)

INFER_PLUGIN_API = 2


class LayerNorm:
    """A norm that subtracts the mean, too, and has a bias (Ba et al., 2016). Each row is computed by itself."""

    def __init__(self, w: Weights, name: str, size: int, eps: float) -> None:
        self.eps = eps
        self.weight_D = self.bias_D = torch.empty(0)
        w.expect(f"{name}.weight", (size,), lambda tensor: setattr(self, "weight_D", tensor.clone()))
        w.expect(f"{name}.bias", (size,), lambda tensor: setattr(self, "bias_D", tensor.clone()))

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, x.shape[-1:], self.weight_D, self.bias_D, self.eps)

    def add(self, x_TD: Tensor, residual_TD: Tensor | None) -> tuple[Tensor, Tensor]:
        total_TD = x_TD if residual_TD is None else x_TD + residual_TD
        return self(total_TD), total_TD


class StableLmConfig(DecoderConfig):
    partial_rotary: ClassVar[bool] = True

    hidden_act: HiddenAct = "silu"
    layer_norm_eps: PositiveNumber = 1e-5
    use_qkv_bias: bool = False
    use_parallel_residual: bool = False
    qk_layernorm: Literal[False] = False
    """StableLM 2 12B normalizes each head of q and K by weights of its own, which this example does not do."""

    def norm(self, weights: Weights, name: str) -> Norm:
        return LayerNorm(weights, name, self.hidden_size, self.layer_norm_eps)

    def ropes(self, config: Mapping[str, Any]) -> Sequence[RopeParameters | None]:
        return super().ropes({"partial_rotary_factor": 0.25, **config})


class StableLmLayer:
    def __init__(
        self, w: Weights, name: str, index: int, c: StableLmConfig, spec: AttentionSpec, rope: RopeParameters | None
    ) -> None:
        biases = "qkv" if c.use_qkv_bias else ""
        self.norm = c.norm(w, f"{name}.input_layernorm")
        self.attention = Attention(w, f"{name}.self_attn", index, c.hidden_size, spec, rope, biases=biases)
        self.mlp_norm = None if c.use_parallel_residual else c.norm(w, f"{name}.post_attention_layernorm")
        self.mlp = GatedMLP(w, f"{name}.mlp", c.hidden_size, c.intermediate_size, c.hidden_act)

    def __call__(
        self,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        rotary: Rotary | None,
        cache: KVCacheView,
        rows_N: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        x_TD, residual_TD = self.norm.add(x_TD, residual_TD)
        attended_ND, residual_ND = self.attention(x_TD, rotary, cache, rows_N), select(residual_TD, rows_N)
        if self.mlp_norm is None:
            return attended_ND + self.mlp(select(x_TD, rows_N)), residual_ND
        x_ND, residual_ND = self.mlp_norm.add(attended_ND, residual_ND)
        return self.mlp(x_ND), residual_ND


@hookimpl
def infer_models() -> list[ModelRegistration]:
    make = lambda config, context, settings: Decoder(config, context, StableLmConfig, StableLmLayer)  # noqa: E731
    return [ModelRegistration("stablelm", make, "StableLM 3B and StableLM 2", architectures=("StableLmForCausalLM",))]
