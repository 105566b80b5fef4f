"""Who may ask, and what is written down of it."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from infer.server.http_errors import REQUEST_ID, ForbiddenError, MediaTypeError, UnauthorizedError
from infer.server.service import CALLER, Caller

OPEN = ("/health", "/ready")
"""What answers without a key: the questions of load balancers."""

log = logging.getLogger("infer.access")


def authorize(keys: Sequence[str]) -> Middleware:
    """Every route but those in ``OPEN`` wants ``Authorization: Bearer KEY``. Keys are compared in constant time, by
    their digests, so that not even a length shows."""
    digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in OPEN:
            scheme, _, shown = request.headers.get("Authorization", "").partition(" ")
            digest = hashlib.sha256(shown.strip().encode(errors="surrogateescape")).digest()
            known = [hmac.compare_digest(digest, each) for each in digests]
            if scheme.lower() != "bearer" or not any(known):
                raise UnauthorizedError(
                    "An API key is needed: send Authorization: Bearer KEY, with a key of this server."
                )
        return await handler(request)

    return middleware


def guard(host: str) -> Middleware:
    """For a server without keys, which any page in a browser next to it could ask otherwise. Pages of foreign origins
    may send everything but JSON unasked, so a body has to say that it is JSON. And where only this machine can connect,
    the name that was asked for has to be this machine's: a foreign one that leads here is a trick (DNS rebinding)."""
    local = _loopback(host)

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        named = request.headers.get("Host")
        if local and named is not None:
            name = _name(named)
            if name != host.lower() and not _loopback(name):
                raise ForbiddenError(
                    f"This server has no keys and answers only to names of its own machine, which {named!r} is not: "
                    "ask for localhost, or set server.api_keys."
                )
        if request.method == "POST" and not re.fullmatch(r"application/(.+\+)?json", request.content_type):
            given = request.headers.get("Content-Type", "none")
            raise MediaTypeError(
                f"The Content-Type is {given!r}, but bodies are JSON here: send Content-Type: application/json "
                "(curl has --json for -d)."
            )
        return await handler(request)

    return middleware


def _name(host: str) -> str:
    """A Host header's, without the port."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def _loopback(name: str) -> bool:
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


def preflight(origins: Sequence[str]) -> Middleware:
    """Answers browsers that ask whether a page of one of the origins ("*" is any) may ask something. The answer's other
    half is ``allow_origin``."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        asked = request.headers.get("Access-Control-Request-Method")
        if request.method != "OPTIONS" or asked is None or not _allowed(request, origins):
            return await handler(request)
        headers = {
            "Access-Control-Allow-Methods": "GET, POST",
            "Access-Control-Allow-Headers": request.headers.get("Access-Control-Request-Headers", ""),
            "Access-Control-Max-Age": "600",
        }
        return web.Response(status=204, headers=headers)

    return middleware


def allow_origin(origins: Sequence[str]) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """Lets pages of these origins read answers, errors and streams included."""

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
    """A line of JSON for every request, when it has been answered or its client has left."""

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


def log_to_stderr() -> None:
    """Lines as they are, whatever form the rest of the log has."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.handlers[:] = [handler]
    log.setLevel(logging.INFO)
    log.propagate = False
