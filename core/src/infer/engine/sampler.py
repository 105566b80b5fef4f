"""The parameters and random numbers that tokens are drawn with, and the tokens' log-probabilities. A row's token
depends only on its logits, parameters, seed and position. The drawing itself is a kernel.

Shapes: N sampled rows, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from infer.contracts.kernels import Draws
from infer.contracts.request import Request, TokenLogprobs
from infer.device import download, upload

Words = np.ndarray[tuple[int], np.dtype[np.uint64]]
Wanted = int | tuple[int, ...] | None
"""Which log-probabilities a request wants: those of so many likeliest tokens, those of these tokens, or none (None)."""


class Drawing:
    """The requests' sampling parameters as tensors on ``device``. As long as the same requests draw, pass after pass,
    only the random numbers are new."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._requests: list[Request] = []
        self._draws: Draws
        self._seed_N: Words
        self.wanted: list[Wanted] = []
        """Which log-probabilities each request wants."""
        self.scored = False
        """Whether any request wants log-probabilities."""

    def __call__(
        self, requests: list[Request], positions: Sequence[int] | np.ndarray[tuple[int], np.dtype[np.int64]]
    ) -> Draws:
        """What to draw the requests' next tokens with. ``positions`` are these tokens' indices in their sequences."""
        if requests != self._requests:
            params = [request.params for request in requests]
            # What may raise goes first: nothing of these requests is kept then, or all of it.
            seed_N, draws = words([request.seed for request in requests]), make_draws(params, self._device)
            self._requests, self._seed_N, self._draws = requests, seed_N, draws
            self.wanted = [p.logprobs if p.logprob_token_ids is None else p.logprob_token_ids for p in params]
            self.scored = any(wanted is not None for wanted in self.wanted)
        if self._draws.greedy:
            return self._draws
        return replace(
            self._draws, uniform_N=upload(uniform(self._seed_N, np.asarray(positions).astype(np.uint64)), self._device)
        )


class DrawParams(Protocol):
    """What a token is drawn with, but for the random number."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...


def make_draws(params: Sequence[DrawParams], device: torch.device, uniform: Sequence[float] | None = None) -> Draws:
    """What to draw a token of each row with; ``uniform`` are the random numbers, zeros if they come later."""

    def column(values: Sequence[float], dtype: type = np.float32) -> Tensor:
        return upload(np.array(values, dtype=dtype), device)

    return Draws(
        temperature_N=column([p.temperature for p in params]),
        top_k_N=column([max(p.top_k, 0) for p in params], np.int64),
        top_p_N=column([p.top_p for p in params]),
        min_p_N=column([p.min_p for p in params]),
        uniform_N=column([0.0] * len(params) if uniform is None else uniform, np.float64),
        greedy=all(p.temperature == 0 for p in params),
        top_k=any(p.temperature > 0 and p.top_k > 0 for p in params),
        top_p=any(p.temperature > 0 and p.top_p < 1 for p in params),
    )


def words(values: Sequence[int]) -> Words:
    """Integers modulo 2^64."""
    return np.array([value & (2**64 - 1) for value in values], dtype=np.uint64)


def uniform(seed_N: Words, position_N: Words) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """One random number in [0, 1) per (seed, position), by two rounds of SplitMix64 (Steele, Lea and Flood, 2014)."""
    with np.errstate(over="ignore"):
        bits_N = _mix(_mix(seed_N) + position_N)
    return (bits_N >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: Words) -> Words:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities on their way to the host."""

    num_rows: int
    _groups: list[tuple[list[int], Tensor, Tensor, Tensor, Tensor, Tensor]]
    """Per group of rows that want the same alternatives: (rows, token_M, chosen_M, rank_M, ids_MC, values_MC)."""

    def read(self) -> list[TokenLogprobs | None]:
        """One entry per row; None for rows that want no log-probabilities. Call it once the copies have arrived."""
        result: list[TokenLogprobs | None] = [None] * self.num_rows
        for rows, *tensors in self._groups:
            columns = zip(rows, *(tensor.tolist() for tensor in tensors), strict=True)
            for row, token, logprob, rank, ids, values in columns:
                result[row] = TokenLogprobs(token, logprob, rank, tuple(zip(ids, values, strict=True)))
        return result


def score(logits_NV: Tensor, token_N: Tensor, wanted: Sequence[Wanted]) -> Scores:
    """Log-probabilities, before temperature and filters, of the tokens ``token_N`` and of the alternatives that each
    row wants. Starts copying them to the host."""
    groups = []
    for each in {w for w in wanted if w is not None}:
        # Each count is computed by itself, since which of two tied tokens ``topk`` lists may depend on the count.
        rows = [i for i, w in enumerate(wanted) if w == each]
        rows_M = upload(np.array(rows), logits_NV.device)
        logprob_MV = torch.log_softmax(logits_NV[rows_M].float(), dim=-1)
        token_M = token_N[rows_M]
        chosen_M1 = logprob_MV.gather(1, token_M[:, None])
        rank_M = (logprob_MV > chosen_M1).sum(dim=-1) + 1
        if isinstance(each, tuple):
            ids_MC = upload(np.array(each), logits_NV.device).expand(len(rows), -1)
            values_MC = logprob_MV.gather(1, ids_MC)
        else:
            values_MC, ids_MC = logprob_MV.topk(min(each, logprob_MV.shape[1]), dim=-1)
        tensors = (token_M, chosen_M1[:, 0], rank_M, ids_MC, values_MC)
        groups.append((rows, *(download(tensor) for tensor in tensors)))
    return Scores(len(wanted), groups)  # type: ignore[arg-type]
