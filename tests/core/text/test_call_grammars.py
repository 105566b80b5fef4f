"""Grammars of answers that call tools whose inputs follow grammars: what they let through, and what is read of it."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from tests.core.text.test_tools import FORMATS
from tests.examples import slowly

from infer.contracts.params import CallOutputs, ToolGrammar
from infer.contracts.text import ReasoningTags
from infer.server.tools import TEXT_PARAMETERS
from infer.text import call_grammars
from infer.text.grammar import check
from infer.text.tools import calls_schema, make_parser
from infer_tool_formats import infer_tool_formats

MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>")
FORMS = {each.name: each.forms for each in infer_tool_formats() if each.forms}
TAGS = ReasoningTags("<think>", "</think>")
PATCH = r"""
start: "*** Begin" LF hunk+ "*** End" LF?
hunk: "*** Add: " name LF added+ | "*** Change: " name LF changed+
name: /[^\n]{1,6}/
added: "+" /[^\n]*/ LF
changed: ("@@" | "@@ " /[^\n]+/ | /[-+ ][^\n]*/) LF
%import common.LF
"""
"""A patch as coding agents write it."""
PATCHED = re.compile(
    r"\*\*\* Begin\n(\*\*\* Add: [^\n]{1,6}\n(\+[^\n]*\n)+|\*\*\* Change: [^\n]{1,6}\n((@@|@@ [^\n]+|[-+ ][^\n]*)\n)+)+"
    r"\*\*\* End\n?"
)
CODE = r'[A-Z]{2}-"?\d{1,3}(\n|\\)?'
TOOLS = [ToolGrammar("ns__patch", "lark", PATCH, "tools[0]"), ToolGrammar("code.1", "regex", CODE, "tools[1]")]
EXPECTED = {"ns__patch": PATCHED, "code.1": re.compile(CODE)}
KNOWN: dict[str, Any] = dict.fromkeys(EXPECTED, TEXT_PARAMETERS) | {"look": {}, "ns__patch2": {}}
GOOD = '*** Begin\n*** Add: a"b\n+x\t\\é\n+\n*** Change: c\n@@ </b>\n-x\n*** End'


class Marked:
    """A tokenizer of bytes, marks and the end of an answer."""

    bos_token_id, eos_token_id = None, 256
    tokens = [*(bytes([byte]) for byte in range(256)), *map(str.encode, ("<end>", *MARKS))]  # noqa: RUF012
    special_token_ids = [*range(256, 257 + len(MARKS))]  # noqa: RUF012

    def __call__(self, text: bytes) -> list[int]:
        return list(text)

    def get_added_tokens_decoder(self) -> dict[int, Any]:
        """As a tokenizer of the hub's."""
        return {257 + i: SimpleNamespace(content=mark, special=False) for i, mark in enumerate(MARKS)}


TOKENIZER = LLTokenizer(TokenizerWrapper(Marked()), slices=[])
SPLIT = re.compile("|".join(map(re.escape, MARKS)) + "|(?s:.)")


def encoded(text: str, spelled: bool = False) -> list[int]:
    ids: list[int] = []
    for found in SPLIT.finditer(text):
        ids += [257 + MARKS.index(found[0])] if found[0] in MARKS and not spelled else found[0].encode()
    return ids


def decoded(ids: Sequence[int]) -> str:
    return b"".join(Marked.tokens[id] for id in ids if id != 256).decode()


def matcher(outputs: CallOutputs) -> LLMatcher:
    checked = check(TOKENIZER, outputs.spec, [256])
    assert checked.fault is None
    assert checked.text is not None
    return LLMatcher(TOKENIZER, checked.text, log_level=0)


def free(format: str, tools: Sequence[ToolGrammar] = TOOLS) -> CallOutputs:
    tokenizer: Any = Marked()
    return call_grammars.within(tools, FORMS[format], call_grammars.visible(tokenizer), TAGS[:2])


STARTS = {format: matcher(free(format)) for format in FORMS}


def takes(start: LLMatcher, text: str, spelled: bool = False) -> int | None:
    """None if the text is a whole answer; otherwise how many of its tokens may come, at most."""
    copy, ids = start.deep_copy(), encoded(text, spelled)
    taken = copy.try_consume_tokens(ids)
    return None if taken == len(ids) and copy.is_accepting() else taken


def calls(text: str, format: str | None) -> list[tuple[str, str]]:
    """The calls that are read of an answer: names and inputs or arguments."""
    parser = make_parser(
        KNOWN, FORMATS.get(format or ""), forced=format is None, tags=TAGS if format else None, custom=EXPECTED
    )
    made: list[tuple[str, str]] = []
    for piece in [*parser.push(text), *parser.flush()]:
        if piece.kind == "call":
            made.append((piece.text, ""))
        elif piece.kind == "arguments":
            made[-1] = made[-1][0], made[-1][1] + piece.text
    return made


def written(format: str, name: str, input: str) -> str:
    """A call as a model writes it."""
    arguments = json.dumps({"input": input}, ensure_ascii=False)
    if format == "xml":
        return f"<tool_call>\n<function={name}>\n<parameter=input>\n{input}\n</parameter>\n</function>\n</tool_call>"
    whole = f'{{"name": "{name}", "arguments": {arguments}}}'
    match format:
        case "tags":
            return f"<tool_call>\n{whole}\n</tool_call>"
        case "action":
            return f"Action:\n```json\n[{whole}]\n```"
        case "mistral":
            return f"[TOOL_CALLS]{name}[ARGS]{arguments}"
    return whole


@pytest.mark.parametrize("format", FORMS)
@pytest.mark.parametrize("spelled", [False, *slowly(True)])
def test_calls_as_models_write_them_are_let_through_and_read(format: str, spelled: bool) -> None:
    start = STARTS[format]
    one, other = written(format, "ns__patch", GOOD), written(format, "code.1", 'AB-"12\n')
    free = written(format, "look", '{"x": [1, 2]}') + "\n" + written(format, "ns__patch2", "\\any <b>thing")
    for text in ("", "Hello <tool_call> [x] {y", '{"name": "Bob", "input": 3}', "<think>hm</think>Hi.", free):
        assert takes(start, text, spelled) is None, text
    thought = f"<think>{'' if spelled else one[:40]} or</think>{one}"
    for text in (one, f"So. {one}", f"{one}\n{other}", f"{free}\n{one}\nDone.", thought):
        assert takes(start, text, spelled) is None, text
        found = [call for call in calls(text, format) if call[0] in EXPECTED]
        assert ("ns__patch", GOOD) in found
        assert len(found) == (2 if other in text else 1)
    assert [name for name, _ in calls(free, format)] == ["look", "ns__patch2"]
    if format == "mistral":
        for text in (one.replace("[ARGS]", ""), f"[TOOL_CALLS][{written('json', 'ns__patch', GOOD)}]"):
            assert takes(start, text, spelled) is None, text
            assert calls(text, format) == [("ns__patch", GOOD)]


@pytest.mark.parametrize("format", FORMS)
def test_no_call_has_another_input(format: str) -> None:
    start = STARTS[format]
    good = written(format, "ns__patch", GOOD)
    bad = [written(format, "ns__patch", input) for input in ("x", GOOD.replace("+x", "x"), GOOD + "\n\n")]
    bad += [f"{good}\n{written(format, 'code.1', 'x')}", f"<think>a</think>{bad[0]}"]
    if format != "xml":
        arguments = '{"input": "x"}'
        turned = '{"arguments": %s, "name": "ns__patch"}' % arguments  # noqa: UP031
        bad += [
            turned,
            '{"name": "ns__patch"}',
            '{"name": "\\u006es__patch", "arguments": %s}' % arguments,  # noqa: UP031
            '{"type": "function", "function": {"name": "ns__patch", "arguments": %s}}' % arguments,  # noqa: UP031
            '{"name": "ns__patch", "arguments": "%s"}' % arguments.replace('"', '\\"'),  # noqa: UP031
        ]
        bad += [good.replace("}", ', "input": "x"}', 1), f"{turned}\n{good}"]
    if format == "xml":
        bad += ["<function=ns__patch>\n</function>", '<function=ns__patch>{"input": "x"}</function>']
        bad.append(written(format, "ns__patch", GOOD.replace("</b>", "</parameter></function>")))
    for text in bad:
        assert takes(start, text) is not None, text


@pytest.mark.parametrize("format", FORMS)
@pytest.mark.parametrize("seed", [0, *slowly(*range(1, 6))])
def test_whatever_is_drawn_has_inputs_that_fit(format: str, seed: int) -> None:
    """A model that draws at random, but begins calls as models do."""
    rng = random.Random(f"{format}{seed}")
    ids: list[int] = []
    few = PATCH.replace("]*/", "]{0,4}/").replace("]+/", "]{1,4}/").replace("added+", "added{1,2}")
    few = few.replace("hunk+", "hunk{1,2}").replace("changed+", "changed{1,2}")
    copy = matcher(free(format, [TOOLS[0]._replace(definition=few), TOOLS[1]]))
    likely = [*b'abc "*+-@\\n/<>{}[]:,', *range(256, 258 + len(MARKS) - 1)]
    begin = {name: written(format, name, "\0").partition("\\u0000" if format != "xml" else "\0") for name in EXPECTED}

    def take(token: int) -> None:
        assert copy.consume_token(token)
        ids.append(token)

    for _ in range(2):
        for token in encoded(begin[rng.choice([*begin])][0]):
            take(token)
        while not copy.validate_tokens([256]):  # before the call ends
            options = [token for token in likely if copy.validate_tokens([token])]
            take(rng.choice(options or [token for token in range(256) if copy.validate_tokens([token])]))
    text = decoded(ids)
    made = calls(text, format)
    assert len(made) == 2
    for name, input in made:
        assert EXPECTED[name].fullmatch(input), (text, name, input)


LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"type": "integer"}},
            "required": ["at"],
            "additionalProperties": False,
        },
    },
}
FUNCTIONS = [LOOK, *({"type": "function", "function": {"name": tool.name}} for tool in TOOLS)]


def listed(most: int | None) -> LLMatcher:
    return matcher(call_grammars.listed(FUNCTIONS, {tool.name: tool for tool in TOOLS}, most))


def test_a_list_of_calls_holds_inputs_and_arguments() -> None:
    one = written("json", "ns__patch", GOOD)
    look = '{"name": "look", "arguments": {"at": 3}}'
    start = listed(None)
    for text in (f"[{one}]", f"[{look},\n {one}]", f"[ {one} , {look} ]"):
        assert takes(start, text) is None, text
        assert ("ns__patch", GOOD) in calls(text, None)
    for text in ("[]", f"[{look.replace('3', 'true')}]", f"[{written('json', 'code.1', 'x')}]", f"[{one}, ]"):
        assert takes(start, text) is not None, text
    assert takes(listed(1), f"[{one}]") is None
    assert takes(listed(1), f"[{one}, {look}]") == len(encoded(f"[{one}"))
    plain = calls_schema([LOOK], None)
    assert plain["items"]["anyOf"][0]["required"] == ["name", "arguments"], "which is what a list without grammars is"


@pytest.mark.parametrize(
    ("tool", "why"),
    [
        (
            ToolGrammar("p", "lark", "start: x", "tools[3]"),
            r"^The grammar of the tool 'p' cannot be compiled: .*unknown",
        ),
        (ToolGrammar("p", "regex", "(a", "tools[3]"), r"^The grammar of the tool 'p' cannot be compiled: .*\(a"),
        (ToolGrammar("p", "lark", "start: /a/ <end>", "tools[3]"), "^The model cannot be held to the grammar .* 'p'"),
    ],
)
def test_the_fault_of_a_grammar_names_its_tool(tool: ToolGrammar, why: str) -> None:
    checked = check(TOKENIZER, free("tags", [TOOLS[0], tool]).spec, [256])
    assert checked.fault is not None
    error = checked.fault.error()
    assert error.param == "tools[3]"
    assert re.search(why, str(error), re.DOTALL), error


def test_odd_schemas_are_llguidances_to_refuse() -> None:
    odd = {"type": "function", "function": {"name": "odd", "parameters": {"type": "object", "x-guidance": "x"}}}
    outputs = call_grammars.listed([odd, FUNCTIONS[1]], {TOOLS[0].name: TOOLS[0]}, None)
    fault = check(TOKENIZER, outputs.spec, [256]).fault
    assert fault is not None
    assert fault.error().param == "structured_outputs"
