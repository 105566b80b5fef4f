"""The server's API keys, and how a request shows that it comes from someone who has one."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Sequence

from aiohttp import web
from pydantic import SecretStr

OWNER = "X-Infer-Owner"
"""The header in which an ingress tells a server whose request it passes on: ``Keys.owner``."""
ACCOUNT = web.RequestKey("account", str)
"""A request's owner, found out once."""
INGRESS = "infer-ingress-"
"""How the keys begin that ingresses show, and nobody else."""


class Keys:
    """Keys are compared by their digests in constant time, so that not even their lengths show. True if there are
    any."""

    def __init__(self, keys: Sequence[SecretStr]) -> None:
        self._digests = [_digest(key.get_secret_value()) for key in keys]
        self._ways: list[Callable[[web.Request], str | None]] = []

    def __bool__(self) -> bool:
        return bool(self._digests)

    def known(self, key: str) -> bool:
        """Whether it is one of the keys."""
        shown = _digest(key)
        equal = [hmac.compare_digest(shown, each) for each in self._digests]  # all of them, whichever is right
        return any(equal)

    def accept(self, way: Callable[[web.Request], str | None]) -> None:
        """Let in whatever ``way`` returns the owner of (``owner_of``), besides requests that show a key."""
        self._ways.append(way)

    def admit(self, request: web.Request) -> bool:
        """Whether the request shows a key (``Authorization: Bearer KEY`` or ``X-Api-Key: KEY``), or is accepted in
        another way."""
        return self._account(request) is not None

    def authorize(self, request: web.Request) -> bool:
        """``admit``, at the beginning: ``owner`` is who it is then."""
        if (account := self._account(request)) is not None:
            request[ACCOUNT] = account
        return account is not None

    def owner(self, request: web.Request) -> str:
        """A digest of the key that the request shows, or on whose account it is accepted in another way: as whose it
        counts. Empty if there is none. An ingress shows a key of its own, and tells the owner; what others tell does
        not count. It stays, even if the session that let the request in ends before its answer."""
        if ACCOUNT not in request:
            request[ACCOUNT] = self._account(request) or ""
        return request[ACCOUNT]

    @staticmethod
    def owner_of(key: str) -> str:
        """What stands for a key without telling it."""
        return _digest(f"owner {key}").hex()

    def _account(self, request: web.Request) -> str | None:
        """The owner of a request; None if it is not to be let in."""
        if (key := next(filter(self.known, _shown(request)), None)) is not None:
            return request.headers.get(OWNER, "") if key.startswith(INGRESS) else self.owner_of(key)
        return next((owner for way in self._ways if (owner := way(request)) is not None), None)


def _shown(request: web.Request) -> list[str]:
    """The keys that a request shows."""
    scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
    shown = [bearer] if scheme.lower() == "bearer" else []
    return [key.strip() for key in (*shown, *request.headers.getall("X-Api-Key", [])[:1])]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
