"""Grammars of answers that call tools whose inputs follow grammars: what they let through, and what is read of it."""

from __future__ import annotations

import functools
import itertools
import json
import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from tests.examples import slowly
from tests.server.test_calling import FORMATS

from infer.contracts.grammar import Checked, Vocabulary
from infer.contracts.params import CallOutputs, ToolGrammar
from infer.contracts.text import ReasoningTags
from infer.text.grammars import error_of
from infer_llguidance.backend import LLGuidance
from infer_server.calling import calls_schema, make_parser
from infer_server.replies import ToolUse
from infer_server.tools import TEXT_PARAMETERS
from infer_tool_formats import infer_tool_formats

FORMS = {each.name: each.forms for each in infer_tool_formats() if each.forms}
MARKS = {each.name: each.marks for each in infer_tool_formats()}
CASES = [(format, tokens) for format in FORMS for tokens in (True, False)]
"""Formats, with their marks as tokens and without."""
HIDDEN = "<|end|>"
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
TOOLS = (ToolGrammar("ns__patch", "lark", PATCH, "tools[0]"), ToolGrammar("code.1", "regex", CODE, "tools[1]"))
EXPECTED = {"ns__patch": PATCHED, "code.1": re.compile(CODE)}
KNOWN: dict[str, Any] = dict.fromkeys(EXPECTED, TEXT_PARAMETERS) | {"look": {}, "ns__patch2": {}}
GOOD = '*** Begin\n*** Add: a"b\n+x\t\\é\n+\n*** Change: c\n@@ </b>\n-x\n*** End'


class Marked:
    """A tokenizer of bytes, the end of an answer, a special token and others."""

    bos_token_id, eos_token_id = None, 256

    def __init__(self, *marks: str, words: Sequence[str] = ()) -> None:
        self.marks = marks
        self.tokens = [*(bytes([byte]) for byte in range(256)), *map(str.encode, ("<end>", *marks, *words))]
        special = [257 + i for i, mark in enumerate(self.marks) if mark[0] + mark[-1] == "<>"]
        self.special_token_ids = [256, *special]
        self._split = re.compile("|".join(map(re.escape, self.marks)) + "|(?s:.)")
        self.backend = LLGuidance(Vocabulary(self._to_json, len(self.tokens), [256]))
        self.made = self.backend.tokenizer = LLTokenizer(TokenizerWrapper(self), slices=[])

    def __call__(self, text: bytes) -> list[int]:
        return list(text)

    def _to_json(self) -> str:
        marks = enumerate(self.marks, 257)
        return json.dumps({"added_tokens": [{"id": i, "content": m, "special": m == HIDDEN} for i, m in marks]})

    def encoded(self, text: str, spelled: bool = False) -> list[int]:
        ids: list[int] = []
        for found in self._split.finditer(text):
            ids += [257 + self.marks.index(found[0])] if found[0] in self.marks and not spelled else found[0].encode()
        return ids

    def decoded(self, ids: Sequence[int]) -> str:
        """As an answer's text is, without special tokens."""
        return b"".join(self.tokens[id] for id in ids if self.tokens[id] not in (b"<end>", HIDDEN.encode())).decode()


@functools.cache
def marked(format: str, tokens: bool = True) -> Marked:
    think = ("<think>", "</think>") if format in ("tags", "json", "xml", "glm") else ()
    return Marked(HIDDEN, *dict.fromkeys([*think, *MARKS[format]])) if tokens else Marked()


def check(outputs: CallOutputs, tokenizer: Marked) -> Checked:
    return tokenizer.backend.check(tokenizer.backend.source(outputs))


def matcher(outputs: CallOutputs, tokenizer: Marked) -> LLMatcher:
    checked = check(outputs, tokenizer)
    assert checked.fault is None, checked.fault
    assert checked.text is not None
    # Its fuel is for one mask, and these tests compute none between texts.
    limits = LLParserLimits(initial_lexer_fuel=1 << 40, step_lexer_fuel=1 << 40)
    return LLMatcher(tokenizer.made, checked.text, log_level=0, limits=limits)


def free(format: str, tools: tuple[ToolGrammar, ...] = TOOLS, *, opened: bool = False) -> CallOutputs:
    tags = None if format == "harmony" else TAGS[:2]
    return CallOutputs(kind="free", tools=tools, forms=FORMS[format], tags=tags, opened=opened)


@functools.cache
def start(format: str, tokens: bool = True) -> LLMatcher:
    return matcher(free(format), marked(format, tokens))


def takes(start: LLMatcher, ids: Sequence[int]) -> int | None:
    """None if these tokens are a whole answer; otherwise how many of them may come, at most."""
    copy = start.deep_copy()
    taken = copy.try_consume_tokens(list(ids))
    return None if taken == len(ids) and copy.is_accepting() else taken


def calls(text: str, format: str | None) -> list[tuple[str, str]]:
    """The calls that are read of an answer: names and inputs or arguments."""
    tags = TAGS if format and format != "harmony" else None
    parser = make_parser(KNOWN, FORMATS.get(format or ""), forced=format is None, tags=tags, custom=EXPECTED)
    made: list[tuple[str, str]] = []
    for piece in [*parser.push(text), *parser.flush()]:
        if piece.kind == "call":
            made.append((piece.text, ""))
        elif piece.kind == "arguments":
            made[-1] = made[-1][0], made[-1][1] + piece.text
    return made


WAYS: dict[str, list[str]] = {
    "tags": ["<tool_call>\n{whole}\n</tool_call>"],
    "action": ["Action:\n```json\n[{whole}]\n```"],
    "json": ["{whole}"],
    "mistral": ["[TOOL_CALLS]{name}[ARGS]{json}", "[TOOL_CALLS]{name}{json}", "[TOOL_CALLS][{whole}]"],
    "xml": ["<tool_call>\n<function={name}>\n<parameter=input>\n{input}\n</parameter>\n</function>\n</tool_call>"],
    "glm": [
        "<tool_call>{name}\n<arg_key>input</arg_key>\n<arg_value>{input}</arg_value>\n</tool_call>",
        "<tool_calls:opensource>\n<tool_call:opensource>{name}<tool_sep:opensource>\n<arg_key:opensource>input"
        "</arg_key:opensource>\n<arg_value:opensource>{input}</arg_value:opensource>\n</tool_call:opensource>",
    ],
    "minimax": [
        '<minimax:tool_call>\n<invoke name="{name}">\n<parameter name="input">{input}</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
        ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="{name}">]<]minimax[>[<input>{input}]<]minimax[>[</input>'
        "]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
    ],
    "deepseek": [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json}\n```<｜tool▁call▁end｜>",
    ],
    "kimi": [
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{json}"
        "<|tool_call_end|><|tool_calls_section_end|>",
        "<|tool_call_begin|> {name} <|tool_call_argument_begin|> {json}",
    ],
    "solar": [
        "<|tool_calls|><|tool_call:begin|>a1-b<|tool_call:name|>{name}<|tool_call:args|>{json}<|tool_call:end|>",
        "<|tool_call:begin|><|tool_call:name|>\n{name}<|tool_call:args|>{json}",
    ],
    "gemma": [
        '<|tool_call>call:{name}{{input:<|"|>{input}<|"|>}}<tool_call|>',
        "<start_function_call>call:{name}{{input:<escape>{input}<escape>}}<end_function_call>",
    ],
    "harmony": [
        "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json}<|call|>",
        "<|channel|>commentary to={name} json<|message|>{json}\n<|end|><|start|>assistant",
        "<|start|>assistant to=functions.{name}<|channel|>commentary json<|message|>{json}<|call|>",
        "<|start|>assistant to=functions.{name}<|channel|>analysis<|constrain|>json<|message|>{json}<|end|><|end|>",
    ],
}
"""Calls as models write them."""


def written(format: str, name: str, input: str, way: int = 0) -> str:
    """A call as a model writes it."""
    arguments = json.dumps({"input": input}, ensure_ascii=False)
    whole = f'{{"name": "{name}", "arguments": {arguments}}}'
    return WAYS[format][way].format(name=name, input=input, json=arguments, whole=whole)


def told(text: str) -> str:
    """The text as the reader gets it, if its marks are tokens."""
    return text.replace(HIDDEN, "")


@pytest.mark.parametrize(("format", "tokens"), CASES)
def test_calls_as_models_write_them_are_let_through_and_read(format: str, tokens: bool) -> None:
    tokenizer, begin = marked(format, tokens), start(format, tokens)
    for way in range(len(WAYS[format])):
        one, other = written(format, "ns__patch", GOOD, way), written(format, "code.1", 'AB-"12\n', way)
        between = "" if format == "harmony" else "\n"
        free = written(format, "look", '{"x": [1, 2]}', way) + between
        free += written(format, "ns__patch2", "\\any <b>thing", way)
        for text in ("", "Hello <tool_call> [x] {y", '{"name": "Bob", "input": 3}', "<think>hm</think>Hi.", free):
            assert takes(begin, tokenizer.encoded(text)) is None, text
        texts = [one, f"So. {one}", f"{one}{between}{other}", f"{free}{between}{one}{between}"]
        if format != "harmony":
            texts += [f"{one} Done.", f"<think>{one[:40]} or</think>{one}"]
        for text in texts:
            assert takes(begin, tokenizer.encoded(text)) is None, text
            found = [call for call in calls(told(text) if tokens else text, format) if call[0] in EXPECTED]
            assert ("ns__patch", GOOD) in found
            assert len(found) == (2 if other in text else 1)
        assert [name for name, _ in calls(free, format)] == ["look", "ns__patch2"]


def bad(format: str) -> list[str]:
    """Answers with calls whose inputs do not fit."""
    made = []
    for way in range(len(WAYS[format])):
        good = written(format, "ns__patch", GOOD, way)
        made += [written(format, "ns__patch", input, way) for input in ("x", GOOD.replace("+x", "x"), GOOD + "\n\n")]
        made.append(f"{good}\n{written(format, 'code.1', 'x', way)}")
    arguments = '{"input": "x"}'
    if format in ("tags", "action", "json", "mistral"):
        turned = '{"arguments": %s, "name": "ns__patch"}' % arguments  # noqa: UP031
        made += [
            turned,
            '{"name": "ns__patch"}',
            '{"name": "\\u006es__patch", "arguments": %s}' % arguments,  # noqa: UP031
            '{"type": "function", "function": {"name": "ns__patch", "arguments": %s}}' % arguments,  # noqa: UP031
            '{"name": "ns__patch", "arguments": "%s"}' % arguments.replace('"', '\\"'),  # noqa: UP031
        ]
        made += [good.replace("}", ', "input": "x"}', 1), f"{turned}\n{good}"]
    made += {
        "xml": [
            "<function=ns__patch>\n</function>",
            '<function=ns__patch>{"input": "x"}</function>',
            written(format, "ns__patch", GOOD.replace("</b>", "</parameter></function>")),
        ],
        "minimax": [
            '<invoke name="ns__patch">{"input": "x"}</invoke>',
            f"]<]minimax[>[{written(format, 'ns__patch', GOOD)[20:]}",
            written(format, "ns__patch", GOOD.replace("</b>", "</parameter></invoke>")),
        ],
        "glm": ["<tool_call>ns__patch</tool_call>", "<tool_call>ns__patch<arg_key>x</arg_key><arg_value>"],
        "kimi": [
            f"<|tool_call_begin|>ns__patch<|tool_call_argument_begin|>{json.dumps(arguments)}",
            "<|tool_call_begin|>ns__patch<|tool_call_argument_begin|><|tool_call_end|>",
        ],
        "deepseek": [f"<｜tool▁call▁begin｜>ns__patch\n{arguments}"],
        "gemma": ['<|tool_call>call:ns__patch{input:"x"}', "<|tool_call>call:ns__patch{}"],
        "harmony": [
            f" to=functions.ns__patch<|message|>{arguments}",
            f"<|channel|>commentary to=functions.ns__<|end|>patch<|message|>{arguments}",
            f"<|channel|>to=ns__patch<|message|>{arguments}",
            f"<|start|>assistant to=look to=ns__patch<|message|>{arguments}",
            f"{written(format, 'ns__patch', GOOD).removesuffix('<|call|>')} and",
            f"{written(format, 'ns__patch', GOOD).removesuffix('<|call|>')}<|message|>x",
            f"{written(format, 'ns__patch', GOOD).removesuffix('<|call|>')}<|end|>x",
        ],
    }.get(format, [])
    return made


@pytest.mark.parametrize(("format", "tokens"), CASES)
@pytest.mark.parametrize("spelled", [False, True])
def test_no_call_has_another_input(format: str, tokens: bool, spelled: bool) -> None:
    """No matter whether the marks are tokens, or written out although the tokenizer has such tokens."""
    for text in [text for text in bad(format) if tokens or HIDDEN not in text]:
        assert takes(start(format, tokens), marked(format, tokens).encoded(text, spelled)) is not None, text


PIECES = ["ns__patch", "look", "functions.", "function", "to=", "call:", " ", "\n", ":0", "x", '"', "{", "}", "<", ">"]
PIECES += ['{"input": "x"}', '{"input": "AB-12"}', "input", "json", "assistant", "```", "[", "</", "|", ".", "code.1"]


@pytest.mark.parametrize(("format", "tokens"), CASES)
@pytest.mark.parametrize("seed", [0, *slowly(*range(1, 6))])
def test_the_reader_takes_nothing_else_for_a_call(format: str, tokens: bool, seed: int) -> None:
    """Calls into which something was mixed: if the reader finds one of a tool, the input fits or the text is not let
    through. What names none of the tools always is."""
    rng = random.Random(f"{format}{tokens}{seed}")
    tokenizer, begin = marked(format, tokens), start(format, tokens)
    pieces = [*PIECES, *dict.fromkeys(mark for form in FORMS[format] for mark in (*form.marks, *MARKS[format]))]
    pieces = [piece for piece in pieces if tokens or piece != "<|tools_prefix|>"]
    pieces += [HIDDEN] if tokens else []  # which is not shown
    read = let = 0
    for _ in range(150):
        way = rng.randrange(len(WAYS[format]))
        text = written(format, rng.choice(["code.1", "ns__patch"]), rng.choice(["x", "AB-12", "AB-"]), way)
        if rng.random() < 0.3:
            text = "".join(rng.choices(pieces, k=rng.randrange(8))) + text
        cuts = sorted(rng.sample(range(len(text)), 2))
        at = rng.choice([0, len(text), *(found.start() for found in re.finditer(r"\b|<", text))])
        match rng.randrange(3):
            case 0:
                text = text[:at] + "".join(rng.choices(pieces, k=rng.randrange(1, 3))) + text[at:]
            case 1 if cuts[1] - cuts[0] < 8:
                text = text[: cuts[0]] + text[cuts[1] :]
            case 2:
                text = text[:at] + rng.choice(pieces) + text[min(len(text), at + rng.randrange(4)) :]
        ids = tokenizer.encoded(text, rng.random() < 0.1)
        made = [call for call in calls(tokenizer.decoded(ids), format) if call[0] in EXPECTED]
        passed = takes(begin, ids) is None
        read, let = read + bool(made), let + (bool(made) and passed)
        assert not passed or all(EXPECTED[name].fullmatch(input) for name, input in made), (text, made)
        other = told(text).replace("ns__patch", "look").replace("code.1", "look")
        assert takes(begin, tokenizer.encoded(other)) is None, other
    assert read > 20
    assert let > 1


@pytest.mark.parametrize(("format", "tokens"), CASES)
@pytest.mark.parametrize("seed", [0, *slowly(*range(1, 6))])
def test_whatever_is_drawn_has_inputs_that_fit(format: str, tokens: bool, seed: int) -> None:
    """A model that draws at random, but begins calls as models do."""
    rng = random.Random(f"{format}{seed}")
    tokenizer = marked(format, tokens)
    ids: list[int] = []
    few = PATCH.replace("]*/", "]{0,4}/").replace("]+/", "]{1,4}/").replace("added+", "added{1,2}")
    few = few.replace("hunk+", "hunk{1,2}").replace("changed+", "changed{1,2}")
    copy = matcher(free(format, (TOOLS[0]._replace(definition=few), TOOLS[1])), tokenizer)
    likely = [*b'abc "*+-@\n/<>{}[]:,', *range(256, len(tokenizer.tokens))]

    def take(token: int) -> None:
        assert copy.consume_token(token)
        ids.append(token)

    for _ in range(2):
        begin = written(format, rng.choice([*EXPECTED]), "\x7f", rng.randrange(len(WAYS[format]))).partition("\x7f")
        for token in tokenizer.encoded(begin[0]):
            take(token)
        while not copy.validate_tokens([256]):  # before the call ends
            options = [token for token in likely if copy.validate_tokens([token])]
            take(rng.choice(options or [token for token in range(256) if copy.validate_tokens([token])]))
    text = tokenizer.decoded(ids)
    made = calls(text, format)
    assert len(made) == 2, text
    for name, input in made:
        assert EXPECTED[name].fullmatch(input), (text, name, input)


WORDS = [
    "".join(each)
    for each in itertools.product(("", " ", '"', "<", "{", "\n"), ("a", "to", "x1", "é"), ("b", "c_", "="), ("", "d"))
]


@pytest.mark.parametrize(("format", "tokens"), [*slowly(*CASES)])
def test_masks_stay_within_the_limits_of_llguidance(format: str, tokens: bool) -> None:
    """At all places of an answer with a call, for a vocabulary with words in it. What one mask may cost is the default
    of llguidance, which a mask reaches in about 5 ms."""
    tokenizer = marked(format, tokens)
    wide = Marked(*tokenizer.marks, words=WORDS)
    checked = check(free(format), wide)
    assert checked.fault is None
    assert checked.text is not None
    for way in range(len(WAYS[format])):
        copy = LLMatcher(wide.made, checked.text, log_level=0)
        for token in wide.encoded(f"Hello {{x}}. {written(format, 'ns__patch', GOOD, way)}"):
            copy.compute_bitmask()
            assert not copy.is_error(), copy.get_error()
            assert copy.consume_token(token)


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


def listed(single: bool) -> LLMatcher:
    return matcher(use(FUNCTIONS, TOOLS, single), Marked())


def use(functions: Sequence[dict[str, Any]], tools: Sequence[ToolGrammar], single: bool = False) -> CallOutputs:
    """The format of a reply that must call one of the functions."""
    outputs = ToolUse(functions, functions, not single, grammars={tool.name: tool for tool in tools}).outputs()
    assert isinstance(outputs, CallOutputs)
    return outputs


def test_a_list_of_calls_holds_inputs_and_arguments() -> None:
    one = written("json", "ns__patch", GOOD)
    look = '{"name": "look", "arguments": {"at": 3}}'
    start, encoded = listed(False), Marked().encoded
    for text in (f"[{one}]", f"[{look},\n {one}]", f"[ {one} , {look} ]"):
        assert takes(start, encoded(text)) is None, text
        assert ("ns__patch", GOOD) in calls(text, None)
    for text in ("[]", f"[{look.replace('3', 'true')}]", f"[{written('json', 'code.1', 'x')}]", f"[{one}, ]"):
        assert takes(start, encoded(text)) is not None, text
    assert takes(listed(True), encoded(f"[{one}]")) is None
    assert takes(listed(True), encoded(f"[{one}, {look}]")) == len(encoded(f"[{one}"))
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
    checked = check(free("tags", (TOOLS[0], tool)), Marked())
    assert checked.fault is not None
    error = error_of(checked.fault)
    assert error.param == "tools[3]"
    assert re.search(why, str(error), re.DOTALL), error


def test_odd_schemas_are_llguidances_to_refuse() -> None:
    odd = {"type": "function", "function": {"name": "odd", "parameters": {"type": "object", "x-guidance": "x"}}}
    fault = check(use([odd, FUNCTIONS[1]], [TOOLS[0]]), Marked()).fault
    assert fault is not None
    assert error_of(fault).param == "structured_outputs"
