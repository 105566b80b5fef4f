"""How an API writes its errors and its streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from aiohttp import web
from typing_extensions import TypedDict


class ErrorBody(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(TypedDict):
    error: ErrorBody


class WireFormat:
    """OpenAI's way, as completions and chats have it. Extend it for an API that writes otherwise, and give it to the
    API's ``Route``."""

    ERROR: ClassVar[Any] = Error
    """The shape of ``error``."""
    IDLE: ClassVar[bytes] = b": the prompt is being computed\n\n"
    """What a stream sends every few seconds while there is nothing else to send."""
    DONE: ClassVar[bytes] = b"data: [DONE]\n\n"
    """What ends a stream that did not fail."""
    ID_HEADERS: ClassVar[tuple[str, ...]] = ("X-Request-Id",)
    """The headers that tell clients the request's id."""

    def error(self, error: ErrorBody, status: int) -> dict[str, Any]:
        """The JSON of an answer with this status."""
        return {"error": error}

    def failure(self, error: ErrorBody) -> dict[str, Any]:
        """The last frame of a stream that fails."""
        return self.error(error, 500)

    def head(self, frame: Mapping[str, Any]) -> bytes:
        """The lines of an event before its data."""
        return b""


class NamedEvents(WireFormat):
    """A stream whose events are named after the ``type`` of their frames, and that nothing else ends."""

    DONE = b""

    def failure(self, error: ErrorBody) -> dict[str, Any]:
        return {**error, "type": "error", "sequence_number": 0}

    def head(self, frame: Mapping[str, Any]) -> bytes:
        return f"event: {frame['type']}\n".encode()


WIRE_FORMATS = web.AppKey("wire_formats", dict[web.AbstractRoute, WireFormat])
"""Of the routes that have one of their own."""
OPENAI = WireFormat()


def wire_format(request: web.Request) -> WireFormat:
    """How the request's route writes errors and streams."""
    return request.config_dict.get(WIRE_FORMATS, {}).get(request.match_info.route, OPENAI)
