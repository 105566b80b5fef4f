"""Who may use the server (API keys, hosts, origins), and the access log."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import json
import logging
import os
import queue
import re
import secrets
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from infer.errors import EngineDeadError
from infer_server.http.errors import REQUEST_ID, ForbiddenError, MediaTypeError, UnauthorizedError
from infer_server.http.keys import Keys
from infer_server.http.wire import SHUTTING_DOWN

log = logging.getLogger("infer.access")
MOST_LINES = 10_000
"""How many lines of the log may wait for whoever reads it."""
LAST_S = 1.0
"""How many seconds the process waits at its end for the lines that are left."""


@dataclass
class Caller:
    """What handlers add to a request's line in the access log."""

    user: str | None = None
    usage: dict[str, Any] | None = None


CALLER = web.RequestKey("caller", Caller)


def authorize(keys: Keys, opened: Set[web.AbstractRoute]) -> Middleware:
    """Let in only who has a key, except to the routes that are ``opened``."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.match_info.route not in opened and not keys.authorize(request):
            raise UnauthorizedError("An API key is needed: send Authorization: Bearer KEY, with a key of this server.")
        return await handler(request)

    return middleware


def guard(host: str) -> Middleware:
    """Protect a server without keys from web pages in a browser that can reach it. A page of a foreign origin may send
    anything but JSON without a preflight, so what has a body has to be declared as JSON, and so does what has none, but
    comes from a page: browsers send its origin. And if the server listens on a loopback address only, the Host header
    has to name this machine; a foreign name that resolves to it is a sign of DNS rebinding."""
    local = loopback(host)
    if not local:
        logging.getLogger(__name__).warning(
            "server.host = %r lets the network in, and server.api_keys has no keys: whoever reaches it is served", host
        )

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        named = request.headers.get("Host")
        if local and named is not None and not _names(named, host):
            raise ForbiddenError(
                "This server has no keys, so it answers only requests for names of its own machine, and "
                f"{named!r} is not one: ask for localhost, or set server.api_keys."
            )
        declares = request.method == "POST" and (request.can_read_body or "Origin" in request.headers)
        if declares and not re.fullmatch(r"application/(.+\+)?json", request.content_type):
            given = request.headers.get("Content-Type", "none")
            raise MediaTypeError(
                f"The Content-Type is {given!r}, but this server takes JSON: send Content-Type: application/json "
                "(curl has --json for -d)."
            )
        return await handler(request)

    return middleware


@functools.lru_cache(64)  # almost all requests have the same header, which takes longer to read than a key to check
def _names(header: str, host: str) -> bool:
    """Whether a Host header names this machine, on whose address ``host`` the server listens."""
    try:
        name = (urlsplit(f"//{header}").hostname or "").rstrip(".")
    except ValueError:
        return False
    return name == host.lower() or loopback(name)


def loopback(name: str) -> bool:
    """Whether a host's name or address is this machine's own alone."""
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


def preflight(origins: Sequence[str]) -> Middleware:
    """Answer CORS preflight requests from pages of the given origins; "*" is any. ``allow_origin`` adds the headers to
    the answers of the requests themselves."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        method = request.headers.get("Access-Control-Request-Method")
        if request.method != "OPTIONS" or method is None or not _allowed(request, origins):
            return await handler(request)
        headers = {
            "Access-Control-Allow-Methods": "GET, POST, DELETE",
            "Access-Control-Allow-Headers": request.headers.get("Access-Control-Request-Headers", ""),
            "Access-Control-Max-Age": "600",
        }
        return web.Response(status=204, headers=headers)

    return middleware


def allow_origin(origins: Sequence[str]) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """A signal handler that lets pages of these origins read answers, including errors and streams."""

    async def prepare(request: web.Request, response: web.StreamResponse) -> None:
        response.headers["Vary"] = "Origin"
        if _allowed(request, origins):
            response.headers["Access-Control-Allow-Origin"] = request.headers["Origin"]
            response.headers["Access-Control-Expose-Headers"] = "X-Request-Id, Retry-After"

    return prepare


def _allowed(request: web.Request, origins: Sequence[str]) -> bool:
    origin = request.headers.get("Origin")
    return origin is not None and ("*" in origins or origin in origins)


def access_log(enabled: bool) -> Middleware:
    """Log a line of JSON for every request, once it has been answered or its client has left."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[REQUEST_ID] = secrets.token_hex(12)
        request[CALLER] = Caller()
        began = time.perf_counter()
        status: int | None = None
        try:
            response = await handler(request)
            status = response.status
            return response
        finally:
            if enabled:
                line = {
                    "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                    "request_id": request[REQUEST_ID],
                    "client": request.remote,
                    "method": request.method,
                    "path": request.path,
                    "status": status,  # null: the client left before the end
                    "duration_ms": round((time.perf_counter() - began) * 1e3, 1),
                    **vars(request[CALLER]),
                }
                log.info("%s", json.dumps(line))

    return middleware


class Inside:
    """The requests with bodies that have come in and are not answered yet, wherever they are, and what is computed
    after the answer. Use it in one event loop."""

    def __init__(self) -> None:
        self.count = 0
        self._leaving = False
        self._empty = asyncio.Event()
        self._empty.set()

    async def leave(self) -> None:
        """Let nobody else in, and wait until all have left."""
        self._leaving = True
        await self._empty.wait()

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method != "POST":
            return await handler(request)
        if self._leaving:
            raise EngineDeadError(SHUTTING_DOWN)
        with self.stay():
            return await handler(request)

    @contextmanager
    def stay(self) -> Iterator[None]:
        """Be inside until the end of the block, for work that outlives its request. Begin before that has left."""
        self.count += 1
        self._empty.clear()
        try:
            yield
        finally:
            self.count -= 1
            if not self.count:
                self._empty.set()


INSIDE = web.AppKey("inside", Inside)


class Lines:
    """A stream that a thread of its own copies to a file, so that whoever logs never waits for the log's reader: a pipe
    may be full, or a terminal stopped. What is not read in time is dropped, and counted."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._lines: queue.Queue[str] = queue.Queue(MOST_LINES)
        self._dropped = 0
        threading.Thread(target=self._copy, name="log", daemon=True).start()
        atexit.register(self._last)

    def write(self, line: str) -> None:
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._dropped += 1

    def flush(self) -> None:
        """Nothing to do: handlers call it after every line."""

    def _copy(self) -> None:
        while True:
            line = self._lines.get()
            dropped, self._dropped = self._dropped, 0
            if dropped:
                line = f"{dropped} lines of the log are missing here: nobody read them in time\n{line}"
            rest = line.encode(errors="backslashreplace")
            with contextlib.suppress(OSError):  # the disk is full, or the reader has gone
                while rest:
                    rest = rest[os.write(self._file, rest) :]
            self._lines.task_done()

    def _last(self) -> None:
        """Give the lines that are left a moment to be written."""
        deadline = time.monotonic() + LAST_S
        while self._lines.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.01)


def log_to_stderr() -> None:
    """From now on, write the log to stderr without waiting for its reader, and the access log's lines as they are,
    whatever the format of the rest."""
    handlers = [handler for handler in logging.root.handlers if isinstance(handler, logging.StreamHandler)]
    log.handlers[:] = [logging.NullHandler()]
    log.setLevel(logging.INFO)
    log.propagate = False
    if sys.stderr is None:
        return
    lines = Lines(sys.stderr.fileno())
    for handler in handlers:
        if handler.stream is sys.stderr:
            handler.setStream(lines)
    handler = logging.StreamHandler(lines)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.handlers[:] = [handler]


def announce(line: str) -> None:
    """Write a line to stdout. Whoever was to read it may have gone, or the disk may be full; the log says so then."""
    try:
        print(line, flush=True)
    except OSError as error:
        logging.getLogger(__name__).warning("%s (stdout cannot be written to: %s)", line, error)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes it at the end
