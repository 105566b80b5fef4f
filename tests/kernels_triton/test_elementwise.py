"""Norms, rotary embedding with the store, and activations, against the reference over odd shapes and strided input."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from tests.attention import random
from tests.examples import slowly
from torch import Tensor

from infer.contracts.attention import HeadNorms, QuantizedKV, Rotary
from infer.contracts.kernels import GateActivation
from infer.kernels.reference import ReferenceKernels, quantize
from infer_kernels_triton.provider import TritonKernels

REFERENCE = ReferenceKernels()
dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, *slowly(torch.float16)], ids=["fp32", "bf16", "fp16"]
)
gates = pytest.mark.parametrize("activation", get_args(GateActivation))
ROWS_AND_SIZES = [(1, 1), (1, 16), (3, 17), (7, 64), (2, 257), (5, 1024), (33, 48), (2, 5000)]


@pytest.fixture
def kernels(device: str) -> TritonKernels:
    return TritonKernels(torch.device(device))


def same(actual: Tensor, expected: Tensor) -> None:
    """But for a rounding of the result's type: the two may sum in another order before it."""
    torch.testing.assert_close(actual.cpu(), expected.cpu())


@dtypes
@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize(("rows", "size"), ROWS_AND_SIZES)
def test_norms(
    kernels: TritonKernels, device: str, rows: int, size: int, unit_offset: bool, dtype: torch.dtype
) -> None:
    x, residual = (random(rows, size, dtype=dtype, seed=seed).to(device) for seed in (0, 1))
    weight = random(size, dtype=dtype, seed=2).to(device)
    same(kernels.rms_norm(x, weight, 1e-5, unit_offset), REFERENCE.rms_norm(x, weight, 1e-5, unit_offset))
    given = residual.clone()
    normed, total = kernels.add_rms_norm(x, residual, weight, 1e-5, unit_offset)
    expected, _ = REFERENCE.add_rms_norm(x, residual, weight, 1e-5, unit_offset)
    same(normed, expected)
    assert torch.equal(total, x + residual)
    assert torch.equal(residual, given), "the residual is not written to"
    assert torch.equal(
        kernels.rms_norm(x[-1:], weight, 1e-5, unit_offset), kernels.rms_norm(x, weight, 1e-5, unit_offset)[-1:]
    )


@dtypes
def test_norms_of_heads_within_a_wider_row(kernels: TritonKernels, device: str, dtype: torch.dtype) -> None:
    row = random(70, 3 * 4 * 16, dtype=dtype).to(device)
    heads = row[:, 64:128].view(70, 4, 16)
    weight = random(16, dtype=dtype, seed=1).to(device)
    found = kernels.rms_norm(heads, weight, 1e-6)
    same(found, REFERENCE.rms_norm(heads, weight, 1e-6))
    assert torch.equal(found, kernels.rms_norm(heads.contiguous(), weight, 1e-6))


@dtypes
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("unit_offset", [None, False, True])
@pytest.mark.parametrize(
    ("T", "H", "K", "E"), [(1, 4, 2, 16), (5, 3, 1, 6), (9, 6, 2, 80), (3, 8, 8, 128), (2, 4, 1, 256)]
)
def test_rope_store_kv(
    kernels: TritonKernels,
    device: str,
    T: int,
    H: int,
    K: int,
    E: int,
    unit_offset: bool | None,
    shared: bool,
    dtype: torch.dtype,
) -> None:
    """From slices of one projection, as models have them."""
    qkv = random(T, (H + 2 * K) * E, dtype=dtype).to(device)
    q, k, v = (x.view(T, -1, E) for x in torch.split_with_sizes(qkv, [H * E, K * E, K * E], dim=-1))
    angles = random(1 if shared else T, E // 2, seed=3) * 10
    norms, weight = None, random(E, dtype=dtype, seed=4).to(device)
    if unit_offset is not None:
        norms = HeadNorms(weight, weight.flip(0), 1e-3, unit_offset)
    rotary = Rotary(angles.cos().to(device), angles.sin().to(device), norms)
    flat = torch.randperm(4 * 7)[:T].to(device)
    results = []
    for provider in (kernels, REFERENCE):
        k_cache, v_cache = (random(4, 7, K, E, dtype=dtype, seed=seed).to(device) for seed in (1, 2))
        out = provider.rope_store_kv(q, k, v, rotary, k_cache, v_cache, flat)
        results.append((out, k_cache, v_cache))
    for found, expected in zip(*results, strict=True):
        same(found, expected)
    assert torch.equal(results[0][2], results[1][2])


@dtypes
@pytest.mark.parametrize(("T", "H", "K", "E"), [(5, 3, 1, 6), (9, 6, 2, 80), (3, 8, 8, 128)])
def test_rope_store_kv_quantized(
    kernels: TritonKernels, device: str, T: int, H: int, K: int, E: int, dtype: torch.dtype
) -> None:
    """Codes are the contract's, of K as the same kernel stores it in its own type; what is not finite stays so."""
    q, k, v = (random(T, n, E, dtype=dtype, seed=n) for n in (H, K, K))
    v[0, 0, E // 2], k[0, K - 1, 1], v[1, 0], k[2] = torch.inf, torch.nan, 0, k[2] * 2.0**-14
    angles, flat = random(T, E // 2, seed=3) * 10, torch.randperm(4 * 7)[:T].to(device)
    rotary = Rotary(angles.cos().to(device), angles.sin().to(device))
    q, k, v = (x.to(device) for x in (q, k, v))
    turned, plain_v = (torch.zeros(4, 7, K, E, dtype=dtype, device=device) for _ in range(2))
    out = kernels.rope_store_kv(q, k, v, rotary, turned, plain_v, flat)
    k_cache, v_cache = (
        QuantizedKV(
            torch.full((4, 7, K, E), 55, dtype=torch.int8, device=device), torch.full((4, 7, K), 77.0, device=device)
        )
        for _ in range(2)
    )
    assert torch.equal(kernels.rope_store_kv(q, k, v, rotary, k_cache, v_cache, flat), out)
    for stored, cache in ((turned, k_cache), (plain_v, v_cache)):
        codes, scales = quantize(stored.flatten(0, 1)[flat])
        assert torch.equal(cache.codes.flatten(0, 1)[flat], codes)
        torch.testing.assert_close(cache.scales.flatten(0, 1)[flat], scales, rtol=0, atol=0, equal_nan=True)
        assert scales.isnan().any()
        assert int((cache.codes == 55).flatten(2).all(-1).sum()) == int((cache.scales == 77).all(-1).sum()) == 28 - T


@dtypes
@gates
@pytest.mark.parametrize(("rows", "size"), ROWS_AND_SIZES)
def test_gated_activations(
    kernels: TritonKernels, device: str, rows: int, size: int, activation: GateActivation, dtype: torch.dtype
) -> None:
    gate, up = (random(rows, 2 * size, dtype=dtype) * 4).to(device).chunk(2, dim=-1)
    same(kernels.gated(gate, up, activation), REFERENCE.gated(gate, up, activation))
    assert torch.equal(kernels.gated(gate[-1:], up[-1:], activation), kernels.gated(gate, up, activation)[-1:])


@gates
def test_gated_activations_of_extremes(kernels: TritonKernels, device: str, activation: GateActivation) -> None:
    gate = torch.tensor([[-1e30, -200.0, -0.0, 0.0, 200.0, 1e12]]).to(device)
    clamped = 14 / (1 + math.exp(-7 * 1.702))
    zero = {"sigmoid": 0.5, "softplus": math.log(2)}.get(activation, 0.0)
    highest = {"clamped_swiglu": [clamped] * 2, "sigmoid": [1.0, 1.0]}.get(activation, [200.0, 1e12])
    same(kernels.gated(gate, torch.ones_like(gate), activation), torch.tensor([[0.0, 0.0, zero, zero, *highest]]))
