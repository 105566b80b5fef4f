"""The engine: drain the inbox, schedule, pack, run, publish. It owns the device and knows neither HTTP nor clients."""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain, repeat
from typing import NamedTuple, overload

import numpy as np
from tokenizers import Tokenizer

from infer.contracts.cache import CachePoolProtocol, MappedPool
from infer.contracts.records import RequestRecord, StepRecord, WorkRecord
from infer.contracts.request import Event, FinishReason, Request, TokenLogprobs
from infer.contracts.scheduler import PENDING, Schedule, SchedulerProtocol, Sequence, Works
from infer.engine.answer import Answer, Counts
from infer.engine.batch import Draw, Pool, Score, pack
from infer.engine.runner import Drawn, Launched, Runner
from infer.engine.speculation import Speculation
from infer.engine.steering import Steering
from infer.errors import say
from infer.text.detokenizer import TokenTexts

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Abort:
    """Ends a request: the only message that a client can send about a request that it has submitted."""

    request_id: str


Message = Request | tuple[Request, ...] | Abort | None


_Token = tuple[Answer, int | None, TokenLogprobs | None]
"""A token that was drawn, whose it is, and its logprobs."""


class _Flight(NamedTuple):
    """A pass in flight, and the answers that its results belong to."""

    launched: Launched
    readouts: Seq[Score | Pool | Draw]
    answers: list[Answer]
    """One for each sequence of the batch."""
    works: Works


class Engine:
    """One model, one cache, one scheduler. ``submit`` may be called from any thread, ``step`` from one only.

    Up to ``lag`` passes may be in flight on the device while the host plans the next one, so that the device never
    waits for the host. Planning needs to know how many tokens there are, but not which. If a sequence turns out to have
    ended, its tokens in the passes still in flight are dropped.

    A fault in a request's text or steering ends that request. A fault while a pass is launched ends the requests in
    that pass. Any other exception from ``step`` leaves an unknown state, and the engine must not be used again.
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
        speculation: Speculation | None = None,
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._pool = pool
        self._states: Callable[[], bytes] | None = pool.states if isinstance(pool, MappedPool) else None
        self._texts = None if tokenizer is None else TokenTexts(tokenizer)
        self._eos_token_ids = eos_token_ids
        self._max_seq_len = max_seq_len
        self._lag = lag
        self._speculation = speculation
        self._in_flight: deque[_Flight] = deque()
        self._publish = publish
        self._notify = notify
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._answers: dict[str, Answer] = {}
        """The answers of all open requests, by request id."""
        self._steering: dict[Sequence, Steering] = {}
        """The steering of open requests that have one. It needs each token before it can edit the next logits."""
        self._accepted: dict[str, int] = {}
        """How many tokens of this step answers owe to drafts, by request id."""
        self._counts = Counts()
        self._steps = 0
        self._arrivals = 0

    def submit(self, message: Message) -> None:
        """Put requests or an abort into the inbox, which the next step reads. None only wakes ``wait``."""
        self._inbox.put(message)

    def has_work(self) -> bool:
        return self._scheduler.has_work() or bool(self._in_flight) or not self._inbox.empty()

    def wait(self) -> None:
        """Block until a message arrives, and take it."""
        self._receive(self._inbox.get())

    def step(self) -> None:
        """One iteration: scheduled sequences advance by a token or a chunk. Observers are notified before the step's
        last events are published, so that a client that has received those finds them in what observers report."""
        started = time.perf_counter()
        self._drain_inbox()
        schedule = self._scheduler.schedule()
        plan = [*schedule.passes()]
        if self._speculation is not None:
            plan = self._speculation.extend(plan, self._steering)
        passes = [*map(Works.of, plan)]
        planned = time.perf_counter()
        lag = self._lag if passes and not self._needs_results else 0
        events: list[Event] = []
        for works in passes:
            if events:
                self._publish(events)
            events = self._launch(works)
            events += self._settle(lag)
        if passes:
            self._observe(started, schedule, passes)
            if self._speculation is not None:
                self._speculation.learn(passes, time.perf_counter() - planned)
        else:
            events = self._settle(0)
        self._publish(events)

    @property
    def _needs_results(self) -> bool:
        """Whether the next plan needs to know which tokens were drawn: to edit logits by them, or to propose what comes
        after them. The engine then reads every pass before it plans the next."""
        return bool(self._steering) or (self._speculation is not None and self._speculation.hopes)

    def fail_all(self, reason: FinishReason, error: str | None) -> None:
        """End every open request; for shutting down."""
        self._drain_inbox()
        self._in_flight.clear()
        self._publish([self._end(answer, reason, error) for answer in list(self._answers.values())])

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
            answer = Answer(sequence, self._texts, self._eos_token_ids, self._counts)
            self._answers[message.id] = answer
            self._scheduler.add(sequence)
            if answer.steering is not None:
                self._steering[sequence] = answer.steering
            if answer.spoilt:
                self._publish([self._end(answer, "error")])
        elif isinstance(message, Abort) and (known := self._answers.get(message.request_id)):
            self._publish([self._end(known, "abort")])

    def _launch(self, works: Works) -> list[Event]:
        """Launch a pass and record what it will have computed. If the launch fails, the requests in the pass end; their
        last events are returned."""
        answers = [self._answers[sequence.id] for sequence in works.sequences]
        try:
            batch = pack(works, self._steering)
            launched = self._runner.launch(batch)
        except (Exception, SystemExit) as error:
            log.error("a pass with %d requests failed", len(works), exc_info=error)
            text = f"The step failed: {say(error)}"
            return [self._end(answer, "error", text) for answer in answers]
        self._in_flight.append(_Flight(launched, batch.readouts, answers, works))
        if batch.decode_only:
            for sequence, start in zip(works.sequences, works.starts, strict=True):
                sequence.num_computed = start + 1
                sequence.tokens.append(PENDING)
                sequence.pending += 1
            return []
        for sequence, start, length, draws, decode, _ in zip(*works.columns, strict=True):
            sequence.num_computed = start + length
            if draws:
                sequence.tokens.append(PENDING)
                sequence.pending += 1
            if not decode and sequence.started is None:
                sequence.started = time.perf_counter()
        for readout in batch.readouts:
            match readout:
                case Score(of=b, targets=targets):
                    works.sequences[b].prompt_scored += len(targets)
                case Pool(of=b, count=count):
                    works.sequences[b].prompt_scored += count
        return []

    def _settle(self, left: int) -> list[Event]:
        """Read the results of all but the last ``left`` passes in flight and return an event for every token. Tokens of
        sequences that ended while the pass was in flight are dropped, and so are those after a wrong draft token."""
        events: list[Event] = []
        while len(self._in_flight) > left:
            launched, readouts, answers, works = self._in_flight.popleft()
            results = launched.results()  # not caught: a device that fails here does not recover
            for readout, result in zip(readouts, results, strict=True):
                match readout, result:
                    case Score(of=b), list():
                        answers[b].prompt_logprobs += result
                    case Pool(of=b), np.ndarray():
                        if not answers[b].ended and (last := answers[b].pool(result)):
                            events.append(last)
                            self._leave(answers[b], last)
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
        return events

    def _verified(
        self, drawn: Iterable[_Token], works: Works, of: Seq[int], tokens: Seq[int | None]
    ) -> Iterator[_Token]:
        """What was drawn, without the tokens after a wrong draft. Each token is to be taken before the next is read:
        those that open answers owe to drafts are counted."""
        assert self._speculation is not None, "nobody else adds drafts"
        wrong = self._speculation.verify(works, of, tokens)
        self._counts.proposed += sum(map(len, works.drafts))
        for n, (answer, token, scored) in enumerate(drawn):
            if n in wrong:
                continue
            if n and of[n - 1] == of[n] and not answer.ended:
                self._accepted[answer.sequence.id] = self._accepted.get(answer.sequence.id, 0) + 1
                answer.sequence.accepted += 1
                self._counts.accepted += 1
            yield answer, token, scored

    def _end(self, answer: Answer, reason: FinishReason, error: str | None = None) -> Event:
        event = answer.end(reason, error)
        self._leave(answer, event)
        return event

    def _leave(self, answer: Answer, last: Event) -> None:
        """Remove a request that has ended, free its slot, and notify the observers."""
        sequence = answer.sequence
        self._scheduler.finish(sequence)
        self._steering.pop(sequence, None)
        if self._speculation is not None:
            self._speculation.end(sequence)
        del self._answers[sequence.id]
        self._notify(
            "infer_request_finished",
            RequestRecord(
                request_id=sequence.id,
                num_prompt=sequence.num_prompt,
                num_generated=answer.num_tokens,
                num_cached=sequence.num_cached,
                finish_reason=str(last.finish_reason),
                arrival=sequence.request.arrival,
                started=sequence.started,
                first_token=answer.first_token,
                finished=time.perf_counter(),
                preemptions=sequence.preemptions,
                trace=sequence.request.trace,
                free_tokens=self._pool.free_tokens(),
                totals=self._counts.totals(),
                proposed=sequence.proposed,
                accepted=sequence.accepted,
            ),
        )

    def _observe(self, started: float, schedule: Schedule, passes: Seq[Works]) -> None:
        waiting = [answer.sequence.slot for answer in self._answers.values()].count(None)
        work = passes[0] if len(passes) == 1 else Works.of([*chain(*passes)])
        self._notify(
            "infer_step_finished",
            StepRecord(
                index=self._steps,
                started=started,
                finished=time.perf_counter(),
                work=Records(work, self._accepted),
                passes=len(passes),
                decodes=len(schedule.decodes),
                chunks=len(schedule.prefills),
                computed_tokens=sum(work.lens),
                padded_tokens=sum(len(works) * max(works.lens) for works in passes),
                running=len(self._answers) - waiting,
                waiting=waiting,
                free_tokens=self._pool.free_tokens(),
                totals=self._counts.totals(),
                proposed=sum(map(len, work.drafts)) if self._speculation is not None else 0,
                accepted=sum(self._accepted.values()),
                blocks=self._states,
            ),
        )
        self._accepted = {}
        self._steps += 1


class Records(Seq[WorkRecord]):
    """A step's WorkRecords, each made only when it is read, because often no observer reads them."""

    def __init__(self, works: Works, accepted: Mapping[str, int]) -> None:
        """``accepted``: how many tokens each request owes to drafts; 0 if it is not there."""
        self._works = works
        self._accepted = accepted

    def __len__(self) -> int:
        return len(self._works)

    def __iter__(self) -> Iterator[WorkRecord]:
        sequences, starts, lens, draws, decode, drafts = self._works.columns
        ids = [sequence.id for sequence in sequences]
        kinds = ["decode" if each else "prefill" for each in decode]
        sampled = [each > 0 for each in draws]
        accepted = map(self._accepted.get, ids, repeat(0))
        made = zip(ids, kinds, starts, lens, sampled, map(len, drafts), accepted, strict=True)
        return map(WorkRecord._make, made)

    @overload
    def __getitem__(self, index: int) -> WorkRecord: ...
    @overload
    def __getitem__(self, index: slice) -> Records: ...
    def __getitem__(self, index: int | slice) -> WorkRecord | Records:
        if isinstance(index, slice):
            return Records(self._works[index], self._accepted)
        sequence, start, length, draws, decode, drafts = self._works[index]
        kind, accepted = "decode" if decode else "prefill", self._accepted.get(sequence.id, 0)
        return WorkRecord(sequence.id, kind, start, length, draws > 0, len(drafts), accepted)
