"""The answer to a request: tokens come in, events go out, and the last event says why the answer ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from infer.contracts.request import Event, FinishReason, TokenLogprobs
from infer.contracts.scheduler import Sequence
from infer.engine.batch import Floats
from infer.engine.processors import LogitsProcessor
from infer.engine.reporting import Counts
from infer.text.detokenizer import NOTHING, TextStream, TokenTexts

log = logging.getLogger(__name__)

NOT_FINITE = "The model's output is not finite (NaN or infinity)."


class Answer:
    """The answer to one request: its text, its stop conditions and its logprobs.

    A fault in a part that belongs to this answer alone (text, stop strings, logits processor) ends this answer only.
    """

    __slots__ = (
        "_clock",
        "_counts",
        "_decode",
        "_fault",
        "_find",
        "_id",
        "_left",
        "_sum",
        "_text",
        "ended",
        "first_token",
        "plain",
        "processor",
        "prompt_logprobs",
        "sequence",
        "stops",
    )  # fmt: skip

    def __init__(
        self,
        sequence: Sequence,
        texts: TokenTexts | None,
        eos_token_ids: frozenset[int],
        counts: Counts,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        request = sequence.request
        params = request.params
        self._id = request.id
        self._counts = counts
        self._clock = clock
        stops = frozenset() if params.ignore_eos else eos_token_ids
        self.stops = stops.union(params.stop_token_ids) if params.stop_token_ids else stops
        """The tokens that end the answer."""
        self._text: TextStream | None = None
        self._fault: str | None = None
        self.sequence = sequence
        self.processor: LogitsProcessor | None = None
        """Edits the request's logits; None if it edits none."""
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]
        """Those that have been computed so far."""
        self.first_token: float | None = None
        """When the first token was taken, on the clock."""
        self.ended = False
        self._left = sequence.num_prompt if request.pooling == "mean" else 1
        """How many rows are still to be pooled, if the request asks for an embedding."""
        self._sum: Any = 0.0
        """Of those that have been."""
        try:
            if texts is not None and request.pooling is None:
                self._text = TextStream(texts, request.prompt_token_ids, params.stop)
            if params.edits_logits:
                self.processor = LogitsProcessor(request, self.stops)
        except BaseException as error:  # a panic in Rust code is not an Exception
            self._fail(error)
        self.plain = NOTHING
        """The texts of tokens that change nothing but the text, provided that they do not end the answer. Empty before
        the first token, which changes more, and once the answer has ended."""
        self._decode = None if self._text is None else self._text.decode
        self._find = None if self._text is None else self._text.find

    @property
    def failed(self) -> bool:
        """Whether the answer cannot even begin; the engine then ends it at once."""
        return self._fault is not None

    @property
    def num_tokens(self) -> int:
        """How many tokens of the answer have been taken."""
        sequence = self.sequence
        return len(sequence.tokens) - sequence.pending - sequence.num_prompt

    def take(self, token: int | None, logprobs: TokenLogprobs | None) -> Event:
        """Replace the oldest pending token with ``token`` and return its event, which is the last one if the token ends
        the answer. ``token`` is None if the model's output was not finite or the logits processor allows no token."""
        if token is None:
            return self._take_none()
        sequence = self.sequence
        tokens = sequence.tokens
        tokens[-sequence.pending] = token
        self._counts.generated += 1
        text = self.plain.get(token)
        if text is None or token in self.stops or len(tokens) >= sequence.max_len:
            return self._weigh(token, logprobs)
        scored = () if logprobs is None else (logprobs,)
        return tuple.__new__(  # in a third of the constructor's time
            Event, (self._id, (token,), text, scored, None, None, None, None, sequence.num_cached, None, None, False)
        )

    def _weigh(self, token: int, logprobs: TokenLogprobs | None) -> Event:
        """The event of a token that may end the answer, or has more to it than its text."""
        sequence = self.sequence
        prompt_logprobs = None
        if self.first_token is None:
            self.first_token = self._clock()
            self._count_prompt()
            if sequence.request.params.prompt_logprobs is not None:
                prompt_logprobs = tuple(self.prompt_logprobs)
        reason: FinishReason | None = None
        stop: int | str | None = None
        text = ""
        if token in self.stops:
            reason = "stop"
            if token in sequence.request.params.stop_token_ids:
                stop = token
        else:
            if self._decode is not None:
                try:
                    if self._find is None:
                        text = self._decode(token)
                    else:
                        text, stop = self._find(self._decode(token))
                except BaseException as error:
                    self._fail(error)
            if self._fault is not None:
                reason = "error"
            elif stop is not None:
                reason = "stop"
            elif len(sequence.tokens) - sequence.pending >= sequence.max_len:
                reason = "length"
        if self._text is not None:
            self.plain = self._text.plain
        scored = () if logprobs is None else (logprobs,)
        event = Event(self._id, (token,), text, scored, prompt_logprobs, num_cached=sequence.num_cached)
        return event if reason is None else self._last(event, reason, stop)

    def pool(self, rows_ND: Floats) -> Event | None:
        """Take hidden states of the prompt, and return the last event once there are all that make the embedding. Rows
        are added one by one in float64, so that no sum depends on how the prompt was cut into chunks."""
        for row_D in rows_ND.astype(np.float64):
            self._sum = self._sum + row_D
        self._left -= len(rows_ND)
        if self._left > 0:
            return None
        count = self.sequence.num_prompt if self.sequence.request.pooling == "mean" else 1
        pooled_D = (self._sum / count).astype(np.float32)
        if not np.isfinite(pooled_D).all():
            return self.end("error", NOT_FINITE)
        event = Event(self._id, num_cached=self.sequence.num_cached, embedding=pooled_D.tobytes())
        return self._last(event, "stop", None)

    def end(self, reason: FinishReason, error: str | None = None, param: str | None = None) -> Event:
        """The last event of an answer that something other than a token ends."""
        return self._last(Event(self._id, param=param), reason, None, error)

    def _take_none(self) -> Event:
        if self.processor is None or self.processor.fault is None:
            return self.end("error", NOT_FINITE)
        return self.end("error", self.processor.fault, self.processor.blamed)

    def _last(self, event: Event, reason: FinishReason, stop: int | str | None, error: str | None = None) -> Event:
        """Make ``event`` the last one: add the text that was held back, and the reason. A fault of this answer
        overrides any other reason."""
        self.ended, self.plain = True, NOTHING
        text = event.text
        if self._text is not None and not isinstance(stop, str):
            try:
                rest, met = self._text.flush()
                text += rest
                if met is not None and reason in ("stop", "length"):
                    reason, stop = "stop", met
            except BaseException as fault:
                self._fail(fault)
        if self._fault is not None:
            reason, stop, error = "error", None, self._fault
        if self.first_token is None:
            self._count_prompt()
        started = self.sequence.started is not None
        return event._replace(text=text, finish_reason=reason, stop_reason=stop, error=error, started=started)

    def _count_prompt(self) -> None:
        self._counts.prompt += self.sequence.num_prompt
        self._counts.cached += self.sequence.num_cached

    def _fail(self, error: BaseException) -> None:
        """Record a fault. The text decoder is not called again."""
        log.error("request %s failed", self._id, exc_info=error)
        self._fault = f"The request failed: {type(error).__name__}: {error}"
        self._text = None
