"""The only place where the model runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from infer.device import download, mark, upload
from infer.engine.batch import Batch
from infer.engine.graphs import DecodeGraphs
from infer.engine.sampler import Drawing, Scores, score
from infer.engine.sequence import Sequence
from infer.engine.steering import edits, steer
from infer.grammar import Masks
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
    prompt_logprobs: list[tuple[Sequence, list[TokenLogprobs | None]]]


@dataclass(frozen=True, slots=True)
class Launched:
    """A pass on its way through the device."""

    batch: Batch
    _token_N: Tensor | None
    _chosen: Scores | None
    _prompts: list[tuple[Sequence, Scores]]
    _wait: Callable[[], None]

    def result(self) -> Result:
        """Wait for the pass and read what it yields."""
        self._wait()
        drawn: list[int] = [] if self._token_N is None else self._token_N.tolist()
        return Result(
            tokens=[token if token >= 0 else None for token in drawn],
            logprobs=[] if self._chosen is None else self._chosen.read(),
            prompt_logprobs=[(sequence, scores.read()) for sequence, scores in self._prompts],
        )


class Runner:
    """A model and its cache."""

    def __init__(
        self,
        model: ModelProtocol,
        pool: CachePoolProtocol,
        kernels: KernelsProtocol,
        device: torch.device,
        max_batch_size: int,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self._model = model
        self._pool = pool
        self._kernels = kernels
        self._device = device
        self._graphs = graphs
        self._drawing = Drawing(device)
        self._masks = Masks()
        self._last_token_S = torch.zeros(max_batch_size, dtype=torch.int64, device=device)
        """The token last drawn for each slot: what the next pass starts from, though the host may not know it yet."""

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Launched:
        """Forward, then logits at the rows that need them, then tokens; nothing waits for the device."""
        hidden_ND = self._forward(batch)
        token_N = chosen = None
        if batch.sampled:
            sampled_ND = hidden_ND[: len(batch.sampled)]  # a view, where no other rows are wanted
            if batch.scored:
                sampled_ND = hidden_ND.index_select(0, upload(batch.sample_rows, self._device))
            logits_NV = self._model.logits(sampled_ND)
            draws = self._drawing([s.request for s in batch.sampled], [len(s.tokens) for s in batch.sampled])
            steered = [(row, s.steering, s.tokens) for row, s in enumerate(batch.sampled) if s.steering is not None]
            scored = any(wanted is not None for wanted in self._drawing.wanted)
            edited_NV = steer(logits_NV, edits(steered, self._masks), scored) if steered else logits_NV
            token_N = self._kernels.sample(edited_NV, draws)
            known_N = token_N.clamp(min=0)
            self._last_token_S[upload(batch.sample_slots, self._device)] = known_N
            chosen = score(logits_NV, known_N, self._drawing.wanted)
            token_N = download(token_N)
        prompts = [part for s, r, n in batch.scored for part in self._score(s, hidden_ND[r : r + n])]
        return Launched(batch, token_N, chosen, prompts, mark(self._device))

    def _forward(self, batch: Batch) -> Tensor:
        """Hidden states of the wanted rows, and of a few more where a recorded pass is replayed."""
        if not batch.decode_only:
            view = self._pool.batched_chunked_prefill_view(batch.slots, batch.starts, batch.lens)
            return self._model.forward(*self._inputs(batch), view, upload(batch.rows_N, self._device))
        if self._graphs is None:
            return self._model.forward(*self._inputs(batch), self._pool.decode_view(batch.slots))
        rows = self._graphs.rows(len(batch.slots))
        view = self._pool.decode_view(batch.slots, rows)
        padded = batch.pad(rows)
        self._inputs(padded, self._graphs.token_ids_T, self._graphs.positions_T)
        return self._graphs.run(rows, view, (padded.token_ids_T, padded.positions_T, batch.slots))

    def _inputs(
        self, batch: Batch, token_ids_out: Tensor | None = None, positions_out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Token ids and positions, [T] each."""
        token_ids_T = upload(batch.token_ids_T, self._device, token_ids_out)
        if len(batch.fed_rows):
            fed_slots = upload(batch.fed_slots, self._device)
            token_ids_T[upload(batch.fed_rows, self._device)] = self._last_token_S[fed_slots]
        return token_ids_T, upload(batch.positions_T, self._device, positions_out)

    def _score(self, sequence: Sequence, hidden_RD: Tensor) -> list[tuple[Sequence, Scores]]:
        """The logprobs of the prompt's tokens that the rows predict, in slices: a whole chunk's logits are large."""
        first = sequence.prompt_scored + 1
        targets = upload(np.array(sequence.tokens[first : first + len(hidden_RD)]), self._device)
        count = sequence.request.params.prompt_logprobs
        found = []
        for i in range(0, len(targets), SCORED_ROWS):
            part = targets[i : i + SCORED_ROWS]
            logits_NV = self._model.logits(hidden_RD[i : i + SCORED_ROWS])
            found.append((sequence, score(logits_NV, part, [count] * len(part))))
        return found
