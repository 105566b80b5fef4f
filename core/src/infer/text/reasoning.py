"""Readers that separate a chat model's answer into reasoning and content.

They take the answer's text in pieces, and their result does not depend on where the text was cut.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import NamedTuple

from pydantic_core import from_json

from infer.contracts.text import PartProtocol, Piece, ReasoningTags, Tools
from infer.text.tool_formats import ToolFormat
from infer.text.tool_formats.reader import Marks, Reader, Script, Steps, comes, spaces


class Plain:
    """A parser for answers without tool calls: all text is content."""

    def push(self, text: str) -> Iterator[Piece]:
        if text:
            yield Piece("content", text)

    def flush(self) -> Iterator[Piece]:
        yield from ()


def read_content(tags: ReasoningTags | None, tools: Tools) -> PartProtocol:
    """What reads the content of an answer: all of its text, or what the reader of ``tags`` makes of it, which may call
    ``tools``."""
    return Plain() if tags is None or tags.reader is None else tags.reader(tools)


def read_reasoning(
    part: PartProtocol,
    tags: ReasoningTags | None,
    *,
    thinking: bool,
    exact: bool = False,
    tool_format: ToolFormat | None = None,
    tools: Tools = MappingProxyType({}),
) -> PartProtocol:
    """What reads the reasoning between ``tags``, if given, and passes the rest to ``part``. ``thinking`` means that the
    prompt has opened them, and ``exact`` keeps the whitespace that follows the reasoning. If the tags have a reader of
    their own, ``part`` (from ``read_content``) separates the reasoning, and is returned as it is.

    ``tool_format`` is how ``part`` reads calls of ``tools``. If an answer ends in whole calls before its reasoning is
    closed, as Qwen3.5 and Kimi K2 write some, they are no reasoning. Calls that anything follows are plans."""
    if tags is None or tags.reader is not None:
        return part
    calls = None
    if tool_format is not None and tool_format.marks:
        calls = _Calls(tool_format.marks, functools.partial(tool_format.reader, tools))
    return Script(functools.partial(_reasoned, part=part, tags=tags, within=thinking, exact=exact, calls=calls))


def opens_reasoning(prompt: str, tags: ReasoningTags) -> bool:
    """Whether a rendered prompt ends with the opening tag, as some templates write it. Tags within messages do not
    count."""
    return prompt.rstrip().endswith(tags.opening)


SPARE, AGAIN = 4096, 8
"""How many characters of reasoning may be read again in search of calls: so many, and so many for each that has been
read. Beyond that, what has been read is reasoning."""


class _Calls(NamedTuple):
    """How calls begin, and what reads them."""

    marks: tuple[str, ...]
    reader: Callable[[], PartProtocol]


def _reasoned(
    reader: Reader, part: PartProtocol, tags: ReasoningTags, within: bool, exact: bool, calls: _Calls | None
) -> Steps[None]:
    """Read reasoning between tags at the beginning of an answer, then pass the rest to ``part``. Tags further on are
    ordinary text. Whitespace around the reasoning is dropped; ``exact`` keeps what follows it. ``within`` means that
    the prompt has opened the tags."""
    blank = "" if within else (yield from spaces(reader))
    while within or (yield from comes(reader, tags.opening)):
        reader.take(0 if within else len(tags.opening))
        blank = yield from _thought(reader, tags.closing, calls)
        if not exact:
            yield from spaces(reader)
        within = False
    yield from part.push(blank)
    while True:
        yield from part.push(reader.take())
        if reader.ended:
            break
        yield None
    yield from part.flush()


def _thought(reader: Reader, closing: str, calls: _Calls | None) -> Steps[str]:
    """Read reasoning. Returns the calls that the answer ends in, if they come before its end."""
    marks = Marks(closing, *(calls.marks if calls else ()))
    yield from spaces(reader)
    blank: list[str] = []
    spare = SPARE

    def thought(text: str) -> Iterator[Piece]:
        nonlocal spare
        spare += AGAIN * len(text)
        if shown := text.rstrip():
            yield Piece("reasoning", "".join([*blank, shown]))
            blank.clear()
        blank.append(text[len(shown) :])

    while True:
        found = reader.find(marks.pattern)
        text = reader.before(found) if found else reader.take(len(reader) - marks.begun(reader.last(marks.longest)))
        if not found and reader.ended:
            text += reader.take()
        yield from thought(text)
        if found and calls and found[0] != closing:
            text, behind, whole = yield from _called(reader, closing, found[0], calls.reader())
            if whole:
                return text
            if len(behind) <= spare:
                spare -= len(behind)
                reader.untake(behind)
            else:
                text += behind
            yield from thought(text)
        elif found or reader.ended:
            reader.take(len(closing))
            return ""
        else:
            yield None


def _called(reader: Reader, closing: str, mark: str, part: PartProtocol) -> Steps[tuple[str, str, bool]]:
    """Take a text that begins with a mark and may be calls, up to where ``part`` finds anything else. Returns it, what
    is behind it that a call may begin in, and whether it is whole calls up to the end of the answer. It goes to
    ``part`` in characters, so that it does not matter how it was cut."""
    taken: list[str] = []
    arguments: list[list[str]] = []
    while not taken or not (yield from comes(reader, closing)):
        taken.append(more := reader.take(1 if taken else len(mark)))
        for piece in part.push(more) if more else part.flush():
            if piece.kind == "call":
                arguments.append([])
            elif piece.kind == "arguments":
                arguments[-1].append(piece.text)
            elif piece.text.strip():
                end = len(taken) if arguments else 1
                return "".join(taken[:end]), "".join(taken[end:]), False
        if not more:
            return "".join(taken), "", bool(arguments) and all(map(_whole, arguments))
    return "".join(taken), "", False


def _whole(arguments: list[str]) -> bool:
    try:
        return isinstance(from_json("".join(arguments)), dict)
    except ValueError:
        return False
