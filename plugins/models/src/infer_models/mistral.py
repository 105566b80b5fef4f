"""Mistral: Llama's decoder with sliding windows in all layers, unless ``sliding_window`` is null."""

from __future__ import annotations

from pydantic import PositiveInt

from infer_models.llama import LlamaConfig


class MistralConfig(LlamaConfig):
    sliding_window: PositiveInt | None = 4096
    layer_types: None = None
    """Not supported: a config with windows in some layers only is Ministral's, another architecture."""

    def windows(self) -> list[int | None]:
        return [self.sliding_window] * self.num_hidden_layers
