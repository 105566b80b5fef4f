"""Helpers for tests of attention: the kit's scenes, and what numpy makes of quantized K and V."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from infer_testing.attention import Scene
from infer_testing.attention import attention_spec as spec
from infer_testing.numbers import random_tensor as random

__all__ = ["Scene", "close", "quantized", "random", "spec"]


def close(actual: Tensor, expected: Tensor) -> None:
    """Equal but for what one or two roundings to the result's type may do."""
    assert expected.dtype == torch.float64
    torch.testing.assert_close(actual, expected.to(actual.dtype))


def quantized(x_TKE: Tensor) -> tuple[Any, Any]:
    """Codes [T, K, E] and scales [T, K] of finite values, in numpy."""
    x = x_TKE.float().numpy()
    top = np.abs(x).max(-1)
    scales = np.where(top < 2.0**-100, np.float32(0), top / np.float32(127))
    with np.errstate(all="ignore"):
        return np.where(scales[..., None] > 0, np.rint(x / scales[..., None]), 0).astype(np.int8), scales
