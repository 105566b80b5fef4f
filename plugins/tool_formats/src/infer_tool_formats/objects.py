"""Calls as JSON objects, ``{"name": ..., "arguments": ...}``: bare, in a list, in a code fence or between tags."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection
from typing import Any

from pydantic_core import from_json

from infer.contracts.text import CallForm, CallSyntax, Piece, Tools
from infer.text.tool_formats.reader import (
    SPACE,
    Extent,
    Marks,
    Reader,
    Steps,
    arguments,
    comes,
    dumped,
    prose,
    run,
    spaces,
    string,
    unquoted,
    value,
)

FENCE = "```"
TAGS = {
    "<tool_call>": "</tool_call>",
    "<tool_calls>": "</tool_calls>",
    "<TOOLCALL>": "</TOOLCALL>",
    "<function_call>": "</function_call>",
    "<|tool_call|>": "<|/tool_call|>",
    "<|action_start|><|plugin|>": "<|action_end|>",
    "<|START_ACTION|>": "<|END_ACTION|>",
    "<|tools_prefix|>": "<|tools_suffix|>",
    "<|function_call|>": "<|message_sep|>",
    "<|message_sep|>\n\nfunction call<|role_sep|>\n": "<|message_sep|>",
    "function call<|role_sep|>\n": "<|message_sep|>",
}
KEYED = "<|tools_prefix|>"
"""In which each call is an object of one key, the function's name."""
RESPONSE = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")
"""Tags around content, which are dropped."""
TOKENS = tuple({*re.findall(r"<[^<>]+>", "".join([*TAGS, *TAGS.values()]))} - {"<|message_sep|>"})
"""The tokens that the tags consist of, without those that end answers without calls, too."""
PYTHON_TAG = "<|python_tag|>"
BARE = Marks("{", "[", FENCE, PYTHON_TAG)
ACTION = Marks("Action:")
LOOK_AHEAD = 512
"""If a call's first characters, up to this many, match ``HEADER``, its arguments are streamed; otherwise the call is
read as a whole."""
NAMES = ("name", "tool_name", "function")
ARGUMENTS = ("arguments", "parameters")
KEYS = (*NAMES, *ARGUMENTS, "type", "id", "tool_call_id", "index")
HEADER = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"(?:tool_)?name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\S)'
)
_S = r"[ \n\r\t]*"
_ANY = r"[\s\x1c-\x1f]*"
"""What ``HEADER`` takes for white space."""
_ID = r"[\w-]{0,64}"
FORM = CallForm(
    header=rf'\{{{_S}("type"{_S}:{_S}"function"{_S},{_S})?("tool_call_id"{_S}:{_S}"{_ID}"{_S},{_S})?'
    rf'"(tool_)?name"{_S}:{_S}"NAME"{_S},{_S}"(arguments|parameters)"{_S}:',
    named=rf'"(name|tool_name|function|[^"\\]*\\u00[^"]*)"{_ANY}:{_ANY}"'
    r'(NAME"|[^"\\]*\\u00([4-7]|2[dDeE]|3[0-9aA]))(?s:.*)|<\|tools_prefix\|>(?s:.*)',
    before=rf'{SPACE}\{{{SPACE}"input"{SPACE}:{SPACE}"',
    after=rf'"{SPACE}\}}{SPACE}(,{SPACE}"id"{SPACE}:{SPACE}"{_ID}"{SPACE})?\}}',
    closing=None,
)
"""An object with its keys in the order in which templates write them. What ``named`` names are other orders, and the
escapes by which JSON can write the same name."""
_OBJECT = CallSyntax(
    header=f"{FORM.header.replace(_S, SPACE)}{SPACE}",
    end=rf'{SPACE}(,{SPACE}"id"{SPACE}:{SPACE}"{_ID}"{SPACE})?\}}',
)


def syntax(opening: str, closing: str, *, listed: bool = True) -> CallSyntax:
    """Objects between texts, in a list or one by one."""
    marks = tuple(re.findall(r"<[^<>]+>", opening + closing))
    if not listed:
        return _OBJECT._replace(opening=f"{opening}{SPACE}", closing=f"{SPACE}{closing}", marks=marks)
    return _OBJECT._replace(
        opening=rf"{opening}{SPACE}\[{SPACE}",
        between=f"{SPACE},{SPACE}",
        closing=rf"{SPACE}\]{SPACE}{closing}",
        marks=marks,
    )


ANNOUNCED_SYNTAX = (syntax(rf"Action:{SPACE}{FENCE}(json)?", f"({FENCE})?"), syntax("Action:", ""))
_ENDS = "<|message_sep|>"
"""Where an answer may end, so that nothing need come there."""
BARE_SYNTAX = (CallSyntax(""), CallSyntax("", opening=PYTHON_TAG, marks=(PYTHON_TAG,)))
TAGGED_SYNTAX = (
    *(
        syntax(opening, closing.removesuffix(_ENDS), listed=listed)
        for opening, closing in TAGS.items()
        if opening != KEYED
        for listed in (False, True)
    ),
    syntax(KEYED, TAGS[KEYED])._replace(header=rf'\{{{SPACE}"NAME"{SPACE}:{SPACE}', end=rf"{SPACE}\}}"),
)
_OPENING = re.compile(r'\{\s*(?:"([^"]*)("?)|(\S))?')
_NO_LETTER = re.compile(r"[^A-Za-z_]")
_NO_SEPARATOR = re.compile(r"[^\s,;]")


def bare(reader: Reader, tools: Tools) -> Steps[None]:
    """Calls without tags: objects at places where ordinary text has none."""
    while (mark := (yield from prose(reader, BARE))) is not None:
        if _inside(reader.tail):
            yield reader.content(reader.take(len(mark)))
            continue
        taken = reader.take(len(mark)) if mark == PYTHON_TAG else ""
        rest = yield from calls(reader, tools, taken)
        yield reader.content(rest)


def tagged(reader: Reader, tools: Tools) -> Steps[None]:
    """Calls between tags. Anything else between the tags is content; the tags are dropped."""
    close = ""
    while (mark := (yield from prose(reader, _tags(close)))) is not None:
        reader.take(len(mark))
        if mark == close:
            close = ""
            continue
        if mark in RESPONSE:
            continue
        close = TAGS[mark]
        rest = yield from calls(reader, tools, keyed=mark == KEYED)
        yield reader.content(rest)


def announced(reader: Reader, tools: Tools) -> Steps[None]:
    """Calls behind ``Action:``, in a code fence."""
    while (mark := (yield from prose(reader, ACTION))) is not None:
        rest = yield from calls(reader, tools, reader.take(len(mark)))
        yield reader.content(rest)


def calls(reader: Reader, names: Collection[str], taken: str = "", *, keyed: bool = False) -> Steps[str]:
    """Read one call or several from here on. Returns the text that was taken but belongs to no call; if there is no
    call, it begins with ``taken``. Calls that are ``keyed`` have the function's name as their key."""
    taken += yield from spaces(reader)
    fenced = bool((yield from comes(reader, FENCE)))
    if fenced:
        taken += reader.take(len(FENCE)) + (yield from run(reader, _NO_LETTER)) + (yield from spaces(reader))
    listed = bool((yield from comes(reader, "[")))
    if listed:
        taken += reader.take(1) + (yield from spaces(reader))
    found = False
    while (yield from comes(reader, "{")):
        rest = yield from _call(reader, names, keyed)
        if rest:
            return taken + rest
        found, taken = True, ""
        yield from run(reader, _NO_SEPARATOR)
        if listed and (yield from comes(reader, "]")):
            listed = False
            reader.take(1)
            yield from run(reader, _NO_SEPARATOR)
    if found and fenced and (yield from comes(reader, FENCE)):
        reader.take(len(FENCE))
        yield from spaces(reader)
    return taken


def _call(reader: Reader, names: Collection[str], keyed: bool) -> Steps[str]:
    """Read an object. Returns "" if it is a call, else its text or the beginning of it."""
    extent, seen, end = Extent(), 0, None
    while True:
        held = reader.peek(LOOK_AHEAD)
        if not _may_be_call(held, names if keyed else KEYS):
            return reader.take(1)
        end = extent.end(held, seen)
        seen = len(held)
        header = HEADER.match(held)
        if header or end is not None or reader.ended or len(held) == LOOK_AHEAD:
            break
        yield None
    if header:
        name = string(header[1])
        if name not in names:
            return reader.take(1)
        reader.take(header.end())
        yield Piece("call", name)
        yield from arguments(reader)
        yield from _ended(reader)
        return ""
    text, _ = yield from value(reader, Extent())
    call = _read(text, names, keyed)
    if call is None:
        return text
    yield Piece("call", call[0])
    yield Piece("arguments", call[1])
    return ""


def _ended(reader: Reader) -> Steps[None]:
    """Take what follows a call's arguments in its object. Models forget the closing bracket, and the next call must not
    be taken for a part of this one."""
    yield from spaces(reader)
    if (yield from comes(reader, ",")):
        reader.take(1)
        yield from spaces(reader)
        if (yield from comes(reader, '"')):
            yield from value(reader, Extent(rest=True))
    if (yield from comes(reader, "}")):
        reader.take(1)


def _may_be_call(held: str, keys: Collection[str]) -> bool:
    """Whether an object that begins with ``held`` may be a call, judged by its first key."""
    found = _OPENING.match(held)
    assert found is not None
    key, closed, other = found.groups()
    if key is None:
        return other is None
    return key in keys if closed else any(known.startswith(key) for known in keys)


def _read(text: str, names: Collection[str], keyed: bool) -> tuple[str, str] | None:
    """The call's (name, arguments as JSON), whatever the order of its keys; None if it is no call."""
    try:
        call = from_json(text)
    except ValueError:
        return None
    if keyed:
        call = dict(zip(("name", "arguments"), next(iter(call.items()), ()), strict=False))
    call = call["function"] if isinstance(call.get("function"), dict) else call
    name = next((call[key] for key in NAMES if key in call), None)
    given: Any = next((call[key] for key in ARGUMENTS if key in call), {})
    if not isinstance(name, str) or name not in names:
        return None
    return name, unquoted(dumped(given)) if isinstance(given, str) else dumped(given)


def _inside(tail: str) -> bool:
    """Whether a text ends where JSON or code continues with a value, so that a bracket there begins no call."""
    end = tail.rstrip()
    return end.endswith((",", "[", "{", "(", '":', "="))


@functools.cache
def _tags(close: str) -> Marks:
    return Marks(*TAGS, *RESPONSE, *([close] if close else []))
