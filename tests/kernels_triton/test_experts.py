"""Mixtures of experts: routes and sums as in float64, and every token by itself."""

from __future__ import annotations

import pytest
import torch
from tests.attention import random
from tests.experts import Mixture, check_rows, route64
from tests.products import near

from infer.contracts.kernels import ExpertActivation, Routing
from infer_kernels_triton.provider import TritonKernels

MORE = (("softmax", True), ("sigmoid", False))


@pytest.mark.parametrize(
    ("score", "renormalize"),
    [("softmax", False), ("sigmoid", True), *(pytest.param(*c, marks=pytest.mark.slow) for c in MORE)],
)
def test_routes(score: str, renormalize: bool, device: str) -> None:
    kernels, routing = TritonKernels(torch.device(device)), Routing(3, score, renormalize, 2.5)  # type: ignore[arg-type]
    logits = (random(6, 11) * 2).round(decimals=1)
    logits[3] = 1.5  # all are equal
    bias = random(11, seed=1) if score == "sigmoid" else None
    found, shares = kernels.route(logits.to(device), routing, None if bias is None else bias.to(device))
    expected, weights = route64(logits, routing, bias)
    assert found.tolist() == expected
    torch.testing.assert_close(shares.cpu(), weights.float(), rtol=1e-5, atol=1e-7)
    logits[4] = torch.nan
    again, spoiled = kernels.route(logits.to(device), routing)
    assert ((again >= 0) & (again < 11)).all()
    assert spoiled[4].isnan().all()
    assert not spoiled[[0, 1, 2, 3, 5]].isnan().any()


@pytest.mark.parametrize(
    ("form", "dtype", "activation"),
    [
        ("biases", torch.bfloat16, "clamped_swiglu"),
        ("int4", torch.float32, "clamped_swiglu"),
        ("plain", torch.bfloat16, "relu2"),
    ],
)
def test_sums_of_experts(form: str, dtype: torch.dtype, activation: ExpertActivation, device: str) -> None:
    kernels, gated = TritonKernels(torch.device(device)), activation != "relu2"
    mixture = Mixture(48, 40, 5, form, dtype, int8=False, device=device, gated=gated)
    packed = mixture.pack(kernels)
    for tokens, top in ((0, 2), (1, 5), (30, 3)):
        x, (experts, shares) = 2 * random(tokens, 48, dtype=dtype).to(device), mixture.choose(tokens, top)
        found = kernels.gated_experts(x, experts, shares, packed, activation)
        assert found.shape == x.shape
        assert near(found, mixture.expected(x, experts, shares, activation))


def test_a_token_has_the_same_bits_in_any_company(device: str) -> None:
    """Also where another number of rows per expert takes other tiles."""
    kernels = TritonKernels(torch.device(device))
    check_rows(
        kernels,
        Mixture(40, 24, 3, dtype=torch.bfloat16, device=device),
        40,
        2,
        [[0], [39, 3], [7, 7, 7], list(range(33))],
    )
