"""EXAONE 4: norms after attention and MLP, a norm on every query and key head, and, where other layers have sliding
windows, layers of full attention that rotate nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import NonNegativeInt, PositiveInt

from infer_layers import LayerType, PositiveNumber, RopeParameters, layer_windows
from infer_models.llama import LlamaConfig


class Exaone4Config(LlamaConfig):
    qk_norm: ClassVar[bool] = True
    norms_before: ClassVar[tuple[str, ...]] = ()
    norms_after: ClassVar[tuple[str, ...]] = ("post_attention_layernorm", "post_feedforward_layernorm")

    rms_norm_eps: PositiveNumber = 1e-5
    sliding_window: PositiveInt | None = 4096
    sliding_window_pattern: NonNegativeInt | str | None = 4
    """So many layers have one of full attention, the last; or "LLLG", with an L for each that has a window."""
    layer_types: list[LayerType] | None = None

    def windows(self) -> list[int | None]:
        count, pattern = self.num_hidden_layers, self.sliding_window_pattern
        if self.sliding_window is None or not pattern:
            return layer_windows(self.layer_types or ["full_attention"] * count, self.sliding_window, count)
        every = len(pattern) if isinstance(pattern, str) else pattern
        types: list[LayerType] = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(count)]
        return layer_windows(self.layer_types or types, self.sliding_window, count)

    def ropes(self, config: Mapping[str, Any]) -> Sequence[RopeParameters | None]:
        pairs = zip(super().ropes(config), self.windows(), strict=True)
        return [None if window is None and self.sliding_window is not None else rope for rope, window in pairs]
