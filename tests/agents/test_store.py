"""What /v1/responses keeps, and goes on from."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError
from tests.puppet import Puppets, say
from tests.server.test_harmony import puppet
from tests.serving import HANG_S, TEMPLATE, Body, Running, holding, running, until

from infer.errors import SettingsError
from infer_agents import background, records, response_bodies, responses
from infer_agents.continuing import following, unpacked
from infer_agents.store import FullError, Record, Store, StoreError, TooLargeError, open_store
from infer_server import app
from infer_server.http import access, parsing
from infer_server.input_items import conversation

ENGINE = {"max_seq_len": 1024}
LOOK: Any = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call><|return|>'


def asking(server: Running, key: str = "unused") -> AsyncOpenAI:
    return AsyncOpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0)


def settings(folder: Path, **more: Any) -> Body:
    model = puppet(folder)
    (folder / "template.jinja").write_text(TEMPLATE)
    agents = {"store": str(folder / "store" / "responses.db"), **more.pop("agents", {})}
    server = {"access_log": False, "served_model_name": "demo", "agents": agents, **more}
    return {"model": model, "engine": ENGINE, "server": server}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Running]:
    async with running([Puppets()], **settings(tmp_path)) as made:
        yield made


async def told(server: Running, asked: Body, text: str) -> int:
    """Have the model answer ``asked`` with ``text``. Returns how many tokens the prompt has."""
    status, prompt, _ = await server.post(asked, "/v1/responses/input_tokens")
    assert status == 200, prompt
    await say(server, prompt["input_tokens"], text)
    return int(prompt["input_tokens"])


async def respond(server: Running, text: str, *, stream: bool = False, **asked: Any) -> Any:
    """The response to ``asked``, which is ``text``."""
    await told(server, asked, text)
    async with asking(server) as client:
        if not stream:
            return await client.responses.create(model="demo", **asked)
        async with await client.responses.create(model="demo", stream=True, **asked) as events:
            return [event async for event in events][-1].response


def stored(folder: Path) -> Store:
    return Store(folder / "store" / "responses.db", max_bytes=1 << 20, max_age_s=1e9)


@pytest.mark.parametrize("stream", [False, True])
async def test_three_turns_with_tools_go_on_from_the_tokens_that_were_computed(
    server: Running, tmp_path: Path, stream: bool
) -> None:
    asked: Body = {"tools": [LOOK], "instructions": "Be brief.", "temperature": 0}
    long = "What is at the place that I have told you about? " * 8
    first = await respond(server, "<think>hm</think>  I look. " + CALL, input=long, stream=stream, **asked)
    assert first.to_dict()["store"] is True
    output = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "a tree"}
    second = await respond(
        server, "A  tree.<|return|>", input=[output], previous_response_id=first.id, stream=stream, **asked
    )
    assert second.previous_response_id == first.id
    third = await respond(
        server, "Green.<|return|>", input="Which color?", previous_response_id=second.id, stream=stream, **asked
    )
    assert third.output_text == "Green."
    with_store = stored(tmp_path)
    before: list[int] = []
    for response in (first, second, third):
        record = with_store.get(with_store.owner(""), response.id)
        assert record is not None
        tokens = unpacked(record.tokens)
        assert tokens[: len(before)] == before, "a prompt begins with the tokens of the turn before it"
        cached = response.usage.input_tokens_details.cached_tokens
        assert cached >= len(before) - 17, "all but the last page is found in the cache"
        before = tokens
    with_store.close()
    _, texts, _ = await server.post({"tokens": before}, "/detokenize")
    assert texts["prompt"] == (
        TEMPLATE_BEGIN(long) + '<think>hm</think>  I look. <tool_call>{"name": "look", "arguments": {}}</tool_call>'
        "\n# tool: a tree\n# assistant: A  tree.\n# user: Which color?\n# assistant: Green."
    )


def TEMPLATE_BEGIN(text: str) -> str:  # noqa: N802
    shown = '{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}'
    return (
        f'<|tools|>{shown}\nWrite <tool_call>{{"name": ..., "arguments": ...}}</tool_call> to call one.\n'
        f"# system: Be brief.\n# user: {text}\n# assistant: "
    )


async def test_a_changed_template_leaves_old_turns_as_they_were(tmp_path: Path) -> None:
    made = settings(tmp_path)
    async with running([Puppets()], **made) as server:
        first = await respond(server, "One.<|return|>", input="first")
    (tmp_path / "template.jinja").write_text(TEMPLATE.replace("'# '", "'## '"))
    async with running([Puppets()], **made) as server:
        second = await respond(server, "Two.<|return|>", input="second", previous_response_id=first.id)
    store = stored(tmp_path)
    record = store.get(store.owner(""), second.id)
    store.close()
    assert record is not None
    async with running([Puppets()], **made) as server:
        _, texts, _ = await server.post({"tokens": unpacked(record.tokens)}, "/detokenize")
    assert texts["prompt"].startswith("# user: first\n# assistant: One.\n## user: second\n")


async def test_other_instructions_take_the_place_of_the_old_ones(server: Running) -> None:
    first = await respond(server, "One.<|return|>", input="first", instructions="Be brief.")
    asked = {"input": "second", "previous_response_id": first.id}
    whole = [{"role": "user", "content": "first"}, {"role": "assistant", "content": "One."}]
    whole.append({"role": "user", "content": "second"})
    for instructions in ({}, {"instructions": "Be long."}):
        _, count, _ = await server.post(asked | instructions, "/v1/responses/input_tokens")
        _, expected, _ = await server.post({"input": whole, **instructions}, "/v1/responses/input_tokens")
        assert count == expected


async def test_a_conversation_is_no_larger_than_a_body_may_be(tmp_path: Path) -> None:
    async with running([Puppets()], **settings(tmp_path, max_body_bytes=2000)) as server:
        first = await respond(server, "One.<|return|>", input="x" * 800)
        second = await respond(server, "Two.<|return|>", input="y" * 400, previous_response_id=first.id)
        status, answer, _ = await server.post({"input": "z" * 800, "previous_response_id": second.id}, "/v1/responses")
    assert status == 400
    assert "server.max_body_bytes allows 2000" in answer["error"]["message"]
    assert "Begin a new one" in answer["error"]["message"]
    assert answer["error"]["param"] == "previous_response_id"


async def test_a_conversation_holds_no_more_values_than_a_body_may(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parsing, "MAX_VALUES", 100)
    asked: Body = {"input": [{"role": "user", "content": "x"}] * 20, "max_output_tokens": 1}
    status, first, _ = await server.post(asked, "/v1/responses")
    assert status == 200
    status, answer, _ = await server.post(asked | {"previous_response_id": first["id"]}, "/v1/responses")
    assert (status, answer["error"]["param"]) == (400, "previous_response_id")
    assert "more than 100 values" in answer["error"]["message"]


@pytest.mark.slow
async def test_a_long_conversation_is_read_in_another_process(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    long = {"type": "input_text", "text": "x", "annotations": ["y" * 9000]}
    first = await respond(server, "One.<|return|>", input=[{"role": "user", "content": [long]}] * 2)
    read: list[int] = []

    def counted(items: Any) -> Any:
        read.append(len(items))
        return conversation(items)

    monkeypatch.setattr(response_bodies, "conversation", counted)
    second = await respond(server, "Two.<|return|>", input="second", previous_response_id=first.id)
    assert second.output_text == "Two."
    assert set(read) == {1}, "only the input that came just now"


async def test_log_probabilities_are_no_part_of_a_conversation(server: Running, tmp_path: Path) -> None:
    first = await respond(server, "One.<|return|>", input="first", top_logprobs=5)
    assert first.output[0].content[0].logprobs
    store = stored(tmp_path)
    found = store.get(store.owner(""), first.id)
    store.close()
    assert found is not None
    assert b"logprob" in found.response
    assert b"logprob" not in found.output
    assert (await respond(server, "Two.<|return|>", input="x", previous_response_id=first.id)).output_text == "Two."


async def test_a_response_is_got_listed_and_deleted(server: Running) -> None:
    first = await respond(server, "One.<|return|>", input="first", metadata={"a": "b"})
    second = await respond(server, "Two.<|return|>", input="second", previous_response_id=first.id)
    async with asking(server) as client:
        assert (await client.responses.retrieve(first.id)).to_dict() == first.to_dict()
        page = await client.responses.input_items.list(second.id, order="asc", limit=2)
        assert page.has_more
        items = [item async for item in page]
        texts = [item.to_dict()["content"][0]["text"] for item in items]  # type: ignore[index]
        assert texts == ["first", "One.", "second"]
        assert len({item.id for item in items}) == 3
        newest = await client.responses.input_items.list(second.id, limit=1)
        assert newest.data[0].id == items[-1].id
        await client.responses.delete(first.id)
        for gone in (client.responses.retrieve(first.id), client.responses.delete(first.id)):
            with pytest.raises(NotFoundError, match=f"Response with id '{first.id}' not found"):
                await gone
        with pytest.raises(BadRequestError, match="Previous response with id") as refused:
            await client.responses.create(model="demo", input="x", previous_response_id=first.id)
        assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")
        third = await respond(server, "Three.<|return|>", input="third", previous_response_id=second.id)
        assert third.output_text == "Three.", "what follows a deleted response is whole"
        for path, param in (
            ("?stream=true", "stream"),
            ("?starting_after=1", "starting_after"),
            ("/input_items?limit=0", "limit"),
            ("/input_items?limit=" + "1" * 5000, "limit"),
            ("/input_items?after=x", "after"),
        ):
            status, answer = await server.get(f"/v1/responses/{second.id}{path}")
            assert (status, answer["error"]["param"]) == (400, param)
    status, deleted = await _delete(server, second.id)
    assert (status, deleted) == (200, {"id": second.id, "object": "response", "deleted": True})


async def test_answers_do_not_wait_while_the_items_of_others_are_listed(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await respond(server, "One.<|return|>", input="first")
    entered, go, list_items = threading.Event(), threading.Event(), responses._shown_items

    def held(*given: Any) -> Any:
        entered.set()
        assert go.wait(HANG_S)
        return list_items(*given)

    monkeypatch.setattr(responses, "_shown_items", held)
    listing = asyncio.create_task(server.get(f"/v1/responses/{first.id}/input_items"))
    await until(entered.is_set)
    second = await respond(server, "Two.<|return|>", input="second", previous_response_id=first.id)
    assert second.output_text == "Two."
    go.set()
    assert (await listing)[0] == 200


async def _delete(server: Running, id: str) -> tuple[int, Any]:
    async with server.session.delete(f"{server.url}/v1/responses/{id}") as response:
        return response.status, await response.json()


async def test_what_is_not_to_be_stored_is_not(tmp_path: Path) -> None:
    async with running([Puppets()], **settings(tmp_path, agents={"store_default": False})) as server:
        for more, kept in (
            ({}, False),
            ({"store": False}, False),
            ({"store": True}, True),
            ({"background": True}, True),
            ({"background": False}, False),
        ):
            _, answer, _ = await server.post({"input": "x", "max_output_tokens": 1, **more}, "/v1/responses")
            assert answer["store"] is kept
            assert (await server.get(f"/v1/responses/{answer['id']}"))[0] == (200 if kept else 404)


@pytest.mark.parametrize("store", [False, True])
async def test_the_vocabulary_is_read_at_the_start_in_a_thread_and_for_a_store_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: bool
) -> None:
    threads: list[str] = []
    vocabulary = records._vocabulary

    def read(served: Any) -> str:
        threads.append(threading.current_thread().name)
        return vocabulary(served)

    monkeypatch.setattr(records, "_vocabulary", read)
    made = settings(tmp_path, **({} if store else {"agents": {"store_max_bytes": 0}}))
    async with running([Puppets()], **made) as server:
        for _ in range(2):
            assert (await server.post({"input": "x", "max_output_tokens": 1}, "/v1/responses"))[0] == 200
    assert threads == (["infer-store_0"] if store else [])


async def test_a_response_belongs_to_the_key_that_asked(tmp_path: Path) -> None:
    async with (
        running([Puppets()], **settings(tmp_path, api_keys=["a", "b"])) as server,
        asking(server, "a") as own,
        asking(server, "b") as other,
    ):
        made = await own.responses.create(model="demo", input="x", max_output_tokens=1)
        assert (await own.responses.retrieve(made.id)).id == made.id
        for refused in (
            other.responses.retrieve(made.id),
            other.responses.delete(made.id),
            other.responses.cancel(made.id),
            other.responses.input_items.list(made.id),
        ):
            with pytest.raises(NotFoundError):
                await refused
        with pytest.raises(BadRequestError, match="not found"):
            await other.responses.create(model="demo", input="x", previous_response_id=made.id)
        assert (await own.responses.retrieve(made.id)).id == made.id
    data = b"".join(path.read_bytes() for path in (tmp_path / "store").iterdir())
    assert data
    for path in (tmp_path / "store").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def _ended(client: AsyncOpenAI, id: str) -> Any:
    while (got := await client.responses.retrieve(id)).status in ("queued", "in_progress"):
        await asyncio.sleep(0)
    return got


async def test_a_response_in_the_background(server: Running) -> None:
    await told(server, {"input": "first"}, "One.<|return|>")
    async with asking(server) as client:
        begun = await client.responses.create(model="demo", input="first", background=True)
        assert (begun.status, begun.background) == ("queued", True)
        ended = await _ended(client, begun.id)
        assert (ended.status, ended.output_text) == ("completed", "One.")
        assert await client.responses.cancel(begun.id) == ended
    second = await respond(server, "Two.<|return|>", input="second", previous_response_id=begun.id)
    async with asking(server) as client:
        with pytest.raises(BadRequestError, match="does not run in the background"):
            await client.responses.cancel(second.id)


async def test_a_client_that_leaves_at_once_leaves_a_response_that_is_computed(
    server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, entered, go = Store.put, threading.Event(), threading.Event()
    ids: list[str] = []

    def held(store: Store, owner: bytes, record: Record) -> None:
        ids.append(record.id)
        entered.set()
        assert go.wait(HANG_S)
        put(store, owner, record)

    monkeypatch.setattr(Store, "put", held)
    begin, left = background.Background.begin, asyncio.Event()

    async def begun(*given: Any) -> Any:
        try:
            return await begin(*given)
        finally:
            left.set()

    monkeypatch.setattr(background.Background, "begin", begun)
    post = asyncio.create_task(server.post({"input": "x", "background": True}, "/v1/responses"))
    await asyncio.to_thread(entered.wait, HANG_S)
    post.cancel()
    await left.wait()
    go.set()
    async with asking(server) as client:
        assert (await _ended(client, ids[0])).status == "completed"


async def test_responses_in_the_background_leave_places_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "MOST_BACKGROUND", 3)
    made = settings(tmp_path) | {"engine": ENGINE | {"max_batch_size": 1}}
    asked = {"input": "x", "background": True}
    async with running([Puppets()], **made) as server:
        with holding(0):
            answers = await asyncio.gather(*(server.post(asked, "/v1/responses") for _ in range(4)))
            begun = [answer["id"] for status, answer, _ in answers if status == 200]
            assert sorted(status for status, _, _ in answers) == [200, 200, 200, 503]
            await until(lambda: server.engine_loop.num_open > 0)
            got = [(await server.get(f"/v1/responses/{id}"))[1]["status"] for id in begun]
            assert sorted(got) == ["in_progress", "queued", "queued"]
            assert server.engine_loop.num_open == 1
            assert (await server.get("/ray/state"))[1]["open"] == 3, "it is not idle between two of them"
        async with asking(server) as client:
            assert [(await _ended(client, id)).status for id in begun] == ["completed"] * 3


async def test_a_server_that_ends_waits_for_responses_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[access.Inside] = []

    class Known(access.Inside):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr(app, "Inside", Known)
    async with running([Puppets()], **settings(tmp_path)) as server, asking(server) as client:
        with holding(0):
            begun = await client.responses.create(model="demo", input="x", background=True)
            assert made[0].count == 1
            leaving = asyncio.create_task(made[0].leave())
        await leaving
        assert (await client.responses.retrieve(begun.id)).status == "completed"


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_a_response_in_the_background_is_cancelled(
    server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    """Here, or by a server that shares the file."""
    monkeypatch.setattr(background, "WATCH_S", 0)
    await told(server, {"input": "x"}, "and on " * 20)
    with holding(1):
        async with asking(server) as client:
            begun = await client.responses.create(model="demo", input="x", background=True)
            with pytest.raises(BadRequestError, match="cannot be gone on from"):
                await client.responses.create(model="demo", input="x", previous_response_id=begun.id)
            if elsewhere:
                store = stored(tmp_path)
                record = store.get(store.owner(""), begun.id)
                assert record is not None
                assert not store.is_gone(record.runner)
                assert records.finish(store, record, "cancelled")
                store.close()
            else:
                assert (await client.responses.cancel(begun.id)).status == "cancelled"
            got = await client.responses.retrieve(begun.id)
            assert got.status == "cancelled"
            await asyncio.sleep(0)
    await server.idle()
    async with asking(server) as client:
        assert (await client.responses.retrieve(begun.id)).status == "cancelled"


async def test_a_response_that_cannot_be_kept_at_its_end_fails_as_soon_as_it_can_be_kept(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background, "WATCH_S", 0)
    finish = Store.finish
    tried: list[str] = []

    def full(store: Store, *given: Any) -> bool:
        tried.append(given[0].id)
        if given[0].status != "queued" or len(tried) < 4:
            raise StoreError("the disk is full")
        return finish(store, *given)

    monkeypatch.setattr(Store, "update", full)
    monkeypatch.setattr(Store, "finish", full)
    async with asking(server) as client:
        begun = await client.responses.create(model="demo", input="x", background=True)
        ended = await _ended(client, begun.id)
    assert ended.status == "failed"
    assert "could not be stored" in ended.error.message
    assert tried == [begun.id] * 4
    assert f"the response {begun.id} is lost: the disk is full" in caplog.text


async def test_what_a_server_did_not_finish_has_failed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = settings(tmp_path)
    store = stored(tmp_path)
    response = json.dumps({"id": "resp_x", "object": "response", "status": "in_progress", "output": []}).encode()
    for id, said in (("resp_broken", b"{"), ("resp_x", response)):
        store.put(store.owner(""), Record(id, "in_progress", said, b"[]", background=True))
    store._connection.close()  # as if it were killed: its lock ends, and the lock's file stays
    os.close(store._held)
    assert [*(tmp_path / "store").glob("*.lock")]
    async with running([Puppets()], **made) as server, asking(server) as client:
        got = await client.responses.retrieve("resp_x")
        assert got.status == "failed"
        assert got.error is not None
        assert "ended before the response was complete" in got.error.message
        assert not [*(tmp_path / "store").glob("*.lock")]
    assert "the response resp_broken remains in progress" in caplog.text


def test_a_lock_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    store = Store(tmp_path / "a.db", max_bytes=1000, max_age_s=1e9)
    (tmp_path / "a.db.r.lock").mkdir()
    with pytest.raises(StoreError, match=r"a\.db\.r\.lock"):
        store.is_gone("r")
    store.close()


async def test_an_answer_goes_out_though_the_disk_is_full(
    server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    packed = Store._packed

    def full(store: Store, record: Record) -> Any:
        store._connection.execute("PRAGMA max_page_count = 1")  # as many as there are, which is more
        return packed(store, record)

    monkeypatch.setattr(Store, "_packed", full)
    asked = {"input": "x" * 400, "max_output_tokens": 1}
    answers = []
    for i in range(40):
        _, answer, _ = await server.post(asked | {"metadata": {str(i): "y" * 500}}, "/v1/responses")
        assert answer["status"] in ("completed", "incomplete")
        answers.append(answer["store"])
    assert answers[-1] is False
    assert caplog.text.count("database or disk is full") == 1
    large = {str(i): secrets.token_hex(250) for i in range(16)}
    status, answer, _ = await server.post(asked | {"background": True, "metadata": large}, "/v1/responses")
    assert status == 503
    assert answer["error"]["message"] == "Responses cannot be stored or read at the moment. Try again later."
    assert caplog.text.count(str(tmp_path)) == 2


async def test_clients_are_told_nothing_of_the_file(
    server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(store: Store, *given: Any) -> Any:
        raise StoreError(f"The store of responses, {store.path}, fails.")

    begun = await respond(server, "One.<|return|>", input="first")
    for name in ("get", "delete", "put"):
        monkeypatch.setattr(Store, name, fails)
    path = f"/v1/responses/{begun.id}"
    for status, answer in (
        await server.get(path),
        await server.get(f"{path}/input_items"),
        await _delete(server, begun.id),
        (await server.post({}, f"{path}/cancel"))[:2],
        (await server.post({"input": "x", "previous_response_id": begun.id}, "/v1/responses"))[:2],
        (await server.post({"input": "x", "background": True}, "/v1/responses"))[:2],
    ):
        assert status == 503
        assert str(tmp_path) not in str(answer)
    assert caplog.text.count(str(tmp_path)) == 6


async def test_a_response_in_the_background_that_is_too_large_for_the_store_is_refused(tmp_path: Path) -> None:
    async with running([Puppets()], **settings(tmp_path, agents={"store_max_bytes": 100})) as server:
        status, answer, _ = await server.post({"input": "x", "background": True}, "/v1/responses")
    assert status == 400
    assert "server.agents.store_max_bytes = 100. Ask for less, without background," in answer["error"]["message"]


def record(id: str, size: int = 100, **more: Any) -> Record:
    """One whose size on the disk is about ``size``: it does not compress."""
    import random

    return Record(id, more.pop("status", "completed"), random.Random(id).randbytes(size), b"[]", **more)


def test_the_oldest_are_evicted_and_the_old_ones_too(tmp_path: Path) -> None:
    now = [1000.0]
    store = Store(tmp_path / "a.db", max_bytes=5000, max_age_s=60, clock=lambda: now[0])
    own = store.owner("k")
    for i in range(10):
        now[0] += 1
        store.put(own, record(f"r{i}", 1000))
    assert [i for i in range(10) if store.get(own, f"r{i}")] == [6, 7, 8, 9]
    with pytest.raises(TooLargeError, match="store_max_bytes = 5000"):
        store.put(own, record("big", 6000))
    assert store.get(own, "r6") is not None
    now[0] = 1070.0 - 1
    assert [i for i in range(10) if store.get(own, f"r{i}")] == [8, 9]
    assert not store.delete(own, "r7")
    now[0] += 100
    store.put(own, record("new"))
    rows = store._connection.execute("SELECT id FROM responses").fetchall()
    assert rows == [("new",)], "what is too old is deleted, not only hidden"
    store.close()


@pytest.mark.parametrize("finish", [False, True])
def test_what_takes_the_place_of_a_record_needs_no_room_beside_it(tmp_path: Path, finish: bool) -> None:
    store = Store(tmp_path / "a.db", max_bytes=2600, max_age_s=60)
    own = store.owner("k")
    store.put(own, record("old", 1000))
    begun = record("begun", 1200, status="queued", runner=store.runner)
    store.put(own, begun)
    assert store.finish(begun, "failed", begun.response) if finish else store.update(replace(begun, status="completed"))
    assert store.get(own, "old") is not None
    store.close()


def test_a_file_that_others_can_read_is_made_its_owners(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.db"
    first = Store(path, max_bytes=1000, max_age_s=60)
    files = [path, *tmp_path.glob("a.db-*")]
    assert len(files) == 3
    for file in files:
        file.chmod(0o644)
    for _ in range(2):
        Store(path, max_bytes=1000, max_age_s=60).close()
        assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600] * 3
    assert caplog.text.count("had the mode 644") == 3
    first.close()


def test_what_is_computed_now_makes_no_room(tmp_path: Path) -> None:
    store = Store(tmp_path / "a.db", max_bytes=2500, max_age_s=60)
    own = store.owner("k")
    for i in range(2):
        store.put(own, record(f"r{i}", 1000, status="queued"))
    with pytest.raises(FullError, match="computed now"):
        store.put(own, record("r2", 1000))
    assert all(store.get(own, f"r{i}") for i in range(2))
    store.close()


def test_many_threads_and_processes_write_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    program = (
        "import sys; from pathlib import Path; from infer_agents.store import Record, Store\n"
        "s = Store(Path(sys.argv[1]), max_bytes=1 << 20, max_age_s=1e9)\n"
        "for i in range(50): s.put(s.owner('k'), Record(f'{sys.argv[2]}-{i}', 'completed', b'{}', b'[]'))\n"
    )
    others = [subprocess.Popen([sys.executable, "-c", program, str(path), name]) for name in ("p", "q")]
    store = Store(path, max_bytes=1 << 20, max_age_s=1e9)
    own = store.owner("k")
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda i: store.put(own, record(f"t-{i}")), range(50)))
    assert [other.wait(120) for other in others] == [0, 0]
    assert all(store.get(own, f"{name}-{i}") for name in "tpq" for i in range(50))
    total = store._connection.execute("SELECT value FROM meta WHERE name = 'bytes'").fetchone()
    assert total == store._connection.execute("SELECT sum(size) FROM responses").fetchone()
    store.close()


def test_a_process_that_is_killed_corrupts_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    program = (
        "import sys; from pathlib import Path; from infer_agents.store import Record, Store\n"
        "s = Store(Path(sys.argv[1]), max_bytes=1 << 16, max_age_s=1e9)\n"
        "s.put(s.owner('k'), Record('open', 'in_progress', b'{}', b'[]', background=True))\n"
        "i = 0\n"
        "while True:\n"
        "    s.put(s.owner('k'), Record(str(i), 'completed', str(i).encode() * 500, b'[]'))\n"
        "    print(i, flush=True)\n"
        "    i += 1\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True) as writing:
        assert writing.stdout is not None
        for line in writing.stdout:
            if int(line) == 30:
                writing.kill()
                break
        last = max([30, *map(int, writing.stdout.read().splitlines())])
    store = Store(path, max_bytes=1 << 16, max_age_s=1e9)
    assert store._connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    own = store.owner("k")
    found = store.get(own, str(last))
    assert found is not None
    assert found.response == str(last).encode() * 500
    ((_, id, runner),) = store.in_progress()
    assert (id, store.is_gone(runner)) == ("open", True)
    store.close()


def test_a_file_that_is_no_store_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    path.write_bytes(b"something else" * 1000)
    with pytest.raises(SettingsError, match=r"a\.db, cannot be opened.*file is not a database.*server\.agents\.store"):
        Store(path, max_bytes=1, max_age_s=1)
    assert path.read_bytes() == b"something else" * 1000
    path.unlink()
    Store(path, max_bytes=1, max_age_s=1).close()
    with sqlite3.connect(path) as other:
        other.execute("PRAGMA user_version = 9")
    other.close()
    with pytest.raises(SettingsError, match="its version is 9"):
        Store(path, max_bytes=1, max_age_s=1)


def test_a_file_that_breaks_later_is_named(tmp_path: Path) -> None:
    store = Store(tmp_path / "a.db", max_bytes=1000, max_age_s=1e9)
    store.put(store.owner("k"), record("r"))
    store._connection.execute("UPDATE responses SET items = x'00'")
    with pytest.raises(StoreError, match=r"a\.db, r cannot be read"):
        store.get(store.owner("k"), "r")
    store._connection.execute("DROP TABLE responses")
    with pytest.raises(StoreError, match=r"a\.db, fails"):
        store.get(store.owner("k"), "r")
    store.close()


def test_without_a_folder_nothing_is_stored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert open_store(None, max_bytes=1, max_days=1) is None
    assert "responses are not stored" in caplog.text
    assert open_store(tmp_path / "a.db", max_bytes=0, max_days=1) is None
    with pytest.raises(SettingsError, match="cannot be opened"):
        open_store(tmp_path / "file" / "a.db", max_bytes=1, max_days=1)


@pytest.mark.parametrize(
    ("write", "found"),
    [
        (lambda text, calls: f"{text}{calls}<end>\n", "<end>\n[next]"),
        (lambda text, calls: f"{text}<end>\n" if not calls else f"{text}{calls}<call>", "<call>[next]"),
        (lambda text, calls: f"{text.upper()}<end>", None),
    ],
)
async def test_what_follows_calls_is_told_from_them(write: Any, found: str | None) -> None:
    async def render(turns: Any) -> str:
        said, _ = turns
        calls = "".join(json.dumps(call["function"]) for call in said.get("tool_calls", ()))
        return f"{write(said['content'] or '', calls)}[next]"

    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
    assert await following([called, {"role": "tool", "content": "<call>"}], 0, "<call>", render) == found
