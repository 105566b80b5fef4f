"""Calls as Python: ``[f(a=1), g(b="x")]``, bare, in a code fence or between special tokens."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection
from typing import Any

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
_NO_LETTER = re.compile(r"[^A-Za-z_]")
_NO_SEPARATOR = re.compile(r"[^\s,;]")


def python(reader: Reader, tools: Tools) -> Steps[None]:
    """Calls begin on a new line. They are not streamed: each list of calls is parsed once it is complete."""
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
        bracket = reader.take(1) + (yield from spaces(reader)) if listed else ""
        if not (yield from comes(reader, *names)):
            yield reader.content(taken + bracket)
            continue
        code, _ = yield from value(reader, Extent(python=True, depth=int(listed)))
        calls = _parse(bracket + code, tools)
        if calls is None:
            yield reader.content(taken + bracket + code)
            continue
        for name, arguments in calls:
            yield Piece("call", name)
            yield Piece("arguments", arguments)
        yield from run(reader, _NO_SEPARATOR)
        if mark in OPENINGS and (close := (yield from comes(reader, *CLOSINGS))):
            reader.take(len(close))
        reader.tail = ""


def _parse(code: str, names: Collection[str]) -> list[tuple[str, str]] | None:
    """The calls' (name, arguments as JSON); None if the code is anything but calls."""
    if len(code) > MOST_CODE:
        return None
    try:
        value = ast.parse(code, mode="eval").body
        calls = value.elts if isinstance(value, ast.List) else [value]
        return [_one(call, names) for call in calls]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _one(call: ast.expr, names: Collection[str]) -> tuple[str, str]:
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("no call, or not by keyword")
    name = ast.unparse(call.func)
    if name not in names:
        raise ValueError("not a function that is known")
    arguments: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise ValueError("not by keyword")
        arguments[keyword.arg] = ast.literal_eval(_Constants().visit(keyword.value))
    text = dumped(arguments)
    text.encode()  # raises if there is half a surrogate pair
    return name, text


class _Constants(ast.NodeTransformer):
    """Replaces JSON's ``true``, ``false`` and ``null`` by Python's constants."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(CONSTANTS[node.id]) if node.id in CONSTANTS else node
