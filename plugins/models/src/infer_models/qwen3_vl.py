"""Qwen3-VL's language model: Qwen3 without windows. Text has one position in all three parts of its rotation, which is
then Qwen3's."""

from __future__ import annotations

from typing import ClassVar

from infer_models.qwen3 import Qwen3Config


class Qwen3VLConfig(Qwen3Config):
    default_theta: ClassVar[float] = 500_000.0

    def windows(self) -> list[int | None]:
        """None, whatever a text_config taken from Qwen3 says."""
        return [None] * self.num_hidden_layers
