"""OLMo 3: OLMo 2 with windows in three of four layers, in which rotations are never stretched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import PositiveInt

from infer_layers import LayerType, RopeParameters, layer_windows
from infer_models.olmo2 import Olmo2Config


class Olmo3Config(Olmo2Config):
    default_theta: ClassVar[float] = 500_000.0

    sliding_window: PositiveInt | None = 4096
    layer_types: list[LayerType] | None = None

    def windows(self) -> list[int | None]:
        count = self.num_hidden_layers
        types: list[LayerType] = ["sliding_attention" if (i + 1) % 4 else "full_attention" for i in range(count)]
        return layer_windows(self.layer_types or types, self.sliding_window, count)

    def ropes(self, config: Mapping[str, Any]) -> Sequence[RopeParameters | None]:
        full = RopeParameters.read(config, "full_attention", default_theta=self.default_theta)
        plain = {**config, "rope_scaling": None}
        sliding = RopeParameters.read(plain, "sliding_attention", default_theta=self.default_theta)
        return [full if window is None else sliding for window in self.windows()]
