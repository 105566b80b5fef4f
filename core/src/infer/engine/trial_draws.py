"""Whether tokens are drawn alike alone and in a batch: a part of the start-up check."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from infer.contracts.kernels import KernelsProtocol
from infer.engine.sampler import make_draws
from infer.engine.trial_rows import HEAD_OPERATIONS, PER_VALUE, counted, row_counts


@dataclass(frozen=True)
class DrawCase:
    """How to draw one token, and from which row of logits."""

    row: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    uniform: float = 0.0


MASKED = 4
"""The row in which most tokens are forbidden, as a grammar does."""
KINDS = (DrawCase(0), DrawCase(1, top_k=50, top_p=0.9), DrawCase(2, min_p=0.05), DrawCase(MASKED))
GREEDY = DrawCase(3, temperature=0.0)


def varying_draws(
    kernels: KernelsProtocol, vocab_size: int, most: int, example_V: Tensor
) -> Generator[None, None, list[str]]:
    """Compare tokens drawn alone with those drawn in a batch of up to ``most``, for logits like ``example_V``. The
    random numbers lie on both sides of the edge between two tokens, so that a sum that differs in its last bit draws
    the other token."""
    noise_V = torch.randn(vocab_size, generator=torch.Generator().manual_seed(0)).to(example_V)
    logits_KV = torch.stack([noise_V.roll(kind) for kind in range(1 + len(KINDS))])
    logits_KV[MASKED, noise_V < 0] = -math.inf

    def sample(draws: Sequence[DrawCase]) -> list[int]:
        logits_NV = logits_KV[[draw.row for draw in draws]]
        tokens: list[int] = kernels.sample(
            logits_NV,
            make_draws(draws, example_V.device, [draw.uniform for draw in draws]),
        ).tolist()
        return tokens

    def varies(chosen: Sequence[tuple[DrawCase, int]]) -> bool:
        return sample([draw for draw, _ in chosen]) != [token for _, token in chosen]

    edges = [(0.0, 0.5) for _ in KINDS]
    last = sample([replace(kind, uniform=0.5) for kind in KINDS])
    found: list[str] = []
    while any(low < (low + high) / 2 < high for low, high in edges):
        yield
        middles = [(low + high) / 2 for low, high in edges]
        tokens = sample([replace(kind, uniform=u) for kind, u in zip(KINDS, middles, strict=True)])
        edges = [
            (u, high) if token < end else (low, u)
            for (low, high), u, token, end in zip(edges, middles, tokens, last, strict=True)
        ]
    draws = [GREEDY, *(replace(kind, uniform=u) for kind, edge in zip(KINDS, edges, strict=True) for u in edge)]
    alone = [(draw, sample([draw])[0]) for draw in draws]
    masked = [case for case in alone if case[0].row == MASKED]
    others = [case for case in alone if case[0].row != MASKED]
    cost = PER_VALUE // 2 * vocab_size
    counts = row_counts(cost, 0, most, most, example_V.device, HEAD_OPERATIONS)
    varying: list[int] = []
    for n in sorted(counts):
        yield
        if n > 1 and varies([others[(n + i) % len(others)] for i in range(n)]):
            varying.append(n)
    if varying:
        found.append(f"{type(kernels).__name__}.sample varies at {counted(varying, 'row')}")
    few = min(most, len(others) + 1)
    if few > 1 and any(varies([case, *others][:few]) for case in masked):
        found.append(f"{type(kernels).__name__}.sample varies at {counted([few], 'row')}, one of them masked")
    return found
