"""The mixer of recurrent layers whose state forgets and corrects: the gated delta net."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from infer.contracts.attention import Rotary
from infer.contracts.cache import KVCacheView
from infer.contracts.states import DeltaRule, State, StateSpec
from infer.errors import CheckpointError
from infer.weight import exponential
from infer_layers.blocks import select
from infer_layers.linear import Linear
from infer_layers.mamba import CausalConv, state_of
from infer_layers.table import Weights


@dataclass(frozen=True)
class DeltaSizes:
    """The sizes of a gated delta net. Raises CheckpointError if the key heads do not divide the value heads."""

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    width: int
    """Of the convolution."""
    max_beta: float = 1.0
    """As ``DeltaRule``'s."""

    def __post_init__(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            raise CheckpointError(
                f"config.json: linear_num_value_heads, {self.num_value_heads}, is not a multiple of "
                f"linear_num_key_heads, {self.num_key_heads}."
            )

    def rule(self, device: torch.device) -> DeltaRule:
        """A delta rule of these sizes, whose tensors have no values yet."""
        rate_H, dt_bias_A = torch.zeros(2, self.num_value_heads, device=device)
        sizes = self.num_key_heads, self.num_value_heads, self.key_size, self.value_size
        return DeltaRule(*sizes, rate_H, dt_bias_A, max_beta=self.max_beta)

    def state(self, dtype: torch.dtype) -> StateSpec:
        """What a layer keeps, in a model of that dtype: columns of the convolution, and the recurrent state."""
        rule = self.rule(torch.device("meta"))
        return StateSpec(((self.width - 1, rule.channels), rule.shape), (dtype, torch.float32))


class GatedDeltaNet:
    """A gated delta rule (Yang et al., 2025). One product yields q, K, V and a gate, another the strengths and decays
    of the rule; q, K and V pass a causal convolution with SiLU; what the rule makes of them has a norm for each head,
    is gated and projected. The two small matrices are spared from ``model.quantization``.

    ``layer`` is the layer's index among those with a state, and ``size`` the hidden size. ``qkvz``, ``ba``, ``norm``
    and ``out`` are the checkpoint's names: those of q, K, V and the gate, which may be four tensors, two or one; those
    of strengths and decays; of the norm; and of the last product. With ``interleaved``, there is one tensor for each
    product, in which the rows of a key head, and of its value heads, stand together.
    """

    def __init__(
        self,
        weights: Weights,
        name: str,
        layer: int,
        size: int,
        sizes: DeltaSizes,
        *,
        norm_eps: float,
        qkvz: Sequence[str] = ("in_proj_qkv", "in_proj_z"),
        ba: Sequence[str] = ("in_proj_b", "in_proj_a"),
        norm: str = "norm",
        out: str = "out_proj",
        interleaved: bool = False,
    ) -> None:
        context = weights.context
        self.layer = layer
        self._kernels = context.kernels
        self._rule = rule = sizes.rule(context.device)
        H, K, V = rule.shape
        self._sizes = [rule.channels, H * V]
        orders: list[Tensor | None] = [None, None]
        if interleaved:
            each = H // rule.num_key_heads
            orders = [_apart(rule.num_key_heads, parts) for parts in ((K, K, each * V, each * V), (each, each))]
        keys = rule.num_key_heads * K
        parts = [keys, keys, H * V, H * V] if len(qkvz) == 4 else self._sizes
        self._qkvz = Linear(weights, [f"{name}.{part}" for part in qkvz], size, parts, order=orders[0])
        self._ba = Linear(weights, [f"{name}.{part}" for part in ba], size, [H, H], order=orders[1])
        weights.spared.update(f"{name}.{part}.weight" for part in ba)
        self._conv = CausalConv(weights, f"{name}.conv1d", rule.channels, sizes.width, bias=False, silu=True)
        weights.expect(f"{name}.A_log", (H,), lambda log_H: rule.rate_H.copy_(exponential(log_H)), torch.float32)
        weights.expect(f"{name}.dt_bias", (H,), rule.dt_bias_A.copy_, torch.float32)
        self._eps = norm_eps
        self._norm_weight_V: Tensor
        weights.expect(f"{name}.{norm}.weight", (V,), self._take_norm)
        self._out = Linear(weights, f"{name}.{out}", H * V, size)

    def _take_norm(self, weight_V: Tensor) -> None:
        self._norm_weight_V = weight_V.clone()

    def __call__(self, x_TD: Tensor, rotary: Rotary | None, cache: KVCacheView, rows_N: Tensor | None = None) -> Tensor:
        """[T, D], or [N, D] if ``rows_N`` is given. Nothing is rotated."""
        (columns, state), rows = state_of(cache, self.layer)
        qkv_TC, gate_TD = torch.split_with_sizes(self._qkvz(x_TD), self._sizes, dim=-1)
        b_TH, a_TH = self._ba(x_TD).chunk(2, dim=-1)
        qkv_TC = self._conv(qkv_TC, State((columns,), rows))
        y_THV = self._kernels.gated_delta_rule(qkv_TC, a_TH.contiguous(), b_TH.contiguous(), self._rule, state, rows)
        y_ND, gate_ND = select(y_THV.flatten(1), rows_N), select(gate_TD, rows_N)
        return self._out(
            self._kernels.gated_rms_norm(
                y_ND, gate_ND, self._norm_weight_V, self._eps, self._rule.value_size, gate_first=False
            )
        )


def _apart(groups: int, parts: tuple[int, ...]) -> Tensor:
    """The order of rows in which each part of all groups comes before the next part. A checkpoint has so many groups,
    each with all its parts."""
    rows = torch.arange(groups * sum(parts)).view(groups, -1)
    return torch.cat([part.flatten() for part in rows.split_with_sizes(parts, dim=1)])
