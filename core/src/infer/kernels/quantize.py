"""The torch meaning of quantizing a weight. Every provider's ``quantize`` yields these bits, so that answers do not
depend on what has quantized a checkpoint.

Shapes: M groups of k values.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from infer.weight import LEAST, GroupedWeight, divided, unfilled

CHUNK = 1 << 17
"""How many values are quantized at a time, so that they stay in a CPU's caches."""
STEPS = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.76, 0.7)
"""Scales that are tried for codes of 4 bits, as parts of the one that represents a group's greatest value exactly."""


def quantize_weight(weight_NK: Tensor, bits: Literal[4, 8]) -> GroupedWeight:
    """The weight in groups of ``GROUP`` neighbors, with bfloat16 scales. A value that is not finite makes its group's
    scale so, and a group of values below ``LEAST`` becomes zeros.

    Codes of 8 bits are rounded to nearest. For codes of 4 bits, the values are first rounded to bfloat16, which makes
    their products with codes exact. A group's scale is then the one of several that leaves the smallest squared error:
    for each, the values are rounded to codes, and the scale is fitted to these by least squares.
    """
    made = unfilled(weight_NK, bits)
    (N, K), group = weight_NK.shape, made.group_size
    rows = max(1, CHUNK // K)
    for n in range(0, N, rows):
        part_NK = weight_NK[n : n + rows]
        # The groups lie along the last dimension: torch is many times slower at reducing a short last one.
        x_kM = part_NK.float().reshape(-1, group).t().contiguous()
        scale_M, codes_kM = _fit4(x_kM.bfloat16().float()) if bits == 4 else _fit8(x_kM)
        made.scales_NG[n : n + rows] = scale_M.view(len(part_NK), -1)
        codes_NK = codes_kM.to(torch.uint8).t().reshape(part_NK.shape)
        made.codes[n : n + rows] = codes_NK if bits == 8 else codes_NK[:, ::2] | codes_NK[:, 1::2] << 4
    return made


def _fit8(x_kM: Tensor) -> tuple[Tensor, Tensor]:
    top_M = x_kM.abs().amax(0)
    scale_M = torch.where(top_M < LEAST, 0.0, divided(top_M, 127)).bfloat16().float()
    return scale_M, _codes(x_kM, scale_M, 128)


def _fit4(x_kM: Tensor) -> tuple[Tensor, Tensor]:
    low_M, high_M = x_kM.amin(0), x_kM.amax(0)
    # The codes reach from -8 to 7, so the value that is furthest from zero gets the code -8.
    top_M = torch.where(-low_M > high_M, low_M, high_M)
    top_M = torch.where(top_M.abs() < LEAST, 0.0, top_M) / -8
    best_M, gain_M = top_M, torch.full_like(top_M, -1)
    for step in STEPS:
        q_kM = (x_kM * _inverse(top_M * step)).round_().clamp_(-8, 7)
        square_M = q_kM.square().sum(0).clamp_(min=1)
        product_M = _halved(q_kM.mul_(x_kM))
        # With the scale product / square, the squared error is the sum of x^2 less this.
        now_M = product_M * product_M / square_M
        better_M = now_M > gain_M
        best_M, gain_M = (product_M / square_M).where(better_M, best_M), now_M.where(better_M, gain_M)
    best_M = best_M.bfloat16().float() + 0.0  # a zero has no sign
    return best_M, _codes(x_kM, best_M, 8)


def _halved(x_kM: Tensor) -> Tensor:
    """The sum of a group, whose size is a power of two, in an order that vectors of any length can keep to: its halves
    are added, then the halves of what that yields, and so on."""
    while len(x_kM) > 1:
        x_kM = x_kM[: len(x_kM) // 2] + x_kM[len(x_kM) // 2 :]
    return x_kM[0]


def _codes(x_kM: Tensor, scale_M: Tensor, zero: int) -> Tensor:
    return (x_kM * _inverse(scale_M)).round_().add_(zero).clamp_(0, 2 * zero - 1)


def _inverse(scale_M: Tensor) -> Tensor:
    return torch.where(scale_M == 0, 0.0, 1 / scale_M)
