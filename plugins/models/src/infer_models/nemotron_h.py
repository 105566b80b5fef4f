"""Nemotron-H: each layer is one of Mamba 2, attention without rotation, an MLP without a gate, and, from Nemotron 3 on,
a mixture of such MLPs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import AliasChoices, BeforeValidator, Field, PositiveInt, model_validator
from torch import Tensor

from infer.contracts.attention import AttentionSpec, Rotary
from infer.contracts.cache import KVCacheView
from infer.contracts.kernels import Routing
from infer.contracts.states import StateSpec
from infer_layers import Experts, Linear, PositiveNumber, RopeParameters, Weights, select
from infer_models.hybrid import HybridConfig, HybridLayer, StepLimit
from infer_models.llama import Mixer

PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
OLD = {"mamba": "linear_attention", "attention": "full_attention"}


def _kinds(given: Any) -> Any:
    if isinstance(given, str):
        return [PATTERN.get(letter, letter) for letter in given]
    return [OLD.get(each, each) for each in given] if isinstance(given, list) else given


KINDS = ("layers_block_type", "layer_types", "hybrid_override_pattern")
"""The names of the field that says what each layer is, in order of precedence."""
Kinds = Annotated[list[Literal["linear_attention", "full_attention", "mlp", "moe"]], BeforeValidator(_kinds)]


class NemotronHConfig(HybridConfig):
    embedding_name: ClassVar[str] = "backbone.embeddings"
    layers_name: ClassVar[str] = "backbone.layers"
    norm_name: ClassVar[str] = "backbone.norm_f"
    attention_name: ClassVar[str] = "mixer"
    mamba_name: ClassVar[str] = "mixer"

    kinds: Kinds = Field(validation_alias=AliasChoices(*KINDS))
    head_dim: PositiveInt | None = Field(128, validation_alias=AliasChoices("head_dim", "attention_head_dim"))
    rms_norm_eps: PositiveNumber = Field(1e-5, validation_alias="layer_norm_epsilon")
    tie_word_embeddings: Literal[False] = False
    """transformers does not tie them, whatever config.json says."""
    mlp_hidden_act: Literal["relu2"] = "relu2"
    mamba_hidden_act: Literal["silu"] = "silu"
    mamba_n_heads: PositiveInt = Field(128, validation_alias="mamba_num_heads")
    mamba_d_head: PositiveInt = Field(64, validation_alias="mamba_head_dim")
    mamba_n_groups: PositiveInt = Field(8, validation_alias=AliasChoices("mamba_n_groups", "n_groups"))
    mamba_d_state: PositiveInt = Field(128, validation_alias="ssm_state_size")
    mamba_d_conv: PositiveInt = Field(4, validation_alias=AliasChoices("mamba_d_conv", "conv_kernel"))
    mamba_conv_bias: bool = Field(True, validation_alias=AliasChoices("mamba_conv_bias", "use_conv_bias"))
    mamba_proj_bias: bool = Field(False, validation_alias="use_bias")
    time_step_limit: tuple[StepLimit, StepLimit] = Field(
        (0.0, float("inf")), validation_alias=AliasChoices("mamba_dt_limit", "time_step_limit")
    )
    """``time_step_min``, by which transformers clamps the steps of prompts, and only those, is one of training."""
    n_routed_experts: PositiveInt = Field(8, validation_alias=AliasChoices("n_routed_experts", "num_local_experts"))
    num_experts_per_tok: PositiveInt = 2
    moe_intermediate_size: PositiveInt = 7688
    moe_shared_expert_intermediate_size: PositiveInt = 7688
    moe_latent_size: PositiveInt | None = None
    """The size of what experts see, by default the hidden size."""
    norm_topk_prob: bool = True
    routed_scaling_factor: PositiveNumber = 1.0
    # No published model of this architecture chooses among groups of experts.
    n_group: Literal[1] = 1
    topk_group: Literal[1] = 1

    @model_validator(mode="before")
    @classmethod
    def _count(cls, values: Any) -> Any:
        """There are as many layers as kinds, whatever ``num_hidden_layers`` is."""
        given = next((values[name] for name in KINDS if values.get(name) is not None), ())
        named = {name: value for name, value in values.items() if name not in KINDS or value is not None}
        return named | ({"num_hidden_layers": len(given)} if isinstance(given, str | list) and given else {})

    @property
    def mamba_size(self) -> int:
        return self.mamba_n_heads * self.mamba_d_head

    def attends(self, index: int) -> bool:
        return self.kinds[index] == "full_attention"

    def states(self, dtype: torch.dtype) -> Sequence[StateSpec | None]:
        spec = self.mamba.state(dtype) if "linear_attention" in self.kinds else None
        return [spec if kind == "linear_attention" else None for kind in self.kinds]

    def ropes(self, config: Mapping[str, Any]) -> Sequence[RopeParameters | None]:
        return [None] * self.num_hidden_layers


class SquaredMLP:
    """down(max(up(x), 0)^2)."""

    def __init__(self, weights: Weights, name: str, size: int, intermediate: int, bias: bool) -> None:
        self._up = Linear(weights, f"{name}.up_proj", size, intermediate, bias)
        self._down = Linear(weights, f"{name}.down_proj", intermediate, size, bias)

    def __call__(self, x_TD: Tensor, rotary: Rotary | None, cache: KVCacheView, rows_N: Tensor | None = None) -> Tensor:
        """[T, D], or [N, D] if ``rows_N`` is given."""
        return self.of(select(x_TD, rows_N))

    def of(self, x_TD: Tensor) -> Tensor:
        return self._down(self._up(x_TD).relu().square())


class SquaredExperts:
    """A mixture of MLPs without gates, chosen by sigmoids with a bias, and one more for all tokens. What the others see
    may be projected to a smaller size, and what they yield back."""

    def __init__(self, w: Weights, name: str, c: NemotronHConfig) -> None:
        size, latent = c.hidden_size, c.moe_latent_size
        self._enter = Linear(w, f"{name}.fc1_latent_proj", size, latent, c.mlp_bias) if latent else None
        self._leave = Linear(w, f"{name}.fc2_latent_proj", latent, size, c.mlp_bias) if latent else None
        self._experts = Experts(
            w,
            name,
            latent or size,
            c.moe_intermediate_size,
            c.n_routed_experts,
            Routing(c.num_experts_per_tok, "sigmoid", c.norm_topk_prob, c.routed_scaling_factor),
            c.mlp_hidden_act,
            gate_up=("up_proj",),
            stacks=(("experts.up_proj", "experts.down_proj"),),
            routed_size=size,
            router_dtype=torch.float32,
            selection_bias="gate.e_score_correction_bias",
        )
        width = c.moe_shared_expert_intermediate_size
        self._shared = SquaredMLP(w, f"{name}.shared_experts", size, width, c.mlp_bias)

    def __call__(self, x_TD: Tensor, rotary: Rotary | None, cache: KVCacheView, rows_N: Tensor | None = None) -> Tensor:
        """[T, D], or [N, D] if ``rows_N`` is given."""
        x_TD = select(x_TD, rows_N)
        out_TD = self._experts(x_TD if self._enter is None else self._enter(x_TD), x_TD)
        return (out_TD if self._leave is None else self._leave(out_TD)) + self._shared.of(x_TD)


class NemotronHLayer(HybridLayer):
    def __init__(
        self, w: Weights, name: str, index: int, c: Any, spec: AttentionSpec | None, rope: RopeParameters | None
    ) -> None:
        self.norm = c.norm(w, f"{name}.norm")
        self.mixer = self.mixes(w, name, index, c, spec, rope)

    def mixes(
        self, w: Weights, name: str, index: int, c: Any, spec: AttentionSpec | None, rope: RopeParameters | None
    ) -> Mixer:
        if c.kinds[index] == "mlp":
            return SquaredMLP(w, f"{name}.mixer", c.hidden_size, c.intermediate_size, c.mlp_bias)
        if c.kinds[index] == "moe":
            return SquaredExperts(w, f"{name}.mixer", c)
        return super().mixes(w, name, index, c, spec, rope)

    def __call__(
        self,
        x_TD: Tensor,
        residual_TD: Tensor | None,
        rotary: Rotary | None,
        cache: KVCacheView,
        rows_N: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        x_TD, residual_TD = self.norm.add(x_TD, residual_TD)
        return self.mixer(x_TD, rotary, cache, rows_N), select(residual_TD, rows_N)
