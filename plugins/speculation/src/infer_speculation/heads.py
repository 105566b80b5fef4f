"""Drafts from a head of the model: for multi-token prediction (MTP), or EAGLE-3. It guesses from the hidden states
that the model's passes compute anyway, so that a draft costs one layer and the output head. Shapes: T tokens, D size of
what the head reads, N sequences that are asked about."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import torch
from pydantic import BaseModel, Field
from torch import Tensor

from infer.contracts.cache import TruncatingPool
from infer.contracts.model import LayerReadingHead, Pass
from infer.contracts.proposer import Computed, DraftRequest, ProposerContext
from infer.device import download, mark, upload
from infer.engine.batch import Ints, ints
from infer.engine.sampler import Drawing
from infer.errors import SettingsError

log = logging.getLogger(__name__)

KEPT = 32
"""How many hidden states of a sequence's last tokens are kept until the head is asked about it. No pass verifies as
many drafts of a sequence."""


@dataclass(eq=False, slots=True)
class _Sequence:
    """What the head knows of a sequence. Its K/V for a position follow from the hidden state there and the next
    token."""

    slot: int
    """In the head's pool, whose positions are those that the head has computed, without those that it has missed."""
    done: int
    """The first position that it has neither computed nor missed."""
    end: int
    """The position behind the last hidden state that it has read."""


class _Span(NamedTuple):
    """Positions [begin, end) of a sequence, for the head to compute."""

    sequence: _Sequence
    token_ids: Seq[int]
    begin: int
    end: int
    shift: int
    """Position p's hidden state is in row p + shift of the pass that is being read,"""
    kept: int
    """unless p is below this one: it has been kept then."""


class EagleSettings(BaseModel, extra="forbid"):
    path: str | None = Field(
        None, description="the draft head's checkpoint, as model.path; it has to be made for the model that is served"
    )

    def head_path(self) -> str:
        """Raises SettingsError if there is none."""
        if self.path is None:
            raise SettingsError(
                'engine.speculation is "eagle3", but engine.eagle3.path names no draft head; name one that was made '
                "for the model, or choose ngram."
            )
        return self.path


class HeadProposer:
    """A ReadingProposer. It reads prompts as soon as the model has computed them, and decoded tokens when it is asked
    for drafts. What it missed, because the cache held it already or because nobody has asked for long, it does not
    attend to. Grammars, penalties and biases do not reach it."""

    def __init__(self, context: ProposerContext, settings: BaseModel) -> None:
        own, asked = context.own_head, f'engine.speculation is "{context.engine.speculation}"'
        if own is None:
            raise SettingsError(f"{asked}, but there is no model with a draft head.")
        pool = own.pool
        if not isinstance(pool, TruncatingPool):
            raise SettingsError(
                f"{asked}, but {type(pool).__name__} cannot take positions back (truncate); choose another "
                "cache.backend."
            )
        engine, self._device = context.engine, context.device
        self._head, self._pool, self._truncate = own.head, own.pool, pool.truncate
        self._joined = own.head.joined if isinstance(own.head, LayerReadingHead) else None
        self._kernels, self._drawing = context.kernels, Drawing(context.device)
        self._last_token = context.vocab_size - 1
        shape = engine.max_batch_size * KEPT, own.head.hidden_size
        self._kept = torch.zeros(shape, dtype=own.dtype, device=context.device)
        """The last hidden states of each slot: that of position p in row p % KEPT."""
        log.info("hidden states that are kept for drafts: %.1f MiB", self._kept.nbytes / 2**20)
        self._open: dict[str, _Sequence] = {}

    @torch.inference_mode()
    def read(self, computed: Seq[Computed], hidden_TD: Tensor) -> None:
        hidden_TD = hidden_TD[:, -self._head.hidden_size :]
        row, spans, rows, places = 0, list[_Span](), list[int](), list[int]()
        for each in computed:
            first, row, end = row, row + each.length, each.start + each.length
            sequence = self._opened(each)
            if sequence is None:
                continue
            if each.start > sequence.end:
                sequence.done = max(sequence.done, each.start)
            sequence.end = end
            shift = first - each.start
            if each.prefill:
                span = _Span(sequence, each.token_ids, sequence.done, end - 1, shift, each.start)
                if span.begin < span.end and self._extends(span):
                    spans.append(span)
            else:
                sequence.done = max(sequence.done, end - KEPT)
            rest = range(max(sequence.done, each.start, end - KEPT), end)
            rows += [position + shift for position in rest]
            places += [self._place(sequence, position) for position in rest]
        if spans:
            self._run(spans, hidden_TD, np.zeros(0, dtype=np.int64))
        if rows:
            kept_MD = hidden_TD.index_select(0, upload(ints(rows), self._device))
            self._kept.index_copy_(0, upload(ints(places), self._device), kept_MD)

    def propose(self, draft_requests: Seq[DraftRequest]) -> list[list[int]]:
        asked: list[tuple[int, DraftRequest, _Span]] = []
        for i, draft_request in enumerate(draft_requests):
            sequence, last = self._open.get(draft_request.request.id), len(draft_request.token_ids) - 2
            if sequence is None or not sequence.done <= last < sequence.end:
                continue
            span = _Span(sequence, draft_request.token_ids, sequence.done, last + 1, 0, last + 1)
            if self._extends(span, draft_request.most - 1):
                asked.append((i, draft_request, span))
        found: list[list[int]] = [[] for _ in draft_requests]
        if asked:
            asked.sort(key=lambda each: -each[1].most)  # so that those that go on are the first ones
            for (i, *_), drafts in zip(asked, self._drafts([each[1:] for each in asked]), strict=True):
                found[i] = drafts
        return found

    def end(self, request_id: str) -> None:
        sequence = self._open.pop(request_id, None)
        if sequence is not None:
            self._pool.free(sequence.slot)

    def _opened(self, computed: Computed) -> _Sequence | None:
        """What the head knows of the sequence; None if the head's pool has no room for it, or it never decodes."""
        id = computed.request.id
        if id not in self._open:
            place = None if computed.request.pooling else self._pool.allocate([0], reuse=False)
            if place is None:
                return None
            self._open[id] = _Sequence(place.slot, computed.start, computed.start)
        return self._open[id]

    def _extends(self, span: _Span, more: int = 0) -> bool:
        """Make room for the span, and for so many positions after it. Its positions are done, or missed if there is no
        room."""
        sequence = span.sequence
        sequence.done = span.end
        length = self._pool.length(sequence.slot)
        return self._pool.grow(sequence.slot, length + span.end - span.begin + more)

    def _place(self, sequence: _Sequence, position: int) -> int:
        return sequence.slot * KEPT + position % KEPT

    @torch.inference_mode()
    def _drafts(self, asked: Seq[tuple[DraftRequest, _Span]]) -> list[list[int]]:
        """The drafts of each, computed one after the other without waiting for the device in between. Those that ask
        for the most come first."""
        spans = [span for _, span in asked]
        slots, most = [span.sequence.slot for span in spans], [draft_request.most for draft_request, _ in asked]
        ends = np.cumsum(ints([span.end - span.begin for span in spans]))
        hidden_ND = self._run(spans, None, ends - 1)
        lengths = [self._pool.length(slot) for slot in slots]
        positions_N = ints([span.end for span in spans])
        drawn: list[Tensor] = []
        count = len(asked)
        for step in range(most[0]):
            if step:
                count = sum(step < each for each in most)
                token_N, hidden_ND = drawn[-1][:count].clamp(0, self._last_token), hidden_ND[:count]
                positions = upload(positions_N[:count] + step - 1, self._device)
                view = self._pool.decode_view(slots[:count])
                hidden_ND = self._head.forward(Pass(token_N, positions, view, None, hidden_ND))
            requests = [draft_request.request for draft_request, _ in asked[:count]]
            draws = self._drawing(requests, positions_N[:count] + step + 1)
            drawn.append(self._kernels.sample(self._head.logits(hidden_ND), draws))
        for slot, length in zip(slots, lengths, strict=True):
            self._truncate(slot, length)
        host = [download(token_N) for token_N in drawn]
        mark(self._device)()
        columns = [token_N.tolist() for token_N in host]
        drafts = [[column[n] for column in columns[: most[n]]] for n in range(len(asked))]
        return [[*takewhile(lambda token: token >= 0, each)] for each in drafts]

    def _run(self, spans: Seq[_Span], hidden_TD: Tensor | None, rows_N: Ints) -> Tensor:
        """Compute the spans. Returns the hidden states that the head makes of the rows ``rows_N``."""
        positions = np.concatenate([np.arange(span.begin, span.end) for span in spans])
        token_ids = ints([token for span in spans for token in span.token_ids[span.begin + 1 : span.end + 1]])
        slots, lens = [span.sequence.slot for span in spans], [span.end - span.begin for span in spans]
        kept = positions < np.repeat(ints([span.kept for span in spans]), lens)
        places = np.repeat(ints(slots), lens) * KEPT + positions % KEPT
        if hidden_TD is None:
            input_TD = self._kept.index_select(0, upload(places, self._device))
        else:
            rows = np.where(kept, 0, positions + np.repeat(ints([span.shift for span in spans]), lens))
            input_TD = hidden_TD.index_select(0, upload(rows, self._device))
            if kept.any():
                at = upload(np.flatnonzero(kept), self._device)
                input_TD.index_copy_(0, at, self._kept.index_select(0, upload(places[kept], self._device)))
        view = self._pool.batched_chunked_prefill_view(slots, [self._pool.length(slot) for slot in slots], lens)
        given = upload(token_ids, self._device), upload(positions, self._device), view, upload(rows_N, self._device)
        return self._head.forward(Pass(*given, input_TD if self._joined is None else self._joined(input_TD)))
