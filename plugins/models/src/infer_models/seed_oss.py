"""Seed-OSS: Llama with biases on q, k and v, and on the output projection only if the config says so."""

from __future__ import annotations

from pydantic import PositiveInt

from infer_models.llama import LlamaConfig


class SeedOssConfig(LlamaConfig):
    head_dim: PositiveInt | None = 128
    attention_bias: bool = True
    attention_out_bias: bool = False

    @property
    def biases(self) -> str:
        return ("qkv" if self.attention_bias else "") + ("o" if self.attention_out_bias else "")
