"""Sampling against the tests' own computations in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import support
from tests.examples import examples

from infer.contracts.params import SamplingParams
from infer.contracts.request import Request
from infer.engine import sampler
from infer.engine.sampler import Drawing, score, uniform, words

MASK = 2**64 - 1


pytestmark = pytest.mark.usefixtures("each_provider")


def splitmix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


Row = tuple[Request, int]


def row(seed: int = 0, position: int = 0, **params: Any) -> Row:
    return Request((1,), SamplingParams(**params), seed=seed), position


def sample(logits_NV: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    draws = Drawing(torch.device("cpu"))([request for request, _ in rows], [position for _, position in rows])
    tokens: list[int] = support.KERNELS.sample(logits_NV, draws).tolist()
    return tokens


def test_parameters_whose_upload_failed_are_not_kept() -> None:
    drawing = Drawing(torch.device("cpu"))
    requests = {name: [row(seed, temperature=temperature)[0]] for name, seed, temperature in (("a", 1, 1), ("b", 2, 3))}

    def drawn(name: str, drawing: Drawing) -> tuple[float, float]:
        draws = drawing(requests[name], [5])
        return draws.temperature_N.item(), draws.uniform_N.item()

    drawn("a", drawing)
    with patch.object(sampler, "upload", side_effect=MemoryError), pytest.raises(MemoryError):
        drawn("b", drawing)
    for name in "ba":
        assert drawn(name, drawing) == drawn(name, Drawing(torch.device("cpu")))


def distribution(logits: np.ndarray[Any, Any], p: SamplingParams) -> np.ndarray[Any, Any]:
    """What the token is drawn from: temperature, top-k, top-p over what top-k left, min-p. Of equals, top-k keeps the
    first, and the others keep all."""
    x = np.exp((logits - logits.max()) / p.temperature)
    x /= x.sum()
    keep = np.ones(len(x), bool)
    if p.top_k > 0:
        keep[np.argsort(-logits, kind="stable")[p.top_k :]] = False
    if p.top_p < 1:
        left = np.sort(np.where(keep, x, 0))[::-1]
        before = np.cumsum(left) - left
        keep &= x >= left[(before < p.top_p * left.sum()).sum() - 1]
    keep &= x >= p.min_p * x.max()
    x = np.where(keep, x, 0)
    result: np.ndarray[Any, Any] = x / x.sum()
    return result


def test_uniform_is_splitmix64_of_seed_and_position() -> None:
    for seed, position in ((0, 0), (1, 0), (0, 1), (-5, 7), (2**63 - 1, 4096)):
        bits = splitmix((splitmix(seed & MASK) + position) & MASK)
        assert uniform(words([seed]), words([position]))[0] == (bits >> 11) / 2**53


def test_uniform_is_even_over_positions_and_over_seeds() -> None:
    n = 20_000
    for values in (uniform(words([3] * n), words(range(n))), uniform(words(range(n)), words([5] * n))):
        counts, _ = np.histogram(values, bins=20, range=(0, 1))
        assert ((counts - 1000) ** 2 / 1000).sum() < 50  # chi-square, 19 degrees of freedom: p = 1e-4


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0, "top_k": 5},
        {"top_p": 0.6},
        {"top_k": 6, "top_p": 0.8},
        {"min_p": 0.2},
        {"temperature": 1.7, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
@pytest.mark.parametrize(("size", "count"), [(30, 3000), (40_000, 60)])
def test_tokens_follow_the_filtered_distribution(params: dict[str, Any], size: int, count: int) -> None:
    """Exactly: each token is where the inverse of float64's cumulative distribution says, in vocabulary order."""
    generator = np.random.default_rng(0)
    logits = (generator.normal(size=size) * 2).round(1)  # rounding makes ties
    p = distribution(logits, SamplingParams(**params))
    batch = torch.tensor(logits, dtype=torch.float32).expand(count, -1)
    tokens = sample(batch, [row(9, i, **params) for i in range(count)])
    cumulative = np.cumsum(p)
    u = uniform(words([9] * count), words(range(count)))
    clear = np.abs(cumulative[:, None] - u).min(axis=0) > 1e-5 * 30 / size
    assert clear.mean() > 0.9
    expected = np.searchsorted(cumulative, u, side="right")
    assert (np.array(tokens)[clear] == expected[clear]).all()
    counts = np.bincount(np.array(tokens, dtype=int), minlength=size)
    assert (counts[p == 0] == 0).all()
    kept = p * count > 1
    chi = ((counts[kept] - count * p[kept]) ** 2 / (count * p[kept])).sum()
    assert chi < kept.sum() + 6 * np.sqrt(2 * kept.sum())


def test_top_k_keeps_tokens_that_are_far_less_likely_than_the_first() -> None:
    logits = torch.full((4000, 300), -7.0)
    logits[:, 200], logits[:, 7] = 0.0, -6.0  # the second is drawn once in 400 times
    assert set(sample(logits, [row(i, top_k=2) for i in range(4000)])) == {7, 200}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tied", [-2.0, 3.0])
@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_k": 4}, {"top_k": 4, "top_p": 0.999}], ids=str)
def test_of_equals_top_k_keeps_the_first(params: dict[str, Any], tied: float, dtype: torch.dtype) -> None:
    logits = torch.full((200, 9000), -9.0)
    equals = [3, 4097, 4098, 7000, 8999]
    logits[:, equals] = tied
    drawn = sample(logits.to(dtype), [row(i, **params) for i in range(200)])
    assert set(drawn) == set(equals[: params["top_k"]])


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0], [2.0, 1.0, 2.0]])
    assert sample(logits, [row(temperature=0)] * 2) == [1, 0]
    assert sample(logits.bfloat16(), [row(temperature=0)] * 2) == [1, 0]


def test_greedy_rows_beside_others_take_the_top() -> None:
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(1))
    tokens = sample(logits, [row(i, temperature=i % 2) for i in range(64)])
    assert tokens[::2] == logits[::2].argmax(-1).tolist()


kinds = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0, 1e-6, 0.7, 1.0, 50.0]),
        "top_k": st.sampled_from([0, 1, 3, 1000]),
        "top_p": st.sampled_from([1e-6, 0.5, 0.95, 1.0]),
        "min_p": st.sampled_from([0.0, 0.1, 1.0]),
    }
)


@settings(max_examples=examples(60, 30))
@given(
    st.lists(kinds, min_size=1, max_size=6),
    st.permutations(range(6)),
    st.sampled_from([1, 7, 300, 50_000]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_row_does_not_mind_its_company(
    many: list[dict[str, Any]], order: list[int], vocab: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(len(many))
    logits = (torch.randn(len(many), vocab, generator=generator) * 3).to(dtype)
    rows = [row(i, 10 + i, **params) for i, params in enumerate(many)]
    together = sample(logits, rows)
    for i in range(len(rows)):
        assert sample(logits[i : i + 1], [rows[i]]) == [together[i]]
    shuffled = [i for i in order if i < len(rows)]
    assert sample(logits[shuffled], [rows[i] for i in shuffled]) == [together[i] for i in shuffled]


def test_rows_that_are_not_finite_fail_alone() -> None:
    logits = torch.randn(4, 9)
    rows = [row(i, temperature=t, top_k=3) for i, t in enumerate((1.0, 1.0, 0, 1.0))]
    expected = sample(logits, rows)
    logits[1, 4], logits[2, 0] = float("nan"), float("inf")
    assert sample(logits, rows) == [expected[0], -1, -1, expected[3]]


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((500, 8), float("-inf"))
    logits[:, 5] = 0.0
    assert set(sample(logits, [row(i, temperature=100) for i in range(500)])) == {5}


def test_logprobs_ranks_and_likeliest_against_float64() -> None:
    logits = torch.randn(3, 40)
    reference = logits.double().log_softmax(-1)
    found = score(logits, torch.tensor([4, 0, 39]), [3, None, 0]).read()
    assert found[1] is None
    for i, token, count in ((0, 4, 3), (2, 39, 0)):
        entry = found[i]
        assert entry is not None
        assert entry.logprob == pytest.approx(reference[i, token].item(), abs=1e-5)
        assert entry.rank == int((reference[i] > reference[i, token]).sum()) + 1
        assert [t for t, _ in entry.top] == reference[i].topk(count).indices.tolist()


def test_tied_logprobs_do_not_depend_on_what_others_ask() -> None:
    logits = torch.zeros(2, 1000)
    assert score(logits[:1], torch.tensor([0]), [2]).read()[0] == score(logits, torch.tensor([0, 0]), [2, 20]).read()[0]


def test_drawing_follows_who_draws_and_where() -> None:
    drawing = Drawing(torch.device("cpu"))
    one, other, greedy = (row(i, temperature=t)[0] for i, t in enumerate((0.5, 2.0, 0)))
    for requests, positions in (
        ([one, other], [3, 4]),
        ([one, other], [4, 5]),
        ([other, one], [4, 5]),
        ([other], [6]),
        ([greedy, other], [6, 7]),
        ([greedy], [9]),
    ):
        draws = drawing(requests, positions)
        assert draws.temperature_N.tolist() == [request.params.temperature for request in requests]
        assert draws.greedy == (requests == [greedy])
        if not draws.greedy:
            expected = uniform(words([request.seed for request in requests]), words(positions))
            assert draws.uniform_N.tolist() == expected.tolist()
