"""Grammars of answers that call tools whose inputs follow grammars of their own (OpenAI's custom tools).

Three kinds of answers have one: the whole answer is an input, it is a list of calls in JSON, or it is free text with
calls as the model writes them. In free text, only what a call of such a tool looks like is held to anything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from llguidance import LLMatcher
from tokenizers import Tokenizer

from infer.contracts.params import CallOutputs, ToolGrammar
from infer.contracts.text import CallForm
from infer.text.free_rules import FreeRules
from infer.text.lark import bounded, escaped, quoted
from infer.text.tool_formats.reader import SPACE

PREFIX = '{"calls": '
"""How the source of such a grammar begins."""
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"
"""Whitespace between the parts of a JSON text: enough for indentation, but bounded, so that an answer cannot go on with
whitespace for ever."""
_LISTED = (rf'\{{{SPACE}"input"{SPACE}:{SPACE}"', rf'"{SPACE}\}}{SPACE}\}}', None)
"""What stands around the input of a call in a list."""


class ToolGrammarError(ValueError):
    """The grammar of a tool cannot be kept to. ``param`` is where the request has it."""

    def __init__(self, fault: str, param: str) -> None:
        super().__init__(fault)
        self.param = param


def whole(tool: ToolGrammar) -> CallOutputs:
    """The format of an answer that is the input of a tool."""
    return CallOutputs(spec=_spec("whole", [tool]))


def listed(functions: Sequence[Mapping[str, Any]], tools: Mapping[str, ToolGrammar], most: int | None) -> CallOutputs:
    """The format of an answer that is a list of at least one and at most ``most`` calls of ``functions``, which are as
    chat templates take them; None is no limit. ``calls_schema`` is the same without grammars."""
    each = [(tool["function"]["name"], tool["function"].get("parameters") or {"type": "object"}) for tool in functions]
    held = [tools[name] for name, _ in each if name in tools]
    others = [(name, parameters) for name, parameters in each if name not in tools]
    return CallOutputs(spec=_spec("listed", held, functions=others, most=most))


class Added(NamedTuple):
    """The added tokens that llguidance takes for special ones, with their ids."""

    visible: Mapping[str, int]
    """Those that are part of an answer's text."""
    hidden: Mapping[str, int]


def within(
    tools: Sequence[ToolGrammar],
    forms: Sequence[CallForm],
    added: Added,
    tags: tuple[str, str] | None,
    *,
    opened: bool = False,
) -> CallOutputs:
    """The format of a free answer that may call ``tools`` in one of the ``forms``. It may begin with reasoning between
    ``tags``, in which nothing is held to anything; ``opened`` means that it begins within."""
    hidden = {mark: added.hidden[mark] for form in forms for mark in form.hidden if mark in added.hidden}
    return CallOutputs(
        spec=_spec("within", tools, forms=forms, tags=tags, opened=opened, tokens=added.visible, hidden=hidden)
    )


def compiled(source: str, fault: Callable[[str], str | None], stops: Collection[int]) -> str:
    """The grammar that a ``spec`` describes, as llguidance reads it. ``fault`` tells why llguidance cannot compile a
    grammar, and ``stops`` are the tokens that end answers. Raises ToolGrammarError."""
    spec = json.loads(source)["calls"]
    tools = [ToolGrammar(**tool) for tool in spec["tools"]]
    own = [_own(tool) for tool in tools]
    for tool, lark in zip(tools, own, strict=True):
        if found := fault(_grammars(lark)):
            raise ToolGrammarError(f"The grammar of the tool {tool.name!r} cannot be compiled: {found}", tool.param)
    match spec["kind"]:
        case "whole":
            return _grammars(own[0])
        case "listed":
            return _listed(tools, own, spec["functions"], spec["most"])
        case _:
            return _within(tools, own, spec, stops)


def _spec(kind: str, tools: Sequence[ToolGrammar], **more: Any) -> str:
    return json.dumps({"calls": {"kind": kind, "tools": [tool._asdict() for tool in tools], **more}})


def added(tokenizer: Tokenizer) -> Added:
    """A tokenizer's."""
    tokens = tokenizer.get_added_tokens_decoder().items()
    marks = {token.content: id for id, token in tokens if re.fullmatch("(?s)<.*>", token.content)}
    hidden = {token.content: id for id, token in tokens if token.special}
    return Added({text: id for text, id in marks.items() if text not in hidden}, hidden)


def _own(tool: ToolGrammar) -> str:
    if tool.syntax == "lark":
        return tool.definition
    made = json.loads(LLMatcher.grammar_from_regex(tool.definition))
    return str(made["grammars"][0]["lark_grammar"])


def _grammars(lark: str, parts: Mapping[str, str] | None = None) -> str:
    named = [{"name": name, "lark_grammar": text} for name, text in (parts or {}).items()]
    return json.dumps({"grammars": [{"lark_grammar": lark}, *named]})


def _part(tool: ToolGrammar, own: str, before: str, after: str, closing: str | None) -> str:
    """A grammar of the input of a tool and of what stands around it."""
    try:
        return quoted(own, before, after) if closing is None else bounded(own, before, after, closing)
    except ValueError as error:
        raise ToolGrammarError(
            f"The model cannot be held to the grammar of the tool {tool.name!r} in its calls: {error}; change the "
            "grammar, or give the tool the format text",
            tool.param,
        ) from None


def _listed(tools: Sequence[ToolGrammar], own: Sequence[str], functions: Sequence[Any], most: int | None) -> str:
    def header(name: str) -> str:
        return rf'/\{{{SPACE}"name"{SPACE}:{SPACE}"{escaped(name)}"{SPACE},{SPACE}"arguments"{SPACE}:{SPACE}/'

    parts = {f"part-{i}": _part(tool, own[i], *_LISTED) for i, tool in enumerate(tools)}
    calls = [f"{header(tool.name)} @{part}" for tool, part in zip(tools, parts, strict=True)]
    calls += [rf"{header(name)} %json {json.dumps(_spaced(schema))} /{SPACE}\}}/" for name, schema in functions]
    more = "" if most == 1 else f"(/{SPACE},{SPACE}/ call)*"
    start = rf"start: /{SPACE}\[{SPACE}/ call {more} /{SPACE}\]{SPACE}/"
    return _grammars("\n".join([start, f"call: {' | '.join(calls)}"]), parts)


def _spaced(schema: Any) -> Any:
    """The schema with bounded white space between the parts of a text that fits it."""
    given = schema.get("x-guidance", {})
    return schema | {"x-guidance": {"whitespace_pattern": WHITESPACE} | given if isinstance(given, dict) else given}


def _within(tools: Sequence[ToolGrammar], own: Sequence[str], spec: Mapping[str, Any], stops: Collection[int]) -> str:
    tokens, hidden = ({text: id for text, id in spec[key].items() if id not in stops} for key in ("tokens", "hidden"))
    forms = [CallForm(*form) for form in spec["forms"]]
    rules = FreeRules(forms, [tool.name for tool in tools], tokens, hidden)
    lines = rules.lines(spec["tags"], opened=spec["opened"])
    parts = {
        name: _part(tools[i], own[i], before, after, closing)
        for (i, before, after, closing), name in rules.parts.items()
    }
    return _grammars("\n".join(lines), parts)
