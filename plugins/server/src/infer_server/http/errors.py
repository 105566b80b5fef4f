"""Every error that a client can get, in OpenAI's format."""

from __future__ import annotations

import asyncio
import http
import json
import logging
import re
import secrets
from typing import Any

from aiohttp import HttpVersion11, web
from aiohttp.typedefs import Handler
from aiohttp.web_request import BaseRequest

from infer.errors import EngineDeadError, InferError, PluginError, QueueFullError, RequestError, RequestTimeoutError
from infer_server.http.body import Body
from infer_server.http.quotas import RateLimitError
from infer_server.http.wire import OPENAI, ErrorBody, wire_format

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1
MAX_MESSAGE, MAX_PARAM = 1000, 100
"""The most characters of an error's message and param."""
READ_BYTES = 1 << 14
"""How many bytes are read from a connection at a time. If a body comes in HTTP chunks of one byte, parsing as many as
asyncio reads by default takes 100 ms."""
LINGER_S = 1.0
"""How long, in seconds, input is still read and discarded after the answer to something that is not HTTP."""
FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: %d\r\n"
    b"Content-Type: application/json; charset=utf-8\r\nContent-Length: " % RETRY_AFTER_S
)
REQUEST_ID = web.RequestKey("request_id", str)
WHOSE = web.RequestKey("whose", str)
"""The plugin whose endpoint this is, as an error message names it; none for the server's own."""
BODY = web.RequestKey("body", Body)
"""The body, once it is parsed: it knows its own names for the parameters that an error is about."""


class NotFoundError(RequestError):
    """The request names something that does not exist here."""


class UnreadableError(RequestError):
    """The body is not what the headers say, so that the next request cannot be found on this connection."""


class ForbiddenError(RequestError):
    """The client may not use this server."""


class MediaTypeError(RequestError):
    """The headers do not declare the body as JSON."""


class UnauthorizedError(RequestError):
    """The request has no valid API key."""


def error_body(message: str, type: str, *, param: str | None = None, code: str | None = None) -> ErrorBody:
    """What an error says, whatever the wire format. Message and param are cut, since they may quote what a client
    sent, which may be long."""
    if len(message) > MAX_MESSAGE:
        message = message[:MAX_MESSAGE] + "..."
    return {"message": message, "type": type, "param": param and param[:MAX_PARAM], "code": code}


def error_of(request: web.Request, error: Exception, kind: str | None = None) -> ErrorBody:
    """What an error says, with the client's own names of its parameters. ``kind`` is OpenAI's error type; None derives
    it from the error. The text of an error that nobody raised on purpose is for the log alone."""
    message, param, code = str(error), None, None
    if not isinstance(error, InferError):
        message = (
            f"{request.get(WHOSE, 'The server')} failed at {request.method} {request.path}; the server's log says why, "
            f"at request {request[REQUEST_ID]}."
        )
    if isinstance(error, RequestError):
        param, code = error.param, error.code
        if param is not None and (body := request.get(BODY)) is not None:
            name = body.client_name(param)
            if "_" in param:  # a name without an underscore may also be an ordinary word of the sentence
                message = re.sub(rf"\b{re.escape(param)}\b", name, message)
            param = name
    if isinstance(error, RateLimitError):
        kind, code = error.kind, error.code
    if isinstance(error, RequestTimeoutError):
        kind, code = "timeout_error", error.code
    if kind is None:
        kind = "invalid_request_error" if isinstance(error, RequestError) else "server_error"
    return error_body(message, kind, param=param, code=code)


def id_headers(request: web.Request) -> dict[str, str]:
    """The headers of every answer: they tell the request's id."""
    return dict.fromkeys(wire_format(request).ID_HEADERS, request[REQUEST_ID])


async def expected(request: web.Request) -> None:
    """Answer an Expect header: have a client go on that waits for it before it sends its body. Any other expectation
    has no meaning in HTTP and is ignored; aiohttp would answer it before any middleware, in a format of its own."""
    if request.version == HttpVersion11 and request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # by which ``handle_error`` knows whether the answer has begun


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every error with JSON and the right status, and add the request's id to every answer."""
    try:
        response = await handler(request)
        if not isinstance(response, web.StreamResponse):
            raise PluginError(
                f"{request.get(WHOSE, 'The server')} failed at {request.method} {request.path}: its handler returned "
                f"{'nothing' if response is None else f'a {type(response).__name__}'}, not a response."
            )
    except (ConnectionResetError, TimeoutError):
        raise  # the client has left, so nobody would read an answer
    except Exception as error:
        response = _response(request, error)
    if not response.prepared:
        response.headers.update(id_headers(request))
    return response


def _response(request: web.Request, error: Exception) -> web.Response:
    headers: dict[str, str] = {}
    kind, message = "invalid_request_error", None
    match error:
        case NotFoundError() | RequestError(code="model_not_found"):
            status = 404
        case ForbiddenError():
            status, kind = 403, "permission_error"
        case MediaTypeError():
            status = 415
        case UnauthorizedError():
            status, kind = 401, "authentication_error"
            headers["WWW-Authenticate"] = "Bearer"
        case RequestError():
            status = 400
        case RateLimitError():
            status = 429
            headers["Retry-After"] = str(error.retry_after_s)
        case RequestTimeoutError():
            status = 504
        case QueueFullError() | EngineDeadError():
            status, kind = 503, "server_error"
            headers["Retry-After"] = str(getattr(error, "retry_after_s", RETRY_AFTER_S))
        case web.HTTPNotFound():
            status, message = 404, f"There is no {request.path} here; GET /docs lists what there is."
        case web.HTTPMethodNotAllowed():
            allowed = " or ".join(sorted(error.allowed_methods))
            status, message = 405, f"{request.method} is not allowed on {request.path}; use {allowed}."
            headers["Allow"] = error.headers["Allow"]
        case web.HTTPRequestEntityTooLarge():
            status, message = 413, "The request's body is larger than server.max_body_bytes allows."
        case web.HTTPException() if error.status < 500:
            status, message = error.status, error.text or error.reason
        case _:
            log.error("request %s failed", request[REQUEST_ID], exc_info=error)
            status, kind = 500, "server_error"
    body = error_of(request, error, kind) if message is None else error_body(message, kind)
    response = web.json_response(wire_format(request).error(body, status), status=status, headers=headers)
    if isinstance(error, UnreadableError):
        response.force_close()
    return response


class Protocol(web.RequestHandler):
    """aiohttp's protocol, which here answers invalid HTTP with an error in the same format as all others, and so it
    answers a connection beyond the first ``most``."""

    __slots__ = ("_most", "_refused", "_server")

    def __init__(self, manager: web.Server, *, most: int, refused: set[asyncio.Transport], **how: Any) -> None:
        super().__init__(manager, **how)
        self._server, self._most, self._refused = manager, most, refused

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]
        assert isinstance(transport, asyncio.Transport)
        if len(self._server.connections) < self._most:
            super().connection_made(transport)
            return
        self.force_close()  # what the client sends is not parsed
        full = error_body(f"All {self._most} connections are taken. Try again.", "server_error")
        body = json.dumps(OPENAI.error(full, 503))
        transport.write(FULL + f"{len(body)}\r\n\r\n{body}".encode())
        if len(self._refused) < self._most // 2:  # as with ``_Last``, but not for more than there are files
            self._refused.add(transport)
            transport.write_eof()
            asyncio.get_running_loop().call_later(LINGER_S, self._dismiss, transport)
        else:
            transport.close()

    def _dismiss(self, transport: asyncio.Transport) -> None:
        self._refused.discard(transport)
        transport.close()

    def handle_error(
        self,
        request: BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if isinstance(exc, ConnectionError):
            log.debug("a client has left")
        elif status >= 500:
            log.error("a request failed", exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun; it cannot become another")
        kind = "invalid_request_error" if status < 500 else "server_error"
        text = " ".join((message or http.HTTPStatus(status).phrase).split())[:500]
        body = json.dumps(OPENAI.error(error_body(text, kind), status))
        response = _Last(text=body, status=status, content_type="application/json")
        response.headers["X-Request-Id"] = secrets.token_hex(12)
        response.force_close()
        return response


class _Last(web.Response):
    """An answer to a request that is not read to its end. Closing a connection while the client still sends would reset
    it, and the client might lose the answer; so the connection stays open for ``LINGER_S`` after the answer."""

    async def write_eof(self, data: bytes = b"") -> None:
        transport = None if self._req is None else self._req.transport
        await super().write_eof(data)
        if transport is not None and transport.can_write_eof() and not transport.is_closing():
            transport.write_eof()
            await asyncio.sleep(LINGER_S)
