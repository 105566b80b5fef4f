"""What clients and replicas may do to an ingress, and to each other through it. The replicas here are made up."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict
from pydantic import SecretStr
from pydantic_core import from_json
from tests.router.test_ingress import frames
from tests.serving import HANG_S

from infer.contracts.sections import ServerSettings
from infer_router import ingress as ingress_module
from infer_router.exchange import MOST_LOST, MOST_REFUSED
from infer_router.fleet import Fleet
from infer_router.held import ENTRY, from_baggage, to_baggage
from infer_router.ingress import MOST_SILENT, STATE, Ingress
from infer_router.ingress import serving as serving_ingress
from infer_server.http.keys import OWNER, Keys
from infer_server.http.sockets import bind, listen
from infer_server.http.wire import SHUTTING_DOWN

KEY = "the key of the replicas"
SHOWN = {"Authorization": "Bearer k"}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Replica:
    """Says that it takes requests, notes their headers and bodies, and has ``handler`` answer."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.asked: list[tuple[str, Any, bytes]] = []
        self.state = {"version": "a.0", "taking": True, "stuck": False, "open": 0}

    async def answer(self, http: web.Request) -> web.StreamResponse:
        if http.path == STATE:
            return web.json_response(self.state)
        self.asked.append((http.raw_path, http.headers, await http.read()))
        return await self.handler(http)


class Front:
    def __init__(self, url: str, ingress: Ingress, session: aiohttp.ClientSession, replicas: list[Replica]) -> None:
        self.url, self.ingress, self.session, self.replicas = url, ingress, session, replicas

    @property
    def asked(self) -> list[tuple[str, Any, bytes]]:
        return [each for replica in self.replicas for each in replica.asked]

    def post(self, data: object, path: str = "/v1/completions", **headers: str) -> Any:
        return self.session.post(self.url + path, json=data, headers=headers)


@asynccontextmanager
async def front(handler: Handler, number: int = 1, **server: Any) -> AsyncIterator[Front]:
    async with AsyncExitStack() as stack:
        replicas, table = [Replica(handler) for _ in range(number)], {}
        for i, replica in enumerate(replicas):
            app = web.Application(client_max_size=1 << 30)
            app.router.add_route("*", "/{path:.*}", replica.answer)
            table[f"r{i}"] = {"url": await stack.enter_async_context(listen(app, bind("127.0.0.1", 0)))}
        ingress = Ingress(Fleet(key=KEY), ServerSettings(**{"access_log": False} | server), poll_s=0.01)
        ingress.fleet.update(table)
        url = await stack.enter_async_context(serving_ingress(ingress, bind("127.0.0.1", 0)))
        yield Front(url, ingress, await stack.enter_async_context(aiohttp.ClientSession()), replicas)


async def well(http: web.Request) -> web.StreamResponse:
    return web.json_response({})


async def streaming(http: web.Request, *events: bytes) -> web.StreamResponse:
    kind = "application/x-ndjson" if http.path.startswith("/api/") else "text/event-stream"
    response = web.StreamResponse(headers={"Content-Type": kind, "X-Request-Id": "a" * 24})
    await response.prepare(http)
    for event in events:
        await response.write(event)
    return response


def event(text: str) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None}
    return b"data: " + json.dumps({"id": "cmpl-" + "a" * 24, "created": 1, "choices": [choice]}).encode() + b"\n\n"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_ends_its_replicas_is_not_sent_to_all_of_them(stream: bool) -> None:
    async def fatal(http: web.Request) -> web.StreamResponse:
        if stream:
            await streaming(http, event("some text"))
        assert http.transport is not None
        http.transport.abort()
        return web.Response()

    async with front(fatal, MOST_LOST + 3) as f:
        async with f.post({"prompt": "x", "stream": stream, "seed": 1}) as response:
            answer = await response.text()
        assert len(f.asked) == MOST_LOST
        assert f"{MOST_LOST} replicas were lost" in answer
        assert response.status == (200 if stream else 503)


async def test_a_request_is_not_sent_to_all_that_are_full() -> None:
    async def full(http: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "full"}}, status=503, headers={"Retry-After": "1"})

    async with front(full, MOST_REFUSED + 3) as f:
        async with f.post({"prompt": "x"}) as response:
            assert (response.status, await response.json()) == (503, {"error": {"message": "full"}})
            assert response.headers["Retry-After"] == "1"
        assert len(f.asked) == MOST_REFUSED


async def test_streams_of_a_replica_that_has_left_in_silence_go_on_elsewhere() -> None:
    """A machine that is gone closes no connection."""
    async with hanging() as (f, gone):
        f.ingress.fleet.update({name: {"url": url} for name, url in f.ingress.fleet.urls.items() if name != gone})


async def test_streams_of_a_replica_that_is_stuck_go_on_elsewhere() -> None:
    async with hanging() as (f, gone):
        f.replicas[[*f.ingress.fleet.urls].index(gone)].state |= {"taking": False, "stuck": True}


async def test_streams_of_a_replica_that_answers_no_poll_go_on_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    async with hanging() as (f, gone):
        unanswered(monkeypatch, lambda url: url.startswith(f.ingress.fleet.urls[gone]))


async def test_a_replica_that_answers_some_polls_keeps_its_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    polls, enough = itertools.count(1), asyncio.Event()

    def silent(url: str) -> bool:
        poll = next(polls)
        if poll > 3 * MOST_SILENT:
            enough.set()
        return poll % MOST_SILENT > 0

    async def slow(http: web.Request) -> web.StreamResponse:
        response = await streaming(http, event("one, "))
        await enough.wait()
        await response.write(event("two"))
        return response

    async with front(slow) as f, asyncio.timeout(HANG_S):
        async with f.post({"prompt": "x", "stream": True, "seed": 1}) as response:
            unanswered(monkeypatch, silent)
            assert said(await response.text()) == "one, two"
        assert len(f.asked) == 1


def unanswered(monkeypatch: pytest.MonkeyPatch, silent: Callable[[str], bool]) -> None:
    """From now on, polls of these URLs have no answer in time."""
    get = aiohttp.ClientSession.get

    def asked(session: aiohttp.ClientSession, url: str, **how: Any) -> Any:
        if url.endswith(STATE) and silent(url):
            raise TimeoutError
        return get(session, url, **how)

    monkeypatch.setattr(aiohttp.ClientSession, "get", asked)


def said(stream: str) -> str:
    return "".join(each["choices"][0]["text"] for each in frames(stream))


@asynccontextmanager
async def hanging() -> AsyncIterator[tuple[Front, str]]:
    """Two replicas, and the name of the one whose stream does not go on. What the block does to it has the other one
    go on with the stream."""
    begun = itertools.count()

    async def half(http: web.Request) -> web.StreamResponse:
        if next(begun) == 0:
            await streaming(http, event("one, "))
            await asyncio.Event().wait()
        return await streaming(http, event("one, "), event("two"), b"data: [DONE]\n\n")

    async with front(half, 2) as f, asyncio.timeout(HANG_S):
        async with f.post({"prompt": "x", "stream": True, "seed": 1}) as response:
            first = await response.content.readuntil(b"\n\n")
            (name,) = [name for name in f.ingress.fleet.urls if f.ingress.fleet.router.open(name)]
            yield f, name
            assert said((first + await response.read()).decode()) == "one, two"
        assert [len(replica.asked) for replica in f.replicas] == [1, 1]


@pytest.mark.parametrize(
    "target",
    [
        "GET http://127.0.0.1:{port}/v1/models",
        "GET http://@127.0.0.1:{port}/v1/models",
        "CONNECT 127.0.0.1:{port}",
        "CONNECT 1@127.0.0.1:{port}",
        "OPTIONS *",
        "GET //127.0.0.1:{port}/v1/models",
    ],
)
async def test_no_target_of_a_request_leads_elsewhere(target: str) -> None:
    met: list[bytes] = []

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        met.append(await reader.read(1000))
        writer.close()

    elsewhere = await asyncio.start_server(meet, "127.0.0.1", 0)
    port = elsewhere.sockets[0].getsockname()[1]
    async with front(well) as f:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(f.url.rpartition(":")[2]))
        asked = f"{target.format(port=port)} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
        writer.write(asked.encode())
        async with asyncio.timeout(HANG_S):
            status = int((await reader.read()).split()[1])
        writer.close()
        assert status == 200 if target.startswith("GET") else status in (400, 404)
        assert [path for path, _, _ in f.asked] == (
            [(f"//127.0.0.1:{port}" if " //" in target else "") + "/v1/models"] if status == 200 else []
        )
    elsewhere.close()
    assert not met


async def test_a_client_s_headers_do_not_say_what_replicas_hold_and_not_who_asks() -> None:
    async with front(well) as f:
        strange = f"a=b, {to_baggage((1, 2))} , infer.prefix =x,c=d"
        for prompt in ("short", "long " * 100):
            given = {"baggage": strange, "Cookie": "a=b", "Authorization": "Bearer mine"}
            async with f.post({"prompt": prompt}, **given) as response:
                assert response.status == 200
        (_, short, _), (_, long, _) = f.asked
        assert short["baggage"] == "a=b,c=d"
        assert len(from_baggage(long["baggage"])) == 1
        assert long["baggage"].endswith(",a=b,c=d")
        assert short.getall("Authorization") == [f"Bearer {KEY}"]
        assert "Cookie" not in short
        twice = CIMultiDict([("Baggage", f"{to_baggage((3,))},a=b"), ("Baggage", f"{to_baggage((4,))},c=d")])
        for prompt in ("short", "long " * 100):
            async with f.session.post(f"{f.url}/v1/completions", json={"prompt": prompt}, headers=twice) as response:
                assert response.status == 200
            (baggage,) = f.asked[-1][1].getall("baggage")
            assert [entry for entry in baggage.split(",") if not entry.startswith(ENTRY)] == ["a=b", "c=d"]
            assert from_baggage(baggage) == (() if prompt == "short" else from_baggage(long["baggage"]))
        async with f.post({"prompt": "long " * 100}, baggage="a=" + "b" * 7900) as response:
            assert response.status == 200
        assert f.asked[-1][1]["baggage"] == "a=" + "b" * 7900, "as it fits into a header no more"


async def test_an_ingress_says_whose_a_request_is_and_its_client_does_not() -> None:
    for keys, told in (([], ""), (["k"], Keys([SecretStr("k")]).owner(make_mocked_request("GET", "/", SHOWN)))):
        async with front(well, api_keys=keys) as f:
            async with f.post({"prompt": "x"}, **SHOWN, **{OWNER: "mine"}) as response:
                assert response.status == 200
            assert [headers.getall(OWNER) for _, headers, _ in f.asked] == [[told]]


async def test_long_events_pass_without_being_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    long = event("x" * (8 << 20))

    async def talk(http: web.Request) -> web.StreamResponse:
        return await streaming(http, event("a"), long[:100], long[100:], event("b"), b"data: [DONE]\n\n")

    def limited(data: bytes) -> Any:
        assert len(data) < 1 << 20
        return from_json(data)

    monkeypatch.setattr("infer_router.resume.from_json", limited)
    async with front(talk) as f, f.post({"prompt": "x", "stream": True}) as response:
        assert await response.read() == event("a") + long + event("b") + b"data: [DONE]\n\n"


async def test_what_shows_that_a_stream_of_lines_lives_passes_at_once() -> None:
    seen = asyncio.Event()

    async def slow(http: web.Request) -> web.StreamResponse:
        response = await streaming(http)
        for data in (b" ", b'{"a": 1}\n ', b'  {"b":', b" 2}\n"):
            await response.write(data)
            await seen.wait()
            seen.clear()
        return response

    async with front(slow) as f, asyncio.timeout(HANG_S), f.post({}, "/api/chat") as response:
        for data in (b" ", b'{"a": 1}\n ', b"  ", b'{"b": 2}\n'):
            assert await response.content.readexactly(len(data)) == data
            seen.set()
        assert await response.read() == b""


async def test_a_replica_that_ends_says_so_in_a_line_as_well() -> None:
    lines = [{"error": SHUTTING_DOWN}, {"done": True}]

    async def ending(http: web.Request) -> web.StreamResponse:
        return await streaming(http, json.dumps(lines[len(f.asked) - 1]).encode() + b"\n")

    async with front(ending, 2) as f:
        async with f.post({}, "/api/chat") as response:
            assert json.loads(await response.read()) == {"done": True}
        assert f.ingress.counts.retried == 1


async def test_a_stream_of_lines_is_not_gone_on_with() -> None:
    """A seed that replicas ignore promises nothing."""

    async def cut(http: web.Request) -> web.StreamResponse:
        response = await streaming(http, b'{"response": "one"}\n')
        await seen.wait()
        assert http.transport is not None
        http.transport.abort()
        return response

    seen = asyncio.Event()
    async with front(cut, 2) as f:
        async with f.post({"prompt": "x", "stream": True, "seed": 1}, "/api/generate") as response:
            first = await response.content.readuntil(b"\n")
            seen.set()
            last = json.loads(await response.read())
        assert (json.loads(first), [*last]) == ({"response": "one"}, ["error"])
        assert len(f.asked) == f.ingress.counts.lost == 1


async def test_bodies_that_are_kept_have_room_together(monkeypatch: pytest.MonkeyPatch) -> None:
    free = asyncio.Event()

    async def wait(http: web.Request) -> web.StreamResponse:
        response = await streaming(http, event("a"))
        await free.wait()
        return response

    monkeypatch.setattr(ingress_module, "MOST_BODIES", 1)
    async with front(wait, max_body_bytes=60_000) as f:
        large = {"prompt": "x" * 50_000, "stream": True}
        async with f.post(large) as response:
            await response.content.readuntil(b"\n\n")
            async with f.post(large) as refused:
                assert refused.status == 503
            async with f.post({"prompt": "x", "stream": True}) as small:
                assert small.status == 200
                free.set()
            await response.read()
        async with f.post(large) as response:
            assert response.status == 200


async def test_the_access_log_says_on_whose_behalf(caplog: pytest.LogCaptureFixture) -> None:
    async with front(well, access_log=True) as f:
        with caplog.at_level(logging.INFO, "infer.access"):
            for body in ({"user": "u-1"}, {"user": "u-1", "safety_identifier": "u-2"}, {"user": ["x"]}):
                async with f.post(body):
                    pass
    lines = [json.loads(record.message) for record in caplog.records if record.name == "infer.access"]
    assert [line["user"] for line in lines] == ["u-1", "u-2", None]


async def test_an_ingress_that_ends_keeps_no_connection() -> None:
    async with front(well) as f:
        f.ingress.closing = True
        async with f.session.get(f.url + "/ready") as response:
            assert response.status == 503
        async with f.post({"prompt": "x"}) as response:
            assert (response.status, response.headers["Connection"]) == (200, "close")
