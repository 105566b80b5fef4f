"""Runs passes: the model's forward pass, logits, and sampling. Nothing else in the engine runs the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from infer.contracts.adapters import AdapterRows, AdaptingModel
from infer.contracts.cache import CachePoolProtocol
from infer.contracts.kernels import KernelsProtocol
from infer.contracts.model import ModelProtocol, Pass, ReadableModel
from infer.contracts.request import TokenLogprobs
from infer.device import FixedTensor, download, mark, upload
from infer.engine.adapters import RowGroups
from infer.engine.batch import Batch, Draw, Floats, HiddenStates, Score
from infer.engine.graphs import DecodeGraphs, Known
from infer.engine.masks import Masks
from infer.engine.processors import apply_edits, compute_edits
from infer.engine.sampler import Drawing, score
from infer.errors import PluginError

SCORED_ROWS = 128
"""How many prompt positions are scored at a time, which bounds the memory for their logits."""


class Drawn(NamedTuple):
    """The result of a Draw, with one entry per drawn token."""

    tokens: list[int | None]
    """None where the model's output was not finite."""
    logprobs: list[TokenLogprobs | None]


Result = Drawn | list[TokenLogprobs | None] | Floats
"""The result of a Draw, of a Score, or of HiddenStates: the rows, [count, D]."""


class Launched(NamedTuple):
    """A pass in flight on the device."""

    readers: list[Callable[[], Result]]
    wait: Callable[[], None]
    hidden_TD: Tensor | None = None
    """The hidden states of all tokens, if they are kept; rows that pad the pass may follow."""

    def results(self) -> list[Result]:
        """Wait for the pass and read its results, one for each of the batch's readouts."""
        self.wait()
        return [read() for read in self.readers]


class Executor(Protocol):
    """Who runs the engine's passes: a Runner, or who only behaves like one."""

    def launch(self, batch: Batch) -> Launched:
        """Start a pass. The pool is told first which positions it writes, by asking it for a view."""


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
        *,
        keep_hidden: bool = False,
        whose_kernels: str | None = None,
    ) -> None:
        """``keep_hidden``: a launched pass has the hidden states of all its tokens. ``whose_kernels``: the kernels'
        plugin, as errors name it."""
        self._model = model
        self._pool = pool
        self._kernels = kernels
        self._device = device
        self._graphs = graphs
        self._keep_hidden = keep_hidden
        self._hidden_size = model.hidden_size if isinstance(model, ReadableModel) else None
        self._whose_kernels = whose_kernels or f"The kernels ({type(kernels).__name__})"
        self._drawing = Drawing(device)
        self._masks = Masks()
        self._last_tokens = FixedTensor(torch.zeros(max_batch_size, dtype=torch.int64, device=device))
        """The token last drawn for each slot. The next pass reads it here, because the host may not have it yet."""
        self._adapters = FixedTensor(torch.zeros(max_batch_size, dtype=torch.int32, device=device))
        """The slot of each row's adapter, in a pass that only decodes."""

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Launched:
        """Start a pass: forward, then logits of the rows that need them, then sampling. Nothing here waits for the
        device."""
        hidden_ND, hidden_TD = self._adapted(batch), None
        if self._keeps_rows(batch):
            hidden_TD = hidden_ND if self._keep_hidden else None
            if not batch.decode_only:
                hidden_ND = hidden_ND.index_select(0, upload(batch.rows_N, self._device))
        readers = [self._read(readout, hidden_ND) for readout in batch.readouts]
        return Launched(readers, mark(self._device), hidden_TD)

    def _read(self, readout: Score | HiddenStates | Draw, hidden_ND: Tensor) -> Callable[[], Result]:
        match readout:
            case Draw():
                return self._draw(readout, hidden_ND)
            case Score():
                return self._score(readout, hidden_ND)
            case HiddenStates(first=first, count=count):
                host_ND = download(hidden_ND[first : first + count, : self._hidden_size].float())
                return host_ND.numpy

    def _draw(self, draw: Draw, hidden_ND: Tensor) -> Callable[[], Result]:
        num = len(draw.of)
        logits_NV = self._model.logits(hidden_ND[draw.first : draw.first + num])
        draws = self._drawing(draw.requests, draw.positions_N)
        scored = self._drawing.scored
        edited_NV = logits_NV
        if draw.processed:
            edited_NV = apply_edits(logits_NV, compute_edits(draw.processed, self._masks), scored)
        token_N = self._kernels.sample(edited_NV, draws)
        known_N = token_N.clamp(0, logits_NV.shape[1] - 1)  # any other number would be read as an index
        self._last_tokens.put(draw.slots_M, known_N if draw.last_M is None else known_N[draw.last_M])
        chosen = score(logits_NV, known_N, self._drawing.wanted) if scored else None
        host_N = download(token_N)

        def read() -> Drawn:
            tokens = host_N.tolist()
            if (most := max(tokens)) >= logits_NV.shape[1]:
                allowed = f"the model's tokens are 0 to {logits_NV.shape[1] - 1}"
                raise PluginError(f"{self._whose_kernels} drew token {most}, but {allowed}.")
            if min(tokens) < 0:
                tokens = [token if token >= 0 else None for token in tokens]
            return Drawn(tokens, [None] * num if chosen is None else chosen.read())

        return read

    def _score(self, readout: Score, hidden_ND: Tensor) -> Callable[[], Result]:
        """Works in slices, because the logits of a whole chunk would take much memory."""
        targets = upload(np.array(readout.targets), self._device)
        found = []
        for i in range(0, len(targets), SCORED_ROWS):
            part, first = targets[i : i + SCORED_ROWS], readout.first + i
            logits_NV = self._model.logits(hidden_ND[first : first + len(part)])
            found.append(score(logits_NV, part, [readout.count] * len(part)))
        return lambda: [entry for part in found for entry in part.read()]

    def _keeps_rows(self, batch: Batch) -> bool:
        """Whether the last layer computes all rows, and not only those that are wanted."""
        return self._keep_hidden or batch.adapters_T is not None

    def _adapted(self, batch: Batch) -> Tensor:
        """``_forward``, with the adapters that the rows have."""
        if batch.adapters_T is None:
            return self._forward(batch)
        assert isinstance(self._model, AdaptingModel)
        assert self._model.adapters is not None
        slots_T = batch.adapters_T.astype(np.int32)
        if batch.decode_only:
            self._adapters.write(slots_T)
            own = self._adapters.tensor[: len(slots_T)]
        else:
            own = upload(slots_T, self._device)
        adapters = AdapterRows(own, RowGroups(batch.adapters_T, self._device))
        with self._model.adapters.applied(adapters):
            return self._forward(batch, adapters)

    def _forward(self, batch: Batch, adapters: AdapterRows | None = None) -> Tensor:
        """Hidden states of the wanted rows, or of all if they are kept; a replayed pass returns padding rows after
        them."""
        if not batch.decode_only:
            view = self._pool.batched_chunked_prefill_view(batch.slots, batch.starts, batch.lens)
            rows_N = None if self._keeps_rows(batch) else upload(batch.rows_N, self._device)
            return self._model.forward(Pass(*self._inputs(batch), view, rows_N))
        if self._graphs is None or (adapters is not None and not self._graphs.adapting):
            return self._model.forward(Pass(*self._inputs(batch), self._pool.decode_view(batch.slots)))
        rows = self._graphs.rows(len(batch.slots))
        view = self._pool.decode_view(batch.slots, rows)
        padded = batch.pad(rows)
        self._graphs.token_ids.write(padded.token_ids_T)
        self._feed(self._graphs.token_ids.tensor, padded)
        self._graphs.positions.write(padded.positions_T)
        known: Known = [padded.token_ids_T, padded.positions_T, batch.slots]
        if batch.adapters_T is not None:
            known = [*known, batch.adapters_T]
        return self._graphs.run(rows, view, known, adapters)

    def _inputs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Token ids and positions, [T] each."""
        token_ids_T = upload(batch.token_ids_T, self._device)
        self._feed(token_ids_T, batch)
        return token_ids_T, upload(batch.positions_T, self._device)

    def _feed(self, token_ids_T: Tensor, batch: Batch) -> None:
        """Fill in the tokens that only the device knows yet."""
        if len(batch.fed_rows):
            fed_slots = upload(batch.fed_slots, self._device)
            token_ids_T[upload(batch.fed_rows, self._device)] = self._last_tokens.tensor[fed_slots]
