"""Sampling without sorting draws the same tokens as the reference, whose sums run in another order."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.attention import random
from tests.examples import examples, slowly

from infer.contracts.kernels import Draws
from infer.contracts.params import SamplingParams
from infer.contracts.request import Request
from infer.engine.sampler import Drawing
from infer.kernels.reference import ReferenceKernels
from infer_kernels_triton import sampling
from infer_kernels_triton.provider import TritonKernels

REFERENCE = ReferenceKernels()
INF = float("inf")


@pytest.fixture
def kernels(device: str) -> TritonKernels:
    return TritonKernels(torch.device(device))


@pytest.fixture
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that few tokens are many programs' and several blocks."""
    monkeypatch.setattr(sampling, "SPAN", 32)
    monkeypatch.setattr(sampling, "BLOCK", 8)


def ask(device: str, *params: dict[str, Any], seed: int = 0) -> Draws:
    requests = [Request((1,), SamplingParams(**p), seed=seed + i) for i, p in enumerate(params)]
    return Drawing(torch.device(device))(requests, [5] * len(requests))


ALL: dict[str, Any] = {"top_k": 20, "top_p": 0.95, "min_p": 0.02}
FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 100_000},
    {"top_p": 0.7},
    {"top_p": 0.01},
    {"min_p": 0.1},
    ALL,
]


@pytest.mark.parametrize(
    ("filters", "vocab", "dtype"),
    [
        *((filters, 1000, torch.bfloat16) for filters in FILTERS),
        *slowly(
            *((filters, 7, torch.bfloat16) for filters in ({"top_k": 7}, {"top_p": 0.7}, ALL)),
            *((filters, 1, torch.bfloat16) for filters in ({"top_k": 1}, ALL)),
            *((filters, 9000, torch.bfloat16) for filters in ({}, {"top_k": 40}, ALL)),
            *((filters, 1000, dtype) for filters in ({"top_p": 0.7}, ALL) for dtype in (torch.float32, torch.float16)),
        ),
    ],
    ids=str,
)
def test_draws_as_the_reference_does(
    kernels: TritonKernels, device: str, filters: dict[str, Any], vocab: int, dtype: torch.dtype
) -> None:
    """Each filter with one vocabulary; those of no more tokens than a filter keeps, of several spans, and of dtypes
    that take more rounds with those that differ there."""
    logits = (random(4, vocab, dtype=dtype) * 3).to(device)
    params = [{"temperature": t, **filters} for t in (0.0, 0.7, 1.0, 2.5)]
    asked = ask(device, *params)
    found = kernels.sample(logits, asked)
    assert found.tolist() == REFERENCE.sample(logits, asked).tolist()
    row = 2
    one = {f.name: getattr(asked, f.name)[row : row + 1] for f in fields(asked) if f.name.endswith("_N")}
    alone = replace(asked, **one)
    assert kernels.sample(logits[row : row + 1], alone).item() == found[row].item()


def test_greedy_takes_the_first_of_the_likeliest(kernels: TritonKernels, device: str) -> None:
    logits = torch.zeros(3, 9000)
    logits[0, [8000, 20, 5000]] = 2.0
    logits[1] = -3.0
    logits[2, 8999] = 1e-30
    found = kernels.sample(logits.to(device), ask(device, *[{"temperature": 0}] * 3))
    assert found.tolist() == [20, 0, 8999]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_finite(kernels: TritonKernels, device: str, temperature: float) -> None:
    logits = random(6, 5000)
    logits[0, 4990] = float("nan")
    logits[1] = float("nan")
    logits[2, 3] = INF
    logits[3] = -INF
    logits[4, 1:] = -INF
    found = kernels.sample(logits.to(device), ask(device, *[{"temperature": temperature}] * 6)).tolist()
    assert found[:5] == [-1, -1, -1, -1, 0]
    assert found[5] >= 0


def spread(asked: Draws) -> Draws:
    """With random numbers at even distances, in the middle of each n-th part."""
    n = len(asked.uniform_N)
    uniform_N = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    return replace(asked, uniform_N=uniform_N.to(asked.uniform_N.device))


@pytest.mark.parametrize(
    ("filters", "drawn"),
    [({"top_k": 2}, [3, 20, 20]), ({"top_p": 0.5}, [3, 20, 41]), ({"min_p": 1.0}, [3, 20, 41])],
    ids=str,
)
@pytest.mark.usefixtures("short_spans")
def test_ties_stay_together_but_for_top_k(
    kernels: TritonKernels, device: str, filters: dict[str, Any], drawn: list[int]
) -> None:
    """Of three equal tokens, a negative zero among them, a top-k of 2 keeps the first two."""
    logits = torch.full((3, 50), -8.0)
    logits[:, [3, 20, 41]] = 0.0
    logits[:, 20] = -0.0
    asked = spread(ask(device, *[{"temperature": 1.0, **filters}] * 3))
    assert kernels.sample(logits.to(device), asked).tolist() == drawn


class Counted:
    """A kernel whose launches are counted."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.launches = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.launches += 1
        return self.kernel[grid]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)


@pytest.mark.parametrize(
    ("filters", "rounds"),
    [({}, 0), ({"min_p": 0.1}, 0), ({"top_k": 9}, 4 + 1), ({"top_p": 0.7}, 4), ({"top_k": 9, "top_p": 0.7}, 4 + 4)],
    ids=str,
)
def test_filters_that_no_row_asks_for_launch_nothing(
    kernels: TritonKernels, device: str, filters: dict[str, Any], rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do those of rows that take the likeliest token. The token is the same with all rounds."""
    logits = (random(2, 300, dtype=torch.bfloat16) * 2).to(device)
    draw, greedy = {"temperature": 1.0, **filters}, {"temperature": 0, "top_k": 9, "top_p": 0.7}
    for rows, expected in ((draw, greedy), (1, rounds, 1, 1)), ((greedy, greedy), (1, 0, 0, 1)):
        counted = [Counted(getattr(sampling, f"{name}_kernel")) for name in ("tops", "narrow", "masses", "draw")]
        asked = ask(device, *rows)
        with monkeypatch.context() as patch:
            for kernel, name in zip(counted, ("tops", "narrow", "masses", "draw"), strict=True):
                patch.setattr(sampling, f"{name}_kernel", kernel)
            found = kernels.sample(logits, asked)
        assert tuple(kernel.launches for kernel in counted) == expected
        every = replace(asked, top_k=True, top_p=True)
        assert torch.equal(found, kernels.sample(logits, every))


@pytest.mark.slow
def test_a_tiny_temperature_is_greedy(kernels: TritonKernels, device: str) -> None:
    logits = random(6, 3000) * 50
    asked = ask(device, *[{"temperature": 1e-6, "top_p": 0.9}] * 6)
    assert kernels.sample(logits.to(device), asked).tolist() == logits.argmax(-1).tolist()


def test_the_whole_range_of_random_numbers_lands_on_likely_tokens(kernels: TritonKernels, device: str) -> None:
    logits = torch.full((2, 5000), -INF)
    logits[:, [7, 4321]] = 0.0
    asked = ask(device, *[{"temperature": 1.0}] * 2)
    ends = replace(asked, uniform_N=torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64, device=device))
    assert kernels.sample(logits.to(device), ends).tolist() == [7, 4321]


@pytest.mark.slow
def test_frequencies(kernels: TritonKernels, device: str) -> None:
    """Against float64: even random numbers give every token its share to within one."""
    logits = random(1, 40, dtype=torch.bfloat16, seed=4)
    n = 40
    asked = spread(ask(device, *[{"temperature": 0.8, "top_k": 12}] * n))
    found = np.bincount(kernels.sample(logits.repeat(n, 1).to(device), asked).cpu().numpy(), minlength=40)
    weights = np.exp(logits[0].double().numpy() / 0.8)
    weights[weights < np.sort(weights)[-12]] = 0
    assert (np.abs(found - n * weights / weights.sum()) <= 1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slowly(torch.float16)], ids=["bf16", "fp16"])
def test_neither_spans_nor_the_dtype_change_a_draw(
    kernels: TritonKernels, device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With filters, and for random numbers so near the border between two tokens that other sums would show."""
    logits = (random(1, 40) * 2).to(dtype)
    logits[0, 20:] = logits[0, :20]  # ties, in other spans
    weights = torch.exp((logits.float() - logits.float().amax()) / 0.9).double()
    near = (weights.cumsum(1) / weights.sum())[0, 25] + torch.linspace(-3e-7, 3e-7, 16, dtype=torch.float64)
    border = replace(ask(device, *[{"temperature": 0.9}] * len(near)), uniform_N=near.to(device))
    filtered = spread(ask(device, *[{"temperature": 0.9, "top_k": 31, "top_p": 0.9}]))

    def draw(dtype: torch.dtype) -> list[int]:
        rows = (logits.repeat(len(asked.uniform_N), 1).to(device, dtype) for asked in (border, filtered))
        return [*map(int, torch.cat([kernels.sample(*given) for given in zip(rows, (border, filtered), strict=True)]))]

    expected = draw(dtype)
    assert len({*expected[: len(near)]}) == 2
    assert draw(torch.float32) == expected
    monkeypatch.setattr(sampling, "SPAN", 16)
    monkeypatch.setattr(sampling, "BLOCK", 8)
    assert draw(dtype) == expected


def test_of_many_ties_top_k_keeps_the_first(kernels: TritonKernels, device: str, short_spans: None) -> None:
    """All of the first span, some of the second and none of the third, beside a likelier one."""
    logits = torch.full((2, 70), -3.0, dtype=torch.bfloat16)
    logits[:, 13::2] = 1.0
    logits[:, 1] = 1.5
    asked = ask(device, *[{"temperature": 1.0, "top_k": 13}] * 2)
    asked = replace(asked, uniform_N=torch.tensor([0.5, 1 - 2.0**-53], dtype=torch.float64, device=device))
    found = kernels.sample(logits.to(device), asked).tolist()
    assert found == [23, 35] == REFERENCE.sample(logits.to(device), asked).tolist()


@pytest.mark.slow
@pytest.mark.usefixtures("short_spans")
@settings(max_examples=examples(18, 6), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    vocab=st.integers(1, 60),
    seed=st.integers(0, 1000),
    filters=st.fixed_dictionaries(
        {},
        optional={
            "top_k": st.integers(1, 70),
            "top_p": st.floats(0.05, 1.0),
            "min_p": st.floats(0.0, 1.0),
        },
    ),
    heat=st.floats(0.05, 20),
)
def test_any_filter(device: str, vocab: int, seed: int, filters: dict[str, Any], heat: float) -> None:
    logits = (random(4, vocab, seed=seed) * 4).round(decimals=1).to(device)
    asked = ask(device, *[{"temperature": heat, **filters}] * 4, seed=seed)
    found = TritonKernels(torch.device(device)).sample(logits, asked)
    assert found.tolist() == REFERENCE.sample(logits, asked).tolist()


@pytest.mark.slow
def test_a_filtered_token_is_never_drawn(kernels: TritonKernels, device: str) -> None:
    """Not even where weights, added up in float32, are less or more than in float64: to 1, 3e-8 adds nothing, and 7e-8
    too much."""
    block, kept = 4096, torch.arange(2 * 4096) < 4096
    kept[-1] = True
    level = torch.tensor([[-17.3], [-16.47]])
    logits = torch.where(kept, level, -19.5)  # the rest is filtered: below a min-p of 1e-8
    logits[:, 0] = 0.0
    weights = torch.exp(logits).double().where(kept, 0.0)
    ends = weights[:, :block].sum(1) / weights.sum(1)
    near = (ends[:, None] + torch.linspace(-2e-6, 2e-6, 64, dtype=torch.float64)).clamp(max=1 - 2**-53)
    asked = ask(device, *[{"temperature": 1.0, "min_p": 1e-8}] * near.numel())
    asked = replace(asked, uniform_N=near.flatten().to(device))
    found = kernels.sample(logits.repeat_interleave(64, 0).to(device), asked)
    assert kept[found.cpu()].all(), found
