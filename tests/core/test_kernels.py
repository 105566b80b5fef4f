"""Every kernel provider for the CPU: its results against float64, and that each row's bits depend on that row alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.attention import Scene, close, quantized, random, spec
from tests.examples import examples, slowly
from tests.pairwise import pairwise
from tests.products import gated64
from torch import Tensor

from infer.contracts.attention import KV, AttentionSpec, HeadNorms, KVDtype, QuantizedKV, Rotary
from infer.contracts.kernels import Activation, GateActivation
from infer.kernels.reference import SEGMENT, TILE, ReferenceKernels, exact_rows, plan_tiles
from infer_kernels_cpu import native
from infer_kernels_cpu.provider import CpuKernels

KERNELS = ReferenceKernels()
"""The provider that is being tested."""
FLOATS = (torch.float32, torch.bfloat16)
floats = pytest.mark.parametrize("dtype", FLOATS, ids=["fp32", "bf16"])
SINKS = (0.5, -1e4, 3.0, 1e4)
"""Logits of attention sinks, each among, below or above the scores."""


LEVELS = [
    level if level == native.chosen() else pytest.param(level, marks=pytest.mark.slow) for level in native.levels()
]


@pytest.fixture(autouse=True, scope="module", params=[*slowly("reference"), *LEVELS])
def provider(request: pytest.FixtureRequest) -> None:
    global KERNELS
    KERNELS = ReferenceKernels() if request.param == "reference" else CpuKernels(request.param)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small products gain nothing from threads, and where another process is busy they wait for it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# Meaning

ROWS_AND_SIZES = [(1, 1), (1, 16), (3, 17), (7, 64), (2, 257), (5, 1024), (130, 48)]


def norm64(x: Tensor, weight: Tensor, eps: float, unit_offset: bool) -> Tensor:
    x, weight = x.double(), weight.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (1 + weight if unit_offset else weight)


@pairwise("shape unit_offset dtype", ROWS_AND_SIZES, (False, True), FLOATS)
def test_rms_norm(shape: tuple[int, int], unit_offset: bool, dtype: torch.dtype) -> None:
    rows, size = shape
    x, weight = random(rows, size, dtype=dtype), random(size, dtype=dtype, seed=1)
    close(KERNELS.rms_norm(x, weight, 1e-3, unit_offset), norm64(x, weight, 1e-3, unit_offset))
    zeros = KERNELS.rms_norm(torch.zeros_like(x), weight, 1e-6, unit_offset)
    assert torch.equal(zeros, torch.zeros_like(x))


@floats
def test_rms_norm_of_heads_within_a_wider_row(dtype: torch.dtype) -> None:
    """Norms of q and k see slices of one projection."""
    row = random(5, 3 * 4 * 16, dtype=dtype)
    heads = row[:, 64:128].view(5, 4, 16)
    weight = random(16, dtype=dtype, seed=1)
    close(KERNELS.rms_norm(heads, weight, 1e-6), norm64(heads, weight, 1e-6, False))
    assert torch.equal(KERNELS.rms_norm(heads, weight, 1e-6), KERNELS.rms_norm(heads.contiguous(), weight, 1e-6))


@pairwise("shape unit_offset dtype", ROWS_AND_SIZES, (False, True), FLOATS)
def test_add_rms_norm(shape: tuple[int, int], unit_offset: bool, dtype: torch.dtype) -> None:
    rows, size = shape
    x, residual = random(rows, size, dtype=dtype), random(rows, size, dtype=dtype, seed=1)
    weight = random(size, dtype=dtype, seed=2)
    given = residual.clone()
    normed, total = KERNELS.add_rms_norm(x, residual, weight, 1e-6, unit_offset)
    assert torch.equal(total, x + residual)
    close(normed, norm64(total, weight, 1e-6, unit_offset))
    assert torch.equal(residual, given), "the residual is not written to"


def rope64(x: Tensor, angles: Tensor) -> Tensor:
    """Each pair (x[i], x[i + E/2]) as a complex number, turned by its angle."""
    left, right = x.double().chunk(2, dim=-1)
    turned = torch.complex(left, right) * torch.polar(torch.ones_like(angles), angles)[:, None, :]
    return torch.cat((turned.real, turned.imag), dim=-1)


def rotary_of(angles: Tensor, norms: HeadNorms | None = None) -> Rotary:
    return Rotary(angles.cos().float(), angles.sin().float(), norms)


@pairwise("shape shared dtype", [(1, 1, 1, 2), (5, 3, 1, 6), (9, 8, 2, 128)], (False, True), FLOATS)
def test_rope(shape: tuple[int, int, int, int], shared: bool, dtype: torch.dtype) -> None:
    rows, q_heads, k_heads, size = shape
    q, k = random(rows, q_heads, size, dtype=dtype), random(rows, k_heads, size, dtype=dtype, seed=1)
    angles = random(1 if shared else rows, size // 2, seed=2).double() * 7
    turned = KERNELS.rope(q, k, rotary_of(angles))
    for x, y in zip((q, k), turned, strict=True):
        close(y, rope64(x, angles))


ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_pytorch_tanh", "clamped_swiglu")
GATES: tuple[GateActivation, ...] = (*ACTIVATIONS, "sigmoid", "softplus")


@pairwise("shape activation dtype", ROWS_AND_SIZES, GATES, FLOATS)
def test_gated_activations(shape: tuple[int, int], activation: GateActivation, dtype: torch.dtype) -> None:
    rows, size = shape
    x = 4 * random(rows, 2 * size, dtype=dtype)
    close(KERNELS.gated(x[:, :size], x[:, size:], activation), gated64(x, activation))


@floats
def test_a_gate_of_a_row_may_stand_for_all_its_values(dtype: torch.dtype) -> None:
    gate, up = random(5, 1, dtype=dtype), random(5, 40, dtype=dtype)
    found = KERNELS.gated(gate.expand(5, 40), up, "sigmoid")
    assert torch.equal(found, KERNELS.gated(gate.expand(5, 40).contiguous(), up, "sigmoid"))


@floats
def test_gates_of_extremes(dtype: torch.dtype) -> None:
    gate = torch.tensor([[-1e4, -100.0, -0.0, 0.0, 100.0, 1e4]], dtype=dtype)
    found = {name: KERNELS.gated(gate, torch.full_like(gate, 2), name) for name in GATES[-2:]}
    close(found["sigmoid"], torch.tensor([[0, 0, 1, 1, 2, 2]]).double())
    log4 = 2 * math.log(2)
    close(found["softplus"], torch.tensor([[0, 0, log4, log4, 200, 2 * float(gate[0, -1])]]).double())
    assert all(result.isfinite().all() for result in found.values())


@floats
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_activations_of_extremes(activation: Activation, dtype: torch.dtype) -> None:
    gate = torch.tensor([-1e4, -100.0, -0.0, 0.0, 100.0, 1e4], dtype=dtype)
    result = KERNELS.gated(gate[None], torch.ones_like(gate)[None], activation)
    expected = gate.double().clamp(min=0)
    if activation == "clamped_swiglu":  # (1 + 1) * x * sigmoid(1.702 x), with x at most 7
        expected = 2 * expected.clamp(max=7) / (1 + torch.exp(-1.702 * expected.clamp(max=7)))
    close(result, expected[None])
    assert torch.equal(result[0, :4], torch.zeros(4, dtype=dtype))


@pairwise("size activation bias dtype", (1, 5, 16, 31, 32, 33, 64, 100), ACTIVATIONS, (False, True), FLOATS)
def test_gated_linear(size: int, bias: bool, activation: Activation, dtype: torch.dtype) -> None:
    """As the product and the activation one after the other, whose gates are rounded in between."""
    weight, bias_N = random(2 * size, 17, dtype=dtype), random(2 * size, dtype=dtype, seed=1) if bias else None
    gated, plain = KERNELS.pack_gated(weight, bias_N), KERNELS.pack(weight, bias_N)
    for rows in (1, 2, 16, 40):
        x = random(rows, 17, dtype=dtype, seed=2)
        found = KERNELS.gated_linear(x, gated, activation)
        close(found, gated64(KERNELS.linear(x, plain), activation))
        assert found.shape == (rows, size)


@floats
def test_linear_and_embedding(dtype: torch.dtype) -> None:
    weight, bias = random(33, 17, dtype=dtype), random(33, dtype=dtype, seed=1)
    for rows in (1, 2, 16, 40):
        x = random(rows, 17, dtype=dtype, seed=2)
        close(KERNELS.linear(x, KERNELS.pack(weight)), x.double() @ weight.double().T)
        close(KERNELS.linear(x, KERNELS.pack(weight, bias)), x.double() @ weight.double().T + bias.double())
    ids = torch.tensor([32, 0, 5, 5])
    assert torch.equal(KERNELS.embedding(ids, KERNELS.pack(weight)), weight[ids])


@floats
def test_store_kv(dtype: torch.dtype) -> None:
    k_cache, v_cache = (random(4, 3, 2, 8, dtype=dtype, seed=seed) for seed in (0, 1))
    k, v = (random(3, 2, 8, dtype=dtype, seed=seed) for seed in (2, 3))
    flat = torch.tensor([11, 0, 4])
    expected_k, expected_v = k_cache.clone(), v_cache.clone()
    expected_k.flatten(0, 1)[flat], expected_v.flatten(0, 1)[flat] = k, v
    KERNELS.store_kv(k, v, k_cache, v_cache, flat)
    assert torch.equal(k_cache, expected_k)
    assert torch.equal(v_cache, expected_v)


@floats
@pytest.mark.parametrize("unit_offset", [None, False, True])
def test_rope_store_kv(unit_offset: bool | None, dtype: torch.dtype) -> None:
    """q and K are normed, where there are norms, and turned; V is kept as it is."""
    q, k, v = (random(3, heads, 8, dtype=dtype, seed=heads) for heads in (4, 2, 2))
    angles = random(3, 4, seed=9).double() * 10
    k_cache, v_cache = (random(4, 3, 2, 8, dtype=dtype, seed=seed) for seed in (0, 1))
    before = k_cache.clone()
    flat = torch.tensor([11, 0, 4])
    norms = None
    if unit_offset is not None:
        norms = HeadNorms(random(8, dtype=dtype, seed=5), random(8, dtype=dtype, seed=6), 1e-3, unit_offset)
    out = KERNELS.rope_store_kv(q, k, v, rotary_of(angles, norms), k_cache, v_cache, flat)
    if norms is not None:
        q = KERNELS.rms_norm(q, norms.q_weight_E, norms.eps, norms.unit_offset)
        k = KERNELS.rms_norm(k, norms.k_weight_E, norms.eps, norms.unit_offset)
    close(out, rope64(q, angles))
    close(k_cache.flatten(0, 1)[flat], rope64(k, angles))
    assert torch.equal(v_cache.flatten(0, 1)[flat], v)
    untouched = [i for i in range(12) if i not in flat]
    assert torch.equal(k_cache.flatten(0, 1)[untouched], before.flatten(0, 1)[untouched])


def empty_cache(*shape: int) -> QuantizedKV:
    """Codes and scales that nothing stores by itself."""
    return QuantizedKV(torch.full(shape, 55, dtype=torch.int8), torch.full(shape[:-1], 77.0))


def heads_of_all_kinds(dtype: torch.dtype) -> Tensor:
    """[T, 2, 34]: of every magnitude, with zeros, ties, and the largest values of both signs."""
    x = random(14, 2, 34, dtype=dtype) * torch.logspace(-35, 35, 14, dtype=torch.float64)[:, None, None].to(dtype)
    x[3, 0] = 0
    x[4, 1] = torch.arange(-17, 17).to(dtype) / 2  # a tie in every other value
    x[4, 1, 0] = 127
    x[5, 0, 7], x[5, 0, 8] = -2.0, 2.0**-30
    x[6] = torch.finfo(dtype).max
    x[7, :, ::2] = torch.finfo(dtype).min
    return x


def store(k: Tensor, v: Tensor, k_cache: KV, v_cache: KV, flat: Tensor, rotary: Rotary | None) -> None:
    """By either kernel that stores."""
    if rotary is None:
        KERNELS.store_kv(k, v, k_cache, v_cache, flat)
    else:
        KERNELS.rope_store_kv(k, k, v, rotary, k_cache, v_cache, flat)


@floats
def test_store_kv_quantized(dtype: torch.dtype) -> None:
    """Exactly as the contract says, by every provider."""
    k = heads_of_all_kinds(dtype)
    v, flat = k.flip(0), torch.randperm(20, generator=torch.Generator().manual_seed(0))[:14]
    turned = rotary_of(torch.zeros(1, 17, dtype=torch.float64))
    for rotary in (None, turned):
        caches = k_cache, v_cache = empty_cache(5, 4, 2, 34), empty_cache(5, 4, 2, 34)
        store(k, v, k_cache, v_cache, flat, rotary)
        for x, cache in zip((k, v), caches, strict=True):
            codes, scales = quantized(x)
            assert torch.equal(cache.codes.flatten(0, 1)[flat], torch.from_numpy(codes))
            assert torch.equal(cache.scales.flatten(0, 1)[flat], torch.from_numpy(scales))
            others = [i for i in range(20) if i not in flat]
            assert bool((cache.codes.flatten(0, 1)[others] == 55).all())
            assert bool((cache.scales.flatten(0, 1)[others] == 77).all())


@pairwise("at strange dtype", (0, 16, 33), (torch.nan, torch.inf, -torch.inf), FLOATS)
def test_a_value_that_is_not_finite_is_not_quantized_away(at: int, strange: float, dtype: torch.dtype) -> None:
    x = random(3, 2, 34, dtype=dtype)
    x[1, 0, at] = strange
    for rotary in (None, rotary_of(torch.zeros(1, 17, dtype=torch.float64))):
        k_cache, v_cache = empty_cache(1, 3, 2, 34), empty_cache(1, 3, 2, 34)
        store(x, x, k_cache, v_cache, torch.arange(3), rotary)
        for cache in (k_cache, v_cache):
            assert cache.scales.isnan().nonzero().tolist() == [[0, 1, 0]]
            assert not cache.codes[0, 1, 0].any()


# Attention


@floats
@pytest.mark.parametrize("where", ["k", "v"])
def test_attention_to_what_is_not_finite_is_seen(where: str, dtype: torch.dtype) -> None:
    """By the queries that attend to it, whichever way K and V are stored, and by no other sequence."""
    kv_dtypes: tuple[KVDtype, ...] = ("auto", "int8")
    for kv_dtype in kv_dtypes:
        scene = Scene(spec(), [(40, 1), (0, 9), (300, 1)], 16, dtype, kernels=KERNELS, kv_dtype=kv_dtype)
        (scene.k if where == "k" else scene.v)[2][130, 0, 5] = torch.nan
        found = scene.attend()
        assert found[-1, :2].isnan().any(-1).all(), kv_dtype  # the heads that share the first K/V head
        assert found[-1, 2:].isfinite().all(), kv_dtype
        assert found[:-1].isfinite().all(), kv_dtype


EXACT: dict[Hashable, Tensor] = {}
"""The exact result of each scene: it depends neither on the provider nor on the size of blocks."""


def close_attention(scene: Scene) -> Tensor:
    """The result, if it is within what rounding the weights to the values' type does, where a provider does that."""
    sinks = None if scene.spec.sinks_H is None else tuple(scene.spec.sinks_H.tolist())
    key = replace(scene.spec, sinks_H=None), sinks, tuple(scene.extends), scene.dtype, scene.seed, scene.kv_dtype
    if key not in EXACT:
        EXACT[key] = scene.attend64()
    found = scene.attend()
    if scene.dtype == torch.bfloat16 and type(KERNELS) is not ReferenceKernels:
        torch.testing.assert_close(found.double(), EXACT[key], rtol=2e-2, atol=2e-2)
    else:
        close(found, EXACT[key])
    return found


MIXED = [(0, 1), (0, 5), (130, 1), (7, 3), (127, 2), (60, 70), (0, 140), (300, 1), (255, 130)]


@pairwise("window block_size cap dtype", (None, 9, 128), (1, 16), (None, 0.7), FLOATS, slow=[(1, 127, 129), (128, 500)])
def test_attention_over_mixed_extends(
    block_size: int, window: int | None, cap: float | None, dtype: torch.dtype
) -> None:
    scene = Scene(spec(window=window, cap=cap), MIXED, block_size, dtype, kernels=KERNELS)
    close_attention(scene)


@floats
@pytest.mark.parametrize(
    "where", [spec(7, 1), spec(6, 2, cap=0.7), spec(4, 4, 18, window=9)], ids=["", "cap", "window"]
)
def test_attention_with_sinks(where: AttentionSpec, dtype: torch.dtype) -> None:
    """A logit below, among and above the scores, and far above all of them: that head's result is zero."""
    with_sinks = replace(where, sinks_H=torch.tensor([SINKS[i % 4] for i in range(where.num_heads)]))
    scene = Scene(with_sinks, [*MIXED, (1100, 1), (1000, 70)], 16, dtype, kernels=KERNELS)
    assert not close_attention(scene)[:, 3].any()


@pairwise("size heads dtype", (16, 18, 64, 80, 96, 128, 256, 512), [(1, 1), (4, 4), (6, 2), (7, 1), (100, 1)], FLOATS)
def test_attention_of_head_counts_and_sizes(size: int, heads: tuple[int, int], dtype: torch.dtype) -> None:
    scene = Scene(spec(*heads, size), [(0, 3), (129, 2), (20, 1)], 16, dtype, kernels=KERNELS)
    close_attention(scene)


@floats
@pytest.mark.parametrize(
    ("where", "block_size"),
    [
        (spec(6, 2, 64, window=127), 500),
        (spec(7, 1, 18), 128),
        (spec(6, 2, window=9, cap=0.7, sinks=SINKS), 16),
        *slowly(
            (spec(), 16),
            (spec(window=9, cap=0.7), 1),
            (spec(4, 4, 80), 16),
            (spec(4, 1, 96, window=129), 16),
            (spec(16, 8, 128), 16),
            (spec(4, 1, 256), 512),
        ),
    ],
)
def test_attention_over_quantized_keys_and_values(where: AttentionSpec, block_size: int, dtype: torch.dtype) -> None:
    close_attention(Scene(where, MIXED, block_size, dtype, kernels=KERNELS, kv_dtype="int8"))


def test_attention_with_large_scores() -> None:
    """Nothing overflows, and where one key outweighs all others its value is the answer."""
    scene = Scene(AttentionSpec(2, 1, 16, 1000.0), [(200, 5)], 16, kernels=KERNELS)
    assert close_attention(scene).isfinite().all()


@settings(max_examples=examples(60, 20))
@given(
    st.lists(st.tuples(st.integers(0, 400), st.integers(1, 300)), min_size=1, max_size=6),
    st.none() | st.integers(1, 300),
)
def test_every_query_is_in_one_tile(extends: list[tuple[int, int]], window: int | None) -> None:
    starts, lens = (tuple(column) for column in zip(*extends, strict=True))
    covered: list[int] = []
    for tiles in plan_tiles(starts, lens, window):
        assert tiles.size <= TILE
        for b, begin, row in zip(tiles.sequences, tiles.starts, tiles.rows, strict=True):
            first_key = 0 if window is None else max(0, begin - window + 1)
            assert tiles.first_segment * SEGMENT <= first_key
            assert begin + tiles.size <= (tiles.last_segment + 1) * SEGMENT
            assert begin - starts[b] == row - sum(lens[:b])
            covered += range(row, row + tiles.size)
    assert sorted(covered) == list(range(sum(lens)))


# A row's bits are its own

MAX_ROWS = 70
rows_of = st.lists(st.integers(0, MAX_ROWS - 1), min_size=1, max_size=MAX_ROWS)
sizes = st.sampled_from([1, 2, 7, 16, 31, 32, 48, 65, 128, 200, 1000])
dtypes = st.sampled_from(FLOATS)


def check_rows(kernel: Callable[[Tensor], Tensor | tuple[Tensor, ...]], rows: list[int], size: int, dtype: Any) -> None:
    """The rows of a large batch, computed in a batch of these alone, have the same bits."""
    x = 3 * random(MAX_ROWS, size, dtype=dtype)
    whole, part = kernel(x), kernel(x[rows])
    for a, b in zip(*((y,) if isinstance(y, Tensor) else y for y in (whole, part)), strict=True):
        assert torch.equal(a[rows], b)


exact = settings(max_examples=examples(80, 50))


@exact
@given(rows_of, sizes, dtypes, st.booleans())
def test_rows_of_norms(rows: list[int], size: int, dtype: torch.dtype, unit_offset: bool) -> None:
    weight = random(size, dtype=dtype, seed=1)
    check_rows(lambda x: KERNELS.rms_norm(x, weight, 1e-6, unit_offset), rows, size, dtype)
    check_rows(lambda x: KERNELS.add_rms_norm(x, 2 * x, weight, 1e-6, unit_offset), rows, size, dtype)


@exact
@given(rows_of, st.sampled_from([(1, 16), (3, 18), (2, 128), (5, 6)]), dtypes)
def test_rows_of_head_norms_and_rope(rows: list[int], shape: tuple[int, int], dtype: torch.dtype) -> None:
    heads, size = shape
    weight = random(size, dtype=dtype, seed=1)
    angles = random(MAX_ROWS, size // 2, seed=2)
    x = random(MAX_ROWS, heads * size + 5, dtype=dtype)

    def kernel(rows: Sequence[int]) -> tuple[Tensor, ...]:
        wide = x[list(rows)]
        q = wide[:, 5:].view(len(rows), heads, size)
        k_cache, v_cache = (torch.zeros(len(rows), 1, heads, size, dtype=dtype) for _ in range(2))
        rotary = rotary_of(angles[list(rows)], HeadNorms(weight, weight, 1e-6))
        turned = KERNELS.rope_store_kv(q, q, q, rotary, k_cache, v_cache, torch.arange(len(rows)))
        return KERNELS.rms_norm(q, weight, 1e-6), turned, k_cache

    for a, b in zip(kernel(range(MAX_ROWS)), kernel(rows), strict=True):
        assert torch.equal(a[rows], b)


@exact
@given(rows_of, sizes, dtypes)
def test_rows_of_activations(rows: list[int], size: int, dtype: torch.dtype) -> None:
    for activation in GATES:

        def gate(x: Tensor, activation: GateActivation = activation) -> Tensor:
            return KERNELS.gated(x[:, :size], x[:, size:], activation)

        check_rows(gate, rows, 2 * size, dtype)
    check_rows(lambda x: 30 * torch.tanh(x / 30), rows, size, dtype)  # a soft cap on logits, as Gemma's


widths = st.sampled_from([4, 8, 16, 20, 32, 48, 72, 128, 200, 1000])
"""Whole multiples of 16 bytes: products with a few columns mind how rows are aligned."""


@exact
@given(rows_of, sizes.filter(lambda n: n > 1), widths, dtypes, st.booleans())
def test_rows_of_linear(rows: list[int], n: int, k: int, dtype: torch.dtype, bias: bool) -> None:
    packed = KERNELS.pack(random(n, k, dtype=dtype, seed=1), random(n, dtype=dtype, seed=2) if bias else None)
    check_rows(lambda x: KERNELS.linear(x, packed), rows, k, dtype)
    if n % 2 == 0:
        gated = KERNELS.pack_gated(random(n, k, dtype=dtype, seed=1))
        check_rows(lambda x: KERNELS.gated_linear(x, gated, "silu"), rows, k, dtype)


def test_libraries_whose_products_of_many_rows_differ_get_few_at_a_time() -> None:
    """As on some processors, where another number of rows is divided among threads in another way."""

    def linear(x: Tensor, weight: Tensor, *, most: int) -> Tensor:
        step = 1 if len(x) <= most else -1
        return torch.stack([reduce(torch.add, (x * row).unbind(1)[::step]) for row in weight], 1)

    for most, found in ((127, 16), (399, 16), (1000, None)):
        assert exact_rows(partial(linear, most=most), 3, 40, torch.float32, 1)[1] == found


@pairwise("shape dtype threads", [(3072, 256)], FLOATS, [2], slow=[[(1024, 1024), (1024, 3072), (640, 2048)], [], [1]])
def test_rows_of_linear_at_models_sizes(shape: tuple[int, int], dtype: torch.dtype, threads: int) -> None:
    n, k = shape
    torch.set_num_threads(threads)
    packed = KERNELS.pack(random(n, k, dtype=dtype, seed=1))
    x = random(300, k, dtype=dtype)
    whole = KERNELS.linear(x, packed)
    for rows in (1, 2, 3, 5, 8, 13, 16, 17, 33, 128):
        for first in (0, 7, 160):
            part = slice(first, first + rows)
            assert torch.equal(KERNELS.linear(x[part], packed), whole[part]), (rows, first)


specs = st.builds(
    spec,
    heads=st.sampled_from([2, 4, 6]),
    kv_heads=st.sampled_from([1, 2]),
    size=st.sampled_from([16, 18, 64, 128]),
    window=st.none() | st.sampled_from([1, 5, 40, 127, 128, 129, 200]),
    cap=st.none() | st.just(3.0),
    sinks=st.sampled_from([(), SINKS]),
)
company = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 40)), max_size=4)


@settings(max_examples=examples(70, 50))
@given(
    specs,
    st.integers(1, 300),
    st.lists(st.integers(1, 299), max_size=4),
    company,
    st.integers(0, 4),
    st.sampled_from([1, 16, 512]),
    dtypes,
    st.sampled_from(["auto", "int8"]),
)
def test_any_cut_and_any_company(
    spec: AttentionSpec,
    length: int,
    cuts: list[int],
    others: list[tuple[int, int]],
    place: int,
    block_size: int,
    dtype: torch.dtype,
    kv_dtype: KVDtype,
) -> None:
    """One sequence whole, alone and in one block; then in chunks, each among others and over small blocks."""
    whole = Scene(spec, [(0, length)], length, dtype, kernels=KERNELS, kv_dtype=kv_dtype)
    expected = whole.attend()
    bounds = sorted({0, length, *(cut for cut in cuts if cut < length)})
    for begin, end in itertools.pairwise(bounds):
        place = min(place, len(others))
        extends = [*others[:place], (begin, end - begin), *others[place:]]
        scene = Scene(spec, extends, block_size, dtype, seed=1, kernels=KERNELS, kv_dtype=kv_dtype)
        scene.q[place], scene.k[place], scene.v[place] = (
            whole.q[0][begin:end],
            whole.k[0][:end],
            whole.v[0][:end],
        )
        row = sum(n for _, n in others[:place])
        assert torch.equal(scene.attend()[row : row + end - begin], expected[begin:end])


GEMMA3, QWEN3 = spec(4, 1, 256, window=100), spec(16, 8, 128)


@pytest.mark.parametrize(
    ("wide", "kv_dtype", "dtype", "threads"),
    [
        (GEMMA3, "auto", torch.float32, 2),
        (GEMMA3, "int8", torch.bfloat16, 2),
        *slowly(
            (GEMMA3, "auto", torch.bfloat16, 1),
            (GEMMA3, "int8", torch.float32, 1),
            (QWEN3, "auto", torch.bfloat16, 2),
            (QWEN3, "int8", torch.float32, 2),
            (QWEN3, "auto", torch.float32, 1),
            (QWEN3, "int8", torch.bfloat16, 1),
        ),
    ],
)
def test_any_cut_at_a_models_size(wide: AttentionSpec, kv_dtype: KVDtype, dtype: torch.dtype, threads: int) -> None:
    torch.set_num_threads(threads)
    whole = Scene(wide, [(0, 150)], 150, dtype, kernels=KERNELS, kv_dtype=kv_dtype)
    expected = whole.attend()
    for begin, end, *others in ((0, 1), (140, 141, (20, 9)), (120, 150), (3, 131, (20, 9)), (128, 129, (20, 9))):
        scene = Scene(wide, [(begin, end - begin), *others], 16, dtype, seed=1, kernels=KERNELS, kv_dtype=kv_dtype)
        scene.q[0], scene.k[0], scene.v[0] = whole.q[0][begin:end], whole.k[0][:end], whole.v[0][:end]
        assert torch.equal(scene.attend()[: end - begin], expected[begin:end])
