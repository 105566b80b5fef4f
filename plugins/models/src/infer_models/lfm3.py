"""LFM3: LFM2 with windows in some of its attention, norms on both sides of each part, and a gate for each head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import PositiveInt

from infer_layers import Gate, LayerType, RopeParameters, layer_windows
from infer_models.lfm2 import Lfm2Config

ROPES: Mapping[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1_000_000.0},
}
Kind = Literal["conv", "full_attention", "sliding_attention"]


class Lfm3Config(Lfm2Config):
    norms_after: ClassVar[tuple[str, ...]] = ("post_operator_norm", "post_ffn_norm")
    attention_out: ClassVar[str] = "o_proj"
    qk_norms: ClassVar[tuple[str, str]] = ("q_norm", "k_norm")

    intermediate_size: PositiveInt = 7680
    head_dim: PositiveInt = 128
    conv_L_cache: PositiveInt = 7
    sliding_window: PositiveInt | None = 256
    layer_types: list[Kind] | None = None  # type: ignore[assignment]
    use_sandwich_norm: Literal[True] = True
    use_attention_gate: bool = True

    @property
    def mlp_width(self) -> int:
        return self.intermediate_size

    @property
    def attention_gate(self) -> Gate | None:
        return Gate("gate_proj") if self.use_attention_gate else None

    def kinds(self) -> Sequence[Kind]:
        """What each layer lets tokens see those before them by."""
        usual: tuple[Kind, ...] = ("sliding_attention", "conv", "full_attention", "conv")
        return self.layer_types or ["conv", *(usual[i % 4] for i in range(1, self.num_hidden_layers))]

    def attends(self, index: int) -> bool:
        return self.kinds()[index] != "conv"

    def windows(self) -> list[int | None]:
        types: list[LayerType] = ["full_attention" if kind == "conv" else kind for kind in self.kinds()]
        return layer_windows(types, self.sliding_window, self.num_hidden_layers)

    def ropes(self, config: Mapping[str, Any]) -> Sequence[RopeParameters | None]:
        config = {**config, "rope_parameters": config.get("rope_parameters") or ROPES}
        kinds = self.kinds()
        theta = self.default_theta
        read = {
            kind: RopeParameters.read(config, kind, partial=kind == "full_attention", default_theta=theta)
            for kind in ROPES
        }
        return [read.get(kind) for kind in kinds]
