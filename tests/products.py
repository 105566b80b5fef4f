"""Matrix products and activations in float64, and the errors that kernels may have. Imports no kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from infer.contracts.kernels import ExpertActivation, GateActivation

TIED = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12.0])
"""The values of MXFP4, doubled."""


def within_rounding(found_MN: Tensor, x_MK: Tensor, weight_NK: Tensor) -> bool:
    """Whether every value is the exact one but for rounding to bfloat16 and K additions in fp32, cut off or rounded."""
    exact = x_MK.double() @ weight_NK.double().T
    bound = x_MK.double().abs() @ weight_NK.double().abs().T
    allowed = 2**-8 * exact.abs() + x_MK.shape[1] * torch.finfo(torch.float32).eps * bound
    return bool(((found_MN.double() - exact).abs() <= allowed).all())


def near(found: Tensor, expected: Tensor) -> bool:
    """Equal but for what rounding does: to the dtype of ``found``, and of hidden values to int8."""
    error, size = (torch.linalg.norm(x) for x in (found.double() - expected, expected))
    return bool(error <= (2e-5 if found.dtype == torch.float32 else 1e-2) * size)


def gated64(gate_up: Tensor, activation: ExpertActivation | GateActivation) -> Tensor:
    """Without a gate, ``gate_up`` has the values only."""
    if activation == "relu2":
        return gate_up.double().relu().square()
    gate, up = gate_up.double().chunk(2, dim=-1)
    functional = torch.nn.functional
    if activation == "clamped_swiglu":
        gate = gate.clamp(max=7)
        return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7, 7) + 1)
    if activation in ("sigmoid", "softplus"):
        return up * (torch.sigmoid(gate) if activation == "sigmoid" else functional.softplus(gate))
    return up * (functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh"))
