"""POST /v1/responses with tools: what the model is shown, what comes back, and what can be sent back."""

from __future__ import annotations

import base64
import itertools
import json
import logging
import pickle
import re
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from openai import AsyncOpenAI
from pydantic import TypeAdapter
from tests.examples import slowly
from tests.puppet import Puppets, say
from tests.server.test_harmony import puppet
from tests.server.test_tool_formats import Stranger, odd
from tests.serving import TEMPLATE, Body, Running, chatty, holding, running, thinker

from infer.engine.loop import EngineLoop
from infer.errors import RequestError
from infer_agents.messages import MAX_COUNTED
from infer_agents.response_bodies import ResponsesRequest
from infer_agents.response_shapes import Response
from infer_agents.response_tools import Offer
from infer_server import service
from infer_server.conversation import Conversation
from infer_server.endpoints.chat_completions import ChatRequest
from infer_server.http.bodies import INLINE_BYTES
from infer_server.http.parsing import parse

PATH, COUNT = "/v1/responses", "/v1/responses/input_tokens"
LOOK = {
    "type": "function",
    "name": "look",
    "description": "Look at a place.",
    "parameters": {
        "type": "object",
        "properties": {"at": {"type": "integer"}},
        "required": ["at"],
        "additionalProperties": False,
    },
}
PATCH = {"type": "custom", "name": "patch", "description": "Change files."}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "+++ " WORD "\\n"\nWORD: /[a-z]{2,5}/'}
SPACE = {"type": "namespace", "name": "mail", "description": "Letters.", "tools": [LOOK, PATCH]}
CLOUD = [{"type": "web_search", "search_context_size": "low"}, {"type": "image_generation"}, {"type": "mcp"}]
TOOLS: list[Body] = [LOOK, SPACE, PATCH]
ASKED: Body = {"input": "hi", "tools": TOOLS, "max_output_tokens": 400}


def called(name: str, arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


SAID = "".join(
    (
        "<think>hm, which</think>Well. ",
        called("look", {"at": 1}),
        called("mail__look", {"at": 2}),
        called("patch", {"input": "one\ntwo"}),
        called("mail__patch", {"input": "three"}),
        "<|return|>",
    )
)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Running]:
    """One that says what it is told, with a template that shows tools."""
    model = puppet(tmp_path)
    line = "{{- '# ' ~ message.role ~ ': ' ~ text }}"
    thought = "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    assert line in TEMPLATE
    template = TEMPLATE.replace(line, "{{- '# ' ~ message.role ~ ': ' }}" + thought + "{{ text }}")
    (tmp_path / "template.jinja").write_text(template)
    async with running([Puppets()], model=model, engine={"max_seq_len": 2048}) as made:
        yield made


async def told(server: Running, asked: Body, text: str) -> None:
    """Have the model answer ``asked`` with ``text``."""
    status, prompt, _ = await server.post(asked, COUNT)
    assert status == 200, prompt
    await say(server, prompt["input_tokens"], text)


async def ask(server: Running, asked: Body) -> Any:
    status, answer, _ = await server.post(asked, PATH)
    assert status == 200, answer
    return answer


async def stream(server: Running, asked: Body) -> list[Any]:
    async with server.session.post(server.url + PATH, json=asked | {"stream": True}) as response:
        assert response.status == 200, await response.text()
        text = (await response.read()).decode()
    return [json.loads(block.partition("data: ")[2]) for block in text.split("\n\n") if block]


def plain(items: Sequence[Body]) -> list[Body]:
    """Output items without what differs from answer to answer."""
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in items]


def built(events: Sequence[Any]) -> list[Any]:
    """The items that a client puts together from a stream's deltas alone."""
    items: list[Any] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        item: Any = items[event["output_index"]] if "item_id" in event else None
        if item is not None:
            assert item["id"] == event["item_id"]
        match kind:
            case "output_item.added":
                assert event["output_index"] == len(items)
                items.append(event["item"])
            case "output_item.done":
                final = {key: event["item"][key] for key in ("status", "encrypted_content") if key in event["item"]}
                items[event["output_index"]] |= final
                assert items[event["output_index"]] == event["item"]
            case "content_part.added":
                item["content"].append(event["part"])
            case "reasoning_summary_part.added":
                item["summary"].append(event["part"])
            case "reasoning_text.delta" | "output_text.delta":
                item["content"][event["content_index"]]["text"] += event["delta"]
            case "reasoning_summary_text.delta":
                item["summary"][event["summary_index"]]["text"] += event["delta"]
            case "function_call_arguments.delta":
                item["arguments"] += event["delta"]
            case "custom_tool_call_input.delta":
                item["input"] += event["delta"]
    return items


async def test_calls_are_items_of_their_own_with_their_namespaces_apart(server: Running) -> None:
    await told(server, ASKED, SAID)
    whole = await ask(server, ASKED)
    TypeAdapter(Response).validate_python(whole)
    assert whole["status"] == "completed"
    content = {"type": "output_text", "text": "Well. ", "annotations": [], "logprobs": []}
    thought = {"type": "reasoning_text", "text": "hm, which"}
    status = {"status": "completed"}
    assert plain(whole["output"]) == [
        {"type": "reasoning", "summary": [], "content": [thought]} | status,
        {"type": "message", "role": "assistant", "content": [content]} | status,
        {"type": "function_call", "name": "look", "arguments": '{"at": 1}'} | status,
        {"type": "function_call", "namespace": "mail", "name": "look", "arguments": '{"at": 2}'} | status,
        {"type": "custom_tool_call", "name": "patch", "input": "one\ntwo"} | status,
        {"type": "custom_tool_call", "namespace": "mail", "name": "patch", "input": "three"} | status,
    ]
    ids = [item["id"] for item in whole["output"]]
    assert [id.partition("_")[0] for id in ids] == ["rs", "msg", "fc", "fc", "ctc", "ctc"]
    assert len({*ids, *(item.get("call_id") for item in whole["output"][2:])}) == 10
    assert whole["tools"] == TOOLS
    _, counted, _ = await server.post({"prompt": SAID, "add_special_tokens": False}, "/tokenize")
    assert whole["usage"]["output_tokens"] == counted["count"]
    assert 0 < whole["usage"]["output_tokens_details"]["reasoning_tokens"] < counted["count"]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]},
        {"parallel_tool_calls": False},
        {"max_output_tokens": 20},
        {"max_output_tokens": 45},
    ],
)
async def test_what_is_streamed_is_what_comes_whole(server: Running, more: Body) -> None:
    asked = ASKED | more
    await told(server, asked, SAID)
    await ask(server, asked)  # so that the prompt is cached for both
    whole, events = await ask(server, asked), await stream(server, asked)
    ended = events[-1]["response"]
    assert events[-1]["type"] == f"response.{ended['status']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert built(events) == ended["output"]
    assert plain(ended["output"]) == plain(whole["output"])
    strip = ("id", "created_at", "output")
    assert {k: v for k, v in ended.items() if k not in strip} == {k: v for k, v in whole.items() if k not in strip}
    if "include" in more:
        (part,) = whole["output"][0]["summary"]
        assert part == {"type": "summary_text", "text": "hm, which"}
        assert whole["output"][0]["encrypted_content"]
    if "parallel_tool_calls" in more:
        assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call"]
    if "max_output_tokens" in more:
        assert ended["status"] == ended["output"][-1]["status"] == "incomplete"
        assert ended["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_events_come_in_the_order_that_clients_expect(server: Running) -> None:
    asked = ASKED | {"reasoning": {"summary": "detailed"}}
    await told(server, asked, SAID)
    kinds = [event["type"].removeprefix("response.") for event in await stream(server, asked)]
    once = [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]]
    deltas = ["reasoning_text.delta", "reasoning_summary_text.delta"]
    first = once.index("reasoning_text.done")
    assert once[:5] == [
        *("created", "in_progress", "output_item.added", "content_part.added", "reasoning_summary_part.added")
    ]
    assert once[5:first] == deltas * ((first - 5) // 2)
    assert once[first:] == [
        *("reasoning_text.done", "content_part.done"),
        *("reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done"),
        "output_item.done",
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done") * 2,
        *("output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done") * 2,
        "completed",
    ]


async def test_a_response_begins_and_goes_on_while_there_is_nothing_to_tell(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For Codex, comments are no sign of life."""
    monkeypatch.setattr(service, "SILENCE_S", 0.0)
    await told(server, ASKED, called("patch", {"input": "one\n" * 30}) + "<|return|>")
    with holding(0):
        response = await server.session.post(server.url + PATH, json=ASKED | {"stream": True})
        text = "".join([(await response.content.readuntil(b"\n\n")).decode() for _ in range(4)])
    text += await response.text()
    events = [json.loads(block.partition("data: ")[2]) for block in text.split("\n\n") if block]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "in_progress", "in_progress"]
    told_again = [event["response"] for event in events if event["type"] == "response.in_progress"]
    assert told_again == [events[0]["response"]] * len(told_again)
    added, written = kinds.index("output_item.added"), kinds.index("custom_tool_call_input.delta")
    assert set(kinds[added + 1 : written]) == {"in_progress"}, "an input comes whole"
    assert built(events) == events[-1]["response"]["output"]
    client: Any = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
    async with client.responses.stream(**ASKED, model=(await client.models.list()).data[0].id) as read:
        final = await read.get_final_response()
    assert plain([item.to_dict() for item in final.output]) == plain(events[-1]["response"]["output"])


async def test_a_response_that_is_not_taken_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may take the place while a body is read."""
    monkeypatch.setattr(EngineLoop, "check_place", lambda self: None)
    engine = {"max_batch_size": 1, "max_waiting_requests": 0, "max_seq_len": 256}
    async with running(model=chatty(tmp_path), engine=engine) as server:
        asked: Body = {"input": "hi", "max_output_tokens": 3, "stream": True}
        with holding(0):
            begun = await server.session.post(server.url + PATH, json=asked)
            status, answer, _ = await server.post(asked, PATH)
            assert (begun.status, status, answer["error"]["type"]) == (200, 503, "server_error")
        assert "event: response.incomplete" in await begun.text()


async def test_log_probabilities_are_those_of_the_text_alone(server: Running) -> None:
    asked = ASKED | {"include": ["message.output_text.logprobs"]}
    text = f"Well then.{called('look', {'at': 1})}<|return|>"
    await told(server, asked, text)
    for answer in (await ask(server, asked), (await stream(server, asked))[-1]["response"]):
        (part,) = answer["output"][0]["content"]
        assert part["text"] == "Well then."
        assert "".join(entry["token"] for entry in part["logprobs"]) == "Well then."
        assert [item["type"] for item in answer["output"]] == ["message", "function_call"]


async def test_openais_library_reads_it_and_sends_it_back(server: Running) -> None:
    client: Any = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
    asked: Body = ASKED | {"model": "puppet", "include": ["reasoning.encrypted_content"]}
    asked["model"] = (await client.models.list()).data[0].id
    await told(server, asked, SAID)
    whole = await client.responses.create(**asked)
    async with client.responses.stream(**asked) as events:
        kinds = {event.type: event async for event in events}
        final = await events.get_final_response()
    assert kinds["response.completed"].response.id == final.id
    told_of = {item.id: item.to_dict() for item in final.output}
    assert kinds["response.output_item.done"].item.to_dict() == list(told_of.values())[-1]
    names = [(item.namespace, item.name) for item in whole.output[2:]]
    assert names == [(None, "look"), ("mail", "look"), (None, "patch"), ("mail", "patch")]
    for response in (whole, final):
        calls = response.output[2:]
        outputs = [
            {"type": f"{call.type}_output", "call_id": call.call_id, "output": f"out {i}"}
            if call.type == "function_call"
            else {
                "type": f"{call.type}_output",
                "call_id": call.call_id,
                "output": [{"type": "input_text", "text": f"out {i}"}],
            }
            for i, call in enumerate(calls)
        ]
        for items in (
            response.output,
            [item.to_dict() for item in response.output],
            [item.model_dump() for item in response.output],
        ):
            history: Any = [{"role": "user", "content": "hi"}, *items, *outputs]
            _, counted, _ = await server.post(
                {"messages": as_chat(response, outputs), "tools": CHAT_TOOLS}, "/tokenize"
            )
            found = await client.responses.input_tokens.count(model=asked["model"], input=history, tools=TOOLS)
            assert found.input_tokens == counted["count"]


def as_chat(response: Any, outputs: Sequence[Any]) -> list[Body]:
    """The messages of /v1/chat/completions that say the same."""
    thought, message, *calls = (item.to_dict() for item in response.output)
    said: Any = {
        "role": "assistant",
        "reasoning_content": thought["content"][0]["text"],
        "content": message["content"][0]["text"],
        "tool_calls": [],
    }
    for call in calls:
        name = f"{call['namespace']}__{call['name']}" if call.get("namespace") else call["name"]
        if call["type"] == "function_call":
            part: Body = {"type": "function", "function": {"name": name, "arguments": call["arguments"]}}
        else:
            part = {"type": "custom", "custom": {"name": name, "input": call["input"]}}
        said["tool_calls"].append({"id": call["call_id"]} | part)
    results = [
        {"role": "tool", "tool_call_id": each["call_id"], "content": f"out {i}"} for i, each in enumerate(outputs)
    ]
    return [{"role": "user", "content": "hi"}, said, *results]


def chat_function(name: str, about: str) -> Body:
    return {
        "type": "function",
        "function": {"name": name, "description": about, "parameters": LOOK["parameters"]},
    }


CHAT_TOOLS: list[Body] = [
    chat_function("look", "Look at a place."),
    chat_function("mail__look", "Letters.\n\nLook at a place."),
    {"type": "custom", "custom": {"name": "mail__patch", "description": "Change files."}},
    {"type": "custom", "custom": {"name": "patch", "description": "Change files."}},
]


def test_a_conversation_is_what_the_same_chat_is() -> None:
    """The template gets the same messages and the same functions."""
    call = {"type": "function_call", "call_id": "c", "namespace": "mail", "name": "look", "arguments": '{"at": 2}'}
    custom = {"type": "custom_tool_call", "call_id": "d", "namespace": "mail", "name": "patch", "input": "x"}
    body = {
        "instructions": "be brief",
        "input": [
            {"role": "user", "content": "hi"},
            {"type": "web_search_call", "id": "w", "action": {}},
            call,
            custom,
            {"type": "additional_tools", "tools": []},
            {"type": "function_call_output", "call_id": "c", "output": "seen"},
            {"type": "custom_tool_call_output", "call_id": "d", "output": "done"},
        ],
        "tools": [*TOOLS, *CLOUD],
    }
    calls = [
        {"id": "c", "type": "function", "function": {"name": "mail__look", "arguments": '{"at": 2}'}},
        {"id": "d", "type": "custom", "custom": {"name": "mail__patch", "input": "x"}},
    ]
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": "seen"},
        {"role": "tool", "tool_call_id": "d", "content": "done"},
    ]
    asked = parse(json.dumps(body).encode(), ResponsesRequest)
    chat = parse(json.dumps({"messages": messages, "tools": CHAT_TOOLS}).encode(), ChatRequest)
    assert asked.turns == chat.turns
    assert asked.tool_use() == chat.tool_use()


@pytest.mark.parametrize("type", ["local_shell_call", "shell_call", "apply_patch_call", "mcp_call"])
@pytest.mark.parametrize("output", ["function_call_output", "custom_tool_call_output"])
def test_outputs_of_calls_that_the_template_does_not_see_are_not_shown_either(type: str, output: str) -> None:
    user: Body = {"role": "user", "content": "hi"}
    call: Body = {"type": "function_call", "name": "look", "arguments": "{}"}
    dropped: Body = {"type": type, "call_id": "s", "action": {}}
    seen: Body = {"type": output, "call_id": "s", "output": "seen"}
    shown = (call | {"call_id": "c"}, seen | {"call_id": "c"})

    def asked(*items: Body) -> ResponsesRequest:
        return parse(json.dumps({"input": items}).encode(), ResponsesRequest)

    assert asked(user, dropped, seen, *shown).turns == asked(user, *shown).turns
    own = (call | {"call_id": "s"}, seen)
    assert asked(user, dropped, *own).turns == asked(user, *own).turns, "a call that is shown has its output"
    with pytest.raises(RequestError, match=r"^input\[1\]: the output for call_id 'x' has no call before it") as caught:
        asked(user, seen | {"call_id": "x"}, dropped | {"call_id": ["x"]})
    assert caught.value.param == "input"


@pytest.mark.parametrize(
    ("choice", "offered", "forced"),
    [
        ("auto", ["look", "mail__look", "mail__patch", "patch"], None),
        ("none", [], None),
        ("required", ["look", "mail__look", "mail__patch", "patch"], ["look", "mail__look", "mail__patch", "patch"]),
        ({"type": "function", "name": "mail__look"}, ["look", "mail__look", "mail__patch", "patch"], ["mail__look"]),
        (
            {"type": "custom", "name": "patch", "namespace": "mail"},
            ["look", "mail__look", "mail__patch", "patch"],
            ["mail__patch"],
        ),
        (
            {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "look"}, {"type": "web_search"}],
            },
            ["look", "mail__look"],
            None,
        ),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "patch"}]},
            ["mail__patch", "patch"],
            ["mail__patch", "patch"],
        ),
    ],
)
def test_a_choice_says_which_tools_are_shown_and_which_are_forced(
    choice: Any, offered: list[str], forced: list[str] | None
) -> None:
    use = parse(json.dumps(ASKED | {"tool_choice": choice}).encode(), ResponsesRequest).tool_use()
    assert [tool["function"]["name"] for tool in use.offered] == offered
    names = None if use.forced is None else [tool["function"]["name"] for tool in use.forced]
    assert names == forced
    assert use.custom == {"patch", "mail__patch"}


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_choosing_among_many_tools_takes_work_in_proportion_to_them(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In calls of functions. Each tool is made ready for the choice once in a request."""
    made = Counter[str]()
    init = Offer.__init__

    def counted(self: Offer, name: str, *args: Any) -> None:
        made[name] += 1
        init(self, name, *args)

    monkeypatch.setattr(Offer, "__init__", counted)

    def work(size: int) -> int:
        spaces = [SPACE | {"name": f"s{i}", "tools": [LOOK | {"name": f"f{j}"} for j in range(size)]} for i in range(8)]
        named = [{"type": "function", "namespace": "s7", "name": f"f{j}"} for j in range(size)]
        choice = {"type": "allowed_tools", "mode": mode, "tools": named}
        body = json.dumps({"input": "hi", "tools": spaces, "tool_choice": choice}).encode()
        made.clear()
        calls = 0

        def profile(frame: FrameType, event: str, arg: object) -> None:
            nonlocal calls
            calls += event == "call"

        before = sys.getprofile()
        sys.setprofile(profile)
        try:
            asked = pickle.loads(pickle.dumps(parse(body, ResponsesRequest)))
            use = asked.tool_use()
        finally:
            sys.setprofile(before)
        assert [tool["function"]["name"] for tool in use.offered] == [f"s7__f{j}" for j in range(size)]
        assert use.forced == (use.offered if mode == "required" else None)
        assert asked.client_name("structured_outputs") == ("tools" if mode == "required" else "text.format")
        assert made == Counter(offer.name for offer in asked.offers), "each is made once"
        return calls

    work(1)
    assert work(128) < 3 * work(64)


async def test_the_model_is_not_shown_what_only_a_cloud_has(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    _, counted, _ = await server.post(ASKED, COUNT)
    with caplog.at_level(logging.INFO, logger="infer_agents"):
        for _ in range(2):
            _, more, _ = await server.post(ASKED | {"tools": [*TOOLS, *CLOUD]}, COUNT)
            assert more == counted
    lines = [record.message for record in caplog.records if "only a cloud has" in record.message]
    assert [re.findall(r"type (\w+),", line) for line in lines] == [["image_generation"], ["mcp"], ["web_search"]]
    _, none, _ = await server.post({"input": "hi"}, COUNT)
    _, cloud, _ = await server.post({"input": "hi", "tools": CLOUD}, COUNT)
    assert cloud == none != counted


async def test_reasoning_that_was_altered_is_refused(server: Running) -> None:
    asked = ASKED | {"include": ["reasoning.encrypted_content"], "tools": None}
    await told(server, asked, "<think>hm, which</think>Well.<|return|>")
    thought, message = (await ask(server, asked))["output"]
    user = {"role": "user", "content": "hi"}

    async def count(item: Body) -> tuple[int, Any]:
        status, answer, _ = await server.post({"input": [user, item, message, user]}, COUNT)
        return status, answer

    status, whole = await count(thought)
    assert status == 200
    bare = {"type": "reasoning", "summary": [], "encrypted_content": thought["encrypted_content"]}
    assert await count(bare) == (200, whole)
    other = [{"type": "reasoning_text", "text": "something else altogether"}]
    assert await count(bare | {"content": other}) == (200, whole)
    assert (await count({"type": "reasoning", "summary": [], "content": other}))[1] != whole
    sealed = bare["encrypted_content"]
    for altered in (sealed[:50] + ("A" if sealed[50] != "A" else "B") + sealed[51:], sealed[:-4], "hm"):
        for path in (COUNT, PATH):
            body = {"input": [user, bare | {"encrypted_content": altered}, message, user]}
            status, answer, _ = await server.post(body, path)
            assert (status, answer["error"]["param"]) == (400, "input[1].encrypted_content")
            assert "input[1].encrypted_content" in answer["error"]["message"]


async def test_sealed_bytes_that_are_no_text_are_refused_by_name(server: Running) -> None:
    sealed = base64.b64encode(bytes(32) + "\ud800".encode(errors="surrogatepass")).decode()
    for text in ("hi", "hi " * (INLINE_BYTES // 3 + 1)):
        items = [{"role": "user", "content": text}, {"type": "reasoning", "summary": [], "encrypted_content": sealed}]
        for path in (COUNT, PATH):
            status, answer, _ = await server.post({"input": items}, path)
            assert (status, answer["error"]["param"]) == (400, "input[1].encrypted_content"), answer


FORMS = [
    (GRAMMAR, r"\+\+\+ [a-z]{2,5}\n"),
    ({"type": "grammar", "syntax": "regex", "definition": r"[A-Z]{3}-[0-9]{1,4}"}, r"[A-Z]{3}-[0-9]{1,4}"),
    ({"type": "grammar", "syntax": "regex", "definition": r"\n [A-Z]{3}"}, r"\n [A-Z]{3}"),
]


@pytest.mark.parametrize(("form", "expected"), FORMS, ids=["lark", "regex", "blank"])
@pytest.mark.parametrize("thinking", [*slowly(False), True])
async def test_the_input_of_a_forced_tool_follows_its_grammar(
    tmp_path: Path, form: Body, expected: str, thinking: bool
) -> None:
    """Drawn by a model that would write something else, after its reasoning, if it reasons: whether it does, and how
    long, depends on the processor's bits."""
    tools = [LOOK, SPACE | {"tools": [PATCH | {"format": form}]}]
    asked = {"input": "a loop", "tools": tools, "max_output_tokens": 1500, "seed": 8}
    asked |= {
        "tool_choice": {"type": "custom", "name": "patch"},
        "reasoning": {"effort": "high" if thinking else "none"},
    }
    async with running(model=thinker(tmp_path), engine={"max_seq_len": 2048}) as server:
        whole, events = await ask(server, asked), await stream(server, asked)
        ended = events[-1]["response"]
        for answer in (whole, ended):
            *before, call = answer["output"]
            assert answer["status"] == "completed"
            assert [item["type"] for item in before] in ([], ["reasoning"] if thinking else [])
            assert (call["type"], call["namespace"], call["name"]) == ("custom_tool_call", "mail", "patch")
            assert re.fullmatch(expected, call["input"]), call
        assert built(events) == ended["output"]
        assert plain(whole["output"]) == plain(ended["output"])


async def test_forced_calls_match_the_schema(tmp_path: Path) -> None:
    asked = ASKED | {"tool_choice": "required", "seed": 1, "max_output_tokens": 120, "parallel_tool_calls": False}
    async with running(model=chatty(tmp_path), engine={"max_seq_len": 2048}) as server:
        (call,) = (await ask(server, asked))["output"]
        named = asked | {"tool_choice": {"type": "function", "name": "look", "namespace": "mail"}}
        (mail,) = (await ask(server, named))["output"]
    assert call["type"] in ("function_call", "custom_tool_call")
    assert (mail["namespace"], mail["name"], list(json.loads(mail["arguments"]))) == ("mail", "look", ["at"])


def test_the_model_is_told_of_a_grammar() -> None:
    body = {"input": "x", "tools": [PATCH | {"format": GRAMMAR}]}
    use = parse(json.dumps(body).encode(), ResponsesRequest).tool_use()
    (tool,) = use.offered
    assert tool["function"]["description"].startswith(
        "Change files.\n\nThe input must match this Lark grammar:\nstart: "
    )
    assert (use.outputs(), use.custom) == (None, {"patch"})


async def test_an_effort_is_a_hint(tmp_path: Path) -> None:
    asked: Body = {"input": "hi"}
    async with running(model=chatty(tmp_path)) as server:
        _, none, _ = await server.post(asked | {"reasoning": {"effort": "none"}}, COUNT)
        _, high, _ = await server.post(asked | {"reasoning": {"effort": "high"}}, COUNT)
        assert none["input_tokens"] < high["input_tokens"], "the template opens the reasoning"
    (tmp_path / "template.jinja").write_text(TEMPLATE.replace("enable_thinking", "other"))
    async with running(model={"path": "demo", "chat_template": str(tmp_path / "template.jinja")}) as server:
        for effort in ("none", "high"):
            status, found, _ = await server.post(asked | {"reasoning": {"effort": effort}}, COUNT)
            assert (status, found) == (200, none)


async def test_an_effort_or_a_budget_bounds_the_reasoning(tmp_path: Path) -> None:
    """As they do in chats, with the same bits."""
    section = thinker(tmp_path) | {"effort_budgets": ["low=3"]}
    template = tmp_path / "template.jinja"
    template.write_text(template.read_text().replace("enable_thinking", "true"))
    asked: Body = {"input": "a loop", "max_output_tokens": 24, "temperature": 0, "store": False}
    chat: Body = {"messages": [{"role": "user", "content": "a loop"}], "max_tokens": 24, "temperature": 0}
    async with running(model=section, engine={"max_seq_len": 256}) as server:
        free, _ = await both(server, asked, chat, {}, {})
        for own, theirs, thoughts in (
            ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}, 4),
            ({"reasoning": {"effort": "none"}}, {"reasoning_effort": "none"}, 1),
            ({"reasoning": {"effort": "low"}, "thinking_token_budget": 2}, {"thinking_token_budget": 2}, 3),
        ):
            text, count = await both(server, asked, chat, own, theirs)
            assert (count, text != free) == (thoughts, True)
    async with running(model=chatty(tmp_path)) as server:
        status, refused, _ = await server.post(asked | {"thinking_token_budget": 2}, PATH)
        assert (status, refused["error"]["param"]) == (400, "thinking_token_budget")


async def both(server: Running, asked: Body, chat: Body, own: Body, theirs: Body) -> tuple[str, int]:
    """The text of a response, which is that of a chat, and its tokens of reasoning."""
    _, response, _ = await server.post(asked | own, PATH)
    _, told, _ = await server.post(chat | theirs, "/v1/chat/completions")
    texts = {item["type"]: item["content"][0]["text"] for item in response["output"]}
    message = told["choices"][0]["message"]
    assert (texts.get("reasoning"), texts["message"]) == (message.get("reasoning_content"), message["content"])
    count = response["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert count == told["usage"]["completion_tokens_details"]["reasoning_tokens"]
    return texts["message"], count


async def test_an_effort_that_the_template_refuses_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it reasons at all is not. Nothing is rendered twice that would be the same."""
    rendered: list[Body] = []
    render = Conversation.render

    async def counted(self: Conversation, messages: bytes, /, **form: Any) -> str:
        rendered.append(form)
        return await render(self, messages, **form)

    monkeypatch.setattr(Conversation, "render", counted)
    known = "{% if other or reasoning_effort is defined and reasoning_effort not in ('none', 'high') %}"
    refusal = "{{ raise_exception('reasoning_effort must be none or high') }}{% endif %}"
    (tmp_path / "template.jinja").write_text(known + refusal + "{{ reasoning_effort }}" + TEMPLATE)
    chat: Body = {"messages": [{"role": "user", "content": "hi"}]}
    items: Body = {"input": "hi"}
    async with running(model={"path": "demo", "chat_template": str(tmp_path / "template.jinja")}) as server:

        async def count(path: str, body: Body, **variables: Any) -> int | None:
            rendered.clear()
            _, found, _ = await server.post(body | {"chat_template_kwargs": variables}, path)
            assert all(each != other for each, other in itertools.combinations(rendered, 2))
            number: int | None = found.get("input_tokens", found.get("count"))
            return number

        plain, thinking = [await count("/tokenize", chat, enable_thinking=on) for on in (False, True)]
        high = await count("/tokenize", chat, enable_thinking=True, reasoning_effort="high")
        assert len({plain, thinking, high, None}) == 4
        for refused in ({"reasoning_effort": "medium"}, {"other": 1}):
            assert await count("/tokenize", chat, **refused) is None
        for effort, expected in (("low", thinking), ("high", high)):
            asked = items | {"reasoning": {"effort": effort}}
            assert await count(COUNT, asked) == expected
            assert await count(COUNT, asked, reasoning_effort="medium") is None, "which is no hint"
        for effort, kind, expected in (
            ("low", "adaptive", thinking),
            ("low", "disabled", plain),
            ("high", "adaptive", high),
        ):
            asked = chat | {"thinking": {"type": kind}, "output_config": {"effort": effort}}
            assert await count("/v1/messages/count_tokens", asked) == expected
            assert await count("/v1/messages/count_tokens", asked, reasoning_effort="medium") is None


@pytest.mark.parametrize("strict", [True, False])
async def test_a_template_that_knows_one_system_message_gets_one(tmp_path: Path, strict: bool) -> None:
    """Whether it refuses others or drops them."""
    guard = "{{- raise_exception('The system message must be at the beginning.') }}" if strict else "{%- continue %}"
    first = "{%- if message.role in ['system', 'developer'] and not loop.first %}" + guard + "{%- endif %}"
    loop = "{%- for message in messages %}"
    assert loop in TEMPLATE
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE.replace(loop, loop + first))
    said = [("developer", "One."), ("developer", "Two."), ("user", "hi"), ("developer", "Three."), ("user", "ho")]
    items = [{"role": role, "content": content} for role, content in said]
    one = [{"role": "system", "content": "Zero.\n\nOne.\n\nTwo."}]
    one += [{"role": "user", "content": content} for content in ("hi", "Three.", "ho")]
    async with running(model={"path": "demo", "chat_template": str(template)}) as server:
        _, found, _ = await server.post({"instructions": "Zero.", "input": items}, COUNT)
        _, counted, _ = await server.post({"messages": one}, "/tokenize")
        assert found["input_tokens"] == counted["count"]
        template.write_text(TEMPLATE)
    async with running(model={"path": "demo", "chat_template": str(template)}) as server:
        _, apart, _ = await server.post({"instructions": "Zero.", "input": items}, COUNT)
        _, each, _ = await server.post({"messages": [{"role": "system", "content": "Zero."}, *items]}, "/tokenize")
        assert apart["input_tokens"] == each["count"]
    template.write_text("{{ raise_exception('no') }}")
    async with running(model={"path": "demo", "chat_template": str(template)}) as server:
        status, answer, _ = await server.post({"instructions": "Zero.", "input": items}, COUNT)
        assert (status, answer["error"]["param"]) == (400, "input")


async def test_a_failure_ends_a_response_as_failed(tmp_path: Path) -> None:
    """Codex reads that, and libraries the error behind it."""
    asked = {"input": "hi", "tools": [LOOK], "max_output_tokens": 20}
    async with running([Stranger(odd(KeyError("lost")))], model=chatty(tmp_path, tool_format="odd")) as server:
        *begun, failed, error = events = await stream(server, asked)
        assert begun
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert (failed["type"], error["type"]) == ("response.failed", "error")
        assert failed["response"]["status"] == "failed"
        TypeAdapter(Response).validate_python(failed["response"])
        assert failed["response"]["error"] == {"code": "server_error", "message": error["message"]}
        assert "KeyError" in error["message"]
        assert (await server.post(asked, PATH))[0] == 500


async def test_an_input_may_be_empty(tmp_path: Path) -> None:
    probe: Body = {"max_output_tokens": 1, "store": False}
    async with running(model=chatty(tmp_path)) as server:
        nothing: Any
        for nothing in ([], ""):
            answer = await ask(server, probe | {"input": nothing, "instructions": "Be brief."})
            system = {"messages": [{"role": "system", "content": "Be brief."}]}
            _, counted, _ = await server.post(system, "/tokenize")
            assert answer["usage"]["input_tokens"] == counted["count"]
            assert (await ask(server, probe | {"input": nothing}))["usage"]["output_tokens"] == 1
    (tmp_path / "template.jinja").write_text(TEMPLATE + "{{ messages[0].content.strip() }}")
    async with running(model={"path": "demo", "chat_template": str(tmp_path / "template.jinja")}) as server:
        status, answer, _ = await server.post(probe | {"input": []}, PATH)
        assert (status, answer["error"]["param"]) == (400, "input")


async def test_the_count_is_what_the_response_takes(server: Running) -> None:
    for more in ({}, {"instructions": "Be brief."}, {"tools": None}, {"tool_choice": "none"}):
        asked = ASKED | more | {"max_output_tokens": 1}
        _, counted, _ = await server.post(asked, COUNT)
        assert counted == {"object": "response.input_tokens", "input_tokens": counted["input_tokens"]}
        assert (await ask(server, asked))["usage"]["input_tokens"] == counted["input_tokens"]
    _, long, _ = await server.post({"input": "hi " * 5000}, COUNT)
    assert long["input_tokens"] > 2048, "more than fit can be counted"


async def test_no_more_than_so_many_tokens_are_counted(server: Running) -> None:
    status, answer, _ = await server.post({"input": "hi " * (MAX_COUNTED // 2)}, COUNT)
    assert (status, answer["error"]["param"]) == (400, "input")
    assert f"at most {MAX_COUNTED} are counted" in answer["error"]["message"]
