"""Who may ask, and what is written down of it."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import secrets
import sys
import time
from collections.abc import Sequence

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from infer.server.errors import REQUEST_ID, UnauthorizedError
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
        if digests and request.path not in OPEN:
            scheme, _, shown = request.headers.get("Authorization", "").partition(" ")
            digest = hashlib.sha256(shown.strip().encode(errors="surrogateescape")).digest()
            known = [hmac.compare_digest(digest, each) for each in digests]
            if scheme.lower() != "bearer" or not any(known):
                raise UnauthorizedError(
                    "An API key is needed: send Authorization: Bearer KEY, with a key of this server."
                )
        return await handler(request)

    return middleware


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
