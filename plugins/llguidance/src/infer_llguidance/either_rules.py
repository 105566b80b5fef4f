"""The rules of an answer that is JSON of some schema, or calls alone as the model writes them, with reasoning before.

llguidance reads on as long as one of the terminals that may stand there can. So white space is a terminal of its own:
no other may begin or end with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from infer.contracts.text import CallSyntax
from infer.text.tool_formats.reader import SPACE
from infer_llguidance.free_rules import any_of, divided, sequence
from infer_llguidance.lark import escaped
from infer_llguidance.schemas import spaced

ANY_KEY = r"[^\s\x00-\x1f<>\[\](){}=:,\x22\x27\x2f]{1,64}"
"""The name of an argument that the function's schema does not name."""
_ESCAPED = re.compile(r"\\.")
_SIGN = re.compile(r"(?<!\\)/|\n")


class EitherRules:
    """Rules for an answer that is JSON or calls ``functions``, given with the schemas of their arguments. ``visible``
    tokens are part of an answer's text, ``hidden`` ones are not."""

    def __init__(
        self, functions: Sequence[tuple[str, Any]], visible: Mapping[str, int], hidden: Mapping[str, int]
    ) -> None:
        self._functions = functions
        self._visible, self._tokens = visible, {**visible, **hidden}
        self._names: dict[tuple[str, ...], str] = {}
        """The names of rules, by their ways."""
        self._ends: dict[str, int] = {}
        """The numbers of the texts that end others."""
        self._terminals: list[str] = []

    def lines(
        self, answer: Any, syntax: Sequence[CallSyntax], tags: Sequence[str] | None, *, opened: bool, single: bool
    ) -> list[str]:
        """The rules of an answer of the schema ``answer``, or with calls, only one if ``single``. It may begin with
        reasoning between ``tags``, or within it."""
        section = self._rule(*(self._section(each, single) for each in syntax))
        either = f"(%json {json.dumps(answer)} | blank? {section} {'' if single else f'(blank? {section})*'})"
        if tags is not None:
            opening, closing = tags
            thought = f"{self._until([closing], closing)} blank?"
            if not opened:
                thought = f"blank? ({self._text([opening], opening)} {thought})?"
            either = f"{thought} {either}"
        rules = {name: " | ".join(ways) for ways, name in self._names.items()}
        rules |= {"start": either, "blank": f"/{SPACE.replace('{0,', '{1,')}/"}
        return [*(f"{name}: {ways}" for name, ways in rules.items()), *self._terminals]

    def _rule(self, *ways: str) -> str:
        return self._names.setdefault(ways, f"part-{len(self._names)}")

    def _section(self, syntax: CallSyntax, single: bool) -> str:
        call = self._rule(*(self._call(syntax, *function) for function in self._functions))
        between = self._text(syntax.marks, syntax.between) or "blank?"
        more = "" if single else f"({between} {call})*"
        return f"{self._text(syntax.marks, syntax.opening)} {call} {more} {self._text(syntax.marks, syntax.closing)}"

    def _call(self, syntax: CallSyntax, name: str, schema: Mapping[str, Any]) -> str:
        if not syntax.header:
            # References in a schema lead to the whole of it, which this one is a part of.
            schema = {"type": "object"} if "$ref" in json.dumps(schema) else schema
            return f"({' | '.join(_json(_object(name, key, schema)) for key in ('parameters', 'arguments'))})"
        header = self._text(syntax.marks, syntax.header.replace("NAME", escaped(name)))
        arguments = self._arguments(syntax, schema) if syntax.arguments else self._rule(_json(schema))
        return f"{header} {arguments} {self._text(syntax.marks, syntax.end)}"

    def _arguments(self, syntax: CallSyntax, schema: Mapping[str, Any]) -> str:
        """Arguments that are written one by one. Their values are of any type."""
        known = schema.get("properties")
        more = schema.get("additionalProperties", False) is not False or "patternProperties" in schema
        ways = []
        for before, after in syntax.arguments:
            keys = [ANY_KEY]
            if isinstance(known, Mapping):
                keys = [*map(escaped, known), *([ANY_KEY] if more and "KEY" not in after else [])]
                keys = keys if "KEY" in after else [f"({'|'.join(keys)})"][: len(keys)]
            elif "KEY" in after:
                continue
            for key in keys:
                value = self._until(syntax.marks, after.replace("KEY", key)) if after else self._rule(_json({}))
                ways.append(f"{self._text(syntax.marks, before.replace('KEY', key))} {value}")
        if not ways:
            return ""
        one = self._rule(*ways)
        return f"({one} ({self._text(syntax.marks, syntax.comma)} {one})*)?"

    def _until(self, marks: Sequence[str], end: str) -> str:
        """Any text up to ``end``, which it does not hold."""
        first, *rest = divided(end, marks, self._tokens, _plain)
        if end not in self._ends:
            n = self._ends[end] = len(self._ends)
            spelled = "".join(map(str, divided(end, marks, {}, _plain)))
            self._terminals.append(f"WITHIN-{n}: /(?s:.+)/ & ~/(?s:.*){spelled}(?s:.*)/")
            if first:
                self._terminals.append(f"up-to-{n}[lazy]: /(?s:.*){first}/")
        n = self._ends[end]
        others = [id for id in self._visible.values() if first or id != rest[0]]
        inside = f"(WITHIN-{n}? {any_of(others)})*" if others else ""
        return self._rule(f"{inside} {f'up-to-{n}' if first else f'WITHIN-{n}?'} {sequence(rest)}")

    def _text(self, marks: Sequence[str], text: str) -> str:
        """What matches a regular expression, in which white space is taken out of terminals."""
        parts: list[str] = []
        for part in text.split(SPACE):
            if parts and _ESCAPED.sub("", parts[-1]).count("(") != _ESCAPED.sub("", parts[-1]).count(")"):
                parts[-1] += f"{SPACE}{part}"  # within a group
            else:
                parts.append(part)
        return " blank? ".join(sequence(divided(part, marks, self._tokens, _plain)) for part in parts)


def _plain(regex: str) -> str:
    """A regular expression as it stands between slashes."""
    return _SIGN.sub(lambda found: r"\n" if found[0] == "\n" else r"\/", regex)


def _object(name: str, key: str, schema: Any) -> dict[str, Any]:
    """The schema of a call that is an object."""
    return {
        "type": "object",
        "properties": {"type": {"const": "function"}, "name": {"const": name}, key: schema},
        "required": ["name", key],
        "additionalProperties": False,
    }


def _json(schema: Any) -> str:
    """JSON in a call. What llguidance does not know in a schema does not bind it."""
    return f"%json {json.dumps(spaced(schema, lenient=True))}"
