"""Sampling."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infer.contracts.kernels import Draws
from infer_testing.kernels.provider import Provider, check
from infer_testing.suite import Violation


@check("sample draws by the inverse of the cumulative distribution, in vocabulary order, of what the filters keep", 16)
def sample(p: Provider, draw: random.Random) -> None:
    rows, vocab = draw.choice([1, 6, 33]), draw.choice([5, 300, 5000])
    logits = (2 * p.tensor(rows, vocab, draw=draw)).mul(10).round().div(10)  # rounding makes ties
    draws = random_draws(p, rows, draw)
    found = p.kernels.sample(logits, draws).tolist()
    for row in range(rows):
        one = [x[row].item() for x in (draws.temperature_N, draws.top_k_N, draws.top_p_N, draws.min_p_N)]
        said = f"with temperature {one[0]:.3g}, top_k {one[1]}, top_p {one[2]:.3g}, min_p {one[3]:.3g}"
        values = logits[row].cpu().double().numpy()
        if one[0] == 0:
            if found[row] != int(values.argmax()):
                raise Violation(f"sample takes token {found[row]} in row {row}, {said}; {values.argmax()} is likeliest")
            continue
        mass = kept_mass(values, *one)
        if not 0 <= found[row] < vocab:
            raise Violation(f"sample gives token {found[row]} in row {row}, {said}; there are {vocab}")
        if mass[found[row]] == 0:
            raise Violation(f"sample draws token {found[row]} in row {row}, {said}, which the filters drop")
        cumulative, u = np.cumsum(mass) / mass.sum(), float(draws.uniform_N[row])
        if np.abs(cumulative - u).min() > 1e-5:  # rounding may move an edge
            right = int(np.searchsorted(cumulative, u, side="right"))
            if found[row] != right:
                raise Violation(f"sample draws token {found[row]} in row {row}, {said}, by {u:.6f}; {right} is right")
    logits[0, 0] = torch.nan
    if int(p.kernels.sample(logits, draws)[0]) != -1:
        raise Violation("sample gives a token for a row of logits with a NaN; it has to give -1")


def random_draws(p: Provider, rows: int, draw: random.Random) -> Draws:
    def column(dtype: torch.dtype, *values: float) -> Tensor:
        return torch.tensor([draw.choice(values) for _ in range(rows)], dtype=dtype, device=p.device)

    temperature, top_k = column(torch.float32, 0, 0.5, 1, 3), column(torch.int64, 0, 0, 1, 3, 9)
    top_p, min_p = column(torch.float32, 1, 1, 0.3, 0.9), column(torch.float32, 0, 0, 0.1)
    uniform = torch.tensor([draw.random() for _ in range(rows)], dtype=torch.float64, device=p.device)
    return asked(temperature, top_k, top_p, min_p, uniform)


def asked(temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Draws:
    """Draws of these columns."""
    draws = temperature > 0
    flags = (bool(any_N.any()) for any_N in (draws & (top_k > 0), draws & (top_p < 1)))
    return Draws(temperature, top_k, top_p, min_p, uniform, not bool(draws.any()), *flags)


def kept_mass(
    logits: np.ndarray[Any, Any], temperature: float, top_k: float, top_p: float, min_p: float
) -> np.ndarray[Any, Any]:
    """What the token is drawn from, in float64: temperature, top-k, top-p over what top-k left, min-p. Top-k keeps
    the first of equals; the others keep all of them."""
    x: np.ndarray[Any, Any] = np.exp((logits - logits.max()) / temperature)
    x /= x.sum()
    keep = np.ones(len(x), bool)
    if top_k > 0:
        keep[np.argsort(-logits, kind="stable")[int(top_k) :]] = False
    if top_p < 1:
        left = np.sort(np.where(keep, x, 0))[::-1]
        before = np.cumsum(left) - left
        keep &= x >= left[(before < np.float32(top_p) * left.sum()).sum() - 1] * (1 - 1e-9)
    keep &= x >= np.float32(min_p) * x.max()
    return np.where(keep, x, 0)
