"""An ingress as a process of its own."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import pytest
from tests.serving import HANG_S, holding, serving

from infer_router.process import FAULT, Process, _engine, ending, main
from infer_server.http.sockets import bind
from infer_server.http.wire import SHUTTING_DOWN

SETTINGS = {"server": {"port": 0, "access_log": False}}
ROUTER = {"balance": 1.25, "slack": 4, "most_blocks": 1024}


@contextmanager
def ingress(*, drain_timeout_s: float = HANG_S, **replicas: Any) -> Iterator[tuple[Process, str]]:
    settings = {"server": SETTINGS["server"] | {"drain_timeout_s": drain_timeout_s}}
    process = Process("ingress", {"settings": settings, "router": ROUTER, "key": None})
    try:
        process.send({"replicas": replicas})
        yield process, process.ready()
    finally:
        process.end(0)


@pytest.mark.slow
async def test_an_ingress_that_ends_finishes_its_streams_and_leaves_the_port_to_another() -> None:
    with serving() as engine, ingress(r={"url": engine.url}) as (process, url):
        port = int(url.rpartition(":")[2])
        body = {"prompt": "def ", "max_tokens": 60, "ignore_eos": True, "stream": True}
        async with aiohttp.ClientSession() as session, asyncio.timeout(HANG_S):
            async with session.get(url + "/ready") as ready:
                assert ready.status == 200, "it knows engines before it serves"
            with holding(20):
                response = await session.post(url + "/v1/completions", json=body)
                await response.content.readany()
                _signal(process)
                while await _takes(url):
                    pass
                for other in bind("127.0.0.1", port):
                    other.listen()
                    other.close()
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
        assert process._process.wait(HANG_S) == 0


@pytest.mark.slow
async def test_a_stream_that_an_ingress_cuts_when_it_ends_says_so() -> None:
    with serving() as engine, ingress(drain_timeout_s=0, r={"url": engine.url}) as (process, url):
        body = {"prompt": "def ", "max_tokens": 60, "ignore_eos": True, "stream": True}
        async with aiohttp.ClientSession() as session, asyncio.timeout(HANG_S):
            with holding(20):
                response = await session.post(url + "/v1/completions", json=body)
                await response.content.readany()
                _signal(process)
                *_, error, done, _ = (await response.read()).split(b"\n\n")
        assert (json.loads(error.removeprefix(b"data: "))["error"]["message"], done) == (SHUTTING_DOWN, b"data: [DONE]")
        assert process._process.wait(HANG_S) == 0


@pytest.mark.slow
def test_an_ingress_ends_with_whoever_started_it() -> None:
    with ingress(r={"url": "http://127.0.0.1:1"}) as (process, _):
        assert process._process.stdin is not None
        process._process.stdin.close()
        assert process._process.wait(HANG_S) == 1


def _signal(process: Process) -> None:
    process._process.send_signal(signal.SIGTERM)


async def _takes(url: str) -> bool:
    """Whether a new connection is taken; if so, its request has been answered, or the connection is gone."""
    try:
        async with aiohttp.request("GET", url + "/health"):
            return True
    except aiohttp.ClientConnectorError:
        return False
    except aiohttp.ClientError:
        return True


def test_how_a_process_has_ended() -> None:
    assert ending(0) == "ended with code 0"
    assert ending(-signal.SIGTERM) == "was ended by signal 15"
    assert ending(-signal.SIGKILL) == "was ended by signal 9, as when memory runs out"
    assert ending(-signal.SIGALRM) == "was ended by signal 14, since it was not ready in time"


@pytest.mark.slow
def test_an_engine_that_cannot_serve_says_why() -> None:
    process = Process("engine", {"settings": {"model": {"path": "nosuch"}, "server": {"port": 0}}})
    with pytest.raises(RuntimeError, match=f"{FAULT}'nosuch' is neither a folder or file nor a bundled name"):
        process.ready()
    process.end(0)


def test_a_process_that_has_closed_everything_takes_nothing_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    class LeftError(BaseException):
        pass

    def leave(code: int) -> None:
        steps.append(code)
        raise LeftError

    steps: list[object] = []
    monkeypatch.setattr("sys.argv", ["process", "sizes"])
    monkeypatch.setattr("sys.stdin", io.StringIO('{"settings": {}}\n'))
    monkeypatch.setattr("infer_router.process._sizes", lambda first, source: steps.append("served"))
    monkeypatch.setattr("atexit._run_exitfuncs", lambda: steps.append("log written"))
    monkeypatch.setattr("os._exit", leave)
    with pytest.raises(LeftError):
        main()
    assert steps == ["served", "log written", 0]


def test_an_engine_waits_for_its_room_and_ends_if_there_is_none_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Callable[[str], object]] = []
    ended: list[int] = []
    ran: list[bool] = []

    def run(settings: object, plugins: object, *, await_memory: Callable[[], object] | None, described: bool) -> None:
        ran.append(described)
        if not described:
            assert await_memory is not None
            await_memory()
            assert ended == [0]
            heard[-1]("room\n")
            await_memory()
            assert ended == [0]
        else:
            assert await_memory is None

    monkeypatch.setattr("infer_router.process._listen", lambda source, hear: heard.append(hear))
    monkeypatch.setattr("infer_router.process.HOLDS_S", 0.0)
    monkeypatch.setattr("infer_server.app.run", run)
    monkeypatch.setattr(os, "_exit", ended.append)
    _engine({"settings": SETTINGS, "room": False}, io.StringIO())
    _engine({"settings": SETTINGS, "room": True, "again": True}, io.StringIO())
    assert ran == [False, True]
