"""POST /v1/messages and /v1/messages/count_tokens, by Anthropic's own client."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.puppet import Puppet, Puppets, say
from tests.serving import TEMPLATE, Body, Running, holding, retokened, running, until

from infer.contracts.params import MAX_STOP_CHARS, MAX_STOPS, SamplingParams
from infer.contracts.request import Event
from infer.contracts.text import ReasoningTags
from infer.errors import RequestError
from infer.text.tool_formats import ToolFormat
from infer.text.tool_formats.reader import scripted
from infer_agents import messages
from infer_agents.message_bodies import MessagesRequest, conversation
from infer_agents.response_tools import MAX_OFFERS
from infer_agents.seal import Seal
from infer_server import service
from infer_server.http.errors import error_body
from infer_server.http.parsing import parse
from infer_server.http.wire import SHUTTING_DOWN, Anthropic
from infer_server.replies import Reply, ToolUse
from infer_tool_formats import objects

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
LOOK: Body = {
    "name": "look",
    "description": "Looks.",
    "input_schema": {"type": "object", "properties": {"at": {"type": "integer"}}, "required": ["at"]},
}
USER = {"role": "user", "content": "hi"}
ASKED: Body = {"model": "demo", "max_tokens": 100, "messages": [USER]}
END = "<|endoftext|>"
CALL = '<tool_call>{"name": "look", "arguments": {"at": %d}}</tool_call>'
THINKS = {"thinking": {"type": "enabled", "budget_tokens": 1024}}


def puppet(folder: Path) -> Body:
    """The section ``model`` of a server whose model says what it is told. Its template shows what was thought."""
    retokened(folder, "</think>")
    (folder / "generation_config.json").write_text('{"eos_token_id": 0}')
    line = "{{- '# ' ~ message.role ~ ': ' ~ text }}"
    thought = "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    effort = "{% if reasoning_effort %}Effort: {{ reasoning_effort }}.{% endif %}"
    assert line in TEMPLATE
    shown = "{{- '# ' ~ message.role ~ ': ' }}" + thought + "{{ text }}"
    (folder / "template.jinja").write_text(effort + TEMPLATE.replace(line, shown))
    section = {"path": str(folder), "chat_template": str(folder / "template.jinja"), "family": "puppet"}
    return section | {"dtype": "float32"}


@asynccontextmanager
async def puppets(folder: Path, **sections: Any) -> AsyncIterator[Running]:
    Puppet.said.zero_()
    sections["server"] = {"access_log": False, "aliases": ["demo"]} | sections.get("server", {})
    async with running([Puppets()], **{"model": puppet(folder), "engine": {"max_seq_len": 1024}} | sections) as made:
        yield made


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Running]:
    async with puppets(tmp_path) as made:
        yield made


@asynccontextmanager
async def client(server: Running, key: str = "k") -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key=key, max_retries=0) as made:
        yield made


async def counted(server: Running, **more: Any) -> int:
    status, answer, _ = await server.post(ASKED | more, COUNT)
    assert status == 200, answer
    assert set(answer) == {"input_tokens"}
    return int(answer["input_tokens"])


async def told(server: Running, text: str, **more: Any) -> None:
    """Have the model answer ``ASKED`` with ``more`` in it with ``text``."""
    await say(server, await counted(server, **more), text)


async def ask(server: Running, **more: Any) -> Any:
    status, answer, _ = await server.post(ASKED | more, PATH)
    assert status == 200, answer
    return answer


def altered(signature: str) -> str:
    """Another one, whatever it begins with."""
    return ("B" if signature[0] == "A" else "A") + signature[1:]


async def refused(server: Running, **more: Any) -> str:
    status, answer, _ = await server.post(ASKED | more, PATH)
    assert (status, answer["type"], answer["error"]["type"]) == (400, "error", "invalid_request_error"), answer
    return str(answer["error"]["message"])


def unnamed(message: Any) -> Any:
    """A message of the client's without what is random: ids, which only have to differ, and have Anthropic's form."""
    value = message if isinstance(message, dict) else message.model_dump(exclude={"parsed_output"}, exclude_none=True)
    assert value.pop("id").startswith("msg_")
    ids = [block.pop("id") for block in value["content"] if block["type"] == "tool_use"]
    assert len({*ids}) == len(ids)
    assert all(id.startswith("toolu_") for id in ids)
    return value


SAID: list[tuple[str, Body, list[Any], str]] = [
    ("Hello", {}, [{"type": "text", "text": "Hello"}], "end_turn"),
    ("", {}, [], "end_turn"),
    ("hm</think>Hello", THINKS, ["hm", {"type": "text", "text": "Hello"}], "end_turn"),
    ("hm", THINKS | {"max_tokens": 1}, ["h"], "max_tokens"),
    (CALL % 1, {"tools": [LOOK]}, [{"type": "tool_use", "name": "look", "input": {"at": 1}}], "tool_use"),
    (
        f"hm</think>Well.{CALL % 1}{CALL % 2}",
        THINKS | {"tools": [LOOK]},
        [
            "hm",
            {"type": "text", "text": "Well."},
            {"type": "tool_use", "name": "look", "input": {"at": 1}},
            {"type": "tool_use", "name": "look", "input": {"at": 2}},
        ],
        "tool_use",
    ),
    (
        f"Well.{CALL % 1}{CALL % 2}",
        {"tools": [LOOK], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        [{"type": "text", "text": "Well."}, {"type": "tool_use", "name": "look", "input": {"at": 1}}],
        "tool_use",
    ),
    ("Hello STOP", {"stop_sequences": ["x", " STOP"]}, [{"type": "text", "text": "Hello"}], "stop_sequence"),
]


async def test_the_official_client_gets_the_same_whole_and_streamed(server: Running) -> None:
    async with client(server) as asking:
        for text, more, content, reason in SAID:
            await told(server, text + END, **more)
            body: Any = ASKED | more
            whole = unnamed(await asking.messages.create(**body))
            async with asking.messages.stream(**body) as stream:
                kinds = [event.type async for event in stream if event.type not in ("text", "thinking", "input_json")]
                streamed = unnamed(await stream.get_final_message())
            assert whole["content"] == streamed["content"]
            assert whole["stop_reason"] == reason
            for found, said in zip(whole["content"], content, strict=True):
                if isinstance(said, str):
                    assert found.pop("signature")
                    said = {"type": "thinking", "thinking": said}
                assert found == said
            assert whole.get("stop_sequence") == (" STOP" if reason == "stop_sequence" else None)
            usage, cached = whole["usage"], streamed["usage"]["cache_read_input_tokens"]
            assert (whole["model"], whole["role"], whole["type"]) == ("demo", "assistant", "message")
            assert usage["input_tokens"] + usage["cache_read_input_tokens"] == await counted(server, **more)
            assert streamed["usage"]["input_tokens"] + cached == await counted(server, **more)
            assert usage["output_tokens"] == streamed["usage"]["output_tokens"]
            assert usage["output_tokens_details"] == streamed["usage"]["output_tokens_details"]
            assert (usage["output_tokens_details"]["thinking_tokens"] > 0) == (
                "thinking" in str(content) or "hm" in text
            )
            assert kinds[0] == "message_start"
            assert kinds[-2:] == ["message_delta", "message_stop"]
            assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(content)


async def test_a_stream_is_anthropics_to_the_byte(server: Running) -> None:
    """Its events are named and have their numbers, and nothing else ends it."""
    await told(server, f"hm</think>Well.{CALL % 1}{END}", **THINKS, tools=[LOOK])
    body = ASKED | THINKS | {"tools": [LOOK], "stream": True}
    async with server.session.post(server.url + PATH + "?beta=true", json=body) as response:
        assert response.headers["Request-Id"] == response.headers["X-Request-Id"]
        blocks = (await response.read()).decode().removesuffix("\n\n").split("\n\n")
    events = []
    for block in blocks:
        name, _, data = block.partition("\ndata: ")
        events.append(json.loads(data))
        assert name == f"event: {events[-1]['type']}"
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["usage"]["input_tokens"] > 0
    assert events[0]["message"]["stop_reason"] is None
    begun = [(event["index"], event["content_block"]) for event in events if event["type"] == "content_block_start"]
    id = begun[2][1]["id"]
    assert begun == [
        (0, {"type": "thinking", "thinking": "", "signature": ""}),
        (1, {"type": "text", "text": ""}),
        (2, {"type": "tool_use", "id": id, "name": "look", "input": {}}),
    ]
    deltas = [(event["index"], event["delta"]["type"]) for event in events if event["type"] == "content_block_delta"]
    assert list(dict.fromkeys(deltas)) == [
        (0, "thinking_delta"),
        (0, "signature_delta"),
        (1, "text_delta"),
        (2, "input_json_delta"),
    ]
    assert [event["index"] for event in events if "index" in event] == sorted(
        event["index"] for event in events if "index" in event
    )
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-1] == {"type": "message_stop"}


async def test_all_that_an_answer_holds_can_be_sent_back(server: Running) -> None:
    """As the client has it, with the result of its call; and the template is shown it as chats are."""
    form: Body = THINKS | {"tools": [LOOK]}
    await told(server, f"hm</think>Well.{CALL % 1}{END}", **form)
    async with client(server) as asking:
        body: Any = ASKED | form
        async with asking.messages.stream(**body) as stream:
            first = await stream.get_final_message()
        call = first.content[-1]
        assert call.type == "tool_use"
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "a cat"}]}
        said = [USER, first.to_param(), {"role": "user", "content": [result]}]
        await told(server, f"aha</think>A cat.{END}", **form, messages=json.loads(json.dumps(said, default=vars)))
        second = await asking.messages.create(**body | {"messages": said})
    assert [block.type for block in second.content] == ["thinking", "text"]
    function = {"name": "look", "arguments": '{"at": 1}'}
    chat = {
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": "Well.",
                "reasoning_content": "hm",
                "tool_calls": [{"id": "c", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "a cat"},
        ],
        "tools": [
            {
                "type": "function",
                "function": {"name": "look", "description": "Looks.", "parameters": LOOK["input_schema"]},
            }
        ],
        "chat_template_kwargs": {"enable_thinking": True},
    }
    _, prompt, _ = await server.post(chat, "/tokenize")
    usage = second.usage
    assert usage.cache_read_input_tokens, "what it has thought and called is found in the cache"
    assert usage.input_tokens + usage.cache_read_input_tokens == prompt["count"]


async def test_the_next_turn_finds_the_first_in_the_cache(server: Running) -> None:
    """However the billing header changes; if it is kept, nothing is found."""
    system = [{"type": "text", "text": f"x-anthropic-billing-header: cch={i}"} for i in range(2)]
    rules: Body = {"type": "text", "text": "Be brief. " * 20, "cache_control": {"type": "ephemeral"}}
    plain = await counted(server, system=rules["text"])
    assert await counted(server, system=[system[0], rules]) == plain
    assert await counted(server, system=[rules, {"type": "text", "text": "And kind."}]) == await counted(
        server, system=rules["text"] + "\n\nAnd kind."
    )
    assert await counted(server, system=system[:1]) == await counted(server)
    first = await ask(server, system=[system[0], rules], max_tokens=3)
    second = await ask(server, system=[system[1], rules], max_tokens=3)
    assert first["usage"]["cache_read_input_tokens"] == 0
    assert second["usage"]["cache_read_input_tokens"] >= plain - 16
    assert second["usage"]["input_tokens"] == plain - second["usage"]["cache_read_input_tokens"]
    assert second["usage"]["cache_creation_input_tokens"] == 0


async def test_the_billing_header_is_kept_if_that_is_set(tmp_path: Path) -> None:
    system = [{"type": "text", "text": "x-anthropic-billing-header: cch=0"}]
    async with puppets(tmp_path, server={"agents": {"billing_header": True}}) as server:
        assert await counted(server, system=system) == await counted(server, system=system[0]["text"])


async def test_reasoning_comes_back_unaltered_or_not_at_all(server: Running) -> None:
    await told(server, f"hm</think>Hello{END}", **THINKS)
    first = await ask(server, **THINKS)
    thought, text = first["content"]

    def after(*blocks: Any) -> list[Any]:
        return [USER, {"role": "assistant", "content": list(blocks)}, USER]

    whole = await counted(server, messages=after(thought, text))
    without = await counted(server, messages=after(text))
    assert whole > without
    for foreign in ({"signature": ""}, {"thinking": "a foreign thought", "signature": ""}):
        assert await counted(server, messages=after(thought | foreign, text)) > without
    empty = {"type": "thinking", "thinking": "", "signature": ""}
    redacted = {"type": "redacted_thinking", "data": "abc"}
    assert await counted(server, messages=after(empty, redacted, text)) == without
    for change in ({"thinking": "hm!"}, {"signature": altered(thought["signature"])}, {"thinking": ""}):
        said = await refused(server, messages=after(thought | change, text))
        assert said.startswith("messages[1].content[0]: Invalid `signature` in `thinking` block: it ")
        assert said.endswith("Send the block as it came, with an empty signature, or not at all.")


async def test_reasoning_that_is_omitted_comes_back_in_its_signature(server: Running) -> None:
    form = {"thinking": {"type": "adaptive", "display": "omitted"}}
    await told(server, f"hm</think>Hello{END}", **form)
    shown, hidden = await ask(server, **THINKS), await ask(server, **form)
    body: Any = ASKED | form
    async with client(server) as asking, asking.messages.stream(**body) as stream:
        streamed = await stream.get_final_message()
    assert [block.model_dump() for block in streamed.content[:1]] == hidden["content"][:1]
    assert (hidden["content"][0]["thinking"], hidden["content"][1]) == ("", shown["content"][1])

    def after(answer: Any) -> list[Any]:
        return [USER, {"role": "assistant", "content": answer["content"]}, USER]

    assert await counted(server, messages=after(hidden)) == await counted(server, messages=after(shown))
    hidden["content"][0]["signature"] = altered(hidden["content"][0]["signature"])
    assert "has been altered" in await refused(server, messages=after(hidden))


@pytest.mark.slow
async def test_long_bodies_are_read_as_short_ones(tmp_path: Path) -> None:
    """In a process that knows neither the settings nor the key."""
    engine = {"max_seq_len": 2048}
    async with puppets(tmp_path, engine=engine, server={"max_body_bytes": 1 << 20}) as server:
        await told(server, f"hm</think>Hello{END}", **THINKS)
        content = (await ask(server, **THINKS))["content"]
        said = [USER, {"role": "assistant", "content": content}, USER]
        long = {"role": "user", "content": [{"type": "text", "text": "hi", "citations": ["x" * 20_000]}]}
        system = [{"type": "text", "text": "x-anthropic-billing-header: 1"}, {"type": "text", "text": "Be brief."}]
        for form in ({"system": system}, {"tools": [LOOK]}, THINKS):
            short = await counted(server, messages=said, **form)
            assert await counted(server, messages=[*said[:-1], long], **form) == short
        content[0]["thinking"] += "!"
        found = await refused(server, messages=[*said[:-1], long])
        assert found.startswith("messages[1].content[0]: Invalid `signature`")
        found = await refused(server, messages=[{"role": "user", "content": "x " * 20_000}])
        assert re.fullmatch(r"prompt is too long: 200\d\d tokens > 2047 maximum", found)


async def test_a_prompt_that_does_not_fit_is_refused_and_a_large_answer_is_not(server: Running) -> None:
    """By the words that Claude Code knows, and N is what count_tokens says."""
    await told(server, f"Hello{END}", max_tokens=32_000)
    assert (await ask(server, max_tokens=32_000))["stop_reason"] == "end_turn"
    for length in (1023, 1024):
        probe = [{"role": "user", "content": "x"}]
        text = "x" + " x" * (length - await counted(server, messages=probe))
        long = [{"role": "user", "content": text}]
        assert await counted(server, messages=long) == length
        if length == 1023:
            assert (await ask(server, messages=long))["usage"]["output_tokens"] == 1
        else:
            assert await refused(server, messages=long) == "prompt is too long: 1024 tokens > 1023 maximum"
    far = [{"role": "user", "content": "x " * 300_000}]
    status, answer, _ = await server.post(ASKED | {"messages": far}, COUNT)
    assert status == 400
    assert re.fullmatch(rf"prompt is too long: 3000\d\d tokens > {1 << 18} maximum", answer["error"]["message"])


async def test_errors_are_the_clients_exceptions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"api_keys": "k", "max_body_bytes": 1 << 16}

    async def fails(server: Running, kind: type[anthropic.APIStatusError], key: str = "k", **more: Any) -> str:
        async with client(server, key) as asking:
            body: Any = ASKED | more
            with pytest.raises(kind) as caught:
                await asking.messages.create(**body)
        assert caught.value.request_id
        body = caught.value.body
        assert (set(body), {*body["error"], "details"}) == ({"type", "error"}, {"type", "message", "details"})
        return str(body["error"]["type"])

    async with puppets(tmp_path, server=keys) as server:
        assert await fails(server, anthropic.BadRequestError, max_tokens=0) == "invalid_request_error"
        assert await fails(server, anthropic.AuthenticationError, "no") == "authentication_error"
        assert await fails(server, anthropic.NotFoundError, model="other") == "not_found_error"
        assert await fails(server, anthropic.APIStatusError, system="x" * (1 << 17)) == "request_too_large"
        monkeypatch.setattr(messages._Output, "push", lambda *_: dict[str, Any]()["lost"])
        assert await fails(server, anthropic.InternalServerError) == "api_error"
        async with client(server) as asking:
            body: Any = ASKED
            with pytest.raises(anthropic.APIStatusError) as caught:
                async with asking.messages.stream(**body) as stream:
                    await stream.get_final_message()
        assert isinstance(caught.value.body, dict)
        assert caught.value.body["error"]["type"] == "api_error"
        assert "the server's log says why" in caught.value.body["error"]["message"]


def test_errors_have_anthropics_types() -> None:
    error = {"message": "No.", "type": "invalid_request_error", "param": None, "code": None}
    types = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
    types |= {405: "invalid_request_error", 413: "request_too_large", 415: "invalid_request_error"}
    types |= {500: "api_error", 503: "overloaded_error"}
    for status, kind in types.items():
        found = Anthropic().error(error, status)  # type: ignore[arg-type]
        assert found == {"type": "error", "error": {"type": kind, "message": "No."}}
    for said, kind in (("invalid_request_error", "invalid_request_error"), ("server_error", "api_error")):
        assert Anthropic().failure(error | {"type": said})["error"]["type"] == kind  # type: ignore[arg-type]
    ending = error_body(SHUTTING_DOWN, "server_error")
    assert Anthropic().failure(ending)["error"] == {"type": "overloaded_error", "message": SHUTTING_DOWN}


async def test_a_stream_pings_while_its_prompt_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And who finds no place is told so in Anthropic's words."""
    monkeypatch.setattr(service, "SILENCE_S", 0.0)
    engine = {"max_batch_size": 1, "max_waiting_requests": 0, "max_seq_len": 256}
    async with puppets(tmp_path, engine=engine) as server:
        await told(server, f"Hello{END}")
        with holding(0):
            first = await server.session.post(server.url + PATH, json=ASKED | {"stream": True})
            status, answer, _ = await server.post(ASKED, PATH)
            assert (status, answer["error"]["type"]) == (503, "overloaded_error")
            assert await first.content.readuntil(b"\n\n") == b'event: ping\ndata: {"type": "ping"}\n\n'
        assert (await first.text()).count("event: message_stop") == 1
        await until(lambda: not server.engine_loop.num_open)


async def test_a_stream_pings_while_its_reasoning_is_hidden(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "SILENCE_S", 0.0)
    form = {"thinking": {"type": "adaptive", "display": "omitted"}}
    await told(server, f"{'hm ' * 30}</think>Hello{END}", **form)
    async with server.session.post(server.url + PATH, json=ASKED | form | {"stream": True}) as response:
        kinds = re.findall(r"^event: (\w+)$", await response.text(), re.MULTILINE)
    begin, end = kinds.index("content_block_start"), kinds.index("content_block_stop")
    assert set(kinds[begin + 1 : end]) == {"ping", "content_block_delta"}
    assert kinds[begin + 1 : end].count("content_block_delta") == 1, "the signature"


async def test_the_end_user_is_in_the_access_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "infer.access"):
        async with puppets(tmp_path, server={"access_log": True}) as server:
            await ask(server, metadata={"user_id": "ada"}, max_tokens=1)
    (line,) = (json.loads(record.message) for record in caplog.records if record.name == "infer.access")
    assert (line["user"], line["usage"]["completion_tokens"]) == ("ada", 1)


async def test_a_template_is_told_of_thinking_and_effort_if_it_knows_them(tmp_path: Path) -> None:
    async with puppets(tmp_path) as server:
        plain = await counted(server)
        assert await counted(server, thinking={"type": "disabled"}) == plain
        for kind in ("enabled", "adaptive"):
            assert await counted(server, thinking={"type": kind}) > plain
        assert (
            await counted(server, thinking={"type": "enabled"}, chat_template_kwargs={"enable_thinking": False})
            == plain
        )
        assert await counted(server, output_config={"effort": "high"}) > plain
    (tmp_path / "other").mkdir()
    section = puppet(tmp_path / "other")
    Path(section["chat_template"]).write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    async with puppets(tmp_path, model=section) as server:
        plain = await counted(server)
        assert await counted(server, thinking={"type": "enabled"}, output_config={"effort": "high"}) == plain


async def test_an_effort_that_the_template_refuses_has_no_effect(tmp_path: Path) -> None:
    """Unless it is given as the template's own variable."""
    section = puppet(tmp_path)
    path = tmp_path / "refuses.jinja"
    refuses = "{% if reasoning_effort == 'max' %}{{ raise_exception('no max') }}{% endif %}"
    never = "{% if messages[0].content == 'never' %}{{ raise_exception('never') }}{% endif %}"
    path.write_text(refuses + never + Path(section["chat_template"]).read_text())
    async with puppets(tmp_path, model=section | {"chat_template": str(path)}) as server:
        plain = await counted(server)
        assert await counted(server, output_config={"effort": "max"}) == plain
        assert await counted(server, output_config={"effort": "high"}) > plain
        own = {"chat_template_kwargs": {"reasoning_effort": "max"}}
        for more in (own, own | {"output_config": {"effort": "max"}}):
            assert "no max" in await refused(server, **more)
        turns = [{"role": "user", "content": "never"}]
        assert "ever" in await refused(server, messages=turns, output_config={"effort": "high"})


async def test_a_budget_closes_the_reasoning(server: Running) -> None:
    await told(server, f"one two three four five</think>Hello{END}", **THINKS)
    free = await ask(server, **THINKS)
    assert free["content"][0]["thinking"] == "one two three four five"
    bounded = await ask(server, thinking={"type": "enabled", "budget_tokens": 2})
    assert free["content"][0]["thinking"].startswith(bounded["content"][0]["thinking"])
    assert bounded["usage"]["output_tokens_details"] == {"thinking_tokens": 3}, "two, and the closing tag"
    adaptive = await ask(server, thinking={"type": "adaptive", "budget_tokens": 0})
    assert adaptive["content"] == free["content"]
    form = {"output_format": {"type": "json_schema", "schema": {"enum": ["yes", "no"]}}, "temperature": 0}
    budget = {"chat_template_kwargs": {"enable_thinking": False}, "thinking": {"type": "enabled", "budget_tokens": 2}}
    (block,) = (await ask(server, **form, **budget))["content"]
    assert json.loads(block["text"]) in ("yes", "no"), "where there is no reasoning, its budget is no mistake"


@pytest.mark.parametrize("knows", [False, True])
async def test_an_effort_bounds_the_reasoning_where_the_template_knows_none(tmp_path: Path, knows: bool) -> None:
    """Or refuses the word; a budget counts instead. ``disabled`` closes what the template cannot turn off."""
    path = tmp_path / "bounded.jinja"
    section = puppet(tmp_path) | {"chat_template": str(path), "effort_budgets": ["low=2"]}
    refuses = "{% if reasoning_effort %}{{ raise_exception('no') }}{% endif %}" if knows else ""
    shown = (tmp_path / "template.jinja").read_text().replace("reasoning_effort", "other")
    path.write_text(refuses + shown.replace("enable_thinking", "true"))
    async with puppets(tmp_path, model=section) as server:
        await told(server, f"one two three four five</think>Hello{END}")
        effort: Body = {"output_config": {"effort": "low"}}
        for thoughts, more in (
            (3, effort),
            (1, {"thinking": {"type": "disabled"}} | effort),
            (1, {"thinking": {"type": "disabled"}}),
            (2, {"thinking": {"type": "enabled", "budget_tokens": 1}} | effort),
        ):
            answer = await ask(server, **more)
            assert answer["usage"]["output_tokens_details"] == {"thinking_tokens": thoughts}
        free = await ask(server)
        assert await ask(server, output_config={"effort": "max"}) | {"id": free["id"]} == free


async def test_a_last_message_of_the_assistants_is_continued(server: Running) -> None:
    said = [USER, {"role": "assistant", "content": "One, two, "}]
    chat = {"messages": said, "continue_final_message": True, "add_generation_prompt": False}
    _, prompt, _ = await server.post(chat, "/tokenize")
    assert await counted(server, messages=said) == prompt["count"]
    await told(server, f"three{END}", messages=said)
    assert (await ask(server, messages=said))["content"] == [{"type": "text", "text": "three"}]
    empty = [USER, {"role": "assistant", "content": []}]
    assert await counted(server, messages=empty) == await counted(server)


async def test_a_call_can_be_forced(server: Running) -> None:
    tools = [LOOK, LOOK | {"name": "hear"}, {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]
    for choice, name in (({"type": "any"}, "look"), ({"type": "tool", "name": "hear"}, "hear")):
        form: Body = {"tools": tools, "tool_choice": choice, "temperature": 0}
        await told(server, f'[{{"name": "{name}", "arguments": {{"at": 1}}}}]{END}', **form)
        answer = await ask(server, **form)
        ((_, called),) = ((block.pop("id"), block) for block in answer["content"])
        assert (called, answer["stop_reason"]) == ({"type": "tool_use", "name": name, "input": {"at": 1}}, "tool_use")
    await told(server, f'[{{"name": "look", "arguments": {{"at": 1}}}}]{END}', **form)
    assert "look" not in str(await ask(server, **form)), "the model would say so, but another one is forced"
    assert "asks for a tool" in await refused(server, tool_choice={"type": "any"})
    assert "asks for a tool" in await refused(server, tool_choice={"type": "any"}, tools=tools[2:])
    said = await refused(server, tool_choice={"type": "tool", "name": "web_search"}, tools=tools)
    assert "names 'web_search'" in said
    assert "name goes with the type tool" in await refused(server, tool_choice={"type": "tool"}, tools=tools)


async def test_tools_of_other_servers_are_not_shown(server: Running) -> None:
    typed = [
        {"type": "web_search_20250305", "name": "web_search", "allowed_domains": ["a.org"], "user_location": {}},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "computer_20250124", "name": "computer", "display_width_px": 1, "display_height_px": 1},
    ]
    assert await counted(server, tools=typed) == await counted(server)
    custom = LOOK | {"type": "custom", "strict": True, "defer_loading": True, "cache_control": {"type": "ephemeral"}}
    assert await counted(server, tools=[*typed, custom]) == await counted(server, tools=[LOOK])
    assert await counted(server, tools=[LOOK]) > await counted(server) + 20
    assert await counted(server, tools=[LOOK], tool_choice={"type": "none"}) == await counted(server)


async def test_tools_are_not_too_many_and_their_names_differ(server: Running) -> None:
    many = [LOOK | {"name": f"look{i}"} for i in range(MAX_OFFERS + 1)]
    assert MessagesRequest.model_validate(ASKED | {"tools": many[:-1]}).tool_use().offered
    said = await refused(server, tools=many)
    assert "tools" in said
    assert str(MAX_OFFERS) in said
    said = await refused(server, tools=[LOOK, LOOK | {"description": "Again."}])
    assert "two tools named 'look'; rename one of them" in said
    hidden = {"type": "bash_20250124", "name": "look"}
    assert await counted(server, tools=[LOOK, hidden, hidden]) == await counted(server, tools=[LOOK])


async def test_stop_sequences_are_refused_in_the_clients_words(server: Running) -> None:
    for stops in ([""], ["x" * (MAX_STOP_CHARS + 1)], ["x"] * (MAX_STOPS + 1)):
        said = await refused(server, stop_sequences=stops)
        assert "stop_sequences" in said
        assert "stop =" not in said


async def test_an_answer_has_the_format_that_is_asked_for(server: Running) -> None:
    form = {"type": "json_schema", "schema": {"enum": ["yes", "no"]}}
    for more in ({"output_config": {"format": form}}, {"output_format": form}):
        (block,) = (await ask(server, **more, temperature=0))["content"]
        assert json.loads(block["text"]) in ("yes", "no")
        assert "forced tool_choice" in await refused(server, **more, tools=[LOOK], tool_choice={"type": "any"})
    assert "give one" in await refused(server, output_config={"format": form}, output_format=form)
    broken = await refused(server, output_config={"format": form | {"schema": {"type": "nothing"}}})
    assert "output_config.format" in broken


async def test_threads_are_refused_by_the_code_that_runners_of_tools_know(server: Running) -> None:
    for path in (PATH, COUNT):
        status, answer, _ = await server.post(ASKED | {"thread": {"type": "create"}}, path)
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        assert answer["error"]["details"] == {"error_code": "thread_unsupported_request"}
        assert "leave thread out" in answer["error"]["message"]
    assert await counted(server, thread=None) == await counted(server)
    calls: list[int] = []

    @anthropic.beta_async_tool
    async def look(at: int) -> str:
        """Looks."""
        calls.append(at)
        return "a cat"

    async with client(server) as asking:
        runner = asking.beta.messages.tool_runner(model="demo", max_tokens=100, messages=[USER], tools=[look])  # type: ignore[list-item]
        shown: Body = {"tools": [look.to_dict()]}
        await told(server, f"{CALL % 1}{END}", **shown)
        turns = [message.content async for message in runner]
    assert calls == [1]
    assert [block.type for block in turns[0]] == ["tool_use"]
    assert len(turns) == 2


async def test_what_changes_nothing_is_taken(server: Running) -> None:
    inert = {
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"task_budget": {"type": "tokens", "total": 5}},
        "service_tier": "auto",
        "betas": ["x"],
        "mcp_servers": [],
        "container": None,
        "cache_control": {"type": "ephemeral"},
        "diagnostics": {"previous_message_id": None},
    }
    assert await counted(server, **inert) == await counted(server)
    for field, value in (("container", "c"), ("mcp_servers", [{"url": "x"}]), ("frobnicate", 1)):
        assert field in await refused(server, **{field: value})


def read(*turns: Any) -> Any:
    """The messages that the template gets, each with what was thought."""
    asked = parse(json.dumps({"messages": turns}).encode(), MessagesRequest)
    return [
        message | ({"thought": [t.text for t in thoughts]} if thoughts else {})
        for message, thoughts in conversation(asked.messages)
    ]


def test_turns_are_messages_that_take_turns() -> None:
    """Results come first, instructions in the middle are the user's, and what one side says in a row is one message."""
    use: Body = {"type": "tool_use", "id": "toolu_abcDEF123", "name": "look", "input": {"at": [None, {"b": "é"}]}}
    result = {"type": "tool_result", "tool_use_id": "toolu_abcDEF123", "content": "seen", "is_error": True}
    other: Body = {"type": "tool_use", "id": "toolu_01AbCdEfGhIjKlMnOpQrStUv", "name": "look", "input": {}}
    asked = {"id": other["id"], "type": "function", "function": {"name": "look", "arguments": {}}}
    call = {"id": "toolu_abcDEF123", "type": "function", "function": {"name": "look", "arguments": use["input"]}}
    assert read(
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "system", "content": "rules"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "text", "text": "c"},
                {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "q"}},
                {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": [{"url": "u"}]},
                {"type": "text", "text": "d"},
                use,
            ],
        },
        {"role": "assistant", "content": [other]},
        {"role": "ctx", "content": [{"type": "text", "text": "more"}]},
        {"role": "user", "content": [{"type": "text", "text": "e"}, result]},
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": other["id"],
                    "content": [{"type": "text", "text": "x"}, {"type": "tool_reference", "tool_name": "hear"}],
                }
            ],
        },
        {"role": "assistant", "content": []},
        {"role": "msg", "content": "last"},
    ) == [
        {"role": "user", "content": "a\n\nb\n\n<system-reminder>\nrules\n</system-reminder>"},
        {
            "role": "assistant",
            "content": "cd",
            "tool_calls": [call, asked],
            "thought": ["t"],
        },
        {"role": "tool", "tool_call_id": "toolu_abcDEF123", "content": "Error: seen"},
        {"role": "tool", "tool_call_id": other["id"], "content": "x\n\nhear"},
        {"role": "user", "content": "<system-reminder>\nmore\n</system-reminder>\n\ne"},
        {"role": "user", "content": "<system-reminder>\nlast\n</system-reminder>"},
    ]
    assert read({"role": "user", "content": []}) == [{"role": "user", "content": ""}]


@pytest.mark.parametrize(
    ("turns", "said"),
    [
        ([USER, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}], "messages[1].content[0]"),
        (
            [USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "f", "input": {}}]}],
            "tool_result",
        ),
        ([{"role": "user", "content": [{"type": "image", "source": {}}]}], "'image' is not supported"),
        ([{"role": "user", "content": [{"type": "document", "source": {}}]}], "'document' is not supported"),
        ([{"role": "robot", "content": ""}], "messages[0].role = 'robot'"),
        ([{"content": ""}], "'messages[0].role' is missing"),
        ([], "messages"),
    ],
)
def test_what_is_no_conversation_is_refused(turns: list[Any], said: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(json.dumps({"messages": turns}).encode(), MessagesRequest)
    assert said in str(caught.value)
    assert str(caught.value.param).startswith("messages")


TAGS = ToolFormat("tags", lambda tools: scripted(objects.tagged)(tools, None))
FORM = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
ANSWERS = [
    "Hello",
    "hm</think>Hello",
    f"hm </think>\n\nWell. {CALL % 1}\n{CALL % 2}",
    f"hm</think>{CALL % 1} and {CALL % 2}",
    "hm</think>" + (CALL % 12)[:45],
    'hm</think><tool_call>{"name": "look", "arguments": {"at": [1, {"é": "\\u00e9"}], "b": null}}</tool_call>',
]


@settings(max_examples=examples(200, 60))
@given(said=st.sampled_from(ANSWERS), cuts=st.lists(st.integers(1, 9), min_size=1), omitted=st.booleans())
def test_a_stream_is_the_whole_answer_however_it_is_cut(said: str, cuts: list[int], omitted: bool) -> None:
    """As the client's own code puts it together."""
    reply = Reply("", SamplingParams(), ToolUse(FORM), TAGS, ReasoningTags("<think>", "</think>"), True, ())

    def cut() -> Iterator[str]:
        at = 0
        for length in cuts:
            yield said[at : at + length]
            at += length
        yield said[at:]

    message = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": []}
    output = messages._Output(
        message | {"stop_reason": None, "stop_sequence": None}, reply, None, Seal(b"k" * 32), omitted=omitted
    )
    usage = {"prompt_tokens": 5, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 2}}
    texts = list(cut())
    news = [
        Event("r", text=text, finish_reason="stop" if i == len(texts) - 1 else None) for i, text in enumerate(texts)
    ]
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for each in news:
        for frame in output.push(each, lambda: usage):
            snapshot = accumulate_event(event=frame, current_snapshot=snapshot, json_bufs=buffers)  # type: ignore[arg-type]
    found = snapshot.model_dump(exclude_unset=True, exclude={"stop_details"})
    assert found == output.message
    once = messages._Output(message, reply, None, Seal(b"k" * 32), omitted=omitted)
    list(once.push(Event("r", text=said, finish_reason="stop"), lambda: usage))
    assert unnamed(dict(once.message)) | {"content": 0} == unnamed(dict(output.message)) | {"content": 0}
    assert once.message["content"] == output.message["content"]


def test_arguments_that_are_no_object_reach_the_client() -> None:
    assert messages._input('{"a": [1, "x') == {"a": [1]}
    assert messages._input(" ") == {}
    for text in ("[1]", "5", '{"a": NaN}', "{'a': 1}", '"x"'):
        assert messages._input(text) == {"arguments": text}


async def test_the_official_client_lists_the_models(tmp_path: Path) -> None:
    """Aliases too, in pages, and with Anthropic's errors. Other clients get OpenAI's list of the same models."""
    names = [Path(tmp_path).as_posix(), *(f"claude-{i}" for i in range(4)), "org/name"]
    async with puppets(tmp_path, server={"aliases": names[1:]}) as server:
        async with client(server) as own:
            page = await own.models.list()
            assert ([each.id for each in page.data], page.has_more) == (names, False)
            assert page.data[1].model_dump(exclude_none=True) == {
                "type": "model",
                "id": "claude-0",
                "display_name": "claude-0",
                "created_at": datetime.fromtimestamp(0, UTC),
                "lifecycle": "active",
                "max_input_tokens": 1024,
                "max_tokens": 1024,
            }
            assert [each.id async for each in own.beta.models.list(limit=4)] == names
            pages: list[tuple[Any, list[str], bool]] = [
                ({"limit": 2}, names[:2], True),
                ({"limit": 4, "after_id": names[1]}, names[2:], False),
                ({"limit": 3, "before_id": names[4]}, names[1:4], True),
                ({"limit": 4, "before_id": names[4]}, names[:4], False),
                ({"after_id": names[-1]}, [], False),
                ({"lifecycle": ["retired", "active"]}, names, False),
                ({"lifecycle": ["retired"]}, [], False),
            ]
            for how, shown, more in pages:
                page = await own.models.list(**how)
                assert ([each.id for each in page.data], page.has_more) == (shown, more)
                assert (page.first_id, page.last_id) == ((shown[0], shown[-1]) if shown else (None, None))
            wrong: list[tuple[Any, str]] = [
                ({"limit": 0}, "limit = '0' must be a number from 1 to 1000"),
                ({"after_id": "other"}, "after_id = 'other' is no model that is listed here"),
                ({"extra_query": {"sort": "x"}}, "The parameter 'sort' is not supported"),
            ]
            for how, why in wrong:
                with pytest.raises(anthropic.BadRequestError, match=why):
                    await own.models.list(**how)
            for name in (names[1], "org/name"):
                assert (await own.models.retrieve(name)).id == name
            with pytest.raises(anthropic.NotFoundError) as failed:
                await own.models.retrieve("gpt-4")
            assert failed.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
        _, others = await server.get("/v1/models")
        assert (others["object"], [each["id"] for each in others["data"]]) == ("list", names)
