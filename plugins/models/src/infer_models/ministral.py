"""Ministral: Llama with sliding windows, in all layers unless the config says in which."""

from __future__ import annotations

from pydantic import PositiveInt

from infer_layers import LayerType, layer_windows
from infer_models.llama import LlamaConfig


class MinistralConfig(LlamaConfig):
    sliding_window: PositiveInt | None = 4096
    layer_types: list[LayerType] | None = None

    def windows(self) -> list[int | None]:
        count, window = self.num_hidden_layers, self.sliding_window
        default: LayerType = "full_attention" if window is None else "sliding_attention"
        return layer_windows(self.layer_types or [default] * count, window, count)
