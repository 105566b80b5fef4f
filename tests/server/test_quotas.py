"""Quotas of requests and tokens per minute, and limits of time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from tests.serving import Body, Running, holding, running, until

import infer_server.service
from infer.contracts.request import Event, Request
from infer_llguidance.backend import Matcher
from infer_server.door import AsyncDoor
from infer_server.http import bodies
from infer_server.http.keys import Keys
from infer_server.http.quotas import MOST_OWNERS, Bucket, Quotas, RateLimitError

ENGINE = {"max_batch_size": 2, "max_seq_len": 512}
BODY: Body = {"prompt": [5, 6, 7], "max_tokens": 2, "temperature": 0, "ignore_eos": True}


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the servers' quotas."""
    clock = Clock()
    monkeypatch.setattr(infer_server.service, "Quotas", partial(Quotas, clock=clock))
    return clock


async def asked(server: Running, body: Body = BODY, key: str = "a", path: str = "/v1/completions") -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key}"}
    async with server.session.post(server.url + path, json=body, headers=headers) as response:
        return response.status, response.headers.get("Retry-After") or await response.json()


def test_a_bucket_fills_evenly_and_may_be_in_debt() -> None:
    clock = Clock()
    bucket = Bucket(60, clock)
    bucket.charge("a", 90)
    assert (bucket.level("a"), bucket.level("b"), bucket.wait_s("a", 1)) == (-30, 60, 31)
    clock.now += 31
    assert (bucket.level("a"), bucket.wait_s("a", 1)) == (1, 0)
    clock.now += 1000
    assert bucket.level("a") == 60


def test_owners_are_remembered_within_bounds_and_those_in_debt_are() -> None:
    bucket = Bucket(60, Clock())
    bucket.charge("debtor", 100)
    for i in range(2 * MOST_OWNERS):
        bucket.charge(str(i), 1 + i % 7)
        assert len(bucket) <= MOST_OWNERS
    assert bucket.level("debtor") == -40


def test_of_many_owners_with_as_much_left_only_some_are_forgotten() -> None:
    bucket = Bucket(60, Clock())
    for i in range(MOST_OWNERS + 1):
        bucket.charge(str(i), 1)
    assert len(bucket) == MOST_OWNERS // 2


def test_what_is_refused_counts_for_nothing() -> None:
    clock = Clock()
    quotas = Quotas(2, 10, clock)
    quotas.charge("a", 30)
    for _ in range(5):
        with pytest.raises(RateLimitError, match=r"10 tokens per minute.*in 126 s"):
            quotas.admit("a")
    clock.now += 126
    for _ in range(2):
        quotas.admit("a")
    for _ in range(5):
        with pytest.raises(RateLimitError, match=r"2 requests per minute.*in 30 s"):
            quotas.admit("a")
    clock.now += 30
    quotas.admit("a")


async def test_each_key_has_its_own_quota_of_requests(clock: Clock) -> None:
    server_settings = {"api_keys": "a,b", "requests_per_minute": 2, "access_log": False}
    async with running(engine=ENGINE, server=server_settings) as server:
        for _ in range(3):
            assert (await asked(server, key="wrong"))[0] == 401
        for path in ("/tokenize", "/tokenize", "/tokenize"):
            assert (await asked(server, {"prompt": "a"}, path=path))[0] == 200
        assert [(await asked(server))[0] for _ in range(2)] == [200, 200]
        for _ in range(3):
            assert await asked(server) == (429, "30")
        status = await server.session.post(
            server.url + "/v1/chat/completions", json=BODY, headers={"Authorization": "Bearer a"}
        )
        assert (status.status, (await status.json())["error"]) == (
            429,
            {
                "message": "The quota of 2 requests per minute is used up (server.requests_per_minute). "
                "Try again in 30 s.",
                "type": "requests",
                "param": None,
                "code": "rate_limit_exceeded",
            },
        )
        status = await server.session.post(server.url + "/v1/messages", json=BODY, headers={"X-Api-Key": "a"})
        assert (status.status, (await status.json())["error"]["type"]) == (429, "rate_limit_error")
        assert (await asked(server, key="b"))[0] == 200
        clock.now += 30
        assert (await asked(server))[0] == 200


async def test_no_body_is_read_of_who_has_used_up_a_quota(clock: Clock) -> None:
    """And what is refused for want of a place is not counted."""
    engine = {"max_batch_size": 1, "max_waiting_requests": 0, "max_seq_len": 128}
    async with running(engine=engine, server={"requests_per_minute": 2, "access_log": False}) as server:
        with holding(0):
            first = asyncio.create_task(server.post(BODY))
            await until(lambda: server.engine_loop.num_open == 1)
            for _ in range(3):
                assert (await server.post(BODY))[0] == 503
        assert (await first)[0] == 200
        assert (await server.post(BODY))[0] == 200
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: 1000\r\n\r\n".encode())  # of which none comes
        assert b" 429 " in await reader.readline()
        writer.close()


async def test_what_is_refused_for_want_of_room_counts_for_nobody(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though that turns out when its body arrives."""
    large = BODY | {"prompt": [5] * 12_000}
    async with running(engine=ENGINE, server={"requests_per_minute": 1, "access_log": False}) as server:
        with monkeypatch.context() as patch:
            patch.setattr(bodies, "INLINE_BYTES", -(1 << 40))
            for _ in range(3):
                assert (await server.post(large))[0] == 503
        assert (await server.post(large))[0] == 400, "which counts: it is too long"
        assert (await server.post(BODY))[0] == 429


async def test_all_prompts_of_a_request_have_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though not all are given to the engine at once: what comes later has less time."""
    left: list[float] = []
    stream: Callable[..., Any] = AsyncDoor.stream

    def watched(door: AsyncDoor, *requests: Any, **how: Any) -> Any:
        left.extend(request.timeout_s for request in requests)
        return stream(door, *requests, **how)

    monkeypatch.setattr(AsyncDoor, "stream", watched)
    questions = {str(i): {"type": "yes_no", "instructions": f"{i}?"} for i in range(6)}
    async with running(engine=ENGINE | {"max_batch_size": 1}, server={"request_timeout_s": 600}) as server:
        assert (await server.post({"state": "a", "questions": questions}, "/v1/systemone"))[0] == 200
    assert len(left) == 6
    assert left[0] == 600 > left[1]
    assert left == sorted(left, reverse=True)


async def test_tokens_count_once_for_all_answers_to_a_prompt(clock: Clock) -> None:
    """Without keys, all clients share a quota."""
    async with running(engine=ENGINE, server={"tokens_per_minute": 60, "access_log": False}) as server:
        for stream in (False, True):
            assert await charged(server, BODY | {"n": 3, "stream": stream}) == 3 + 3 * 2
        clock.now += 9
        assert (await server.post({"prompt": "a", "max_tokens": "many"}))[0] == 400
        clock.now += 9
        assert (await server.post(BODY | {"prompt": [5] * 100, "max_tokens": 1}))[0] == 200
        status, answer, headers = await server.post(BODY)
        assert (status, answer["error"]["type"], headers["Retry-After"]) == (429, "tokens", "42")


async def charged(server: Running, body: Body) -> int:
    """How many tokens are charged for a request."""
    tokens: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        charge = Quotas.charge

        def watched(quotas: Quotas, owner: str, count: int) -> None:
            tokens.append(count)
            charge(quotas, owner, count)

        patch.setattr(Quotas, "charge", watched)
        async with server.session.post(server.url + "/v1/completions", json=body) as response:
            assert response.status == 200
            await response.read()
    return sum(tokens)


async def test_a_client_that_hangs_up_pays_for_what_was_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    paid: list[tuple[str, int]] = []
    monkeypatch.setattr(Quotas, "charge", lambda quotas, owner, tokens: paid.append((owner, tokens)))
    chunked = {"max_batch_size": 1, "max_seq_len": 512, "prefill_chunk_size": 4}
    async with running(engine=chunked) as server:
        inbox = server.engine_loop._engine._inbox

        async def left(body: Body, steps: int) -> None:
            """Ask, and leave after so many steps, while the next one runs."""
            with holding(steps) as held:
                task = asyncio.create_task(server.post(BODY | body))
                await until(held.is_set)
                await until(lambda: len(paid) == max(0, steps - 1))
                task.cancel()
                await until(lambda: not inbox.empty())
            await server.idle()
            await until(lambda: len(paid) == max(1, steps))

        await left({"prompt": [5] * 30, "max_tokens": 400}, 0)
        assert paid == [("", 30)], "its prompt, which was being computed"
        paid.clear()
        await left({"prompt": [5] * 6, "max_tokens": 400}, 4)
        assert paid == [("", 7), ("", 1), ("", 1), ("", 1)]


async def test_a_prompt_costs_if_it_was_computed_however_its_answer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    paid: list[tuple[str, int]] = []
    monkeypatch.setattr(Quotas, "charge", lambda quotas, owner, tokens: paid.append((owner, tokens)))

    def compute(matcher: Matcher) -> None:
        raise RuntimeError("too complex")

    monkeypatch.setattr(Matcher, "compute", compute)
    async with running(engine=ENGINE) as server:
        body = BODY | {"prompt": [5] * 40, "structured_outputs": {"regex": "a+"}, "ignore_eos": False}
        status, answer, _ = await server.post(body)
        assert (status, answer["error"]["code"]) != (200, None)
        assert paid == [("", 40)]


async def test_what_ends_while_it_waits_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the answers to a prompt pay for it once, though the first of them has gone."""
    paid: list[tuple[str, int]] = []
    monkeypatch.setattr(Quotas, "charge", lambda quotas, owner, tokens: paid.append((owner, tokens)))
    async with running(engine=ENGINE | {"max_batch_size": 1}) as server:
        with holding(0):
            first = asyncio.create_task(server.post(BODY))
            await until(lambda: server.engine_loop.num_open == 1)
            late = asyncio.create_task(server.post(BODY | {"prompt": [5] * 300, "timeout": 1e-9}))
            await until(lambda: server.engine_loop.num_open == 2)
        assert ((await first)[0], (await late)[0]) == (200, 504)
        assert sum(tokens for _, tokens in paid) == 3 + 2


def test_whichever_answer_is_computed_pays_for_the_prompt() -> None:
    paid: list[int] = []

    class Taken:
        def submit_all(self, requests: list[Request], post: object) -> int:
            return len(requests)

        def abort(self, id: str) -> None:
            pass

    async def run() -> None:
        door = AsyncDoor(Taken(), lambda key, tokens: paid.append(tokens))  # type: ignore[arg-type]
        stream = door.stream(*(Request((1,) * 9, id=id, group="g") for id in "abc"))
        read = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        door._deliver([Event("a", finish_reason="timeout"), Event("b", (7,)), Event("c", (7,))])
        assert (await read).request_id == "a"
        await stream.aclose()
        door._deliver([Event(id, finish_reason="abort", started=True) for id in "bc"])
        assert not door._debts

    asyncio.run(run())
    assert paid == [10, 1]


async def test_the_consoles_session_counts_for_its_key(clock: Clock) -> None:
    server_settings = {"api_keys": "a,b", "requests_per_minute": 1, "access_log": False}
    async with running(engine=ENGINE, server=server_settings) as server:
        page = {"X-Infer-Console": "1"}
        login = await server.session.post(server.url + "/console/api/login", json={"key": "a"}, headers=page)
        assert login.status == 204
        session = {"Cookie": "; ".join(f"{name}={morsel.value}" for name, morsel in login.cookies.items())} | page

        async def on_page() -> int:
            response = await server.session.post(server.url + "/v1/completions", json=BODY, headers=session)
            return response.status

        assert await on_page() == 200
        assert await on_page() == 429
        assert (await asked(server))[0] == 429
        assert (await asked(server, key="b"))[0] == 200


async def test_who_logs_out_while_their_request_arrives_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    paid: list[str] = []
    read = asyncio.Event()
    monkeypatch.setattr(Quotas, "admit", lambda quotas, owner: read.set())
    monkeypatch.setattr(Quotas, "charge", lambda quotas, owner, tokens: paid.append(owner))
    async with running(engine=ENGINE, server={"api_keys": "a,b", "access_log": False}) as server:
        page = {"X-Infer-Console": "1"}
        login = await server.session.post(server.url + "/console/api/login", json={"key": "a"}, headers=page)
        cookie = "; ".join(f"{name}={morsel.value}" for name, morsel in login.cookies.items())
        address = server.url.removeprefix("http://")
        reader, writer = await asyncio.open_connection(*address.split(":"))
        body = json.dumps(BODY)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}X-Infer-Console: 1\r\nCookie: {cookie}\r\nContent-Length: {len(body)}\r\n\r\n".encode())
        await read.wait()
        session = page | {"Cookie": cookie}
        assert (await server.session.post(server.url + "/console/api/logout", headers=session)).status == 204
        writer.write(body.encode())
        assert b" 200 " in await reader.readline()
        writer.close()
    assert set(paid) == {Keys.owner_of("a")}


async def test_a_timeout_ends_an_answer_with_504_and_a_stream_with_an_error() -> None:
    async with running(engine=ENGINE) as server:
        for path, body in (
            ("/v1/completions", BODY),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ("/v1/responses", {"input": "a"}),
        ):
            status, answer, _ = await server.post(body | {"timeout": 1e-9}, path)
            assert (status, answer["error"]) == (
                504,
                {
                    "message": "The request has not ended within its 1e-09 seconds (timeout).",
                    "type": "timeout_error",
                    "param": None,
                    "code": "timeout",
                },
            ), path
        assert server.engine_loop.num_open == 0
        assert (await server.post(BODY | {"timeout": 600}))[0] == 200
        for bad in (0, -1, 1e9, "soon"):
            status, answer, _ = await server.post(BODY | {"timeout": bad})
            assert (status, answer["error"]["param"]) == (400, "timeout")
        with holding(0):
            first = asyncio.create_task(server.post(BODY))
            await until(lambda: server.engine_loop.num_open == 1)
            response = await server.session.post(
                server.url + "/v1/completions", json=BODY | {"stream": True, "timeout": 1e-9}
            )
            assert response.status == 200
        frames = [line for line in (await response.text()).split("\n\n") if line.startswith("data: ")]
        assert frames[1:] == ["data: [DONE]"]
        frame = json.loads(frames[0].removeprefix("data: "))
        assert (frame["error"]["type"], frame["error"]["code"]) == ("timeout_error", "timeout")
        assert (await first)[0] == 200


async def test_the_server_limits_all_requests_and_a_client_can_only_ask_for_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[float | None] = []
    stream: Callable[..., Any] = AsyncDoor.stream

    def watched(door: AsyncDoor, *requests: Any, **how: Any) -> Any:
        seen.extend(request.timeout_s for request in requests)
        return stream(door, *requests, **how)

    monkeypatch.setattr(AsyncDoor, "stream", watched)
    async with running(engine=ENGINE, server={"request_timeout_s": 90, "access_log": False}) as server:
        for body in (BODY, BODY | {"timeout": 30}, BODY | {"timeout": 600}):
            assert (await server.post(body))[0] == 200
        assert (await server.post({"input": "a"}, "/v1/embeddings"))[0] == 200
    assert seen == [90, 30, 90, 90]
