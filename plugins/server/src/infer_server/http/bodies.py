"""Request bodies as they arrive, and their parsing: small ones at once, larger ones in a child process, since parsing
holds the GIL."""

from __future__ import annotations

import asyncio
import importlib
import pickle
import sys
import threading
import traceback
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from infer.errors import QueueFullError, RequestError
from infer_server.http import parsing
from infer_server.http.body import Body
from infer_server.http.children import Child, ChildError, give_back
from infer_server.http.errors import UnreadableError
from infer_server.http.parsing import Unknown
from infer_server.http.streams import Turn

MAX_BODIES = 8
"""Bodies that are still arriving may take as many bytes together as this many of the largest size."""
INLINE_BYTES = 1 << 14
"""Bodies up to this size are parsed in the event loop: they take a few milliseconds at most, whatever they contain,
and between two of them it does other work."""
LARGE_BYTES = 1 << 20
"""malloc keeps the memory of larger bodies, and of what is made of them."""
LARGE_S = 1.0
"""How long after such a body its memory is given back: its request has ended by then, unless it runs."""
SECONDS = 5.0
MEMORY = 1 << 30
T = TypeVar("T", bound=Body)


class BodyBudget:
    """Limits bodies that have arrived but are not parsed yet to ``most`` bytes in all. The first ``INLINE_BYTES`` of
    each do not count, so that large bodies that arrive slowly can keep out other large bodies, but never small ones.

    What large bodies took is given back to the system soon after. Use it in one event loop."""

    def __init__(self, most: int) -> None:
        self._left = most
        self._to_give_back = False

    @contextmanager
    def body(self) -> Iterator[Callable[[int], None]]:
        """One body's share. Yields a function to be called with the body's size so far, which raises QueueFullError if
        there is no room."""
        taken = 0

        def grow(size: int) -> None:
            nonlocal taken
            more = max(size - INLINE_BYTES - taken, 0)  # bytes beyond those taken already
            if more > self._left:
                raise QueueFullError("Too many large request bodies are arriving at once; try again later.")
            self._left -= more
            taken += more

        try:
            yield grow
        finally:
            self._left += taken
            if taken > LARGE_BYTES and not self._to_give_back:  # once for many
                self._to_give_back = True
                asyncio.get_running_loop().call_later(LARGE_S, self._give_back)

    def _give_back(self) -> None:
        self._to_give_back = False
        # The loop's own threads may be ending.
        threading.Thread(target=give_back, name="infer-give-back", daemon=True).start()


async def arrived(http: web.Request, most: int, grow: Callable[[int], None], timeout_s: float) -> bytes:
    """The body as it was sent. Raises HTTPRequestTimeout, HTTPRequestEntityTooLarge, UnreadableError, and whatever
    ``grow`` raises."""
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            while chunk := await http.content.readany():
                body += chunk
                if len(body) > most:
                    raise web.HTTPRequestEntityTooLarge(max_size=most, actual_size=len(body))
                grow(len(body))
    except TimeoutError:
        raise web.HTTPRequestTimeout(text="The request's body did not arrive in time.") from None
    except (HttpProcessingError, web.RequestPayloadError) as error:
        http.content.feed_eof()  # otherwise aiohttp reads on and meets the same error again
        why = " ".join(getattr(error, "message", "").split())
        raise UnreadableError(f"The body cannot be read, because it is incomplete{why and f' ({why})'}.") from None
    return bytes(body)


def inflated(body: bytes, encoding: str, most: int) -> bytes:
    """The decompressed body, or its first ``most`` + 1 bytes if it has more. Raises RequestError."""
    windows = {"gzip": 31, "deflate": zlib.MAX_WBITS}
    if encoding not in windows:
        raise RequestError(f"The Content-Encoding {encoding[:40]!r} is not supported; send gzip, deflate or none.")
    stream = zlib.decompressobj(windows[encoding])
    try:
        found = stream.decompress(body, most + 1)
    except zlib.error as error:
        raise RequestError(f"The body cannot be read: its Content-Encoding is {encoding!r} ({error}).") from None
    if len(found) <= most and (not stream.eof or stream.unused_data):
        raise RequestError(
            f"The body cannot be read: its Content-Encoding is {encoding!r}, but it is incomplete, or more follows it."
        )
    return found


async def unpacked(http: web.Request, body: bytes, most: int, grow: Callable[[int], None]) -> bytes:
    """The body that was sent as ``body``: decompressed in a thread and up to a limit, because a few bytes may inflate
    to a thousand times as many. Raises RequestError, HTTPRequestEntityTooLarge, and whatever ``grow`` raises."""
    if (encoding := http.headers.get("Content-Encoding", "identity").lower()) == "identity":
        return body
    body = await asyncio.to_thread(inflated, body, encoding, most)
    grow(len(body))
    if len(body) > most:
        del body  # the error's traceback would keep it
        raise web.HTTPRequestEntityTooLarge(max_size=most, actual_size=most + 1)
    return body


class Reader:
    """``parsing.parse`` without blocking the event loop. Use it in one event loop."""

    def __init__(self, unknown: Unknown = "refuse") -> None:
        self._unknown = unknown
        self._turn = Turn()
        self._modules: set[str] = set()
        self._child = Child(__name__, lambda: "\n".join(self._modules).encode(), seconds=SECONDS, memory=MEMORY)

    def expect(self, model: type[Body]) -> None:
        """Have the child process import a model before there is work. Raises ValueError for a model that it could not
        find."""
        if getattr(sys.modules.get(model.__module__), model.__name__, None) is not model:
            raise ValueError(f"the body {model.__qualname__} does not stand at the top of a module of its own name")
        self._modules.add(model.__module__)

    async def __call__(self, body: bytes, model: type[T]) -> T:
        """Parse a body. Raises RequestError."""
        if len(body) <= INLINE_BYTES:
            async with self._turn:
                return parsing.parse(body, model, self._unknown)
        try:
            answer = await self._child.ask(f"{self._unknown} {model.__module__} {model.__name__}\n".encode() + body)
        except ChildError as error:
            raise RequestError(f"The body cannot be checked: {error}. Send a smaller or simpler one.") from None
        # Unpickling is safe, because our own process made the answer. In a thread, since it may hold thousands of
        # models.
        result: T | tuple[str, str | None, str | None] | str = await asyncio.to_thread(pickle.loads, answer)
        if isinstance(result, str):
            raise RuntimeError(f"a body could not be parsed:\n{result}")
        if isinstance(result, tuple):
            message, param, code = result
            raise RequestError(message, param=param, code=code)
        return result

    async def begin(self) -> None:
        """Start the child process, so that the first large body need not wait for that."""
        await self._child.begin()

    async def close(self) -> None:
        await self._child.close()


def worker(first: bytes) -> Callable[[bytes], bytes]:
    """The work of the child process: from what becomes of unknown fields, a model's module and name, and a body, make
    the pickled model, the pickled (message, param, code) of a RequestError, or the pickled traceback of another error,
    after which the next body can still be read. ``first`` names the modules."""
    for module in first.decode().split():
        try:
            importlib.import_module(module)
        except Exception:  # a plugin's module is broken; all other bodies can still be read
            traceback.print_exc()

    def answer(message: bytes) -> bytes:
        head, _, body = message.partition(b"\n")
        unknown, module, name = head.decode().split(" ")
        try:
            model = getattr(sys.modules[module], name)
            return pickle.dumps(parsing.parse(body, model, cast(Unknown, unknown)), pickle.HIGHEST_PROTOCOL)
        except RequestError as error:
            return pickle.dumps((str(error), error.param, error.code))
        except MemoryError:  # which ends the process
            raise
        except Exception:
            return pickle.dumps(traceback.format_exc())

    return answer
