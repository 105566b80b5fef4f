"""Mixtures of experts: every provider for the CPU against float64, and every token by itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.attention import random
from tests.examples import examples, slowly
from tests.experts import FORMS, Mixture, check_rows, route64
from tests.products import near

from infer.contracts.kernels import ExpertActivation, Routing
from infer.kernels.reference import ReferenceKernels
from infer_kernels_cpu import native
from infer_kernels_cpu.provider import CpuKernels

KERNELS = ReferenceKernels()
"""The provider that is being tested."""
floats = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


LEVELS = native.levels()
MIDDLE = [pytest.param(level, marks=pytest.mark.slow) for level in LEVELS[1:-1]]


@pytest.fixture(autouse=True, scope="module", params=[*slowly("reference", *LEVELS[:1]), *MIDDLE, *LEVELS[1:][-1:]])
def provider(request: pytest.FixtureRequest) -> None:
    global KERNELS
    KERNELS = ReferenceKernels() if request.param == "reference" else CpuKernels(request.param)


@given(
    st.builds(
        Routing, st.integers(1, 6), st.sampled_from(["softmax", "sigmoid"]), st.booleans(), st.sampled_from([1.0, 2.5])
    ),
    st.integers(6, 40),
    st.integers(0, 20),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=examples(10, 4))
def test_routes(routing: Routing, experts: int, tokens: int, biased: bool, dtype: torch.dtype) -> None:
    """In bfloat16, many of the logits are equal."""
    logits = (random(tokens, experts, dtype=dtype) * 2).round(decimals=1)
    bias = random(experts, seed=1) if biased and routing.score == "sigmoid" else None
    found, shares = KERNELS.route(logits, routing, bias)
    assert (found.dtype, shares.dtype) == (torch.int32, torch.float32)
    assert found.shape == shares.shape == (tokens, routing.top)
    if tokens:
        expected, weights = route64(logits, routing, bias)
        assert found.tolist() == expected
        torch.testing.assert_close(shares, weights.float(), rtol=1e-5, atol=1e-7)


def test_of_equal_scores_the_lower_index_comes_first() -> None:
    logits = torch.tensor([[1.0, 3, 3, 1, 3, 1], [0, 0, 0, 0, 0, 0], [-1, -1, -1, -1, -1, 5]])
    for score in ("softmax", "sigmoid"):
        found, _ = KERNELS.route(logits, Routing(4, score))
        assert found.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3], [5, 0, 1, 2]]


def test_logits_that_are_not_finite_spoil_their_row_only() -> None:
    logits = random(3, 8)
    good, weights = KERNELS.route(logits, Routing(2))
    logits[1] = torch.nan
    found, shares = KERNELS.route(logits, Routing(2))
    assert shares[1].isnan().all()
    assert ((found >= 0) & (found < 8)).all()
    assert torch.equal(found[[0, 2]], good[[0, 2]])
    assert torch.equal(shares[[0, 2]], weights[[0, 2]])


@floats
@pytest.mark.parametrize("activation", ["silu", "clamped_swiglu", "relu2"])
@pytest.mark.parametrize("form", FORMS)
def test_sums_of_experts(form: str, activation: ExpertActivation, dtype: torch.dtype) -> None:
    int8, gated = activation != "clamped_swiglu", activation != "relu2"
    mixture = Mixture(64, 40 if form in ("plain", "biases") else 32, 5, form, dtype, int8, gated=gated)
    packed = mixture.pack(KERNELS)
    for tokens, top in ((0, 2), (1, 5), (7, 2), (30, 3)):
        x, (experts, shares) = 2 * random(tokens, 64, dtype=dtype), mixture.choose(tokens, top)
        found = KERNELS.gated_experts(x, experts, shares, packed, activation)
        assert found.shape == x.shape
        assert near(found, mixture.expected(x, experts, shares, activation))


def test_odd_sizes() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        mixture = Mixture(17, 5, 3, dtype=dtype)
        x, (experts, shares) = random(9, 17, dtype=dtype), mixture.choose(9, 2)
        found = KERNELS.gated_experts(x, experts, shares, mixture.pack(KERNELS), "silu")
        assert near(found, mixture.expected(x, experts, shares, "silu"))


PARTS = [[0], [129], [3, 140], [5, 5, 5], list(range(20)), list(range(149, 60, -1)), list(range(150))]


@floats
@pytest.mark.parametrize("form", FORMS)
def test_a_token_has_the_same_bits_in_any_company(form: str, dtype: torch.dtype) -> None:
    """The most popular expert has more rows than a tile, and others have none."""
    check_rows(KERNELS, Mixture(64, 64, 12, form, dtype), 150, 3, PARTS)
    check_rows(KERNELS, Mixture(64, 32, 12, form, dtype, gated=False), 150, 3, PARTS)


@pytest.mark.parametrize("form", ["plain", "int4"])
def test_a_token_has_the_same_bits_on_two_threads(form: str) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        check_rows(KERNELS, Mixture(64, 64, 12, form, torch.bfloat16), 150, 3, PARTS)
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
@given(st.lists(st.integers(0, 199), min_size=1, max_size=60), st.sampled_from(FORMS), st.integers(1, 4))
@settings(max_examples=examples(60, 20))
def test_any_company(rows: list[int], form: str, top: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        check_rows(KERNELS, Mixture(96, 32, 9, form, dtype), 200, top, [rows])


def test_a_popular_expert_is_divided() -> None:
    """All tokens choose the same two experts, more than one task takes."""
    mixture, x = Mixture(32, 32, 4, dtype=torch.bfloat16), random(900, 32, dtype=torch.bfloat16)
    experts, shares = torch.tensor([[2, 0]], dtype=torch.int32).repeat(900, 1), torch.full((900, 2), 0.5)
    packed = mixture.pack(KERNELS)
    whole = KERNELS.gated_experts(x, experts, shares, packed, "silu")
    for row in (0, 383, 384, 385, 899):
        alone = KERNELS.gated_experts(x[row : row + 1], experts[:1], shares[:1], packed, "silu")
        assert torch.equal(alone[0], whole[row])


@pytest.mark.parametrize("activation", ["silu", "relu2"])
def test_rows_that_are_not_finite_stay_alone(activation: ExpertActivation) -> None:
    mixture, x = Mixture(32, 32, 4, gated=activation != "relu2"), random(6, 32)
    experts, shares = mixture.choose(6, 2)
    packed = mixture.pack(KERNELS)
    before = KERNELS.gated_experts(x, experts, shares, packed, activation)
    x[2] = torch.nan
    shares[4] = torch.nan
    after = KERNELS.gated_experts(x, experts, shares, packed, activation)
    assert after[[2, 4]].isnan().all()
    assert torch.equal(after[[0, 1, 3, 5]], before[[0, 1, 3, 5]])
