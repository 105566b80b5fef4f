"""Calls as a name and JSON between special tokens, in a section of calls (DeepSeek, Kimi K2, Solar)."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

from infer.contracts.text import CallForm, CallSyntax, Piece, Tools
from infer.text.tool_formats.reader import (
    BLANK,
    IN_JSON,
    SPACE,
    Marks,
    Reader,
    Steps,
    arguments,
    begin_call,
    comes,
    prose,
    spaces,
)
from infer_tool_formats.objects import FENCE


class Dialect(NamedTuple):
    """The tokens of one way to write calls."""

    call: str
    """How a call begins."""
    header: re.Pattern[str]
    """All of a call up to its arguments, with the function's ``name``. The match must not depend on how much text
    follows it."""
    end: str
    dropped: tuple[str, str]
    """Tokens around calls and content, which are dropped."""


_ARGUMENTS = r'\s*(?=[{"]|%s)'
DIALECTS = {
    "deepseek": Dialect(
        "<｜tool▁call▁begin｜>",
        re.compile(
            r"<｜tool▁call▁begin｜>\s*(?:function<｜tool▁sep｜>(?=[^\n<]*\n))?(?P<name>[\w.:-]{1,256})"
            r"\s*(?:<｜tool▁sep｜>\s*|\n\s*)(?:```(?:json)?\s*)?" + _ARGUMENTS % "<｜tool▁call▁end｜>"
        ),
        "<｜tool▁call▁end｜>",
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    "kimi": Dialect(
        "<|tool_call_begin|>",
        re.compile(
            r"<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>[\w.:-]{1,256}?)(?::\d{1,9})?\s*"
            r"<\|tool_call_argument_begin\|>" + _ARGUMENTS % r"<\|tool_call_end\|>"
        ),
        "<|tool_call_end|>",
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    "solar": Dialect(
        "<|tool_call:begin|>",
        re.compile(
            r"<\|tool_call:begin\|>[^<]{0,128}<\|tool_call:name\|>\s*(?P<name>[\w.:-]{1,256})\s*"
            r"<\|tool_call:args\|>" + _ARGUMENTS % r"<\|tool_call:end\|>"
        ),
        "<|tool_call:end|>",
        ("<|tool_calls|>", "<|calls|>"),
    ),
}
"""By the names of the formats."""
_NAMED = rf"[{BLANK}]*NAME([<{BLANK}](?s:.*))?"
_DEEPSEEK = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>")
_KIMI = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>")
_SOLAR = ("<|tool_call:begin|>", "<|tool_call:name|>", "<|tool_call:args|>")
_CODE = rf"(```(json)?{SPACE})?"
FORMS: dict[str, tuple[CallForm, ...]] = {
    "deepseek": (
        CallForm(
            header=f"{_DEEPSEEK[0]}{SPACE}NAME{SPACE}{_DEEPSEEK[1]}",
            named=f"{_DEEPSEEK[0]}{_NAMED}",
            before=f"{SPACE}{_CODE}{IN_JSON[0]}",
            after=IN_JSON[1],
            closing=None,
            marks=_DEEPSEEK,
        ),
        CallForm(
            header=rf"{_DEEPSEEK[0]}{SPACE}function{_DEEPSEEK[1]}NAME[ \t]{{0,20}}\n",
            named=f"{_DEEPSEEK[1]}{_NAMED}",
            before=f"{SPACE}{_CODE}{IN_JSON[0]}",
            after=IN_JSON[1],
            closing=None,
            marks=_DEEPSEEK,
        ),
    ),
    "kimi": (
        CallForm(
            header=rf"{_KIMI[0]}{SPACE}(functions\.)?NAME(:[0-9]{{1,9}})?{SPACE}{_KIMI[1]}",
            named=rf"{_KIMI[0]}[{BLANK}]*(functions\.)?NAME([<:{BLANK}](?s:.*))?",
            before=IN_JSON[0],
            after=IN_JSON[1],
            closing=None,
            marks=_KIMI,
        ),
    ),
    "solar": (
        CallForm(
            header=f"{_SOLAR[0]}[^<]{{0,128}}{_SOLAR[1]}{SPACE}NAME{SPACE}{_SOLAR[2]}",
            named=f"{_SOLAR[1]}{_NAMED}",
            before=IN_JSON[0],
            after=IN_JSON[1],
            closing=None,
            marks=_SOLAR,
        ),
    ),
}
"""DeepSeek's are V3.1's and V3's."""
SYNTAX = {
    name: tuple(
        CallSyntax(
            header=f"{form.header}{SPACE}{_CODE if name == 'deepseek' else ''}",
            end=f"{SPACE}({FENCE}{SPACE})?{DIALECTS[name].end}",
            opening=opening,
            closing="" if name == "solar" else closing,  # its last mark ends the answer
            marks=(*form.marks, DIALECTS[name].end, opening, closing),
        )
        for form in forms
    )
    for name, forms in FORMS.items()
    for opening, closing in [DIALECTS[name].dropped]
}
TOKENS: dict[str, tuple[str, ...]] = {
    "deepseek": (*DIALECTS["deepseek"].dropped, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    "kimi": (
        *DIALECTS["kimi"].dropped,
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ),
    "solar": (
        "<|tool_calls|>",
        "<|tool_call:begin|>",
        "<|tool_call:name|>",
        "<|tool_call:args|>",
        "<|tool_call:end|>",
    ),
}


def sections(reader: Reader, tools: Tools, name: str) -> Steps[None]:
    """Anything that is no call is content; tokens around calls are dropped, and so is whitespace after them."""
    dialect = DIALECTS[name]
    while (mark := (yield from prose(reader, _marks(name)))) is not None:
        if mark == dialect.call:
            yield from _call(reader, tools, dialect)
            continue
        reader.take(len(mark))
        blank = yield from spaces(reader)
        if not (yield from comes(reader, dialect.call, *dialect.dropped)):
            yield reader.content(blank)


def _call(reader: Reader, tools: Tools, dialect: Dialect) -> Steps[None]:
    if (yield from begin_call(reader, tools, dialect.call, dialect.header)) is None:
        return
    if (yield from comes(reader, dialect.end)):
        yield Piece("arguments", "{}")
    else:
        yield from arguments(reader)
    yield from spaces(reader)
    if (yield from comes(reader, FENCE)):
        reader.take(len(FENCE))
        yield from spaces(reader)
    if (yield from comes(reader, dialect.end)):
        reader.take(len(dialect.end))
        yield from spaces(reader)


@functools.cache
def _marks(name: str) -> Marks:
    dialect = DIALECTS[name]
    return Marks(dialect.call, dialect.end, *dialect.dropped)
