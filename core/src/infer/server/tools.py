"""What a chat model writes, told apart: its reasoning, its text, its tool calls.

All of these take text in pieces, cut anywhere, and say the same however it is cut.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol

Kind = Literal["content", "reasoning", "call", "arguments"]
ToolFormat = Literal["tags", "json", "python"]

_HEADER = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:'
)
"""What every call in JSON begins with, as the templates ask for it: then its arguments."""


class Piece(NamedTuple):
    """A bit of an answer. A ``call`` begins one, ``text`` being the function's name; ``arguments`` go on with it."""

    kind: Kind
    text: str


class Part(Protocol):
    """Takes text, gives pieces."""

    def push(self, text: str) -> Iterator[Piece]: ...

    def flush(self) -> Iterator[Piece]:
        """What is left at the end."""
        ...


class Plain:
    """All of it is content."""

    def push(self, text: str) -> Iterator[Piece]:
        if text:
            yield Piece("content", text)

    def flush(self) -> Iterator[Piece]:
        yield from ()


class Between:
    """What stands between two tags goes to one part, the rest to another; with ``trim``, without the blank lines that
    follow a closing tag. ``within`` says that the text begins behind an opening tag."""

    def __init__(
        self,
        tags: tuple[str, str],
        inside: Callable[[], Part],
        outside: Part,
        *,
        within: bool = False,
        trim: bool = False,
    ) -> None:
        self._tags = tags
        self._trim = trim
        self._trimming = False
        self._make_inside = inside
        self._outside = outside
        self._inside: Part | None = inside() if within else None
        self._held = ""

    def push(self, text: str) -> Iterator[Piece]:
        text = self._held + text
        while True:
            tag = self._tags[self._inside is not None]
            before, found, after = text.partition(tag)
            if not found:
                break
            yield from self._pass_on(before)
            if self._inside is None:
                self._inside = self._make_inside()
            else:
                yield from self._inside.flush()
                self._inside, self._trimming = None, self._trim
            text = after
        keep = next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if tag.startswith(text[-n:])), 0)
        self._held = text[len(text) - keep :]
        yield from self._pass_on(text[: len(text) - keep])

    def flush(self) -> Iterator[Piece]:
        yield from self._pass_on(self._held)
        if self._inside is not None:
            yield from self._inside.flush()
        yield from self._outside.flush()

    def _pass_on(self, text: str) -> Iterator[Piece]:
        if self._inside is not None:
            yield from self._inside.push(text)
            return
        if self._trimming:
            text = text.lstrip()
            self._trimming = not text
        yield from self._outside.push(text)


class Reasoning:
    """Blank lines around it are not part of it."""

    def __init__(self) -> None:
        self._begun = False
        self._blank = ""

    def push(self, text: str) -> Iterator[Piece]:
        text = self._blank + text if self._begun else text.lstrip()
        shown = text.rstrip()
        self._blank = text[len(shown) :]
        if shown:
            self._begun = True
            yield Piece("reasoning", shown)

    def flush(self) -> Iterator[Piece]:
        yield from ()


class JsonCalls:
    """Calls as JSON objects, one or several, in a list or not: ``{"name": ..., "arguments": ...}``. Arguments are
    passed on as they come. What turns out to be something else is content."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)
        self._held = ""
        self._step: Callable[[], Iterator[Piece]] = self._header
        self._value = _Value()
        self._count = 0

    def push(self, text: str) -> Iterator[Piece]:
        self._held += text
        while self._held:
            before = (self._step, self._held)
            yield from self._step()
            if before == (self._step, self._held):
                return  # more is needed to go on

    def flush(self) -> Iterator[Piece]:
        held, self._held = self._held, ""
        if self._count == 0:
            # Perhaps calls whose keys stand in another order.
            calls = _calls(held, self._names)
            for name, arguments in calls:
                yield Piece("call", name)
                yield Piece("arguments", arguments)
            if calls:
                return
        if held and self._step == self._header:
            yield Piece("content", held)

    def _header(self) -> Iterator[Piece]:
        """Before a call: all that comes is either one's beginning or content."""
        start = self._held.lstrip(" \t\r\n,;[]" if self._count else " \t\r\n[")
        found = _HEADER.match(start)
        name = _string(found[1]) if found else None
        if found and name in self._names:
            assert name is not None
            self._held, self._value, self._step = start[found.end() :], _Value(), self._arguments
            self._count += 1
            yield Piece("call", name)
        elif found or start[:1] not in ("", "{"):
            self._held, self._step = start if self._count else self._held, self._content
        elif self._count:
            self._held = start

    def _arguments(self) -> Iterator[Piece]:
        if not self._value.begun:
            self._held = self._held.lstrip()
        end = self._value.end(self._held)
        arguments, self._held = self._held[:end], "" if end is None else self._held[end:]
        if end is not None:
            self._value, self._step = _Value(stop_at_comma=False), self._closing
        if arguments:
            yield Piece("arguments", arguments)

    def _closing(self) -> Iterator[Piece]:
        """Whatever else the object holds, up to its brace."""
        end = self._value.end(self._held)
        if end is None:
            self._held = ""
        else:
            self._held, self._step = self._held[end + 1 :], self._header
        yield from ()

    def _content(self) -> Iterator[Piece]:
        held, self._held = self._held, ""
        yield Piece("content", held)


class PythonCalls:
    """Calls as Python: ``[f(a=1), g(b="x")]``, bare or in a ```tool_code block. They come when the text ends."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)
        self._held = ""
        self._content = False

    def push(self, text: str) -> Iterator[Piece]:
        self._held += text
        if not self._content and not self._possible(self._held.lstrip()):
            self._content = True
        if self._content and self._held:
            yield Piece("content", self._held)
            self._held = ""

    def flush(self) -> Iterator[Piece]:
        calls = self._parse(self._held)
        if calls is None and self._held:
            yield Piece("content", self._held)
        for name, arguments in calls or ():
            yield Piece("call", name)
            yield Piece("arguments", json.dumps(arguments, ensure_ascii=False))
        self._held = ""

    def _possible(self, text: str) -> bool:
        fence = "```"
        if text.startswith(fence[: len(text)]):
            return True
        opened = text.lstrip("[ \t\r\n")
        if not opened:
            return True
        word = re.match(r"[\w.]*", opened)
        assert word is not None
        name, rest = word[0], opened[word.end() :]
        if rest:
            return name in self._names and rest.lstrip()[:1] in ("", "(")
        return any(known.startswith(name) for known in self._names)

    def _parse(self, text: str) -> list[tuple[str, dict[str, Any]]] | None:
        code = re.sub(r"^\s*```\w*\n?|```\s*$", "", text).strip()
        try:
            body = ast.parse(code).body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
        found = []
        for statement in body:
            value = statement.value if isinstance(statement, ast.Expr) else None
            for call in value.elts if isinstance(value, (ast.List, ast.Tuple)) else [value]:
                if not isinstance(call, ast.Call) or call.args or ast.unparse(call.func) not in self._names:
                    return None
                try:
                    arguments = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
                    json.dumps(arguments)
                except (ValueError, TypeError):
                    return None
                found.append((ast.unparse(call.func), arguments))
        return found or None


class OneCall:
    """Lets the first call through, and nothing from the second on."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._count = 0

    def push(self, text: str) -> Iterator[Piece]:
        yield from self._limit(self._part.push(text))

    def flush(self) -> Iterator[Piece]:
        yield from self._limit(self._part.flush())

    def _limit(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            self._count += piece.kind == "call"
            if self._count <= 1:
                yield piece


class Calls:
    """Pieces as the deltas of an answer's ``tool_calls``, with ids and indices."""

    def __init__(self) -> None:
        self.count = 0

    def delta(self, piece: Piece) -> dict[str, Any]:
        match piece.kind:
            case "content":
                return {"content": piece.text}
            case "reasoning":
                return {"reasoning_content": piece.text}
            case "call":
                self.count += 1
                return self._call(
                    {"name": piece.text, "arguments": ""}, id=f"call_{secrets.token_hex(12)}", type="function"
                )
            case "arguments":
                return self._call({"arguments": piece.text})

    def _call(self, function: dict[str, str], **more: str) -> dict[str, Any]:
        return {"tool_calls": [{"index": self.count - 1, **more, "function": function}]}


def make_parser(
    names: Sequence[str], tool_format: ToolFormat | None, *, parallel: bool, thinks: bool, thinking: bool
) -> Part:
    """For one answer. ``names`` are the functions it may call, several times if ``parallel``; ``thinks`` says that the
    model reasons in <think> tags, ``thinking`` that the prompt has opened one."""
    part: Part = Plain()
    if names and tool_format == "tags":
        part = Between(("<tool_call>", "</tool_call>"), lambda: JsonCalls(names), part)
    elif names and tool_format == "json":
        part = JsonCalls(names)
    elif names and tool_format == "python":
        part = PythonCalls(names)
    if not parallel:
        part = OneCall(part)
    if thinks:
        return Between(("<think>", "</think>"), Reasoning, part, within=thinking, trim=True)
    return part


def reasons(setting: Literal["auto", "think", "none"], template: str) -> bool:
    """Whether the model writes its reasoning in <think> tags: as ``model.reasoning`` says, or its chat template."""
    return "</think>" in template if setting == "auto" else setting == "think"


def opens_reasoning(prompt: str) -> bool:
    """Whether a rendered prompt leaves the model in the middle of its reasoning, as some templates do. What messages
    say of such tags does not count."""
    return prompt.rstrip().endswith("<think>")


def guess_tool_format(template: str) -> ToolFormat | None:
    """The format that a chat template teaches; None where it knows no tools."""
    if "<tool_call>" in template:
        return "tags"
    if "tool_code" in template or "[func_name1(" in template:
        return "python"
    return "json" if "tools" in template else None


def calls_schema(tools: Sequence[dict[str, Any]], most: int | None) -> dict[str, Any]:
    """The JSON schema of a list of calls of these functions."""
    each = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                "arguments": tool["function"].get("parameters") or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    return {"type": "array", "minItems": 1, "items": {"anyOf": each}} | ({} if most is None else {"maxItems": most})


class _Value:
    """Finds where a JSON value in an object ends: behind its last bracket or quote, or before what follows."""

    def __init__(self, stop_at_comma: bool = True) -> None:
        """Without ``stop_at_comma`` only the object's own brace ends it."""
        self.begun = False
        self._stop_at_comma = stop_at_comma
        self._depth = 0
        self._quoted = self._escaped = False

    def end(self, text: str) -> int | None:
        """Where in ``text``; None where it goes on, and the next text takes it up."""
        for i, character in enumerate(text):
            self.begun = True
            if self._quoted:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._quoted = False
                    if self._depth == 0 and self._stop_at_comma:
                        return i + 1
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth < 0:
                    return i
                if self._depth == 0 and self._stop_at_comma:
                    return i + 1
            elif character == "," and self._depth == 0 and self._stop_at_comma:
                return i
        return None


def _calls(text: str, names: frozenset[str]) -> list[tuple[str, str]]:
    try:
        value = json.loads(text)
    except ValueError:
        return []
    found = []
    for call in value if isinstance(value, list) else [value]:
        if not isinstance(call, dict) or call.get("name") not in names:
            return []
        arguments = call.get("arguments", call.get("parameters", {}))
        found.append(
            (call["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))
        )
    return found


def _string(literal: str) -> str | None:
    try:
        value = json.loads(literal)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
