"""The ingress before real servers, each behind a relay that can be cut as a killed process's connections are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import make_mocked_request
from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr
from tests.examples import slowly
from tests.serving import HANG_S, chatty, serving, until

from infer.contracts.sections import ServerSettings
from infer_router.fleet import Fleet
from infer_router.ingress import Ingress
from infer_router.ingress import serving as serving_ingress
from infer_router.prefixes import chain as chain_of
from infer_server.http.keys import INGRESS, OWNER, Keys
from infer_server.http.sockets import bind
from infer_server.testing import Serving

PROMPT = "def parse(text):\n    return [int(part) for part in text.split(',')]\n\n" * 8
Json = dict[str, Any]


@pytest.fixture(scope="module")
def engines() -> Iterator[list[Serving]]:
    with serving() as one, serving() as other:
        yield [one, other]


class Relay:
    """Passes bytes to a server. ``after`` is how many bytes of answers come through before all connections break."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.after: int | None = None
        self.connections = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def kill(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        inner, outer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers |= {writer, outer}
        try:
            await asyncio.gather(self._pass(reader, outer, False), self._pass(inner, writer, True))
        except ConnectionError:
            pass
        finally:
            outer.close()
            writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answers: bool) -> None:
        while data := await reader.read(1 << 16):
            if answers and self.after is not None and b'"version"' not in data:
                data, self.after = data[: self.after], self.after - len(data)
                writer.write(data)
                if self.after <= 0:
                    await asyncio.sleep(0)
                    self.kill()
                    return
            else:
                writer.write(data)
            await writer.drain()
        writer.close()


class Front:
    """An ingress, a client, and the relays to the replicas."""

    def __init__(self, url: str, ingress: Ingress, session: aiohttp.ClientSession, relays: list[Relay]) -> None:
        self.url, self.ingress, self.session, self.relays = url, ingress, session, relays

    async def post(self, body: Json, path: str = "/v1/completions", **headers: str) -> tuple[int, Any, Any]:
        async with self.session.post(self.url + path, json=body, headers=headers) as response:
            return response.status, await response.json(), response.headers

    async def stream(self, body: Json, path: str = "/v1/completions") -> tuple[list[Json], str]:
        """The events' data, without the mark of the end, and the request's id."""
        async with self.session.post(self.url + path, json=body | {"stream": True}) as response:
            assert response.status == 200, await response.text()
            return frames(await response.text()), response.headers["X-Request-Id"]


def frames(text: str) -> list[Json]:
    """The events' data; where nothing came for a while, there are comments between them."""
    data = [frame.partition("data: ")[2] for frame in text.split("\n\n") if frame and not frame.startswith(":")]
    return [json.loads(each) for each in data if each != "[DONE]"]


@asynccontextmanager
async def front(engines: list[Serving], key: str | None = None, **server: Any) -> AsyncIterator[Front]:
    relays = [Relay(int(engine.url.rpartition(":")[2])) for engine in engines]
    fleet = Fleet(key=key)
    fleet.update({f"r{i}": {"url": await relay.start()} for i, relay in enumerate(relays)})
    ingress = Ingress(fleet, ServerSettings(access_log=False, **server), poll_s=0.05)
    async with (
        serving_ingress(ingress, bind("127.0.0.1", 0)) as url,
        aiohttp.ClientSession() as session,
    ):
        yield Front(url, ingress, session, relays)
    for relay in relays:
        relay.kill()


def said(events: list[Json]) -> dict[Any, Any]:
    """What the events say together, however it is divided."""
    made: dict[Any, Any] = {}
    for event in events:
        assert "error" not in event, event
        for choice in event.get("choices", ()):
            i = choice["index"]
            made[i, "text"] = made.get((i, "text"), "") + (choice.get("text") or "")
            for key, value in (choice.get("delta") or {}).items():
                made[i, key] = made.get((i, key), "") + value
            for key, value in (choice.get("logprobs") or {}).items():
                made[i, "logprobs", key] = made.get((i, "logprobs", key), []) + (value or [])
            if choice["finish_reason"]:
                assert (i, "finish") not in made
                made[i, "finish"] = choice["finish_reason"]
        if event.get("usage"):
            made["completion_tokens"] = event["usage"]["completion_tokens"]
        if event.get("type", "").endswith(".delta"):
            made["delta"] = made.get("delta", "") + event["delta"]
        if event.get("type") in ("response.completed", "response.incomplete"):
            made["output"] = [part["text"] for item in event["response"]["output"] for part in item["content"]]
    return made


BODIES = {
    "completions": ("/v1/completions", {"prompt": PROMPT, "n": 2, "logprobs": 2, "max_tokens": 40}),
    "plain": ("/v1/completions", {"prompt": PROMPT, "max_tokens": 60, "stream_options": {"include_usage": True}}),
    "tokens": ("/v1/completions", {"prompt": [*range(20, 300)], "max_tokens": 30, "temperature": 0}),
}


@pytest.mark.parametrize("kind", ["tokens", *slowly("completions", "plain")])
async def test_a_stream_goes_on_elsewhere_when_its_replica_is_lost(kind: str, engines: list[Serving]) -> None:
    path, body = BODIES[kind]
    body = body | {"seed": 7}
    async with front(engines) as whole:
        expected, _ = await whole.stream(body, path)
        async with whole.session.post(whole.url + path, json=body | {"stream": True}) as response:
            size = len(await response.read())
    for share in (0.1, 0.35, 0.6, 0.95):
        async with front(engines) as f:
            for relay in f.relays:
                relay.after = int(share * size)  # whichever is asked breaks, and after that the other, later
            f.relays[1].after = None
            f.ingress.fleet.router.report("r1", 5)  # so that the first one is asked
            events, id = await f.stream(body, path)
            assert said(events) == said(expected)
            assert f.ingress.counts.resumed == 1
            assert f.ingress.counts.lost == 0
            assert {event["id"] for event in events} == {f"cmpl-{id}"}
            assert len({event["created"] for event in events}) == 1


@pytest.mark.slow
async def test_a_conversation_and_a_response_go_on_elsewhere(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    bodies = {
        "/v1/chat/completions": {"messages": messages, "seed": 3, "max_tokens": 60, "logprobs": True, "n": 2},
        "/v1/responses": {"input": messages, "seed": 3, "max_output_tokens": 60},
    }
    with serving(model=chatty(tmp_path)) as one, serving(model=chatty(tmp_path)) as other:
        for path, body in bodies.items():
            async with front([one, other]) as whole:
                expected, _ = await whole.stream(body, path)
            async with front([one, other]) as f:
                f.relays[0].after = 9000
                f.ingress.fleet.router.report("r1", 5)
                events, id = await f.stream(body, path)
                assert f.ingress.counts.resumed == 1, path
                assert said(events) == said(expected)
                assert id in json.dumps(events[-1]), path
                if path == "/v1/responses":
                    assert [event["sequence_number"] for event in events] == list(range(len(events)))


async def test_an_answer_that_has_not_begun_comes_from_another_replica(engines: list[Serving]) -> None:
    async with front(engines) as f:
        f.ingress.fleet.router.report("r1", 5)
        f.relays[0].after = 10
        status, answer, headers = await f.post({"prompt": PROMPT, "max_tokens": 5})
        assert status == 200
        assert answer["id"] == f"cmpl-{headers['X-Request-Id']}"
        assert f.ingress.counts.retried == 1
        for relay in f.relays:
            relay.kill()
        status, answer, _ = await f.post({"prompt": PROMPT, "max_tokens": 5})
        assert (status, answer["error"]["type"]) == (503, "server_error")


@pytest.mark.slow
async def test_a_replica_that_answers_otherwise_ends_the_stream_with_one_error(engines: list[Serving]) -> None:
    with serving(model={"dtype": "float32"}) as different:
        async with front([engines[0], different]) as f:
            f.relays[0].after = 20_000
            f.ingress.fleet.router.report("r1", 5)
            body = {"prompt": PROMPT, "max_tokens": 200, "stream": True, "seed": 1, "logprobs": 1}
            async with f.session.post(f.url + "/v1/completions", json=body) as response:
                *_, last = frames(text := await response.text())
            assert last["error"]["type"] == "server_error"
            assert text.count('"error"') == 1
            assert text.endswith("data: [DONE]\n\n")
            assert f.ingress.counts.lost == 1


async def test_a_client_that_leaves_ends_its_request_at_the_replica(engines: list[Serving]) -> None:
    async with front(engines) as f:
        body = {"prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True, "stream": True}
        async with f.session.post(f.url + "/v1/completions", json=body) as response:
            await response.content.readany()
        await until(lambda: not f.ingress.open and not any(engine.engine_loop.num_open for engine in engines))
        assert f.ingress.counts.retried == f.ingress.counts.resumed == f.ingress.counts.lost == 0


async def test_a_client_that_cannot_be_written_to_is_no_lost_replica(
    engines: list[Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*args: object) -> None:
        raise aiohttp.ClientConnectionResetError

    monkeypatch.setattr("infer_router.exchange.write", fail)
    async with front(engines) as f:
        with pytest.raises(aiohttp.ClientError):
            await f.stream({"prompt": PROMPT, "max_tokens": 20})
        counts = f.ingress.counts
        assert counts.requests == 1
        assert counts.retried == counts.resumed == counts.lost == 0


async def test_the_whole_speaks_as_one(engines: list[Serving]) -> None:
    async with front(engines) as f:
        get = f.session.get
        for path in ("/health", "/ready", "/v1/models", "/openapi.json"):
            async with get(f.url + path) as response:
                assert response.status == 200, path
        async with get(f.url + "/metrics") as response:
            families = {each.name: each for each in text_string_to_metric_families(await response.text())}
        assert {sample.labels["replica"] for sample in families["infer_passes"].samples} == {"r0", "r1"}
        assert families["infer_ingress_replicas"].samples[0].value == 2
        for path in ("/ray/state", "/console", "/nothing"):
            async with get(f.url + path) as response:
                assert (response.status, (await response.json())["error"]["type"]) == (404, "invalid_request_error")
        status, answer, _ = await f.post({"prompt": 3.5})
        assert (status, answer["error"]["param"]) == (400, "prompt")
        f.ingress.fleet.update({})
        async with get(f.url + "/health") as health, get(f.url + "/ready") as ready:
            assert health.status == ready.status == 503


async def test_keys_mean_what_they_mean_at_a_replica(engines: list[Serving]) -> None:
    async with front(engines, api_keys=["one", "two"]) as f:
        for path, status in (("/ready", 200), ("/v1/models", 401), ("/metrics", 401)):
            async with f.session.get(f.url + path) as response:
                assert response.status == status, path
        for key, status in (("two", 200), ("three", 401)):
            got, _, _ = await f.post({"prompt": "x"}, Authorization=f"Bearer {key}")
            assert got == status


async def test_what_an_ingress_has_stored_is_whose_key_was_shown(tmp_path: Path) -> None:
    """Wherever it is asked for, and whatever the client says of itself."""
    server = {"api_keys": f"{INGRESS}k,c", "agents": {"store": str(tmp_path / "responses.db")}, "access_log": False}
    with (
        serving(model=chatty(tmp_path), server=server) as one,
        serving(model=chatty(tmp_path), server=server) as other,
    ):
        async with front([one, other], f"{INGRESS}k", api_keys="a,b") as f:
            body = {"input": "x", "max_output_tokens": 1, "store": True}
            _, made, _ = await f.post(body, "/v1/responses", Authorization="Bearer a")
            path = f"/v1/responses/{made['id']}"
            shown = {"Authorization": "Bearer a"}
            owner = Keys([SecretStr("a")]).owner(make_mocked_request("GET", "/", shown))
            for url, key, told, status in (
                (f.url, "a", owner, 200),
                (f.url, "a", "", 200),
                (f.url, "a", "other", 200),
                (f.url, "b", owner, 404),
                (one.url, f"{INGRESS}k", owner, 200),
                (one.url, f"{INGRESS}k", "", 404),
                (one.url, "c", owner, 404),
            ):
                headers = {"Authorization": f"Bearer {key}"} | ({OWNER: told} if told else {})
                async with f.session.get(url + path, headers=headers) as response:
                    assert response.status == status, (url, key, told)


class Hearing(Fleet):
    """Says when a replica has told of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.heard = asyncio.Event()

    def report(self, name: str, state: Mapping[str, Any]) -> None:
        super().report(name, state)
        self.heard.set()


async def test_equal_beginnings_go_to_one_replica_unless_their_salts_differ(engines: list[Serving]) -> None:
    async with front(engines) as f:
        async with asyncio.TaskGroup() as group:
            for i in range(4):
                group.create_task(f.post({"prompt": PROMPT + str(i), "max_tokens": 4, "cache_salt": "s"}))
        assert sorted(relay.connections > 1 for relay in f.relays) == [False, True]
        assert f.ingress.counts.known_blocks == 3 * (f.ingress.counts.asked_blocks // 4)
        known = f.ingress.counts.known_blocks
        await f.post({"prompt": PROMPT, "max_tokens": 4, "cache_salt": "t"})
        assert f.ingress.counts.known_blocks == known
        fleet = Hearing()
        other = Ingress(fleet, f.ingress.server, poll_s=0.05)  # another ingress, which hears it from the replicas
        async with other, asyncio.timeout(HANG_S):
            fleet.update({name: {"url": url} for name, url in f.ingress.fleet.urls.items()})
            chain = chain_of(PROMPT.encode(), "s")
            while (choice := fleet.router.choose(chain)) is None or choice.known < len(chain):
                fleet.heard.clear()
                await fleet.heard.wait()
        assert f.ingress.fleet.router.choose(chain) == choice


async def test_an_ingress_speaks_as_anthropic_does_where_that_is_spoken(tmp_path: Path) -> None:
    """Its own errors have the shape and the headers, and a lost stream ends with an error that has a name: clients skip
    events without one. What has been sent is not sent again, whether there is a seed or not."""
    path = "/v1/messages"
    body: Json = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 60}
    with serving(model=chatty(tmp_path)) as one, serving(model=chatty(tmp_path)) as other:
        for more in ({}, {"seed": 7}):
            async with front([one, other]) as f:
                f.relays[0].after = 2500
                f.ingress.fleet.router.report("r1", 5)
                async with f.session.post(f.url + path, json=body | more | {"stream": True}) as response:
                    *told, last, end = (await response.text()).split("\n\n")
                assert (f.ingress.counts.resumed, f.ingress.counts.lost, end) == (0, 1, "")
                assert told[0].startswith("event: message_start\n")
                assert sum(each.startswith("event: message_start") for each in told) == 1
                name, _, data = last.partition("\ndata: ")
                assert (name, json.loads(data)["error"]["type"]) == ("event: error", "api_error")
        async with front([one, other], api_keys=["k"]) as f:
            status, answer, headers = await f.post(body, path)
            assert (status, answer["type"], answer["error"]["type"]) == (401, "error", "authentication_error")
            assert headers["Request-Id"] == headers["X-Request-Id"]
            status, answer, _ = await f.post(body, "/v1/chat/completions")
            assert (status, answer["error"]["type"]) == (401, "authentication_error")
            assert "type" not in answer


async def test_a_request_without_a_seed_gets_one_so_that_it_can_go_on(engines: list[Serving]) -> None:
    async with front(engines) as f:
        f.relays[0].after = 6000
        f.ingress.fleet.router.report("r1", 5)
        events, _ = await f.stream({"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True})
        assert f.ingress.counts.resumed == 1
        assert said(events)[0, "finish"] == "length"
