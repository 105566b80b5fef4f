"""How an API writes its errors and its streams."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NotRequired

from aiohttp import web
from typing_extensions import TypedDict

SHUTTING_DOWN = "The server is shutting down; send the request again."


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
    CONTENT_TYPE: ClassVar[str] = "text/event-stream"
    """The media type of a stream."""
    AROUND: ClassVar[tuple[bytes, bytes]] = (b"data: ", b"\n\n")
    """What stands before and behind the JSON of a stream's frame."""
    IDLE: ClassVar[bytes] = b": the answer is being computed\n\n"
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

    def numbered(self, frame: Mapping[str, Any], number: int) -> Mapping[str, Any]:
        """A frame as it is sent after ``number`` others."""
        return frame


class NamedEvents(WireFormat):
    """A stream whose events are named after the ``type`` of their frames, and that nothing else ends."""

    DONE = b""

    def failure(self, error: ErrorBody) -> dict[str, Any]:
        rest = {name: value for name, value in error.items() if name != "type"}
        return {"type": "error"} | rest

    def head(self, frame: Mapping[str, Any]) -> bytes:
        return f"event: {frame['type']}\n".encode()


class NumberedEvents(NamedEvents):
    """As OpenAI's responses have it."""

    def numbered(self, frame: Mapping[str, Any], number: int) -> Mapping[str, Any]:
        return {"type": frame["type"], "sequence_number": number, **frame}


ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's types of errors, by status. Others below 500 are ``invalid_request_error``, and 500 is ``api_error``."""


def _sentence(error: ErrorBody) -> str:
    """The message, with the field that it is about, for clients that are told nothing else."""
    message, param = error["message"], error["param"]
    if param is not None and param not in message:
        message = f"{param}: {message}"
    return message


class MessageErrorDetails(TypedDict):
    error_code: str


class MessageErrorBody(TypedDict):
    type: str
    message: str
    details: NotRequired[MessageErrorDetails]


class MessageError(TypedDict):
    type: Literal["error"]
    error: MessageErrorBody


class Anthropic(NamedEvents):
    """As Anthropic's messages have it."""

    ERROR: ClassVar[Any] = MessageError
    ID_HEADERS: ClassVar[tuple[str, ...]] = ("X-Request-Id", "Request-Id")
    IDLE = b'event: ping\ndata: {"type": "ping"}\n\n'

    def error(self, error: ErrorBody, status: int) -> dict[str, Any]:
        kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        details = {} if error["code"] is None else {"details": {"error_code": error["code"]}}
        return {"type": "error", "error": {"type": kind, "message": _sentence(error), **details}}

    def failure(self, error: ErrorBody) -> dict[str, Any]:
        if error["message"] == SHUTTING_DOWN:
            return self.error(error, 503)  # clients send the request again
        if error["type"] == "timeout_error":
            return self.error(error, 504)
        return self.error(error, 400 if error["type"] == "invalid_request_error" else 500)


OLLAMA_VERSION = "0.20.0"
"""The version of Ollama whose API we speak. Clients refuse to talk to much older ones."""
LATEST = ":latest"
"""The tag that Ollama's clients append to a name without one, on whatever route."""
OLLAMA_ROOT = "Ollama is running"
"""What its root page says, which clients ask first."""


class OllamaError(TypedDict):
    error: str


class Ollama(WireFormat):
    """As Ollama has it: an error is a sentence, and a stream has a line of JSON for each frame."""

    ERROR: ClassVar[Any] = OllamaError
    CONTENT_TYPE = "application/x-ndjson"
    AROUND = (b"", b"\n")
    IDLE = b" "  # clients parse every line, and JSON may begin with a space
    DONE = b""

    def error(self, error: ErrorBody, status: int) -> dict[str, Any]:
        return {"error": _sentence(error)}


OPENAI = WireFormat()
WIRE_FORMATS: web.AppKey[Callable[[web.Request], WireFormat]] = web.AppKey("wire_formats")
"""How each request's errors and streams are written; without it, as ``OPENAI`` does."""
WIRE_FORMAT = web.RequestKey("wire_format", WireFormat)
"""What that is for a request, found out once."""


def wire_format(request: web.Request) -> WireFormat:
    """How the errors and streams of this request are written."""
    if WIRE_FORMAT not in request:
        written = request.app.get(WIRE_FORMATS)
        request[WIRE_FORMAT] = OPENAI if written is None else written(request)
    return request[WIRE_FORMAT]
