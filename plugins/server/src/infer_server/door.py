"""The server's door to the engine: places, many requests of one body, and what their owners are charged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from infer.contracts.request import Event, Request
from infer.engine.loop import EngineLoop
from infer.errors import QueueFullError

AT_ONCE = 8
"""How many events that have piled up a stream yields before the event loop does other work."""


@dataclass(slots=True)
class _Debt:
    """What is still to be charged for a prompt."""

    key: str
    prompt: int


class AsyncDoor:
    """An EngineLoop for an asyncio program. Create and use it in one event loop. ``charge`` is called with an owner's
    key and how many tokens more were computed for it: a prompt's with its first event, once for all answers to it, and
    an answer's as they come, whether anybody still reads them or not, and however the answer ends. What ends while it
    waits costs nothing."""

    def __init__(self, engine_loop: EngineLoop, charge: Callable[[str, int], None] | None = None) -> None:
        self._engine_loop = engine_loop
        self._charge = charge
        self._debts: dict[str, _Debt] = {}
        """By the id of each open request. The answers to one prompt have one debt."""
        self._asyncio_loop = asyncio.get_running_loop()
        self._queues: dict[str, asyncio.Queue[Event]] = {}
        self._outside: list[asyncio.Future[None]] = []
        """Those who wait until any request ends."""

    async def stream(self, *requests: Request, most: int | None = None, patient: bool = False) -> AsyncGenerator[Event]:
        """Submit as many requests as there are places for, at most ``most`` at a time, and the others as places become
        free; yield the events of all of them. Closing the generator early aborts the unfinished requests. Raises
        QueueFullError if there is no place at the beginning, unless ``patient``."""
        queue: asyncio.Queue[Event] = asyncio.Queue()
        waiting = list(requests)
        running: set[str] = set()
        debts: dict[str, _Debt] = {}
        begun, at_once = patient, 0
        try:
            while waiting or running:
                room = len(waiting) if most is None else most - len(running)
                if waiting and room:
                    try:
                        accepted = self._engine_loop.submit_all(waiting[:room], self._post)
                    except QueueFullError:  # try again when a request has ended
                        if not begun:
                            raise
                        accepted = 0
                    begun = True
                    running.update(request.id for request in waiting[:accepted])
                    self._queues.update((request.id, queue) for request in waiting[:accepted])
                    if self._charge is not None:
                        for request in waiting[:accepted]:
                            debt = _Debt(request.owner.key, len(request.prompt_token_ids))
                            self._debts[request.id] = debts.setdefault(request.group or request.id, debt)
                    del waiting[:accepted]
                if not running:  # others have taken all places
                    self._outside.append(ended := self._asyncio_loop.create_future())
                    await ended
                    continue
                at_once = at_once + 1 if queue.qsize() else 0
                if at_once == AT_ONCE:
                    at_once = 0
                    await asyncio.sleep(0)
                event = await queue.get()
                if event.finish_reason is not None:
                    running.remove(event.request_id)
                    del self._queues[event.request_id]
                yield event
        finally:
            for request_id in running:
                del self._queues[request_id]
                self._engine_loop.abort(request_id)

    def _post(self, events: Sequence[Event]) -> None:
        """Called in the engine's thread; wakes the event loop once for all events of a pass."""
        self._asyncio_loop.call_soon_threadsafe(self._deliver, events)

    def _deliver(self, events: Sequence[Event]) -> None:
        for event in events:
            if self._charge is not None and (debt := self._debts.get(event.request_id)) is not None:
                if event.finish_reason is not None:
                    del self._debts[event.request_id]
                if event.finish_reason is None or event.started:
                    tokens, debt.prompt = debt.prompt + len(event.token_ids), 0
                    if tokens:
                        self._charge(debt.key, tokens)
            if queue := self._queues.get(event.request_id):  # None if its reader has left
                queue.put_nowait(event)
        if self._outside and any(event.finish_reason is not None for event in events):
            outside, self._outside = self._outside, []
            for ended in outside:
                if not ended.done():
                    ended.set_result(None)
