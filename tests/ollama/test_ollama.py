"""Ollama's API, by Ollama's own client and as Open WebUI asks it."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any

import ollama
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.bodies import WRONG, check_sweep, places, put
from tests.examples import examples
from tests.puppet import Puppet, Puppets, say
from tests.serving import TEMPLATE, Body, Running, holding, retokened, running

from infer.contracts.params import SamplingParams
from infer.contracts.request import Event
from infer.errors import InferError, RequestError
from infer_ollama.answers import _arguments
from infer_ollama.bodies import ChatBody, EmbedBody, GenerateBody, OldEmbedBody, PullBody, ShowBody, conversation
from infer_server import events, service
from infer_server.events import raise_if_failed
from infer_server.http.body import Body as WireBody
from infer_server.http.parsing import checked, parse
from infer_server.http.wire import Ollama

USER = {"role": "user", "content": "hi"}
CALL = '<tool_call>{"name": "look", "arguments": {"at": %d}}</tool_call>'
LOOK: Body = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}, "required": ["at"]},
    },
}
LOOK = ollama.Tool.model_validate(LOOK).model_dump(exclude_none=True)  # the client writes its fields in another order
MODEL = "demo"


def puppet(folder: Path, *tokens: str) -> Body:
    """The section ``model`` of a server whose model says what it is told, and reasons if asked to. Its tokenizer has
    these ``tokens``, too."""
    retokened(folder, "</think>", *tokens)
    (folder / "generation_config.json").write_text('{"eos_token_id": 0}')
    (folder / "template.jinja").write_text(TEMPLATE)
    section = {"path": str(folder), "chat_template": str(folder / "template.jinja"), "family": "puppet"}
    return section | {"dtype": "float32"}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Running]:
    Puppet.said.zero_()
    sections = {"model": puppet(tmp_path), "engine": {"max_seq_len": 1024}}
    async with running([Puppets()], server={"access_log": False, "aliases": ["demo"]}, **sections) as made:
        yield made


@pytest.fixture
async def drawing(tmp_path: Path) -> AsyncIterator[Running]:
    """A server of the demo model, which draws its answers."""
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    model = {"path": "demo", "chat_template": str(tmp_path / "template.jinja")}
    async with running(model=model, engine={"max_seq_len": 512}) as made:
        yield made


def client(server: Running) -> ollama.AsyncClient:
    return ollama.AsyncClient(host=server.url)


async def told(server: Running, text: str, **chat: Any) -> int:
    """Have the model answer this chat with ``text``. Returns how many tokens the prompt has."""
    body = {"messages": [USER], "max_tokens": 1} | chat
    status, answer, _ = await server.post(body, "/v1/chat/completions")
    assert status == 200, answer
    tokens: int = answer["usage"]["prompt_tokens"]
    await say(server, tokens, text)
    return tokens


async def lines(server: Running, path: str, **body: Any) -> list[Any]:
    async with server.session.post(server.url + path, json={"model": MODEL} | body) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "application/x-ndjson"
        return [json.loads(line) for line in (await response.text()).splitlines()]


async def refused(server: Running, path: str, **body: Any) -> str:
    status, answer, _ = await server.post({"model": MODEL} | body, path)
    assert status == 400, answer
    assert set(answer) == {"error"}
    return str(answer["error"])


@pytest.mark.parametrize("name", ["demo", "demo:latest"])
async def test_a_chat_whole_and_streamed_is_the_one_of_chat_completions(name: str, drawing: Running) -> None:
    asked: Body = {"messages": [{"role": "system", "content": "Be brief."}, USER]}
    openai = asked | {"temperature": 0.8, "seed": 3, "max_tokens": 30, "top_k": 20, "repetition_penalty": 1.1}
    _, expected, _ = await drawing.post(openai, "/v1/chat/completions")
    options = {"temperature": 0.8, "seed": 3, "num_predict": 30, "top_k": 20, "repeat_penalty": 1.1, "num_ctx": 4096}
    whole = await client(drawing).chat(name, **asked, options=options)
    assert whole.message.content == expected["choices"][0]["message"]["content"]
    assert whole.model == name
    usage = expected["usage"]
    assert (whole.prompt_eval_count, whole.eval_count) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert whole.done_reason == expected["choices"][0]["finish_reason"] == "length"
    for part in ("total_duration", "prompt_eval_duration", "eval_duration", "load_duration"):
        assert isinstance(whole[part], int)
        assert 0 < whole[part] <= whole.total_duration
    assert datetime.fromisoformat(str(whole.created_at)).tzinfo is not None
    parts = [part async for part in await client(drawing).chat(name, **asked, options=options, stream=True)]
    assert len(parts) > 3
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert (parts[-1].eval_count, parts[-1].done_reason) == (30, "length")


async def test_generate_uses_the_template_or_with_raw_does_not(drawing: Running) -> None:
    options = {"temperature": 0.0, "num_predict": 20}
    drawn = {"temperature": 0, "max_tokens": 20}
    chat = {"messages": [{"role": "system", "content": "Be brief."}, USER]} | drawn
    _, expected, _ = await drawing.post(chat, "/v1/chat/completions")
    found = await client(drawing).generate(MODEL, "hi", system="Be brief.", options=options)
    assert found.response == expected["choices"][0]["message"]["content"]
    assert found.prompt_eval_count == expected["usage"]["prompt_tokens"]
    _, expected, _ = await drawing.post({"prompt": "def f("} | drawn)
    found = await client(drawing).generate(MODEL, "def f(", raw=True, options=options)
    assert (found.response, found.done_reason) == (expected["choices"][0]["text"], "length")
    assert found.prompt_eval_count == expected["usage"]["prompt_tokens"]
    parts = [p async for p in await client(drawing).generate(MODEL, "def f(", raw=True, options=options, stream=True)]
    assert "".join(part.response or "" for part in parts) == found.response


async def test_without_a_template_a_prompt_is_given_as_it_is(tmp_path: Path) -> None:
    retokened(tmp_path)
    async with running(model={"path": str(tmp_path)}, server={"access_log": False, "aliases": ["demo"]}) as server:
        drawn = {"temperature": 0, "max_tokens": 20}
        _, expected, _ = await server.post({"prompt": "def f("} | drawn)
        found = await client(server).generate(MODEL, "def f(", options={"temperature": 0.0, "num_predict": 20})
        assert found.response == expected["choices"][0]["text"]
        assert "no chat template" in await refused(server, "/api/generate", prompt="x", system="y")
        assert "no chat template" in await refused(server, "/api/chat", messages=[USER])


async def test_calls_of_tools_come_whole_and_go_round(server: Running) -> None:
    tokens = await told(server, f"Well.{CALL % 1}{CALL % 2}", tools=[LOOK])
    whole = await client(server).chat(MODEL, [USER], tools=[LOOK])
    assert whole.message.content == "Well."
    assert whole.prompt_eval_count == tokens
    assert [(c.function.name, c.function.arguments) for c in whole.message.tool_calls or ()] == [
        ("look", {"at": 1}),
        ("look", {"at": 2}),
    ]
    assert whole.done_reason == "stop"
    parts = await lines(server, "/api/chat", messages=[USER], tools=[LOOK])
    calls = [call for part in parts for call in part["message"].get("tool_calls", ())]
    assert [call["function"]["index"] for call in calls] == [0, 1]
    assert len({call["id"] for call in calls}) == 2
    results = [{"role": "tool", "tool_name": "look", "content": str(i)} for i in range(2)]
    history: list[Any] = [USER, whole.message, *results]
    again = await client(server).chat(MODEL, history, tools=[LOOK], options={"num_predict": 1})
    plain = [{"id": f"call0000{i}", "type": "function"} for i in range(2)]
    for i, call in enumerate(plain):
        call["function"] = {"name": "look", "arguments": json.dumps({"at": i + 1})}  # type: ignore[assignment]
    messages: list[Body] = [USER, {"role": "assistant", "content": "Well.", "tool_calls": plain}]
    messages += [{"role": "tool", "tool_call_id": f"call0000{i}", "content": str(i)} for i in range(2)]
    body = {"messages": messages, "tools": [LOOK], "max_tokens": 1}
    _, expected, _ = await server.post(body, "/v1/chat/completions")
    assert again.prompt_eval_count == expected["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("written", "expected"),
    [('{"at": 1, "b": ', {"at": 1}), ("", {}), ("[1]", {"arguments": "[1]"}), ("x", {"arguments": "x"})],
)
def test_arguments_are_an_object_whatever_the_model_wrote(written: str, expected: Body) -> None:
    assert _arguments(written) == expected


def test_results_get_the_ids_of_their_calls() -> None:
    def call(name: str, **more: str) -> Body:
        return {"function": {"name": name, "arguments": {}}} | more

    body = ChatBody.model_validate(
        {
            "model": "m",
            "messages": [
                {"role": "assistant", "tool_calls": [call("a"), call("b", id="own"), call("a")]},
                {"role": "tool", "content": "", "tool_name": "b"},
                {"role": "tool", "content": "", "tool_name": "a"},
                {"role": "tool", "content": ""},
                {"role": "tool", "content": ""},
                {"role": "tool", "content": "", "tool_call_id": "other"},
            ],
        }
    )
    shown = conversation(body.messages)
    assert [each["id"] for each in shown[0]["tool_calls"]] == ["call00000", "own", "call00002"]
    assert [each.get("tool_call_id") for each in shown[1:]] == ["own", "call00000", "call00002", None, "other"]


async def test_how_much_to_think_bounds_what_the_template_cannot_turn_off(tmp_path: Path) -> None:
    Puppet.said.zero_()
    section = puppet(tmp_path) | {"effort_budgets": ["low=2"]}
    (tmp_path / "template.jinja").write_text(TEMPLATE.replace("enable_thinking", "true"))
    async with running([Puppets()], model=section, server={"access_log": False, "aliases": ["demo"]}) as server:
        await told(server, "one two three four five</think>Hello")
        for think, count in ((True, 5), ("low", 2), (False, 0)):
            whole = await client(server).chat(MODEL, [USER], think=think)
            assert len((whole.message.thinking or "").split()) <= count
            assert bool(whole.message.thinking) == bool(count)


async def test_thinking_is_told_apart(server: Running) -> None:
    await told(server, "hm</think>Hello", chat_template_kwargs={"enable_thinking": True})
    for think in (True, "low"):
        whole = await client(server).chat(MODEL, [USER], think=think)
        assert (whole.message.thinking, whole.message.content) == ("hm", "Hello")
        parts = await lines(server, "/api/chat", messages=[USER], think=think)
        assert "".join(part["message"].get("thinking", "") for part in parts) == "hm"
        answer = await client(server).generate(MODEL, "hi", think=think)
        assert (answer.thinking, answer.response) == ("hm", "Hello")
    await told(server, "Hello", chat_template_kwargs={"enable_thinking": False})
    whole = await client(server).chat(MODEL, [USER], think=False)
    assert (whole.message.thinking, whole.message.content) == (None, "Hello")


async def test_a_format_holds(drawing: Running) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    found = await client(drawing).chat(MODEL, [USER], format=schema, options={"num_predict": 100})
    assert json.loads(found.message.content or "")["city"] in ("Rome", "Oslo")
    answer = await client(drawing).generate(MODEL, "hi", format=schema, options={"num_predict": 100})
    assert json.loads(answer.response or "")["city"] in ("Rome", "Oslo")
    found = await client(drawing).chat(MODEL, [USER], format="json", options={"num_predict": 5})
    assert (found.message.content or "").lstrip().startswith("{")
    wrong = await refused(drawing, "/api/chat", messages=[USER], format={"type": 3})
    assert "format" in wrong


async def test_logprobs(drawing: Running) -> None:
    options = {"temperature": 0.0, "num_predict": 3}
    found = await client(drawing).chat(MODEL, [USER], logprobs=True, top_logprobs=2, options=options)
    assert len(found.logprobs or ()) == 3
    for entry in found.logprobs or ():
        assert entry.logprob <= 0
        assert len(entry.top_logprobs or ()) == 2
    parts = await lines(drawing, "/api/generate", prompt="hi", logprobs=True, options=options)
    assert [e["token"] for part in parts for e in part.get("logprobs", ())] == [e.token for e in found.logprobs or ()]
    assert "top_logprobs needs logprobs" in await refused(drawing, "/api/chat", messages=[USER], top_logprobs=2)


async def test_embeddings(drawing: Running) -> None:
    _, expected, _ = await drawing.post({"input": ["one", "two"]}, "/v1/embeddings")
    found = await client(drawing).embed(MODEL, ["one", "two"], truncate=True)
    assert [list(each) for each in found.embeddings] == [each["embedding"] for each in expected["data"]]
    assert found.prompt_eval_count == expected["usage"]["prompt_tokens"]
    one = await client(drawing).embed(MODEL, "one", dimensions=4)
    assert len(one.embeddings[0]) == 4
    old = await client(drawing).embeddings(MODEL, "one")
    assert list(old.embedding) == expected["data"][0]["embedding"]
    assert (await client(drawing).embed(MODEL, [])).embeddings == []
    assert (await client(drawing).embed(MODEL, "")).embeddings == []
    _, empty, _ = await drawing.post({"input": ""}, "/v1/embeddings")
    found = await client(drawing).embed(MODEL, ["", ""])
    assert [list(each) for each in found.embeddings] == [empty["data"][0]["embedding"]] * 2
    assert (await drawing.post({"model": MODEL, "prompt": ""}, "/api/embeddings"))[1] == {"embedding": []}
    assert "dimensions" in await refused(drawing, "/api/embed", input="x", dimensions=10**6)
    assert "512" in await refused(drawing, "/api/embed", input="x " * 5000, truncate=True)


async def test_the_model_is_there_and_stays(server: Running) -> None:
    async with server.session.get(server.url + "/") as response:
        assert (response.status, await response.text()) == (200, "Ollama is running")
    async with server.session.head(server.url + "/") as response:
        assert response.status == 200
    assert re.fullmatch(r"\d+\.\d+\.\d+", (await server.get("/api/version"))[1]["version"])
    names = [model.model for model in (await client(server).list()).models]
    assert "demo:latest" in names
    (first, *_) = (await client(server).ps()).models
    assert first.context_length == 1024
    shown = await client(server).show(MODEL)
    assert {"completion", "tools", "thinking"} <= set(shown.capabilities or ())
    assert (shown.modelinfo or {})["infer.context_length"] == 1024
    assert shown.template
    assert (await client(server).pull(MODEL)).status == "success"
    assert [part.status async for part in await client(server).pull(MODEL, stream=True)][-1] == "success"
    for keep, reason in (
        (None, "load"),
        ("5m", "load"),
        (-1, "load"),
        (0, "unload"),
        ("0", "unload"),
        ("0s", "unload"),
    ):
        loaded = await client(server).generate(MODEL, "", keep_alive=keep)
        assert (loaded.done, loaded.done_reason) == (True, reason), keep
        assert (await client(server).chat(MODEL, [], keep_alive=keep)).done_reason == reason


async def test_errors_have_ollamas_shape(server: Running) -> None:
    for path, more in (
        ("chat", {"messages": [USER]}),
        ("generate", {"prompt": "x"}),
        ("show", {}),
        ("embed", {"input": "x"}),
    ):
        status, answer, _ = await server.post({"model": "other"} | more, f"/api/{path}")
        assert (status, answer) == (404, {"error": "model 'other' not found"})
    with pytest.raises(ollama.ResponseError, match="model 'other' not found") as raised:
        await client(server).chat("other", [USER])
    assert raised.value.status_code == 404
    assert "pulls no models" in await refused(server, "/api/pull", model="other")
    for path in ("create", "copy", "push", "blobs/sha256:0"):
        status, answer, _ = await server.post({"model": MODEL}, f"/api/{path}")
        assert (status, set(answer)) == (404, {"error"})
        assert "does not change models" in answer["error"]
    with pytest.raises(ollama.ResponseError, match="does not change models"):
        await client(server).delete(MODEL)
    wrong: list[tuple[Body, str]] = [
        ({"options": {"num_ctx": 0}}, "options.num_ctx = 0"),
        ({"options": {"unheard": 1}}, "options.unheard"),
        ({"options": {"mirostat": 2}}, "options.mirostat = 2 is not supported"),
        ({"options": {"repeat_penalty": 1.2, "repeat_last_n": 64}}, "repeat_last_n = 64"),
        ({"options": {"stop": ["x"] * 1000}}, "options.stop"),
        ({"keep_alive": "soon"}, "keep_alive"),
        ({"keep_alive": "1" * 65}, "at most 64 characters"),
        ({"messages": [USER | {"images": ["aGk="]}]}, "messages[0].images"),
        ({"messages": [{"role": "x"}]}, "messages[0].role"),
        ({"messages": [USER | {"content": "x " * 2000}]}, "1024"),
        ({"unheard": 1}, "unheard"),
    ]
    for more, words in wrong:
        assert words in await refused(server, "/api/chat", **{"messages": [USER]} | more), more
    for name, value in (("template", "x"), ("suffix", "x"), ("context", [1]), ("images", ["aGk="]), ("width", 3)):
        assert name in await refused(server, "/api/generate", **{"prompt": "x", name: value})
    assert "raw" in await refused(server, "/api/generate", prompt="x", raw=True, system="y")


async def test_a_model_that_does_not_reason_is_not_asked_to() -> None:
    async with running(model={"path": "demo", "reasoning": "none"}) as server:
        assert "does not support thinking" in await refused(server, "/api/generate", prompt="x", think=True)
        answer = await client(server).generate(MODEL, "x", think=False, options={"num_predict": 1})
        assert answer.done


async def test_a_stream_that_fails_ends_with_an_error(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    await told(server, "Hello")

    def failing(event: Event) -> None:
        if event.finish_reason is not None:
            raise InferError("the engine is tired")
        raise_if_failed(event)

    monkeypatch.setattr(events, "raise_if_failed", failing)
    *parts, last = await lines(server, "/api/chat", messages=[USER])
    assert last == {"error": "the engine is tired"}
    assert parts
    with pytest.raises(ollama.ResponseError, match="tired"):
        async for _ in await client(server).chat(MODEL, [USER], stream=True):
            pass


async def test_line_breaks_in_an_answer_do_not_divide_a_line(tmp_path: Path) -> None:
    """The client divides a stream as ``str.splitlines`` does."""
    breaks = ("\x85", "\u2028", "\u2029")
    text = "a".join(breaks)
    sections = {"model": puppet(tmp_path, *breaks), "engine": {"max_seq_len": 1024}}
    async with running([Puppets()], server={"aliases": [MODEL]}, **sections) as server:
        await told(server, text)
        parts = [part async for part in await client(server).chat(MODEL, [USER], stream=True, logprobs=True)]
        assert "".join(part.message.content or "" for part in parts) == text
        assert {entry.token for part in parts for entry in part.logprobs or ()} >= {"a", *breaks}
        for path in ("/v1/chat/completions", "/v1/responses"):
            asked = {"messages": [USER]} if path.endswith("completions") else {"input": "hi"}
            async with server.session.post(server.url + path, json=asked | {"stream": True}) as response:
                said = await response.text()
            assert len(said.splitlines()) == len(said.split("\n")) - 1
            assert "\\u2028" in said


async def test_a_stream_that_waits_stays_json(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    await told(server, "Hello")
    monkeypatch.setattr(service, "SILENCE_S", 0.0)
    with holding(0):
        response = await server.session.post(server.url + "/api/chat", json={"model": MODEL, "messages": [USER]})
        assert await response.content.readexactly(1) == Ollama.IDLE
    text = await response.text()
    assert "".join(json.loads(line)["message"]["content"] for line in text.splitlines()) == "Hello"


SEEN: tuple[tuple[str, Body | None], ...] = (
    ("/api/tags", None),
    ("/api/ps", None),
    ("/api/version", None),
    (
        "/api/chat",
        {
            "messages": [USER],
            "options": {"temperature": 0.5, "num_ctx": 4096, "seed": 3, "top_k": 5, "stop": ["zz"], "num_predict": 10},
            "stream": True,
        },
    ),
    (
        "/api/chat",
        {
            "messages": [{"role": "system", "content": "Be brief."}, USER],
            "options": {"num_predict": 10},
            "stream": False,
            "tools": [LOOK],
        },
    ),
    ("/api/embed", {"input": ["one"]}),
    ("/api/generate", {"prompt": "def f(", "options": {"num_predict": 5}, "stream": False}),
    ("/api/show", {}),
    ("/v1/chat/completions", {"messages": [USER], "max_tokens": 4}),
    ("/api/pull", {"insecure": True}),
    ("/api/generate", {"keep_alive": 0, "prompt": ""}),
)
"""What the backend of Open WebUI 0.12.4 asked, in this order, when it was told to list models, chat, embed, complete,
show and pull one, and let it go. Every body has the name that it read in /api/tags."""


async def test_open_webui_gets_what_it_asks_for(drawing: Running) -> None:
    (model,) = (await drawing.get("/api/tags"))[1]["models"]
    assert {"name", "model", "modified_at", "size", "digest", "details"} <= set(model)
    assert model["model"] == "demo:latest"
    for path, body in SEEN:
        if body is None:
            assert (await drawing.get(path))[0] == 200
            continue
        async with drawing.session.post(drawing.url + path, json={"model": model["model"]} | body) as response:
            parts = [json.loads(line) for line in (await response.text()).splitlines()]
            assert response.status == 200, (path, parts)
        if path == "/api/chat":
            assert "".join(part["message"]["content"] for part in parts)
            assert parts[-1]["eval_duration"] > 0


async def test_options_that_only_ollama_has_are_taken(server: Running) -> None:
    await told(server, "Hello")
    options = {"temperature": 0.7, "num_ctx": 32768, "num_keep": 24, "num_thread": 4, "use_mmap": True, "stop": ["##"]}
    options |= {"repeat_last_n": 64, "mirostat": 0, "mirostat_eta": 0.1, "tfs_z": 1.0, "num_batch": 512, "num_gpu": 1}
    body = {"messages": [USER], "options": options, "stream": True, "keep_alive": "5m", "format": None}
    parts = await lines(server, "/api/chat", **body)
    assert "".join(part["message"]["content"] for part in parts) == "Hello"


async def test_a_key_is_asked_for() -> None:
    async with running(server={"access_log": False, "api_keys": "sesame"}) as server:
        status, answer, _ = await server.post({"model": MODEL, "prompt": "x"}, "/api/generate")
        assert (status, set(answer)) == (401, {"error"})
        assert isinstance(answer["error"], str)
        async with server.session.get(server.url + "/") as response:
            assert response.status == 200
        own = ollama.AsyncClient(host=server.url, headers={"Authorization": "Bearer sesame"})
        assert (await own.list()).models


SENT: dict[str, tuple[type[WireBody], Body]] = {
    "chat": (
        ChatBody,
        {
            "model": MODEL,
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": "x",
                    "thinking": "y",
                    "tool_calls": [{"id": "a", "function": {"index": 0, "name": "look", "arguments": {"at": 1}}}],
                },
                {"role": "tool", "content": "z", "tool_name": "look", "tool_call_id": "a"},
            ],
            "tools": [LOOK],
            "options": {"num_predict": 1, "temperature": 0.5, "seed": 3, "stop": ["x"], "num_ctx": 10, "top_k": 3},
            "format": "json",
            "think": "low",
            "stream": False,
            "keep_alive": "5m",
            "logprobs": True,
            "top_logprobs": 1,
        },
    ),
    "generate": (
        GenerateBody,
        {"model": MODEL, "prompt": "x", "system": "y", "options": {"num_predict": 1}, "think": False, "stream": False},
    ),
    "embed": (EmbedBody, {"model": MODEL, "input": ["x", "y"], "dimensions": 3, "truncate": True}),
    "embeddings": (OldEmbedBody, {"model": MODEL, "prompt": "x"}),
    "show": (ShowBody, {"model": MODEL, "verbose": True}),
    "pull": (PullBody, {"name": MODEL, "stream": False}),
}


@settings(max_examples=examples(300, 60), deadline=None)
@given(st.data())
def test_wrong_bodies_are_refused_and_never_fail(data: st.DataObject) -> None:
    kind, body = SENT[data.draw(st.sampled_from([*SENT]))]
    sent = put(copy.deepcopy(body), data.draw(st.sampled_from(places(body))), data.draw(WRONG))
    try:
        made = parse(json.dumps(sent).encode(), kind)
        if isinstance(made, (ChatBody, GenerateBody)):
            assert isinstance(checked(made.sampling, kind), SamplingParams)
    except RequestError as error:
        refusal = str(error)
    else:
        refusal = ""
    assert len(refusal) < 600


async def test_wrong_bodies_get_no_500(server: Running) -> None:
    for path, (_, body) in SENT.items():
        await check_sweep(server, body, f"/api/{path}")
