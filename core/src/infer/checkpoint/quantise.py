"""Quantising a plain checkpoint's weights while they are loaded."""

from __future__ import annotations

import fnmatch
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from infer.errors import SettingsError
from infer.weight import GroupedWeight, Weight

GROUP = {4: 32, 8: 64}
"""How many neighbours share a scale, by the bits of their codes, or the largest part of it that divides a row. With 8
bits, groups of 32 are hardly more accurate, and a product with them takes a fifth longer."""
CHUNK = 1 << 17
"""How many values are quantised at a time, so that they stay in a CPU's caches."""
STEPS = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.76, 0.7)
"""Scales that are tried for codes of 4 bits, as parts of the one that represents a group's greatest value exactly."""


def quantise(weight_NK: Tensor, bits: Literal[4, 8]) -> GroupedWeight:
    """The weight in groups of ``GROUP`` neighbours, with bfloat16 scales.

    Codes of 8 bits are rounded to nearest. For codes of 4 bits, a group's scale is the one of several that leaves the
    smallest squared error: for each, the values are rounded to codes, and then the scale is fitted to these by least
    squares.
    """
    N, K = weight_NK.shape
    group = math.gcd(K, GROUP[bits])
    fit = _fit4 if bits == 4 else _fit8
    scales_NG = torch.empty(N, K // group, dtype=torch.bfloat16, device=weight_NK.device)
    codes = torch.empty(N, K * bits // 8, dtype=torch.uint8, device=weight_NK.device)
    rows = max(1, CHUNK // K)
    for n in range(0, N, rows):
        part_NK = weight_NK[n : n + rows]
        # The groups lie along the last dimension: torch is many times slower at reducing a short last one.
        x_kM = part_NK.float().view(-1, group).t().contiguous()
        scale_M, codes_kM = fit(x_kM)
        scales_NG[n : n + rows] = scale_M.view(len(part_NK), -1)
        codes_NK = codes_kM.to(torch.uint8).t().reshape(part_NK.shape)
        codes[n : n + rows] = codes_NK if bits == 8 else codes_NK[:, ::2] | codes_NK[:, 1::2] << 4
    return GroupedWeight(codes, scales_NG, bits, int8_activations=True, dtype=weight_NK.dtype)


def _fit8(x_kM: Tensor) -> tuple[Tensor, Tensor]:
    scale_M = (x_kM.abs().amax(0) / 127).bfloat16().float()
    return scale_M, _codes(x_kM, scale_M, 128)


def _fit4(x_kM: Tensor) -> tuple[Tensor, Tensor]:
    low_M, high_M = x_kM.amin(0), x_kM.amax(0)
    # The codes reach from -8 to 7, so the value that is furthest from zero gets the code -8.
    top_M = torch.where(-low_M > high_M, low_M, high_M) / -8
    best_M, gain_M = top_M, torch.full_like(top_M, -1)
    for step in STEPS:
        q_kM = (x_kM * _inverse(top_M * step)).round_().clamp_(-8, 7)
        square_M = q_kM.square().sum(0).clamp_(min=1)
        product_M = q_kM.mul_(x_kM).sum(0)
        # With the scale product / square, the squared error is the sum of x^2 less this.
        now_M = product_M * product_M / square_M
        better_M = now_M > gain_M
        best_M, gain_M = (product_M / square_M).where(better_M, best_M), now_M.where(better_M, gain_M)
    best_M = best_M.bfloat16().float()
    return best_M, _codes(x_kM, best_M, 8)


def _codes(x_kM: Tensor, scale_M: Tensor, zero: int) -> Tensor:
    return (x_kM * _inverse(scale_M)).round_().add_(zero).clamp_(0, 2 * zero - 1)


def _inverse(scale_M: Tensor) -> Tensor:
    return torch.where(scale_M == 0, 0.0, 1 / scale_M)


@dataclass
class Quantiser:
    """Turns plain weights into grouped ones as ``model.quantization``, ``model.plain_layers`` and ``model.activations``
    say."""

    quantization: Literal["int8", "int4"] | None
    plain: Sequence[str]
    """Patterns of names (``*`` and ``?``) that stay plain."""
    activations: Literal["auto", "int8", "plain"]
    vocab_size: int
    """A weight with so many rows embeds tokens or yields logits: it gets 8 bits."""
    before: int = field(default=0, init=False)
    """Bytes of the weights as they came."""
    nbytes: Counter[str] = field(default_factory=Counter, init=False)
    """Bytes of the weights as they left, by their form: ``plain weights``, or a GroupedWeight's name."""

    def __call__(self, weights: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
        plain = re.compile("|".join(map(fnmatch.translate, self.plain)) or r"(?!)")
        for name, weight in weights:
            self.before += weight.nbytes
            if self.quantization is not None:
                if isinstance(weight, GroupedWeight):
                    raise SettingsError(
                        f"model.quantization quantises plain weights, but the checkpoint's {name!r} has {weight}; "
                        "leave it out."
                    )
                if weight.dim() == 2 and weight.dtype.is_floating_point and not plain.fullmatch(name):
                    whole = self.quantization == "int8" or len(weight) == self.vocab_size
                    weight = quantise(weight, 8 if whole else 4)
            if isinstance(weight, GroupedWeight) and self.activations != "auto":
                weight = replace(weight, int8_activations=self.activations == "int8")
            self.nbytes["plain weights" if isinstance(weight, Tensor) else str(weight)] += weight.nbytes
            yield name, weight

    def __str__(self) -> str:
        parts = ", ".join(f"{size / 2**20:.1f} MiB of {form}" for form, size in self.nbytes.most_common())
        return f"{parts} (unquantised: {self.before / 2**20:.1f} MiB)" if self.quantization else parts
