"""What a request is answered: tokens come in, events go out, the last of which says why it ended."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from infer.contracts.records import Totals
from infer.contracts.request import Event, FinishReason, TokenLogprobs
from infer.contracts.schedule import Sequence
from infer.engine.steering import Steering
from infer.text.detokenizer import TextStream, TokenTexts

log = logging.getLogger(__name__)

NOT_FINITE = "The model's output is not finite (NaN or infinity)."

new_event: Callable[[tuple[object, ...]], Event] = functools.partial(tuple.__new__, Event)
"""An Event of all its fields, in a third of the time: one is made for every token."""


@dataclass(slots=True)
class Counts:
    """Tokens of all requests since the start, as ``Totals``."""

    prompt: int = 0
    cached: int = 0
    generated: int = 0

    def totals(self) -> Totals:
        return Totals(self.prompt, self.cached, self.generated)


class Answer:
    """One request's: its text, what may end it, and its log-probabilities.

    A fault in a part that is its alone (text, stop strings, steering) ends it, and nobody else.
    """

    __slots__ = (
        "_counts", "_fault", "_id", "_push", "_stops", "_text",
        "ended", "first_token", "prompt_logprobs", "sequence", "steering",
    )  # fmt: skip

    def __init__(
        self, sequence: Sequence, texts: TokenTexts | None, eos_token_ids: frozenset[int], counts: Counts
    ) -> None:
        request = sequence.request
        params = request.params
        self._id = request.id
        self._counts = counts
        self._stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
        self._text: TextStream | None = None
        self._fault: str | None = None
        self.sequence = sequence
        self.steering: Steering | None = None
        """What the request does to its logits, if anything."""
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]
        """As far as they have come."""
        self.first_token: float | None = None
        """When its first token was taken, on ``time.perf_counter``."""
        self.ended = False
        try:
            if texts is not None:
                self._text = TextStream(texts, request.prompt_token_ids, params.stop)
            if params.steered:
                self.steering = Steering(request, self._stops)
        except BaseException as error:  # a panic of Rust's is no Exception
            self._spoil(error)
        self._push = None if self._text is None else self._text.push

    @property
    def spoilt(self) -> bool:
        """It cannot even begin: end it."""
        return self._fault is not None

    @property
    def num_tokens(self) -> int:
        """Of the answer, as far as they have been taken."""
        sequence = self.sequence
        return len(sequence.tokens) - sequence.pending - sequence.num_prompt

    def take(self, token: int | None, logprobs: TokenLogprobs | None) -> Event:
        """The event of its oldest pending token, which is ``token``; the last event if that ends it. None where there
        is no token, because the model's output was not finite or nothing may come next."""
        if token is None:
            return self._take_none()
        sequence = self.sequence
        tokens, pending = sequence.tokens, sequence.pending
        tokens[-pending] = token
        sequence.pending = pending = pending - 1
        self._counts.generated += 1
        prompt_logprobs = None
        if self.first_token is None:
            self.first_token = time.perf_counter()
            self._count_prompt()
            if sequence.request.params.prompt_logprobs is not None:
                prompt_logprobs = tuple(self.prompt_logprobs)
        reason: FinishReason | None = None
        stop: int | str | None = None
        text = ""
        if token in self._stops:
            reason = "stop"
            if token in sequence.request.params.stop_token_ids:
                stop = token
        else:
            if self._push is not None:
                try:
                    text, stop = self._push(token)
                except BaseException as error:
                    self._spoil(error)
            if self._fault is not None:
                reason = "error"
            elif stop is not None:
                reason = "stop"
            elif len(tokens) - pending >= sequence.max_len:
                reason = "length"
        scored = () if logprobs is None else (logprobs,)
        event = new_event(
            (self._id, (token,), text, scored, prompt_logprobs, None, None, None, sequence.num_cached, None)
        )
        return event if reason is None else self._last(event, reason, stop)

    def end(self, reason: FinishReason, error: str | None = None, param: str | None = None) -> Event:
        """Its last event, where something else than a token ends it."""
        return self._last(Event(self._id, param=param), reason, None, error)

    def _take_none(self) -> Event:
        if self.steering is None or self.steering.fault is None:
            return self.end("error", NOT_FINITE)
        return self.end("error", self.steering.fault, self.steering.blamed)

    def _last(self, event: Event, reason: FinishReason, stop: int | str | None, error: str | None = None) -> Event:
        """With the text that was held back. A fault of its own goes before any other reason."""
        self.ended = True
        text = event.text
        if self._text is not None and not isinstance(stop, str):
            try:
                rest, met = self._text.flush()
                text += rest
                if met is not None and reason in ("stop", "length"):
                    reason, stop = "stop", met
            except BaseException as fault:
                self._spoil(fault)
        if self._fault is not None:
            reason, stop, error = "error", None, self._fault
        if self.first_token is None:
            self._count_prompt()
        return event._replace(text=text, finish_reason=reason, stop_reason=stop, error=error)

    def _count_prompt(self) -> None:
        self._counts.prompt += self.sequence.num_prompt
        self._counts.cached += self.sequence.num_cached

    def _spoil(self, error: BaseException) -> None:
        """Take note of a fault; its text is not asked again."""
        log.error("request %s failed", self._id, exc_info=error)
        self._fault = f"The request failed: {type(error).__name__}: {error}"
        self._text = None
