"""How much a model may reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests import serving
from tests.serving import Body, running, thinker

CHAT = "/v1/chat/completions"
ASKED: Body = {
    "messages": [{"role": "user", "content": "a loop"}],
    "max_tokens": 24,
    "temperature": 0,
    "chat_template_kwargs": {"enable_thinking": True},
}


async def test_a_chat_reasons_no_longer_than_its_budget(tmp_path: Path) -> None:
    """What was thought by then is as without a budget, and a format applies behind it."""
    async with running(model=thinker(tmp_path), engine={"max_seq_len": 256}) as server:
        _, free, _ = await server.post(ASKED, CHAT)
        thought = free["choices"][0]["message"]["reasoning_content"]
        longest = free["usage"]["completion_tokens_details"]["reasoning_tokens"] - 1
        assert longest > 3
        for most in (0, 3, longest, 100):
            _, answer, _ = await server.post(ASKED | {"thinking_token_budget": most}, CHAT)
            message = answer["choices"][0]["message"]
            assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == min(most, longest) + 1
            assert thought.startswith(message.get("reasoning_content", ""))
            assert (message == free["choices"][0]["message"]) == (most >= longest)
            assert message["content"]
        formed: Body = {"thinking_token_budget": 2, "guided_regex": "[0-9]{3}x"}
        _, answer, _ = await server.post(ASKED | formed, CHAT)
        assert answer["choices"][0]["message"]["content"][3:] == "x"
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3
        _, answer, _ = await server.post(ASKED | formed | {"chat_template_kwargs": {}}, CHAT)
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0, "nothing to be closed"


@pytest.mark.parametrize("reasons", [False, True])
async def test_a_budget_that_nothing_keeps_is_refused(tmp_path: Path, reasons: bool) -> None:
    section = (thinker if reasons else serving.chatty)(tmp_path)
    bodies: list[tuple[str, Body]] = [("/v1/completions", {"prompt": "x"})]
    if reasons:
        bodies.append((CHAT, ASKED | {"chat_template_kwargs": {}}))  # <think>, which the model would write, is no token
    async with running(model=section) as server:
        for path, body in bodies:
            status, answer, _ = await server.post(body | {"thinking_token_budget": 4}, path)
            assert (status, answer["error"]["param"]) == (400, "thinking_token_budget")
            message: Any = answer["error"]["message"]
            assert message.endswith("leave it out.")
            assert ("<think>" in message) == (path == CHAT)
