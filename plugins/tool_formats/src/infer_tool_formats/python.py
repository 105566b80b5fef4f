"""Calls as Python: ``[f(a=1), g(b="x")]``, bare, in a code fence or between special tokens."""

from __future__ import annotations

import ast
import re

from infer.contracts.text import CallSyntax, Piece, Tools
from infer.text.tool_formats.reader import (
    SPACE,
    Extent,
    Marks,
    Reader,
    Steps,
    comes,
    dumped,
    prose,
    run,
    spaces,
    value,
)
from infer_tool_formats.objects import FENCE

OPENINGS = ("<|python_start|>", "<|tool_call_start|>", FENCE)
CLOSINGS = ("<|python_end|>", "<|tool_call_end|>", FENCE)
TOKENS = tuple(mark for mark in (*OPENINGS, *CLOSINGS) if mark != FENCE)
SYNTAX = tuple(
    CallSyntax(
        header=r"NAME\(",
        end=r"\)",
        arguments=((f"KEY{SPACE}={SPACE}", ""),),
        comma=f"{SPACE},{SPACE}",
        opening=rf"{opening}\[",
        between=f"{SPACE},{SPACE}",
        closing=rf"\]{closing}",
        marks=TOKENS,
    )
    for opening, closing in [("", ""), *zip(OPENINGS, CLOSINGS, strict=True)]
    if opening != FENCE
)
"""Values are JSON, which is Python but for its constants."""
MOST_CODE = 1 << 17
"""Calls with more characters are not parsed: Python's parser takes a microsecond for each character."""
CONSTANTS = {"true": True, "false": False, "null": None}
_NAME = re.compile(
    r"""(?s)(\"{3}|'{3}).*?\1|"(?:[^"\\]|\\.)*"?|'(?:[^'\\]|\\.)*'?|"""
    r"""(?<=[(,\s])(?P<name>[^\s"'()\[\]{}=,:]+)(?=\s*=)"""
)
"""The name of an argument, which need not be one in Python (``from``), or a string, in which there is none."""
_NO_LETTER = re.compile(r"[^A-Za-z_]")
_NO_SEPARATOR = re.compile(r"[^\s,;]")


def python(reader: Reader, tools: Tools) -> Steps[None]:
    """Calls begin on a new line. They are not streamed: each is parsed once it is complete."""
    names = [f"{name}(" for name in tools]
    marks = Marks(*OPENINGS, "[", *names)
    while (mark := (yield from prose(reader, marks))) is not None:
        if reader.tail.rpartition("\n")[2].strip():
            yield reader.content(reader.take(len(mark)))
            continue
        taken = ""
        if mark in OPENINGS:
            taken = reader.take(len(mark))
            if mark == FENCE:
                taken += yield from run(reader, _NO_LETTER)
            taken += yield from spaces(reader)
        listed = bool((yield from comes(reader, "[")))
        taken += reader.take(1) + (yield from spaces(reader)) if listed else ""
        found = False
        while name := (yield from comes(reader, *names)):
            taken += reader.take(len(name) - 1)
            code, _ = yield from value(reader, Extent(python=True))
            arguments = _parse(code)
            if arguments is None:
                taken += code
                break
            yield Piece("call", name[:-1])
            yield Piece("arguments", arguments)
            yield from run(reader, _NO_SEPARATOR)
            found, taken = True, ""
        if not found or taken:
            yield reader.content(taken)
            continue
        if listed and (yield from comes(reader, "]")):
            reader.take(1)
            yield from run(reader, _NO_SEPARATOR)
        if mark in OPENINGS and (close := (yield from comes(reader, *CLOSINGS))):
            reader.take(len(close))
        reader.tail = ""


def _parse(code: str) -> str | None:
    """The arguments of a call as JSON, from its parentheses on; None if they are anything but values by keyword."""
    if len(code) > MOST_CODE:
        return None
    names: list[str] = []

    def named(found: re.Match[str]) -> str:
        if found["name"] is None:
            return found[0]
        names.append(found["name"])
        return f"a{len(names) - 1}"

    code = _NAME.sub(named, code)
    try:
        call = ast.parse(f"f{code}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not all(keyword.arg for keyword in call.keywords):
            return None
        visit = _Constants().visit
        given = {names[int(str(each.arg)[1:])]: ast.literal_eval(visit(each.value)) for each in call.keywords}
        # JSON writes a character as a pair of surrogates. Half of one raises.
        text = dumped(given).encode("utf-16", "surrogatepass").decode("utf-16")
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return text


class _Constants(ast.NodeTransformer):
    """Replaces JSON's ``true``, ``false`` and ``null`` by Python's constants."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(CONSTANTS[node.id]) if node.id in CONSTANTS else node
