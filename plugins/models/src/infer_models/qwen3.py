"""Qwen3, dense: Qwen2 with a norm on every query and key head, and biases only if the config has them."""

from __future__ import annotations

from typing import ClassVar

from pydantic import PositiveInt

from infer_models.qwen2 import Qwen2Config


class Qwen3Config(Qwen2Config):
    qk_norm: ClassVar[bool] = True

    head_dim: PositiveInt = 128

    @property
    def biases(self) -> str:
        return "qkvo" if self.attention_bias else ""
