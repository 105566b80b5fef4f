"""The server's API keys, and how a request shows that it comes from someone who has one."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Sequence

from aiohttp import web
from pydantic import SecretStr


class Keys:
    """Keys are compared by their digests in constant time, so that not even their lengths show. True if there are
    any."""

    def __init__(self, keys: Sequence[SecretStr]) -> None:
        self._digests = [_digest(key.get_secret_value()) for key in keys]
        self._ways: list[Callable[[web.Request], bool]] = []

    def __bool__(self) -> bool:
        return bool(self._digests)

    def known(self, key: str) -> bool:
        """Whether it is one of the keys."""
        shown = _digest(key)
        equal = [hmac.compare_digest(shown, each) for each in self._digests]  # all of them, whichever is right
        return any(equal)

    def accept(self, way: Callable[[web.Request], bool]) -> None:
        """Let in whatever ``way`` returns True for, besides requests that show a key."""
        self._ways.append(way)

    def admit(self, request: web.Request) -> bool:
        """Whether the request shows a key (``Authorization: Bearer KEY`` or ``X-Api-Key: KEY``), or is accepted in
        another way."""
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        shown = [bearer] if scheme.lower() == "bearer" else []
        shown += request.headers.getall("X-Api-Key", [])[:1]
        return any(self.known(key.strip()) for key in shown) or any(way(request) for way in self._ways)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
