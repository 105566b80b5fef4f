"""Granite with windows: sinks in all layers, windows in three of four, and a base of the rotations for each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field, PositiveInt

from infer_layers import LayerType, PositiveNumber, RopeParameters, layer_windows
from infer_models.granite import GraniteConfig


class GraniteSWAConfig(GraniteConfig):
    per_layer: ClassVar[tuple[str, ...]] = ("layer_rope_theta",)
    attention_sinks: ClassVar[bool] = True

    rms_norm_eps: PositiveNumber = 1e-5
    tie_word_embeddings: bool = True
    sliding_window: PositiveInt | None = 128
    layer_types: list[LayerType] | None = None
    layer_rope_theta: list[Annotated[float, Field(ge=0, allow_inf_nan=False)]] | None = None
    """0 for a layer that rotates nothing; without it, all have the same."""

    def windows(self) -> list[int | None]:
        count = self.num_hidden_layers
        types: list[LayerType] = ["sliding_attention" if i % 4 else "full_attention" for i in range(count)]
        return layer_windows(self.layer_types or types, self.sliding_window, count)

    def ropes(self, config: Mapping[str, Any]) -> Sequence[RopeParameters | None]:
        same = super().ropes(config)
        if self.layer_rope_theta is None:
            return same
        return [
            rope.model_copy(update={"rope_theta": theta}) if rope and theta else None
            for rope, theta in zip(same, self.layer_rope_theta, strict=True)
        ]
