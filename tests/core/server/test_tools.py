"""Reasoning, text and tool calls told apart, however the text is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.server.tools import Calls, ToolFormat, calls_schema, guess_tool_format, make_parser, opens_reasoning, reasons

NAMES = ("weather", "clock.now")


def told(parts: list[str], format: ToolFormat | None, **how: bool) -> dict[str, Any]:
    """The message that the parts of a text amount to."""
    parser = make_parser(NAMES, format, **({"parallel": True, "thinks": True, "thinking": False} | how))
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": []}
    numbering = Calls()
    pieces = [piece for part in parts for piece in parser.push(part)] + list(parser.flush())
    for piece in pieces:
        delta = numbering.delta(piece)
        for call in delta.pop("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(message["calls"])
                message["calls"].append([call["function"]["name"], ""])
            message["calls"][-1][1] += call["function"]["arguments"]
        for key, text in delta.items():
            message[key] += text
    return message


CALL = '{"name": "weather", "arguments": {"city": "Rome, \\"IT\\" }", "days": [1, {"a": null}]}}'
ARGUMENTS = '{"city": "Rome, \\"IT\\" }", "days": [1, {"a": null}]}'
LATE = '{"arguments": {"a": 1}, "name": "clock.now"}'
TEXTS: list[tuple[str, ToolFormat | None, str, str, list[list[str]]]] = [
    ("Hello <b>there</b>", "tags", "Hello <b>there</b>", "", []),
    ("<think>\nhm\n\nso\n</think>\n\nHello", "tags", "Hello", "hm\n\nso", []),
    ("<think>never ends", None, "", "never ends", []),
    (f"<tool_call>\n{CALL}\n</tool_call>", "tags", "", "", [["weather", ARGUMENTS]]),
    (
        f"<think>x</think>Let me see.\n<tool_call>{CALL}</tool_call>\n<tool_call>\n{LATE}</tool_call>",
        "tags",
        "Let me see.\n\n",
        "x",
        [["weather", ARGUMENTS], ["clock.now", '{"a": 1}']],
    ),
    ("<tool_call>not json</tool_call>", "tags", "not json", "", []),
    (CALL, "json", "", "", [["weather", ARGUMENTS]]),
    (CALL.replace("arguments", "parameters"), "json", "", "", [["weather", ARGUMENTS]]),
    (f"{CALL}; {CALL}", "json", "", "", [["weather", ARGUMENTS]] * 2),
    (f"[{CALL},\n {CALL}]", "json", "", "", [["weather", ARGUMENTS]] * 2),
    (LATE, "json", "", "", [["clock.now", '{"a": 1}']]),
    ('{"name": "weather", "arguments": {"a": 1}, "id": "}{"}', "json", "", "", [["weather", '{"a": 1}']]),
    ('{"name": "weather", "arguments": null}', "json", "", "", [["weather", "null"]]),
    ('{"name": "unknown", "arguments": {}}', "json", '{"name": "unknown", "arguments": {}}', "", []),
    ('{"answer": 42}', "json", '{"answer": 42}', "", []),
    ("  [1, 2] is a list", "json", "  [1, 2] is a list", "", []),
    ("Plain", "json", "Plain", "", []),
    (
        "[weather(city='Rome', days=[1, 2]), clock.now()]",
        "python",
        "",
        "",
        [["weather", '{"city": "Rome", "days": [1, 2]}'], ["clock.now", "{}"]],
    ),
    ('```tool_code\nweather(city="Rome")\n```', "python", "", "", [["weather", '{"city": "Rome"}']]),
    ("weather is fine", "python", "weather is fine", "", []),
    ("[weather(city=where())]", "python", "[weather(city=where())]", "", []),
    ("```python\nprint(1)\n```", "python", "```python\nprint(1)\n```", "", []),
]


@pytest.mark.parametrize(("text", "format", "content", "reasoning", "calls"), TEXTS)
def test_what_a_text_says(
    text: str, format: ToolFormat | None, content: str, reasoning: str, calls: list[list[str]]
) -> None:
    expected = {"content": content, "reasoning_content": reasoning, "calls": calls}
    assert told([text], format) == expected
    assert told(list(text), format) == expected
    for arguments in (arguments for _, arguments in calls):
        json.loads(arguments)


SHREDS = ["<think>", "</think>", "<tool_call>", "</tool_call>", CALL, LATE, CALL[:30], *'{}[],"\\ \n<']
SHREDS += ["text", "weather(", "city='x')", "```", "tool_code\n", "ä€😀"]


@given(
    st.lists(st.sampled_from(SHREDS), max_size=8).map("".join),
    st.sampled_from(["tags", "json", "python", None]),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_cutting_changes_nothing(
    text: str, format: ToolFormat | None, thinking: bool, parallel: bool, data: Any
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    how = {"thinking": thinking, "parallel": parallel}
    assert told(parts, format, **how) == told([text], format, **how)


def test_a_prompt_that_opens_the_reasoning() -> None:
    expected = {"content": "ok", "reasoning_content": "hm", "calls": []}
    assert told(["hm</think>ok"], None, thinking=True) == expected


def test_only_the_end_of_a_prompt_opens_reasoning() -> None:
    assert opens_reasoning("user: hi\nassistant: <think>\n")
    assert not opens_reasoning("user: what is <think>?\nassistant: ")
    assert not opens_reasoning("user: hi\nassistant: <think>\n\n</think>\n\n")


def test_the_setting_decides_whether_a_model_reasons() -> None:
    with_tags, without = "... </think> ...", "{{ messages }}"
    assert [reasons("auto", with_tags), reasons("auto", without)] == [True, False]
    assert [reasons("none", with_tags), reasons("think", without)] == [False, True]


def test_one_call_at_most() -> None:
    found = told(list(f"{CALL}; {CALL}; {CALL}"), "json", parallel=False)
    assert found["calls"] == [["weather", ARGUMENTS]]


def test_the_format_is_read_off_the_template() -> None:
    assert guess_tool_format("... <tool_call> {{ tools }}") == "tags"
    assert guess_tool_format('{"name": x, "parameters": y} {{ tools }}') == "json"
    assert guess_tool_format("```tool_code {{ tools }}") == "python"
    assert guess_tool_format("{{ messages }}") is None


def test_the_schema_of_forced_calls() -> None:
    tools = [{"function": {"name": "weather", "parameters": {"type": "object", "required": ["city"]}}}]
    schema = calls_schema(tools, 1)
    assert schema["maxItems"] == schema["minItems"] == 1
    assert schema["items"]["anyOf"][0]["properties"]["name"] == {"const": "weather"}
