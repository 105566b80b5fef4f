"""Gemma 3's language model, alone or within a checkpoint that also has a vision tower (which is not used)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveInt

from infer_layers import HiddenAct, LayerType, PositiveNumber, RopeParameters, layer_windows
from infer_models.llama import LlamaConfig


class Gemma3Config(LlamaConfig):
    """The fields of config.json that change the arithmetic. Google's files omit fields that have their default values.

    ``attn_logit_softcapping`` is not among them: Gemma 2 capped attention scores, but for Gemma 3 transformers reads
    the field without using it."""

    norm_unit_offset: ClassVar[bool] = True
    qk_norm: ClassVar[bool] = True
    norms_before: ClassVar[tuple[str, ...]] = ("input_layernorm", "pre_feedforward_layernorm")
    norms_after: ClassVar[tuple[str, ...]] = ("post_attention_layernorm", "post_feedforward_layernorm")

    vocab_size: PositiveInt = 262_208
    hidden_size: PositiveInt = 2304
    intermediate_size: PositiveInt = 9216
    num_hidden_layers: PositiveInt = 26
    num_attention_heads: PositiveInt = 8
    num_key_value_heads: PositiveInt = 4
    head_dim: PositiveInt = 256
    rms_norm_eps: PositiveNumber = 1e-6
    hidden_act: HiddenAct = Field("gelu_pytorch_tanh", validation_alias="hidden_activation")
    tie_word_embeddings: bool = True
    query_pre_attn_scalar: PositiveNumber = 256
    sliding_window: PositiveInt | None = 4096
    sliding_window_pattern: PositiveInt = 6
    layer_types: list[LayerType] | None = None
    final_logit_softcapping: PositiveNumber | None = None
    use_bidirectional_attention: Literal[False] | None = None

    @property
    def attention_scale(self) -> float:
        return float(self.query_pre_attn_scalar**-0.5)

    @property
    def embedding_scale(self) -> float:
        return float(self.hidden_size**0.5)

    @property
    def logits_soft_cap(self) -> float | None:
        return self.final_logit_softcapping

    def windows(self) -> list[int | None]:
        count, every = self.num_hidden_layers, self.sliding_window_pattern
        types: list[LayerType] = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(count)]
        return layer_windows(self.layer_types or types, self.sliding_window, count)

    def ropes(self, config: Mapping[str, Any]) -> Sequence[RopeParameters | None]:
        full = RopeParameters.read(config, "full_attention", default_theta=1_000_000.0)
        sliding = RopeParameters.read(config, "sliding_attention", theta_key="rope_local_base_freq")
        return [full if window is None else sliding for window in self.windows()]
