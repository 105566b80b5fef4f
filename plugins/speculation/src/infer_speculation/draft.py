"""Drafts from a second, smaller model with a cache of its own. Where the request samples, it draws with the random
numbers that the first model will draw with, so that the two agree more often."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

from pydantic import BaseModel, Field

from infer.contracts.cache import TruncatingPool
from infer.contracts.proposer import DraftRequest, ProposerContext
from infer.contracts.scheduler import Sequence, Work
from infer.engine.batch import pack
from infer.engine.graphs import DecodeGraphs
from infer.engine.runner import Drawn, Runner
from infer.errors import SettingsError

CHUNK = 512
"""How many tokens of prompts the second model computes per step, so that the first need not wait long."""


class DraftSettings(BaseModel, extra="forbid"):
    path: str | None = Field(
        None, description="the smaller model, as model.path; it has to have the tokenizer of the first"
    )


class DraftProposer:
    """A ProposerProtocol that asks a second model. Grammars, penalties and biases do not reach it."""

    def __init__(self, context: ProposerContext, settings: DraftSettings) -> None:
        if settings.path is None:
            raise SettingsError(
                'engine.speculation is "draft", but engine.draft.path names no model; name a smaller one with the same '
                "tokenizer, or choose ngram."
            )
        second = context.load(settings.path)
        if second.tokenizer.get_vocab() != context.tokenizer.get_vocab():
            raise SettingsError(
                f"engine.draft.path = {settings.path!r} has another tokenizer than model.path; drafts need a model of "
                "the same tokenizer, usually a smaller one of the same family."
            )
        pool = second.pool
        if not isinstance(pool, TruncatingPool):
            raise SettingsError(
                f"engine.draft.path = {settings.path!r} is a model with recurrent layers, whose states cannot be taken "
                "back token by token; choose one without, or ngram."
            )
        size = context.engine.max_batch_size
        recorder = None if context.engine.graphs == "off" else context.kernels.recorder()
        graphs = None if recorder is None else DecodeGraphs(second.model, pool, context.device, size, recorder)
        self._runner = Runner(second.model, pool, context.kernels, context.device, size, graphs)
        self._pool = pool
        self._truncate = pool.truncate
        self._longest = min(second.max_seq_len, context.max_seq_len)
        self._max_chunk = second.max_chunk or CHUNK
        self._vocab_size = second.model.vocab_size
        self._open: dict[str, Sequence] = {}
        """Sequences in the second model's cache, by request id. Their tokens end with the drafts of the last call."""
        self._known: dict[str, int] = {}
        """How many of these tokens are no drafts."""
        self._foreign: set[str] = set()
        """Requests, by id, with a token for which the second model has no embedding. They get no drafts."""

    def propose(self, draft_requests: Seq[DraftRequest]) -> list[list[int]]:
        left = CHUNK
        most = {
            sequence: draft_request.most
            for draft_request in draft_requests
            if (sequence := self._continued(draft_request)) is not None
        }
        works: list[Work] = []
        found: dict[str, list[int]] = {draft_request.request.id: [] for draft_request in draft_requests}
        rests = {sequence: len(sequence.tokens) - sequence.num_computed for sequence in most}
        for sequence in sorted(rests, key=rests.__getitem__):  # so that nobody waits for a long prompt
            if left > 0:
                work = sequence.extend(min(rests[sequence], left, self._max_chunk))
                left -= work.length
                works.append(work._replace(decode=True))  # what it computes of a prompt is not scored
        drawing = self._run(works)
        while drawing:
            works = []
            for sequence, token in drawing.items():
                sequence.tokens.append(token)
                drafts = found[sequence.id]
                drafts.append(token)
                if len(drafts) < most[sequence]:
                    works.append(sequence.extend(1)._replace(decode=True))
            drawing = self._run(works)
        return [found[draft_request.request.id] for draft_request in draft_requests]

    def end(self, request_id: str) -> None:
        self._foreign.discard(request_id)
        sequence, known = self._open.pop(request_id, None), self._known.pop(request_id, 0)
        if sequence is not None and sequence.slot is not None:
            self._pool.commit(sequence.slot, sequence.tokens, min(sequence.num_computed, known))
            self._pool.free(sequence.slot)

    def _continued(self, draft_request: DraftRequest) -> Sequence | None:
        """The sequence with the tokens that are known now, and room for the drafts; None if there is no room, or if the
        second model does not have one of the tokens."""
        id, tokens, known = (
            draft_request.request.id,
            draft_request.token_ids,
            self._known.get(draft_request.request.id, 0),
        )
        sequence = self._open.get(id)
        longest = len(tokens) + draft_request.most - 1
        if longest > self._longest or id in self._foreign:
            return None
        if max(tokens[known:], default=0) >= self._vocab_size:
            self.end(id)
            self._foreign.add(id)
            return None
        if sequence is None:
            request = draft_request.request
            place = self._pool.allocate(tokens, salt=request.cache_salt)
            if place is None:
                return None
            plain = {"logprobs": None, "logprob_token_ids": None, "prompt_logprobs": None}
            params = request.params.model_copy(update=plain)
            # The second model has no adapters.
            sequence = Sequence(replace(request, params=params, adapter=None), 0, longest)
            sequence.slot, sequence.num_computed = place.slot, place.num_cached
            sequence.tokens[:] = tokens  # of which more than the prompt may be cached
            self._open[id] = sequence
        assert sequence.slot is not None, "it has one until it ends"
        right = known
        while right < min(len(tokens), len(sequence.tokens)) and sequence.tokens[right] == tokens[right]:
            right += 1
        sequence.tokens[right:] = tokens[right:]
        self._known[id] = len(tokens)
        if sequence.num_computed > min(right, len(tokens) - 1):
            sequence.num_computed = min(right, len(tokens) - 1)
            self._truncate(sequence.slot, sequence.num_computed)
        return sequence if self._pool.grow(sequence.slot, longest) else None

    def _run(self, works: Seq[Work]) -> dict[Sequence, int]:
        """The tokens that a pass draws."""
        if not works:
            return {}
        batch = pack(works)
        results = self._runner.launch(batch).results()
        for work in works:
            work.sequence.num_computed = work.end
        drawing = [work.sequence for work in works if work.draws]
        tokens = [token for result in results if isinstance(result, Drawn) for token in result.tokens]
        return {sequence: token for sequence, token in zip(drawing, tokens, strict=True) if token is not None}
