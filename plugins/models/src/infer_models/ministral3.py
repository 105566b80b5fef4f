"""Ministral 3, and Devstral Small 2: Mistral, whose queries grow with their position in long texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field, PositiveInt

from infer_layers import PositiveNumber, RopeParameters, TemperedYarnRope
from infer_models.llama import LlamaConfig

ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


class LevelRope(RopeParameters, frozen=True):
    """Queries that do not grow are all that this kind has."""

    llama_4_scaling_beta: Annotated[float, Field(ge=0, le=0)] = 0.0


class Ministral3Config(LlamaConfig):
    rope_kinds: ClassVar[Mapping[str, type[RopeParameters]]] = {"default": LevelRope, "yarn": TemperedYarnRope}
    default_theta: ClassVar[float] = 1_000_000.0

    head_dim: PositiveInt | None = 128
    rms_norm_eps: PositiveNumber = 1e-5
    sliding_window: PositiveInt | None = None

    def windows(self) -> list[int | None]:
        return [self.sliding_window] * self.num_hidden_layers

    def ropes(self, config: Mapping[str, Any]) -> Sequence[RopeParameters | None]:
        given = config.get("rope_parameters") or config.get("rope_scaling")
        return super().ropes(config if given else {**config, "rope_parameters": ROPE})
