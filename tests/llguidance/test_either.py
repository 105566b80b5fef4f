"""Grammars of answers that are JSON of some schema or calls: what they let through, and what is read of it."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from llguidance import LLMatcher
from tests.core.text.test_tool_families import FAMILIES, ONE, REASONING, TOOLS, TWO, written
from tests.llguidance import test_calls
from tests.llguidance.test_calls import MARKS, Marked, check, matcher, takes
from tests.server.test_calling import FORMATS

from infer.contracts.grammar import MAX_CHARS
from infer.contracts.params import CallOutputs, StructuredOutputs
from infer.errors import RequestError
from infer.text.grammars import Grammars
from infer_llguidance.calls import blamed
from infer_server.calling import make_parser
from infer_tool_formats import infer_tool_formats

SYNTAX = {each.name: each.syntax for each in infer_tool_formats() if each.syntax}
SCHEMA = {
    "type": "object",
    "properties": {"verdict": {"enum": ["yes", "no"]}, "why": {"type": "string"}},
    "required": ["verdict", "why"],
    "additionalProperties": False,
}
ANSWER = json.dumps({"verdict": "yes", "why": "so [x] {"})
AT = {"type": "object", "properties": {"at": {"type": "integer"}}, "required": ["at"], "additionalProperties": False}
FUNCTIONS: dict[str, Any] = {"look": AT} | {
    tool["function"]["name"]: tool["function"]["parameters"] or {"type": "object"} for tool in TOOLS
}
CASES = [(name, tokens) for name in FAMILIES if FAMILIES[name].format in SYNTAX for tokens in (True, False)]
PLAIN = [("weather", {"city": "Rome\n\"IT\", ä€ \\ {<b>} 'x' & </i>\n", "n": -3, "x": 0.5, "days": [1, [2]]})]
"""Without what Gemma and Python write in another way than JSON does."""


def either(format: str, reasoning: str = "think", **how: Any) -> CallOutputs:
    answer, tags = StructuredOutputs(json_schema=SCHEMA), REASONING[reasoning][:2]
    given = {"functions": tuple(FUNCTIONS.items()), "answer": answer, "tags": tags} | how
    return CallOutputs(kind="either", syntax=SYNTAX[format], **given)


@functools.cache
def start(format: str, tokens: bool, reasoning: str = "think", **how: Any) -> tuple[Marked, LLMatcher]:
    marks = dict.fromkeys([*REASONING[reasoning][:2], *MARKS[format]])
    tokenizer = Marked(*marks) if tokens else Marked()
    return tokenizer, matcher(either(format, reasoning, **how), tokenizer)


def told(text: str, format: str, reasoning: str = "think", cut: bool = False) -> tuple[str, list[tuple[str, Any]]]:
    """The content that is read, and the calls."""
    parser = make_parser(FUNCTIONS, FORMATS[format], alone=True, tags=REASONING[reasoning])
    content = ""
    calls: list[list[str]] = []
    parts: Sequence[str] = list(text) if cut else [text]
    for piece in [*(piece for part in parts for piece in parser.push(part)), *parser.flush()]:
        if piece.kind == "content":
            content += piece.text
        elif piece.kind == "call":
            calls.append([piece.text, ""])
        elif piece.kind == "arguments":
            calls[-1][1] += piece.text
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize(("name", "tokens"), CASES)
def test_the_format_and_calls_are_let_through_and_read(name: str, tokens: bool) -> None:
    """Calls as the family's template writes them, behind reasoning and without."""
    format, source, reasoning = FAMILIES[name]
    tokenizer, begin = start(format, tokens, reasoning)
    tags = REASONING[reasoning]
    several = PLAIN if format in ("gemma", "python") else ONE if name.startswith("GigaChat") else TWO
    asked: list[list[tuple[str, Any]]] = [[], several, [("clock.now", {})]]
    for calls in asked:
        text = written(source, calls).removesuffix("<|tool_response>") if calls else ANSWER
        for thought in ("", f"{tags.opening}hm{tags.closing}\n\n"):
            assert takes(begin, tokenizer.encoded(thought + text)) is None, text
            said = ("" if calls else text, calls)
            assert told(thought + text, format, reasoning) == told(thought + text, format, reasoning, True) == said
    for bad in ("Hello", f"So. {text}", f"{text} So.", text.replace("clock", "watch"), f"{ANSWER}{text}", tags[0]):
        assert takes(begin, tokenizer.encoded(bad)) is not None, bad


@pytest.mark.parametrize("format", ["tags", "json", "mistral", "action", "xml"])
@pytest.mark.parametrize("tokens", [True, False])
def test_calls_are_held_to_tools_and_their_number(format: str, tokens: bool) -> None:
    tokenizer, begin = start(format, tokens)
    _, one = start(format, tokens, single=True)
    _, within = start(format, tokens, opened=True)
    for way in test_calls.WAYS[format]:
        whole, arguments = '{"name": "look", "arguments": {"at": 3}}', '{"at": 3}'
        call = way.format(name="look", json=arguments, whole=whole, input="3").replace("=input>", "=at>")
        for text in (call, f"\n\n{call}", f"{call}\n{call}"):
            assert takes(begin, tokenizer.encoded(text)) is None, text
            assert told(text, format) == ("", [("look", {"at": 3})] * text.count("look"))
            assert (takes(one, tokenizer.encoded(text)) is None) == (text != f"{call}\n{call}")
            assert takes(within, tokenizer.encoded(f"hm</think>\n{text}")) is None
            assert takes(within, tokenizer.encoded(text)) is not None
        for text in (call.replace("at", "by"), call.replace("look", "book"), call[:-1]):
            assert takes(begin, tokenizer.encoded(text)) is not None, text


def test_an_answer_that_quotes_a_call_is_no_call() -> None:
    call = '<tool_call>{"name": "look", "arguments": {"at": 3}}</tool_call>'
    for quoted in (json.dumps({"verdict": "no", "why": call}), json.dumps([call])):
        assert told(quoted, "tags") == told(quoted, "tags", cut=True) == (quoted, [])


def test_a_fault_is_of_the_format_or_of_the_tools() -> None:
    nothing = StructuredOutputs(json_schema={"enum": []})
    fault = check(either("tags", answer=nothing, tags=None), Marked()).fault
    assert fault is not None
    assert fault.param is None
    large = Marked().backend.source(either("tags"))
    fault = blamed(large, "it is too large", lambda source: None)
    assert (fault.param, "the parameters of the tools in its calls: it" in fault.text) == ("tools", True)


@pytest.mark.parametrize("format", ["tags", "json", "gemma", "python"])
def test_json_in_calls_has_bounded_space_and_schemas_of_any_keywords(format: str) -> None:
    schema = AT | {"properties": {"at": {"type": "array", "uniqueItems": True, "items": {"format": "uint32"}}}}
    tokenizer = Marked()
    begin = matcher(either(format, functions=(("look", schema),)), tokenizer)
    begun = {
        "tags": '<tool_call>{"name": "look", "arguments": {"at": [',
        "json": '{"name": "look", "arguments": {"at": [',
        "gemma": "<|tool_call>call:look{at:[",
        "python": "[look(at=[",
    }
    for blanks in (30, 99):
        ids = tokenizer.encoded(begun[format] + " " * blanks)
        assert begin.deep_copy().try_consume_tokens(ids) == len(begun[format]) + min(blanks, 40)


@pytest.mark.parametrize("format", ["tags", "json", "mistral"])
def test_a_tool_whose_schema_cannot_be_compiled_may_be_called(format: str) -> None:
    """With an object. Other tools are held to theirs."""
    lookahead = {"type": "object", "properties": {"at": {"type": "string", "pattern": "^(?!x)"}}}
    unknown = {"type": "OBJECT", "properties": {"at": {"$ref": "#/components/At"}}}
    functions = {"a": lookahead, "b": unknown, "c": {"properties": {}}, "look": AT}
    tokenizer = Marked()
    begin = matcher(either(format, functions=tuple(functions.items())), tokenizer)
    (way, *_) = test_calls.WAYS[format]
    for name in functions:
        for arguments, fits in (('{"at": "y"}', name != "look"), ("3", False), ("[]", False)):
            whole = f'{{"name": "{name}", "arguments": {arguments}}}'
            call = way.format(name=name, json=arguments, whole=whole)
            assert (takes(begin, tokenizer.encoded(call)) is None) == fits, call


@pytest.mark.parametrize(
    ("format", "text", "good", "bad"),
    [
        (
            "kimi",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"
            '{"at": 3}<|tool_call_end|><|tool_calls_section_end|>',
            '{"at"',
            '```json\n{"at"',
        ),
        (
            "solar",
            '<|tool_calls|><|tool_call:begin|>a<|tool_call:name|>look<|tool_call:args|>{"at": 3}<|tool_call:end|>',
            '{"at"',
            '```json\n{"at"',
        ),
        ("action", 'Action: ```json\n[{"tool_name": "look", "parameters": {"at": 3}}]\n```', "```json", ""),
        ("mistral", '[TOOL_CALLS]look[CALL_ID]a1[ARGS]{"at": 3}', "a1", "a\u05b0"),
        ("glm", "<tool_call>clock.now<arg_key>at</arg_key><arg_value>3</arg_value></tool_call>", "at<", "a\x1et<"),
    ],
)
def test_what_is_not_read_as_a_call_is_not_let_through(format: str, text: str, good: str, bad: str) -> None:
    tokenizer, begin = start(format, True)
    assert takes(begin, tokenizer.encoded(text)) is None
    assert len(told(text, format)[1]) == 1
    assert takes(begin, tokenizer.encoded(text.replace(good, bad))) is not None


def test_a_format_that_is_too_large_is_refused_before_it_is_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Marked().backend
    monkeypatch.setattr(backend, "source", lambda outputs: pytest.fail("this holds up all requests"))
    large = StructuredOutputs(json_schema={"description": "x" * MAX_CHARS})
    with pytest.raises(RequestError, match="more than 1048576 characters"):
        Grammars(backend).source(either("tags", answer=large))


@pytest.mark.parametrize(
    ("format", "call"), [("xml", "<function=look><parameter={}>3</parameter></function>"), ("python", "[look({}=3)]")]
)
def test_a_schema_may_allow_arguments_that_it_does_not_name(format: str, call: str) -> None:
    tokenizer = Marked()
    for more, fits in (({}, False), ({"additionalProperties": False}, False), ({"additionalProperties": {}}, True)):
        begin = matcher(either(format, functions=(("look", {"properties": {"at": {}}} | more),)), tokenizer)
        assert takes(begin, tokenizer.encoded(call.format("at"))) is None
        assert (takes(begin, tokenizer.encoded(call.format("by"))) is None) == fits


@pytest.mark.parametrize("tokens", [True, False])
def test_what_stands_behind_a_mark_of_mistrals_may_stand_behind_space(tokens: bool) -> None:
    """As in templates of its first models with tools."""
    tokenizer, begin = start("mistral", tokens)
    for text in ('[TOOL_CALLS] [{"name": "look", "arguments": {"at": 3}}]', '[TOOL_CALLS] look [ARGS] {"at": 3}'):
        assert takes(begin, tokenizer.encoded(text)) is None
        assert told(text, "mistral") == ("", [("look", {"at": 3})])
        assert takes(begin, tokenizer.encoded(text.replace(" ", " " * 99))) is not None
