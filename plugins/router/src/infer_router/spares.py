"""A process that waits for the next model: it has imported all that a model's process needs, and is told which model it
is for when one is loaded, or a little before, while another one ends.

It is started like any other, and not forked from one that has torch: a fork takes along locks that threads hold, and
OpenMP's and CUDA's states, which a child cannot use."""

from __future__ import annotations

import asyncio
import logging
import time
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from infer_router.process import ending

log = logging.getLogger(__name__)

AFTER_S = 2.0
"""How long after a load the next one begins, so that the first answer has the processor to itself."""
MOST_BACKOFF_S = 60.0
"""How long it takes at most until one that has ended by itself is followed by another: at once, then after a second,
three, seven."""


class Told(NamedTuple):
    """What such a process was told, and when."""

    name: str
    at: float


class Spares:
    """Keeps one such process, which ``create`` starts, whenever there may be one. Use it in one event loop."""

    def __init__(self, create: Callable[[], Awaitable[Process]]) -> None:
        self._create = create
        self._keeping: asyncio.Task[None] | None = None
        self._begun: asyncio.Future[Process] | None = None
        self._told: Told | None = None
        self._room = False

    def may_begin(self, room: bool) -> None:
        """Whether there is room for one. One that has begun stays there either way, for whoever takes the room takes
        the process."""
        self._room = room
        if room and self._keeping is None:
            self._keeping = asyncio.create_task(self._keep())
        elif not room and self._keeping is not None and self._begun is None:
            self._keeping.cancel()
            self._keeping = None

    def tell(self, name: str, orders: str) -> None:
        """Give the process that waits, if there is one, the orders for a model. It gets no others."""
        begun = self._begun
        if begun is not None and begun.done() and begun.exception() is None and self._told is None:
            stdin = begun.result().stdin
            assert stdin is not None
            stdin.write(orders.encode() + b"\n")  # not drained: it may not have begun to read
            self._told = Told(name, time.monotonic())

    async def take(self) -> tuple[Process, Told | None] | None:
        """The process that waits and what it was told, or None if none has begun. It is the caller's, who has to end
        it."""
        keeping, begun, told = self._keeping, self._begun, self._told
        self._keeping = self._begun = self._told = None
        if keeping is not None:
            keeping.cancel()
        return None if begun is None else (await begun, told)

    async def _keep(self) -> None:
        after_s, lost = AFTER_S, 0
        while self._room:
            await asyncio.sleep(after_s)
            self._begun = asyncio.ensure_future(self._create())
            try:
                process = await asyncio.shield(self._begun)
                log.warning("the process that waits for a model %s", ending(await process.wait()))
            except OSError as error:
                log.warning("no process can wait for a model: %s", error.strerror)
            self._begun = self._told = None
            after_s, lost = min(MOST_BACKOFF_S, 2.0 ** min(lost, 10) - 1), lost + 1
        self._keeping = None
