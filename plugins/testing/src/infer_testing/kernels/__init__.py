"""What ``KernelsProtocol`` promises, tried on one provider."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from infer.contracts.kernels import KernelsProtocol
from infer_testing.kernels import attention, elementwise, experts, kept, products, recorded, rows, sampling, states
from infer_testing.kernels.provider import SUITE, Provider

__all__ = [
    "SUITE",
    "Provider",
    "attention",
    "check_kernels",
    "elementwise",
    "experts",
    "kept",
    "products",
    "recorded",
    "rows",
    "sampling",
    "states",
]


def check_kernels(
    kernels: KernelsProtocol,
    *,
    device: torch.device | None = None,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    kv_dtypes: Sequence[str] = (),
    only: Sequence[str] = (),
    seed: int = 0,
    case: int | None = None,
) -> None:
    """Try everything that ``KernelsProtocol`` promises on kernels that compute on ``device``. ``kv_dtypes`` are those
    of their registration. ``only`` names checks, ``case`` one case of each. Raises ConformanceError."""
    provider = Provider(kernels, device or torch.device("cpu"), dtypes, kv_dtypes)
    SUITE.enforce(provider, only=only, seed=seed, case=case)
