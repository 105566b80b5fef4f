"""Every error a client can meet, in OpenAI's shape."""

from __future__ import annotations

import logging
import secrets
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from infer.errors import EngineDeadError, QueueFullError, RequestError

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1
REQUEST_ID = web.RequestKey("request_id", str)


class NotFoundError(RequestError):
    """What the request names is not here."""


def error_body(message: str, type: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give the request its id and turn whatever goes wrong into JSON with the right status."""
    request[REQUEST_ID] = secrets.token_hex(12)
    try:
        response = await handler(request)
    except (ConnectionResetError, TimeoutError):
        raise  # nobody is there to read an answer
    except Exception as error:
        response = _response(request, error)
    if not response.prepared:
        response.headers["X-Request-Id"] = request[REQUEST_ID]
    return response


def _response(http: web.Request, error: Exception) -> web.Response:
    headers: dict[str, str] = {}
    match error:
        case NotFoundError():
            status, kind = 404, "invalid_request_error"
        case RequestError():
            status, kind = 400, "invalid_request_error"
        case QueueFullError() | EngineDeadError():
            status, kind = 503, "server_error"
            headers["Retry-After"] = str(RETRY_AFTER_S)
        case web.HTTPNotFound():
            message = f"There is no {http.path} here."
            return web.json_response(error_body(message, "invalid_request_error"), status=404)
        case web.HTTPMethodNotAllowed():
            message = f"{http.method} is not allowed on {http.path}; use {' or '.join(sorted(error.allowed_methods))}."
            return web.json_response(
                error_body(message, "invalid_request_error"),
                status=405,
                headers={"Allow": error.headers["Allow"]},
            )
        case web.HTTPRequestEntityTooLarge():
            message = "The request's body is larger than server.max_body_bytes allows."
            return web.json_response(error_body(message, "invalid_request_error"), status=413)
        case web.HTTPException() if error.status < 500:
            message = error.text or error.reason
            return web.json_response(error_body(message, "invalid_request_error"), status=error.status)
        case _:
            log.error("request %s failed", http[REQUEST_ID], exc_info=error)
            status, kind = 500, "server_error"
    param, code = (error.param, error.code) if isinstance(error, RequestError) else (None, None)
    return web.json_response(error_body(str(error), kind, param=param, code=code), status=status, headers=headers)
