"""The events of requests, as the service and its endpoints share them: what is made of them, and counted."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Protocol

from infer.contracts.request import Event, Request
from infer.errors import EngineDeadError, InferError, RequestError, RequestTimeoutError
from infer_server.http.wire import SHUTTING_DOWN

LONG_CHARS = 1 << 17
"""If their texts are longer than this, they are tokenized one after the other: a text of megabytes without a break may
take half a minute and gigabytes, and all requests share few threads."""
Json = dict[str, Any]
Events = AsyncGenerator[tuple[int, Event]]
"""Events, each with the index of its request."""
Frames = Callable[[Events, Callable[[], Json]], AsyncGenerator[Json]]
"""Makes what is sent from the events and a function that returns the usage so far."""


class RequestFields(Protocol):
    """The fields of a body that every request to the engine takes over."""

    @property
    def cache_salt(self) -> str | None: ...
    @property
    def priority(self) -> int: ...


class TokenCount:
    """Counts the tokens of several requests as their events arrive."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._index = {request.id: i for i, request in enumerate(requests)}
        # A prompt counts once, however many answers it has.
        first = {request.group or request.id: request for request in reversed(requests)}
        self._prompt = sum(len(request.prompt_token_ids) for request in first.values())
        self._cached = {request.id: 0 for request in first.values()}
        self._generated = 0

    def add(self, event: Event) -> int:
        """Count an event's tokens, and return the index of its request. Raises what a request has failed with."""
        raise_if_failed(event)
        self._generated += len(event.token_ids)
        if event.request_id in self._cached:
            self._cached[event.request_id] = event.num_cached
        return self._index[event.request_id]

    def usage(self) -> Json:
        """The usage so far, as answers report it."""
        return {
            "prompt_tokens": self._prompt,
            "completion_tokens": self._generated,
            "total_tokens": self._prompt + self._generated,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }


def raise_if_failed(event: Event) -> None:
    """Raises the error of a request that has failed or was aborted."""
    if event.finish_reason == "error":
        raise InferError(event.error) if event.param is None else RequestError(str(event.error), param=event.param)
    if event.finish_reason == "timeout":
        raise RequestTimeoutError(event.error)
    if event.finish_reason == "abort":
        raise EngineDeadError(SHUTTING_DOWN)
