"""The only place where the model runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from infer.engine.batch import Batch
from infer.engine.sampler import Row, draws, logprobs
from infer.engine.sequence import Sequence
from infer.protocols import CachePoolProtocol, KernelsProtocol, ModelProtocol
from infer.request import TokenLogprobs

SCORED_ROWS = 128
"""Prompt positions whose logits are in memory at once."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a pass yields."""

    tokens: list[int | None]
    """One per sampled sequence; None where the model's output was not finite."""
    logprobs: list[TokenLogprobs | None]
    prompt_logprobs: list[tuple[Sequence, list[TokenLogprobs]]]


class Runner:
    """A model and its cache."""

    def __init__(
        self, model: ModelProtocol, pool: CachePoolProtocol, kernels: KernelsProtocol, device: torch.device
    ) -> None:
        self._model = model
        self._pool = pool
        self._kernels = kernels
        self._device = device

    @torch.inference_mode()
    def run(self, batch: Batch) -> Result:
        """Forward, then logits at the rows that need them, then tokens."""
        hidden_TD = self.forward(batch)
        tokens: list[int | None] = []
        chosen: list[TokenLogprobs | None] = []
        if batch.sampled:
            logits_NV = self._model.logits(hidden_TD[batch.sample_rows])
            rows = [Row(s.request.params, s.request.seed, len(s.tokens)) for s in batch.sampled]
            drawn = self._kernels.sample(logits_NV, draws(rows, self._device)).tolist()
            tokens = [token if token >= 0 else None for token in drawn]
            counts = [s.request.params.logprobs for s in batch.sampled]
            chosen = logprobs(logits_NV, [max(token, 0) for token in drawn], counts)
        return Result(tokens, chosen, [(s, self._score(s, hidden_TD[r : r + n])) for s, r, n in batch.scored])

    def forward(self, batch: Batch) -> Tensor:
        """Hidden states, [T, D]."""
        if batch.decode_only:
            view = self._pool.decode_view(batch.slots)
        else:
            view = self._pool.batched_chunked_prefill_view(batch.slots, batch.starts, batch.lens)
        token_ids_T, positions_T = batch.token_ids_T.to(self._device), batch.positions_T.to(self._device)
        return self._model.forward(token_ids_T, positions_T, view)

    def _score(self, sequence: Sequence, hidden_RD: Tensor) -> list[TokenLogprobs]:
        """The logprobs of the prompt's tokens that the rows predict, in slices: a whole chunk's logits are large."""
        first = sequence.prompt_scored + 1
        targets = sequence.tokens[first : first + len(hidden_RD)]
        count = sequence.request.params.prompt_logprobs
        found: list[TokenLogprobs | None] = []
        for i in range(0, len(targets), SCORED_ROWS):
            part = targets[i : i + SCORED_ROWS]
            logits_NV = self._model.logits(hidden_RD[i : i + SCORED_ROWS])
            found += logprobs(logits_NV, part, [count] * len(part))
        return [score for score in found if score is not None]
