"""Requests that cannot be served: agents are told why, and never of a failure of the server's."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.agents.test_messages import puppets
from tests.bodies import check_sweep
from tests.serving import Body, Running, running

from infer_agents.seal import make_seal

KEY = "sesame"
SEALED = make_seal(KEY).seal("hm")
SIGNED = make_seal(KEY).signature("hm")
SCHEMA = {"type": "object", "properties": {"at": {"type": "integer"}}}
AT = {"at": 1}
MESSAGES: Body = {
    "model": "demo",
    "max_tokens": 1,
    "system": [{"type": "text", "text": "be brief"}],
    "messages": [
        {"role": "user", "content": "hi"},
        {"role": "system", "content": [{"type": "text", "text": "now"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": SIGNED},
                {"type": "text", "text": "a"},
                {"type": "tool_use", "id": "c", "name": "look", "input": AT},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c",
                    "content": [{"type": "text", "text": "o"}, {"type": "tool_reference", "tool_name": "look"}],
                    "is_error": True,
                }
            ],
        },
    ],
    "tools": [{"name": "look", "input_schema": SCHEMA}, {"type": "web_search_20250305", "name": "web_search"}],
    "tool_choice": {"type": "auto"},
    "stop_sequences": ["x"],
    "metadata": {"user_id": "u"},
    "thinking": {"type": "enabled", "budget_tokens": 9},
    "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": SCHEMA}},
    "chat_template_kwargs": {"a": 1},
}
PATCH = {
    "type": "custom",
    "name": "patch",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"},
}
RESPONSES: Body = {
    "model": "demo",
    "max_output_tokens": 1,
    "store": False,
    "instructions": "be brief",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": SEALED},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        {"type": "function_call", "call_id": "c", "name": "look", "namespace": "mail", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "o"}]},
        {"type": "custom_tool_call", "call_id": "d", "name": "patch", "input": "aa"},
        {"type": "custom_tool_call_output", "call_id": "d", "output": "p"},
    ],
    "tools": [
        {
            "type": "namespace",
            "name": "mail",
            "description": "",
            "tools": [{"type": "function", "name": "look", "parameters": SCHEMA}],
        },
        PATCH,
        {"type": "web_search"},
    ],
    "tool_choice": "auto",
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "text": {"format": {"type": "text"}, "verbosity": "low"},
}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Running]:
    async with puppets(tmp_path, server={"agents": {"key": KEY, "store": tmp_path / "responses.db"}}) as made:
        yield made


async def test_wrong_bodies_get_no_500(server: Running) -> None:
    for body, paths in (
        (MESSAGES, ("/v1/messages", "/v1/messages/count_tokens")),
        (RESPONSES, ("/v1/responses",)),
    ):
        for path in paths:
            status, answer, _ = await server.post(body, path)
            assert status == 200, answer
        await check_sweep(server, body, *paths)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_a_quota_that_is_used_up_is_told_in_the_words_that_codex_waits_by(path: str) -> None:
    async with running(server={"requests_per_minute": 2, "access_log": False}) as server:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1} if "mess" in path else {"input": "hi"}
        for _ in range(2):
            await server.post(body | {"temperature": "hot"}, path)
        status, answer, headers = await server.post(body, path)
    assert status == 429
    wait = re.search(r"(?i)try again in\s*(\d+(?:\.\d+)?)\s*(s|ms|seconds?)", answer["error"]["message"])
    assert wait is not None
    assert wait[1] == headers["Retry-After"]
    assert wait[2] == "s"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_does_not_fit_is_told_by_the_code_that_codex_knows(stream: bool) -> None:
    """Before a stream begins: nothing has to be read out of events."""
    async with running(engine={"max_seq_len": 64}, server={"access_log": False}) as server:
        body = {"input": "a loop " * 100, "stream": stream}
        status, answer, _ = await server.post(body, "/v1/responses")
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert "maximum context length is 64 tokens" in answer["error"]["message"]


async def test_a_slash_may_be_in_a_models_name_and_not_in_a_tools() -> None:
    """As in Anthropic's and OpenAI's own API."""
    hi, tool = {"messages": [{"role": "user", "content": "hi"}]}, {"name": "mcp/look", "input_schema": SCHEMA}
    async with running(server={"aliases": ["org/model"], "access_log": False}) as server:
        assert (await server.get("/v1/models/org/model"))[1]["id"] == "org/model"
        for path, body in (("/v1/messages/count_tokens", hi), ("/v1/responses/input_tokens", {"input": "hi"})):
            assert (await server.post(body | {"model": "org/model"}, path))[0] == 200
            tools = [tool] if path.startswith("/v1/messages") else [{"type": "function", "name": "mcp/look"}]
            status, answer, _ = await server.post(body | {"tools": tools}, path)
            assert status == 400
            assert answer["error"]["message"].startswith("tools[0].name = 'mcp/look'")
