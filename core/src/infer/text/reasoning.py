"""Readers that separate a chat model's answer into reasoning and content.

They take the answer's text in pieces, and their result does not depend on where the text was cut.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from infer.contracts.text import PartProtocol, Piece, ReasoningTags, Tools
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
    part: PartProtocol, tags: ReasoningTags | None, *, thinking: bool, exact: bool = False
) -> PartProtocol:
    """What reads the reasoning between ``tags``, if given, and passes the rest to ``part``. ``thinking`` means that the
    prompt has opened them, and ``exact`` keeps the whitespace that follows the reasoning. If the tags have a reader of
    their own, ``part`` (from ``read_content``) separates the reasoning, and is returned as it is."""
    if tags is None or tags.reader is not None:
        return part
    return Script(functools.partial(_reasoned, part=part, tags=tags, within=thinking, exact=exact))


def opens_reasoning(prompt: str, tags: ReasoningTags) -> bool:
    """Whether a rendered prompt ends with the opening tag, as some templates write it. Tags within messages do not
    count."""
    return prompt.rstrip().endswith(tags.opening)


def _reasoned(
    reader: Reader, part: PartProtocol, tags: ReasoningTags, within: bool, exact: bool = False
) -> Steps[None]:
    """Read reasoning between tags at the beginning of an answer, then pass the rest to ``part``. Tags further on are
    ordinary text. Whitespace around the reasoning is dropped; ``exact`` keeps what follows it. ``within`` means that
    the prompt has opened the tags."""
    blank = "" if within else (yield from spaces(reader))
    while within or (yield from comes(reader, tags.opening)):
        reader.take(0 if within else len(tags.opening))
        yield from _thought(reader, Marks(tags.closing))
        if not exact:
            yield from spaces(reader)
        within, blank = False, ""
    yield from part.push(blank)
    while True:
        yield from part.push(reader.take())
        if reader.ended:
            break
        yield None
    yield from part.flush()


def _thought(reader: Reader, closing: Marks) -> Steps[None]:
    yield from spaces(reader)
    blank: list[str] = []
    while True:
        found = reader.find(closing.pattern)
        text = reader.before(found) if found else reader.take(len(reader) - closing.begun(reader.last(closing.longest)))
        if not found and reader.ended:
            text += reader.take()
        if shown := text.rstrip():
            yield Piece("reasoning", "".join([*blank, shown]))
            blank = []
        blank.append(text[len(shown) :])
        if found or reader.ended:
            reader.take(closing.longest)
            return
        yield None
