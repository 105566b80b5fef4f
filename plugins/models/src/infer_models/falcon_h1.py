"""Falcon-H1: attention and Mamba 2 side by side in each layer, with factors for nearly every product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from pydantic import PositiveInt
from torch import Tensor

from infer.contracts.attention import AttentionSpec, Rotary
from infer.contracts.cache import KVCacheView
from infer.contracts.states import StateSpec
from infer_layers import Linear, Mamba2, PositiveNumber, RopeParameters, Weights
from infer_models.hybrid import HybridConfig
from infer_models.llama import LlamaLayer, Mixer


class FalconH1Config(HybridConfig):
    norm_name: ClassVar[str] = "model.final_layernorm"
    norms_before: ClassVar[tuple[str, ...]] = ("input_layernorm", "pre_ff_layernorm")
    mlp: ClassVar[str] = "feed_forward"

    num_key_value_heads: PositiveInt | None = 8
    rms_norm_eps: PositiveNumber = 1e-5
    mamba_d_ssm: PositiveInt | None = 1024
    mamba_rms_norm: bool = False
    mamba_norm_before_gate: bool = True
    projectors_bias: bool = False
    embedding_multiplier: PositiveNumber = 1.0
    lm_head_multiplier: PositiveNumber = 1.0
    key_multiplier: PositiveNumber = 1.0
    attention_in_multiplier: PositiveNumber = 1.0
    attention_out_multiplier: PositiveNumber = 1.0
    ssm_in_multiplier: PositiveNumber = 1.0
    ssm_out_multiplier: PositiveNumber = 1.0
    mlp_multipliers: tuple[PositiveNumber, PositiveNumber] | None = None
    """Of the gate, and of the result."""
    ssm_multipliers: tuple[PositiveNumber, PositiveNumber, PositiveNumber, PositiveNumber, PositiveNumber] | None = None
    """Of Mamba's gate, x, B, C and steps."""

    @property
    def mamba_size(self) -> int:
        return super().mamba_size if self.mamba_d_ssm is None else self.mamba_d_ssm

    @property
    def attention_scale(self) -> float:
        """Includes that of the keys."""
        return super().attention_scale * self.key_multiplier

    @property
    def embedding_scale(self) -> float | None:
        return self.embedding_multiplier

    @property
    def logits_divisor(self) -> float | None:
        return 1 / self.lm_head_multiplier

    def attends(self, index: int) -> bool:
        return True

    def states(self, dtype: torch.dtype) -> Sequence[StateSpec | None]:
        return [self.mamba.state(dtype)] * self.num_hidden_layers


class BothMixers:
    """The sum of attention and Mamba 2."""

    def __init__(self, attention: Mixer, mamba: Mixer, c: FalconH1Config) -> None:
        self._parts = (
            (mamba, c.ssm_in_multiplier, c.ssm_out_multiplier),
            (attention, c.attention_in_multiplier, c.attention_out_multiplier),
        )

    def __call__(self, x_TD: Tensor, rotary: Rotary | None, cache: KVCacheView, rows_N: Tensor | None = None) -> Tensor:
        """[T, D], or [N, D] if ``rows_N`` is given."""
        mamba_ND, attention_ND = (
            _times(mixer(_times(x_TD, before), rotary, cache, rows_N), after) for mixer, before, after in self._parts
        )
        return mamba_ND + attention_ND


class ScaledMLP:
    """A ``GatedMLP`` with factors for the gate and the result."""

    def __init__(self, w: Weights, name: str, c: FalconH1Config, factors: tuple[float, float]) -> None:
        width = c.intermediate_size
        self._kernels, self._activation, self._factors = w.context.kernels, c.hidden_act, factors
        names = [f"{name}.{part}" for part in c.gate_up]
        self._gate_up = Linear(w, names, c.hidden_size, [width] * 2, c.mlp_bias)
        self._down = Linear(w, f"{name}.{c.down}", width, c.hidden_size, c.mlp_bias)

    def __call__(self, x_TD: Tensor) -> Tensor:
        gate_TI, up_TI = self._gate_up(x_TD).chunk(2, dim=-1)
        gated_TI = self._kernels.gated(gate_TI * self._factors[0], up_TI, self._activation)
        return self._down(gated_TI) * self._factors[1]


class FalconH1Layer(LlamaLayer):
    def mixes(
        self, w: Weights, name: str, index: int, c: Any, spec: AttentionSpec | None, rope: RopeParameters | None
    ) -> Mixer:
        mamba = Mamba2(
            w,
            f"{name}.mamba",
            index,
            c.hidden_size,
            c.mamba,
            bias=c.mamba_proj_bias,
            out_bias=c.projectors_bias,
            conv_bias=c.mamba_conv_bias,
            norm_eps=c.rms_norm_eps if c.mamba_rms_norm else None,
            gate_first=not c.mamba_norm_before_gate,
            multipliers=c.ssm_multipliers,
        )
        return BothMixers(super().mixes(w, name, index, c, spec, rope), mamba, c)

    def feed_forward(self, w: Weights, name: str, index: int, c: FalconH1Config) -> Callable[[Tensor], Tensor]:
        factors = c.mlp_multipliers or (1.0, 1.0)
        if factors == (1.0, 1.0):
            return super().feed_forward(w, name, index, c)
        return ScaledMLP(w, f"{name}.{c.mlp}", c, factors)


def _times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x * factor
