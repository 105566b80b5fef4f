"""Recurrent layers with random weights, and sequences in rows of their states."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from infer.contracts.kernels import KernelsProtocol
from infer.contracts.states import DeltaRule, StateRows, StateSpace
from infer_testing.numbers import random_tensor


class Layer(Protocol):
    """A kernel that keeps a state, with its weights."""

    @property
    def name(self) -> str:
        """The kernel's."""

    @property
    def widths(self) -> tuple[int, ...]:
        """How many values each of the kernel's inputs has of a token."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a state."""

    def state_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The state's, in a model of ``dtype``."""

    def to(self, device: torch.device, dtype: torch.dtype) -> Layer:
        """The layer with the same values in a model of ``dtype``."""

    def run(self, kernels: KernelsProtocol, inputs: Sequence[Tensor], states: Tensor, rows: StateRows) -> Tensor:
        """Calls the kernel."""


@dataclass(frozen=True, eq=False)
class Conv:
    weight_CW: Tensor
    bias_C: Tensor | None
    silu: bool

    name = "causal_conv"

    @property
    def widths(self) -> tuple[int, ...]:
        return (len(self.weight_CW),)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight_CW.shape[1] - 1, len(self.weight_CW)

    def state_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def to(self, device: torch.device, dtype: torch.dtype) -> Conv:
        bias_C = None if self.bias_C is None else self.bias_C.to(device, dtype)
        return Conv(self.weight_CW.to(device, dtype), bias_C, self.silu)

    def run(self, kernels: KernelsProtocol, inputs: Sequence[Tensor], states: Tensor, rows: StateRows) -> Tensor:
        return kernels.causal_conv(inputs[0], self.weight_CW, self.bias_C, self.silu, states, rows)


@dataclass(frozen=True, eq=False)
class Delta:
    rule: DeltaRule

    name = "gated_delta_rule"

    @property
    def widths(self) -> tuple[int, ...]:
        return self.rule.channels, self.rule.num_decays, self.rule.num_value_heads

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rule.shape

    def state_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32

    def to(self, device: torch.device, dtype: torch.dtype) -> Delta:
        rate_H, dt_bias_A = self.rule.rate_H.to(device), self.rule.dt_bias_A.to(device)
        return Delta(replace(self.rule, rate_H=rate_H, dt_bias_A=dt_bias_A))

    def run(self, kernels: KernelsProtocol, inputs: Sequence[Tensor], states: Tensor, rows: StateRows) -> Tensor:
        qkv_TC, a_TA, b_TH = inputs
        return kernels.gated_delta_rule(qkv_TC, a_TA, b_TH, self.rule, states, rows)


@dataclass(frozen=True, eq=False)
class Space:
    space: StateSpace

    name = "state_space"

    @property
    def widths(self) -> tuple[int, ...]:
        return self.space.channels, self.space.num_heads

    @property
    def shape(self) -> tuple[int, ...]:
        return self.space.shape

    def state_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32

    def to(self, device: torch.device, dtype: torch.dtype) -> Space:
        rate_H, dt_bias_H, skip_H = (x.to(device) for x in (self.space.rate_H, self.space.dt_bias_H, self.space.skip_H))
        return Space(replace(self.space, rate_H=rate_H, dt_bias_H=dt_bias_H, skip_H=skip_H))

    def run(self, kernels: KernelsProtocol, inputs: Sequence[Tensor], states: Tensor, rows: StateRows) -> Tensor:
        xbc_TC, dt_TH = inputs
        return kernels.state_space(xbc_TC, dt_TH, self.space, states, rows)


def conv(channels: int, width: int, bias: bool = False, silu: bool = True, seed: int = 0) -> Conv:
    """A short convolution with random weights."""
    weight_CW = random_tensor(channels, width, seed=seed) / width**0.5
    return Conv(weight_CW, random_tensor(channels, seed=seed + 1) if bias else None, silu)


def delta(
    key_heads: int,
    heads: int,
    key_size: int,
    value_size: int,
    channel_decay: bool = False,
    max_beta: float = 1.0,
    seed: int = 0,
) -> Delta:
    """A gated delta rule with random weights, whose heads forget at different rates."""
    rate_H = random_tensor(heads, seed=seed).exp() / 4
    dt_bias_A = random_tensor(heads * (key_size if channel_decay else 1), seed=seed + 1)
    return Delta(DeltaRule(key_heads, heads, key_size, value_size, rate_H, dt_bias_A, channel_decay, max_beta))


def space(heads: int, head_size: int, groups: int, state_size: int, clamped: bool = False, seed: int = 0) -> Space:
    """A state space with random weights, whose heads forget at different rates."""
    rate_H = random_tensor(heads, seed=seed).exp() / 4
    dt_bias_H, skip_H = random_tensor(heads, seed=seed + 1), random_tensor(heads, seed=seed + 2)
    bounds = (0.5, 1.0) if clamped else (0.0, float("inf"))
    return Space(StateSpace(heads, head_size, groups, state_size, rate_H, dt_bias_H, skip_H, *bounds))


def random_layer(kind: str, draw: random.Random) -> Layer:
    """A layer of the kernel that is named ``kind``."""
    seed = draw.randrange(1 << 30)
    if kind == "causal_conv":
        size = draw.choice([1, 16, 37, 300])
        return conv(size, draw.choice([2, 3, 4]), draw.random() < 0.5, draw.random() < 0.5, seed)
    if kind == "gated_delta_rule":
        sizes = draw.choice([(1, 1, 8, 8), (2, 4, 16, 8), (1, 3, 13, 20), (2, 2, 64, 128)])
        return delta(*sizes, draw.random() < 0.5, draw.choice([1.0, 2.0]), seed)
    return space(*draw.choice([(2, 8, 1, 16), (4, 20, 2, 13), (3, 64, 1, 128)]), draw.random() < 0.5, seed)


def state_rows(
    lens: Sequence[int], read: Sequence[int], save: Mapping[int, int], device: torch.device | None = None
) -> StateRows:
    """The rows of sequences of ``lens`` tokens: ``read[b]`` for each sequence, and ``save[t]`` for some tokens."""
    offsets = torch.tensor([0, *lens]).cumsum(0).int()
    save_T = torch.full((sum(lens),), -1)
    for token, row in save.items():
        save_T[token] = row
    return StateRows(offsets.to(device), torch.tensor(list(read)).to(device), save_T.to(device))


def sliced(inputs: Sequence[Tensor]) -> list[Tensor]:
    """The same values as parts of the rows of one wider tensor."""
    apart = [part for x in inputs for part in (x, x[:, :1])]
    widths = [part.shape[1] for part in apart]
    return list(torch.split_with_sizes(torch.cat(apart, 1), widths, 1)[::2])
