"""Qwen3, dense: Llama's decoder with a norm on every query and key head, and sliding windows if asked for."""

from __future__ import annotations

from typing import ClassVar

from pydantic import PositiveInt

from infer.layers import LayerType, layer_windows
from infer_models.llama import LlamaConfig


class Qwen3Config(LlamaConfig):
    """The fields that Llama has not."""

    qk_norm: ClassVar[bool] = True

    head_dim: PositiveInt = 128
    use_sliding_window: bool = False
    sliding_window: PositiveInt | None = 4096
    max_window_layers: int = 28
    layer_types: list[LayerType] | None = None

    def windows(self) -> list[int | None]:
        """The layers from ``max_window_layers`` on slide, unless ``layer_types`` says otherwise."""
        window = self.sliding_window if self.use_sliding_window else None
        count = self.num_hidden_layers
        types: list[LayerType] = [
            "full_attention" if window is None or i < self.max_window_layers else "sliding_attention"
            for i in range(count)
        ]
        return layer_windows(self.layer_types or types, window, count)
