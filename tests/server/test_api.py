"""Chat, tokenization, API keys and metrics: everything that is not about completions alone."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from prometheus_client.parser import text_string_to_metric_families
from tests import serving
from tests.models.checkpoints import write_checkpoint
from tests.serving import HANG_S, TEMPLATE, Body, running, until

from infer.contracts.request import Request
from infer.errors import RequestError
from infer.text.templates import ChatTemplate
from infer_server.rendering import Renderer

ENGINE = {"max_batch_size": 4, "max_seq_len": 512}
MESSAGES = [{"role": "user", "content": "a loop"}]


@pytest.fixture
def chatty(tmp_path: Path) -> dict[str, Any]:
    """Settings of a server that can chat."""
    return {"engine": ENGINE, "model": serving.chatty(tmp_path)}


async def test_chat_is_the_completion_of_what_the_template_makes(chatty: dict[str, Any]) -> None:
    async with running(**chatty) as server:
        asked: Body = {"messages": MESSAGES, "max_tokens": 10, "seed": 3}
        _, chat, _ = await server.post(asked, "/v1/chat/completions")
        prompt = "# user: a loop\n# assistant: "
        _, plain, _ = await server.post({"prompt": prompt, "max_tokens": 10, "seed": 3, "add_special_tokens": False})
        assert chat["choices"][0]["message"]["content"] == plain["choices"][0]["text"]
        assert chat["usage"] == plain["usage"] | {"completion_tokens_details": {"reasoning_tokens": 0}}
        _, tokens, _ = await server.post({"messages": MESSAGES}, "/tokenize")
        _, back, _ = await server.post({"tokens": tokens["tokens"]}, "/detokenize")
        assert back == {"prompt": prompt}
        assert tokens["count"] == chat["usage"]["prompt_tokens"]
        final = [*MESSAGES, {"role": "assistant", "content": "for i in"}]
        more = {"continue_final_message": True, "max_tokens": 4, "temperature": 0}
        _, going_on, _ = await server.post({"messages": final} | more, "/v1/chat/completions")
        _, plain, _ = await server.post(
            {"prompt": f"{prompt}for i in", "add_special_tokens": False, "max_tokens": 4, "temperature": 0}
        )
        assert going_on["choices"][0]["message"]["content"] == plain["choices"][0]["text"]


async def test_a_model_may_have_several_names(chatty: dict[str, Any]) -> None:
    asked: Body = {"messages": MESSAGES, "max_tokens": 1}
    for aliases, taken, listed in (("a,b", {"a", "b"}, ["a", "b"]), ("a,*", {"a", "b", "c"}, ["a"]), ("", set(), [])):
        async with running(**chatty, server={"aliases": aliases}) as server:
            for name in "abc":
                status = (await server.post(asked | {"model": name}, "/v1/chat/completions"))[0]
                assert status == (200 if name in taken else 404), (aliases, name)
                async with server.session.get(f"{server.url}/v1/models/{name}") as response:
                    assert response.status == status
                    assert status == 404 or (await response.json())["id"] == name
            async with server.session.get(f"{server.url}/v1/models") as response:
                assert [model["id"] for model in (await response.json())["data"]][1:] == listed


@pytest.mark.slow
async def test_unknown_fields_are_refused_or_ignored(chatty: dict[str, Any]) -> None:
    """Anywhere in a body, whether it is read in the event loop or, if it is large, in another process."""
    message = {"role": "user", "content": "a loop", "extra": 1}
    large = message | {"extra": " " * (1 << 15)}
    for unknown, status in (("refuse", 400), ("ignore", 200)):
        async with running(**chatty, server={"unknown_fields": unknown}) as server:
            answers = []
            for messages, more in ((MESSAGES, {"extra": {}}), ([message], {}), ([large], {})):
                body: Body = {"messages": messages, "max_tokens": 3, "seed": 1} | more
                got, answer, _ = await server.post(body, "/v1/chat/completions")
                assert got == status, answer
                answers.append(answer)
                if unknown == "refuse":
                    assert answer["error"]["param"] in ("extra", "messages[0].extra")
            if unknown == "ignore":
                assert answers[0]["choices"] == answers[1]["choices"] == answers[2]["choices"]
                got, answer, _ = await server.post(body | {"max_tokens": "3"}, "/v1/chat/completions")
                assert (got, answer["error"]["param"]) == (400, "max_tokens")


BAD: list[tuple[Body, str | None, str]] = [
    ({"messages": []}, "messages", "messages = [] must have at least 1 item."),
    ({"messages": MESSAGES, "metadata": {str(i): "" for i in range(17)}}, "metadata", "at most 16 items"),
    ({"messages": MESSAGES, "reasoning_effort": "much"}, "reasoning_effort", "'minimal'"),
    (
        {
            "messages": MESSAGES,
            "tools": [{"type": "custom", "custom": {"name": "f", "format": {"type": "grammar", "grammar": {}}}}],
        },
        "tools[0].custom.format.grammar.syntax",
        "is missing",
    ),
    (
        {
            "messages": MESSAGES,
            "tools": [{"type": "custom", "custom": {"name": "f"}}],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]},
            },
        },
        "tool_choice",
        "tool_choice names 'g', which is not among tools",
    ),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages", "Unknown role robot"),
    ({"messages": [*MESSAGES, {"role": "usr", "content": "x"}]}, "messages", "Unknown role usr in messages[1]"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "missing"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
        "",
    ),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", ""),
    ({"messages": MESSAGES, "top_logprobs": 3}, "top_logprobs", "top_logprobs needs"),
    ({"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    ({"messages": MESSAGES, "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "differ"),
    ({"messages": MESSAGES, "tool_choice": "required"}, "tool_choice", "tools is empty"),
    ({"messages": MESSAGES, "functions": []}, "functions", "The field 'functions' is not known."),
    ({"messages": MESSAGES, "web_search_options": {}}, "web_search_options", "' is not known."),
    ({"messages": MESSAGES, "n": 0}, "n", "n = 0 must be greater than or equal to 1."),
    ({"messages": MESSAGES, "logit_bias": {"a": 1}}, "logit_bias.a", "logit_bias.a = 'a' must be a valid integer."),
    ({"messages": MESSAGES, "chat_template_kwargs": []}, "chat_template_kwargs", "= [] must be an object."),
    ({"messages": MESSAGES, "store": True}, "store", "store = true is not supported; false is."),
    ({"messages": MESSAGES, "modalities": ["audio"]}, "modalities[0]", "not supported"),
    ({"messages": MESSAGES, "chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs", "a field of its own"),
    ({"messages": MESSAGES, "chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", "holds 'self'"),
    (
        {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "no spaces"}}]},
        "tools[0].function.name",
        "",
    ),
    ({"messages": MESSAGES, "n": 1000}, "n", "server.max_choices"),
    ({"messages": [{"role": "user", "content": "x " * 5000}]}, "messages", "maximum context length"),
    (
        {
            "messages": MESSAGES,
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "thing"}}},
        },
        "response_format",
        "compile",
    ),
    ({"messages": MESSAGES, "guided_regex": "("}, "guided_regex", "compile"),
    ({"messages": MESSAGES, "structured_outputs": {"regex": "("}}, "structured_outputs", "compile"),
    (
        {
            "messages": MESSAGES,
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "thing"}}}],
            "tool_choice": "required",
        },
        "tools",
        "compile",
    ),
]


async def test_what_chat_refuses_it_names(chatty: dict[str, Any]) -> None:
    async with running(**chatty) as server:
        for body, param, message in BAD:
            status, answer, _ = await server.post(body, "/v1/chat/completions")
            assert status == 400, (body, answer)
            assert answer["error"]["param"] == param, (body, answer)
            assert message in answer["error"]["message"], (body, answer)


async def test_other_endpoints_name_their_own_fields(chatty: dict[str, Any]) -> None:
    """Whatever the engine and the template call what is wrong."""
    long = "x " * 5000
    schema = {"format": {"type": "json_schema", "name": "s", "schema": {"type": "thing"}}}
    form = {"type": "grammar", "syntax": "lark", "definition": "start: ("}
    grammar = {"type": "custom", "name": "c", "format": form}
    bad: list[tuple[str, Body, str, str]] = [
        ("/v1/completions", {"prompt": long}, "prompt", "maximum context length"),
        ("/v1/completions", {"prompt": "x", "guided_grammar": "start: ("}, "guided_grammar", "compile"),
        ("/v1/responses", {"input": long}, "input", "maximum context length"),
        ("/v1/responses", {"input": "x", "text": schema}, "text.format", "compile"),
        ("/v1/responses", {"input": "x", "tools": [grammar], "tool_choice": "required"}, "tools[0].format", "compile"),
        ("/tokenize", {"messages": []}, "messages", "at least 1"),
    ]
    async with running(**chatty) as server:
        for path, body, param, message in bad:
            status, answer, _ = await server.post(body, path)
            assert (status, answer["error"]["param"]) == (400, param), answer
            assert message in answer["error"]["message"], answer


async def test_without_a_template_there_is_no_chat(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", "llama")
    async with running(engine=ENGINE, model={"path": str(folder), "dtype": "float32"}) as server:
        bodies: list[tuple[str, Body]] = [
            ("/v1/chat/completions", {"messages": MESSAGES}),
            ("/v1/responses", {"input": "x"}),
        ]
        for path, body in bodies:
            status, answer, _ = await server.post(body, path)
            assert (status, answer["error"]["param"]) == (400, next(iter(body)))
            assert "model.chat_template" in answer["error"]["message"]


async def test_a_template_that_runs_away_is_stopped() -> None:
    endless = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
    source = "{% if messages[0].content == 'run' %}" + endless + "{% elif messages[0].content == 'eat' %}"
    source += (
        "{{ 'x' * 10**10 }}{% elif messages[0].content == 'pry' %}{{ ''.__class__.__mro__ }}{% else %}fine{% endif %}"
    )
    renderer = Renderer(ChatTemplate(source, {}))

    async def render(content: str, timeout_s: float = HANG_S) -> str:
        renderer._timeout_s = timeout_s
        return await renderer(json.dumps([{"role": "user", "content": content}]).encode())

    try:
        assert await render("x") == "fine"
        with pytest.raises(RequestError, match=r"took more than 0\.1 s"):
            await render("run", 0.1)
        assert await render("x") == "fine"
        for content, message in (("eat", "memory|Memory"), ("pry", "unsafe")):
            with pytest.raises(RequestError, match=message):
                await render(content)
            assert await render("x") == "fine"
        task = asyncio.create_task(render("run"))
        await asyncio.sleep(0)
        task.cancel()
        assert await render("x") == "fine", "a client that leaves takes its call along, and no other"
    finally:
        await renderer.close()


async def test_a_template_process_ended_from_outside_is_made_anew() -> None:
    renderer = Renderer(ChatTemplate("{{ messages[0].content }}", {}))

    async def render() -> str:
        return await renderer(b'[{"role": "user", "content": "x"}]')

    try:
        assert await render() == "x"
        process = renderer._process
        assert process is not None
        process.kill()
        assert await render() == "x", "perhaps before anybody has noticed"
        process = renderer._process
        assert process is not None
        process.kill()
        await process.wait()
        assert await render() == "x"
        process = renderer._process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        task = asyncio.create_task(render())
        while renderer._lock.locked() is False:
            await asyncio.sleep(0)
        process.kill()
        assert await task == "x", "not even the call that was under way"
    finally:
        await renderer.close()


LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


async def test_tools_are_refused_where_calls_cannot_be_read(
    chatty: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The template teaches tags, and writes what nobody reads."""
    file = Path(chatty["model"]["chat_template"])
    file.write_text(TEMPLATE.replace("<tool_call>{{ call.function | tojson }}</tool_call>", "CALL {{ call.function }}"))
    body = {"messages": MESSAGES, "tools": [LOOK], "max_tokens": 60}
    async with running(**chatty) as server:
        assert "requests with tools are refused" in caplog.text
        status, answer, _ = await server.post(body, "/v1/chat/completions")
        assert (status, answer["error"]["param"]) == (400, "tools")
        assert "model.tool_format" in answer["error"]["message"]
        assert (await server.post(body | {"tool_choice": "none"}, "/v1/chat/completions"))[0] == 200
    chatty["model"]["tool_format"] = "tags"
    async with running(**chatty) as server:
        assert (await server.post(body, "/v1/chat/completions"))[0] == 200, "who sets it knows better"


async def test_the_template_says_how_calls_are_written(chatty: dict[str, Any]) -> None:
    file = Path(chatty["model"]["chat_template"])
    file.write_text(
        TEMPLATE.replace(
            "<tool_call>{{ call.function | tojson }}</tool_call>",
            "[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}",
        )
    )
    written = 'Well.[TOOL_CALLS]look[ARGS]{"at": "[TOOL_CALLS]"}'
    async with running(**chatty) as server:
        body = {"messages": MESSAGES, "tools": [LOOK], "structured_outputs": {"choice": [written]}}
        _, answer, _ = await server.post(body, "/v1/chat/completions")
        message = answer["choices"][0]["message"]
        (call,) = message["tool_calls"]
        assert message["content"] == "Well."
        assert call["function"] == {"name": "look", "arguments": '{"at": "[TOOL_CALLS]"}'}
        assert re.fullmatch("[A-Za-z0-9]{9}", call["id"]), "as Mistral's templates want it"


async def test_a_forced_call_that_is_cut_keeps_its_text(chatty: dict[str, Any]) -> None:
    """As content before its arguments begin, and then as a call with as much of them as was written."""
    async with running(**chatty) as server:
        seen = set()
        for most in (1, 4, 12, 40):
            body: Body = {"messages": MESSAGES, "tools": [LOOK], "tool_choice": "required"}
            body |= {"max_tokens": most, "seed": 1, "logprobs": True}
            _, answer, _ = await server.post(body, "/v1/chat/completions")
            (choice,) = answer["choices"]
            assert choice["finish_reason"] == "length"
            written = "".join(entry["token"] for entry in choice["logprobs"]["content"])
            message, streamed = choice["message"], {"content": "", "arguments": ""}
            for event in (await server.stream(body, "/v1/chat/completions"))[:-1]:
                delta = event["choices"][0]["delta"]
                streamed["content"] += delta.get("content") or ""
                for call in delta.get("tool_calls", ()):
                    streamed["arguments"] += call["function"]["arguments"]
            told = "".join(call["function"]["arguments"] for call in message.get("tool_calls", ()))
            assert streamed == {"content": message["content"] or "", "arguments": told}
            assert written.rstrip().endswith((told or message["content"]).rstrip())
            assert told or message["content"] == written
            seen.add("call" if told else "content")
        assert seen == {"call", "content"}


@pytest.mark.slow
async def test_a_max_tokens_beyond_the_context_counts_as_what_is_left(chatty: dict[str, Any]) -> None:
    async with running(**chatty) as server:
        asked: list[tuple[str, Body, str]] = [
            ("/v1/chat/completions", {"messages": MESSAGES}, "max_tokens"),
            ("/v1/chat/completions", {"messages": MESSAGES}, "max_completion_tokens"),
            ("/v1/completions", {"prompt": [5] * 400}, "max_tokens"),
        ]
        for path, body, name in asked:
            body |= {"ignore_eos": True, "temperature": 0}
            _, most, _ = await server.post(body | {name: 32_000}, path)
            _, all_that_fit, _ = await server.post(body | {"max_tokens": None}, path)
            assert most["choices"] == all_that_fit["choices"]
            assert most["choices"][0]["finish_reason"] == "length"
            assert most["usage"]["total_tokens"] == all_that_fit["usage"]["total_tokens"] == 512
        _, answer, _ = await server.post({"input": "a loop", "max_output_tokens": 32_000}, "/v1/responses")
        assert answer["status"] in ("completed", "incomplete")
        body = {"messages": [{"role": "user", "content": "x " * 5000}], "max_tokens": 1}
        status, answer, _ = await server.post(body, "/v1/chat/completions")
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


async def test_custom_tools_take_a_text(chatty: dict[str, Any]) -> None:
    """The model is shown a function with one parameter, and calls it in its own way."""
    run = {"type": "custom", "custom": {"name": "run", "description": "Runs code.", "format": {"type": "text"}}}
    code = 'print("\u00e9\\n")\n' * 3
    written = f"<tool_call>{json.dumps({'name': 'run', 'arguments': {'input': code}})}</tool_call>"
    written += '<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'
    async with running(**chatty) as server:
        body: Body = {"messages": MESSAGES, "tools": [run, LOOK], "max_tokens": 400}
        body["structured_outputs"] = {"choice": [written]}
        _, answer, _ = await server.post(body, "/v1/chat/completions")
        message = answer["choices"][0]["message"]
        custom, function = message["tool_calls"]
        assert (custom["type"], custom["custom"]) == ("custom", {"name": "run", "input": code})
        assert (function["type"], function["function"]) == ("function", {"name": "look", "arguments": '{"at": 1}'})
        streamed: dict[int, dict[str, str]] = {}
        for event in (await server.stream(body, "/v1/chat/completions"))[:-1]:
            for call in event["choices"][0]["delta"].get("tool_calls", ()):
                said = streamed.setdefault(call["index"], {"name": "", "input": "", "arguments": ""})
                for key, text in {**call.get("custom", {}), **call.get("function", {})}.items():
                    said[key] += text
        assert streamed == {
            0: {"name": "run", "input": code, "arguments": ""},
            1: {"name": "look", "input": "", "arguments": '{"at": 1}'},
        }
        result = {"role": "tool", "tool_call_id": custom["id"], "content": "x"}
        _, tokens, _ = await server.post({"messages": [*MESSAGES, message, result], "tools": [run]}, "/tokenize")
        _, back, _ = await server.post({"tokens": tokens["tokens"]}, "/detokenize")
        shown = {"name": "run", "arguments": {"input": code}}
        assert json.dumps(shown, ensure_ascii=False) in back["prompt"]
        assert '"description": "Runs code.", "parameters": {"type": "object"' in back["prompt"]
        forced = {
            "messages": MESSAGES,
            "tools": [LOOK, run],
            "tool_choice": {"type": "custom", "custom": {"name": "run"}},
        }
        for most in (8, 60):
            _, answer, _ = await server.post(forced | {"max_tokens": most, "seed": 1}, "/v1/chat/completions")
            message = answer["choices"][0]["message"]
            names = [call["custom"]["name"] for call in message.get("tool_calls", ())]
            assert names == ["run"] or message["content"].startswith("[")


async def test_only_allowed_tools_are_shown_and_called(chatty: dict[str, Any]) -> None:
    find = {"type": "function", "function": {"name": "find", "parameters": {"enum": [{"place": "Rome"}]}}}
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "find"}}]}
    async with running(**chatty) as server:
        body: Body = {"messages": MESSAGES, "tools": [LOOK, find], "max_tokens": 200, "temperature": 0}
        body["tool_choice"] = {"type": "allowed_tools", "allowed_tools": allowed}
        _, answer, _ = await server.post(body, "/v1/chat/completions")
        alone = {key: body[key] for key in ("messages", "max_tokens", "temperature")} | {"tools": [find]}
        _, expected, _ = await server.post(alone | {"tool_choice": "required"}, "/v1/chat/completions")
        assert answer["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"], "no other is shown"
        calls = [
            [call["function"] for call in each["choices"][0]["message"]["tool_calls"]] for each in (answer, expected)
        ]
        assert calls[0] == calls[1]
        assert {call["name"] for call in calls[0]} == {"find"}
        allowed["mode"] = "auto"
        _, answer, _ = await server.post(body, "/v1/chat/completions")
        _, expected, _ = await server.post(alone, "/v1/chat/completions")
        assert answer["choices"] == expected["choices"]


async def test_an_effort_reaches_templates_that_know_one(chatty: dict[str, Any]) -> None:
    file = Path(chatty["model"]["chat_template"])
    async with running(**chatty) as server:
        for effort, kwargs in (("none", {"enable_thinking": False}), ("low", {"enable_thinking": True})):
            asked: Body = {"messages": MESSAGES, "max_tokens": 5, "temperature": 0}
            _, told, _ = await server.post(asked | {"reasoning_effort": effort}, "/v1/chat/completions")
            _, expected, _ = await server.post(asked | {"chat_template_kwargs": kwargs}, "/v1/chat/completions")
            assert told["choices"] == expected["choices"]
            assert told["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
        _, more, _ = await server.post(asked | {"metadata": {"a": "b"}}, "/v1/chat/completions")
        assert more["metadata"] == {"a": "b"}
        first, *rest = await server.stream(asked | {"metadata": {"a": "b"}}, "/v1/chat/completions")
        assert first["metadata"] == {"a": "b"}
        assert not any("metadata" in each for each in rest[:-1])
    file.write_text("{% macro begin() %}{{ reasoning_effort or 'medium' }}: {% endmacro %}{{ begin() }}" + TEMPLATE)
    async with running(**chatty) as server:
        _, low, _ = await server.post(asked | {"reasoning_effort": "low"}, "/v1/chat/completions")
        _, expected, _ = await server.post(
            asked | {"chat_template_kwargs": {"reasoning_effort": "low", "enable_thinking": True}},
            "/v1/chat/completions",
        )
        assert low["choices"] == expected["choices"]
        assert low["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
    file.write_text(TEMPLATE.replace("enable_thinking", "false"))
    async with running(**chatty) as server:
        status, answer, _ = await server.post(asked | {"reasoning_effort": "low"}, "/v1/chat/completions")
        assert (status, answer["error"]["param"]) == (400, "reasoning_effort")
        assert "has no effect" in answer["error"]["message"]


async def test_histories_reach_the_template(chatty: dict[str, Any]) -> None:
    async with running(**chatty) as server:

        async def prompt(*messages: Body, **more: Any) -> str:
            _, tokens, _ = await server.post({"messages": messages, **more}, "/tokenize")
            return str((await server.post({"tokens": tokens["tokens"]}, "/detokenize"))[1]["prompt"])

        final = {"role": "assistant", "content": "for i in "}
        assert (await prompt(*MESSAGES, final, add_generation_prompt=False, continue_final_message=True)).endswith(
            "# assistant: for i in "
        )
        deep = "[" * 100_000
        call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": deep}}
        asked = {"role": "assistant", "content": None, "tool_calls": [call]}
        status, answer, _ = await server.post({"messages": [*MESSAGES, asked], "max_tokens": 1}, "/v1/chat/completions")
        assert (status, answer["error"]["param"]) == (400, "messages[1].tool_calls[0].function.arguments"), answer
        call["function"] = {"name": "look", "arguments": '{"a": [1]}'}
        assert '"arguments": {"a": [1]}' in await prompt(*MESSAGES, asked)


async def test_keys_open_every_route_but_health(chatty: dict[str, Any]) -> None:
    async with running(server={"api_keys": "first, second", "access_log": False}, **chatty) as server:
        for path in ("/health", "/ready"):
            assert (await server.get(path))[0] == 200
        for path in ("/v1/models", "/tokenizer_info", "/openapi.json", "/nothing"):
            status, answer = await server.get(path)
            assert (status, answer["error"]["type"]) == (401, "authentication_error"), path
            for shown in ("Bearer ", "Bearer firs", "Bearer first2", "Basic first", "first"):
                assert (await server.get(path, Authorization=shown))[0] == 401, shown
        for key in ("first", "second"):
            assert (await server.get("/v1/models", Authorization=f"Bearer {key}"))[0] == 200
        assert (await server.post({"prompt": "x"}))[0] == 401


async def test_the_access_log_is_json(chatty: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "infer.access"):
        async with running(server={"access_log": True}, **chatty) as server:
            body = {"messages": MESSAGES, "max_tokens": 3, "user": "u-1"}
            _, answer, headers = await server.post(body, "/v1/chat/completions")
            await server.post({"prompt": 5})
    done, refused = [json.loads(record.message) for record in caplog.records if record.name == "infer.access"]
    assert done["request_id"] == headers["X-Request-Id"]
    assert (done["method"], done["path"], done["status"]) == ("POST", "/v1/chat/completions", 200)
    assert (done["user"], done["usage"]) == ("u-1", answer["usage"])
    assert refused["status"] == 400


async def test_what_is_no_http_gets_json(chatty: dict[str, Any]) -> None:
    async with running(**chatty) as server:
        host, _, port = server.url.removeprefix("http://").partition(":")
        for sent in (b"NONSENSE\r\n\r\n", b"GET / HTTP/1.1\r\nA: " + b"x" * 100_000 + b"\r\n\r\n"):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent)
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            assert head.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400"))
            assert b"X-Request-Id" in head
            assert json.loads(body)["error"]["type"] == "invalid_request_error"
            writer.close()


async def test_lists_of_prompts_longer_than_the_queue(chatty: dict[str, Any]) -> None:
    chatty["engine"] = ENGINE | {"max_batch_size": 2, "max_waiting_requests": 1}
    async with running(**chatty) as server:
        body: Body = {"prompt": [[i, i + 1] for i in range(1, 12)], "max_tokens": 3, "temperature": 0}
        _, answer, _ = await server.post(body)
        assert [c["index"] for c in answer["choices"]] == list(range(11))
        texts = [(await server.post(body | {"prompt": p}))[1]["choices"][0]["text"] for p in body["prompt"]]
        assert [c["text"] for c in answer["choices"]] == texts
        *chunks, _ = await server.stream(body)
        streamed = [""] * 11
        for chunk in chunks:
            streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert streamed == texts
        assert answer["usage"]["prompt_tokens"] == 22


async def test_n_answers_of_one_prompt_are_those_of_its_seeds(chatty: dict[str, Any]) -> None:
    async with running(**chatty) as server:
        body = {"prompt": "def ", "max_tokens": 8, "n": 3, "seed": 2**63 - 2}
        _, several, _ = await server.post(body)
        texts = []
        for seed in (2**63 - 2, 2**63 - 1, -(2**63)):
            _, one, _ = await server.post(body | {"n": 1, "seed": seed})
            texts.append(one["choices"][0]["text"])
        assert [c["text"] for c in several["choices"]] == texts
        assert len(set(texts)) == 3
        assert several["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]


async def test_tokens_there_and_back(chatty: dict[str, Any]) -> None:
    async with running(**chatty) as server:
        _, tokens, _ = await server.post(
            {"prompt": "def f():\n  ä€", "add_special_tokens": False, "return_token_strs": True}, "/tokenize"
        )
        assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
        assert tokens["max_model_len"] == 512
        _, text, _ = await server.post({"tokens": tokens["tokens"]}, "/detokenize")
        assert text["prompt"] == "def f():\n  ä€"
        status, answer, _ = await server.post({"tokens": [10**6]}, "/detokenize")
        assert (status, answer["error"]["param"]) == (400, "tokens")
        status, answer, _ = await server.post({}, "/tokenize")
        assert (status, answer["error"]["param"]) == (400, "prompt")
        _, info = await server.get("/tokenizer_info")
        assert info["chat_template"] == TEMPLATE
        assert (await server.get("/v1/models/demo"))[1]["id"] == "demo"
        assert (await server.get("/v1/models/gpt-4"))[0] == 404


async def test_responses_refuse_what_needs_a_store(chatty: dict[str, Any]) -> None:
    async with running(**chatty, server={"access_log": False, "agents": {"store_max_bytes": 0}}) as server:
        refused: list[Body] = [
            {"conversation": "conv_1"},
            {"background": True},
            {"stream_options.include_usage": True},
        ]
        for more in refused:
            ((param, value),) = more.items()
            outer, _, inner = param.partition(".")
            body = {"input": "x", "stream": True, outer: {inner: value} if inner else value}
            status, answer, _ = await server.post(body, "/v1/responses")
            assert (status, answer["error"]["param"]) == (400, param), answer
        said = {"input": "x", "max_output_tokens": 1, "parallel_tool_calls": False, "tool_choice": "none"}
        _, answer, _ = await server.post(said, "/v1/responses")
        assert (answer["parallel_tool_calls"], answer["tool_choice"]) == (False, "none")
        _, answer, _ = await server.post(said | {"store": True}, "/v1/responses")
        assert answer["store"] is False


@pytest.mark.parametrize("names", ["infer", "vllm"])
async def test_figures_move_as_they_should(names: str, chatty: dict[str, Any]) -> None:
    prefix = {"infer": "infer_", "vllm": "vllm:"}[names]
    chatty["engine"] = ENGINE | {"prefill_chunk_size": 16, "max_tokens_per_step": 20}

    async def figures() -> dict[str, float]:
        async with server.session.get(server.url + "/metrics") as response:
            families = list(text_string_to_metric_families(await response.text()))
        return {
            sample.name.removeprefix(prefix)
            + sample.labels.get("finished_reason", "")
            + sample.labels.get("le", ""): sample.value
            for family in families
            for sample in family.samples
        }

    async with running(server={"metrics_names": names, "access_log": False}, **chatty) as server:
        assert (await figures())["request_success_totallength"] == 0
        for _ in range(2):
            await server.post({"prompt": list(range(1, 41)), "max_tokens": 5, "ignore_eos": True})
        found = await figures()
        assert found["passes_total"] == 12
        assert found["request_success_totallength"] == 2
        assert found["prompt_tokens_total"] == found["prefix_cache_queries_total"] == 80
        assert found["prefix_cache_hits_total"] == 32
        assert found["generation_tokens_total"] == 10
        assert found["time_to_first_token_seconds_count"] == found["e2e_request_latency_seconds_count"] == 2
        assert found["inter_token_latency_seconds_count"] == 8
        assert found["request_prompt_tokens_bucket32.0"] == 0
        assert found["request_prompt_tokens_bucket64.0"] == 2
        assert found["iteration_tokens_total_count"] == 12
        assert found["iteration_tokens_total_sum"] == 40 + 4 + 8 + 4
        assert found["step_chunks_bucket0.0"] == 8
        assert found["step_budget_fill_count"] == 12
        assert found["num_requests_running"] == found["num_requests_waiting"] == found["kv_cache_usage_perc"] == 0
        body = {"prompt": "def ", "max_tokens": 400, "ignore_eos": True, "stream": True}
        async with server.session.post(server.url + "/v1/completions", json=body) as response:
            await response.content.readline()
            busy = await figures()
            assert busy["num_requests_running"] == 1
            assert busy["kv_cache_usage_perc"] > 0
            tokens = (await server.post({"prompt": "def "}, "/tokenize"))[1]["count"]
            assert busy["prompt_tokens_total"] == 80 + tokens, "counted though it has not ended"
            assert 10 < busy["generation_tokens_total"] < 10 + 400
            assert busy["request_success_totallength"] == 2
            response.close()
        await server.idle()
        ended = await figures()
        assert ended["num_requests_running"] == ended["kv_cache_usage_perc"] == 0
        assert ended["request_success_totalabort"] == 1


async def test_the_document_knows_every_route(chatty: dict[str, Any]) -> None:
    async with running(**chatty) as server:
        _, made = await server.get("/openapi.json")
        assert made["openapi"].startswith("3.1")
        assert {"/v1/chat/completions", "/v1/models/{model}", "/metrics", "/v1/score"} <= set(made["paths"])
        text = json.dumps(made)
        for name in {part.split('"')[0] for part in text.split('"#/components/schemas/')[1:]}:
            assert name in made["components"]["schemas"], name
        async with server.session.get(server.url + "/docs") as response:
            page = await response.text()
        assert "/v1/chat/completions" in page
        assert "presence_penalty" in page
        assert "http" not in page.replace("https://", "http").partition("<body")[2], "it needs nothing from elsewhere"


@torch.inference_mode()
def reference(folder: Path, tokens: list[int]) -> torch.Tensor:
    """What transformers says of each next token: log-probabilities [len(tokens), V], in float64."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    logits: torch.Tensor = model.train(False)(torch.tensor([tokens])).logits[0]
    return torch.log_softmax(logits.double(), dim=-1)


async def test_log_probabilities_are_those_of_transformers(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", "qwen3", tied=False)
    prompt = [5, 77, 130, 9, 201, 44]
    async with running(engine=ENGINE, model={"path": str(folder), "dtype": "float32"}) as server:
        body: Body = {"prompt": prompt, "max_tokens": 1, "temperature": 1.5, "ignore_eos": True}
        _, echoed, _ = await server.post(body | {"echo": True, "logprobs": 4})
        _, ranked, _ = await server.post(body | {"prompt_logprobs": 4})
        _, chosen, _ = await server.post(body | {"logprob_token_ids": [3, 300]})
    table = await asyncio.to_thread(reference, folder, prompt)
    found = echoed["choices"][0]["logprobs"]
    assert found["token_logprobs"][0] is None
    assert found["top_logprobs"][0] is None
    for i, token in enumerate(prompt[1:]):
        best, ids = table[i].topk(4)
        assert found["token_logprobs"][i + 1] == pytest.approx(table[i, token].item(), abs=1e-3)
        entry = ranked["choices"][0]["prompt_logprobs"][i + 1]
        assert [entry[str(id)]["logprob"] for id in ids.tolist()] == pytest.approx(best.tolist(), abs=1e-3)
        assert [entry[str(id)]["rank"] for id in ids.tolist()] == [1, 2, 3, 4]
        assert entry[str(token)]["rank"] == (table[i] > table[i, token]).sum() + 1
    tops = chosen["choices"][0]["logprobs"]["top_logprobs"][0]
    assert {round(value, 2) for value in tops.values()} >= {round(table[-1, id].item(), 2) for id in (3, 300)}


async def test_a_seed_gives_the_same_alone_and_in_company(chatty: dict[str, Any]) -> None:
    async with running(**chatty) as server:
        bodies: list[Body] = [
            {"prompt": "def " * (i + 1), "max_tokens": 12, "seed": i, "temperature": 0.5 + i / 4, "logprobs": 2}
            | ({"presence_penalty": 1.0, "logit_bias": {"70": 2.0}} if i % 2 else {})
            for i in range(8)
        ]
        together = await asyncio.gather(*(server.post(body) for body in bodies))
        for body, (_, answer, _) in zip(bodies, together, strict=True):
            assert (await server.post(body))[1]["choices"] == answer["choices"]


async def test_answers_of_one_prompt_compute_it_once(chatty: dict[str, Any]) -> None:
    async with running(**chatty) as server:
        prompt = list(range(1, 101))
        _, answer, _ = await server.post({"prompt": prompt, "max_tokens": 4, "n": 4, "seed": 1, "ignore_eos": True})
        assert answer["usage"] == {
            "prompt_tokens": 100,
            "completion_tokens": 16,
            "total_tokens": 116,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        async with server.session.get(server.url + "/metrics") as response:
            families = list(text_string_to_metric_families(await response.text()))
        found = {sample.name: sample.value for family in families for sample in family.samples}
        assert found["infer_prefix_cache_hits_total"] == 3 * 96


async def test_answers_that_wait_for_their_prompt_keep_nobody_out(chatty: dict[str, Any]) -> None:
    """Of three places, one runs, and three answers to one prompt wait in one: there is a third for somebody else."""
    chatty["engine"] = {"max_batch_size": 1, "max_waiting_requests": 2, "max_seq_len": 2000}
    async with running(**chatty) as server:
        loop, (path, body) = server.engine_loop, (server.url + "/v1/completions", {"prompt": "def ", "max_tokens": 5})
        async with server.session.post(
            path, json=body | {"max_tokens": 1900, "ignore_eos": True, "stream": True}
        ) as one:
            await one.content.readline()
            three = asyncio.create_task(server.post(body | {"n": 3}))
            await until(lambda: loop.num_open == 3)
            single = asyncio.create_task(server.post(body))
            await until(lambda: loop.num_open == 4)
            assert (await server.post(body))[0] == 503
            leaving = asyncio.create_task(server.post(body | {"n": 3}))
            assert (await leaving)[0] == 503
            single.cancel()
            await until(lambda: loop.num_open == 3)
            leaving = asyncio.create_task(server.post(body | {"n": 2}))
            await until(lambda: loop.num_open == 4)
            leaving.cancel()
            await until(lambda: loop.num_open == 3)
            one.close()
        status, answer, _ = await three
        assert (status, len(answer["choices"])) == (200, 3)
        await server.idle()


async def test_who_asks_and_what_belongs_together_reach_the_engine(
    chatty: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(**chatty) as server:
        seen: list[Request] = []
        submit_all = server.engine_loop.submit_all

        def watched(requests: Sequence[Request], mailbox: Any) -> int:
            seen.extend(requests)
            accepted: int = submit_all(requests, mailbox)
            return accepted

        monkeypatch.setattr(server.engine_loop, "submit_all", watched)
        talk: Body = {"messages": MESSAGES, "max_tokens": 1}
        for path, asked, users in (
            ("/v1/completions", {"prompt": "a", "max_tokens": 1}, [""]),
            ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 1, "n": 2, "user": "u"}, ["u"] * 4),
            ("/v1/chat/completions", talk | {"user": "u", "safety_identifier": "s"}, ["s"]),
            ("/v1/responses", {"input": "x", "max_output_tokens": 1, "safety_identifier": "s"}, ["s"]),
            ("/v1/responses", {"input": "x", "max_output_tokens": 1, "user": "u"}, ["u"]),
        ):
            seen.clear()
            assert (await server.post(asked, path))[0] == 200, asked
            assert [request.owner.user for request in seen] == users, asked
            groups = [request.group for request in seen]
            if len(users) == 1:
                assert groups == [""]
            else:
                assert "" not in groups
                assert [groups.index(group) for group in groups] == [0, 0, 2, 2]


async def test_what_is_wrong_may_be_long_but_its_answer_is_not(chatty: dict[str, Any]) -> None:
    async with running(**chatty) as server:
        long = "x" * 100_000
        bodies: list[Body] = [
            {"prompt": "a", long: 1},
            {"prompt": "a", "model": long},
            {"prompt": "a", "logit_bias": {long: 1}},
            {"prompt": "a", "guided_regex": "(" + long},
            {"prompt": "a", "stop": [long]},
        ]
        for body in bodies:
            status, answer, _ = await server.post(body)
            assert status in (400, 404)
            assert len(json.dumps(answer)) < 1500


@pytest.mark.parametrize("stage", ["queued", "mid-chunk", "decoding", "last step"])
async def test_a_client_that_leaves_frees_everything(stage: str, chatty: dict[str, Any]) -> None:
    chatty["engine"] = {"max_batch_size": 1, "max_seq_len": 2000, "prefill_chunk_size": 16}
    async with running(**chatty) as server:
        pool = server.engine_loop._engine._runner._pool
        room = pool.free_tokens()
        body: Body = {"prompt": [7] * 1500, "max_tokens": 400, "ignore_eos": True, "stream": True}
        others = []
        if stage == "queued":
            others = [asyncio.create_task(server.post(body | {"stream": False, "max_tokens": 30}))]
            await until(lambda: server.engine_loop.num_open == 1)
        if stage == "last step":
            body["max_tokens"] = 2
        leaving = asyncio.create_task(server.session.post(server.url + "/v1/completions", json=body))
        await until(lambda: server.engine_loop.num_open == len(others) + 1)
        if stage in ("queued", "mid-chunk"):
            if stage == "mid-chunk":
                await until(lambda: pool.free_tokens() < room)
            leaving.cancel()
        else:
            response = await leaving
            await response.content.readline()
            response.close()
        await until(lambda: server.engine_loop.num_open <= len(others))
        for status, answer, _ in await asyncio.gather(*others):
            assert (status, answer["usage"]["completion_tokens"]) == (200, 30)
        await server.idle()
        assert pool.free_tokens() == room


async def test_any_bytes_are_the_same_streamed_and_whole(tmp_path: Path) -> None:
    """A model that draws from all tokens alike writes characters of several tokens, and halves; stops cut anywhere."""
    folder = write_checkpoint(tmp_path / "c", "llama")
    async with running(engine=ENGINE, model={"path": str(folder), "dtype": "float32"}) as server:

        async def both(seed: int) -> None:
            body: Body = {"prompt": [5, 6], "max_tokens": 60, "temperature": 100.0, "seed": seed, "ignore_eos": True}
            if seed % 2:
                body["stop"] = ["\u00e9", "ab", "q", "\ufffd\ufffd\ufffd"][seed % 4 :]
            _, whole, _ = await server.post(body)
            *chunks, _ = await server.stream(body)
            choices = [chunk["choices"][0] for chunk in chunks]
            assert "".join(c["text"] for c in choices) == whole["choices"][0]["text"]
            assert choices[-1]["finish_reason"] == whole["choices"][0]["finish_reason"]

        for begin in range(0, 64, 8):
            await asyncio.gather(*(both(seed) for seed in range(begin, begin + 8)))


async def test_the_dashboard_asks_for_figures_that_are_there(chatty: dict[str, Any]) -> None:
    dashboard = (Path(__file__).parents[2] / "docs" / "grafana.json").read_text()
    asked = set(re.findall(r"infer_\w+", dashboard))
    async with (
        running(**chatty) as server,
        server.session.get(server.url + "/metrics") as response,
    ):
        families = list(text_string_to_metric_families(await response.text()))
    assert len(asked) > 15
    assert asked <= {sample.name for family in families for sample in family.samples}
