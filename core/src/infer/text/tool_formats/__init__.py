"""How models write tool calls: one record per format, found out by what the chat template itself writes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

from infer.text.tool_formats import mistral, objects, python, xml
from infer.text.tool_formats.reader import Part, Reader, Script, Steps, Tools

FormatName = Literal["tags", "xml", "mistral", "python", "json"]


class ToolFormat(NamedTuple):
    """``script`` reads answers. Formats are tried in the order of the table, those with ``marks``
    of their own first."""

    name: FormatName
    marks: Sequence[str]
    script: Callable[[Reader, Tools], Steps[None]]

    def reader(self, tools: Tools) -> Part:
        """For one answer that may call these."""
        return Script(lambda reader: self.script(reader, tools))


FORMATS: dict[FormatName, ToolFormat] = {
    format.name: format
    for format in (
        ToolFormat("tags", [*objects.TAGS, *objects.TAGS.values()], objects.tagged),
        ToolFormat("xml", [*xml.TAGS, *xml.TAGS.values()], xml.xml),
        ToolFormat("mistral", ["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"], mistral.mistral),
        ToolFormat("python", [*python.OPENINGS, *python.CLOSINGS], python.python),
        ToolFormat("json", [objects.PYTHON_TAG], objects.bare),
    )
}
assert tuple(FORMATS) == get_args(FormatName)


MARKS = {"<think>", "</think>"}.union(
    token for format in FORMATS.values() for mark in format.marks for token in re.findall(r"<[^<>]+>|\[\w+\]", mark)
)
"""What tells an answer's parts apart, where a tokenizer may have a token for it."""


def recognise(text: str, tools: Tools, call: tuple[str, object]) -> FormatName | None:
    """The format in which a text says one call, of a name and arguments, and nothing else."""
    for format in FORMATS.values():
        part = format.reader(tools)
        said = {"call": "", "arguments": "", "content": ""}
        for piece in [*part.push(text), *part.flush()]:
            said[piece.kind] += piece.text
        try:
            if said["call"] == call[0] and json.loads(said["arguments"]) == call[1] and not said["content"].strip():
                return format.name
        except ValueError:
            continue
    return None
