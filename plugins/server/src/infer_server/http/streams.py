"""Long answers: written as JSON a few milliseconds at a time, so that the event loop can do other work between, and
sent to clients that may read slowly."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, NoReturn, Self, TypeVar

from aiohttp import web

from infer_server.http.wire import WireFormat

FEW = 16
"""Up to this many items, such as the tokens of one step, are written without a pause."""
TURN_S = 0.004
"""How long one turn may take, in seconds."""
RUN = 64
"""How many items become one piece."""
PIECE_BYTES = 1 << 18
"""Longer answers are sent in pieces of about this size, so that other streams can continue in between."""
MARK = secrets.token_hex(16)
"""A placeholder for an array in the JSON around it. It is random, so that no client can send it."""
BREAKS = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""The line breaks of ``str.splitlines`` that JSON's strings may contain, and their escapes. Clients that read streams
line by line with httpx would divide an event there."""
Item = TypeVar("Item")
Made = TypeVar("Made")


def one_line(written: str) -> str:
    """JSON with ``BREAKS`` escaped."""
    for character, escape in BREAKS.items():
        written = written.replace(character, escape)
    return written


class Turn:
    """``async with turn:`` waits until nobody else has the turn and the event loop has done other work meanwhile: for
    work that is short once but that clients can ask for many times at once. Use it in one event loop."""

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


class Array:
    """A JSON array whose items have been encoded already. With braces as brackets it is an object, and the items are
    its members."""

    __slots__ = ("pieces",)

    def __init__(self, items: Sequence[bytes], brackets: tuple[bytes, bytes] = (b"[", b"]")) -> None:
        runs = [b",".join(items[at : at + RUN]) for at in range(0, len(items), RUN)]
        self.pieces = [brackets[0], *[piece for run in runs for piece in (b",", run)][1:], brackets[1]]

    @classmethod
    def of(cls, values: Sequence[object]) -> Self:
        """An array of plain values. If they are many, call it in a thread: it lets other threads run between two
        pieces."""
        runs = (values[at : at + RUN] for at in range(0, len(values), RUN))
        return cls([one_line(json.dumps(run, ensure_ascii=False))[1:-1].encode() for run in runs])


class Writer:
    """Writes values as JSON that may contain Arrays. Use it in one event loop."""

    def __init__(self) -> None:
        self._turn = Turn()
        self._arrays: list[Array] = []
        # One encoder for all: json.dumps would make a new one for every token.
        self._encode = json.JSONEncoder(ensure_ascii=False, default=self._meet).encode

    async def each(self, make: Callable[[Item], Made], items: Iterable[Item], count: int) -> list[Made]:
        """``make`` applied to each of the ``count`` items. If they are many, this takes turns of ``TURN_S``; between
        two of these, whichever call they belong to, the event loop does other work."""
        if count <= FEW:
            return [make(item) for item in items]
        made: list[Made] = []
        left = iter(items)
        while len(made) < count:
            async with self._turn:
                end = time.perf_counter() + TURN_S
                for item in left:
                    made.append(make(item))
                    if time.perf_counter() > end:
                        break
        return made

    def pieces(self, value: object) -> list[bytes]:
        """The JSON of a value, in pieces to be sent one after the other."""
        try:
            head, *tails = one_line(self._encode(value)).split(f'"{MARK}"')
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


class Stream:
    """Sends frames to a client, one after the other, as ``written`` has them. Use it in one event loop."""

    def __init__(
        self,
        http: web.Request,
        response: web.StreamResponse,
        written: WireFormat,
        writer: Writer,
        stall_timeout_s: float,
    ) -> None:
        self._http = http
        self._response = response
        self._written = written
        self._writer = writer
        self._stall_timeout_s = stall_timeout_s
        self._lock = asyncio.Lock()
        self._count = 0
        self._last = time.monotonic()
        """When something was sent, or the headers."""

    async def send(self, frame: Mapping[str, Any]) -> None:
        async with self._lock:
            await self._send(frame)

    async def _send(self, frame: Mapping[str, Any] | None) -> None:
        """Without a frame, send ``IDLE``."""
        written = self._written
        if frame is None:
            pieces = [written.IDLE]
        else:
            before, behind = written.AROUND
            numbered = self._writer.pieces(written.numbered(frame, self._count))
            self._count += 1
            pieces = [written.head(frame) + before, *numbered, behind]
        await write_pieces(self._http, self._response, pieces, self._stall_timeout_s)
        self._last = time.monotonic()

    @asynccontextmanager
    async def kept_alive(self, silence_s: float, idle: Mapping[str, Any] | None) -> AsyncGenerator[None]:
        """Whenever nothing was sent for ``silence_s``, send the frame ``idle``, or ``IDLE`` without one."""

        async def keep() -> None:
            with suppress(ConnectionError):  # the client has left: its handler is canceled
                while True:
                    await asyncio.sleep(self._last + silence_s - time.monotonic())
                    async with self._lock:
                        if time.monotonic() - self._last >= silence_s:
                            await self._send(idle)

        keeping = asyncio.create_task(keep())
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.wait((keeping,))


async def write(http: web.Request, response: web.StreamResponse, data: bytes, stall_timeout_s: float) -> None:
    """Write to the client. One that reads nothing for ``stall_timeout_s`` counts as disconnected."""
    if http.transport is not None and http.transport.get_write_buffer_size() == 0:
        await response.write(data)  # the buffer is empty, so this does not wait
        return
    try:
        async with asyncio.timeout(stall_timeout_s):
            await response.write(data)
    except TimeoutError:
        hang_up(http)


async def write_pieces(
    http: web.Request, response: web.StreamResponse, pieces: Sequence[bytes], stall_timeout_s: float
) -> None:
    """``write`` them, about ``PIECE_BYTES`` at a time."""
    size = begin = 0
    for end, piece in enumerate(pieces, 1):
        size += len(piece)
        if size > PIECE_BYTES:
            await write(http, response, b"".join(pieces[begin:end]), stall_timeout_s)
            await asyncio.sleep(0)  # let others run: the write itself waits only if the client reads slowly
            size, begin = 0, end
    await write(http, response, b"".join(pieces[begin:]), stall_timeout_s)


def hang_up(http: web.Request) -> NoReturn:
    """End the connection to a client that does not read, and drop what waits to be sent to it: a connection that is
    closed stays until everything has been sent. Raises ConnectionResetError."""
    if http.transport is not None:
        http.transport.abort()
    raise ConnectionResetError("the client does not read") from None
