"""Qwen3-Coder's calls: ``<function=name>``, and in it ``<parameter=key>`` with a text whose type the schema says."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

from infer.contracts.protocols import Piece, Tools
from infer.text.tool_formats.reader import Marks, Reader, Steps, comes, prose, spaces, up_to

TAGS = {"<tool_call>": "</tool_call>", "<seed:tool_call>": "</seed:tool_call>"}
TOKENS = (*TAGS, *TAGS.values())
FUNCTION, PARAMETER = "<function=", "<parameter="
END_FUNCTION, END_PARAMETER = "</function>", "</parameter>"
MOST_NAME = 256
TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}
WORDS = {"True": True, "False": False, "None": None}
"""Python's constants, as templates write them that print Python values."""


def xml(reader: Reader, tools: Tools) -> Steps[None]:
    """Anything that is no call is content, also between the tags; the tags are dropped."""
    close = ""
    while (mark := (yield from prose(reader, _marks(close)))) is not None:
        reader.take(len(mark))
        if mark in TAGS:
            close = TAGS[mark]
            blank = yield from spaces(reader)
            if not (yield from comes(reader, FUNCTION)):
                yield reader.content(blank)
        elif mark == close:
            close = ""
        else:
            yield from _function(reader, tools)
            if close:
                yield from spaces(reader)


def _function(reader: Reader, tools: Tools) -> Steps[None]:
    name = yield from up_to(reader, ">", MOST_NAME)
    if name is None or name not in tools:
        yield reader.content(FUNCTION if name is None else f"{FUNCTION}{name}>")
        return
    yield Piece("call", name)
    schemas = tools[name].get("properties")
    before = "{"
    while True:
        yield from spaces(reader)
        if not (yield from comes(reader, PARAMETER)):
            break
        reader.take(len(PARAMETER))
        key = yield from up_to(reader, ">", MOST_NAME)
        text = None if key is None else (yield from _text(reader))
        if key is None or text is None:
            return  # the text was cut off, so the JSON of the arguments stays unfinished too
        schema = schemas.get(key) if isinstance(schemas, Mapping) else None
        yield Piece("arguments", before + _dumped(key) + ": " + _dumped(typed(text, schema)))
        before = ", "
    if (yield from comes(reader, END_FUNCTION)):
        reader.take(len(END_FUNCTION))
    elif reader.ended:
        return
    yield Piece("arguments", "{}" if before == "{" else "}")


def _text(reader: Reader) -> Steps[str | None]:
    """A parameter's text; None if it does not end. It ends at a closing tag only if another tag follows, because code
    in a parameter may contain the closing tag."""
    taken: list[str] = []
    while True:
        found = reader.find(_END.pattern)
        if not found:
            if reader.ended:
                return None
            taken.append(reader.take(len(reader) - _END.begun(reader.last(_END.longest))))
            yield None
            continue
        taken.append(reader.before(found))
        after = reader.take(len(END_PARAMETER)) + (yield from spaces(reader))
        if (yield from comes(reader, PARAMETER, END_FUNCTION)):
            return "".join(taken).removeprefix("\n").removesuffix("\n")
        taken.append(after)


def typed(text: str, schema: Any) -> Any:
    """A parameter's value by its JSON schema; the text itself if the schema allows no other type that fits."""
    names = _types(schema)
    if not names or names == {"string"}:
        return text
    try:
        value = WORDS[text.strip()] if text.strip() in WORDS else from_json(text, allow_inf_nan=False)
    except ValueError:
        return text
    kinds = tuple(kind for name in names for kind in TYPES.get(name, ()))
    fits = isinstance(value, kinds) and not (isinstance(value, bool) and "boolean" not in names)
    return value if fits else text


def _types(schema: Any, depth: int = 4) -> set[str]:
    """The names of the types that a schema allows by ``type``, ``anyOf`` and ``oneOf``."""
    if not isinstance(schema, Mapping) or not depth:
        return set()
    found = schema.get("type")
    names = {found} if isinstance(found, str) else {name for name in found or () if isinstance(name, str)}
    for key in ("anyOf", "oneOf"):
        for each in schema.get(key) or ():
            names |= _types(each, depth - 1)
    return names


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


_END = Marks(END_PARAMETER)


@functools.cache
def _marks(close: str) -> Marks:
    return Marks(*TAGS, FUNCTION, *([close] if close else []))
