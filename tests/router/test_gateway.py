"""Several models behind one address. The machine and its servers are made up: what they are asked is noted."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import anthropic
import pytest
from aiohttp import web
from pydantic import SecretStr
from tests.router.test_loader import until

from infer.contracts.sections import ServerSettings
from infer.errors import EngineDeadError, InferError
from infer_router import serve
from infer_router.exchange import MOST_LOST
from infer_router.gateway import Gateway
from infer_router.ingress import FORMATS, STATE
from infer_router.plan import Plan
from infer_router.serve import gateway
from infer_router.settings import RouterSettings
from infer_router.sizes import PROCESS_BYTES
from infer_server.http.errors import error_body
from infer_server.http.sockets import bind, listen
from infer_server.http.wire import OPENAI, SHUTTING_DOWN

LIMIT_S = 60.0
KEY = "the key of the processes"


class Server:
    """A process that serves a model, as far as a gateway sees."""

    def __init__(self, machine: Machine, name: str) -> None:
        self.machine, self.name, self.url = machine, name, ""
        self.code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.stack = AsyncExitStack()

    async def begin(self) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self.url = await self.stack.enter_async_context(listen(app, bind("127.0.0.1", 0)))

    async def _answer(self, http: web.Request) -> web.StreamResponse:
        if http.path == STATE:
            self.machine.polls += 1
            return web.json_response({"version": "a.0", "taking": True, "stuck": False, "open": self.machine.work})
        self.machine.asked.append((self.name, http.method, http.path, http.headers, await http.read()))
        if http.headers.get("Accept") == "text/event-stream":
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(http)
            await response.write(b'data: {"type": "begun"}\n\n')
            await self.machine.gate.wait()
            return response
        await self.machine.gate.wait()
        if http.path == "/metrics":
            return web.Response(text="# TYPE x counter\nx 1\n")
        return web.json_response({"by": self.name})

    async def wait(self) -> int:
        return await asyncio.shield(self.code)

    async def healthy(self) -> bool:
        return True

    async def end(self, drain_s: float) -> None:
        await self.die(0)

    async def die(self, code: int) -> None:
        if not self.code.done():
            self.code.set_result(code)
            await self.stack.aclose()


class Machine:
    def __init__(self) -> None:
        self.asked: list[tuple[str, str, str, Any, bytes]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.loads: list[str] = []
        self.servers: list[Server] = []
        self.fault: InferError | None = None
        """Why no model can be loaded."""
        self.work = self.polls = 0
        """How many requests each process says that it has, and how often it was asked."""
        self.rooms: list[bool] = []
        """What it was told about room for a process that waits."""

    async def size(self, name: str) -> Mapping[str, Any]:
        return {"bytes": 4, "max_model_len": 512, "quantization": "int8", "format": "folder"}

    async def start(self, name: str) -> Server:
        self.loads.append(name)
        if self.fault is not None:
            raise self.fault
        server = Server(self, name)
        await server.begin()
        self.servers.append(server)
        return server

    def expect(self, name: str) -> None:
        pass

    def may_spare(self, room: bool) -> None:
        self.rooms.append(room)


class Local(Machine):
    """In the place of ``LocalMachine``."""

    memory = 8

    async def __aenter__(self) -> Local:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for each in self.servers:
            await each.die(0)

    async def free(self) -> int:
        return self.memory


class Front:
    def __init__(self, url: str, machine: Machine, session: aiohttp.ClientSession) -> None:
        self.url, self.machine, self._session = url, machine, session
        self.made: Gateway
        self.owning: asyncio.Task[None]

    async def ask(self, method: str, path: str, **how: Any) -> tuple[int, Any, Any]:
        """Status, JSON or text, and headers."""
        async with self._session.request(method, self.url + path, **how) as response:
            text = await response.text()
            said = json.loads(text) if text and "json" in response.content_type else text
            return response.status, said, response.headers

    async def post(self, path: str, body: Any, **how: Any) -> tuple[int, Any, Any]:
        return await self.ask("POST", path, json=body, **how)

    async def states(self) -> dict[str, str]:
        _, found, _ = await self.ask("GET", "/v1/models")
        return {each["id"]: each["state"] for each in found["data"]}


@asynccontextmanager
async def front(
    names: Mapping[str, str],
    memory: int = 8,
    server: Mapping[str, Any] | None = None,
    console: bool = False,
    **router: Any,
) -> AsyncIterator[Front]:
    """``names`` has the model of each name and alias."""
    machine, about = Machine(), ServerSettings(access_log=False, **(server or {}))
    plan = planned(names, console, **router)
    async with asyncio.timeout(LIMIT_S), aiohttp.ClientSession() as session:
        async with gateway(plan, about, machine, memory, bind("127.0.0.1", 0)) as (made, url, owning):
            f = Front(url, machine, session)
            f.made, f.owning = made, owning
            yield f
        for each in machine.servers:
            await each.die(0)


def planned(names: Mapping[str, str], console: bool = False, **router: Any) -> Plan:
    models = dict.fromkeys(names.values())
    settings = RouterSettings(**router)
    keep = math.inf if settings.keep_alive_s < 0 else settings.keep_alive_s
    engines: dict[str, Mapping[str, Any]] = {name: {} for name in models}
    return Plan(engines, dict.fromkeys(models, keep), frozenset(), names, KEY, settings, console=console)


THREE = {"a": "a", "b": "b", "org/c:8b": "org/c:8b", "opus": "a"}


@asynccontextmanager
async def stopping(
    monkeypatch: pytest.MonkeyPatch, drain_timeout_s: float
) -> AsyncIterator[tuple[Front, asyncio.Event]]:
    """A server from its start to its end, and what has it stop."""
    machine, stop = Local(), asyncio.Event()
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(serve, "LocalMachine", lambda engines: machine)
    monkeypatch.setattr(serve, "log_to_stderr", lambda: None)
    monkeypatch.setattr(serve, "announce", lambda line: url.set_result(line.split()[-1]))
    about = ServerSettings(port=0, access_log=False, drain_timeout_s=drain_timeout_s)
    async with asyncio.timeout(LIMIT_S), aiohttp.ClientSession() as session:
        serving = asyncio.create_task(serve._serve(planned(THREE), about, stop))
        yield Front(await url, machine, session), stop
        await serving


@pytest.mark.parametrize("name", ["a", "a:latest", "opus", "opus:latest"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/api/chat"])
async def test_a_request_goes_to_the_model_that_it_names(name: str, path: str) -> None:
    async with front(THREE) as f:
        assert (await f.post("/v1/completions", {"model": "b", "prompt": "x"}))[1] == {"by": "b"}
        assert (await f.post(path, {"model": name, "messages": [{}], "prompt": "x"}))[1] == {"by": "a"}
        assert f.machine.loads == ["b", "a"]
        assert all(headers["Authorization"] == f"Bearer {KEY}" for *_, headers, _ in f.machine.asked)


@pytest.mark.parametrize(("less", "spare", "waits"), [(0, True, True), (0, False, False), (1, True, False)])
async def test_a_process_waits_for_a_model_if_it_may_and_fits(less: int, spare: bool, waits: bool) -> None:
    async with front({"a": "a"}, memory=4 + PROCESS_BYTES - less, spare=spare) as f:
        assert (await f.post("/v1/completions", {"model": "a", "prompt": "x"}))[0] == 200
        f.machine.rooms.clear()
        assert (await f.post("/v1/completions", {"model": "a", "prompt": "x"}))[0] == 200
        assert {*f.machine.rooms} == {waits}


@pytest.mark.parametrize("encoding", ["gzip", "GZIP"])
async def test_compressed_bodies_and_ollamas_old_name_go_to_the_right_model(encoding: str) -> None:
    async with front(THREE) as f:
        body = json.dumps({"model": "b", "prompt": "x"}).encode()
        headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
        status, said, _ = await f.ask("POST", "/v1/completions", data=gzip.compress(body), headers=headers)
        assert (status, said) == (200, {"by": "b"})
        *_, sent, asked = f.machine.asked[-1]
        assert "Content-Encoding" not in sent
        assert asked == body
        assert (await f.post("/api/generate", {"name": "org/c:8b", "prompt": "x"}))[1] == {"by": "org/c:8b"}
        status, said, _ = await f.ask("POST", "/v1/completions", data=b"not gzip", headers=headers)
        assert status == 400
        status, said, _ = await f.ask("POST", "/v1/completions", data=gzip.compress(bytes(64 << 20)), headers=headers)
        assert status == 413


async def test_an_unknown_model_is_not_found_in_each_dialect() -> None:
    async with front(THREE) as f:
        status, said, _ = await f.post("/v1/chat/completions", {"model": "zz", "messages": []})
        assert (status, said["error"]["code"], said["error"]["param"]) == (404, "model_not_found", "model")
        assert "'a', 'b', 'org/c:8b', 'opus'" in said["error"]["message"]
        status, said, _ = await f.post("/v1/messages", {"model": "zz"})
        assert (status, said["type"], said["error"]["type"]) == (404, "error", "not_found_error")
        status, said, _ = await f.post("/api/chat", {"model": "zz"})
        assert status == 404
        assert said["error"].startswith("model 'zz' not found")
        assert (await f.ask("GET", "/v1/models/zz"))[0] == 404
        status, said, _ = await f.post("/v1/completions", {"prompt": "x"})
        assert (status, said["error"]["param"]) == (400, "model")
        assert (await f.post("/v1/completions", {"model": 5}))[0] == 400
        assert not f.machine.loads


async def test_anthropics_clients_list_the_models_that_may_be_loaded() -> None:
    async with front(THREE, server={"api_keys": ["right"]}) as f:
        async with anthropic.AsyncAnthropic(base_url=f.url, api_key="right", max_retries=0) as client:
            assert [each.id async for each in client.models.list(limit=2)] == list(THREE)
            assert (await client.models.list(limit=2)).has_more
            assert (await client.models.retrieve("org/c:8b")).max_input_tokens == 512
            with pytest.raises(anthropic.NotFoundError) as failed:
                await client.models.retrieve("zz")
            assert failed.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
        status, said, _ = await f.ask("GET", "/v1/models", headers={"anthropic-version": "2023-06-01"})
        assert (status, said["error"]["type"]) == (401, "authentication_error")
        assert not f.machine.loads


QUIET = ("/health", "/ready", "/metrics", "/", "/api/version", "/v1/models", "/v1/models/a", "/api/tags", "/api/ps")


async def test_what_asks_about_models_wakes_none_and_resets_no_timer() -> None:
    async with front(THREE, keep_alive_s=0.2) as f:
        for path in QUIET:
            for method in ("GET", "HEAD"):
                assert (await f.ask(method, path))[0] == 200, path
        assert (await f.ask("GET", "/"))[1] == "Ollama is running"
        assert not f.machine.loads
        status, said, _ = await f.ask("GET", "/openapi.json")
        assert status == 503
        assert "No model is loaded" in said["error"]["message"]
        assert (await f.ask("GET", "/ray/state"))[0] == 404
        await f.post("/v1/completions", {"model": "a", "prompt": "x"})
        while (await f.states())["a"] == "loaded":  # though it is asked about all the while, it leaves
            for path in QUIET:
                await f.ask("GET", path)
            await f.ask("GET", "/openapi.json")
        await until(lambda: f.machine.servers[0].code.done())
        assert f.machine.loads == ["a"]


async def test_every_model_is_listed_with_state_size_and_expiry() -> None:
    async with front(THREE, keep_alive_s=300) as f:
        await f.post("/v1/completions", {"model": "a", "prompt": "x"})
        await f.post("/api/generate", {"model": "b", "prompt": "x", "keep_alive": -1})
        _, said, _ = await f.ask("GET", "/v1/models")
        by_id = {each["id"]: each for each in said["data"]}
        assert by_id.keys() == THREE.keys()
        assert [by_id[name]["state"] for name in THREE] == ["loaded", "loaded", "unloaded", "loaded"]
        assert by_id["a"]["size_bytes"] == 4
        assert 250 < by_id["a"]["expires_in_s"] <= 300
        assert by_id["b"]["expires_in_s"] is None
        _, said, _ = await f.ask("GET", "/api/tags")
        assert [each["name"] for each in said["models"]] == ["a:latest", "b:latest", "org/c:8b", "opus:latest"]
        assert all(len(each["digest"]) == 64 for each in said["models"])
        assert len({each["digest"] for each in said["models"]}) == 3, "an alias is the same model"
        _, said, _ = await f.ask("GET", "/api/ps")
        assert [each["name"] for each in said["models"]] == ["a:latest", "b:latest", "opus:latest"]
        assert said["models"][1]["expires_at"].startswith("2318-")
        _, said, _ = await f.ask("GET", "/metrics")
        assert 'infer_models_loaded{model="org/c:8b"} 0' in said
        assert 'x{replica="a-1"} 1' in said


async def test_ollamas_ways_to_load_a_model_and_let_it_go() -> None:
    async with front(THREE) as f:
        for path in ("/api/generate", "/api/chat"):
            status, said, _ = await f.post(path, {"model": "a", "keep_alive": 0})
            assert (status, said["done"], said["done_reason"]) == (200, True, "unload")
        assert not f.machine.loads, "a model is not loaded to be let go"
        await f.post("/api/generate", {"model": "a", "keep_alive": "10m"})
        assert (await f.states())["a"] == "loaded"
        await f.post("/api/generate", {"model": "a", "keep_alive": 0})
        await until(lambda: f.machine.servers[0].code.done())
        await f.post("/api/chat", {"model": "a", "messages": [{}], "keep_alive": "0s"})
        await until(lambda: f.machine.servers[1].code.done())


async def test_a_busy_model_is_let_go_after_its_requests() -> None:
    async with front(THREE) as f:
        f.machine.gate.clear()
        asked = asyncio.create_task(f.post("/v1/completions", {"model": "a", "prompt": "x"}))
        await until(lambda: f.machine.asked)
        await f.post("/api/generate", {"model": "a", "keep_alive": 0})
        assert (await f.states())["a"] == "loaded"
        f.machine.gate.set()
        assert (await asked)[1] == {"by": "a"}
        await until(lambda: f.machine.servers[0].code.done())


@pytest.mark.parametrize("value", ["1" + "0" * 400, "-1" + "0" * 400, "NaN", "Infinity", "true", "[]", '"1x"', '""'])
async def test_a_keep_alive_that_is_none_is_refused_in_one_sentence(value: str) -> None:
    async with front(THREE) as f:
        data = b'{"model": "a", "prompt": "x", "keep_alive": %s}' % value.encode()
        json_type = {"Content-Type": "application/json"}
        status, said, _ = await f.ask("POST", "/api/generate", data=data, headers=json_type)
        assert status == 400
        assert said["error"].startswith("keep_alive has to be seconds")
        assert not f.machine.loads
        assert (await f.ask("GET", "/health"))[0] == 200


@pytest.mark.parametrize("field", ["keep_alive", "model", "options"])
async def test_deep_nesting_is_refused(field: str) -> None:
    async with front(THREE) as f:
        deep = b"[" * 100_000 + b"]" * 100_000
        data = b'{"prompt": "x", "%s": %s}' % (field.encode(), deep)
        status, said, _ = await f.ask("POST", "/api/generate", data=data, headers={"Content-Type": "application/json"})
        assert (status, isinstance(said["error"], str)) == (400, True)
        assert not f.machine.loads


async def test_a_full_queue_says_so_and_when_to_come_again() -> None:
    async with front(THREE, memory=4, max_waiting=1) as f:
        f.machine.gate.clear()
        tasks = [asyncio.create_task(f.post("/v1/completions", {"model": "a", "prompt": "x"}))]
        await until(lambda: f.machine.asked)
        tasks.append(asyncio.create_task(f.post("/v1/completions", {"model": "b", "prompt": "x"})))
        while [each["waiting"] for each in (await f.ask("GET", "/v1/models"))[1]["data"]][1] == 0:
            pass
        status, said, headers = await f.post("/api/chat", {"model": "org/c:8b", "messages": [{}]})
        assert status == 503
        assert "would be number 2 of at most server.router.max_waiting = 1" in said["error"]
        assert int(headers["Retry-After"]) >= 1
        f.machine.gate.set()
        assert [said["by"] for _, said, _ in await asyncio.gather(*tasks)] == ["a", "b"]


async def test_a_model_that_never_fits_is_refused() -> None:
    async with front(THREE, memory=3) as f:
        status, said, _ = await f.post("/v1/completions", {"model": "a", "prompt": "x"})
        assert status == 400
        assert "never fits" in said["error"]["message"]


async def test_a_process_that_dies_is_replaced_and_its_requests_are_asked_again() -> None:
    """Of other models none notices."""
    async with front(THREE) as f:
        await f.post("/v1/completions", {"model": "b", "prompt": "x"})
        f.machine.gate.clear()
        lost = asyncio.create_task(f.post("/v1/completions", {"model": "a", "prompt": "x"}))
        kept = asyncio.create_task(f.post("/v1/completions", {"model": "b", "prompt": "x"}))
        await until(lambda: len(f.machine.asked) == 3)
        await f.machine.servers[1].die(9)
        await until(lambda: len(f.machine.asked) == 4)
        f.machine.gate.set()
        assert (await lost)[:2] == (200, {"by": "a"})
        assert (await kept)[1] == {"by": "b"}
        assert f.machine.loads == ["b", "a", "a"]


async def test_whose_process_has_ended_is_told_why_there_is_no_other() -> None:
    async with front(THREE) as f:
        f.machine.gate.clear()
        lost = asyncio.create_task(f.post("/v1/completions", {"model": "a", "prompt": "x"}))
        await until(lambda: f.machine.asked)
        f.machine.fault = InferError("The file a.safetensors is gone.")
        await f.machine.servers[0].die(9)
        status, said, _ = await lost
        message = "The model 'a' cannot be loaded: The file a.safetensors is gone."
        assert (status, said["error"]["message"]) == (503, message)
        assert f.machine.loads == ["a", "a"]


async def test_a_request_that_ends_every_process_ends_no_more_than_a_few() -> None:
    async with front(THREE) as f:
        f.machine.gate.clear()
        lost = asyncio.create_task(f.post("/v1/completions", {"model": "a", "prompt": "x"}))
        for number in range(MOST_LOST):
            await until(lambda number=number: len(f.machine.asked) == number + 1)  # type: ignore[misc]
            await f.machine.servers[number].die(9)
        status, said, _ = await lost
        assert (status, f"{MOST_LOST} replicas were lost" in said["error"]["message"]) == (503, True)


async def test_who_finds_a_process_that_hangs_waits_until_it_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer_router.exchange.RESUME_S", 0)
    async with front(THREE, stuck_timeout_s=LIMIT_S) as f:
        await f.post("/v1/completions", {"model": "a", "prompt": "x"})
        fleet = f.made._ingresses["a"].fleet
        monkeypatch.setattr(fleet, "report", lambda name, state: None)
        fleet.suspect("a-1")
        waiting = asyncio.create_task(f.post("/v1/completions", {"model": "a", "prompt": "x"}))
        while (await f.ask("GET", "/v1/models/a"))[1]["open"] == 0 and not waiting.done():
            pass
        await f.machine.servers[0].die(9)
        assert (await waiting)[:2] == (200, {"by": "a"})
        assert f.machine.loads == ["a", "a"]


async def test_what_asks_no_model_waits_for_none() -> None:
    async with front(THREE) as f:
        await f.post("/v1/completions", {"model": "a", "prompt": "x"})
        f.machine.gate.clear()
        lost = asyncio.create_task(f.ask("GET", "/v1/responses/x"))
        await until(lambda: len(f.machine.asked) == 2)
        await f.machine.servers[0].die(9)
        status, said, _ = await lost
        assert (status, said["error"]["message"]) == (503, "No replica can take requests at the moment; try again.")


async def test_the_server_ends_with_a_sentence_when_the_task_that_owns_the_models_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def served() -> None:
        async with front(THREE) as f:

            def fail(name: str, url: str | None) -> None:
                raise ZeroDivisionError("oh")

            monkeypatch.setattr(f.made, "changed", fail)
            status, _, _ = await f.post("/v1/completions", {"model": "a", "prompt": "x"})
            assert status == 503
            await asyncio.wait((f.owning,))

    with pytest.raises(EngineDeadError, match=r"The task that loads models has failed \(ZeroDivisionError: oh\)"):
        await served()


async def test_keys_are_asked_for_and_are_not_the_processes() -> None:
    async with front(THREE, server={"api_keys": [SecretStr("k")]}) as f:
        assert (await f.ask("GET", "/health"))[0] == 200
        assert (await f.ask("GET", "/v1/models"))[0] == 401
        shown = {"Authorization": "Bearer k"}
        assert (await f.post("/v1/completions", {"model": "a", "prompt": "x"}))[0] == 401
        assert (await f.post("/v1/completions", {"model": "a", "prompt": "x"}, headers=shown))[1] == {"by": "a"}
        assert f.machine.asked[-1][3]["Authorization"] == f"Bearer {KEY}"


async def test_what_is_shown_and_pulled_wakes_nobody() -> None:
    async with front(THREE) as f:
        status, said, _ = await f.post("/api/show", {"model": "a:latest"})
        assert (status, said["model_info"]["infer.context_length"]) == (200, 512)
        assert (await f.post("/api/pull", {"model": "b"}))[1] == {"status": "success"}
        assert (await f.post("/api/show", {"model": "zz"}))[0] == 404
        assert not f.machine.loads
        await f.post("/v1/completions", {"model": "a", "prompt": "x"})
        assert (await f.post("/api/show", {"model": "a"}))[1] == {"by": "a"}


async def test_a_server_that_stops_refuses_new_requests_and_answers_those_that_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with stopping(monkeypatch, drain_timeout_s=LIMIT_S) as (f, stop):
        f.machine.gate.clear()
        kept = asyncio.create_task(f.post("/v1/completions", {"model": "a", "prompt": "x"}))
        await until(lambda: f.machine.asked)
        stop.set()
        while (await f.ask("GET", "/ready"))[0] == 200:
            pass
        for path in ("/v1/completions", "/v1/messages", "/api/chat"):
            for model in "ab":
                status, said, headers = await f.post(path, {"model": model, "prompt": "x", "messages": [{}]})
                assert (status, headers["Retry-After"]) == (503, "1")
                assert SHUTTING_DOWN in json.dumps(said["error"])
        f.machine.gate.set()
        assert (await kept)[1] == {"by": "a"}
        assert len(f.machine.asked) == len(f.machine.loads) == 1


async def test_a_server_that_stops_waits_for_what_is_computed_in_the_background(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with stopping(monkeypatch, drain_timeout_s=LIMIT_S) as (f, stop):
        f.machine.work = 1
        assert (await f.post("/v1/responses", {"model": "a", "background": True}))[0] == 200
        stop.set()
        while (await f.ask("GET", "/ready"))[0] == 200:
            pass
        polls = f.machine.polls
        await until(lambda: f.machine.polls > polls + 2)
        assert (await f.ask("GET", "/v1/responses/x"))[1] == {"by": "a"}
        f.machine.work = 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/messages"])
async def test_what_is_not_done_when_a_server_stops_ends_with_an_error(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """As a server of one model writes it."""
    async with stopping(monkeypatch, drain_timeout_s=0) as (f, stop):
        f.machine.gate.clear()
        asked = {"model": "a", "prompt": "x"}
        whole = asyncio.create_task(f.post(path, asked))
        await until(lambda: f.machine.asked)
        headers = {"Accept": "text/event-stream"}
        stream = asyncio.create_task(f.post(path, asked, headers=headers))
        await until(lambda: len(f.machine.asked) == 2)
        stop.set()
        status, said, _ = await whole
        assert (status, said["error"]["message"]) == (503, SHUTTING_DOWN)
        status, said, _ = await stream
        written = FORMATS.get(path, OPENAI)
        error = written.numbered(written.failure(error_body(SHUTTING_DOWN, "server_error")), 1)
        assert status == 200
        assert said.endswith((written.head(error) + f"data: {json.dumps(error)}\n\n".encode() + written.DONE).decode())
        f.machine.gate.set()


async def test_of_prompts_that_have_one_process_to_go_to_nothing_is_remembered() -> None:
    async with front(THREE) as f:
        for path in ("/v1/completions", "/v1/chat/completions"):
            text = "long " * 1000
            messages = [{"role": "user", "content": text}]
            assert (await f.post(path, {"model": "a", "prompt": text, "messages": messages}))[0] == 200
        assert not any("baggage" in headers for *_, headers, _ in f.machine.asked)
        assert not any(each.fleet.router.blocks for each in f.made._ingresses.values())
