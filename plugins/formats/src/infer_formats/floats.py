"""Weights of eight-bit floats."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
PLAIN = (
    "fp8 weights are dequantized when they are read: they take as much memory as plain ones, and activations are not "
    "rounded"
)
_VALUES = torch.arange(256, dtype=torch.uint8).view(E4M3).float().numpy()


def dequantized(codes_NK: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """fp32 [N, K]: each value times the scale of its block, ``scales`` [N / block, K / block]. The last blocks of rows
    and columns may be smaller."""
    (N, K), (rows, columns) = codes_NK.shape, block
    if codes_NK.is_meta:
        return torch.empty(N, K, device="meta")
    values_NK = torch.from_numpy(
        _VALUES[codes_NK.contiguous().view(torch.uint8).numpy()]
    )  # torch takes three times as long
    scales_NG = scales.float().repeat_interleave(rows, 0)[:N]
    if K % columns == 0:
        values_NK.view(N, -1, columns).mul_(scales_NG[..., None])
    else:
        values_NK *= scales_NG.repeat_interleave(columns, 1)[:, :K]
    return values_NK
