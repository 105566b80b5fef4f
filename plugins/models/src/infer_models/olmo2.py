"""OLMo 2: norms after attention and MLP instead of before them, and one norm over all heads of q and one over those of
K."""

from __future__ import annotations

from typing import ClassVar

from infer_layers import PositiveNumber
from infer_models.llama import LlamaConfig


class Olmo2Config(LlamaConfig):
    qk_norm: ClassVar[bool] = True
    qk_norm_whole: ClassVar[bool] = True
    norms_before: ClassVar[tuple[str, ...]] = ()
    norms_after: ClassVar[tuple[str, ...]] = ("post_attention_layernorm", "post_feedforward_layernorm")

    rms_norm_eps: PositiveNumber = 1e-5
