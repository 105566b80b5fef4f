"""The engine: drain the inbox, schedule, pack, run, publish. It owns the device and knows neither HTTP nor clients."""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import overload

from tokenizers import Tokenizer

from infer.engine.batch import pack
from infer.engine.runner import Launched, Runner
from infer.engine.sequence import PENDING, Schedule, Sequence, Work
from infer.engine.steering import Steering
from infer.engine.text import TextStream, TokenTexts
from infer.hookspecs import RequestRecord, StepRecord, Totals, WorkRecord
from infer.protocols import CachePoolProtocol, SchedulerProtocol
from infer.request import Event, FinishReason, Request, TokenLogprobs

log = logging.getLogger(__name__)

NOT_FINITE = "The model's output is not finite (NaN or infinity)."


@dataclass(frozen=True, slots=True)
class Abort:
    """All that a client may still say after submission."""

    request_id: str


Message = Request | tuple[Request, ...] | Abort | None


@dataclass(eq=False, slots=True)
class _Live:
    """What the engine keeps of an unfinished request besides its sequence."""

    sequence: Sequence
    stops: frozenset[int]
    """Tokens that end it."""
    text: TextStream | None = None
    first_token: float | None = None
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=lambda: [None])
    fault: str | None = None
    """What went wrong in a part that is its alone: it ends of that, and nobody else does."""

    def spoil(self, error: BaseException) -> None:
        """Take note of such a fault; its text is not asked again."""
        log.error("request %s failed", self.sequence.id, exc_info=error)
        self.fault = f"The request failed: {type(error).__name__}: {error}"
        self.text = None


class Engine:
    """One model, one cache, one scheduler. ``submit`` may be called from any thread, ``step`` from one only.

    ``lag`` passes may be on their way through the device while the next is planned, so that it never waits for the
    host. Planning needs to know how many tokens there are, not which; whoever turns out to have ended meanwhile was
    computed in vain for that many passes, and the result is dropped.

    A fault in a request's text or steering ends that request, one while a pass is set going those in the pass. Whatever
    else raises in ``step`` leaves the books as nobody knows: the engine is not to be used again.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: SchedulerProtocol,
        pool: CachePoolProtocol,
        *,
        tokenizer: Tokenizer | None,
        eos_token_ids: frozenset[int],
        max_seq_len: int,
        lag: int,
        publish: Callable[[list[Event]], None],
        notify: Callable[[str, StepRecord | RequestRecord], None],
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._pool = pool
        self._texts = None if tokenizer is None else TokenTexts(tokenizer)
        self._eos_token_ids = eos_token_ids
        self._max_seq_len = max_seq_len
        self._lag = lag
        self._in_flight: deque[Launched] = deque()
        self._publish = publish
        self._notify = notify
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._live: dict[str, _Live] = {}
        self._steps = 0
        self._arrivals = 0
        self._num_steered = 0
        self._num_prompt = self._num_cached = self._num_generated = 0

    def submit(self, message: Message) -> None:
        """Hand over requests or an abort; it counts from the next step. None only wakes ``wait``."""
        self._inbox.put(message)

    def has_work(self) -> bool:
        return self._scheduler.has_work() or bool(self._in_flight) or not self._inbox.empty()

    def wait(self) -> None:
        """Block until there is a message."""
        self._receive(self._inbox.get())

    def step(self) -> None:
        """One iteration: everyone who runs gets ahead by a token or a chunk."""
        started = time.perf_counter()
        self._drain_inbox()
        if self._num_steered:
            self._settle(0)  # what they may draw next depends on what they drew last
        schedule = self._scheduler.schedule()
        passes = list(schedule.passes())
        for works in passes:
            self._launch(works)
            self._settle(self._lag)
        if passes:
            self._observe(started, schedule, passes)
        else:
            self._settle(0)

    def fail_all(self, reason: FinishReason, error: str | None) -> None:
        """End every request that is here; for shutting down."""
        self._drain_inbox()
        self._in_flight.clear()
        self._publish([self._end(live, reason, error=error) for live in list(self._live.values())])

    def _drain_inbox(self) -> None:
        while not self._inbox.empty():
            self._receive(self._inbox.get())

    def _receive(self, message: Message) -> None:
        if isinstance(message, tuple):
            for request in message:
                self._receive(request)
        elif isinstance(message, Request):
            params = message.params
            longest = self._max_seq_len
            if params.max_tokens is not None:
                longest = min(longest, len(message.prompt_token_ids) + params.max_tokens)
            sequence = Sequence(message, self._arrivals, longest)
            self._arrivals += 1
            stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_token_ids)
            new = self._live[message.id] = _Live(sequence, stops)
            self._scheduler.add(sequence)
            try:
                if self._texts is not None:
                    new.text = TextStream(self._texts, message.prompt_token_ids, params.stop)
                if params.steered:
                    sequence.steering = Steering(message, stops)
                    self._num_steered += 1
            except BaseException as error:  # a panic of Rust's is no Exception
                new.spoil(error)
                self._publish([self._end(new, "error")])
        elif isinstance(message, Abort) and (live := self._live.get(message.request_id)):
            self._publish([self._end(live, "abort")])

    def _launch(self, works: Seq[Work]) -> None:
        """Set a pass going, and book what it will have computed."""
        try:
            launched = self._runner.launch(pack(works))
        except Exception as error:
            self._fail(works, error)
            return
        for sequence, start, length, _, decode in works:
            sequence.num_computed = start + length
            if not decode and sequence.started is None:
                sequence.started = time.perf_counter()
        for sequence, _, n in launched.batch.scored:
            sequence.prompt_scored += n
        for sequence in launched.batch.sampled:
            sequence.tokens.append(PENDING)
            sequence.pending += 1
        self._in_flight.append(launched)

    def _settle(self, left: int) -> None:
        """Read the results of all but the last ``left`` passes; one event for every sequence that got a token."""
        while len(self._in_flight) > left:
            launched = self._in_flight.popleft()
            result = launched.result()  # a device that has failed here stays so: not caught
            for sequence, scores in result.prompt_logprobs:
                if live := self._alive(sequence):
                    live.prompt_logprobs += scores
            sampled = zip(launched.batch.sampled, result.tokens, result.logprobs, strict=True)
            self._publish(
                [
                    self._take(live, sequence, token, logprobs)
                    for sequence, token, logprobs in sampled
                    if (live := self._alive(sequence))
                ]
            )

    def _alive(self, sequence: Sequence) -> _Live | None:
        """None where it has ended while a pass was on its way."""
        live = self._live.get(sequence.id)
        return live if live is not None and live.sequence is sequence else None

    def _take(self, live: _Live, sequence: Sequence, token: int | None, logprobs: TokenLogprobs | None) -> Event:
        """Fill in a sequence's oldest pending token and see whether it is the last."""
        if token is None:
            steering = sequence.steering
            if steering is None or steering.fault is None:
                return self._end(live, "error", error=NOT_FINITE)
            return self._end(live, "error", Event(sequence.id, param=steering.blamed), error=steering.fault)
        tokens, pending = sequence.tokens, sequence.pending
        tokens[-pending] = token
        sequence.pending = pending = pending - 1
        self._num_generated += 1
        scored = (logprobs,) if logprobs else ()
        prompt_scored = None
        if live.first_token is None:
            live.first_token = time.perf_counter()
            self._count_prompt(sequence)
            if sequence.request.params.prompt_logprobs is not None:
                prompt_scored = tuple(live.prompt_logprobs)
        reason: FinishReason | None = None
        stop: int | str | None = None
        text = ""
        if token in live.stops:
            reason = "stop"
            if token in sequence.request.params.stop_token_ids:
                stop = token
        else:
            if live.text is not None:
                try:
                    text, stop = live.text.push(token)
                except BaseException as error:
                    live.spoil(error)
            if live.fault is not None:
                reason = "error"
            elif stop is not None:
                reason = "stop"
            elif len(tokens) - pending >= sequence.max_len:
                reason = "length"
        event = Event(sequence.id, (token,), text, scored, prompt_scored, None, None, None, sequence.num_cached)
        return event if reason is None else self._end(live, reason, event, stop_reason=stop)

    def _end(
        self,
        live: _Live,
        reason: FinishReason,
        event: Event | None = None,
        *,
        stop_reason: int | str | None = None,
        error: str | None = None,
    ) -> Event:
        """Free the request's room and make its last event. A fault of its own goes before any other reason."""
        sequence = live.sequence
        num_known = len(sequence.tokens) - sequence.pending
        self._scheduler.finish(sequence)
        self._num_steered -= sequence.steering is not None
        del self._live[sequence.id]
        text = event.text if event else ""
        if live.text is not None and not isinstance(stop_reason, str):
            try:
                rest, stop = live.text.flush()
                text += rest
                if stop is not None and reason in ("stop", "length"):
                    reason, stop_reason = "stop", stop
            except BaseException as fault:
                live.spoil(fault)
        if live.fault is not None:
            reason, stop_reason, error = "error", None, live.fault
        if live.first_token is None:
            self._count_prompt(sequence)
        self._notify(
            "infer_request_finished",
            RequestRecord(
                request_id=sequence.id,
                num_prompt=sequence.num_prompt,
                num_generated=num_known - sequence.num_prompt,
                num_cached=sequence.num_cached,
                finish_reason=reason,
                arrival=sequence.request.arrival,
                started=sequence.started,
                first_token=live.first_token,
                finished=time.perf_counter(),
                preemptions=sequence.preemptions,
                trace=sequence.request.trace,
                free_tokens=self._pool.free_tokens(),
                totals=self._totals(),
            ),
        )
        event = event or Event(sequence.id)
        return event._replace(text=text, finish_reason=reason, stop_reason=stop_reason, error=error)

    def _count_prompt(self, sequence: Sequence) -> None:
        self._num_prompt += sequence.num_prompt
        self._num_cached += sequence.num_cached

    def _totals(self) -> Totals:
        return Totals(self._num_prompt, self._num_cached, self._num_generated)

    def _fail(self, works: Seq[Work], error: Exception) -> None:
        log.error("a pass with %d requests failed", len(works), exc_info=error)
        text = f"The step failed: {type(error).__name__}: {error}"
        self._publish([self._end(self._live[w.sequence.id], "error", error=text) for w in works])

    def _observe(self, started: float, schedule: Schedule, passes: Seq[Seq[Work]]) -> None:
        running = sum([live.sequence.slot is not None for live in self._live.values()])
        lengths = [[work.length for work in works] for works in passes]
        self._notify(
            "infer_step_finished",
            StepRecord(
                index=self._steps,
                started=started,
                finished=time.perf_counter(),
                work=Records([work for works in passes for work in works]),
                passes=len(passes),
                decodes=len(schedule.decodes),
                chunks=len(schedule.prefills),
                computed_tokens=sum(map(sum, lengths)),
                padded_tokens=sum(len(row) * max(row) for row in lengths),
                running=running,
                waiting=len(self._live) - running,
                free_tokens=self._pool.free_tokens(),
                totals=self._totals(),
            ),
        )
        self._steps += 1


class Records(Seq[WorkRecord]):
    """Made when somebody looks."""

    def __init__(self, works: list[Work]) -> None:
        self._works = works

    def __len__(self) -> int:
        return len(self._works)

    @overload
    def __getitem__(self, index: int) -> WorkRecord: ...
    @overload
    def __getitem__(self, index: slice) -> Records: ...
    def __getitem__(self, index: int | slice) -> WorkRecord | Records:
        if isinstance(index, slice):
            return Records(self._works[index])
        sequence, start, length, samples, decode = self._works[index]
        return WorkRecord(sequence.id, "decode" if decode else "prefill", start, length, samples)
