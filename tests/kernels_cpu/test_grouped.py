"""Products with quantized weights: against float64, every row by itself, and the same bits at every instruction set
level if activations are int8."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.attention import random
from tests.core.test_weight import meaning
from tests.examples import examples
from tests.products import TIED
from torch import Tensor

from infer.device import same_bits
from infer.kernels.quantize import quantize_weight
from infer.kernels.reference import ReferenceKernels
from infer.weight import GroupedWeight
from infer_kernels_cpu import native
from infer_kernels_cpu.provider import CpuKernels

LEVELS = {level: CpuKernels(level) for level in native.levels()}


def grouped(
    n: int, groups: int, group: int, bits: Any, form: str, scales: torch.dtype, dtype: torch.dtype, seed: int = 0
) -> GroupedWeight:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (n, groups * group * bits // 8), generator=generator, dtype=torch.uint8)
    scales_NG = ((torch.rand(n, groups, generator=generator) - 0.3) / 2**bits).to(scales)
    return GroupedWeight(
        codes,
        scales_NG,
        bits,
        minimum_NG=(scales_NG * -5).to(scales) if form == "minimum" else None,
        table=TIED if form == "table" else None,
        dtype=dtype,
    )


def rounded(x_TK: Tensor, group: int) -> Tensor:
    """What the int8 activations mean, in float64, value by value as ``quantize_rows`` documents."""
    x = x_TK.float().view(len(x_TK), -1, group)
    top = x.abs().amax(-1, keepdim=True)
    q = torch.where(top > 0, x * (127 / top), 0).double().round()
    return (q * (top / 127).double()).flatten(1)


@given(
    st.sampled_from([(4, "symmetric"), (4, "minimum"), (4, "table"), (8, "symmetric"), (8, "minimum")]),
    st.sampled_from([2, 8, 12, 16, 32, 64, 96, 128, 256, 384]),
    st.integers(1, 4),
    st.sampled_from([2, 30, 64, 70]),
    st.integers(1, 20),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
)
@example((8, "minimum"), 32, 2, 70, 100, torch.float16, torch.bfloat16, True)
@example((4, "minimum"), 128, 2, 70, 100, torch.float16, torch.bfloat16, False)  # as AWQ and GPTQ, in whole tiles
@settings(max_examples=examples(20, 8))
def test_products(
    kind: tuple[int, str],
    group: int,
    groups: int,
    n: int,
    rows: int,
    scales: torch.dtype,
    dtype: torch.dtype,
    int8: bool,
) -> None:
    bits, form = kind
    weight = replace(grouped(n, groups, group, bits, form, scales, dtype), int8_activations=int8)
    x, bias = random(rows, groups * group, dtype=dtype), random(n, dtype=dtype, seed=2)
    means = meaning(weight)
    expected = (rounded(x, weight.activation_group) if int8 else x.double()) @ means.T + bias.double()
    size = (x.double().abs() @ means.abs().T).amax() + bias.abs().amax()
    close = 1e-5 if dtype == torch.float32 else 1e-2
    gate, up = expected.chunk(2, -1)
    found: list[Tensor] = []
    ids = torch.tensor([n - 1, 0, n // 2])
    for kernels in LEVELS.values():
        packed = kernels.pack(weight, bias)
        found.append(kernels.linear(x, packed))
        assert found[-1].dtype == dtype
        assert (found[-1].double() - expected).abs().max() <= close * size
        for first, last in ((0, 1), (rows // 3, rows // 3 + 4), (rows // 2, rows)):
            assert torch.equal(kernels.linear(x[first:last], packed), found[-1][first:last])
        gated = kernels.gated_linear(x, kernels.pack_gated(weight, bias), "silu")
        both = close * size * (1 + up.abs().amax() + gate.abs().amax())
        assert (gated.double() - gate * gate.sigmoid() * up).abs().max() <= both
        assert torch.equal(kernels.embedding(ids, packed), weight.dequantize()[ids])
    if int8:
        assert all(torch.equal(result, found[0]) for result in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_reference_computes_the_same(dtype: torch.dtype) -> None:
    weight = replace(grouped(40, 3, 32, 4, "symmetric", torch.bfloat16, dtype), int8_activations=True)
    x, reference, kernels = random(5, 96, dtype=dtype), ReferenceKernels(), CpuKernels()
    expected = reference.linear(x, reference.pack(weight))
    assert expected.dtype == dtype
    torch.testing.assert_close(
        kernels.linear(x, kernels.pack(weight)), expected, rtol=1e-5 if dtype.itemsize == 4 else 1e-2, atol=1e-5
    )
    rows = torch.tensor([7, 0])
    assert torch.equal(reference.embedding(rows, reference.pack(weight)), weight.dequantize()[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("int8", [None, True, False], ids=["plain", "int8", "grouped"])
def test_an_id_that_no_row_has_yields_nan(int8: bool | None, dtype: torch.dtype) -> None:
    """Whatever is in memory there: the weight is padded to whole panels."""
    grouped_NK = grouped(70, 2, 32, 8, "symmetric", torch.float32, dtype)
    plain_NK = grouped_NK.dequantize()
    weight = plain_NK if int8 is None else replace(grouped_NK, int8_activations=int8)
    ids = torch.tensor([0, 70, 69, 71, -1, 10**15, -(10**15)])
    for kernels in LEVELS.values():
        rows = kernels.embedding(ids, kernels.pack(weight))
        assert torch.equal(rows[[0, 2]], plain_NK[[0, 69]])
        assert rows[[1, 3, 4, 5, 6]].isnan().all()


@pytest.mark.parametrize("int8", [True, False], ids=["int8", "plain"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_not_finite_stay_in_their_rows(int8: bool, bad: float) -> None:
    weight = replace(grouped(70, 2, 32, 8, "symmetric", torch.float32, torch.bfloat16), int8_activations=int8)
    x = random(4, 64, dtype=torch.bfloat16)
    for kernels in LEVELS.values():
        packed = kernels.pack(weight)
        before = kernels.linear(x, packed)
        spoiled = x.clone()
        spoiled[1, 40] = bad
        found = kernels.linear(spoiled, packed)
        assert not torch.isfinite(found[1]).any()
        assert torch.equal(found[[0, 2, 3]], before[[0, 2, 3]])


@pytest.mark.parametrize("int8", [True, False], ids=["int8", "plain"])
def test_extreme_activations(int8: bool) -> None:
    """Zeros, denormals and values near the largest float give what float64 gives, or too little to be told from 0."""
    weight = replace(grouped(64, 2, 32, 4, "symmetric", torch.float32, torch.float32), int8_activations=int8)
    x = random(3, 64)
    x[0], x[1], x[2, :32] = 0, x[1] * 1e-42, x[2, :32] * 1e30
    for kernels in LEVELS.values():
        found = kernels.linear(x, kernels.pack(weight))
        expected = (rounded(x, 32) if int8 else x.double()) @ meaning(weight).T
        assert (found[0] == 0).all()
        assert (found[1].abs() < 1e-38).all()
        torch.testing.assert_close(found[2].double(), expected[2], rtol=1e-3, atol=1e25)


@given(
    st.sampled_from([4, 8]),
    st.integers(1, 40),
    st.sampled_from([2, 6, 8, 24, 32, 64, 96, 1024]),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    st.sampled_from([1e-45, 2.0**-120, 1e-20, 1e-4, 1.0, 1e4, 1e30]),
    st.integers(0, 2**32),
)
@example(4, 400, 1024, torch.float32, 1.0, 0)
@settings(max_examples=examples(40, 12))
def test_weights_are_quantized_to_the_same_bits(
    bits: Any, n: int, k: int, dtype: torch.dtype, size: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, k, generator=generator) * size
    x[torch.rand(n, k, generator=generator) < 0.2] *= 2.0**-8
    x[0, : k // 2], x[-1] = -0.0, x[-1].abs() * -1  # zeros with a sign, and a row without a positive value
    x = x.to(dtype).clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)
    expected = quantize_weight(x, bits)
    for kernels in LEVELS.values():
        found = kernels.quantize(x, bits)
        assert str(found) == str(expected)
        assert (found.dtype, found.int8_activations) == (dtype, True)
        assert torch.equal(found.codes, expected.codes)
        assert same_bits(found.scales_NG, expected.scales_NG)
        spoiled = x.clone()
        spoiled[0, 1] = torch.inf
        assert not torch.isfinite(kernels.quantize(spoiled, bits).scales_NG[0, 0])


@pytest.mark.parametrize(
    ("kind", "group", "groups"),
    [
        ((8, "symmetric"), 32, 13),
        ((8, "minimum"), 12, 9),
        ((8, "symmetric"), 128, 3),
        ((8, "symmetric"), 68, 2),
        ((4, "table"), 32, 13),
        ((4, "minimum"), 64, 7),
        ((4, "symmetric"), 256, 2),
    ],
    ids=str,
)
def test_any_number_of_rows_has_the_same_bits(kind: tuple[int, str], group: int, groups: int) -> None:
    """Levels with tiles multiply some rows by these and others by vectors."""
    weight = grouped(70, groups, group, *kind, torch.float16, torch.bfloat16)
    weight, x = replace(weight, int8_activations=True), random(100, groups * group, dtype=torch.bfloat16)
    lowest = next(iter(LEVELS.values()))
    expected = lowest.linear(x, lowest.pack(weight))
    assert torch.linalg.norm(expected.double() - rounded(x, weight.activation_group) @ meaning(weight).T) < 3e-3 * (
        torch.linalg.norm(expected.double())
    )
    for kernels in LEVELS.values():
        packed = kernels.pack(weight)
        for rows in (100, 1, 6, 7, 15, 16, 17, 23, 24, 25, 31, 32, 33, 39, 40, 41):
            assert torch.equal(kernels.linear(x[-rows:], packed), expected[-rows:])


@pytest.mark.parametrize("k", [40, 999, 1000, 1664])  # the last one's rows are multiplied fewer at a time
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_any_number_of_rows_of_plain_weights_has_the_same_bits(k: int, dtype: torch.dtype) -> None:
    weight, x = random(70, k, dtype=dtype), random(300, k, dtype=dtype)
    exact = x.double() @ weight.double().T
    for kernels in LEVELS.values():
        packed = kernels.pack(weight)
        expected = kernels.linear(x, packed)
        assert torch.linalg.norm(expected.double() - exact) < 3e-3 * torch.linalg.norm(exact)
        for rows in (1, 2, 3, 4, 5, 7, 15, 16, 17, 31, 32, 33, 96, 97, 128, 129, 145, 255, 256, 257, 272, 273):
            assert torch.equal(kernels.linear(x[-rows:], packed), expected[-rows:]), (kernels.level, rows)


def test_many_rows_on_two_threads() -> None:
    torch.set_num_threads(2)
    try:
        for int8 in (True, False):
            weight = replace(grouped(200, 5, 64, 8, "symmetric", torch.bfloat16, torch.bfloat16), int8_activations=int8)
            kernels, x = CpuKernels(), random(300, 320, dtype=torch.bfloat16)
            packed = kernels.pack(weight)
            found = kernels.linear(x, packed)
            expected = (rounded(x, 64) if int8 else x.double()) @ meaning(weight).T
            assert torch.linalg.norm(found.double() - expected) < 3e-3 * torch.linalg.norm(expected)
            torch.set_num_threads(1)
            assert torch.equal(kernels.linear(x[123:140], packed), found[123:140])
            torch.set_num_threads(2)
    finally:
        torch.set_num_threads(1)
