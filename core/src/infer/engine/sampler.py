"""From logits to tokens. Every row's outcome depends on its logits, its parameters, its seed and its position alone.

Shapes: N sampled rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from infer.request import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Row:
    """What one sampled row needs besides its logits."""

    params: SamplingParams
    seed: int
    position: int
    """Index in the sequence of the token to be drawn."""


def sample(logits_NV: Tensor, rows: Sequence[Row]) -> list[int | None]:
    """A token per row; None where the logits are not finite."""
    top_N, token_N = logits_NV.max(dim=-1)
    drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0]
    if drawn:
        token_N = token_N.clone()
        whole = len(drawn) == len(rows)
        token_N[drawn] = _draw(logits_NV if whole else logits_NV[drawn], [rows[i] for i in drawn])
    finite = torch.isfinite(top_N).tolist()
    return [token if ok else None for token, ok in zip(token_N.tolist(), finite, strict=True)]


def _draw(logits_NV: Tensor, rows: Sequence[Row]) -> Tensor:
    """Inverse-transform sampling in vocabulary order over what the filters keep.

    Filters are thresholds on probability, so that ties stay together and a row's result does not depend on how the
    rows beside it are sorted. Order: temperature, top-k, top-p over what top-k left, min-p.
    """
    params = [row.params for row in rows]
    device = logits_NV.device
    temperature_N1 = torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device)[:, None]
    logits_NV = logits_NV.float()
    # The top logit goes first, so that a tiny temperature cannot overflow.
    scaled_NV = (logits_NV - logits_NV.amax(-1, keepdim=True)) / temperature_N1
    probs_NV = torch.softmax(torch.nan_to_num(scaled_NV, nan=0.0), dim=-1)

    ranked = [i for i, p in enumerate(params) if p.top_k > 0 or p.top_p < 1]
    if ranked:
        vocab = probs_NV.shape[1]
        top_k_R1 = torch.tensor([min(k, vocab) if (k := params[i].top_k) > 0 else vocab for i in ranked])
        top_k_R1 = top_k_R1.to(device)[:, None]
        top_p_R1 = torch.tensor([params[i].top_p for i in ranked], dtype=torch.float32, device=device)[:, None]
        descending_RV = probs_NV[ranked].sort(dim=-1, descending=True).values
        kth_R1 = descending_RV.gather(1, top_k_R1 - 1)
        descending_RV = descending_RV.where(descending_RV >= kth_R1, 0.0)
        mass_RV = descending_RV.double().cumsum(dim=-1)
        # The token that carries the mass across top_p is the last one kept.
        before_RV = mass_RV - descending_RV
        last_R1 = (before_RV < top_p_R1 * mass_RV[:, -1:]).sum(dim=-1, keepdim=True) - 1
        threshold_R1 = torch.maximum(kth_R1, descending_RV.gather(1, last_R1))
        probs_NV[ranked] = probs_NV[ranked].where(probs_NV[ranked] >= threshold_R1, 0.0)

    floors = [p.min_p for p in params]
    if any(floors):
        floor_N1 = torch.tensor(floors, dtype=torch.float32, device=device)[:, None] * probs_NV.amax(-1, keepdim=True)
        probs_NV = probs_NV.where(probs_NV >= floor_N1, 0.0)

    cumulative_NV = probs_NV.cumsum(dim=-1, dtype=torch.float64)
    total_N1 = cumulative_NV[:, -1:]
    uniform_N1 = torch.from_numpy(uniform([r.seed for r in rows], [r.position for r in rows]))[:, None]
    target_N1 = uniform_N1.to(total_N1.device) * total_N1
    below_N1 = torch.nextafter(total_N1, torch.zeros_like(total_N1))
    return torch.searchsorted(cumulative_NV, torch.minimum(target_N1, below_N1), right=True)[:, 0]


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
