"""GET /console/api/steps: the engine's steps as server-sent events, for whoever watches.

Nobody is told of a step while nobody watches. With watchers, the engine's thread puts each record into a bounded queue,
and now and then a map of the cache; a task of the event loop makes JSON of them, once for all watchers. The data of an
event is a list of the objects that ``messages`` describes.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from aiohttp import web
from pydantic_core import to_json

from infer.contracts.records import RequestRecord, StepRecord
from infer.errors import QueueFullError, RequestError
from infer_console.messages import Kept, Maps, Messages, hello
from infer_server.events import Json
from infer_server.http.streams import hang_up
from infer_server.service import Service

MOST_WATCHERS = 8
PERIOD_S = 0.025
"""How often watchers are sent what is new."""
BEAT_S = 15.0
"""How often something is sent to a watcher if nothing happens, so that one that has left is noticed."""
MOST_FRESH = 512
"""How many records may wait to be made JSON of; older ones are lost."""
AT_ONCE = 32
"""After so many records, the event loop does other work."""
RING_RECORDS, RING_BYTES = 2000, 2 << 20
"""How many records, and how many bytes of them, are kept for the next watcher."""
BACKLOG_BYTES = 1 << 20
"""How much may wait to be sent to a watcher; older batches are lost to it."""


class Watcher:
    """Batches on their way to one client."""

    def __init__(self) -> None:
        self._batches: deque[tuple[bytes, int]] = deque()
        self._size = 0
        self.some = asyncio.Event()
        self.lost = 0
        """How many records were dropped since ``take``."""

    def put(self, batch: bytes, records: int) -> None:
        self._batches.append((batch, records))
        self._size += len(batch)
        while self._size > BACKLOG_BYTES:
            dropped, missed = self._batches.popleft()
            self._size -= len(dropped)
            self.lost += missed
        self.some.set()

    def take(self) -> tuple[list[bytes], int]:
        """The batches so far, and how many records are missing before them."""
        batches, lost = [batch for batch, _ in self._batches], self.lost
        self._batches.clear()
        self._size = self.lost = 0
        self.some.clear()
        return batches, lost


class Live:
    """An observer while there are watchers, and the handler that they call."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._server = secrets.token_hex(8)
        """Which process this is, so that a page notices when another has taken its place."""
        self._watchers: set[Watcher] = set()
        self._fresh: deque[StepRecord | RequestRecord] = deque(maxlen=MOST_FRESH)
        """Written by the engine's thread."""
        self._maps = Maps()
        self._map: Json | None = None
        self._fault: str | None = None
        """As far as watchers have been told."""
        self._messages = Messages()
        self._ring = Kept(RING_RECORDS, RING_BYTES)
        self._stop: Callable[[], None] = lambda: None
        self._pumping: asyncio.Task[None] | None = None

    def infer_step_finished(self, record: StepRecord) -> None:
        if (made := self._maps.after(record)) is not None:
            self._map = made
        self._fresh.append(record)

    def infer_request_finished(self, record: RequestRecord) -> None:
        self._fresh.append(record)

    async def handle(self, http: web.Request) -> web.StreamResponse:
        last = _last(http)
        if len(self._watchers) >= MOST_WATCHERS:
            raise QueueFullError(f"All {MOST_WATCHERS} places to watch the engine are taken; close another console.")
        headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "X-Accel-Buffering": "no"}
        response = web.StreamResponse(headers=headers)
        response.content_type = "text/event-stream"
        watcher = Watcher()
        self._enter(watcher)
        try:
            await response.prepare(http)
            await self._write(http, response, [_event([to_json(self._hello()), *self._ring.last(last)])])
            while self._service.engine_loop.accepting:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(BEAT_S):
                        await watcher.some.wait()
                if (keys := self._service.keys) and not keys.admit(http):
                    break  # the session has ended meanwhile
                batches, lost = watcher.take()
                if lost:
                    batches.insert(0, _event([to_json(self._messages.lost(lost))]))
                await self._write(http, response, batches or [b": nothing new\n\n"])
        finally:
            self._leave(watcher)
        return response

    async def _write(self, http: web.Request, response: web.StreamResponse, batches: Iterable[bytes]) -> None:
        """Write to a client. One that reads nothing for ``server.stall_timeout_s`` counts as disconnected."""
        try:
            async with asyncio.timeout(self._service.settings.server.stall_timeout_s):
                for batch in batches:
                    await response.write(batch)
        except TimeoutError:
            hang_up(http)

    def _enter(self, watcher: Watcher) -> None:
        self._watchers.add(watcher)
        if len(self._watchers) == 1:
            self._clear()  # the engine's thread may have told of a step after the last watcher had left
            self._stop = self._service.observe(self)
            self._pumping = asyncio.create_task(self._pump())

    def _leave(self, watcher: Watcher) -> None:
        self._watchers.remove(watcher)
        if not self._watchers:
            self._stop()
            assert self._pumping is not None
            self._pumping.cancel()
            self._clear()

    def _clear(self) -> None:
        for kept in (self._fresh, self._messages, self._ring):
            kept.clear()
        self._map = None

    async def _pump(self) -> None:
        """Send what is new to all watchers, again and again."""
        while True:
            await asyncio.sleep(PERIOD_S)
            if not self._service.engine_loop.accepting:
                for watcher in self._watchers:
                    watcher.some.set()  # so that it sees that this is the end
            if not self._fresh and not self._service.engine_loop.num_open:
                self._send([*map(self._ring.keep, self._messages.ended())])
            while self._fresh:
                made = [*self._made(AT_ONCE)]
                if (message := self._map) is not None:
                    self._map = None
                    made.append(to_json(message))
                if self._fault != self._maps.fault:
                    self._fault = self._maps.fault
                    made.append(to_json(self._hello()))
                self._send(made)
                await asyncio.sleep(0)

    def _send(self, made: list[bytes]) -> None:
        if made:
            batch = _event(made)
            for watcher in self._watchers:
                watcher.put(batch, len(made))

    def _made(self, most: int) -> Iterator[bytes]:
        """JSON of up to so many records, which the ring keeps."""
        for _ in range(min(most, len(self._fresh))):
            yield from map(self._ring.keep, self._messages.of(self._fresh.popleft()))

    def _hello(self) -> Json:
        engine = self._service.served.engine
        return hello(
            server=self._server,
            requests=self._messages.numbers,
            budget=engine.max_tokens_per_step,
            batch=engine.max_batch_size,
            cache=self._service.served.cache_tokens,
            fault=self._maps.fault,
        )


def _last(http: web.Request) -> int:
    """How many kept records the client wants. Raises RequestError."""
    given = http.query.get("last", "0")
    if not (given.isascii() and given.isdecimal() and len(given) < 6 and int(given) <= RING_RECORDS):
        raise RequestError(f"last is {given[:40]!r}; it must be a number from 0 to {RING_RECORDS}.", param="last")
    return int(given)


def _event(records: Iterable[bytes]) -> bytes:
    return b"data: [" + b",".join(records) + b"]\n\n"
