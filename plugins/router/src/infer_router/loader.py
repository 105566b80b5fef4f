"""Which models are loaded: one task owns all that is known of them, and everybody else tells it what has happened.

``Loader.run`` takes one message after the other from an inbox. Each changes the state of a model and is followed by
``_advance``, which looks at all models and begins whatever is due: an arithmetic, a load, an unloading. What takes time
runs in tasks that change nothing, and end with a message. So no two of them see a state that a third is changing, and
whatever happens while something else is under way is seen when its message comes."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from infer.errors import EngineDeadError, InferError, QueueFullError, RequestError
from infer_router.placement import Held, place
from infer_router.process import ending
from infer_router.rules import Engine, Machine, Rules

log = logging.getLogger(__name__)

State = Literal["unloaded", "loading", "loaded", "unloading", "failed"]
HOLDING = ("loading", "loaded", "unloading")
"""States in which a model has memory."""
MOST_BACKOFF_S = 60.0
"""The longest that a model that ended by itself is left alone (``Rules.backoff_s``)."""
END_S = 10.0
"""How long a process that has no requests may take to end before it is killed."""


class NeverFitsError(RequestError):
    """The model takes more memory than it could ever have."""


@dataclass(eq=False)
class _Want:
    """A request that needs a model."""

    name: str
    keep_alive_s: float | None
    granted: asyncio.Future[None]
    since: float
    again: bool = False
    """Whether it had the model, whose process has ended since: it is never one too many."""


@dataclass(eq=False)
class _Model:
    name: str
    keep_alive_s: float
    state: State = "unloaded"
    about: Mapping[str, Any] | None = None
    """The arithmetic's result, once it is there."""
    asking: bool = False
    """Whether the arithmetic is under way."""
    engine: Engine | None = None
    waiting: dict[_Want, None] = field(default_factory=dict)
    open: int = 0
    work: int = 0
    """How many requests its process had when it was last asked whether it may end, as those in the background, which no
    open request waits for."""
    leaving: bool = False
    """Whether it is to be unloaded once its open requests have ended. Later ones wait."""
    evicted: bool = False
    """Whether it is so because a model that is waited for needs its room: it stays if who waits leaves before."""
    silent: bool = False
    """Whether its process is killed because it does not answer."""
    used: float = 0.0
    expires: float = math.inf
    problem: str | None = None
    failures: int = 0
    retry_at: float = 0.0
    loaded_at: float = 0.0
    loads: int = 0

    @property
    def nbytes(self) -> int:
        return 0 if self.about is None else int(self.about["bytes"])

    @property
    def busy(self) -> bool:
        return self.open > 0 or self.work > 0

    @property
    def serves(self) -> bool:
        """Whether it takes requests."""
        return self.state == "loaded" and not self.leaving and not self.evicted

    @property
    def since(self) -> float:
        return min((want.since for want in self.waiting), default=math.inf)


class Loader:
    """``changed`` is told the URL of a model's process, or None when it is not to be asked any more. ``working`` asks a
    model's process how many requests it has, those in the background among them."""

    def __init__(
        self,
        machine: Machine,
        rules: Rules,
        changed: Callable[[str, str | None], None],
        working: Callable[[str], Awaitable[int]],
    ) -> None:
        self._machine, self._rules, self._changed, self._working = machine, rules, changed, working
        self._models = {name: _Model(name, keep) for name, keep in rules.keep_alive_s.items()}
        self._inbox: asyncio.Queue[Callable[[], None]] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._over: str | None = None

    # What others ask and tell

    @asynccontextmanager
    async def use(self, name: str, keep_alive_s: float | None = None, *, again: bool = False) -> AsyncIterator[None]:
        """Have the model loaded until the end of the block, unless its process ends; within the block, use it ``again``
        to wait for the next process. Raises QueueFullError if too many wait already, NeverFitsError, or EngineDeadError
        if it cannot be loaded."""
        if self._over is not None:
            raise EngineDeadError(self._over)
        want = _Want(name, keep_alive_s, asyncio.get_running_loop().create_future(), time.monotonic(), again)
        self._inbox.put_nowait(partial(self._wanted, want))
        try:
            await want.granted
            yield
        finally:
            self._inbox.put_nowait(partial(self._left, want))

    def keep(self, name: str, keep_alive_s: float) -> None:
        """From now on, keep the model so long if it is loaded; 0 lets it go once its open requests have ended."""
        self._inbox.put_nowait(partial(self._kept, name, keep_alive_s))

    def status(self) -> dict[str, dict[str, Any]]:
        """Of each model, by its name: ``name``, ``state``, ``pinned``, ``open``, ``waiting``, ``size_bytes`` (None
        while it is not known), ``expires_in_s`` (None if it does not), ``retry_in_s`` (how long it is left alone after
        it has ended by itself, unless somebody asks for it; None if it is not), ``problem``, and what else the
        arithmetic says (``about``)."""
        now = time.monotonic()
        found = {}
        for each in self._models.values():
            stays = each.state != "loaded" or each.work > 0 or each.name in self._rules.pinned
            expires = math.inf if stays else each.expires
            wakes = each.state in ("unloaded", "failed") and bool(each.waiting)
            found[each.name] = {
                "name": each.name,
                "state": "loading" if wakes else each.state,
                "pinned": each.name in self._rules.pinned,
                "open": each.open,
                "waiting": len(each.waiting),
                "size_bytes": None if each.about is None else each.nbytes,
                "expires_in_s": None if expires == math.inf else max(0.0, expires - now),
                "retry_in_s": self._resting(each, now),
                "loads": each.loads,
                "problem": each.problem,
                "about": each.about,
            }
        return found

    def latest(self) -> str | None:
        """The loaded model that was used last."""
        there = [each for each in self._models.values() if each.serves]
        return max(there, key=lambda each: (each.busy, each.used)).name if there else None

    # The task that owns everything

    async def run(self) -> None:
        """Serve the inbox for ever. When it ends, so do the tasks that it has begun, and who waits is told so."""
        try:
            while True:
                self._advance()
                try:
                    async with asyncio.timeout_at(self._next()):
                        message = await self._inbox.get()
                except TimeoutError:
                    continue
                message()
        finally:
            self._over = "The server is shutting down; send the request again."
            for task in self._tasks:
                task.cancel()
            while not self._inbox.empty():
                message = self._inbox.get_nowait()
                if isinstance(message, partial) and message.func == self._wanted:
                    self._models[message.args[0].name].waiting[message.args[0]] = None
            for each in self._models.values():
                self._refuse(each, EngineDeadError(self._over))
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _next(self) -> float | None:
        """When something is due though nothing happens, on the loop's clock."""
        due, now = [math.inf], time.monotonic()
        for each in self._models.values():
            if each.state == "loaded" and not each.busy and each.name not in self._rules.pinned:
                due.append(each.expires)
            if (left := self._resting(each, now)) is not None:
                due.append(now + left)
        return None if min(due) == math.inf else asyncio.get_running_loop().time() + min(due) - now

    def _begin(self, work: Callable[[], Awaitable[Any]], then: Callable[[Any], None]) -> None:
        """Have ``then`` told what the work returns or raises."""

        async def run() -> None:
            try:
                result = await work()
            except Exception as error:
                result = error
            self._inbox.put_nowait(partial(then, result))

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # What has happened

    def _wanted(self, want: _Want) -> None:
        model = self._models[want.name]
        if model.serves:
            self._grant(model, want)
            return
        waiting = sum(len(each.waiting) for each in self._models.values())
        if waiting >= self._rules.max_waiting and not want.again:
            want.granted.set_exception(
                QueueFullError(
                    f"The model {model.name!r} is not loaded, and {waiting} requests wait for models already; this one "
                    f"would be number {waiting + 1} of at most server.router.max_waiting = {self._rules.max_waiting}. "
                    "Try again later."
                )
            )
            return
        model.waiting[want] = None

    def _grant(self, model: _Model, want: _Want) -> None:
        if not want.granted.done():  # otherwise it has left, and the message about that is on its way
            want.granted.set_result(None)
            model.open += 1
            model.used, model.expires = time.monotonic(), math.inf
            model.keep_alive_s = (
                self._rules.keep_alive_s[model.name] if want.keep_alive_s is None else want.keep_alive_s
            )

    def _left(self, want: _Want) -> None:
        model = self._models[want.name]
        model.waiting.pop(want, None)
        granted = want.granted.done() and not want.granted.cancelled() and want.granted.exception() is None
        if granted:
            model.open -= 1
            if not model.open:
                model.used = time.monotonic()
                model.expires = model.used + model.keep_alive_s

    def _admit(self, model: _Model) -> None:
        """Grant it to all who wait for it."""
        for want in model.waiting:
            self._grant(model, want)
        model.waiting.clear()

    def _kept(self, name: str, keep_alive_s: float) -> None:
        model = self._models[name]
        if model.state not in ("loading", "loaded") or name in self._rules.pinned:
            return
        model.keep_alive_s = keep_alive_s
        if not model.open:
            model.expires = time.monotonic() + keep_alive_s
        model.leaving = model.leaving or keep_alive_s == 0

    def _sized(self, model: _Model, result: Mapping[str, Any] | Exception) -> None:
        model.asking = False
        if isinstance(result, Exception):
            self._fail(model, result)
        else:
            model.about = result

    def _loaded(self, model: _Model, result: Engine | Exception) -> None:
        if isinstance(result, Exception):
            model.about = None  # the checkpoint may be another when it is asked for again
            self._fail(model, result)
            model.leaving = False
            return
        log.info("model %s is loaded", model.name)
        model.state, model.engine, model.problem = "loaded", result, None
        model.loaded_at = model.used = time.monotonic()
        model.expires = model.loaded_at + model.keep_alive_s
        self._begin(partial(self._watch, model, result), partial(self._ended, model))
        self._changed(model.name, result.url)
        self._admit(model)

    def _ended(self, model: _Model, result: int | Exception) -> None:
        if isinstance(result, Exception):
            raise result
        meant, silent = model.state == "unloading", model.silent
        model.state, model.engine, model.leaving, model.silent, model.work = "unloaded", None, False, False, 0
        self._changed(model.name, None)
        if meant:
            log.info("model %s is unloaded", model.name)
            return
        model.problem = "its process did not answer, and was killed" if silent else f"its process {ending(result)}"
        log.error("model %s: %s", model.name, model.problem)
        if time.monotonic() - model.loaded_at > MOST_BACKOFF_S:
            model.failures = 0
        self._back_off(model)

    def _told(self, model: _Model, engine: Engine, work: int | Exception) -> None:
        """What its process has left to do, which is to end."""
        if isinstance(work, Exception):
            raise work
        if model.engine is not engine or model.state != "unloading":
            return  # it has ended by itself
        model.work = work
        if work:
            model.state = "loaded"
        else:
            self._changed(model.name, None)
            self._begin(partial(engine.end, END_S), self._done)

    def _worked(self, model: _Model, engine: Engine, work: int) -> None:
        """What its process still has to do, which was to end before."""
        if model.engine is engine:
            model.work = work
            if not model.busy:
                model.used = time.monotonic()
                model.expires = model.used + model.keep_alive_s

    def _stuck(self, model: _Model, engine: Engine) -> None:
        """Its process lives and does not answer: who comes now waits for the next one."""
        if model.engine is engine:
            log.error("model %s: its process does not answer; it is replaced", model.name)
            model.leaving = model.silent = True
            self._changed(model.name, None)
            self._begin(partial(engine.end, 0.0), self._done)

    def _done(self, result: object) -> None:
        if isinstance(result, Exception):
            raise result

    def _fail(self, model: _Model, error: Exception) -> None:
        if isinstance(error, TimeoutError):
            limit = self._rules.load_timeout_s
            said = f"it took longer than server.router.load_timeout_s = {limit:g} s, and was stopped"
        elif isinstance(error, InferError):
            said = str(error)
        else:
            log.error("model %s cannot be loaded", model.name, exc_info=error)
            said = f"{type(error).__name__}; the server's log says more"
        model.state, model.problem = "failed", said
        log.error("model %s cannot be loaded: %s", model.name, said)
        self._back_off(model)
        self._refuse(model, EngineDeadError(f"The model {model.name!r} cannot be loaded: {said}"))

    def _back_off(self, model: _Model) -> None:
        wait = min(MOST_BACKOFF_S, self._rules.backoff_s * 2 ** min(model.failures, 10))
        model.failures += 1
        model.retry_at = time.monotonic() + wait

    def _refuse(self, model: _Model, error: InferError) -> None:
        for want in model.waiting:
            if not want.granted.done():
                want.granted.set_exception(error)
        model.waiting.clear()

    # What is due

    def _unasked(self, model: _Model) -> bool:
        """Whether it is to be loaded though no request waits for it."""
        return not model.waiting and model.name in self._rules.pinned

    def _resting(self, model: _Model, now: float) -> float | None:
        """How long it is left alone before it is loaded again by itself, if it is to be."""
        rests = model.state in ("unloaded", "failed") and self._unasked(model) and now < model.retry_at < math.inf
        return model.retry_at - now if rests else None

    def _advance(self) -> None:
        now, pinned = time.monotonic(), self._rules.pinned
        for each in self._models.values():
            each.evicted = False
            leaves = each.leaving or (each.expires <= now and each.name not in pinned)
            if each.state == "loaded" and not each.busy and leaves:
                self._unload(each)
        due = [
            each
            for each in self._models.values()
            if each.state in ("unloaded", "failed") and (each.waiting or (self._unasked(each) and each.retry_at <= now))
        ]
        for each in sorted(due, key=lambda each: each.since):
            if each.about is None:
                self._ask(each)
            elif not self._fits(each):
                continue
            elif not self._placed(each):
                break
        for each in self._models.values():
            if each.serves:
                self._admit(each)  # who has waited until nobody needed its room any more
        if not any(each.asking for each in self._models.values()):  # one at a time of those that nobody waits for
            for each in self._models.values():
                if each.about is None and each.state == "unloaded":
                    self._ask(each)
                    break
        # Only what no model takes is left to a spare process, and it leaves a load the processor.
        loading = any(each.state == "loading" for each in self._models.values())
        self._machine.may_spare(not loading and self._rules.spare_bytes <= self._room)

    @property
    def _room(self) -> int:
        """The memory that neither models have nor processes that do the arithmetic, but for the first of these."""
        held = sum(each.nbytes for each in self._models.values() if each.state in HOLDING)
        asking = sum(each.asking for each in self._models.values())
        return self._rules.memory - held - max(0, asking - 1) * self._rules.sizing_bytes

    def _ask(self, model: _Model) -> None:
        first = not any(each.asking for each in self._models.values())
        if not model.asking and model.about is None and (first or self._rules.sizing_bytes <= self._room):
            model.asking = True
            self._begin(partial(self._limited, self._machine.size, model.name), partial(self._sized, model))

    def _fits(self, model: _Model) -> bool:
        """Whether there could ever be room; if not, who waits is told so."""
        others = [each for each in self._models.values() if each.name in self._rules.pinned and each is not model]
        most = self._rules.memory - sum(each.nbytes for each in others)
        if model.nbytes <= most:
            return True
        besides = f" beside the pinned models ({', '.join(each.name for each in others)})" if others else ""
        model.state, model.retry_at = "failed", math.inf
        model.problem = (
            f"it takes {_gib(model.nbytes)}, and models may have {_gib(max(0, most))}{besides}: raise "
            "server.router.memory_gib if there is more memory, or lower its engine.max_batch_size or "
            "engine.max_seq_len, or set its model.quantization"
        )
        self._refuse(model, NeverFitsError(f"The model {model.name!r} never fits: {model.problem}."))
        return False

    def _placed(self, model: _Model) -> bool:
        """Load the model, or have others make room. Returns False if nobody behind it may take that room."""
        pinned, there = self._rules.pinned, []
        for each in self._models.values():
            if each.state in HOLDING:
                leaving = each.state == "unloading" or (each.state == "loaded" and each.leaving)
                may_leave = each.state == "loaded" and each.name not in pinned
                there.append(Held(each.name, each.nbytes, each.used, each.busy, may_leave, leaving))
        placement = place(model.nbytes, self._rules.memory, there)
        if placement.answer == "load":
            if model.nbytes > self._room:
                return False  # some of it is lent to processes that do the arithmetic
            log.info("model %s is being loaded: %s", model.name, _gib(model.nbytes))
            model.state, model.loads = "loading", model.loads + 1
            model.keep_alive_s = self._rules.keep_alive_s[model.name]
            self._begin(partial(self._limited, self._machine.start, model.name), partial(self._loaded, model))
            return True
        for name in placement.evicted:
            victim = self._models[name]
            victim.evicted = True
            if not victim.busy:
                self._unload(victim)
        if placement.answer == "full":
            return True
        # The open requests of one that is to leave may go on for long.
        if not any(each.state == "loaded" and not each.serves for each in self._models.values()):
            self._machine.expect(model.name)
        return False

    def _unload(self, model: _Model) -> None:
        """Have its process end, unless that has something left to do: from now on it gets nothing new."""
        if model.engine is not None:
            model.state = "unloading"
            self._begin(partial(self._working, model.name), partial(self._told, model, model.engine))

    # What takes time

    async def _limited(self, work: Callable[[str], Awaitable[Any]], name: str) -> Any:
        async with asyncio.timeout(self._rules.load_timeout_s):
            return await work(name)

    async def _watch(self, model: _Model, engine: Engine) -> int:
        """Until the process has ended, which is seen to if it no longer answers."""
        ended = asyncio.ensure_future(engine.wait())
        good = time.monotonic()
        try:
            while not (await asyncio.wait((ended,), timeout=self._rules.health_s))[0]:
                if await engine.healthy():
                    good = time.monotonic()
                    if model.work:
                        work = await self._working(model.name)
                        self._inbox.put_nowait(partial(self._worked, model, engine, work))
                elif time.monotonic() - good > self._rules.stuck_timeout_s:
                    self._inbox.put_nowait(partial(self._stuck, model, engine))
                    return await ended
            return ended.result()
        finally:
            ended.cancel()


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
