"""Reasoning, text and tool calls are separated correctly, however the text is cut."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from llguidance import LLMatcher
from tests.examples import slowly

from infer.contracts.registration import NoSettings
from infer.contracts.text import Piece, ReasoningTags
from infer.text.reasoning import opens_reasoning
from infer.text.tool_formats import ToolFormat, recognize
from infer.text.tool_formats.reader import Script
from infer_server.calling import Calls, calls_schema, make_parser
from infer_tool_formats import harmony, infer_tool_formats

FORMATS = {
    each.name: ToolFormat(
        each.name,
        lambda tools, make=each.factory: make(tools, NoSettings()),  # type: ignore[misc]
        marks=each.marks,
    )
    for each in sorted(infer_tool_formats(), key=lambda each: -each.priority)
}
TOOLS: dict[str, Any] = {
    "weather": {
        "properties": {
            "city": {"type": "string"},
            "days": {"type": ["array", "null"]},
            "n": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "x": {"type": "number"},
            "sure": {"type": "boolean"},
            "where": {"type": "object"},
        }
    },
    "clock.now": {},
}


THINK = ReasoningTags("<think>", "</think>")


def told(parts: Sequence[str], format: str | None, *, thinks: bool = True, **how: Any) -> dict[str, Any]:
    """The message that the parts of a text amount to."""
    parser = make_parser(TOOLS, FORMATS.get(format or ""), tags=THINK if thinks else None, **how)
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": []}
    numbering = Calls()
    pieces = [piece for part in parts for piece in parser.push(part)] + list(parser.flush())
    for piece in pieces:
        delta = numbering.delta(piece)
        for call in delta.pop("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(message["calls"])
                message["calls"].append([call["function"]["name"], []])
            message["calls"][-1][1].append(call["function"]["arguments"])
        for key, text in delta.items():
            message[key] += text
    message["calls"] = [[name, "".join(arguments)] for name, arguments in message["calls"]]
    return message


CALLED = '<tool_call>\n{"name": "clock.now", "arguments": {"a": "<tool_call>"}}\n</tool_call>'
NOW = ["clock.now", '{"a": "<tool_call>"}']


@pytest.mark.parametrize(
    ("thought", "reasoning", "calls"),
    [
        (f"hm\n\n{CALLED}", "hm", [NOW]),
        (f"{CALLED}\n{CALLED}\n", "", [NOW, NOW]),
        (CALLED.removesuffix("</tool_call>"), "", [NOW]),
        (f"Say <tool_call> first.\n{CALLED}", "Say <tool_call> first.", [NOW]),
        (f"{CALLED} or not\n", f"{CALLED} or not", []),
        (f"{CALLED} or\n{CALLED}", f"{CALLED} or", [NOW]),
        (CALLED[:-20], CALLED[:-20], []),
        ("<tool_call> is what begins", "<tool_call> is what begins", []),
        ("hm <tool_call>", "hm <tool_call>", []),
        (CALLED.replace("clock.now", "unknown"), CALLED.replace("clock.now", "unknown"), []),
    ],
)
def test_calls_that_end_an_answer_end_its_reasoning(thought: str, reasoning: str, calls: list[list[str]]) -> None:
    """What is only planned is reasoning: text or the closing tag follows it."""
    for parts in ([thought], list(thought)):
        assert told(parts, "tags", thinking=True) == {"content": "", "reasoning_content": reasoning, "calls": calls}
    closed = told([f"{thought}</think>So."], "tags", thinking=True)
    assert closed == {"content": "So.", "reasoning_content": thought.strip(), "calls": []}
    assert told([thought], "tags", thinking=True, forced=True)["reasoning_content"] == thought.strip()
    assert told([thought], None, thinking=True)["reasoning_content"] == thought.strip()


@pytest.mark.parametrize("custom", [{}, {"alone": True}, {"held": ["clock.now"], "custom": ["clock.now"]}])
def test_calls_that_a_grammar_would_hold_stay_reasoning(custom: dict[str, Any]) -> None:
    """No grammar applies within the reasoning, where an answer may end."""
    said = told([CALLED], "tags", thinking=True, **custom)
    assert said == {
        "content": "",
        "reasoning_content": CALLED if custom else "",
        "calls": [] if custom else [NOW],
    }


LOOPS = {
    "calls": ("tags", '<tool_call>{"name": "clock.now", "arguments": {"a": "' * 100 + "<tool_call>" * 1000),
    "marks": ("tags", "<tool_call>" * 1000 + "x"),
    "objects": ("tags", '<tool_call>{"id":' * 600),
    "python": ("python", "<|tool_call_start|>[clock.now(" * 300),
    "sections": ("kimi", "<|tool_calls_section_begin|>" * 400 + "x"),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_many_calls_in_reasoning_take_time_in_proportion(loop: str) -> None:
    """Every character is read a bounded number of times, also where each mark may begin a call."""
    format, text = LOOPS[loop]
    read = 0

    def reader(tools: Any) -> Any:
        part = FORMATS[format].reader(tools)

        class Counting:
            def push(self, text: str) -> Any:
                nonlocal read
                read += len(text)
                return part.push(text)

            flush = part.flush

        return Counting()

    parser = make_parser(TOOLS, ToolFormat("counted", reader, marks=FORMATS[format].marks), tags=THINK, thinking=True)
    pieces = [*parser.push(text), *parser.flush()]
    assert "".join(piece.text for piece in pieces) == text
    assert read < 10 * len(text) + 8192


def test_an_answer_that_may_call_nothing_needs_no_format() -> None:
    def reader(tools: Any) -> Any:
        raise AssertionError("nobody asks for calls")

    parser = make_parser({}, ToolFormat("unasked", reader, marks=("<tool_call>",)), tags=THINK, thinking=True)
    assert [*parser.push(f"{CALLED}</think>"), *parser.flush()] == [Piece("reasoning", CALLED)]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "one\\ntwo"}}</tool_call>', "one\ntwo"),
        ('{"patch": "one"}}</tool_call>', '{"patch": "one"}'),
        ('{"input": {"a": 1}}}</tool_call>', '{"input": {"a": 1}}'),
        ("{}}</tool_call>", "{}"),
        ('{"input": "on', "on"),
        ('{"inp', ""),
    ],
)
def test_the_text_of_a_custom_tool_is_its_input_or_all_of_its_arguments(arguments: str, text: str) -> None:
    written = f'<tool_call>{{"name": "clock.now", "arguments": {arguments}'
    assert told([written], "tags", custom=["clock.now"])["calls"] == [["clock.now", text]]


CALL = '{"name": "weather", "arguments": {"city": "Rome, \\"IT\\" }", "days": [1, {"a": null}]}}'
ARGUMENTS = '{"city": "Rome, \\"IT\\" }", "days": [1, {"a": null}]}'
LATE = '{"arguments": {"a": 1}, "name": "clock.now"}'
QUOTED = json.dumps({"id": 7, "arguments": ARGUMENTS, "name": "weather"})
NESTED = json.dumps({"type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}})
IN_TAGS = '{"name": "weather", "arguments": {"city": "</tool_call> ```"}}'
XML = """<function=weather>
<parameter=city>
Rome
</parameter>
<parameter=days>
[1, {"a": null}]
</parameter>
<parameter=n>
3
</parameter>
<parameter=x>
0.5
</parameter>
<parameter=sure>
True
</parameter>
</function>"""
TYPED = '{"city": "Rome", "days": [1, {"a": null}], "n": 3, "x": 0.5, "sure": true}'
CODE = 'if (a) {\n  "</parameter>"\n}\n</tool_call>'
TEXTS: list[tuple[str, str | None, str, str, list[list[str]]]] = [
    ("Hello <b>there</b>", "tags", "Hello <b>there</b>", "", []),
    ("<think>\nhm\n\nso\n</think>\n\nHello", "tags", "Hello", "hm\n\nso", []),
    ("<think>never ends\n", None, "", "never ends", []),
    ("The tag <think> begins it.", None, "The tag <think> begins it.", "", []),
    ("  \n", "json", "  \n", "", []),
    (f"<tool_call>\n{CALL}\n</tool_call>", "tags", "", "", [["weather", ARGUMENTS]]),
    (
        f"<think>x</think>Let me see.\n<tool_call>{CALL}</tool_call>\n<tool_call>\n{LATE}</tool_call>\n",
        "tags",
        "Let me see.\n",
        "x",
        [["weather", ARGUMENTS], ["clock.now", '{"a": 1}']],
    ),
    ("<tool_call>not json</tool_call>", "tags", "not json", "", []),
    (f"<tool_call>{IN_TAGS}</tool_call>ok", "tags", "ok", "", [["weather", '{"city": "</tool_call> ```"}']]),
    (f"<tool_call>\n```json\n{CALL}\n```\n</tool_call>", "tags", "", "", [["weather", ARGUMENTS]]),
    (f"<tool_call>{CALL}\n<tool_call>{LATE}", "tags", "", "", [["weather", ARGUMENTS], ["clock.now", '{"a": 1}']]),
    (
        f"<tool_call>\n{CALL[:-1]}\n</tool_call>\n<tool_call>\n{CALL[:-1]}, }}\n</tool_call>So.",
        "tags",
        "So.",
        "",
        [["weather", ARGUMENTS]] * 2,
    ),
    (f"[TOOL_CALLS][{CALL[:-1]}, {CALL}]", "mistral", "", "", [["weather", ARGUMENTS]] * 2),
    (f"<TOOLCALL>[{CALL}, {QUOTED}]</TOOLCALL>", "tags", "", "", [["weather", ARGUMENTS]] * 2),
    (CALL, "json", "", "", [["weather", ARGUMENTS]]),
    (CALL.replace("arguments", "parameters"), "json", "", "", [["weather", ARGUMENTS]]),
    (f"{CALL}; {CALL}", "json", "", "", [["weather", ARGUMENTS]] * 2),
    (f"[{CALL},\n {CALL}]", "json", "", "", [["weather", ARGUMENTS]] * 2),
    (f"Let me see.\n\n{CALL}\n", "json", "Let me see.\n\n", "", [["weather", ARGUMENTS]]),
    (f"I ask: {CALL} now", "json", "I ask: now", "", [["weather", ARGUMENTS]]),
    (f"Now:\n```json\n[{CALL}]\n```\nDone.", "json", "Now:\nDone.", "", [["weather", ARGUMENTS]]),
    (f"<|python_tag|>{CALL}", "json", "", "", [["weather", ARGUMENTS]]),
    ("<|python_tag|>print(1)", "json", "<|python_tag|>print(1)", "", []),
    (LATE, "json", "", "", [["clock.now", '{"a": 1}']]),
    (QUOTED, "json", "", "", [["weather", ARGUMENTS]]),
    (NESTED, "json", "", "", [["weather", ARGUMENTS]]),
    (f'{{"name": "weather", "arguments": {json.dumps(ARGUMENTS)}}}', "json", "", "", [["weather", ARGUMENTS]]),
    ('{"name": "weather", "arguments": "Rome"}', "json", "", "", [["weather", '"Rome"']]),
    ('{"name": "weather", "arguments": {"a": 1}, "id": "}{"}', "json", "", "", [["weather", '{"a": 1}']]),
    ('{"name": "weather", "arguments": null}', "json", "", "", [["weather", "null"]]),
    ('{"name": "unknown", "arguments": {}}', "json", '{"name": "unknown", "arguments": {}}', "", []),
    ('{"answer": 42}', "json", '{"answer": 42}', "", []),
    (f'{{"like": {CALL}, "or": [{CALL}]}}', "json", f'{{"like": {CALL}, "or": [{CALL}]}}', "", []),
    ("  [1, 2] is a list", "json", "  [1, 2] is a list", "", []),
    ("```python\nprint({1: 2})\n```", "json", "```python\nprint({1: 2})\n```", "", []),
    ("Plain", "json", "Plain", "", []),
    (
        "[weather(city='Rome', days=[1, 2]), clock.now()]",
        "python",
        "",
        "",
        [["weather", '{"city": "Rome", "days": [1, 2]}'], ["clock.now", "{}"]],
    ),
    ('```tool_code\nweather(city="Rome")\n```', "python", "", "", [["weather", '{"city": "Rome"}']]),
    (
        'Now:\nweather(city=")")\nclock.now()',
        "python",
        "Now:\n",
        "",
        [["weather", '{"city": ")"}'], ["clock.now", "{}"]],
    ),
    ("<|python_start|>[weather(sure=true)]<|python_end|>", "python", "", "", [["weather", '{"sure": true}']]),
    (
        r"""[weather(from="a=1", x-y='b="', n=1, n =2, city="\ud83d\ude00")]""",
        "python",
        "",
        "",
        [["weather", '{"from": "a=1", "x-y": "b=\\"", "n": 2, "city": "😀"}']],
    ),
    ("weather is fine", "python", "weather is fine", "", []),
    ("[weather(city=where())]", "python", "[weather(city=where())]", "", []),
    ("```python\nprint(1)\n```", "python", "```python\nprint(1)\n```", "", []),
    (f"<tool_call>\n{XML}\n</tool_call>", "xml", "", "", [["weather", TYPED]]),
    (f"Let me see.\n{XML}", "xml", "Let me see.\n", "", [["weather", TYPED]]),
    ("<tool_call>\n<function=clock.now>\n</function>\n</tool_call>", "xml", "", "", [["clock.now", "{}"]]),
    (
        f"<function=weather><parameter=city>\n{CODE}\n</parameter>\n</function>",
        "xml",
        "",
        "",
        [["weather", json.dumps({"city": CODE})]],
    ),
    (
        "<function=weather><parameter=city>5</parameter><parameter=n>no</parameter><parameter=days>None</parameter>"
        "<parameter=extra>1</parameter></function>",
        "xml",
        "",
        "",
        [["weather", '{"city": "5", "n": "no", "days": null, "extra": "1"}']],
    ),
    (
        f"<tool_call>\n{XML.removesuffix('</function>')}</tool_call>\n<tool_call>\n{XML}\n</tool_call>So.",
        "xml",
        "So.",
        "",
        [["weather", TYPED]] * 2,
    ),
    ("<function=unknown>x</function>", "xml", "<function=unknown>x</function>", "", []),
    (f"Well.[TOOL_CALLS] [{CALL}]", "mistral", "Well.", "", [["weather", ARGUMENTS]]),
    (
        f'[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]clock.now[CALL_ID]a1b2c3d4e[ARGS]{{"a": 1}}',
        "mistral",
        "",
        "",
        [["weather", ARGUMENTS], ["clock.now", '{"a": 1}']],
    ),
    ("[TOOL_CALLS]unknown[ARGS]{}", "mistral", "unknown[ARGS]{}", "", []),
]


@pytest.mark.parametrize(("text", "format", "content", "reasoning", "calls"), TEXTS)
def test_what_a_text_says(text: str, format: str | None, content: str, reasoning: str, calls: list[list[str]]) -> None:
    expected = {"content": content, "reasoning_content": reasoning, "calls": calls}
    assert told([text], format) == expected
    assert told(list(text), format) == expected
    for arguments in (arguments for _, arguments in calls):
        json.loads(arguments)


ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
TO_WEATHER = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
HARMONY: list[tuple[str, str, str, list[list[str]]]] = [
    (f"{ANALYSIS}hm\n<|end|>{FINAL}Hello", "Hello", "hm\n", []),
    (f"{ANALYSIS}hm{FINAL}Hello<|return|>", "Hello", "hm", []),
    (f"{ANALYSIS}a<|end|><|start|>assistant{ANALYSIS}b<|end|>{FINAL}c", "c", "a\nb", []),
    (f"{ANALYSIS}hm<|end|><|start|>assistant{TO_WEATHER}{ARGUMENTS}<|call|>", "", "hm", [["weather", ARGUMENTS]]),
    (f"{ANALYSIS}hm<|end|><|start|>assistant{TO_WEATHER}{ARGUMENTS}", "", "hm", [["weather", ARGUMENTS]]),
    (" to=functions.weather<|channel|>commentary json<|message|>{}<|call|>", "", "", [["weather", "{}"]]),
    ("<|channel|>analysis to=functions.clock.now code<|message|>{}<|call|>", "", "", [["clock.now", "{}"]]),
    ("<|start|>assistant to=weather<|channel|>commentary<|message|>{}", "", "", [["weather", "{}"]]),
    (f"<|channel|>commentary<|message|>Plan:<|end|>{FINAL}Do", "Plan:\nDo", "", []),
    (f"<|channel|>commentary<|message|>Plan<|end|><|start|>assistant{TO_WEATHER}{{}}", "Plan", "", [["weather", "{}"]]),
    ('<|channel|>commentary to=functions.unknown json<|message|>{"a": 1}', '{"a": 1}', "", []),
    ('<|channel|>analysis to=browser.search code<|message|>{"a": 1}', "", '{"a": 1}', []),
    ("<|channel|>final <|constrain|>json<|message|>[1]", "[1]", "", []),
    ("Plain <b>text</b>", "Plain <b>text</b>", "", []),
    (" to=bed", " to=bed", "", []),
    ("<|message|>a<|message|>b<|end|>c", "abc", "", []),
    (f"{ANALYSIS}a<|message|>b", "", "ab", []),
    (f"{ANALYSIS}a<|channel|>final<|message|>b", "b", "a", []),
    ("<|channel|>no header, but text", "no header, but text", "", []),
    ("<|channel|>a b c<|message|>d", "a b cd", "", []),
    ("<|start|>user<|message|>Who?<|end|>", "Who?", "", []),
    (f"{ANALYSIS}hm<|end|><|start|>assistant<|chan", "assistant<|chan", "hm", []),
    (f"{ANALYSIS}hm<|end|><|start|>assistant<|channel|>com", "", "hm", []),
]
TEXTS += [(text, "harmony", *said) for text, *said in HARMONY]  # type: ignore[misc]


SHREDS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "text", "ä€😀", "weather", *"{}[],:\"'\\ \n<"]
SHREDS += [CALL, LATE, QUOTED, CALL[:30], IN_TAGS, "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "```", "tool_code\n"]
SHREDS += ["weather(", "city='x')", "clock.now()", XML, XML[:60], "<function=weather>", "<parameter=n>"]
SHREDS += ["<tool_call>weather", "<arg_key>city</arg_key>", "<arg_value>", "</arg_value>", "<tool_sep>"]
SHREDS += ['<invoke name="weather">', '<parameter name="city">', "</invoke>", "]<]minimax[>[<n>", "]<]minimax[>[</n>"]
SHREDS += ['<｜DSML｜invoke name="weather">', '<｜DSML｜parameter name="n" string="false">', "</｜DSML｜parameter>"]
SHREDS += ['<function name="weather">', '<param name="city">', "<![CDATA[", "]]>", "</param>"]
SHREDS += [
    '<|open|>call tool="weather"<|sep|>',
    '<|open|>argument key="n" type="number"<|sep|>',
    "<|close|>argument<|sep|>",
]
SHREDS += ["<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>", "<|tool_call_end|>"]
SHREDS += [
    "<｜tool▁call▁begin｜>weather<｜tool▁sep｜>",
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n",
]
SHREDS += ["<|tool_call>call:weather{", "city:", '<|"|>', ",", "<tool_call|>", "<|tools_prefix|>", '{"weather": {}}']
SHREDS += ["</parameter>", "</function>", ANALYSIS, FINAL, TO_WEATHER, *harmony.TOKENS, "<|end|>", " to="]
TEXT = st.lists(st.sampled_from(SHREDS), max_size=8).map("".join)
HOW = st.fixed_dictionaries({name: st.booleans() for name in ("thinks", "thinking", "parallel", "forced")})


CHANNELS = ReasoningTags(harmony.OPENING, harmony.CLOSING, FORMATS["harmony"].reader)
WORDS = st.sampled_from(["w", "x1", "{}", " ", "analysis", "<", "to=functions.weather", "é\n", "<|start|", "assistant"])


@pytest.mark.parametrize(("text", "content", "reasoning", "calls"), HARMONY)
def test_channels_are_told_apart_without_tools_as_well(
    text: str, content: str, reasoning: str, calls: list[list[str]]
) -> None:
    """What would be a call is content then, unless it is reasoning."""
    parser = make_parser({}, None, tags=CHANNELS, thinking=True)
    said = {"reasoning": "", "content": ""}
    for piece in [*(p for each in text for p in parser.push(each)), *parser.flush()]:
        said[piece.kind] += piece.text
    for _, arguments in calls:
        assert arguments in said["content"] + said["reasoning"]
        said = {kind: told.replace(arguments, "").removesuffix("\n") for kind, told in said.items()}
    assert said == {"reasoning": reasoning, "content": content}


@example(["to=functions.weather", " ", "<|message|>"])
@given(st.lists(st.one_of(st.sampled_from([*harmony.TOKENS, "<|end|>"]), WORDS), max_size=14))
def test_no_sequence_of_channels_loses_text(shreds: list[str]) -> None:
    """Only marks and complete headers are dropped, which have a channel, a role or a recipient."""
    text = "".join(shreds)
    parser = make_parser(TOOLS, FORMATS["harmony"], tags=CHANNELS, thinking=True)
    told = "".join(piece.text for piece in [*parser.push(text), *parser.flush()] if piece.kind != "call")
    header = r"(<\|start\|>|<\|channel\|>|<\|constrain\|>)[^|]*?(?=<\||$)|^\s*to=\S*\s*\w*\s*(?=<\||$)"
    left = re.sub(r"<\|\w+\|>", "", re.sub(header, "", text))
    remaining = iter("".join(told.split()))
    assert all(character in remaining for character in "".join(left.split())), (left, told)


def test_forced_calls_are_in_the_final_channel() -> None:
    parser = make_parser(TOOLS, FORMATS["harmony"], tags=CHANNELS, thinking=True, forced=True)
    pieces = [*parser.push(f"{ANALYSIS}hm<|end|>so{FINAL}[{CALL}]"), *parser.flush()]
    assert [piece for piece in pieces if piece.text.strip()] == [
        ("reasoning", "hm"),
        ("content", "so"),
        ("call", "weather"),
        ("arguments", ARGUMENTS),
    ]


@given(TEXT, st.sampled_from([*FORMATS, None]), HOW, st.data())
def test_cutting_changes_nothing(text: str, format: str | None, how: dict[str, bool], data: Any) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert told(parts, format, **how) == told([text], format, **how)


LONG = 8_000
ENDLESS = ["{", "[", "(", '{"name": "', '{"name": "weather", "arguments": "', "<function=weather><parameter=city>"]
ENDLESS += ["<tool_call>", "</parameter> ", "[TOOL_CALLS]", "weather(", "[weather(city='", "```", "<think>", "</think>"]
ENDLESS += [f"{CALL} ", "<function=", '{"id": {"a', "<|python_tag|>", "[TOOL_CALLS]weather[ARGS]{", "\\", "-", "a."]
ENDLESS += ["<tool_call>weather<arg_key>", "<tool_call>weather<arg_key>city</arg_key><arg_value>", "</arg_value> "]
ENDLESS += ['<invoke name="weather"><parameter name="n">', '<invoke name="', "]<]minimax[>[", "<｜DSML｜", "<![CDATA["]
ENDLESS += ['<function name="weather"><param name="city"><![CDATA[', "]]></param> ", "<|open|>", "<|open|>call "]
ENDLESS += [
    "<|tool_call_begin|>",
    "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{",
    "<｜tool▁sep｜>",
]
ENDLESS += [
    "<|tool_call>call:weather{",
    '<|tool_call>call:weather{a:<|"|>',
    "<|tool_call>call:weather{a:[",
    "<tool_call|>",
]
ENDLESS += ["<", "weather(a=", "[TOOL_CALLS]weather[ARGS]", " to=", TO_WEATHER, *harmony.TOKENS, "<|start|>assistant"]


@pytest.mark.parametrize("format", [*list(FORMATS)[:3], *slowly(*list(FORMATS)[3:])])
def test_a_parser_looks_ahead_a_little_and_no_further(format: str) -> None:
    """What it holds is copied and searched with every piece, so that it must not grow with the text."""
    for begin in ENDLESS:
        for text in (begin * (LONG // len(begin)), begin + " " * LONG, begin + "x" * LONG):
            script = FORMATS[format].reader(TOOLS)
            assert isinstance(script, Script)
            for i in range(0, len(text), 7):
                list(script.push(text[i : i + 7]))
                assert len(script.reader) <= 512, text[:40]
            list(script.flush())


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_long_texts_are_read_as_short_ones_are(format: str) -> None:
    for begin in ENDLESS:
        for text in (begin * (LONG // len(begin)), begin + " " * LONG, begin + "x" * LONG):
            assert told([text[i : i + 64] for i in range(0, len(text), 64)], format) == told([text], format)


DEEP = "[" * 100_000 + "]" * 100_000
HOSTILE: list[tuple[str, str]] = [
    ("json", f'{{"id": 1, "name": "weather", "arguments": {DEEP}}}'),
    ("json", f'{{"name": "weather", "arguments": {DEEP}}}'),
    ("json", '{"id": 1, "name": "weather", "arguments": {"a": "\\ud800"}}'),
    ("python", f"weather(days={DEEP})"),
    ("python", f"weather(days={'-' * 100_000}1)"),
    ("python", f"weather(days=1{'+1' * 50_000})"),
    ("python", f"weather{'.a' * 50_000}()"),
    ("python", "weather(city='\\ud800')"),
    ("python", "weather(city=b'x')"),
    ("python", "weather(n=9" + "9" * 10_000 + ")"),
    ("xml", f"<function=weather><parameter=days>{DEEP}</parameter></function>"),
    ("xml", "<function=weather><parameter=days>['\\ud800']</parameter></function>"),
    ("xml", "<function=weather><parameter=where>{1: {2}, None: b'x'}</parameter></function>"),
    ("xml", f"<function=weather><parameter=days>['x', {DEEP}]</parameter></function>"),
    ("xml", f"<function=weather><parameter=days>[{'-' * 100_000}1]</parameter></function>"),
    ("minimax", f'<invoke name="weather"><parameter name="days">{DEEP}</parameter></invoke>'),
    ("glm", f"<tool_call>weather<arg_key>days</arg_key><arg_value>{DEEP}</arg_value></tool_call>"),
    ("gemma", f"<|tool_call>call:weather{{days:{DEEP}}}<tool_call|>"),
    ("gemma", "<|tool_call>call:weather{n:9" + "9" * 10_000 + ",x:1e999,a:\\ud800}"),
    ("kimi", f"<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{DEEP}"),
    ("mistral", f"[TOOL_CALLS]weather[ARGS]{DEEP}"),
]


@pytest.mark.parametrize(("format", "text"), HOSTILE, ids=range(len(HOSTILE)))
def test_no_text_is_too_much(format: str, text: str) -> None:
    json.dumps(told([text], format), ensure_ascii=False).encode()


def test_what_is_forced_and_cut_off_is_content_until_its_arguments_begin() -> None:
    text = f"[{CALL}, {CALL}]"
    opens, begins = ([found.start() for found in re.finditer(re.escape(of), text)] for of in (CALL, ARGUMENTS))
    for end in range(len(text) + 1):
        found = told([text[:end]], "tags", thinks=False, forced=True)
        assert all(name == "weather" and ARGUMENTS.startswith(arguments) for name, arguments in found["calls"])
        assert len(found["calls"]) == sum(begin < end for begin in begins)
        unread = text[opens[1] : end] if begins[0] < end <= begins[1] else ""
        assert found["content"] == (text[:end] if end <= begins[0] else unread)


def test_what_is_forced_is_one_of_the_tools() -> None:
    """With whitespace wherever the grammar lets it stand, and nothing that is another function's."""
    blank = " \n" * 20
    spaced = blank.join(["", "[", "{", '"name"', ":", '"clock.now"', ",", '"arguments"', ":", "{}", "}", "]"])
    for size in (1, 7, len(spaced)):
        parts = [spaced[i : i + size] for i in range(0, len(spaced), size)]
        assert told(parts, None, thinks=False, forced=True)["calls"] == [["clock.now", "{}"]]
    other = CALL.replace("weather", "wether")
    assert told([f"[{other}]"], None, thinks=False, forced=True)["calls"] == []


def test_a_forced_call_has_the_longest_name() -> None:
    """A namespace of 128 characters, two underscores, and as long a name."""
    name = f"{'n' * 128}__{'f' * 128}"
    parser = make_parser({name: {}}, None, forced=True)
    assert Piece("call", name) in [*parser.push(f'[{{"name": "{name}", "arguments": {{}}}}]'), *parser.flush()]


def test_a_format_is_recognized_by_what_it_says() -> None:
    arguments = {"city": 'Ro"me', "n": 3}
    body = json.dumps(arguments)
    call = json.dumps({"name": "weather", "arguments": arguments})
    parameters = '<parameter=city>\nRo"me\n</parameter>\n<parameter=n>\n3\n</parameter>'
    for text, format in (
        (f"\n<tool_call>{call}</tool_call>\n", "tags"),
        (call, "json"),
        (f"<tool_call><function=weather>{parameters}</function></tool_call>", "xml"),
        (f"[TOOL_CALLS][{call}]", "mistral"),
        (f"[TOOL_CALLS]weather[ARGS]{body}", "mistral"),
        ("[weather(city='Ro\"me', n=3)]", "python"),
        (f" to=functions.weather<|channel|>commentary json<|message|>{body}<|call|>", "harmony"),
        (f"<other>{call}</other>", None),
        (f"<tool_call>{call}</tool_call><tool_call>{call}</tool_call>", None),
        (call.replace("3", "4"), None),
        ('[weather(city="Ro"me", n=3)]', None),
        (f"weather\n{body}", None),
    ):
        found = recognize(FORMATS.values(), text, TOOLS, ("weather", arguments))
        assert (found and found.name) == format, text


def test_a_prompt_that_opens_the_reasoning() -> None:
    expected = {"content": "ok", "reasoning_content": "hm", "calls": []}
    assert told(["hm</think>ok"], None, thinking=True) == expected


@pytest.mark.parametrize("size", [1, 3, 99])
def test_reasoning_stands_between_the_tags_that_are_given(size: int) -> None:
    text = "\n[M]hm </think>[/M]<think>ok[/M]"
    parser = make_parser({}, None, tags=ReasoningTags("[M]", "[/M]"))
    said = {"reasoning": "", "content": ""}
    for piece in [*(p for i in range(0, len(text), size) for p in parser.push(text[i : i + size])), *parser.flush()]:
        said[piece.kind] += piece.text
    assert said == {"reasoning": "hm </think>", "content": "<think>ok[/M]"}
    assert opens_reasoning("assistant: [M]\n", ReasoningTags("[M]", "[/M]"))


def test_only_the_end_of_a_prompt_opens_reasoning() -> None:
    assert opens_reasoning("user: hi\nassistant: <think>\n", THINK)
    assert not opens_reasoning("user: what is <think>?\nassistant: ", THINK)
    assert not opens_reasoning("user: hi\nassistant: <think>\n\n</think>\n\n", THINK)


def test_one_call_at_most() -> None:
    found = told(list(f"{CALL}; {CALL}; {CALL}"), "json", parallel=False)
    assert found["calls"] == [["weather", ARGUMENTS]]


def test_the_schema_of_forced_calls() -> None:
    tools = [{"function": {"name": "weather", "parameters": {"type": "object", "required": ["city"]}}}]
    schema = calls_schema(tools, 1)
    assert schema["maxItems"] == schema["minItems"] == 1
    assert schema["items"]["anyOf"][0]["properties"]["name"] == {"const": "weather"}


def test_a_schema_of_forced_calls_keeps_what_its_tools_refer_to() -> None:
    """Each tool's references lead into its own schema, as jsonschema sees it, and llguidance compiles them."""
    words = {"enum": ["a", "b"]}
    tree = {
        "type": "object",
        "properties": {"default": {"$ref": "#/$defs/word"}, "more": {"type": "array", "items": {"$ref": "#"}}},
        "required": ["default"],
        "additionalProperties": False,
        "$defs": {"word": words, "const": {"const": {"$ref": "#/$defs/word"}}},
    }
    other = tree | {"$defs": {"word": {"type": "integer"}}}
    named = tree | {"$id": "https://example.org/tree"}
    names = {
        "tree": tree,
        "other": other,
        "named": named,
        "quoted": {"$ref": "#/$defs/q", "$defs": {"q": {"const": {"$ref": "#/x"}}}},
    }
    schema = calls_schema([{"function": {"name": name, "parameters": each}} for name, each in names.items()], None)
    known = jsonschema.Draft202012Validator(schema)
    for name, arguments, right in (
        ("tree", {"default": "a", "more": [{"default": "b"}]}, True),
        ("tree", {"default": "c"}, False),
        ("tree", {"default": 1}, False),
        ("tree", {"default": "a", "more": [{"default": 1}]}, False),
        ("tree", {"default": "a", "more": [[]]}, False),
        ("other", {"default": 1, "more": [{"default": 2}]}, True),
        ("other", {"default": "a"}, False),
        ("named", {"default": "a", "more": [{"default": "b"}]}, True),
        ("named", {"default": 1}, False),
        ("quoted", {"$ref": "#/x"}, True),
        ("quoted", {"$ref": "#/items/anyOf/3/properties/arguments/x"}, False),
    ):
        assert known.is_valid([{"name": name, "arguments": arguments}]) is right, (name, arguments)
    assert LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema))) == ""
