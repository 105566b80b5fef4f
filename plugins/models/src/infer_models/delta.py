"""What families have in common in which a gated delta net stands in the place of some layers' attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import PositiveInt

from infer.contracts.attention import AttentionSpec
from infer.contracts.states import StateSpec
from infer_layers import DeltaSizes, GatedDeltaNet, RopeParameters, Weights, nth
from infer_models.llama import LlamaConfig, LlamaLayer, Mixer


class DeltaConfig(LlamaConfig):
    """A config whose family says what sizes gated delta nets have. The class variables of these are arguments of
    ``GatedDeltaNet``."""

    per_layer: ClassVar[tuple[str, ...]] = ("layer_types",)
    delta_qkvz: ClassVar[tuple[str, ...]] = ("in_proj_qkv", "in_proj_z")
    delta_ba: ClassVar[tuple[str, ...]] = ("in_proj_b", "in_proj_a")
    delta_norm: ClassVar[str] = "norm"
    delta_out: ClassVar[str] = "out_proj"
    delta_norm_eps: ClassVar[float | None] = None
    """None for ``rms_norm_eps``."""
    delta_interleaved: ClassVar[bool] = False

    full_attention_interval: PositiveInt = 4
    layer_types: list[Literal["linear_attention", "full_attention"]] | None = None
    """Without it, every ``full_attention_interval``-th layer has attention."""

    @property
    def delta(self) -> DeltaSizes:
        raise NotImplementedError

    def attends(self, index: int) -> bool:
        """Whether the layer has attention; if not, it has a gated delta net."""
        if self.layer_types is not None:
            return self.layer_types[index] == "full_attention"
        return (index + 1) % self.full_attention_interval == 0

    def attention(self) -> Sequence[AttentionSpec | None]:
        return [spec if self.attends(i) else None for i, spec in enumerate(super().attention())]

    def states(self, dtype: torch.dtype) -> Sequence[StateSpec | None]:
        spec = self.delta.state(dtype)
        return [None if self.attends(i) else spec for i in range(self.num_hidden_layers)]


class DeltaLayer(LlamaLayer):
    def mixes(
        self, w: Weights, name: str, index: int, c: Any, spec: AttentionSpec | None, rope: RopeParameters | None
    ) -> Mixer:
        if spec is not None:
            return super().mixes(w, name, index, c, spec, rope)
        return GatedDeltaNet(
            w,
            f"{name}.linear_attn",
            nth(c.states(w.context.dtype), index),
            c.hidden_size,
            c.delta,
            norm_eps=c.rms_norm_eps if c.delta_norm_eps is None else c.delta_norm_eps,
            qkvz=c.delta_qkvz,
            ba=c.delta_ba,
            norm=c.delta_norm,
            out=c.delta_out,
            interleaved=c.delta_interleaved,
        )
