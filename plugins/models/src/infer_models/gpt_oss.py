"""gpt-oss: mixtures of experts with biases and a clamped activation, windows in every other layer, and sinks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field, PositiveInt

from infer.contracts.kernels import Routing
from infer_layers import Experts, LayerType, PositiveNumber, RopeParameters, Weights, layer_windows
from infer_models.llama import LlamaConfig, LlamaLayer

DEFAULT_ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class GptOssConfig(LlamaConfig):
    attention_sinks: ClassVar[bool] = True
    default_theta: ClassVar[float] = 150_000.0

    head_dim: PositiveInt = 64
    rms_norm_eps: PositiveNumber = 1e-5
    attention_bias: bool = True
    sliding_window: PositiveInt | None = 128
    layer_types: list[LayerType] | None = None
    num_local_experts: PositiveInt = 128
    num_experts_per_tok: PositiveInt = 4
    # No other numbers are published, so the activation has them built in.
    swiglu_limit: Annotated[float, Field(ge=7, le=7)] = 7.0
    swiglu_alpha: Annotated[float, Field(ge=1.702, le=1.702)] = 1.702

    def ropes(self, config: Mapping[str, Any]) -> Sequence[RopeParameters | None]:
        """Where the config says nothing of the rope, it is stretched as in the published models."""
        silent = config.get("rope_parameters") is None and "rope_scaling" not in config
        return super().ropes({**config, "rope_parameters": DEFAULT_ROPE} if silent else config)

    def windows(self) -> list[int | None]:
        count = self.num_hidden_layers
        types: list[LayerType] = ["full_attention" if i % 2 else "sliding_attention" for i in range(count)]
        return layer_windows(self.layer_types or types, self.sliding_window, count)


class GptOssLayer(LlamaLayer):
    def feed_forward(self, w: Weights, name: str, index: int, c: GptOssConfig) -> Experts:
        return Experts(
            w,
            f"{name}.mlp",
            c.hidden_size,
            c.intermediate_size,
            c.num_local_experts,
            Routing(c.num_experts_per_tok),
            "clamped_swiglu",
            router="router",
            gate_up=("gate_up_proj",),
            transposed=True,
            interleaved=True,
            biases=True,
        )
