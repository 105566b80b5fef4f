"""The engine: drain the inbox, schedule, launch, settle, observe, publish. It owns the device and knows neither HTTP
nor clients."""

from __future__ import annotations

import logging
import math
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from infer.contracts.cache import CachePoolProtocol, LastingPool
from infer.contracts.params import SamplingParams
from infer.contracts.request import Event, FinishReason, Request, TokenLogprobs
from infer.contracts.scheduler import PENDING, Schedule, SchedulerProtocol, Sequence, Work, Works
from infer.engine.answer import Answer
from infer.engine.answers import Answers
from infer.engine.batch import Batch, Draw, HiddenStates, Lineup, Score, pack
from infer.engine.confirmation import Confirmation
from infer.engine.isolation import Isolation
from infer.engine.pace import Pace
from infer.engine.processors import LogitsProcessor
from infer.engine.reporting import Notify, Reporter
from infer.engine.runner import Drawn, Executor, Launched
from infer.engine.speculation import Speculation
from infer.errors import one_line
from infer.text.detokenizer import TokenTexts

log = logging.getLogger(__name__)

QUIET_S = 5.0
"""After so many seconds without a message, nobody is taken to be about to ask for something."""


@dataclass(frozen=True, slots=True)
class Abort:
    """Ends a request: the only message that a client can send about a request that it has submitted."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Errand:
    """Is done between two steps. ``run`` does not raise."""

    run: Callable[[], None]


Message = Request | tuple[Request, ...] | Abort | Errand | None


_Token = tuple[Answer, int | None, TokenLogprobs | None]
"""A token that was drawn, the answer that it belongs to, and its logprobs."""


class _Flight(NamedTuple):
    """A pass in flight, and the answers that its results belong to."""

    launched: Launched
    readouts: Seq[Score | HiddenStates | Draw]
    answers: Seq[Answer] | Answers
    """One for each sequence of the batch."""
    works: Works


class Engine:
    """One model, one cache, one scheduler. ``submit`` may be called from any thread, ``step`` from one only.

    Up to ``lag`` passes may be in flight on the device while the host plans the next one, so that the device never
    waits for the host. Planning needs to know how many tokens there are, but not which. If a sequence turns out to have
    ended, its tokens in the passes still in flight are dropped.

    A fault in a request's text or logits processor ends that request. If launching a pass fails, the requests that
    cause it end, and the others of that pass are computed again. Any other exception from ``step`` leaves an unknown
    state, and the engine must not be used again. ``clock`` gives all times, in seconds.
    """

    def __init__(
        self,
        runner: Executor,
        scheduler: SchedulerProtocol,
        pool: CachePoolProtocol,
        *,
        tokenizer: Tokenizer | None,
        eos_token_ids: frozenset[int],
        max_seq_len: int,
        lag: int,
        publish: Callable[[Seq[Event]], None],
        notify: Notify,
        speculation: Speculation | None = None,
        confirmation: Confirmation | None = None,
        pace: Pace | None = None,
        priority_aging_s: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._runner = runner
        self._clock = clock
        self._scheduler = scheduler
        self._texts = None if tokenizer is None else TokenTexts(tokenizer)
        self._eos_token_ids = eos_token_ids
        self._max_seq_len = max_seq_len
        self._lag = lag
        self._confirmation = confirmation
        self._pace = pace
        self._priority_aging_s = priority_aging_s
        self._lasting = pool if isinstance(pool, LastingPool) else None
        self._speculation = speculation
        self._pool = pool
        self._isolation = Isolation()
        self._publish = publish
        self._reporter = Reporter(pool, notify, speculative=speculation is not None, clock=clock)
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._in_flight: deque[_Flight] = deque()
        self._settled: list[Works] = []
        """Of the passes whose results the step has read."""
        self._answers: dict[str, Answer] = {}
        """The answers of all open requests, by request id."""
        self._decoding = self._nobody = Answers(Lineup([]), [], self._reporter.counts)
        """The answers of the last pass that only decoded, as long as there are any."""
        self._processors: dict[Sequence, LogitsProcessor] = {}
        """Those of open requests that edit logits. Each needs every token before it can edit the next logits."""
        self._arrivals = 0
        self._adapted = 0
        """How many open requests have an adapter."""
        self._deadlines: dict[str, float] = {}
        """When the open requests with a ``timeout_s`` have to end, on the clock, by their ids."""
        self._next_deadline = math.inf
        """No deadline is earlier."""

    def submit(self, message: Message) -> None:
        """Put requests or an abort into the inbox, which the next step reads. None only wakes ``wait``."""
        self._inbox.put(message)

    def has_work(self) -> bool:
        return self._scheduler.has_work() or bool(self._in_flight) or not self._inbox.empty()

    def wait(self) -> None:
        """Block until a message arrives, and take it. Meanwhile, a pool keeps what is to outlive the process, and what
        is known of exactness is confirmed."""
        while self._lasting is not None and self._inbox.empty() and self._lasting.rest():
            pass
        confirmation = self._confirmation
        if confirmation is not None and confirmation.left:
            with suppress(queue.Empty):
                self._receive(self._inbox.get(timeout=QUIET_S))
                return
            while self._inbox.empty() and confirmation.rest():
                pass
            confirmation.interrupt()
        self._receive(self._inbox.get())

    def step(self, on_pass: Callable[[], None] = lambda: None) -> None:
        """One iteration: scheduled sequences advance by a token or a chunk. Observers are notified before the step's
        last events are published, so that a client that has received those finds them in what observers report.
        ``on_pass`` is called before each pass."""
        started = self._clock()
        self._drain_inbox()
        self._end_overdue()
        planned = self._clock()
        schedule = self._scheduler.schedule()
        isolating = self._isolation.active
        # Whether nobody waits, unless a pass raises: who is in the schedule has a slot.
        everyone = len(schedule.decodes) + len(schedule.prefills) == len(self._answers)
        passes, launched = self._plan(schedule), list[Works]()
        events = [] if passes else self._settle(0)
        for works in passes:
            if events:
                self._publish(events)
            on_pass()
            error = self._launch(works)
            if error is None:
                launched.append(works)
                events = self._settle(self._ahead)
            else:
                events = self._isolate(works, error)
        whole = launched == passes
        if launched:
            slots = [] if everyone and whole else [answer.sequence.slot for answer in self._answers.values()]
            self._reporter.step(started, launched, len(self._answers), slots.count(None))
        timed = whole and not isolating  # or its time says nothing
        if self._speculation is not None and timed:
            self._speculation.learn(passes)
        self._publish(events)
        if self._pace is not None and self._settled and timed:
            self._pace.learn(self._settled, self._clock() - planned)
        self._settled.clear()

    def fail_all(self, reason: FinishReason, error: str | None) -> None:
        """End every open request; for shutting down."""
        self._drain_inbox()
        self._in_flight.clear()
        self._publish([self._end(answer, reason, error) for answer in list(self._answers.values())])
        if self._lasting is not None:
            self._lasting.close()

    def _drain_inbox(self) -> None:
        while not self._inbox.empty():
            self._receive(self._inbox.get())

    def _receive(self, message: Message) -> None:
        match message:
            case tuple():
                for request in message:
                    self._admit(request)
            case Request():
                self._admit(message)
            case Errand(run):
                run()
            case Abort(request_id) if known := self._answers.get(request_id):
                self._publish([self._end(known, "abort")])

    def _end_overdue(self) -> None:
        """End the requests whose time is up, running or waiting, and free their slots."""
        now = self._clock()
        if now < self._next_deadline:
            return
        for id in [id for id, deadline in self._deadlines.items() if deadline <= now]:
            answer = self._answers[id]
            error = f"The request has not ended within its {answer.sequence.request.timeout_s:g} seconds (timeout)."
            self._publish([self._end(answer, "timeout", error)])
        self._next_deadline = min(self._deadlines.values(), default=math.inf)

    def _admit(self, request: Request) -> None:
        """Open an answer for a new request, and hand its sequence to the scheduler."""
        longest, max_tokens = self._max_seq_len, request.params.max_tokens
        if max_tokens is not None:
            longest = min(longest, len(request.prompt_token_ids) + max_tokens)
        sequence = Sequence(request, self._arrivals, longest, arrived=self._clock(), aging_s=self._priority_aging_s)
        self._arrivals += 1
        self._adapted += request.adapter is not None
        answer = Answer(sequence, self._texts, self._eos_token_ids, self._reporter.counts, self._clock)
        self._answers[request.id] = answer
        if request.timeout_s is not None:
            self._deadlines[request.id] = deadline = request.arrival + request.timeout_s
            self._next_deadline = min(self._next_deadline, deadline)
        self._scheduler.add(sequence)
        if answer.processor is not None:
            self._processors[sequence] = answer.processor
        if answer.failed:
            self._publish([self._end(answer, "error")])

    def _plan(self, schedule: Schedule) -> list[Works]:
        """The works of each pass, as much of prompts as there is time for, with draft tokens where they pay."""
        if self._pace is not None:
            schedule = self._pace.cut(schedule)
        plan = [*schedule.passes()]
        if self._isolation.active:
            plan = self._isolation.split(plan)
        elif self._speculation is not None:
            plan = self._speculation.extend(plan, self._processors)
        return [*map(Works.of, plan)]

    @property
    def _ahead(self) -> int:
        """How many passes may be in flight when the next one is launched. None may be if the next plan needs to know
        which tokens were drawn, to edit logits by them or to propose what comes after them, nor while passes are split:
        a sequence could end that is in a later part."""
        wants_drafts = self._speculation is not None and self._speculation.wants_drafts
        return 0 if self._processors or wants_drafts or self._isolation.active else self._lag

    def _launch(self, works: Works) -> BaseException | None:
        """Launch a pass and record what it will have computed; return why it failed, if it did."""
        lineup = self._decoding.lineup.of(works.sequences) if works.single else None
        try:
            batch = pack(works, self._processors, adapted=self._adapted > 0, lineup=lineup)
            launched = self._runner.launch(batch)
        except (Exception, SystemExit) as error:
            log.error("a pass with %d requests failed", len(works), exc_info=error)
            return error
        self._isolation.passed(works)
        if launched.hidden_TD is not None and self._speculation is not None:
            self._speculation.read(works, launched.hidden_TD)
            launched = launched._replace(hidden_TD=None)  # it need not be kept while the pass is in flight
        if lineup is None:
            _advance(works, batch, self._clock())
        else:
            lineup.advance(works.starts)
        answers = self._answers_of(works.sequences, lineup)
        self._in_flight.append(_Flight(launched, batch.readouts, answers, works))
        return None

    def _answers_of(self, sequences: Seq[Sequence], lineup: Lineup | None) -> Seq[Answer] | Answers:
        """The sequences' answers: as columns if they only decode, those of the last decodes if nobody came or went."""
        if lineup is not None and lineup is self._decoding.lineup:
            return self._decoding
        answers = [self._answers[sequence.id] for sequence in sequences]
        if lineup is None:
            return answers
        self._decoding = Answers(lineup, answers, self._reporter.counts)
        return self._decoding

    def _isolate(self, works: Works, error: BaseException) -> list[Event]:
        """End the culprits of a pass that raised, and return their events. The others give up their slots and are
        computed again, because nobody knows what the pass has written there."""
        self._publish(self._settle(0))  # at once: if nobody in particular is to blame, the engine ends here
        events: list[Event] = []
        self._reporter.failed_passes += 1
        culprits = self._isolation.failed(works, error)
        for sequence in works.sequences:
            answer = self._answers.get(sequence.id)
            if answer is None:  # it has ended in a pass that was under way
                self._isolation.end(sequence)
            elif sequence in culprits:
                events.append(self._end(answer, "error", f"The step failed: {one_line(error)}"))
            else:
                self._scheduler.finish(sequence)
                sequence.restart()
                self._scheduler.add(sequence)
        self._isolation.doubt(self._probe)
        return events

    def _probe(self) -> bool:
        """Compute a prompt and a decode of no client. Raises what their passes raise; returns False if the pool has no
        room for them. No pass may be in flight."""
        place = self._pool.allocate([0, 0], reuse=False)
        if place is None:
            return False
        sequence = Sequence(Request((0,), SamplingParams(temperature=0)), 0, 2)
        sequence.slot = place.slot
        try:
            for work in (Work(sequence, 0, 1, 1, False), Work(sequence, 1, 1, 1, True)):
                self._runner.launch(pack([work])).results()
                sequence.tokens.append(0)
        finally:
            self._pool.free(place.slot)
        return True

    def _settle(self, left: int) -> Seq[Event]:
        """Read the results of all but the last ``left`` passes in flight and return an event for every token. Tokens of
        sequences that ended while the pass was in flight are dropped, and so are those after a wrong draft token."""
        settled: list[Seq[Event]] = []
        while len(self._in_flight) > left:
            launched, readouts, answers, works = self._in_flight.popleft()
            results = launched.results()  # not caught: a device that fails here does not recover
            self._settled.append(works)
            events: list[Event] = []
            for readout, result in zip(readouts, results, strict=True):
                match readout, result:
                    case Score(of=b), list():
                        answers[b].prompt_logprobs += result
                    case HiddenStates(of=b), np.ndarray():
                        if not answers[b].ended and (last := answers[b].pool(result)):
                            events.append(last)
                            self._leave(answers[b], last)
                    case Draw(positions_N=at), Drawn(tokens, logprobs) if isinstance(answers, Answers):
                        taken = answers.take(at.tolist(), tokens, logprobs)
                        settled.append(taken)
                        for event in taken.whole:
                            if event.finish_reason is not None:
                                self._leave(self._answers[event.request_id], event)
                    case Draw(of=of), Drawn(tokens, logprobs):
                        drawn: Iterable[_Token] = zip(map(answers.__getitem__, of), tokens, logprobs, strict=True)
                        if readout.last_M is not None:
                            drawn = self._verified(drawn, works, of, tokens)
                        for answer, token, scored in drawn:
                            if not answer.ended:
                                event = answer.take(token, scored)
                                events.append(event)
                                if answer.ended:
                                    self._leave(answer, event)
                    case _:
                        raise TypeError(f"a {type(readout).__name__} yielded a {type(result).__name__}")
            if events:
                settled.append(events)
        return settled[0] if len(settled) == 1 else [*chain(*settled)]

    def _verified(
        self, drawn: Iterable[_Token], works: Works, of: Seq[int], tokens: Seq[int | None]
    ) -> Iterator[_Token]:
        """What was drawn, without the tokens after a wrong draft. Take each token before reading the next: the accepted
        drafts of answers that are still open are counted."""
        assert self._speculation is not None, "nobody else adds drafts"
        wrong = self._speculation.verify(works, of, tokens)
        self._reporter.counts.proposed += sum(map(len, works.drafts))
        for n, (answer, token, scored) in enumerate(drawn):
            if n in wrong:
                continue
            if n and of[n - 1] == of[n] and not answer.ended:
                answer.sequence.accepted += 1
                self._reporter.accept(answer.sequence)
            yield answer, token, scored

    def _end(self, answer: Answer, reason: FinishReason, error: str | None = None) -> Event:
        event = answer.end(reason, error)
        self._leave(answer, event)
        return event

    def _leave(self, answer: Answer, last: Event) -> None:
        """Remove a request that has ended, free its slot, and notify the observers."""
        sequence = answer.sequence
        self._scheduler.finish(sequence)
        self._adapted -= sequence.request.adapter is not None
        self._processors.pop(sequence, None)
        self._deadlines.pop(sequence.id, None)
        self._isolation.end(sequence)
        if self._speculation is not None:
            self._speculation.end(sequence)
        del self._answers[sequence.id]
        if not self._answers:
            self._decoding = self._nobody  # nothing of the last batch is kept
        self._reporter.request(
            sequence,
            generated=answer.num_tokens,
            first_token=answer.first_token,
            reason=str(last.finish_reason),
        )


def _advance(works: Works, batch: Batch, now: float) -> None:
    """Record in the sequences what a pass with more than decodes computes, draws and reads out of prompts."""
    for sequence, start, length, draws, decode, _ in zip(*works.columns, strict=True):
        sequence.num_computed = start + length
        if draws:
            sequence.tokens.append(PENDING)
        if not decode and sequence.started is None:
            sequence.started = now
    for readout in batch.readouts:
        match readout:
            case Score(of=b, targets=targets):
                works.sequences[b].prompt_scored += len(targets)
            case HiddenStates(of=b, count=count):
                works.sequences[b].prompt_scored += count
