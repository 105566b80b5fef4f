"""DeepSeek's tool calls, as V3, R1 and its distilled models write them, and as V3.1 does.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME
```json
{...}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

from infer import hookimpl
from infer.hookspecs import ToolFormatRegistration
from infer.protocols import Piece, Tools
from infer.text.tool_formats.reader import Marks, Reader, Steps, arguments, comes, prose, scripted, spaces, up_to

INFER_PLUGIN_API = 1
CALLS, END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
TYPE, FENCE = "function", "```"
MOST_NAME = 256
MARKS = Marks(CALLS, CALL, END_CALL, END_CALLS)


def deepseek(reader: Reader, tools: Tools) -> Steps[None]:
    """What is no call of one of the tools is content; marks are dropped, and so are spaces between them."""
    while (mark := (yield from prose(reader, MARKS))) is not None:
        reader.take(len(mark))
        if mark == CALL:
            yield from _call(reader, tools)
        else:
            yield from _between(reader)


def _call(reader: Reader, tools: Tools) -> Steps[None]:
    name = yield from up_to(reader, SEP, MOST_NAME)
    if name is None:
        yield reader.content(CALL)
        return
    taken = CALL + name + SEP
    if name == TYPE:
        name = yield from up_to(reader, "\n", MOST_NAME)
        if name is None:
            yield reader.content(taken)
            return
        taken += f"{name}\n"
    if name not in tools:
        yield reader.content(taken)
        return
    yield Piece("call", name)
    yield from spaces(reader)
    if (yield from comes(reader, FENCE)) and (yield from up_to(reader, "\n", MOST_NAME)) is None:
        return
    if not (yield from comes(reader, "{", '"')):
        return
    yield from arguments(reader)
    yield from spaces(reader)
    if (yield from comes(reader, FENCE)):
        reader.take(len(FENCE))


def _between(reader: Reader) -> Steps[None]:
    blank = yield from spaces(reader)
    if not (yield from comes(reader, *MARKS.texts)):
        yield reader.content(blank)


@hookimpl
def infer_tool_formats() -> list[ToolFormatRegistration]:
    marks = (CALLS, CALL, SEP, END_CALL, END_CALLS)
    return [ToolFormatRegistration("deepseek", scripted(deepseek), "DeepSeek V3, R1 and V3.1", marks=marks)]
