"""Turns at the event loop, for work that is short once but that clients can ask for many times at once."""

from __future__ import annotations

import asyncio


class Turn:
    """``async with turn:`` waits until nobody else has the turn and the event loop has done other work meanwhile. Use
    it in one event loop."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> None:
        await self._lock.acquire()
        try:
            await asyncio.sleep(0)
        except BaseException:
            self._lock.release()
            raise

    async def __aexit__(self, *error: object) -> None:
        self._lock.release()
