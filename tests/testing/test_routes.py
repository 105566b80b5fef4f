"""``check_routes``: our own routes pass, and planted bugs are named."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from aiohttp import web
from pydantic import Field
from tests.serving import describe_once, start_checked_once
from tests.testing.planted import Bug, Bugs, caught
from typing_extensions import TypedDict

import infer_agents
import infer_console
import infer_decisions
import infer_ollama
import infer_server.app
import infer_server.routing
import infer_server.testing
from infer import SamplingParams, hookimpl
from infer.contracts.registration import Registration
from infer.contracts.server import Route, RoutesFactory
from infer.errors import PluginError, RequestError
from infer_server.http.body import Body, Text
from infer_server.openapi import pages
from infer_server.service import Service
from infer_testing import ConformanceError, check_routes
from infer_testing.routes import bodies

Make = Callable[[Service], Sequence[Route]]
ONE_THREAD: dict[str, Any] = {"kernels": {"threads": 1}}
planted: Bugs[Make] = Bugs([])


class Say(Body):
    text: Text
    stream: bool = False
    cache_salt: str | None = None
    priority: int = 0


class Said(TypedDict):
    text: str


@pytest.fixture(autouse=True)
def started_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infer_server.testing, "start", start_checked_once)
    monkeypatch.setattr(infer_server.routing, "document", describe_once)


def plugin(make: Make) -> ModuleType:
    module = ModuleType("planted_routes")

    @hookimpl
    def infer_routes() -> list[Registration[RoutesFactory]]:
        return [Registration("mine", lambda service, settings: make(service), "a test's")]

    vars(module).update(INFER_PLUGIN_API=2, infer_routes=infer_routes)
    return module


def run(make: Make, **more: Any) -> None:
    check_routes(plugin(make), "mine", **ONE_THREAD, **more)


def post(handler: Any, **more: Any) -> list[Route]:
    return [Route("POST", "/mine", handler, "Says it.", Said, Say, **more)]


async def asked(service: Service, http: web.Request) -> Any:
    """A request for a text that is longer than any test lets it become."""
    body = await service.read(http, Say, place=True)
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    return await service.requests(http, [body.text], params, body)


def fine(service: Service) -> list[Route]:
    async def say(http: web.Request) -> web.StreamResponse:
        body = await service.read(http, Say, place=True)
        requests = await service.requests(http, [body.text], SamplingParams(max_tokens=8), body)
        if body.stream:
            return await service.stream(http, requests, frames)
        (answer,), _ = await service.whole(http, requests)
        return await service.answer(http, {"text": answer.text})

    async def frames(events: Any, usage: Any) -> AsyncGenerator[Any]:
        async for _, event in events:
            yield {"text": event.text}

    async def about(http: web.Request) -> web.Response:
        return web.json_response({"text": http.match_info["id"]})

    return [
        *post(say, chunk=Said),
        Route("GET", r"/mine/{id:\d{1,3}}/of/{all:.+}", about, "What it is.", Said),
        Route("GET", "/mine", about_page, "A page.", "text/html", open=True),
    ]


async def about_page(http: web.Request) -> web.Response:
    return web.Response(text="<p>Mine", content_type="text/html")


def test_routes_that_keep_their_promises_pass() -> None:
    run(fine)


@pytest.mark.parametrize("ours", [infer_decisions, infer_ollama, infer_agents, infer_console])
def test_ours_pass(ours: ModuleType, tmp_path: Path) -> None:
    own = {"agents": {"store": str(tmp_path / "responses.db"), "key": "a key of the test's own"}}
    check_routes(ours, ours.__name__.removeprefix("infer_"), server=own, **ONE_THREAD)


@planted.each
def test_a_planted_bug_is_named(bug: Bug[Make]) -> None:
    caught(bug, lambda **keys: run(bug.make, **keys))


@planted("the handler raises", "answers", r"""POST /mine answers .* with 500: KeyError: 'lost' \(test_routes.py:""")
def raises(service: Service) -> list[Route]:
    async def handler(http: web.Request) -> web.Response:
        raise KeyError("lost")

    return post(handler)


@planted("the handler returns None", "answers", "its handler returned nothing, not a response")
def nothing(service: Service) -> list[Route]:
    async def handler(http: web.Request) -> None:
        await service.read(http, Say)

    return post(handler)


@planted("a field of the answer is missing", "answers", "which is not the Said that it declares: text: Field required")
def undeclared(service: Service) -> list[Route]:
    async def handler(http: web.Request) -> web.StreamResponse:
        return await service.answer(http, {"said": (await service.read(http, Say)).text})

    return post(handler)


@planted("the answer is text", "answers", "answers with 'text/plain', but declares application/json")
def plain(service: Service) -> list[Route]:
    async def handler(http: web.Request) -> web.Response:
        return web.Response(text=(await service.read(http, Say)).text)

    return post(handler)


@planted("an event has a number for a text", "answers", "not the Said that it declares: text: Input should be a valid")
def odd_event(service: Service) -> list[Route]:
    async def frames(events: Any, usage: Any) -> AsyncGenerator[Any]:
        yield {"text": 1}

    async def handler(http: web.Request) -> web.StreamResponse:
        return await service.stream(http, await asked(service, http), frames)

    return post(handler, chunk=Said)


@planted("a stream has no end", "answers", r"does not end its stream with b'data: \[DONE\]")
def no_end(service: Service) -> list[Route]:
    async def handler(http: web.Request) -> web.Response:
        await service.read(http, Say)
        return web.Response(body=b'data: {"text": "a"}\n\n', content_type="text/event-stream")

    return post(handler, chunk=Said)


@planted("the connection is closed in the middle", "answers", "POST /mine breaks off its answer to .*IncompleteRead")
def breaks_off(service: Service) -> list[Route]:
    async def handler(http: web.Request) -> web.StreamResponse:
        await service.read(http, Say)
        response = web.StreamResponse()
        response.content_length = 9
        await response.prepare(http)
        await response.write(b"{")
        assert http.transport is not None
        http.transport.close()
        return response

    return post(handler)


@planted("core has the path", "answers", "is not what answers there: of the plugin's handlers, no handler was called")
def hidden(service: Service) -> list[Route]:
    async def handler(http: web.Request) -> web.StreamResponse:
        return await service.answer(http, {"text": "mine"})

    return [Route("GET", "/v1/models/{model}/mine", handler, "Mine.", Said)]


@planted("the handler parses the body itself", "refuses", "POST /mine answers .* with 500: JSONDecodeError")
def parses(service: Service) -> list[Route]:
    async def handler(http: web.Request) -> web.StreamResponse:
        return await service.answer(http, {"text": json.loads(await http.read())["text"]})

    return post(handler)


@planted("unknown fields are taken", "refuses", "POST /mine takes .*no_such_field.*, with 200")
def takes(service: Service) -> list[Route]:
    async def handler(http: web.Request) -> web.StreamResponse:
        try:
            given = await http.json()
            return await service.answer(http, {"text": given["text"]})
        except (ValueError, KeyError, TypeError, RecursionError):
            raise RequestError("The body is not right.") from None

    return post(handler)


@planted("unknown fields are refused without a name", "refuses", "without the field's name: .*The body is not right")
def nameless(service: Service) -> list[Route]:
    async def handler(http: web.Request) -> web.StreamResponse:
        raise RequestError("The body is not right.")

    return post(handler)


@planted("an error has several lines", "refuses", r"with what is no sentence: .*not\\nright\.")
def lines(service: Service) -> list[Route]:
    async def handler(http: web.Request) -> web.StreamResponse:
        raise RequestError("not\nright.")

    return post(handler)


@planted("an error has another shape", "refuses", "with what is no error: 'no'")
def shapeless(service: Service) -> list[Route]:
    async def handler(http: web.Request) -> web.Response:
        return web.Response(text="no", status=400)

    return post(handler)


@planted("everybody is let in", "keys", "POST /mine is not open, but answers 400 to no key")
def lets_in(service: Service) -> list[Route]:
    service.keys.accept(lambda http: "")
    return fine(service)


@planted("a request outlives its client", "leaves", "POST /mine keeps 1 requests open after the client has left")
def outlives(service: Service) -> list[Route]:
    async def handler(http: web.Request) -> web.Response:
        service.engine_loop.submit_all(await asked(service, http), lambda events: None)
        await asyncio.Event().wait()
        raise AssertionError

    return post(handler)


def test_a_route_that_is_not_described_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infer_server.app, "pages", lambda routes, name: pages(routes[:1], name))
    with pytest.raises(ConformanceError, match=r"POST /mine is not in /openapi\.json"):
        run(fine, only=["described"])


def test_a_path_of_cores_and_routes_that_there_are_not_are_refused_in_one_sentence() -> None:
    async def handler(http: web.Request) -> web.Response:
        return web.json_response({})

    with pytest.raises(PluginError, match=r"infer-server and planted_routes both serve GET /metrics; uninstall one"):
        run(lambda service: [Route("GET", "/metrics", handler, "Mine.", Said)])
    with pytest.raises(PluginError, match="'yours', but no such plugin is installed"):
        check_routes(plugin(fine), "yours")


class Named(Body):
    name: str = Field(max_length=3, pattern="[x-z]+", examples=["zyx"])


class Patterned(Body):
    name: str = Field(pattern="[x-z]+")


class Inner(Body):
    kind: bool
    many: list[int] = Field(min_length=2)


class Deep(Body):
    inner: Inner
    by_name: dict[str, float] = Field(min_length=1)
    least: float = Field(gt=3)
    either: str | None


@pytest.mark.parametrize(
    ("model", "made"),
    [
        (None, [None]),
        (Say, [{"text": "a", "stream": False}, {"text": "a", "stream": True}]),
        (Named, [{"name": "zyx"}]),
        (Patterned, []),
        (Deep, [{"inner": {"kind": False, "many": [1, 1]}, "by_name": {"0": 1}, "least": 4, "either": "a"}]),
    ],
)
def test_bodies_are_made_of_schemas(model: type[Body] | None, made: list[object]) -> None:
    assert bodies(Route("POST", "/mine", about_page, "Mine.", Said, model)) == made
