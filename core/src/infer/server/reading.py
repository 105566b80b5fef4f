"""Bodies to what they ask for: small ones at once, others in a process, since parsing holds the interpreter."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from infer.errors import QueueFullError, RequestError
from infer.server import schemas
from infer.server.child import Child, ChildError

MAX_BODIES = 8
"""Of the largest size, that may be on their way at a time, all together."""
INLINE_BYTES = 1 << 14
"""Smaller bodies take a few milliseconds at most, whatever is in them."""
SECONDS = 5.0
MEMORY = 1 << 30
T = TypeVar("T", bound=schemas.Body)


class Room:
    """For ``most`` bytes of bodies that have arrived and are not parsed yet. ``INLINE_BYTES`` of each do not count: a
    few that fill the room and come slowly keep out large bodies, never small ones."""

    def __init__(self, most: int) -> None:
        self._left = most

    @contextmanager
    def body(self) -> Iterator[Callable[[int], None]]:
        """For one body, whose size so far goes to what this gives; that raises QueueFullError if there is no room."""
        taken = 0

        def grow(size: int) -> None:
            nonlocal taken
            more = max(size - INLINE_BYTES - taken, 0)
            if more > self._left:
                raise QueueFullError(
                    "As much of large request bodies is on its way to this server as it takes at once; try again later."
                )
            self._left -= more
            taken += more

        try:
            yield grow
        finally:
            self._left += taken


class Reader:
    """``schemas.parse``, without holding up the event loop. Use it in one event loop."""

    def __init__(self) -> None:
        self._child = Child(__name__, bytes, seconds=SECONDS, memory=MEMORY)

    async def __call__(self, body: bytes, model: type[T]) -> T:
        """Raises RequestError."""
        if len(body) <= INLINE_BYTES:
            return schemas.parse(body, model)
        try:
            answer = await self._child.ask(model.__name__.encode() + b"\n" + body)
        except ChildError as error:
            raise RequestError(f"The body cannot be checked: {error}. Send a smaller or simpler one.") from None
        # Made by our own process. In a thread, since thousands of models take a while.
        found: T | tuple[str, str | None, str | None] = await asyncio.to_thread(pickle.loads, answer)
        if isinstance(found, tuple):
            message, param, code = found
            raise RequestError(message, param=param, code=code)
        return found

    async def close(self) -> None:
        await self._child.close()


def worker(first: bytes) -> Callable[[bytes], bytes]:
    """In the process: a model's name and a body to the model or what is wrong, pickled."""

    def answer(message: bytes) -> bytes:
        name, _, body = message.partition(b"\n")
        try:
            return pickle.dumps(schemas.parse(body, getattr(schemas, name.decode())), pickle.HIGHEST_PROTOCOL)
        except RequestError as error:
            return pickle.dumps((str(error), error.param, error.code))

    return answer
