"""Answers to JSON. What is long in them is written a few milliseconds at a time, and others have their turn between."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Self, TypeVar

FEW = 16
"""Items that are written at once: those of a step."""
TURN_S = 0.004
"""Seconds that one turn may take, whoever's it is."""
RUN = 64
"""Items that become one piece."""
MARK = secrets.token_hex(16)
"""Stands for an array in the text around it; nobody outside knows it."""
Item = TypeVar("Item")
Made = TypeVar("Made")


class Array:
    """An array whose items are JSON already; with other brackets an object, whose items are its members."""

    __slots__ = ("pieces",)

    def __init__(self, items: Sequence[bytes], brackets: tuple[bytes, bytes] = (b"[", b"]")) -> None:
        runs = [b",".join(items[at : at + RUN]) for at in range(0, len(items), RUN)]
        self.pieces = [brackets[0], *[piece for run in runs for piece in (b",", run)][1:], brackets[1]]

    @classmethod
    def of(cls, values: Sequence[object]) -> Self:
        """Of plain values, in a thread: its turns are between two of the pieces."""
        runs = (values[at : at + RUN] for at in range(0, len(values), RUN))
        return cls([json.dumps(run, ensure_ascii=False)[1:-1].encode() for run in runs])


class Writer:
    """Use it in one event loop."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._arrays: list[Array] = []
        # Made once: json.dumps would make an encoder for every token.
        self._encode = json.JSONEncoder(ensure_ascii=False, default=self._meet).encode

    async def each(self, make: Callable[[Item], Made], items: Iterable[Item], count: int) -> list[Made]:
        """What ``make`` makes of each of the ``count`` items. Of all that is under way here, one turn at most comes
        between two of the event loop's others."""
        if count <= FEW:
            return [make(item) for item in items]
        made: list[Made] = []
        left = iter(items)
        while len(made) < count:
            async with self._turn:
                await asyncio.sleep(0)
                end = time.perf_counter() + TURN_S
                for item in left:
                    made.append(make(item))
                    if time.perf_counter() > end:
                        break
        return made

    def pieces(self, value: object) -> list[bytes]:
        """JSON, which is these one after the other."""
        try:
            head, *tails = self._encode(value).split(f'"{MARK}"')
            pieces = [head.encode()]
            for array, tail in zip(self._arrays, tails, strict=True):
                pieces += [*array.pieces, tail.encode()]
            return pieces
        finally:
            self._arrays.clear()

    def _meet(self, value: object) -> str:
        if not isinstance(value, Array):
            raise TypeError(f"{type(value).__name__} is no JSON")
        self._arrays.append(value)
        return MARK
