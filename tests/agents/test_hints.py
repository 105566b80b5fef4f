"""What agents send that has no effect: the log names it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
from tests.serving import Body, Running, running

from infer_agents.message_bodies import MessagesRequest
from infer_server.http.parsing import parse

LONG = "x" * (1 << 15)
"""Makes a body that is parsed in a child process."""
COUNT, TOKENS = "/v1/messages/count_tokens", "/v1/responses/input_tokens"
MESSAGES: Body = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "secret"}}]},
        {"role": "user", "content": LONG},
    ],
    "tools": [
        {"name": "look", "input_schema": {"type": "object"}, "strict": True},
        {"name": "see", "input_schema": {"type": "object"}, "strict": False},
        {"type": "secret_20250305", "name": "secret"},
    ],
    "tool_choice": {"type": "none"},
    "output_config": {"task_budget": "secret"},
    "service_tier": "auto",
    "betas": ["secret"],
    "context_management": {"secret": []},
}
RESPONSES: Body = {
    "input": "hi",
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "prompt_cache_key": "secret",
    "client_metadata": {"secret": "secret"},
}
BETA = "the header anthropic-beta"
OWN = "a tool of Anthropic's own"
NAMED = {
    "messages[].content[].cache_control", "tools[].strict", "output_config.task_budget", "service_tier", "betas",
    "context_management",
}  # fmt: skip


async def told(server: Running, caplog: pytest.LogCaptureFixture, asked: Sequence[tuple[str, Body]]) -> list[str]:
    """What the log says of fields without an effect in these requests."""
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="infer_server"):
        for path, body in asked:
            headers = {"anthropic-beta": "secret-2026"} if path == COUNT else {}
            async with server.session.post(server.url + path, json=body, headers=headers) as response:
                assert response.status == 200, await response.text()
    return [record.message for record in caplog.records if " is ignored" in record.message]


async def test_what_has_no_effect_is_named_in_the_log_once(caplog: pytest.LogCaptureFixture) -> None:
    async with running(server={"access_log": False}, model={"path": "demo"}) as server:
        lines = await told(server, caplog, [(COUNT, MESSAGES), (TOKENS, RESPONSES)])
        named = [line.partition(" is ignored")[0].split(": ") for line in lines]
        assert sorted(name for path, name in named if path == COUNT) == sorted({*NAMED, BETA, OWN})
        assert {name for path, name in named if path == TOKENS} == {
            "text.verbosity", "prompt_cache_key", "client_metadata",
        }  # fmt: skip
        assert f"{TOKENS}: client_metadata is ignored" in lines
        assert f"{COUNT}: service_tier is ignored: there is one" in lines
        assert "secret" not in "".join(lines)
        small: Any = MESSAGES | {"messages": MESSAGES["messages"][:1], "speed": "fast"}
        again = await told(server, caplog, [(COUNT, MESSAGES), (TOKENS, RESPONSES), (COUNT, small)])
        assert again == [f"{COUNT}: speed is ignored: there is one"]


def test_fields_that_are_not_given_are_not_named() -> None:
    assert not parse(b'{"messages": [{"role": "user", "content": "hi"}], "betas": null}', MessagesRequest).ignored
