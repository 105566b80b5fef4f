"""Tools for reading formats of tool calls: text arrives in pieces, and a script reads it as if all of it were there.

A script is a generator over a ``Reader``. It yields pieces of the answer, and None when it needs more text. Its result
does not depend on where the text was cut. To take time in proportion to the text, a script never waits with more than a
bounded look-ahead; it takes anything longer in parts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeVar

from pydantic_core import from_json

from infer.contracts.text import Piece, PieceKind, ToolFormatFactory, Tools

T = TypeVar("T")
TAIL = 64
LOOK_AHEAD = 512
"""What stands before a call's arguments is not longer."""
SPACE = r"[ \n\r\t]{0,20}"
"""A regular expression for white space in a call that a grammar holds, bounded as ``WHITESPACE`` is."""
BLANK = r"\s\x1c-\x1f"
"""What readers take for white space, for a class of characters."""
IN_JSON = (rf'{SPACE}\{{{SPACE}"input"{SPACE}:{SPACE}"', rf'"{SPACE}\}}')
"""What stands around the input in the arguments of a call that are JSON (``CallForm.before`` and ``after``)."""
Steps = Generator[Piece | None, None, T]


class Reader:
    """Text that has arrived and has not been taken yet."""

    def __init__(self) -> None:
        self.ended = False
        self.tail = ""
        """The last characters of the content."""
        self._text = ""
        self._at = 0

    def add(self, text: str) -> None:
        """More text has arrived."""
        self._text, self._at = self._text[self._at :] + text, 0

    def __len__(self) -> int:
        return len(self._text) - self._at

    def peek(self, most: int) -> str:
        """The next characters, at most so many, without taking them."""
        return self._text[self._at : self._at + most]

    def take(self, count: int | None = None) -> str:
        """Take ``count`` characters, or all."""
        end = len(self._text) if count is None else min(self._at + count, len(self._text))
        taken, self._at = self._text[self._at : end], end
        return taken

    def untake(self, text: str) -> None:
        """Put back what was taken last."""
        if self._at < len(text):
            self._text, self._at = text + self.take(), len(text)
        self._at -= len(text)

    def find(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """The first match in what has not been taken."""
        return pattern.search(self._text, self._at)

    def before(self, found: re.Match[str]) -> str:
        """Take the text before a match."""
        return self.take(found.start() - self._at)

    def last(self, most: int) -> str:
        """The last characters that have arrived, at most so many, without taking them."""
        return self._text[max(self._at, len(self._text) - most) :]

    def end_of(self, value: Extent) -> int | None:
        """How many of the characters here belong to the value; None if all do and more may follow."""
        end = value.end(self._text, self._at)
        return None if end is None else end - self._at

    def content(self, text: str) -> Piece:
        """A piece of content; ``tail`` keeps its end."""
        self.tail = (self.tail + text[-TAIL:])[-TAIL:]
        return Piece("content", text)


class Script:
    """Runs a script as the parser of an answer, or of a part of it."""

    def __init__(self, script: Callable[[Reader], Steps[None]]) -> None:
        self.reader = Reader()
        self._steps = script(self.reader)

    def push(self, text: str) -> Iterator[Piece]:
        self.reader.add(text)
        yield from self._run()

    def flush(self) -> Iterator[Piece]:
        self.reader.ended = True
        yield from self._run()

    def _run(self) -> Iterator[Piece]:
        while (piece := next(self._steps, None)) is not None:
            if piece.text or piece.kind == "call":
                yield piece


def scripted(script: Callable[[Reader, Tools], Steps[None]]) -> ToolFormatFactory:
    """The factory of a format that consists of a script and has no settings."""

    def make(tools: Tools, settings: Any, /) -> Script:
        return Script(lambda reader: script(reader, tools))

    return make


class Marks:
    """Texts to search for."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self.pattern = re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))
        self.longest = max(map(len, texts))
        self._beginnings = {text[:n] for text in texts for n in range(1, len(text))}

    def begun(self, tail: str) -> int:
        """How many characters at the end of ``tail`` may be the beginning of one of the texts."""
        for count in range(min(len(tail), self.longest - 1), 0, -1):
            if tail[-count:] in self._beginnings:
                return count
        return 0


def prose(reader: Reader, marks: Marks, kind: PieceKind = "content") -> Steps[str | None]:
    """Yield pieces of a kind up to the next mark. Returns the mark, which is not taken, or None at the end of the
    text."""
    while True:
        found = reader.find(marks.pattern)
        if found:
            text = reader.before(found)
        else:
            text = reader.take(None if reader.ended else len(reader) - marks.begun(reader.last(marks.longest)))
        if text:
            yield reader.content(text) if kind == "content" else Piece(kind, text)
        if found or reader.ended:
            return found[0] if found else None
        yield None


def run(reader: Reader, characters: re.Pattern[str]) -> Steps[str]:
    """Take text up to the next match of ``characters``, a pattern of the characters that end it."""
    taken = []
    while not (found := reader.find(characters)):
        taken.append(reader.take())
        if reader.ended:
            return "".join(taken)
        yield None
    return "".join([*taken, reader.before(found)])


def spaces(reader: Reader) -> Steps[str]:
    """Take whitespace."""
    return (yield from run(reader, _NO_SPACE))


def comes(reader: Reader, *texts: str) -> Steps[str | None]:
    """The one of the texts that comes next, which is not taken; None if none of them does."""
    while True:
        held = reader.peek(max(map(len, texts)))
        for text in texts:
            if held.startswith(text):
                return text
        if reader.ended or not any(text.startswith(held) for text in texts):
            return None
        yield None


def ahead(reader: Reader, pattern: re.Pattern[str], most: int = LOOK_AHEAD) -> Steps[re.Match[str] | None]:
    """The match of a pattern with what comes next, at most so many characters, which are not taken; None if there is
    none. The match must not depend on how much text follows it."""
    while not (found := pattern.match(reader.peek(most))):
        if reader.ended or len(reader) >= most:
            return None
        yield None
    return found


def begin_call(reader: Reader, tools: Tools, opening: str, header: re.Pattern[str]) -> Steps[str | None]:
    """Take all of a call up to its arguments, which is what ``header`` matches, with the function's ``name``, and yield
    the call. Returns the name. If it names none of the tools, that text, or ``opening``, with which calls begin, is
    content, and None is returned. The match must not depend on how much text follows it."""
    found = yield from ahead(reader, header)
    if found is None or found["name"] not in tools:
        yield reader.content(reader.take(found.end() if found else len(opening)))
        return None
    reader.take(found.end())
    yield Piece("call", found["name"])
    return found["name"]


def up_to(reader: Reader, end: str, most: int) -> Steps[str | None]:
    """Take the text before ``end``, and ``end`` itself. Returns None, with nothing taken, if ``end`` is not within the
    next ``most`` characters."""
    while True:
        held = reader.peek(most)
        before, found, _ = held.partition(end)
        if found:
            reader.take(len(before) + len(end))
            return before
        if reader.ended or len(held) == most:
            return None
        yield None


class Extent:
    """Finds the end of a value in JSON or Python: after its last bracket or quote, or before the comma or bracket that
    follows it. ``depth`` brackets are open already. With ``rest``, the value is the rest of an object, up to its
    closing bracket."""

    def __init__(self, *, python: bool = False, depth: int = 0, rest: bool = False) -> None:
        self._plain = _PYTHON if python else _JSON
        self._depth = depth
        self._rest = rest
        self._quote = ""
        self._escaped = False

    def end(self, text: str, at: int) -> int | None:
        """The value's end in ``text``, searched from ``at`` on. None if it goes on: call this again with the text that
        follows."""
        if self._escaped and at < len(text):
            self._escaped = False
            at += 1
        while at < len(text):
            found = (_QUOTED[self._quote] if self._quote else self._plain).search(text, at)
            if not found:
                return None
            at, character = found.end(), found[0]
            if self._quote and character == "\\":
                self._escaped = at == len(text)
                at += 1
                continue
            if self._quote:
                self._quote = ""
            elif character in "\"'":
                self._quote = character
                continue
            elif character in "{[(":
                self._depth += 1
                continue
            elif character != ",":
                self._depth -= 1
            elif self._depth or self._rest:
                continue
            else:
                return at - 1
            if self._depth < 0:
                return at - 1
            if self._depth == 0 and not self._rest:
                return at
        return None


def value(reader: Reader, extent: Extent) -> Steps[tuple[str, bool]]:
    """Take a whole value. Returns it, and whether it is complete."""
    taken: list[str] = []
    while True:
        end = reader.end_of(extent)
        taken.append(reader.take(end))
        if end is not None or reader.ended:
            return "".join(taken), end is not None
        yield None


def arguments(reader: Reader) -> Steps[None]:
    """Yield a call's arguments as they come: an object, or a string that contains one."""
    if (yield from comes(reader, '"')):
        text, whole = yield from value(reader, Extent())
        if whole:
            yield Piece("arguments", unquoted(text))
        return
    extent = Extent()
    while True:
        end = reader.end_of(extent)
        yield Piece("arguments", reader.take(end))
        if end is not None or reader.ended:
            return
        yield None


def dumped(value: Any) -> str:
    """A value as JSON."""
    return json.dumps(value, ensure_ascii=False)


def unquoted(literal: str) -> str:
    """The object inside a JSON string; the string literal itself if it contains none."""
    text = string(literal)
    try:
        return text if isinstance(from_json(text), dict) else literal
    except ValueError:
        return literal


def string(literal: str) -> str:
    """The text of a JSON string; empty if it is none."""
    try:
        return str(from_json(literal))
    except ValueError:
        return ""


_NO_SPACE = re.compile(r"\S")
_JSON = re.compile(r'["{}\[\],]')
_PYTHON = re.compile(r"[\"'{}\[\](),]")
_QUOTED = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}
