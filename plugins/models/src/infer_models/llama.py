"""Llama 3.x, and the layer that most families share. Shapes: T tokens, D hidden size, N wanted rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from torch import Tensor

from infer.contracts.attention import AttentionSpec, Rotary
from infer.contracts.cache import KVCacheView
from infer_layers import Attention, DecoderConfig, Gate, GatedMLP, HiddenAct, Norm, RopeParameters, Weights, nth, select


class LlamaConfig(DecoderConfig):
    """The fields of config.json that change the arithmetic, and what a family's layers are like."""

    qk_norm: ClassVar[bool] = False
    qk_norm_whole: ClassVar[bool] = False
    attention_name: ClassVar[str] = "self_attn"
    qkv: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj")
    attention_out: ClassVar[str] = "o_proj"
    qk_norms: ClassVar[tuple[str, str]] = ("q_norm", "k_norm")
    mlp: ClassVar[str] = "mlp"
    gate_up: ClassVar[tuple[str, ...]] = ("gate_proj", "up_proj")
    down: ClassVar[str] = "down_proj"
    rotary_interleaved: ClassVar[bool] = False
    attention_gated: ClassVar[bool] = False
    norms_before: ClassVar[tuple[str, ...]] = ("input_layernorm", "post_attention_layernorm")
    """The norms before attention and before the MLP; empty for none."""
    norms_after: ClassVar[tuple[str, ...]] = ()
    """Those of the results of attention and the MLP; empty for none."""

    hidden_act: HiddenAct = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False

    @property
    def has_qk_norm(self) -> bool:
        """Whether q and K are normalized."""
        return self.qk_norm

    @property
    def attention_gate(self) -> Gate | None:
        """As ``gate`` in ``Attention``."""
        return None

    @property
    def biases(self) -> str:
        """The ``biases`` argument of ``Attention``."""
        return "qkvo" if self.attention_bias else ""


class NoNorm:
    """Stands where a family has no norm."""

    def __call__(self, x: Tensor) -> Tensor:
        return x

    def add(self, x_TD: Tensor, residual_TD: Tensor | None) -> tuple[Tensor, Tensor]:
        total_TD = x_TD if residual_TD is None else x_TD + residual_TD
        return total_TD, total_TD


class Mixer(Protocol):
    """What of a layer lets tokens see those before them: attention, or what stands in its place."""

    def __call__(self, x_TD: Tensor, rotary: Rotary | None, cache: KVCacheView, rows_N: Tensor | None = None) -> Tensor:
        """[T, D], or [N, D] if ``rows_N`` is given."""


class LlamaLayer:
    def __init__(
        self, w: Weights, name: str, index: int, c: Any, spec: AttentionSpec | None, rope: RopeParameters | None
    ) -> None:
        def norms(parts: tuple[str, ...]) -> list[Norm]:
            return [c.norm(w, f"{name}.{part}") for part in parts] or [NoNorm(), NoNorm()]

        before, after = self.norms(c, index)
        self.input_norm, self.mlp_norm = norms(before)
        self.mixer_out_norm, self.mlp_out_norm = norms(after)
        self.mixer = self.mixes(w, name, index, c, spec, rope)
        self.mlp = self.feed_forward(w, name, index, c)
        self.scale = c.residual_scale

    def norms(self, c: Any, index: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """``norms_before`` and ``norms_after`` of this layer; ``c`` is the family's config."""
        return c.norms_before, c.norms_after

    def mixes(
        self, w: Weights, name: str, index: int, c: Any, spec: AttentionSpec | None, rope: RopeParameters | None
    ) -> Mixer:
        """The layer's mixer; ``c`` is the family's config."""
        assert spec is not None
        return Attention(
            w,
            f"{name}.{c.attention_name}",
            nth(c.attention(), index),
            c.hidden_size,
            spec,
            rope,
            biases=c.biases,
            qk_norm_eps=c.rms_norm_eps if c.has_qk_norm else None,
            qk_norm_unit_offset=c.norm_unit_offset,
            qk_norm_whole=c.qk_norm_whole,
            qkv=c.qkv,
            out=c.attention_out,
            qk_norms=c.qk_norms,
            interleaved=c.rotary_interleaved,
            gated=c.attention_gated,
            gate=c.attention_gate,
        )

    def feed_forward(self, w: Weights, name: str, index: int, c: Any) -> Callable[[Tensor], Tensor]:
        """What stands behind the mixer."""
        return GatedMLP(
            w,
            f"{name}.{c.mlp}",
            c.hidden_size,
            c.intermediate_size,
            c.hidden_act,
            c.mlp_bias,
            gate_up=c.gate_up,
            down=c.down,
        )

    def __call__(
        self,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        rotary: Rotary | None,
        cache: KVCacheView,
        rows_N: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        x_TD, residual_TD = self.input_norm.add(x_TD, residual_TD)
        x_ND = self._scaled(self.mixer_out_norm(self.mixer(x_TD, rotary, cache, rows_N)))
        x_ND, residual_ND = self.mlp_norm.add(x_ND, select(residual_TD, rows_N))
        return self._scaled(self.mlp_out_norm(self.mlp(x_ND))), residual_ND

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.scale is None else x * self.scale
