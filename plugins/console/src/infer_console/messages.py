"""The messages to the engine's view: the records that observers get, as objects of JSON. No text of a request is in a
record, so there is none here.

Each has a ``kind``:

- ``hello``: what the engine is, and the numbers of its requests. It comes first, and once more if the cache's maps end;
  ``fault`` says why.
- ``step``: a step. ``decodes`` and ``at`` have the number and the position of each request that decoded one token,
  ``works`` a row for every other work: number, start, length, whether it was prefill, whether it drew a token, drafts
  proposed and accepted. ``new`` has the ids of the numbers that occur for the first time.
- ``end``: a request that has ended; ``nth`` counts them.
- ``map``: the cache's blocks after a step, a digit of ``BlockState`` for each cell, and how many blocks a cell is.
- ``lost``: how many records are missing here, and the numbers of all requests anew.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from pydantic_core import to_json

from infer.contracts.cache import BlockState
from infer.contracts.records import RequestRecord, StepRecord
from infer.errors import one_line

MAP_S = 0.25
"""The least time between two maps of the cache while requests run."""
MAP_SHARE = 1 / 250
"""The share of the engine's time that maps may take."""
AHEAD_S = 2.0
MAP_CELLS = 8192

Json = dict[str, Any]
log = logging.getLogger(__name__)


class Messages:
    """Makes JSON of the records of one engine, in the order in which they come."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        """Requests by small numbers, which take less room in a step than ids."""
        self._count, self._nth = itertools.count(), itertools.count()
        self._last: int | None = None
        self._ends: list[RequestRecord] = []

    def clear(self) -> None:
        """Forget what has been told. Numbers go on."""
        self.numbers, self._last, self._ends = {}, None, []

    def of(self, record: StepRecord | RequestRecord) -> Iterator[Json]:
        """The messages after a record. Observers are told of an end before the step in which it was, so it has to wait
        for that."""
        if isinstance(record, RequestRecord):
            self._ends.append(record)
            return
        if self._last is not None and record.index != self._last + 1:
            # Some requests may have ended in the steps that are missing.
            here = {work.request_id for work in record.work}
            self.numbers = {id: n for id, n in self.numbers.items() if id in here}
            yield self.lost(record.index - self._last - 1)
        self._last = record.index
        yield self._step(record)
        yield from self.ended()

    def ended(self) -> Iterator[Json]:
        """The ends that have waited: also to be told when no request is open, because no step can follow."""
        ends, self._ends = self._ends, []
        yield from map(self._end, ends)

    def lost(self, records: int) -> Json:
        return {"kind": "lost", "records": records, "requests": dict(self.numbers)}

    def _step(self, record: StepRecord) -> Json:
        numbers, new = self.numbers, {}
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
            "nth": next(self._nth),
            "number": self.numbers.pop(record.request_id, None),
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


class Maps:
    """Has maps of the cache made, so rarely that they take next to none of the engine's time."""

    def __init__(self) -> None:
        self._due = 0.0
        self.fault: str | None = None
        """Why there are no more maps."""

    def after(self, record: StepRecord) -> Json | None:
        """A map if it is time for one, in the engine's thread. A pool that cannot make one is not asked again."""
        # The last map before a pause stays on the screen, so it may be made a little earlier than it is due.
        due = record.finished >= self._due - (0.0 if record.running else AHEAD_S)
        if record.blocks is None or self.fault is not None or not due:
            return None
        began = time.perf_counter()
        try:
            made = cells(record.index, record.blocks())
        except (Exception, SystemExit) as error:
            self.fault = f"the pool cannot make one: {one_line(error)}"
            log.exception("the cache pool made no map of itself and is not asked for another one")
            return None
        now = time.perf_counter()
        self._due = max(self._due, now) + max(MAP_S, (now - began) / MAP_SHARE)
        return made


class Kept:
    """The newest objects of JSON, up to a number and a size."""

    def __init__(self, records: int, nbytes: int) -> None:
        self._most = records, nbytes
        self.all: deque[bytes] = deque()
        self.nbytes = 0

    def keep(self, message: Json) -> bytes:
        """The object's JSON."""
        made = to_json(message)
        self.all.append(made)
        self.nbytes += len(made)
        while len(self.all) > self._most[0] or self.nbytes > self._most[1]:
            self.nbytes -= len(self.all.popleft())
        return made

    def last(self, records: int) -> list[bytes]:
        return [*self.all][len(self.all) - min(records, len(self.all)) :]

    def clear(self) -> None:
        self.all.clear()
        self.nbytes = 0


def hello(**more: Any) -> Json:
    """What comes first. ``more`` may have the step's ``budget``, the ``cache``'s positions and the like."""
    return {"kind": "hello", "requests": {}, "states": [state.name.lower() for state in BlockState]} | more


def cells(step: int, states: bytes) -> Json:
    """The map after a step, with at most ``MAP_CELLS`` cells. A cell of several blocks shows the first that is not
    free. Raises an Exception if these are no states."""
    each = -(-len(states) // MAP_CELLS)
    counts = [states.count(state) for state in BlockState]
    if sum(counts) != len(states):
        raise ValueError("its states have a value that is no BlockState")
    shown = states
    if each > 1:
        shown = bytes(next(filter(None, states[i : i + each]), 0) for i in range(0, len(states), each))
    return {"kind": "map", "step": step, "each": each, "counts": counts, "cells": shown.translate(DIGITS).decode()}


DIGITS = bytes.maketrans(bytes(range(10)), b"0123456789")
