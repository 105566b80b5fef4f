"""Logits processors: requests edit their logits before a token is drawn, by biases, penalties and grammars. Edits
depend on the request and its own tokens alone, and are computed element by element in fp32, so answers stay exact."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from infer.contracts.grammar import Bits, MatcherProtocol
from infer.contracts.params import CallOutputs
from infer.contracts.request import Request, ThinkingTokens
from infer.device import upload
from infer.engine.masks import Masks

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

Floats = np.ndarray[tuple[int], np.dtype[np.float32]]
Ints = np.ndarray[tuple[int], np.dtype[np.int64]]


class Edit(NamedTuple):
    """The edit of one row of logits. Each of M tokens gets (logit + bias) / repetition - penalty, where a negative
    logit + bias is multiplied by the repetition instead."""

    ids_M: Ints
    bias_M: Floats
    repetition_M: Floats
    penalty_M: Floats
    allowed: Bits | None
    """Like ``MatcherProtocol.allowed``; None if every token is allowed."""
    forced: int | None = None
    """The only token that is allowed, whatever else the edit says."""


class ProcessedRow(NamedTuple):
    """A row of logits that a request edits."""

    row: int
    processor: LogitsProcessor
    tokens: Sequence[int]
    """What comes before the row and the processor has not seen yet: tokens, or one draft token."""
    draft: bool = False
    """The row comes after the previous one of the same request and a draft token. Its edit assumes that the draft is
    the token that will be drawn; if not, nobody uses the row."""


def compute_edits(rows: Sequence[ProcessedRow], masks: Masks) -> list[tuple[int, Edit | None]]:
    """The edits of rows of logits."""
    states: list[LogitsProcessor] = []
    matchers = []
    for _, processor, tokens, draft in rows:
        states.append(states[-1].fork() if draft else processor)
        matchers.append(states[-1].see(tokens))
    if formed := [matcher for matcher in matchers if matcher is not None]:
        masks.compute(formed)
    return [(row, state.edit(matcher)) for (row, *_), state, matcher in zip(rows, states, matchers, strict=True)]


class ThinkingBudget:
    """Closes a model's reasoning after ``most`` tokens. Reasoning is what comes between the opening and the closing
    tokens at the beginning of an answer; what one token writes before them, such as a line break, does not matter.
    Right behind the closing tokens, opening ones begin reasoning again, with what is left of the budget."""

    def __init__(self, tokens: ThinkingTokens, most: int) -> None:
        self._tokens = tokens
        self._left = most
        self._lead = 0 if tokens.opened else self._reach
        """How many further tokens the opening ones may be among; none within the reasoning."""
        self._within = tokens.opened
        self._matched = 0
        """How many tokens of the tag that may come next have come."""

    def see(self, token: int) -> None:
        """Take in the answer's next token."""
        if not self._within and not self._lead:
            return
        tag = self._tokens.closing if self._within else self._tokens.opening
        self._matched = self._matched + 1 if token == tag[self._matched] else int(token == tag[0])
        if self._matched == len(tag):
            self._within, self._matched = not self._within, 0
            self._lead = 0 if self._within else self._reach
        elif self._within:
            self._left -= not self._matched
        else:
            self._lead -= 1

    @property
    def _reach(self) -> int:
        return len(self._tokens.opening) + 1 if self._tokens.opening else 0

    @property
    def forced(self) -> int | None:
        """The token that has to come next; None if any may."""
        return self._tokens.closing[self._matched] if self._within and self._left <= 0 else None


class LogitsProcessor:
    """Edits one request's logits. Presence and frequency penalties are OpenAI's and concern the answer's tokens; the
    repetition penalty is CTRL's (Keskar et al., 2019) and concerns those of prompt and answer."""

    def __init__(self, request: Request, stops: Collection[int]) -> None:
        params = request.params
        self._params = params
        self._num_prompt = len(request.prompt_token_ids)
        self._matcher = None if request.grammar is None else request.grammar.matcher()
        self._gate = request.grammar_after
        self._passed = 0
        """How many of the tokens after which the grammar applies have come."""
        budget = params.thinking_token_budget
        self._thinking: ThinkingBudget | None = None
        """What closes the reasoning; None if nothing needs to."""
        if request.thinking is not None and budget is not None:
            self._thinking = ThinkingBudget(request.thinking, budget)
        self._fault: str | None = None
        self.num_seen = 0
        """How many tokens of prompt and answer it has seen."""
        self._promised = None not in (self._matcher, request.thinking) and bool(self._gate)
        """Whether what the grammar describes follows the reasoning, so that no answer ends within it by itself."""
        if self._promised:  # a client's own tokens may end it
            stops = set(stops).difference(params.stop_token_ids)
        self._stops = sorted(stops) if self._promised or params.min_tokens else []
        """The tokens that would end the answer too soon."""
        # At once, not by ``_place``: all answers of a request begin in one step.
        biased = params.logit_bias | dict.fromkeys(self._stops, -np.inf)
        self._row = {token: row for row, token in enumerate(biased)}
        """Token id -> index in the arrays below."""
        self._ids = np.fromiter(biased, np.int64, len(biased))
        self._bias = np.fromiter(biased.values(), np.float32, len(biased))
        self._repetition = np.ones(len(biased), np.float32)
        self._count = np.zeros(len(biased), np.float32)

    def fork(self) -> LogitsProcessor:
        """A copy in the same state, which takes in draft tokens in place of this one. If it cannot be made, the
        processor has failed, and this one is returned, which allows no token any more."""
        return self._attempt(LogitsProcessor._copy, self) or self

    def _copy(self) -> LogitsProcessor:
        other = copy.copy(self)
        other._row = self._row.copy()
        for name in ("_ids", "_bias", "_repetition", "_count"):
            setattr(other, name, getattr(self, name).copy())
        other._matcher = None if self._matcher is None else self._matcher.fork()
        other._thinking = copy.copy(self._thinking)
        return other

    def accepts(self, tokens: Sequence[int], drafts: Sequence[int]) -> int:
        """How many of the drafts, which follow ``tokens`` that it has not seen yet, its grammar may allow. Where that
        takes more than a look, all of them; none if the processor has failed."""
        if self._matcher is None or self._waits or self.num_seen < self._num_prompt:
            return len(drafts)
        return max(0, (self._attempt(self._matcher.accepts, [*tokens, *drafts]) or 0) - len(tokens))

    def see(self, tokens: Sequence[int]) -> MatcherProtocol | None:
        """Take in the next ``tokens`` of prompt and answer. Returns the matcher, if a grammar applies to the next
        token."""
        return self._attempt(self._see_all, tokens)

    def edit(self, matcher: MatcherProtocol | None) -> Edit | None:
        """The edit of the logits that follow the tokens it has seen. None if the processor has failed, which ends
        this request only: no token is allowed from then on."""
        return self._attempt(self._edit, matcher)

    def _attempt(self, run: Callable[[T], R], given: T) -> R | None:
        if self._fault is None:
            try:
                return run(given)
            except BaseException as error:  # a panic of Rust's is no Exception
                log.exception("the logits processor of a request failed")
                self._fault = f"The request failed: {type(error).__name__}: {error}"
        return None

    def _see_all(self, tokens: Sequence[int]) -> MatcherProtocol | None:
        if self._params.repetition_penalty != 1:
            for token in dict.fromkeys(tokens):  # prompts are long, and each answer to one sees it by itself
                row = self._place(token)
                self._repetition[row] = self._params.repetition_penalty
        for token in tokens[max(0, self._num_prompt - self.num_seen) :]:
            self._see(token)
        self.num_seen += len(tokens)
        return None if self._waits else self._matcher

    def _edit(self, matcher: MatcherProtocol | None) -> Edit:
        early = self.num_seen - self._num_prompt < self._params.min_tokens or (self._promised and self._waits)
        if self._stops and not early:
            for token in self._stops:
                self._bias[self._row[token]] = self._params.logit_bias.get(token, 0.0)
            self._stops = []
        m, count = len(self._row), self._count[: len(self._row)]
        penalty = self._params.frequency_penalty * count + self._params.presence_penalty * (count > 0)
        forced = None if self._thinking is None else self._thinking.forced
        if forced is not None and matcher is not None and not _allows(matcher.allowed, forced):
            forced = None  # half a character comes before the tag: it is closed behind the other half
        return Edit(
            self._ids[:m],
            self._bias[:m],
            self._repetition[:m],
            penalty.astype(np.float32),
            None if matcher is None else matcher.allowed,
            forced,
        )

    @property
    def _waits(self) -> bool:
        """Whether the grammar does not apply yet."""
        return self._passed < len(self._gate)

    @property
    def fault(self) -> str | None:
        """Why no token is allowed any more, as a sentence; None if that is not so."""
        if self._fault is not None or self._matcher is None or self._matcher.fault is None:
            return self._fault
        return f"The structured output gave up: {self._matcher.fault}"

    @property
    def blamed(self) -> str | None:
        """The request parameter that caused the fault; None if none did."""
        return None if self._fault is not None or self.fault is None else "structured_outputs"

    def _see(self, token: int) -> None:
        """Take in a token of the answer, but for the repetition penalty."""
        if self._thinking is not None:
            self._thinking.see(token)
        if self._params.presence_penalty or self._params.frequency_penalty:
            row = self._place(token)
            self._count[row] += 1
        if self._matcher is not None:
            if not self._waits:
                self._matcher.accept(token)
            elif token == self._gate[self._passed]:
                self._passed += 1
                if not self._waits and not isinstance(self._params.structured_outputs, CallOutputs):
                    self._thinking = None  # a tag from now on is part of what the grammar describes
            elif token == self._gate[0]:
                self._passed = 1

    def _place(self, token: int) -> int:
        """The token's index in the arrays, which may be reallocated."""
        row = self._row.setdefault(token, len(self._row))
        if row == len(self._ids):
            more = max(64, row)
            self._ids = np.pad(self._ids, (0, more))
            self._bias = np.pad(self._bias, (0, more))
            self._repetition = np.pad(self._repetition, (0, more), constant_values=1)
            self._count = np.pad(self._count, (0, more))
        self._ids[row] = token
        return row


def apply_edits(logits_NV: Tensor, edits: Sequence[tuple[int, Edit | None]], keep: bool) -> Tensor:
    """The logits, [N, V], with the edits (row, edit) applied. With ``keep``, ``logits_NV`` itself is not changed."""
    device = logits_NV.device
    exact = any(edit is not None and len(edit.ids_M) for _, edit in edits)
    edited_NV = logits_NV.to(torch.float32 if exact else logits_NV.dtype, copy=keep)
    for row, edit in edits:
        if edit is None:
            edited_NV[row] = -torch.inf
        elif len(edit.ids_M):
            logits_V = edited_NV[row]
            ids_M, bias_M, repetition_M, penalty_M = (upload(np.array(a), device) for a in edit[:4])
            x_M = logits_V[ids_M] + bias_M
            logits_V[ids_M] = torch.where(x_M > 0, x_M / repetition_M, x_M * repetition_M) - penalty_M
    formed = [(row, edit.allowed) for row, edit in edits if edit and edit.allowed is not None]
    if formed:
        words_RW = np.stack([allowed for _, allowed in formed])
        bytes_RB = upload(words_RW.view(np.uint8).astype(np.int32), device)
        caps_RV = _caps(device, edited_NV.dtype).index_select(0, bytes_RB.flatten()).view(len(formed), -1)
        for (row, _), cap_V in zip(formed, caps_RV[:, : logits_NV.shape[1]], strict=True):
            torch.minimum(edited_NV[row], cap_V, out=edited_NV[row])
    for row, edit in edits:
        if edit is not None and edit.forced is not None:
            edited_NV[row] = -torch.inf
            edited_NV[row, edit.forced] = 0.0
    return edited_NV


def _allows(bits: Bits, token: int) -> bool:
    return bool(bits[token >> 5] >> (token & 31) & 1)


@functools.cache
def _caps(device: torch.device, dtype: torch.dtype) -> Tensor:
    """For each byte of a mask, the upper bounds of eight logits, [256, 8]: infinity where the bit allows the token,
    minus infinity where it does not. ``masked_fill`` takes ten times as long with irregular masks, because the
    processor cannot predict its branches."""
    bits = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
    return torch.where(bits == 1, torch.inf, -torch.inf).to(device, dtype)
