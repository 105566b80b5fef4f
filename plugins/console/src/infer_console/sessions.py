"""Keys for the page: who shows one gets a cookie, by which the page's own requests are let in, and no others."""

from __future__ import annotations

import hashlib
import secrets
import time
from typing import Protocol, TypeVar
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import Field, SecretStr

from infer.errors import RequestError
from infer_server.http.body import Body
from infer_server.http.errors import ForbiddenError, UnauthorizedError
from infer_server.http.keys import Keys

T = TypeVar("T", bound=Body)

LIFE_S = 12 * 3600
MOST = 256
"""The most sessions at a time; the oldest one ends for a further one."""
LOGIN_BYTES = 8192
"""The largest body of a login, which anybody may send: too small for the process that checks large ones."""
HEADER = "X-Infer-Console"
"""The page's requests have it. A page of another origin cannot send it without asking first."""


class Login(Body):
    """The body of POST /console/api/login."""

    key: SecretStr = Field(min_length=1, max_length=1024)


class Host(Protocol):
    """What the page needs of the server that has it: one with an engine, or one in front of several."""

    @property
    def keys(self) -> Keys: ...
    async def read(self, http: web.Request, model: type[T], most: int) -> T:
        """Read and check a body of at most ``most`` bytes. Raises RequestError or an aiohttp HTTP error."""


class Sessions:
    """Sessions are random tokens, of which only digests are kept. The cookie has the port in its name, because browsers
    send a host's cookies to all of its ports."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._ends: dict[bytes, tuple[float, str]] = {}
        """When each session ends, on ``time.monotonic``, and its key's owner, by its token's digest; the oldest session
        first."""
        host.keys.accept(self.owner)

    async def login(self, http: web.Request) -> web.Response:
        """Exchange a key for a new session; one that the request has already ends."""
        check(http)
        body = await self._host.read(http, Login, LOGIN_BYTES)
        if not self._host.keys:
            raise RequestError("This server has no API keys, so there is nothing to log in to.")
        if not self._host.keys.known(body.key.get_secret_value()):
            raise UnauthorizedError("This is not one of the server's API keys.")
        self._ends.pop(self._shown(http), None)
        while len(self._ends) >= MOST:
            del self._ends[next(iter(self._ends))]
        token = secrets.token_urlsafe(32)
        owner = self._host.keys.owner_of(body.key.get_secret_value())
        self._ends[_digest(token)] = time.monotonic() + LIFE_S, owner
        response = web.Response(status=204)
        secure = http.secure or http.headers.get("X-Forwarded-Proto") == "https"
        response.set_cookie(
            _name(http), token, max_age=LIFE_S, path="/", secure=secure, httponly=True, samesite="Strict"
        )
        return response

    async def logout(self, http: web.Request) -> web.Response:
        check(http)
        self._ends.pop(self._shown(http), None)
        response = web.Response(status=204)
        response.del_cookie(_name(http), path="/", httponly=True, samesite="Strict")
        return response

    def owner(self, http: web.Request) -> str | None:
        """As whose a request counts that has the cookie of a session and comes from the page; None for others."""
        ends, owner = self._ends.get(self._shown(http), (0.0, ""))
        return owner if time.monotonic() < ends and own(http) else None

    def _shown(self, http: web.Request) -> bytes:
        return _digest(http.cookies.get(_name(http), ""))


def own(http: web.Request) -> bool:
    """Whether a request was sent by a page of this very origin: it has the page's header, and the browser does not say
    that it comes from elsewhere. Another port of the same host is elsewhere, which ``SameSite`` alone does not see."""
    if HEADER not in http.headers:
        return False
    if (site := http.headers.get("Sec-Fetch-Site")) is not None:
        return site == "same-origin"
    # Browsers leave that out where the server is neither local nor has TLS.
    origin = http.headers.get("Origin")
    try:
        return origin is None or urlsplit(origin).netloc.lower() == http.headers.get("Host", "").lower()
    except ValueError:
        return False


def for_page(host: Host, handler: Handler) -> Handler:
    """The handler for requests of the page itself, or with a key. Otherwise any page that a browser shows could take
    the places of those who watch a server without keys."""

    async def checked(http: web.Request) -> web.StreamResponse:
        if not (host.keys and "Authorization" in http.headers):  # which has let the request in, if there are keys
            check(http)
        return await handler(http)

    return checked


def check(http: web.Request) -> None:
    """Raises ForbiddenError unless ``own``."""
    if not own(http):
        raise ForbiddenError(f"Only the console's own page may call this, or a client that sends the header {HEADER}.")


def _name(http: web.Request) -> str:
    port = http.transport.get_extra_info("sockname")[1] if http.transport is not None else 0
    return f"infer_console_{port}"


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()
