"""A world's clients as a server has them: each reads the stream of its request, at once or late, or leaves."""

from __future__ import annotations

import asyncio
import queue
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, cast

from infer.contracts.request import Event, Request
from infer.engine.engine import Engine, Message
from infer.engine.loop import EngineLoop
from infer.errors import EngineDeadError, QueueFullError
from infer_server.door import AsyncDoor


class Still:
    """What an EngineLoop takes for its engine. It passes messages on, and leaves all steps to the world, so that
    nothing depends on threads: the loop's own waits until it is closed, or is to fail."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._last: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def submit(self, message: Message) -> None:
        if message is None:
            self.end(None)
        else:
            self._engine.submit(message)

    def has_work(self) -> bool:
        return False

    def wait(self) -> None:
        if (error := self._last.get()) is not None:
            raise error

    def fail_all(self, reason: str, error: str | None) -> None:
        assert not self._engine.has_work(), "a world closes its door when everybody has been answered"

    def end(self, error: BaseException | None) -> None:
        self._last.put(error)


class Door:
    """An EngineLoop and an AsyncDoor in an event loop that runs only in ``turn``. ``ended`` says whether the engine has
    ended a request."""

    def __init__(self, engine: Engine, max_open: int, ended: Callable[[str], bool], marks: Counter[str]) -> None:
        self.max_open = max_open
        self.read: dict[str, list[Event]] = {}
        """What each client has read, by its request's id."""
        self._ended, self._marks = ended, marks
        self._still = Still(engine)
        self._loop = EngineLoop(lambda publish: cast(Any, self._still), max_open, clock=engine._clock)
        self.publish = self._loop._publish
        self._events = asyncio.new_event_loop()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._gate = asyncio.Event()
        """Set while those read who read late."""
        self._door: AsyncDoor = self._events.run_until_complete(self._make())

    async def _make(self) -> AsyncDoor:
        return AsyncDoor(self._loop)

    def submit(self, request: Request, *, late: bool) -> bool:
        """Whether there is a place for the request. Who reads ``late`` does so in some turns only."""
        task = self._events.create_task(self._client(request, late))
        self.turn()
        if task.done():
            assert isinstance(task.exception(), QueueFullError), task
            return False
        self._tasks[request.id] = task
        return True

    async def _client(self, request: Request, late: bool) -> None:
        async with aclosing(self._door.stream(request)) as stream:
            async for event in stream:
                self.read.setdefault(request.id, []).append(event)
                self._marks["a client read what had ended"] += self._ended(request.id) and event.finish_reason is None
                if late:
                    await self._gate.wait()

    def leave(self, id: str) -> None:
        """The client does not read any more, and its request is to end."""
        if (task := self._tasks.get(id)) is not None and task.cancel():
            self._marks["a client left"] += 1
            while not task.done():
                self.turn()
            del self._tasks[id]

    def turn(self, late: bool = False) -> None:
        """Whoever waits for what there is reads on; those who read ``late`` as well, if it is their turn."""
        if late:
            self._gate.set()
        self._events.call_soon(self._events.stop)
        self._events.run_forever()
        self._gate.clear()

    def fail(self, error: BaseException) -> None:
        """The engine has raised."""
        self._still.end(error)
        assert isinstance(self._loop.ended.exception(), EngineDeadError)
        self._check()

    def close(self) -> None:
        """Everybody has been answered. Raises AssertionError if somebody is not told."""
        self._loop.close()
        self._check()

    def _check(self) -> None:
        for _ in range(10_000):
            if all(task.done() for task in self._tasks.values()):
                break
            self.turn(late=True)
        for id, task in self._tasks.items():
            assert task.done(), f"the client of {id} waits for ever"
            task.result()
            assert self.read[id][-1].finish_reason is not None, f"the client of {id} does not know how it ended"
        assert not self._loop.num_open, "a place is taken for ever"
        assert not self._loop._total_tokens, "tokens are counted for ever"
        assert not self._door._queues, "a queue is left"
        self.discard()

    def discard(self) -> None:
        """Leave nothing behind, whatever has happened."""
        if not self._events.is_closed():
            self._loop.close()
            for task in self._tasks.values():
                task.cancel()
            while not all(task.done() for task in self._tasks.values()):
                self.turn(late=True)
            self._events.close()
