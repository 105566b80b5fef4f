"""The engine's thread, and how other threads reach it: submit, abort, close."""

from __future__ import annotations

import atexit
import logging
import math
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from infer.contracts.adapters import Adapter
from infer.contracts.request import Event, Request
from infer.engine.adapters import AdapterSlots
from infer.engine.engine import Abort, Engine, Errand
from infer.engine.events import Events
from infer.errors import EngineDeadError, InferError, QueueFullError, one_line

log = logging.getLogger(__name__)

Mailbox = Callable[[Sequence[Event]], None]
"""Receives the events of a client's requests. It is called in the engine's thread, once per pass, with all events of
that client. If it raises, the requests of these events are aborted."""


LAST_ENDS = 64
"""From how many of the last requests' ends the next ones are foretold."""
LONGEST_RETRY_S = 60
"""The longest that a client is told to wait before it tries again, in seconds."""


class EngineLoop:
    """Makes an engine and runs it in a thread of its own. All methods may be called from any thread.

    A request takes one of ``max_open`` places. The requests of a group share a place until the first of them has an
    event, so that answers that cannot begin yet keep no other request out; a request that shares a place is accepted
    only while fewer than ``max_open`` requests are open in all. The prompts of open requests, that of a group counted
    once, have at most ``max_open_tokens`` tokens together, or there is only one. Every request that ``submit`` accepted
    gets exactly one event with a finish_reason, whatever happens.

    The future ``ended`` is done once the engine has stopped and all last events have been published. It holds an
    EngineDeadError if the engine failed; a failed engine is not started again. ``after`` is called then, in the
    engine's thread. A step is stuck if one of its passes takes more than ``step_timeout_s`` seconds on ``clock``: the
    engine is not ``healthy`` until the pass ends.
    """

    def __init__(
        self,
        make_engine: Callable[[Mailbox], Engine],
        max_open: int,
        after: Callable[[], None] = lambda: None,
        *,
        step_timeout_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
        adapters: AdapterSlots | None = None,
        max_open_tokens: int | None = None,
    ) -> None:
        self._adapters = adapters or AdapterSlots(0)
        self._max_open = max_open
        self._max_open_tokens = math.inf if max_open_tokens is None else max_open_tokens
        self._open_tokens: dict[str, int] = {}
        """How many tokens the prompts of open requests have, by request id; of a group's, one has them."""
        self._total_tokens = 0
        """Their sum, which need not be added up for each request."""
        self._after = after
        self._step_timeout_s = step_timeout_s
        self._clock = clock
        self._stepping: float | None = None
        """When the step that runs now began its last pass, on ``clock``."""
        self._open: dict[str, tuple[Mailbox, str, Adapter | None]] = {}
        """The mailbox, group and adapter of each open request, by request id."""
        self._addressed: Sequence[str] = ()
        """The ids of the last events that came as columns."""
        self._address: Mailbox | None = None
        """Their mailbox, if all have the same."""
        self._errands: set[Future[None]] = set()
        """What is still to be done between two steps."""
        self._sharing: Counter[str] = Counter()
        """How many requests share the place of each group."""
        self._ends: deque[float] = deque(maxlen=LAST_ENDS)
        """When the last requests ended, on ``clock``."""
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._draining = self._closing = False
        self._stop = self._over = False
        self._fault: str | None = None
        self.ended: Future[None] = Future()
        self.ended.set_running_or_notify_cancel()  # nobody who waits for it can cancel it
        made: Future[Engine] = Future()
        self._thread = threading.Thread(target=self._run, args=(make_engine, made), name="infer-engine", daemon=True)
        self._thread.start()
        self._engine = made.result()
        atexit.register(self.close)  # a thread that outlives the interpreter aborts the process

    @property
    def healthy(self) -> bool:
        """Whether the engine's thread is alive, has not failed and is not stuck."""
        return self._thread.is_alive() and self._fault is None and not self.stuck

    @property
    def stuck(self) -> bool:
        """Whether a pass of the step that runs now has taken more than ``step_timeout_s``."""
        began = self._stepping  # read once: the engine's thread may set it to None
        return began is not None and self._clock() - began > self._step_timeout_s

    def check(self) -> None:
        """Raises EngineDeadError if the engine has failed."""
        if self._fault is not None:
            raise EngineDeadError(self._fault)

    @property
    def accepting(self) -> bool:
        """Whether clients should send requests here."""
        return self.healthy and not self._draining and not self._closing

    @property
    def num_open(self) -> int:
        return len(self._open)

    def submit(self, request: Request, mailbox: Mailbox) -> None:
        """Accept a request. Raises QueueFullError or EngineDeadError."""
        self.submit_all([request], mailbox)

    def submit_all(self, requests: Sequence[Request], mailbox: Mailbox) -> int:
        """Accept as many of the requests as there are places for, from the first on, and return how many. They arrive
        together: a step sees all of them or none. Raises QueueFullError if there is no place at all, RequestError if
        an adapter is gone, or EngineDeadError."""
        with self._lock:
            self.check()
            if self._closing:
                raise EngineDeadError("The engine is shutting down and takes no more requests.")
            tokens = self._fitting(requests)
            accepted = tuple(requests[: len(tokens)])
            for request in accepted:
                if request.id in self._open:
                    raise ValueError(f"request id {request.id!r} is in use")
            self._adapters.take(accepted)
            self._open_tokens |= tokens
            self._total_tokens += sum(tokens.values())
            self._open.update((request.id, (mailbox, request.group, request.adapter)) for request in accepted)
            self._sharing.update(request.group for request in accepted if request.group)
            self._engine.submit(accepted)
        return len(accepted)

    def check_place(self) -> None:
        """Raises QueueFullError if a request that shares no place would be refused now. It costs next to nothing, so
        that a server can refuse before it reads what is asked."""
        with self._lock:
            if len(self._open) - self._sharing.total() + len(self._sharing) >= self._max_open:
                raise self._full()
            if self._total_tokens >= self._max_open_tokens:
                raise self._full(tokens=True)

    def _full(self, *, tokens: bool = False) -> QueueFullError:
        """Says when those who are here now will have ended, if they end as the last ones did."""
        seconds, ends = 1.0, self._ends
        if len(ends) > 1 and (took := self._clock() - ends[0]) > 0:
            seconds = len(self._open) * took / len(ends)
        sentence = (
            f"All {self._max_open} places are taken (engine.max_batch_size running and "
            "engine.max_waiting_requests waiting). Try again later, or raise engine.max_waiting_requests."
        )
        if tokens:
            count, most = self._total_tokens, self._max_open_tokens
            sentence = (
                f"The prompts that are here have {count} of at most {most} tokens (engine.max_open_tokens). Try again "
                "later, or raise engine.max_open_tokens."
            )
        return QueueFullError(sentence, retry_after_s=min(max(math.ceil(seconds), 1), LONGEST_RETRY_S))

    def _fitting(self, requests: Sequence[Request]) -> dict[str, int]:
        """The requests, from the first on, for which there are places and room: how many tokens each one's prompt has,
        by its id; 0 for a prompt that a request before it has, too. Raises QueueFullError if not even the first
        fits."""
        here, total, groups = len(self._open), self._total_tokens, set(self._sharing)
        taken = here - self._sharing.total() + len(groups)
        found: dict[str, int] = {}
        for request in requests:
            shares = request.group in groups
            tokens = 0 if shares else len(request.prompt_token_ids)
            crowded = (here if shares else taken) >= self._max_open
            if crowded or (total and total + tokens > self._max_open_tokens):
                if not found:
                    raise self._full(tokens=not crowded)
                break
            found[request.id] = tokens
            here, taken, total = here + 1, taken + (not shares), total + tokens
            if request.group:
                groups.add(request.group)
        return found

    def abort(self, request_id: str) -> None:
        """End a request within a step. A request that has ended already is not affected."""
        self._engine.submit(Abort(request_id))

    def between_steps(self, run: Callable[[], None]) -> Future[None]:
        """Call ``run`` in the engine's thread, between two steps. The future holds what it raises, or an
        EngineDeadError if the engine ends before."""
        done: Future[None] = Future()

        def errand() -> None:
            with self._lock:
                self._errands.discard(done)
            try:
                run()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        with self._lock:
            if self._over:
                done.set_exception(EngineDeadError("The engine has stopped."))
            else:
                self._errands.add(done)
                self._engine.submit(Errand(errand))
        return done

    def drain(self) -> None:
        """Do not count as accepting any more. Requests that are on their way are taken until ``close``."""
        self._draining = True

    def close(self, drain_s: float = 0.0) -> None:
        """Accept no more requests, let open ones finish for up to ``drain_s`` seconds, abort the rest, and stop."""
        deadline = time.monotonic() + drain_s
        with self._idle:
            self._closing = True
            while self._open and self._thread.is_alive() and (left := deadline - time.monotonic()) > 0:
                self._idle.wait(left)
            self._stop = True
        self._engine.submit(None)
        self._thread.join()
        atexit.unregister(self.close)

    def _run(self, make_engine: Callable[[Mailbox], Engine], made: Future[Engine]) -> None:
        try:
            engine = make_engine(self._publish)
        except BaseException as error:
            made.set_exception(error)
            return
        made.set_result(engine)
        try:
            while not self._stop:
                if engine.has_work():
                    self._gets_on()
                    try:
                        engine.step(self._gets_on)
                    finally:
                        self._stepping = None
                else:
                    engine.wait()
            engine.fail_all("abort", None)
        except BaseException as error:
            log.exception("the engine has stopped")
            what = str(error).rstrip(".") if isinstance(error, InferError) else one_line(error)
            with self._lock:
                self._fault = f"The engine has stopped: {what}. Start the process again."
                ids = list(self._open)
            self._publish([Event(id, finish_reason="error", error=self._fault) for id in ids])
            self.ended.set_exception(EngineDeadError(self._fault))
        else:
            self.ended.set_result(None)
        finally:
            with self._lock:
                self._over, left = True, [*self._errands]
                self._errands.clear()
            for errand in left:
                errand.set_exception(EngineDeadError("The engine has stopped."))
            self._after()

    def _gets_on(self) -> None:
        """A step, or a pass of it, begins."""
        self._stepping = self._clock()

    def _publish(self, events: Sequence[Event]) -> None:
        ended: list[Adapter | None] = []
        with self._lock:
            letters = self._letters(events)
            for event in events.whole if isinstance(events, Events) else events:
                found = self._open.get(event.request_id)
                if found is None:
                    continue  # its end was published before the engine stopped
                _, group, adapter = found
                if group:
                    self._sharing.pop(group, None)
                if event.finish_reason is not None:
                    del self._open[event.request_id]
                    self._total_tokens -= self._open_tokens.pop(event.request_id)
                    self._ends.append(self._clock())
                    ended.append(adapter)
            if not self._open:
                self._addressed, self._address = (), None  # whoever has the mailbox may be gone
                self._idle.notify_all()
        for adapter in ended:  # not under the lock: an adapter that nobody uses any more leaves between two steps
            self._adapters.end(adapter)
        for mailbox, mine in letters.items():
            try:
                mailbox(mine)
            except BaseException:
                log.exception("a client's mailbox failed; its requests end")
                for event in mine:
                    if event.finish_reason is None:
                        self.abort(event.request_id)

    def _letters(self, events: Sequence[Event]) -> Mapping[Mailbox, Sequence[Event]]:
        """Each mailbox's events. Columns go whole to their mailbox if all have the same, as a server's requests do."""
        if isinstance(events, Events):
            if events.ids is not self._addressed:
                found = {self._open[id][0] for id in events.ids if id in self._open}
                self._addressed, self._address = events.ids, found.pop() if len(found) == 1 else None
            if self._address is not None:
                return {self._address: events} if events else {}
        letters: defaultdict[Mailbox, list[Event]] = defaultdict(list)
        for event in events:
            if event.request_id in self._open:
                letters[self._open[event.request_id][0]].append(event)
        return letters
