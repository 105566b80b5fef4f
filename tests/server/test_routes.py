"""Plugins' endpoints: the same rules apply to them as to core's own."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from aiohttp import web
from tests.serving import running
from typing_extensions import TypedDict

from infer import PLUGIN_API, PluginError, RequestError, hookimpl
from infer.contracts.records import RequestRecord
from infer.contracts.registration import Registration
from infer.contracts.server import Route, RoutesFactory
from infer.plugins.discovery import Plugins
from infer_server.http.body import Body
from infer_server.http.wire import Anthropic
from infer_server.service import Service

GREETER = '''
from aiohttp import web
from pydantic import BaseModel

from infer import RequestError, SamplingParams, hookimpl
from infer.contracts.registration import Registration
from infer.contracts.server import Route
from infer_server.http.body import Body
from typing_extensions import TypedDict

INFER_PLUGIN_API = 2


class Own(BaseModel):
    greeting: str = "hello"


class Ask(Body):
    prompt: str
    cache_salt: str | None = None
    priority: int = 0


class Status(TypedDict):
    """Core has one of that name."""

    text: str
    length: int
    finished: int


class Greeter:
    def __init__(self, service, settings):
        self.service, self.settings, self.finished = service, settings, 0
        service.observe(self)

    def infer_request_finished(self, record):
        self.finished += 1

    async def ask(self, http):
        body = await self.service.read(http, Ask)
        if body.prompt == "boom":
            raise KeyError("lost")
        if body.prompt == "nothing":
            return None
        if body.prompt == "no":
            raise RequestError("prompt is no.", param="prompt")
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        requests = await self.service.requests(http, [body.prompt[:100]], params, body)
        (answer,), _ = await self.service.whole(http, requests)
        text = f"{self.settings.greeting} {answer.finish_reason}"
        return await self.service.answer(
            http, {"text": text, "length": len(body.prompt), "finished": self.finished}
        )

    async def stream(self, http):
        body = await self.service.read(http, Ask)
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        requests = await self.service.requests(http, [body.prompt], params, body)

        async def frames(events, usage):
            async for _, event in events:
                yield {"text": event.text}
                raise KeyError("lost")

        return await self.service.stream(http, requests, frames)


@hookimpl
def infer_routes():
    def routes(service, settings):
        greeter = Greeter(service, settings)
        return [
            Route("POST", "/greeter/ask", greeter.ask, "Greets.", Status, Ask),
            Route("POST", "/greeter/stream", greeter.stream, "Greets in parts.", Status, Ask),
        ]

    return [Registration("greeter", routes, "greets", Own)]
'''


@pytest.fixture
def greeter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A plugin's module that the server's processes can import, too."""
    (tmp_path / "greeter.py").write_text(GREETER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "greeter", raising=False)
    import greeter  # type: ignore[import-not-found]

    return greeter  # type: ignore[no-any-return]


async def test_what_goes_for_cores_endpoints_goes_for_a_plugins(
    greeter: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    """Keys, limits, errors, the log, the document; and it has settings, observes, and is sent large bodies."""
    path, key = "/greeter/ask", {"Authorization": "Bearer key"}
    server_settings = {"api_keys": "key", "max_body_bytes": 50_000, "greeter": {"greeting": "good day"}}
    with caplog.at_level(logging.INFO, "infer.access"):
        async with running([greeter], server=server_settings | {"access_log": True}) as server:
            url = server.url + path
            async with server.session.post(url, json={"prompt": "x"}) as response:
                assert response.status == 401

            async def ask(prompt: str, **more: object) -> tuple[int, Any]:
                async with server.session.post(url, json={"prompt": prompt} | more, headers=key) as response:
                    assert response.headers["X-Request-Id"]
                    return response.status, await response.json()

            assert await ask("x") == (200, {"text": "good day length", "length": 1, "finished": 1})
            assert await ask("x" * 40_000) == (200, {"text": "good day length", "length": 40_000, "finished": 2})
            for prompt, more, status, param in (
                ("x", {"promt": 3}, 400, "promt"),
                ("no", {}, 400, "prompt"),
                ("x" * 60_000, {}, 413, None),
                ("boom", {}, 500, None),
                ("nothing", {}, 500, None),
            ):
                found, answer = await ask(prompt, **more)
                assert (found, answer["error"]["param"]) == (status, param), answer
                if status == 500:
                    said = answer["error"]["message"]
                    assert said.startswith("The routes plugin 'greeter' of greeter failed at POST /greeter/ask")
                    assert ("returned nothing, not a response" in said) == (prompt == "nothing")
                    assert "lost" not in said
            async with server.session.post(
                server.url + "/greeter/stream", json={"prompt": "x"}, headers=key
            ) as response:
                first, second, *rest = [line async for line in response.content if line.strip()]
                assert "text" in json.loads(first.removeprefix(b"data: "))
                said = json.loads(second.removeprefix(b"data: "))["error"]["message"]
                assert said.startswith("The routes plugin 'greeter' of greeter failed at POST /greeter/stream")
                assert "lost" not in said
                assert rest == [b"data: [DONE]\n"]
            _, made = await server.get("/openapi.json", **key)
    lines = [json.loads(record.message) for record in caplog.records if record.name == "infer.access"]
    assert [line["status"] for line in lines if line["path"] == path] == [401, 200, 200, 400, 400, 413, 500, 500]
    assert lines[1]["usage"]["completion_tokens"] == 4
    schemas = made["components"]["schemas"]

    def answer_of(path: str, method: str) -> Any:
        shape = made["paths"][path][method]["responses"]["200"]["content"]["application/json"]["schema"]
        return set(schemas[shape["$ref"].rpartition("/")[2]]["properties"])

    assert answer_of(path, "post") == {"text", "length", "finished"}
    assert answer_of("/health", "get") == {"status"}
    asked = made["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    assert set(schemas[asked.rpartition("/")[2]]["properties"]) == {"prompt", "cache_salt", "priority"}


class Stranger:
    """A plugin whose routes are given."""

    INFER_PLUGIN_API = PLUGIN_API

    def __init__(self, routes: Any) -> None:
        self.routes: RoutesFactory = lambda service, settings: routes(service) if callable(routes) else routes

    @hookimpl
    def infer_routes(self) -> list[Registration[RoutesFactory]]:
        return [Registration("mine", self.routes, "a test's")]


async def handler(http: web.Request) -> web.Response:
    return web.json_response({})


def sync(http: web.Request) -> web.Response:
    return web.json_response({})


class Fine(TypedDict):
    text: str


class Inner:
    class Ask(Body):
        prompt: str


def route(method: str = "GET", path: str = "/mine", does: Any = handler, **more: Any) -> Route:
    given: dict[str, Any] = {"summary": "A test's.", "answer": Fine}
    return Route(method, path, does, **given | more)


def lost(service: Service) -> Sequence[Route]:
    raise KeyError("lost")


@pytest.mark.parametrize(
    ("routes", "says"),
    [
        (lost, r"KeyError: 'lost' \(test_routes.py:\d+\)"),
        (None, "its factory returned something other than a list of Routes"),
        ([route(), "/x"], "something other than a list of Routes"),
        ([route(does=sync)], "the handler of GET /mine is not an async function"),
        ([route(path="mine")], "path should be started with /"),
        ([route(path="/{")], "Invalid path"),
        ([route("G T")], "not allowed HTTP method|not an allowed|HTTP method"),
        ([route(), route()], "already registered"),
        ([route(summary="two\nlines")], "the summary of GET /mine is not one line"),
        ([route(body=dict)], "the body of GET /mine does not extend infer_server.http.body.Body"),
        ([route("POST", body=Inner.Ask)], "the body Inner.Ask does not stand at the top"),
        ([route(answer=sync)], "PydanticSchemaGenerationError"),
    ],
    ids=range(12),
)
async def test_routes_that_cannot_be_served_are_one_sentence(routes: object, says: str) -> None:
    whose = "The routes plugin 'mine' of Stranger"
    with pytest.raises(PluginError, match=rf"{whose} cannot be used: .*({says})") as raised:
        async with running([Stranger(routes)]):
            pass
    assert str(raised.value).isprintable()
    assert str(raised.value).endswith(".")


@pytest.mark.parametrize("path", ["/metrics", "/docs", "/v1/models/{any}"])
async def test_a_path_has_one_owner(path: str) -> None:
    with pytest.raises(PluginError, match=r"infer-server and Stranger both serve GET /.*; uninstall one of them"):
        async with running([Stranger([route(path=path)])]):
            pass
    async with running([Stranger([route("POST", path)])]) as server:
        assert (await server.post({}, path.replace("{any}", "x")))[0] == 200, "another method is another endpoint"


async def test_a_header_decides_between_endpoints_of_one_path() -> None:
    """Of several plugins, too. The answers and errors are as the one has it that the request is for."""

    class Mine(TypedDict):
        mine: str

    async def mine(http: web.Request) -> web.Response:
        if http.match_info.get("model") == "no":
            raise RequestError("The model is no.")
        return web.json_response({"mine": http.match_info.get("model", "all")})

    own = [
        Route("GET", path, mine, "Mine.", Mine, header="X-Mine", wire_format=Anthropic())
        for path in ("/v1/models", "/v1/models/{model:.+}", "/health")
    ]
    async with running([Stranger(own)], server={"api_keys": "right", "access_log": False}) as server:

        async def ask(path: str, key: str = "right", method: str = "GET", **headers: str) -> tuple[int, Any]:
            told = {"Authorization": f"Bearer {key}"} | headers
            async with server.session.request(method, server.url + path, headers=told) as response:
                return response.status, await response.json() if method == "GET" else None

        here = {"x-mine": ""}
        assert await ask("/v1/models", **here) == (200, {"mine": "all"})
        assert await ask("/v1/models/a/b", **here) == (200, {"mine": "a/b"})
        assert await ask("/v1/models", method="HEAD", **here) == (200, None)
        assert (await ask("/v1/models"))[1]["object"] == "list"
        for path, key, headers, status, kind in (
            ("/v1/models/no", "right", here, 400, "error"),
            ("/v1/models/no", "right", {}, 404, None),
            ("/v1/models", "wrong", here, 401, "error"),
            ("/v1/models", "wrong", {}, 401, None),
        ):
            found, told = await ask(path, key, **headers)
            assert (found, told.get("type")) == (status, kind)
        assert await ask("/health", "none", **here) == (200, {"mine": "all"}), "the open one says so"
        _, document = await ask("/openapi.json")
        both = document["paths"]["/v1/models/{model}"]["get"]
        assert [each["name"] for each in both["parameters"]] == ["model", "X-Mine", "anthropic-version"]
        shapes = both["responses"]["200"]["content"]["application/json"]["schema"]["anyOf"]
        named = [each["$ref"] for each in shapes]
        ends = ("Model", "Mine", "ListedModel")
        assert [ref.endswith(end) for ref, end in zip(named, ends, strict=True)] == [True] * 3


@pytest.mark.parametrize(
    ("routes", "says"),
    [
        ([route(header="X-A")], "GET /mine with X-A takes the place of no endpoint"),
        ([route(), route(header="X-A"), route(header="x-a")], "both serve GET /mine with x-a"),
        ([route(), route(header="X-A", open=True)], "GET /mine with X-A is open, which only"),
    ],
)
async def test_a_header_has_one_owner_and_takes_the_place_of_an_endpoint(routes: list[Route], says: str) -> None:
    with pytest.raises(PluginError, match=says):
        async with running([Stranger(routes)]):
            pass


async def test_an_open_route_opens_no_other_and_all_of_its_pattern() -> None:
    paths = [route(path="/mine", open=True), route("POST", "/mine"), route(path="/mine/{rest:.+}", open=True)]
    async with running([Stranger(paths)], server={"api_keys": "right", "access_log": False}) as server:
        for method, path, status in (("GET", "/mine", 200), ("POST", "/mine", 401), ("GET", "/mine/a/b", 200)):
            async with server.session.request(method, server.url + path) as response:
                assert response.status == status, (method, path)


async def test_a_servers_observers_leave_with_it() -> None:
    told: list[RequestRecord] = []
    services: list[Service] = []

    class Observer:
        def infer_request_finished(self, record: RequestRecord) -> None:
            told.append(record)

    def observing(service: Service) -> Sequence[Route]:
        services.append(service)
        service.observe(Observer())
        with pytest.raises(PluginError, match="The observer object cannot be used"):
            service.observe(object())
        return []

    plugin = Stranger(observing)
    async with running([plugin]) as server:
        await server.post({"prompt": "x", "max_tokens": 1})
        assert len(told) == 1
    services[0].plugins.notify("infer_request_finished", told[0])
    assert len(told) == 1


def test_routes_are_listed() -> None:
    offers = Plugins.discover().offers["routes"]
    names = {offer.name for offer in offers if offer.distribution == "infer-server"}
    assert names == {"chat", "completions", "tokenization", "adapters", "about", "metrics"}
