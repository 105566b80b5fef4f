"""What commands ask a running server, before programs that are none."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from infer.contracts.sections import ServerSettings
from infer.errors import InferError
from infer_server.http import fetching
from infer_server.http.fetching import NoServerError, address, served_models

KEY = "sesame"


@contextmanager
def answering(answer: str, protocol: str = "HTTP/1.0 ") -> Iterator[tuple[str, list[str]]]:
    """The address of a server that answers every GET so, from the status on, and the paths and keys that it gets."""
    got: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            got.append(f"{self.path} {self.headers['Authorization']}")
            self.wfile.write(f"{protocol}{answer}\r\n\r\n".encode())

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{made.server_port}", got
        finally:
            made.shutdown()
            thread.join()


def asked(url: str) -> list[Any]:
    return [*served_models(url, ServerSettings.model_validate({"api_keys": [KEY]}), "--there")]


def test_what_a_server_says_is_kept() -> None:
    with answering('200 OK\r\n\r\n{"data": [{"id": "m", "state": "loaded", "open": 3}]}') as (url, got):
        assert asked(url) == [{"id": "m", "state": "loaded", "open": 3}]
    assert got == [f"/v1/models Bearer {KEY}"]


@pytest.mark.parametrize(
    "body",
    [
        *("", "<html></html>", "[]", "[1]", "null", "{}", "[" * 5000),
        *('{"data": 1}', '{"data": ["m"]}', '{"data": [{}]}', '{"data": [{"id": 1}]}'),
        '{"data": [{"id": "m", "size_bytes": "large"}]}',
    ],
)
def test_another_program(body: str) -> None:
    with answering(f"200 OK\r\n\r\n{body}") as (url, _), pytest.raises(InferError) as error:
        asked(url)
    assert not isinstance(error.value, NoServerError)
    assert str(error.value) == (
        f"What answers at {url} is no server of infer: its /v1/models lists no models; start infer serve, or set "
        "--there."
    )


def test_one_that_does_not_answer_is_not_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is told that there is no server may remove a model that one has loaded."""
    monkeypatch.setattr(fetching, "TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(InferError) as error:
            asked(url)
    assert not isinstance(error.value, NoServerError)
    assert str(error.value) == (
        f"The server at {url} does not answer within 0.1 seconds: try again, or start infer serve, or set --there."
    )


def test_another_protocol() -> None:
    with (
        answering("SSH-2.0", protocol="") as (url, _),
        pytest.raises(InferError, match=f"What answers at {url} is no server of infer: .*; start infer serve, or set"),
    ):
        asked(url)


def test_another_status() -> None:
    with answering("404 Not Found") as (url, _), pytest.raises(InferError) as error:
        asked(url)
    assert str(error.value) == f"The server at {url} answers 404 to /v1/models; start infer serve, or set --there."


def test_a_redirect_is_not_followed() -> None:
    with answering("404 Not Found") as (other, got), answering(f"302 Found\r\nLocation: {other}/v1/models") as (url, _):
        message = (
            f"{url} redirects /v1/models to {other}/v1/models, .*; set --there to the address of the server itself"
        )
        with pytest.raises(InferError, match=re.escape(url) + message.removeprefix(url)):
            asked(url)
    assert got == []


def test_nobody_answers() -> None:
    with answering("") as (url, _):
        pass
    with pytest.raises(NoServerError, match=f"No server answers at {url} .*: start infer serve, or set --there"):
        asked(url)


@pytest.mark.parametrize(
    "url", ["", "localhost:8000", "ftp://localhost", "http://", "http://a b", "http://h:80x", "http://[::1"]
)
def test_an_invalid_address(url: str) -> None:
    with pytest.raises(ValueError, match="is no address of a server"):
        asked(url)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("models.example.org", "http://models.example.org:8000"),
    ],
)
def test_the_own_machine_reaches_a_server_by_an_address(host: str, url: str) -> None:
    assert address(ServerSettings(host=host)) == url
