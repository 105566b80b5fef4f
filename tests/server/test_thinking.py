"""How much a model may reason."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests import serving
from tests.serving import Body, running, thinker

from infer.contracts.sections import ModelSettings
from infer_server.conversation import untold_effort

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


async def test_an_effort_bounds_the_reasoning_where_the_template_knows_none(tmp_path: Path) -> None:
    """As the budget of that name does. A budget beside it counts instead."""
    section = thinker(tmp_path) | {"effort_budgets": ["low=3", "high=100"]}
    template = tmp_path / "template.jinja"
    knows = template.read_text()
    template.write_text(knows.replace("enable_thinking", "true"))
    async with running(model=section, engine={"max_seq_len": 256}) as server:

        async def answer(**more: Any) -> Any:
            status, made, _ = await server.post(ASKED | {"chat_template_kwargs": {}} | more, CHAT)
            assert status == 200, made
            return made["choices"], made["usage"]

        budgets = {"none": 0, "low": 3, "high": 100, "medium": None, "max": None}
        made = {effort: await answer(reasoning_effort=effort) for effort in budgets}
        assert made == {
            effort: await answer(**({} if budget is None else {"thinking_token_budget": budget}))
            for effort, budget in budgets.items()
        }
        assert made["none"] != made["low"] != made["high"] == made["max"]
        assert await answer(reasoning_effort="low", thinking_token_budget=100) == made["high"]
        formed = {"guided_regex": "[0-9]{3}x"}
        assert await answer(**formed, reasoning_effort="low") == await answer(**formed, thinking_token_budget=3)
    template.write_text(knows)
    async with running(model=section, engine={"max_seq_len": 256}) as server:
        for effort, kwargs, budget in (("none", False, {}), ("low", True, {"thinking_token_budget": 3})):
            told = await answer(chat_template_kwargs={"enable_thinking": kwargs}, **budget)
            assert await answer(reasoning_effort=effort) == told, "it is told whether to reason"
        status, refused, _ = await server.post(ASKED | {"reasoning_effort": "low", "thinking_token_budget": -1}, CHAT)
        assert (status, refused["error"]["param"]) == (400, "thinking_token_budget")
    template.write_text("{% if reasoning_effort == 'max' %}{% endif %}" + knows)
    async with running(model=section, engine={"max_seq_len": 256}) as server:
        free = await answer(chat_template_kwargs={"enable_thinking": True})
        assert await answer(reasoning_effort="low") == free, "a template that knows efforts decides"


ALL = ("reasoning_effort", "enable_thinking", "thinking")
SWITCH, WORD = ("enable_thinking",), ("reasoning_effort",)


@pytest.mark.parametrize(
    ("known", "effort", "hints", "taken", "refused"),
    [
        ((), None, {}, None, None),
        ((), "low", {}, "low", "low"),
        ((), "none", {}, "none", "none"),
        (WORD, "low", {}, None, "low"),
        (WORD, "none", {}, "none", "none"),
        (SWITCH, "low", {}, "low", "low"),
        (SWITCH, "none", {}, None, None),
        (("thinking",), "none", {}, None, None),
        (ALL, "low", {}, None, "low"),
        (ALL, "none", {}, None, None),
        (ALL, None, {"reasoning_effort": "low"}, None, "low"),
        (SWITCH, None, {"reasoning_effort": "low"}, "low", "low"),
        (WORD, None, {"enable_thinking": False}, "none", "none"),
        (WORD, None, {"enable_thinking": False, "reasoning_effort": "low"}, "none", "none"),
        (ALL, None, {"enable_thinking": False, "reasoning_effort": "low"}, None, None),
        (ALL, None, {"enable_thinking": True, "reasoning_effort": "low"}, None, "low"),
        ((), None, {"enable_thinking": True}, None, None),
        (WORD, "high", {"reasoning_effort": "low"}, None, "high"),
    ],
)
def test_an_effort_that_the_template_is_not_told_is_left_to_the_budget(
    known: Sequence[str], effort: str | None, hints: dict[str, Any], taken: str | None, refused: str | None
) -> None:
    assert untold_effort(known, effort, hints) == (taken, refused)


@pytest.mark.parametrize(
    ("budgets", "why"),
    [
        (["low"], "'low' is not EFFORT=TOKENS, such as low=2048; efforts are minimal, low"),
        (["some=3"], "'some=3' is not"),
        (["low=-1"], "'low=-1' is not"),
        (["none=5"], "'none=5' is not"),
        (["low=1", "low=2"], "low has two budgets"),
    ],
)
def test_wrong_budgets_of_efforts_are_refused(budgets: list[str], why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        ModelSettings(effort_budgets=budgets)
