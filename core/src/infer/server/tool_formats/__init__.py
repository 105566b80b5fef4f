"""How models write tool calls: one record per format, found out by what the chat template itself writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

from infer.server.tool_formats.mistral import mistral
from infer.server.tool_formats.objects import bare, tagged
from infer.server.tool_formats.python import python
from infer.server.tool_formats.reader import Part, Reader, Script, Steps, Tools
from infer.server.tool_formats.xml import xml

FormatName = Literal["tags", "xml", "mistral", "python", "json"]


class ToolFormat(NamedTuple):
    """``script`` reads answers. Formats are tried in the order of the table, those with marks of their own first."""

    name: FormatName
    script: Callable[[Reader, Tools], Steps[None]]

    def reader(self, tools: Tools) -> Part:
        """For one answer that may call these."""
        return Script(lambda reader: self.script(reader, tools))


FORMATS: dict[FormatName, ToolFormat] = {
    format.name: format
    for format in (
        ToolFormat("tags", tagged),
        ToolFormat("xml", xml),
        ToolFormat("mistral", mistral),
        ToolFormat("python", python),
        ToolFormat("json", bare),
    )
}
assert tuple(FORMATS) == get_args(FormatName)


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
