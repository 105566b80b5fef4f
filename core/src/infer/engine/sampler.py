"""What a row is drawn with, and how likely tokens were. Every row's outcome depends on its logits, its parameters, its
seed and its position alone; the drawing itself is a kernel.

Shapes: N sampled rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from infer.protocols import Draws
from infer.request import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Row:
    """What one sampled row needs besides its logits."""

    params: SamplingParams
    seed: int
    position: int
    """Index in the sequence of the token to be drawn."""


def draws(rows: Sequence[Row], device: torch.device) -> Draws:
    """The rows' parameters as tensors on ``device``."""
    params = [row.params for row in rows]
    uniform_N = torch.from_numpy(uniform([row.seed for row in rows], [row.position for row in rows]))

    def column(values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

    return Draws(
        temperature_N=column([p.temperature for p in params]),
        top_k_N=column([max(p.top_k, 0) for p in params], torch.int64),
        top_p_N=column([p.top_p for p in params]),
        min_p_N=column([p.min_p for p in params]),
        uniform_N=uniform_N.to(device, non_blocking=True),
        greedy=all(p.temperature == 0 for p in params),
        ranked=any(p.temperature > 0 and (p.top_k > 0 or p.top_p < 1) for p in params),
    )


def uniform(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """One number in [0, 1) per (seed, position): two rounds of SplitMix64 (Steele, Lea and Flood, 2014)."""
    seed_N = np.array([s & (2**64 - 1) for s in seeds], dtype=np.uint64)
    position_N = np.array(positions, dtype=np.uint64)
    with np.errstate(over="ignore"):
        bits_N = _mix(_mix(seed_N) + position_N)
    return (bits_N >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def logprobs(logits_NV: Tensor, token_ids: Sequence[int], counts: Sequence[int | None]) -> list[TokenLogprobs | None]:
    """Log-probabilities of the given tokens and the ``counts[i]`` likeliest of each row, before temperature and
    filters; None where ``counts`` says None."""
    result: list[TokenLogprobs | None] = [None] * len(counts)
    for count in {c for c in counts if c is not None}:
        # Rows of one count go together: which of two tied tokens is listed may depend on how many are asked for.
        wanted = [i for i, c in enumerate(counts) if c == count]
        logprob_MV = torch.log_softmax(logits_NV[wanted].float(), dim=-1)
        token_M1 = torch.tensor([token_ids[i] for i in wanted], device=logits_NV.device)[:, None]
        chosen_M1 = logprob_MV.gather(1, token_M1)
        ranks = ((logprob_MV > chosen_M1).sum(dim=-1) + 1).tolist()
        top = logprob_MV.topk(min(count, logprob_MV.shape[1]), dim=-1)
        columns = zip(wanted, chosen_M1[:, 0].tolist(), ranks, top.indices.tolist(), top.values.tolist(), strict=True)
        for i, logprob, rank, ids, values in columns:
            result[i] = TokenLogprobs(token_ids[i], logprob, rank, tuple(zip(ids, values, strict=True)))
    return result
