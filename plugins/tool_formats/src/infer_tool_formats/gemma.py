"""Gemma's calls: ``<|tool_call>call:name{key:<|"|>text<|"|>,days:3}<tool_call|>``, an object without quotes around keys
and with tokens around strings, so that nothing in a string is escaped."""

from __future__ import annotations

import functools
import re

from infer.contracts.text import CallForm, CallSyntax, Piece, Tools
from infer.text.tool_formats.reader import (
    BLANK,
    SPACE,
    Extent,
    Marks,
    Reader,
    Steps,
    begin_call,
    comes,
    dumped,
    prose,
    run,
    spaces,
    value,
)
from infer_tool_formats.xml import NO_STRING, typed

QUOTES = {"<|tool_call>": '<|"|>', "<start_function_call>": "<escape>"}
"""What stands around strings, by the token that a call begins with: Gemma 4's and FunctionGemma's."""
CLOSINGS = {"<|tool_call>": "<tool_call|>", "<start_function_call>": "<end_function_call>"}
AFTER = ("<|tool_response>", "<start_function_response>")
"""Where the model waits for a call's result."""
REASONING = ("<|channel>", "<channel|>")
TOKENS = (*QUOTES, *QUOTES.values(), *CLOSINGS.values(), *AFTER, *REASONING)
FORMS = tuple(
    CallForm(
        header=rf"{opening}{SPACE}call:NAME{SPACE}\{{{SPACE}input{SPACE}:{SPACE}{quote}",
        named=rf"{opening}[{BLANK}]*call:NAME([\{{{BLANK}](?s:.*))?",
        before="",
        after=rf"{quote}{SPACE}\}}",
        closing=quote,
        marks=(opening, quote),
    )
    for opening, quote in QUOTES.items()
)
SYNTAX = tuple(
    CallSyntax(
        header=rf"{opening}call:NAME\{{",
        end=rf"\}}{CLOSINGS[opening]}",
        arguments=((f"KEY:{quote}", quote), ("KEY:", "")),
        comma=",",
        marks=(opening, quote, CLOSINGS[opening]),
    )
    for opening, quote in QUOTES.items()
)
"""A value that is no string is JSON, which the reader takes, too."""
_HEADER = re.compile(r"<[|\w]+>\s*call:(?P<name>[\w.:-]{1,256})\s*(?=\{)")
_MARKS = Marks(*QUOTES, *CLOSINGS.values(), *AFTER)
_NO_KEY = re.compile(r'[:,{}\[\]<"]')
_NO_PLAIN = re.compile(r"[,}\]]")


def gemma(reader: Reader, tools: Tools) -> Steps[None]:
    """Anything that is no call is content; closing tokens are dropped."""
    while (mark := (yield from prose(reader, _MARKS))) is not None:
        if mark not in QUOTES:
            reader.take(len(mark))
            continue
        if (yield from begin_call(reader, tools, mark, _HEADER)) is not None:
            yield from _arguments(reader, QUOTES[mark])
            yield from spaces(reader)


def _arguments(reader: Reader, quote: str) -> Steps[None]:
    """Yield an object as JSON, as it comes. What does not belong to one is left, and the JSON stays unfinished."""
    closings: list[str] = []
    after = False  # whether a value has just ended
    while True:
        yield from spaces(reader)
        if closings and (yield from comes(reader, closings[-1])):
            yield Piece("arguments", closings.pop())
            reader.take(1)
            after = True
            if not closings:
                return
            continue
        if after:
            if not (yield from comes(reader, ",")):
                return
            reader.take(1)
            yield Piece("arguments", ", ")
            yield from spaces(reader)
        if closings and closings[-1] == "}":
            if not (yield from _key(reader, quote)):
                return
            yield from spaces(reader)
        after = True
        mark = yield from comes(reader, quote, '"', "{", "[")
        if mark in ("{", "["):
            yield Piece("arguments", reader.take(1))
            closings.append("}" if mark == "{" else "]")
            after = False
        elif not (yield from _leaf(reader, quote, mark)):
            return


def _key(reader: Reader, quote: str) -> Steps[bool]:
    """Take a key and the colon after it. Returns whether there is one."""
    if mark := (yield from comes(reader, quote, '"')):
        yield from _string(reader, mark)
        yield from spaces(reader)
    else:
        key = (yield from run(reader, _NO_KEY)).strip()
        if not (yield from comes(reader, ":")):
            if not reader.ended:
                yield reader.content(key)
            return False
        yield Piece("arguments", dumped(key))
    if not (yield from comes(reader, ":")):
        return False
    reader.take(1)
    yield Piece("arguments", ": ")
    return True


def _leaf(reader: Reader, quote: str, mark: str | None) -> Steps[bool]:
    """A string, or a value that is written as it is. Returns whether it is whole."""
    if mark is not None:
        return (yield from _string(reader, mark))
    text = yield from run(reader, _NO_PLAIN)
    if reader.ended and not len(reader):
        yield Piece("arguments", "" if quote.startswith(text) else text)
        return False
    yield Piece("arguments", dumped(typed(text.strip(), NO_STRING)))
    return True


def _string(reader: Reader, quote: str) -> Steps[bool]:
    """A string between ``quote``; an ordinary quote may be one, if the model writes JSON."""
    if quote == '"':
        literal, whole = yield from value(reader, Extent())
        yield Piece("arguments", literal)
        return whole
    reader.take(len(quote))
    yield Piece("arguments", '"')
    marks = _quotes(quote)
    while True:
        found = reader.find(marks.pattern)
        text = reader.before(found) if found else reader.take(len(reader) - marks.begun(reader.last(marks.longest)))
        if text:
            yield Piece("arguments", dumped(text)[1:-1])
        if found:
            reader.take(len(quote))
            yield Piece("arguments", '"')
            return True
        if reader.ended:
            reader.take()  # the beginning of a quote
            return False
        yield None


@functools.cache
def _quotes(quote: str) -> Marks:
    return Marks(quote)
