"""Granite-MoE: Granite with a mixture of experts in every layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import PositiveInt
from torch import Tensor

from infer.contracts.kernels import Routing
from infer_layers import Experts, Weights
from infer_models.granite import GraniteConfig
from infer_models.llama import LlamaLayer


class GraniteMoeConfig(GraniteConfig):
    num_local_experts: PositiveInt = 8
    num_experts_per_tok: PositiveInt = 2


class GraniteMoeLayer(LlamaLayer):
    def feed_forward(self, w: Weights, name: str, index: int, c: GraniteMoeConfig) -> Experts:
        return granite_experts(w, name, c)


def granite_experts(w: Weights, name: str, c: Any, shared: Callable[[Tensor], Tensor] | None = None) -> Experts:
    """A layer's experts, with an MLP for all tokens beside them if ``shared`` is given."""
    return Experts(
        w,
        f"{name}.block_sparse_moe",
        c.hidden_size,
        c.intermediate_size,
        c.num_local_experts,
        Routing(c.num_experts_per_tok),
        c.hidden_act,
        router=("router.layer", "router"),  # transformers 5 has the second name
        gate_up=("gate_up_proj",),
        stacks=(("input_linear.weight", "output_linear.weight"), ("experts.gate_up_proj", "experts.down_proj")),
        shared=shared,
    )
