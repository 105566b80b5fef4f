"""Tool calls in a chat model's answer: read from its text, forced by a schema, and written as OpenAI's API has them.

What reads them takes the answer's text in pieces, and its result does not depend on where the text was cut.
"""

from __future__ import annotations

import functools
import re
import secrets
import string
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from pydantic_core import from_json

from infer.contracts.text import PartProtocol, Piece, ReasoningTags, Tools
from infer.text.reasoning import read_content, read_reasoning
from infer.text.tool_formats import ToolFormat
from infer.text.tool_formats.reader import Marks, Reader, Script, Steps, ahead, arguments, prose, run

ID_CHARACTERS = string.ascii_letters + string.digits
ID_LENGTH = 9
"""The length of a call's id. Mistral's templates accept only ids of this form; the others accept any."""
NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
"""Keywords of JSON schemas whose values hold schemas by names that clients choose."""
VALUES = ("const", "enum", "default", "examples")
"""Those whose values are no schemas."""
_LIST = Marks("[")
_LISTED = re.compile(r'\[?\s*\{\s*"name"\s*:\s*"(?P<name>[^"\\]{1,258})"\s*,\s*"arguments"\s*:\s*(?=\S)')
_LOOK_AHEAD = 1024
"""What ``_LISTED`` matches is not longer: a grammar bounds the whitespace."""
_NEXT = re.compile(r"[^\s},\]]")


class Filter:
    """A part whose pieces are those of another, as ``_pass_on`` changes them, and then those of ``_rest``."""

    def __init__(self, part: PartProtocol) -> None:
        self._part = part

    def push(self, text: str) -> Iterator[Piece]:
        for piece in self._part.push(text):
            yield from self._pass_on(piece)

    def flush(self) -> Iterator[Piece]:
        for piece in self._part.flush():
            yield from self._pass_on(piece)
        yield from self._rest()

    def _pass_on(self, piece: Piece) -> Iterator[Piece]:
        raise NotImplementedError

    def _rest(self) -> Iterator[Piece]:
        raise NotImplementedError


class Answer(Filter):
    """Filters the pieces of an answer that may contain calls. Whitespace next to calls is dropped, and so are calls
    beyond ``most``."""

    def __init__(self, part: PartProtocol, *, most: int | None) -> None:
        super().__init__(part)
        self._most = most
        self._count = 0
        self._begun = False
        self._blank: list[str] = []

    def _rest(self) -> Iterator[Piece]:
        if not self._count:
            yield from (Piece("content", text) for text in self._blank)

    def _pass_on(self, piece: Piece) -> Iterator[Piece]:
        if piece.kind == "content":
            if self._most is not None and self._count > self._most:
                return
            if not self._begun and not piece.text.strip():
                self._blank.append(piece.text)
                return
            yield from (Piece("content", text) for text in self._blank)
            self._begun, self._blank = True, []
        elif piece.kind == "call":
            self._count += 1
            self._begun, self._blank = False, []
        if self._most is None or self._count <= self._most:
            yield piece


class Alone:
    """Reads a text that is calls alone as ``calls`` does, and any other as content."""

    def __init__(self, calls: PartProtocol) -> None:
        self._calls = calls
        self._held: list[str] | None = []
        """The text so far; None once it is known what it is."""
        self._called = False

    def push(self, text: str) -> Iterator[Piece]:
        if self._held is not None:
            self._held.append(text)
            yield from self._told(self._calls.push(text))
        elif self._called:
            yield from self._calls.push(text)
        else:
            yield Piece("content", text)

    def flush(self) -> Iterator[Piece]:
        if self._held is not None:
            yield from self._told(self._calls.flush())
        elif self._called:
            yield from self._calls.flush()
        if self._held:
            yield Piece("content", "".join(self._held))

    def _told(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """The pieces, as soon as one tells whether the text is calls."""
        for piece in pieces:
            if self._held is not None and piece.kind == "content":
                if piece.text.strip():
                    yield Piece("content", "".join(self._held))
                    self._held = None
                    return
            else:
                self._held, self._called = None, True
                yield piece


class Within(Filter):
    """Reads the content of a part by ``inner``."""

    def __init__(self, part: PartProtocol, inner: PartProtocol) -> None:
        super().__init__(part)
        self._inner = inner

    def _pass_on(self, piece: Piece) -> Iterator[Piece]:
        if piece.kind == "content":
            yield from self._inner.push(piece.text)
        else:
            yield piece

    def _rest(self) -> Iterator[Piece]:
        yield from self._inner.flush()


def listed(reader: Reader, tools: Tools) -> Steps[None]:
    """Read a list of calls that follows ``calls_schema``. What is cut off before a call's arguments is content."""
    while (yield from prose(reader, _LIST)) is not None:
        while (call := (yield from ahead(reader, _LISTED, _LOOK_AHEAD))) and call["name"] in tools:
            reader.take(call.end())
            yield Piece("call", call["name"])
            yield from arguments(reader)
            yield from run(reader, _NEXT)
        yield reader.content(reader.take(1))


class Inputs(Filter):
    """Filters pieces: the arguments of a call to one of the ``custom`` tools, ``{"input": ...}``, become the text that
    the tool takes. They come in one piece, when they are complete or cut off."""

    def __init__(self, part: PartProtocol, custom: Collection[str]) -> None:
        super().__init__(part)
        self._custom = custom
        self._held: list[str] | None = None

    def _pass_on(self, piece: Piece) -> Iterator[Piece]:
        if piece.kind == "arguments" and self._held is not None:
            self._held.append(piece.text)
            return
        yield from self._rest()
        if piece.kind == "call" and piece.text in self._custom:
            self._held = []
        yield piece

    def _rest(self) -> Iterator[Piece]:
        if self._held is not None:
            yield Piece("arguments", _input("".join(self._held)))
            self._held = None


class Whole(Filter):
    """Filters pieces: all content is the text that a call of the custom tool ``name`` takes."""

    def __init__(self, part: PartProtocol, name: str) -> None:
        super().__init__(part)
        self._name = name
        self._begun = False

    def _pass_on(self, piece: Piece) -> Iterator[Piece]:
        if piece.kind != "content":
            yield piece
            return
        if not self._begun:
            self._begun = True
            yield Piece("call", self._name)
        yield Piece("arguments", piece.text)

    def _rest(self) -> Iterator[Piece]:
        yield from ()


class Calls:
    """Turns pieces into deltas of an answer, with ids and indices of its ``tool_calls``. Calls of ``custom`` tools have
    a form of their own."""

    def __init__(self, custom: Collection[str] = ()) -> None:
        self.count = 0
        self._custom = custom
        self._kind = "function"

    def delta(self, piece: Piece) -> dict[str, Any]:
        match piece.kind:
            case "content":
                return {"content": piece.text}
            case "reasoning":
                return {"reasoning_content": piece.text}
            case "call":
                self.count += 1
                self._kind = "custom" if piece.text in self._custom else "function"
                return self._call("", id=call_id(), type=self._kind, name=piece.text)
            case "arguments":
                return self._call(piece.text)

    def _call(self, text: str, *, name: str = "", **more: str) -> dict[str, Any]:
        value = {"name": name} if name else {}
        value["input" if self._kind == "custom" else "arguments"] = text
        return {"tool_calls": [{"index": self.count - 1, **more, self._kind: value}]}


def make_parser(
    tools: Tools,
    tool_format: ToolFormat | None,
    *,
    parallel: bool = True,
    forced: bool = False,
    alone: bool = False,
    tags: ReasoningTags | None = None,
    thinking: bool = False,
    custom: Collection[str] = (),
    held: Collection[str] = (),
    exact: bool = False,
) -> PartProtocol:
    """The parser of one answer. The answer may call ``tools``, more than once if ``parallel``. ``forced`` means that
    a schema (``calls_schema``) restricts it to calls; one that is cut off before its arguments is content. ``alone``
    means that it holds nothing besides calls, or none. The model reasons between ``tags``, if given; ``thinking`` means
    that the prompt has opened them. ``custom`` are those of the tools that take a text, and ``held`` those whose text
    follows a grammar, which does not apply within the reasoning. ``exact`` keeps the whitespace that follows the
    reasoning."""
    part = read_content(tags, tools)
    if tools and (forced or tool_format is not None):
        if forced:
            # Calls that follow the schema are JSON, whatever the model's own format.
            part = Within(part, Script(functools.partial(listed, tools=tools)))
        elif tool_format is not None and (tags is None or tags.reader is None):
            part = Alone(tool_format.reader(tools)) if alone else tool_format.reader(tools)
        part = Answer(part, most=None if parallel else 1)
        part = Inputs(part, custom) if custom else part
    free = {name: schema for name, schema in tools.items() if name not in held}
    own = tool_format if free and not (forced or alone) else None
    return read_reasoning(part, tags, thinking=thinking, exact=exact, tool_format=own, tools=free)


def calls_schema(tools: Sequence[dict[str, Any]], most: int | None) -> dict[str, Any]:
    """The JSON schema of a list of at least one and at most ``most`` calls to these tools; None is no limit."""
    each = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                "arguments": _moved(
                    tool["function"].get("parameters") or {"type": "object"}, f"#/items/anyOf/{i}/properties/arguments"
                ),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for i, tool in enumerate(tools)
    ]
    return {"type": "array", "minItems": 1, "items": {"anyOf": each}} | ({} if most is None else {"maxItems": most})


def _moved(schema: Any, place: str) -> Any:
    """A schema that becomes a part of another one, at the pointer ``place``: its references to itself lead there."""
    if isinstance(schema, list):
        return [_moved(each, place) for each in schema]
    if not isinstance(schema, dict) or isinstance(schema.get("$id"), str):  # with an id, they lead to it
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            made[key] = place + value[1:]
        elif key in NAMED and isinstance(value, dict):
            made[key] = {name: _moved(each, place) for name, each in value.items()}
        else:
            made[key] = value if key in VALUES else _moved(value, place)
    return made


def _input(arguments: str) -> str:
    """What a call's arguments hold as ``input``, as far as it goes; the arguments themselves if that is no text, or if
    they are whole and have no ``input``."""
    cut = False
    try:
        found = from_json(arguments)
    except ValueError:
        cut = True
        try:
            found = from_json(arguments, allow_partial="trailing-strings")
        except ValueError:
            return arguments
    value = found.get("input", "" if cut else arguments) if isinstance(found, dict) else None
    return value if isinstance(value, str) else arguments


def call_id() -> str:
    """A new call's id."""
    return "".join(secrets.choice(ID_CHARACTERS) for _ in range(ID_LENGTH))
