"""Grammars of answers that call tools, whose inputs may follow grammars of their own (OpenAI's custom tools).

There are four kinds: the whole answer is an input, it is a list of calls in JSON, it is free text with calls as the
model writes them, or it is either JSON of some schema or such calls. In free text, only what a call of a tool with a
grammar looks like is held to anything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from llguidance import LLMatcher

from infer.contracts.grammar import Fault
from infer.contracts.params import CallOutputs, ToolGrammar
from infer.contracts.text import CallForm, CallSyntax
from infer.text.tool_formats.reader import SPACE
from infer_llguidance.either_rules import EitherRules
from infer_llguidance.free_rules import FreeRules
from infer_llguidance.lark import bounded, escaped, quoted
from infer_llguidance.schemas import spaced

PREFIX = '{"calls": '
"""How the source of such a grammar begins."""
_LISTED = (rf'\{{{SPACE}"input"{SPACE}:{SPACE}"', rf'"{SPACE}\}}{SPACE}\}}', None)
"""What stands around the input of a call in a list."""


class ToolGrammarError(ValueError):
    """The grammar of a tool cannot be kept to. ``param`` is where the request has it."""

    def __init__(self, fault: str, param: str) -> None:
        super().__init__(fault)
        self.param = param


class Added(NamedTuple):
    """The added tokens that llguidance takes for special ones, with their ids."""

    visible: Mapping[str, int]
    """Those that are part of an answer's text."""
    hidden: Mapping[str, int]


def added(tokenizer: str, stops: Collection[int]) -> Added:
    """Those of a tokenizer, which is JSON, but for ``stops``, which end answers."""
    tokens = [token for token in json.loads(tokenizer).get("added_tokens", []) if token["id"] not in stops]
    marks = {token["content"]: token["id"] for token in tokens if re.fullmatch("(?s)<.*>", token["content"])}
    hidden = {token["content"]: token["id"] for token in tokens if token["special"]}
    return Added({text: id for text, id in marks.items() if text not in hidden}, hidden)


def source(outputs: CallOutputs, answer: str | None) -> str:
    """All that the grammar is made of. ``answer`` is the source of that of ``outputs.answer``."""
    given = {name: getattr(outputs, name) for name in CallOutputs.__annotations__}
    return json.dumps({"calls": given | {"answer": answer}})


def compiled(source: str, fault: Callable[[str], str | None], added: Callable[[], Added]) -> str:
    """The grammar of a ``source``, as llguidance reads it. ``fault`` tells why llguidance cannot compile a grammar, and
    ``added`` makes the tokens that may stand in an answer. Raises ToolGrammarError."""
    spec = json.loads(source)["calls"]
    tools = [ToolGrammar(*tool) for tool in spec["tools"]]
    own = [_own(tool) for tool in tools]
    for tool, lark in zip(tools, own, strict=True):
        if found := fault(_grammars(lark)):
            raise ToolGrammarError(f"The grammar of the tool {tool.name!r} cannot be compiled: {found}", tool.param)
    match spec["kind"]:
        case "whole":
            return _grammars(own[0])
        case "listed":
            return _listed(tools, own, spec["functions"], spec["single"])
        case "either":
            return _either(spec, added())
        case _:
            return _free(tools, own, spec, added())


def blamed(source: str, found: str, fault: Callable[[str], str | None]) -> Fault:
    """What is wrong with the grammar of a ``source``, in which llguidance has ``found`` something."""
    spec = json.loads(source)["calls"] if source.startswith(PREFIX) else {}
    if spec.get("kind") == "either" and fault(spec["answer"]) is None:
        return Fault(f"The model cannot be held to the parameters of the tools in its calls: {found}", "tools")
    return Fault(found)


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


def _listed(tools: Sequence[ToolGrammar], own: Sequence[str], functions: Sequence[Any], single: bool) -> str:
    def header(name: str) -> str:
        return rf'/\{{{SPACE}"name"{SPACE}:{SPACE}"{escaped(name)}"{SPACE},{SPACE}"arguments"{SPACE}:{SPACE}/'

    parts = {f"part-{i}": _part(tool, own[i], *_LISTED) for i, tool in enumerate(tools)}
    calls = [f"{header(tool.name)} @{part}" for tool, part in zip(tools, parts, strict=True)]
    calls += [rf"{header(name)} %json {json.dumps(spaced(schema))} /{SPACE}\}}/" for name, schema in functions]
    more = "" if single else f"(/{SPACE},{SPACE}/ call)*"
    start = rf"start: /{SPACE}\[{SPACE}/ call {more} /{SPACE}\]{SPACE}/"
    return _grammars("\n".join([start, f"call: {' | '.join(calls)}"]), parts)


def _either(spec: Mapping[str, Any], added: Added) -> str:
    syntax, functions = [CallSyntax(*each) for each in spec["syntax"]], spec["functions"]
    if not all(each.arguments for each in syntax):
        functions = [(name, _known(schema)) for name, schema in functions]
    rules = EitherRules(functions, added.visible, added.hidden)
    (answer,) = json.loads(spec["answer"])["grammars"]
    how = {"opened": spec["opened"], "single": spec["single"]}
    return _grammars("\n".join(rules.lines(answer["json_schema"], syntax, spec["tags"], **how)))


def _known(schema: Any) -> Any:
    """A schema of arguments, which are an object; only that if llguidance cannot compile it, as free calls of such a
    tool are taken, too."""
    schema = {"type": "object"} | schema
    source = json.dumps({"grammars": [{"json_schema": spaced(schema, lenient=True)}]})
    return {"type": "object"} if LLMatcher.validate_grammar(source) else schema


def _free(tools: Sequence[ToolGrammar], own: Sequence[str], spec: Mapping[str, Any], added: Added) -> str:
    forms = [CallForm(*form) for form in spec["forms"]]
    hidden = {mark: added.hidden[mark] for form in forms for mark in form.hidden if mark in added.hidden}
    rules = FreeRules(forms, [tool.name for tool in tools], added.visible, hidden)
    lines = rules.lines(spec["tags"], opened=spec["opened"])
    parts = {
        name: _part(tools[i], own[i], before, after, closing)
        for (i, before, after, closing), name in rules.parts.items()
    }
    return _grammars("\n".join(lines), parts)
