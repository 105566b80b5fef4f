"""The mixers of recurrent layers whose state decays by a number of each head, or not at all: Mamba 2 and short
convolutions."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from infer.contracts.attention import Rotary
from infer.contracts.cache import KVCacheView, StatefulView
from infer.contracts.states import State, StateSpace, StateSpec
from infer.errors import CheckpointError
from infer.weight import exponential
from infer_layers.blocks import select
from infer_layers.linear import Linear
from infer_layers.table import Weights


@dataclass(frozen=True)
class MambaSizes:
    """The sizes of a Mamba 2, and the bounds of its steps. Raises CheckpointError if the groups do not divide the
    heads."""

    num_heads: int
    head_size: int
    num_groups: int
    state_size: int
    width: int
    """Of the convolution."""
    steps: tuple[float, float] = (0.0, float("inf"))

    def __post_init__(self) -> None:
        if self.num_heads % self.num_groups:
            raise CheckpointError(
                f"config.json: Mamba has {self.num_heads} heads, which is not a multiple of its {self.num_groups} "
                "groups."
            )

    @property
    def size(self) -> int:
        """How many values x has, and the gate."""
        return self.num_heads * self.head_size

    def space(self, device: torch.device) -> StateSpace:
        """A state space of these sizes, whose tensors have no values yet."""
        rate_H, dt_bias_H, skip_H = torch.zeros(3, self.num_heads, device=device)
        sizes = self.num_heads, self.head_size, self.num_groups, self.state_size
        return StateSpace(*sizes, rate_H, dt_bias_H, skip_H, *self.steps)

    def state(self, dtype: torch.dtype) -> StateSpec:
        """What a layer keeps, in a model of that dtype: columns of the convolution, and the recurrent state."""
        space = self.space(torch.device("meta"))
        return StateSpec(((self.width - 1, space.channels), space.shape), (dtype, torch.float32))


class Mamba2:
    """A state space of scalar decays (Dao and Gu, 2024). One product yields a gate, x, B, C and the steps; x, B and C
    pass a causal convolution with SiLU; what the state space makes of them is gated, normalized if ``norm_eps`` is
    given, and projected.

    ``layer`` is the layer's index among those with a state, and ``size`` the hidden size. With ``gate_first``, the norm
    follows the gate; otherwise it precedes it. Each group has a norm of its own. ``multipliers`` are those of the
    product's five parts, rounded to the model's dtype; None for 1.
    """

    def __init__(
        self,
        weights: Weights,
        name: str,
        layer: int,
        size: int,
        sizes: MambaSizes,
        *,
        bias: bool = False,
        out_bias: bool = False,
        conv_bias: bool = True,
        norm_eps: float | None,
        gate_first: bool = True,
        multipliers: Sequence[float] | None = None,
    ) -> None:
        context = weights.context
        self.layer = layer
        self._kernels = context.kernels
        self._space = space = sizes.space(context.device)
        self._sizes = [sizes.size, space.channels, sizes.num_heads]
        self._in = Linear(weights, f"{name}.in_proj", size, sum(self._sizes), bias)
        self._conv = CausalConv(weights, f"{name}.conv1d", space.channels, sizes.width, conv_bias, silu=True)
        H = (sizes.num_heads,)
        weights.expect(f"{name}.A_log", H, lambda log_H: space.rate_H.copy_(exponential(log_H)), torch.float32)
        weights.expect(f"{name}.dt_bias", H, space.dt_bias_H.copy_, torch.float32)
        weights.expect(f"{name}.D", H, space.skip_H.copy_, torch.float32)
        self._eps, self._group, self._gate_first = norm_eps, sizes.size // sizes.num_groups, gate_first
        self._norm_weight_D: Tensor
        if norm_eps is not None:
            weights.expect(f"{name}.norm.weight", (sizes.size,), self._take_norm)
        self._out = Linear(weights, f"{name}.out_proj", sizes.size, size, out_bias)
        self._multipliers_N: Tensor | None = None
        if multipliers is not None and any(each != 1 for each in multipliers):
            groups = sizes.num_groups * sizes.state_size
            parts = zip(multipliers, (sizes.size, sizes.size, groups, groups, sizes.num_heads), strict=True)
            self._multipliers_N = torch.cat(
                [torch.full((width,), each, dtype=context.dtype, device=context.device) for each, width in parts]
            )

    def _take_norm(self, weight_D: Tensor) -> None:
        self._norm_weight_D = weight_D.clone()

    def __call__(self, x_TD: Tensor, rotary: Rotary | None, cache: KVCacheView, rows_N: Tensor | None = None) -> Tensor:
        """[T, D], or [N, D] if ``rows_N`` is given. Nothing is rotated."""
        (columns, state), rows = state_of(cache, self.layer)
        product_TN = self._in(x_TD)
        if self._multipliers_N is not None:
            product_TN = product_TN * self._multipliers_N
        gate_TD, xbc_TC, dt_TH = torch.split_with_sizes(product_TN, self._sizes, dim=-1)
        xbc_TC = self._conv(xbc_TC, State((columns,), rows))
        y_THP = self._kernels.state_space(xbc_TC, dt_TH.contiguous(), self._space, state, rows)
        y_ND, gate_ND = select(y_THP.flatten(1), rows_N), select(gate_TD, rows_N)
        if self._eps is None:
            gate_ND = gate_ND.float()
            y_ND = (y_ND.float() * (gate_ND / (1.0 + torch.exp(-gate_ND)))).to(y_ND.dtype)
        else:
            y_ND = self._kernels.gated_rms_norm(
                y_ND, gate_ND, self._norm_weight_D, self._eps, self._group, self._gate_first
            )
        return self._out(y_ND)


class ShortConv:
    """A gated convolution over few tokens, as in LFM2: out(C * conv(B * x)), where one product yields B, C and x.

    ``layer`` is the layer's index among those with a state, ``size`` the hidden size, ``width`` the convolution's."""

    def __init__(self, weights: Weights, name: str, layer: int, size: int, width: int, bias: bool = False) -> None:
        self.layer = layer
        self._in = Linear(weights, f"{name}.in_proj", size, [size] * 3, bias)
        self._conv = CausalConv(weights, f"{name}.conv", size, width, bias, silu=False)
        self._out = Linear(weights, f"{name}.out_proj", size, size, bias)

    @staticmethod
    def state(size: int, width: int, dtype: torch.dtype) -> StateSpec:
        """What a layer keeps, in a model of that dtype."""
        return StateSpec(((width - 1, size),), (dtype,))

    def __call__(self, x_TD: Tensor, rotary: Rotary | None, cache: KVCacheView, rows_N: Tensor | None = None) -> Tensor:
        """[T, D], or [N, D] if ``rows_N`` is given. Nothing is rotated."""
        b_TD, c_TD, x_TD = torch.split_with_sizes(self._in(x_TD), self._in.sizes, dim=-1)
        y_TD = self._conv(b_TD * x_TD, state_of(cache, self.layer))
        return self._out(select(c_TD, rows_N) * select(y_TD, rows_N))


class CausalConv:
    """A depthwise causal convolution, whose weight a checkpoint has as [C, 1, W]."""

    def __init__(self, weights: Weights, name: str, channels: int, width: int, bias: bool, silu: bool) -> None:
        if width < 2:
            raise CheckpointError(f"config.json: a causal convolution has a width of {width}; it has to be 2 at least.")
        self._kernels = weights.context.kernels
        self._silu = silu
        self._tensors: dict[str, Tensor] = {}
        weights.expect(f"{name}.weight", (channels, 1, width), functools.partial(self._take, "weight"))
        if bias:
            weights.expect(f"{name}.bias", (channels,), functools.partial(self._take, "bias"))

    def _take(self, kind: str, tensor: Tensor) -> None:
        self._tensors[kind] = (tensor.squeeze(1) if kind == "weight" else tensor).clone()

    def __call__(self, x_TC: Tensor, state: State) -> Tensor:
        weight_CW, bias_C = self._tensors["weight"], self._tensors.get("bias")
        (columns_RWC,) = state.parts
        return self._kernels.causal_conv(x_TC, weight_CW, bias_C, self._silu, columns_RWC, state.rows)


def state_of(cache: KVCacheView, layer: int) -> State:
    """The states of a recurrent layer. The view is a ``StatefulView``."""
    return cast(StatefulView, cache).state(layer)  # other pools are refused at the start
