"""SmolLM3: Llama with layers that rotate nothing, every fourth by default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

from pydantic import PositiveInt, model_validator

from infer_layers import LayerType, RopeParameters, layer_windows
from infer_models.llama import LlamaConfig


class SmolLM3Config(LlamaConfig):
    default_theta: ClassVar[float] = 2_000_000.0

    tie_word_embeddings: bool = True
    no_rope_layers: list[Literal[0, 1]] | None = None
    """1 for each layer that rotates, 0 for each that does not."""
    no_rope_layer_interval: PositiveInt = 4
    use_sliding_window: bool = False
    sliding_window: PositiveInt | None = None
    layer_types: list[LayerType] | None = None

    @model_validator(mode="after")
    def _rotating(self) -> Self:
        if self.no_rope_layers is not None and len(self.no_rope_layers) < self.num_hidden_layers:
            raise ValueError(
                f"no_rope_layers has {len(self.no_rope_layers)} entries, but num_hidden_layers is "
                f"{self.num_hidden_layers}"
            )
        return self

    def rotates(self, index: int) -> bool:
        if self.no_rope_layers is not None:
            return self.no_rope_layers[index] == 1
        return (index + 1) % self.no_rope_layer_interval != 0

    def windows(self) -> list[int | None]:
        """Unless ``layer_types`` says otherwise, the layers that do not rotate have windows."""
        count, window = self.num_hidden_layers, self.sliding_window
        if not self.use_sliding_window or window is None:
            return [None] * count
        types: list[LayerType] = ["full_attention" if self.rotates(i) else "sliding_attention" for i in range(count)]
        return layer_windows(self.layer_types or types, window, count)

    def ropes(self, config: Mapping[str, Any]) -> Sequence[RopeParameters | None]:
        return [rope if self.rotates(i) else None for i, rope in enumerate(super().ropes(config))]
