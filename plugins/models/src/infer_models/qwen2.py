"""Qwen2 and Qwen2.5, dense: Llama's decoder with biases on q, k and v, and optional sliding windows."""

from __future__ import annotations

from pydantic import PositiveInt

from infer_layers import LayerType, layer_windows
from infer_models.llama import LlamaConfig


class Qwen2Config(LlamaConfig):
    use_sliding_window: bool = False
    sliding_window: PositiveInt | None = 4096
    max_window_layers: int = 28
    layer_types: list[LayerType] | None = None

    @property
    def biases(self) -> str:
        return "qkv"

    def windows(self) -> list[int | None]:
        """The layers from ``max_window_layers`` on have windows, unless ``layer_types`` says otherwise."""
        window, count = self.sliding_window if self.use_sliding_window else None, self.num_hidden_layers
        full = count if window is None else max(0, self.max_window_layers)
        types: list[LayerType] = ["full_attention" if i < full else "sliding_attention" for i in range(count)]
        return layer_windows(self.layer_types or types, window, count)
