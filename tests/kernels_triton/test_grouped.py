"""Products with quantized weights have the bits of those with the weight dequantized, and rows depend on themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.attention import random
from tests.products import TIED
from torch import Tensor

from infer.kernels.reference import PackedLinear
from infer.weight import GroupedWeight
from infer_kernels_triton.configs import INTERPRETER
from infer_kernels_triton.grouped import PackedGrouped
from infer_kernels_triton.provider import TritonKernels

ROWS = [1, 17, 33]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def grouped(n: int, k: int, group: int, bits: Any, form: str, scales: torch.dtype, dtype: torch.dtype) -> GroupedWeight:
    """Random codes, and scales that need ``scales``."""
    codes = torch.randint(0, 256, (n, k * bits // 8), generator=torch.Generator().manual_seed(n), dtype=torch.uint8)
    scales_NG = (random(n, k // group, seed=1) / 2**bits).to(scales)
    scales_NG[0, 0] = 2.0**-4 + 2.0**-10 if scales == FP16 else 2.0**-40 if scales == BF16 else 0.1
    minimum_NG = (scales_NG * -5).to(scales) if form == "minimum" else None
    return GroupedWeight(codes, scales_NG, bits, minimum_NG, TIED if form == "table" else None, dtype=dtype)


CASES = [
    (17, 256, 32, 4, "symmetric", BF16, BF16),
    (33, 96, 16, 4, "minimum", FP16, BF16),
    (20, 64, 64, 4, "table", BF16, FP16),
    (40, 176, 16, 8, "minimum", FP32, FP32),
]
MORE = [
    (70, 144, 48, 4, "minimum", FP32, FP16),
    (1, 160, 160, 4, "symmetric", FP32, FP32),
    (65, 128, 32, 8, "symmetric", BF16, BF16),
    (16, 384, 128, 8, "symmetric", FP16, FP16),
    (65, 192, 32, 4, "table", FP16, FP32),
]


def check(found: Tensor, expected: Tensor) -> None:
    """On a GPU, plain weights may be summed by other instructions."""
    if found.device.type == "cpu":
        assert torch.equal(found, expected)
    else:
        bound = {FP32: 1e-5, FP16: 2e-3, BF16: 1.6e-2}[found.dtype]
        torch.testing.assert_close(found, expected, rtol=bound, atol=bound * float(expected.abs().max()))


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)],
    ids=lambda case: "-".join(map(str, case)).replace("torch.", ""),
)
def test_products_rows_and_values(case: tuple[Any, ...], device: str) -> None:
    n, k, *_, dtype = case
    place = torch.device(device)
    kernels, weight = TritonKernels(place), grouped(*case).to(place, dtype)
    b = random(n, dtype=dtype, seed=2).to(device) if n % 2 else None
    packed, plain = kernels.pack(weight, b), kernels.pack(weight.dequantize(), b)
    assert isinstance(packed, PackedGrouped)
    x = random(ROWS[-1], k, dtype=dtype).to(device)
    whole = kernels.linear(x, packed)
    check(whole, kernels.linear(x, plain))
    bound = {FP32: 1e-5, FP16: 2e-3, BF16: 1.6e-2}[dtype]
    expected = x.double() @ weight.dequantize().double().T + (0 if b is None else b.double())
    torch.testing.assert_close(whole.double(), expected, rtol=bound, atol=bound * float(expected.abs().max()))
    for rows in ROWS:
        assert torch.equal(kernels.linear(x[:rows], packed), whole[:rows])
        assert torch.equal(kernels.linear(x[-rows:], packed), whole[-rows:])
    ids = torch.tensor([n - 1, 0, n // 2], device=place)
    assert torch.equal(kernels.embedding(ids, packed), weight.dequantize()[ids])


@pytest.mark.parametrize("bias", [pytest.param(False, marks=pytest.mark.slow), True])
def test_segments(bias: bool, device: str) -> None:
    """A weight with few columns is summed in segments: by a program each, or by one for all, with the same bits."""
    place, n, k = torch.device(device), 17, 480
    kernels, weight = TritonKernels(place), grouped(n, k, 32, 4, "symmetric", BF16, FP32).to(place, FP32)
    b = random(n, seed=2).to(device) if bias else None
    packed, x = kernels.pack(weight, b), random(ROWS[-1], k).to(device)
    if device == "cpu":
        assert packed.segments == 2
        assert any(rows <= INTERPRETER.grouped.apart for rows in ROWS)
    whole = kernels.linear(x, packed)
    parts = [slice(i * 128, (i + packed.segment) * 128) for i in range(0, len(packed.words), packed.segment)]
    values = weight.dequantize()
    expected = torch.zeros(ROWS[-1], n, device=place)
    for part in parts:
        expected += kernels.linear(x[:, part], kernels.pack(values[:, part].contiguous()))
    check(whole, expected if b is None else expected + b)
    assert packed.segments == 1 or not torch.equal(whole, kernels.linear(x, kernels.pack(values, b)))
    for rows in ROWS:
        assert torch.equal(kernels.linear(x[:rows], packed), whole[:rows])
        assert torch.equal(kernels.linear(x[-rows:], packed), whole[-rows:])


def test_what_is_kept_in_memory(device: str, caplog: pytest.LogCaptureFixture) -> None:
    """Codes and scales, unless groups are odd."""
    place = torch.device(device)
    kernels, weight = TritonKernels(place), grouped(64, 1024, 32, 4, "symmetric", BF16, BF16).to(place, BF16)
    packed = kernels.pack(weight)
    assert packed.words.nbytes + packed.scales.nbytes == weight.nbytes == 64 * 1024 * 4.5 / 8
    odd = grouped(64, 96, 24, 4, "symmetric", BF16, BF16).to(place, BF16)
    for _ in range(2):
        assert isinstance(kernels.pack(odd), PackedLinear)
    (record,) = caplog.records
    assert "groups of 24" in record.getMessage()


@pytest.mark.parametrize("int8", [True, False])
def test_activations_are_multiplied_as_they_are(int8: bool, device: str) -> None:
    place, x = torch.device(device), random(3, 64, dtype=BF16).to(device)
    kernels, weight = TritonKernels(place), grouped(40, 64, 32, 4, "symmetric", BF16, BF16).to(place, BF16)
    found = kernels.linear(x, kernels.pack(replace(weight, int8_activations=int8)))
    check(found, kernels.linear(x, kernels.pack(weight.dequantize())))
    odd = replace(grouped(40, 48, 24, 4, "symmetric", BF16, BF16).to(place, BF16), int8_activations=int8)
    x = x[:, :48]
    assert torch.equal(kernels.linear(x, kernels.pack(odd)), kernels.linear(x, kernels.pack(odd.dequantize())))


def test_an_id_that_no_row_has_yields_nan(device: str) -> None:
    place = torch.device(device)
    kernels, weight = TritonKernels(place), grouped(64, 96, 32, 4, "symmetric", FP32, FP32).to(place, FP32)
    rows = kernels.embedding(torch.tensor([0, 64, 63, 70, -1], device=place), kernels.pack(weight))
    assert torch.equal(rows[[0, 2]], weight.dequantize()[[0, 63]])
    assert rows[[1, 3, 4]].isnan().all()


def test_a_gated_product_and_rows_of_a_wider_tensor(device: str) -> None:
    place = torch.device(device)
    kernels, weight = TritonKernels(place), grouped(40, 64, 64, 8, "symmetric", BF16, BF16).to(place, BF16)
    wide = random(5, 3, 96, dtype=BF16).to(device)
    wide[:, 2] = torch.nan  # behind the rows that are multiplied
    packed, x = kernels.pack_gated(weight), wide[:, 1, 32:]
    found = kernels.gated_linear(x, packed, "silu")
    gate, up = kernels.linear(x.contiguous(), packed).chunk(2, dim=-1)
    assert torch.equal(found, kernels.gated(gate, up, "silu"))
    assert found.isfinite().all()
    assert found.shape == (5, 20)
    assert kernels.linear(x[:0], packed).shape == (0, 40)
    assert kernels.embedding(torch.empty(0, dtype=torch.int64, device=place), packed).shape == (0, 64)
