"""Quotas: how many requests and tokens each API key may have per minute."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Literal

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from infer.errors import EngineDeadError, InferError, QueueFullError

MINUTE_S = 60.0
MOST_OWNERS = 4096
"""How many owners are remembered. A server has as many as keys; an ingress may name others."""


class RateLimitError(InferError):
    """An owner has used up a quota of ``kind``; there is more in ``retry_after_s`` seconds."""

    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, kind: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry_after_s = retry_after_s


class Bucket:
    """Token buckets, one for each owner: full at first, and filled evenly by ``per_minute``. One may be charged for
    more than it has, and is then in debt. ``clock`` is in seconds."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self._most = float(per_minute)
        self._clock = clock
        self._levels: dict[str, tuple[float, float]] = {}
        """By owner: the level, and when it was that. None of a bucket that is full."""

    def __len__(self) -> int:
        """How many owners are remembered."""
        return len(self._levels)

    def level(self, owner: str) -> float:
        """How much the owner has left; negative in debt."""
        level, at = self._levels.get(owner, (self._most, 0.0))
        return min(self._most, level + (self._clock() - at) * self._most / MINUTE_S)

    def charge(self, owner: str, amount: float) -> None:
        """Take ``amount`` out of the owner's bucket."""
        self._levels[owner] = self.level(owner) - amount, self._clock()
        if len(self._levels) > MOST_OWNERS:  # a full bucket need not be known; else who has the most left is forgotten
            fewest = sorted(self._levels, key=self.level)[: MOST_OWNERS // 2]
            self._levels = {each: self._levels[each] for each in fewest}

    def wait_s(self, owner: str, least: float) -> float:
        """In how many seconds the owner has ``least``; 0 if they have."""
        return max(0.0, least - self.level(owner)) * MINUTE_S / self._most


COUNTED = web.RequestKey("counted", str)
"""The owner whose quota a request has been counted for."""


class Quotas:
    """What ``server.requests_per_minute`` and ``server.tokens_per_minute`` leave each owner; None is no limit. An owner
    is what ``Keys.owner`` says, so without keys there is one for all. Use it in one event loop."""

    def __init__(self, requests: int | None, tokens: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._requests = None if requests is None else Bucket(requests, clock)
        self._tokens = None if tokens is None else Bucket(tokens, clock)
        self._limits = {"requests": requests, "tokens": tokens}

    def admit(self, owner: str) -> None:
        """Count a request. Raises RateLimitError, and counts nothing, if the owner has used up a quota."""
        if self._tokens is not None:
            self._check("tokens", self._tokens.wait_s(owner, 1.0))
        if self._requests is not None:
            self._check("requests", self._requests.wait_s(owner, 1.0))
            self._requests.charge(owner, 1.0)

    def give_back(self, owner: str) -> None:
        """Count a request no more, which ``admit`` has counted."""
        if self._requests is not None:
            self._requests.charge(owner, -1.0)

    def charge(self, owner: str, tokens: int) -> None:
        """Count tokens that were computed for the owner."""
        if self._tokens is not None:
            self._tokens.charge(owner, tokens)

    def _check(self, kind: Literal["requests", "tokens"], wait_s: float) -> None:
        if wait_s > 0:
            seconds = math.ceil(wait_s)
            raise RateLimitError(
                f"The quota of {self._limits[kind]} {kind} per minute is used up (server.{kind}_per_minute). Try again "
                f"in {seconds} s.",
                kind=kind,
                retry_after_s=seconds,
            )


def refund(quotas: Quotas) -> Middleware:
    """Give back what is refused for want of room, whenever that turns out: its client is told to ask again."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except (QueueFullError, EngineDeadError):
            if COUNTED in request:
                quotas.give_back(request[COUNTED])
            raise

    return middleware
