"""Matrix products: their results against float64, and that each row's bits depend on that row alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.attention import random
from tests.examples import slowly
from tests.products import within_rounding

from infer_kernels_triton.provider import TritonKernels

ROWS = [1, 2, 15, 16, 17, 33, 130]


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.float32, torch.float16))],
    ids=["bf16", "fp32", "fp16"],
)
@pytest.mark.parametrize("bias", [True, *slowly(False)])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (17, 33), (64, 128), (50, 96), *slowly((130, 70))])
def test_products_and_their_rows(n: int, k: int, bias: bool, dtype: torch.dtype, device: str) -> None:
    kernels = TritonKernels(torch.device(device))
    x = random(ROWS[-1], k, dtype=dtype).to(device)
    weight, b = random(n, k, dtype=dtype, seed=1).to(device), random(n, dtype=dtype, seed=2).to(device)
    packed = kernels.pack(weight, b if bias else None)
    whole = kernels.linear(x, packed)
    expected = x.double() @ weight.double().T + (b.double() if bias else 0)
    bound = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    torch.testing.assert_close(whole.double(), expected, rtol=bound, atol=bound)
    for rows in ROWS:
        assert torch.equal(kernels.linear(x[:rows], packed), whole[:rows])
        assert torch.equal(kernels.linear(x[-rows:], packed), whole[-rows:])


def test_rows_of_a_wider_tensor(device: str) -> None:
    kernels = TritonKernels(torch.device(device))
    wide = random(5, 3, 96).to(device)
    weight = random(20, 32, seed=1).to(device)
    packed = kernels.pack(weight)
    part = wide[:, 1, 32:64]
    assert torch.equal(kernels.linear(part, packed), kernels.linear(part.contiguous(), packed))
    assert kernels.linear(wide[..., :32], packed).shape == (5, 3, 20)


def test_no_rows(device: str) -> None:
    kernels = TritonKernels(torch.device(device))
    assert kernels.linear(torch.empty(0, 32, device=device), kernels.pack(random(20, 32).to(device))).shape == (0, 20)


def test_what_rounding_may_do_to_a_product() -> None:
    """Ten thousand additions in fp32, each cut off as matrix units do, are within; one tile left out is not."""
    k = 12288
    x, weight = (random(2, k, dtype=torch.bfloat16, seed=seed).abs() for seed in (1, 2))
    products = (x[:, None].double() * weight[None].double()).numpy()
    total = np.zeros((2, 2))
    for i in range(k):
        total += products[..., i]
        mantissa, exponent = np.frexp(total)
        total = np.ldexp(np.floor(mantissa * 2.0**24), exponent - 24)
    assert within_rounding(torch.from_numpy(total).bfloat16(), x, weight)
    left_out = torch.from_numpy(products[..., : k - 64].sum(-1))
    assert not within_rounding(left_out.bfloat16(), x, weight)
