"""Tool calls as Phi-4-mini and Firefunction v2 write them: ``functools[{"name": NAME, "arguments": {...}}, ...]``."""

from __future__ import annotations

import re

from infer import hookimpl
from infer.contracts.text import Piece, ToolFormatRegistration, Tools
from infer.text.tool_formats.reader import Marks, Reader, Steps, ahead, arguments, comes, prose, scripted, spaces

INFER_PLUGIN_API = 2
MARKS = Marks("functools[")
HEADER = re.compile(r'\s*\{\s*"name"\s*:\s*"(?P<name>[^"\\]{1,256})"\s*,\s*"arguments"\s*:\s*(?=[{"])')


def functools(reader: Reader, tools: Tools) -> Steps[None]:
    """What is no call of one of the tools is content."""
    while (mark := (yield from prose(reader, MARKS))) is not None:
        before = reader.take(len(mark))
        while True:
            header = yield from ahead(reader, HEADER)
            if header is None or header["name"] not in tools:
                yield reader.content(before)
                break
            reader.take(header.end())
            yield Piece("call", header["name"])
            yield from arguments(reader)
            yield from _closing(reader, "}")
            if not (yield from comes(reader, ",")):
                yield from _closing(reader, "]")
                break
            before = reader.take(1)


def _closing(reader: Reader, bracket: str) -> Steps[None]:
    """Take a bracket and the whitespace around it."""
    yield from spaces(reader)
    if (yield from comes(reader, bracket)):
        reader.take(1)
        yield from spaces(reader)


@hookimpl
def infer_tool_formats() -> list[ToolFormatRegistration]:
    return [ToolFormatRegistration("functools", scripted(functools), "Phi-4-mini and Firefunction v2")]
