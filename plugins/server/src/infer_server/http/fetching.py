"""What commands ask a running server: which models it has. No proxy and no other host gets the key."""

from __future__ import annotations

from contextlib import closing
from http.client import HTTPConnection, HTTPException, HTTPSConnection, InvalidURL
from typing import NotRequired
from urllib.parse import urlsplit

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from infer.contracts.sections import ServerSettings
from infer.errors import InferError, in_short

TIMEOUT_S = 10.0
MAX_LOCATION = 300
"""The most characters of a redirect's target that a message repeats."""


class NoServerError(InferError):
    """No server answers."""


@with_config(ConfigDict(extra="allow"))
class ServedModel(TypedDict):
    """What /v1/models says of a model."""

    id: str
    max_model_len: NotRequired[int | None]
    """How many tokens a prompt and its answer may have together."""
    state: NotRequired[str]
    """Servers of several models say it, and what follows."""
    size_bytes: NotRequired[int | None]
    expires_in_s: NotRequired[float | None]
    pinned: NotRequired[bool]
    problem: NotRequired[str | None]


class _Answer(TypedDict):
    data: list[ServedModel]


def address(server: ServerSettings) -> str:
    """The URL of the server at ``server.host`` and ``server.port``, as its own machine reaches it."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(server.host, server.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{server.port}"


def served_models(url: str, server: ServerSettings, setting: str) -> list[ServedModel]:
    """The models that the server at ``url`` lists. It gets the first of ``server.api_keys``; no proxy is asked, and no
    redirect followed. ``setting`` is what says where the server is, for messages. Raises NoServerError if nothing
    answers, InferError if what answers lists no models, and ValueError if ``url`` is invalid."""
    headers = {}
    way_out = f"start infer serve, or set {setting}"
    no_server = f"What answers at {url} is no server of infer: its /v1/models lists no models; {way_out}."
    try:
        if server.api_keys:
            headers["Authorization"] = f"Bearer {server.api_keys[0].get_secret_value()}".encode()
        parts = urlsplit(f"{url}/v1/models")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidURL
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        with closing(kind(parts.hostname, parts.port, timeout=TIMEOUT_S)) as connection:
            connection.request("GET", parts.path, headers=headers)
            response = connection.getresponse()
            body = response.read()
    except TimeoutError:
        raise InferError(
            f"The server at {url} does not answer within {TIMEOUT_S:g} seconds: try again, or {way_out}."
        ) from None
    except OSError as error:
        raise NoServerError(f"No server answers at {url} ({error}): {way_out}.") from None
    except (ValueError, InvalidURL):
        raise ValueError(f"{url!r} is no address of a server.") from None
    except HTTPException:
        raise InferError(no_server) from None
    if response.status != 200:
        if location := response.headers["Location"]:
            raise InferError(
                f"The server at {url} redirects /v1/models to {in_short(location, MAX_LOCATION)}, and redirects are "
                f"not followed, so that no other host gets the key; set {setting} to the address of the server itself."
            )
        hint = "set server.api_keys to one of its keys" if response.status == 401 else way_out
        raise InferError(f"The server at {url} answers {response.status} to /v1/models; {hint}.")
    try:
        return TypeAdapter(_Answer).validate_json(body)["data"]
    except ValidationError:
        raise InferError(no_server) from None
