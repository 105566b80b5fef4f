"""The error that a matrix product in bfloat16 may have."""

from __future__ import annotations

import torch
from torch import Tensor


def within_rounding(found_MN: Tensor, x_MK: Tensor, weight_NK: Tensor) -> bool:
    """Whether every value is the exact one but for rounding to bfloat16 and K additions in fp32, cut off or rounded."""
    exact = x_MK.double() @ weight_NK.double().T
    bound = x_MK.double().abs() @ weight_NK.double().abs().T
    allowed = 2**-8 * exact.abs() + x_MK.shape[1] * torch.finfo(torch.float32).eps * bound
    return bool(((found_MN.double() - exact).abs() <= allowed).all())
