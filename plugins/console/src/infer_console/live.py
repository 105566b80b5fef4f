"""GET /console/api/steps: the engine's steps as server-sent events, for whoever watches.

Nobody is told of a step while nobody watches. With watchers, the engine's thread puts each record into a bounded queue,
and now and then a map of the cache; a task of the event loop makes JSON of them, once for all watchers. No text of a
request is in a record, so there is none here.

The data of an event is a list of objects, each with a ``kind``:

- ``hello``: what the server is, and the numbers of its requests. It comes first, before the records that are kept.
- ``step``: a step. ``decodes`` and ``at`` have the number and the position of each request that decoded one token,
  ``works`` a row for every other work: number, start, length, whether it was prefill, whether it drew a token, drafts
  proposed and accepted. ``new`` has the ids of the numbers that occur for the first time.
- ``end``: a request that has ended.
- ``map``: the cache's blocks, a digit of ``BlockState`` for each cell, and how many blocks a cell stands for.
- ``lost``: how many records are missing here, because the watcher or the event loop was too slow, and the numbers of
  all requests anew.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from aiohttp import web
from pydantic_core import to_json

from infer.errors import QueueFullError, RequestError
from infer.hookspecs import BlockState, RequestRecord, StepRecord
from infer.server.service import Json, Service, hang_up

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
MAP_S = 0.25
"""The least time between two maps of the cache while requests run."""
MAP_SHARE = 1 / 250
"""The share of the engine's time that maps may take."""
AHEAD_S = 2.0
MAP_CELLS = 8192


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
        self._ends: list[RequestRecord] = []
        self._map: bytes | None = None
        self._map_due = 0.0
        self._numbers: dict[str, int] = {}
        """Requests by small numbers, which take less room in a step than ids."""
        self._count = itertools.count()
        self._last: int | None = None
        self._ring: deque[bytes] = deque()
        self._ring_bytes = 0
        self._stop: Callable[[], None] = lambda: None
        self._pumping: asyncio.Task[None] | None = None

    def infer_step_finished(self, record: StepRecord) -> None:
        # The last map before a pause stays on the screen, so it may be made a little earlier than it is due.
        if record.blocks is not None and record.finished >= self._map_due - (0.0 if record.running else AHEAD_S):
            began = time.perf_counter()
            self._map = record.blocks()
            now = time.perf_counter()
            self._map_due = max(self._map_due, now) + max(MAP_S, (now - began) / MAP_SHARE)
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
            await self._write(http, response, [_event([to_json(self._hello()), *self._kept(last)])])
            while self._service.engine_loop.accepting:
                try:
                    async with asyncio.timeout(BEAT_S):
                        await watcher.some.wait()
                except TimeoutError:
                    await self._write(http, response, [b": nothing new\n\n"])
                    continue
                batches, lost = watcher.take()
                if lost:
                    batches.insert(0, _event([to_json(self._lost(lost))]))
                await self._write(http, response, batches)
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
        for kept in (self._fresh, self._ends, self._numbers, self._ring):
            kept.clear()
        self._map, self._last, self._ring_bytes = None, None, 0

    async def _pump(self) -> None:
        """Send what is new to all watchers, again and again."""
        while True:
            await asyncio.sleep(PERIOD_S)
            if not self._service.engine_loop.accepting:
                for watcher in self._watchers:
                    watcher.some.set()  # so that it sees that this is the end
            if not self._fresh and not self._service.engine_loop.num_open:
                self._send([*self._ended()])
            while self._fresh:
                made = [*self._made(AT_ONCE)]
                if (states := self._map) is not None:
                    self._map = None
                    made.append(to_json(_map(states)))
                self._send(made)
                await asyncio.sleep(0)

    def _send(self, made: list[bytes]) -> None:
        if made:
            batch = _event(made)
            for watcher in self._watchers:
                watcher.put(batch, len(made))

    def _made(self, most: int) -> Iterator[bytes]:
        """JSON of up to so many records."""
        for _ in range(min(most, len(self._fresh))):
            record = self._fresh.popleft()
            if isinstance(record, RequestRecord):
                self._ends.append(record)
                continue
            if self._last is not None and record.index != self._last + 1:
                # Some requests may have ended in the steps that are missing.
                here = {work.request_id for work in record.work}
                self._numbers = {id: n for id, n in self._numbers.items() if id in here}
                yield self._keep(self._lost(record.index - self._last - 1))
            self._last = record.index
            yield self._keep(self._step(record))
            yield from self._ended()

    def _ended(self) -> Iterator[bytes]:
        """JSON of the requests that have ended. Observers are told of an end before the step in which it was, so it has
        to wait for that, or until no request is open, when no step can follow."""
        ends, self._ends = self._ends, []
        for record in ends:
            yield self._keep(self._end(record))

    def _keep(self, record: Json) -> bytes:
        """The record's JSON, which the ring keeps."""
        made = to_json(record)
        self._ring.append(made)
        self._ring_bytes += len(made)
        while len(self._ring) > RING_RECORDS or self._ring_bytes > RING_BYTES:
            self._ring_bytes -= len(self._ring.popleft())
        return made

    def _kept(self, last: int) -> list[bytes]:
        return [*self._ring][len(self._ring) - min(last, len(self._ring)) :]

    def _hello(self) -> Json:
        settings = self._service.settings
        return {
            "kind": "hello",
            "server": self._server,
            "requests": self._numbers,
            "budget": settings.engine.max_tokens_per_step,
            "batch": settings.engine.max_batch_size,
            "cache": self._service.served.cache_tokens,
            "states": [state.name.lower() for state in BlockState],
        }

    def _lost(self, records: int) -> Json:
        return {"kind": "lost", "records": records, "requests": self._numbers}

    def _step(self, record: StepRecord) -> Json:
        numbers, new = self._numbers, {}
        decodes: list[int] = []
        at: list[int] = []
        works: list[tuple[Any, ...]] = []
        for id, kind, start, length, drew, proposed, accepted in record.work:
            if (number := numbers.get(id)) is None:
                number = numbers[id] = next(self._count)
                new[number] = id
            if kind == "decode" and length == 1:
                decodes.append(number)
                at.append(start)
            else:
                works.append((number, start, length, int(kind == "prefill"), int(drew), proposed, accepted))
        return {
            "kind": "step",
            "index": record.index,
            "start": round(record.started * 1e3, 3),
            "ms": round((record.finished - record.started) * 1e3, 3),
            "tokens": record.computed_tokens,
            "passes": record.passes,
            "running": record.running,
            "waiting": record.waiting,
            "free": record.free_tokens,
            "totals": record.totals,
            "decodes": decodes,
            "at": at,
            "works": works,
            "new": new,
        }

    def _end(self, record: RequestRecord) -> Json:
        def since(moment: float | None) -> float | None:
            return None if moment is None else round((moment - record.arrival) * 1e3, 3)

        return {
            "kind": "end",
            "number": self._numbers.pop(record.request_id, None),
            "id": record.request_id,
            "prompt": record.num_prompt,
            "cached": record.num_cached,
            "generated": record.num_generated,
            "reason": record.finish_reason,
            "arrival": round(record.arrival * 1e3, 3),
            "queue": since(record.started),
            "ttft": since(record.first_token),
            "ms": since(record.finished),
            "preemptions": record.preemptions,
            "proposed": record.proposed,
            "accepted": record.accepted,
        }


def _last(http: web.Request) -> int:
    """How many kept records the client wants. Raises RequestError."""
    given = http.query.get("last", "0")
    if not (given.isascii() and given.isdecimal() and len(given) < 6 and int(given) <= RING_RECORDS):
        raise RequestError(f"last is {given[:40]!r}; it is a number from 0 to {RING_RECORDS}.", param="last")
    return int(given)


def _event(records: Iterable[bytes]) -> bytes:
    return b"data: [" + b",".join(records) + b"]\n\n"


def _map(states: bytes) -> Json:
    """The map with at most ``MAP_CELLS`` cells. A cell of several blocks shows the first that is not free."""
    each = -(-len(states) // MAP_CELLS)
    cells = states
    if each > 1:
        cells = bytes(next(filter(None, states[i : i + each]), 0) for i in range(0, len(states), each))
    counts = [states.count(state) for state in BlockState]
    return {"kind": "map", "each": each, "counts": counts, "cells": cells.translate(DIGITS).decode()}


DIGITS = bytes.maketrans(bytes(range(10)), b"0123456789")
