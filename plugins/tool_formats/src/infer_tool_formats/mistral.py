"""Mistral's calls: ``[TOOL_CALLS]`` and a list of objects, or ``[TOOL_CALLS]name[ARGS]{...}`` for each call."""

from __future__ import annotations

import re

from infer.contracts.text import CallForm, CallSyntax, Piece, Tools
from infer.text.tool_formats.reader import SPACE, Marks, Reader, Steps, ahead, arguments, comes, prose, spaces
from infer_tool_formats.objects import FORM, calls, syntax

MARK = "[TOOL_CALLS]"
TOKENS = (MARK, "[CALL_ID]", "[ARGS]")
_MARKS = Marks(MARK)
_NAMED = re.compile(r"([\w.:-]{1,128})\s*(?:\[CALL_ID\]\s*[\w-]*\s*)?(?:\[ARGS\]\s*)?(?=[{\"])")
FORMS = (
    FORM,
    CallForm(
        header=r"\[TOOL_CALLS\]\s*NAME\s*(\[CALL_ID\]\s*[A-Za-z0-9_-]{0,64}\s*)?(\[ARGS\]\s*)?\{",
        named=r"\[TOOL_CALLS\][\s\x1c-\x1f]*NAME[^A-Za-z0-9_.:-](?s:.*)",
        before=rf'{SPACE}"input"{SPACE}:{SPACE}"',
        after=rf'"{SPACE}\}}',
        closing=None,
    ),
)
SYNTAX = (CallSyntax(header=FORMS[1].header.removesuffix(r"\{").replace(r"\s*", SPACE)), syntax(r"\[TOOL_CALLS\]", ""))


def mistral(reader: Reader, tools: Tools) -> Steps[None]:
    """Anything that is no call is content; the mark is dropped."""
    while (yield from prose(reader, _MARKS)) is not None:
        reader.take(len(MARK))
        blank = yield from spaces(reader)
        if (yield from comes(reader, "[", "{")):
            rest = yield from calls(reader, tools, blank)
            yield reader.content(rest)
            continue
        named = yield from ahead(reader, _NAMED)
        if named and named[1] in tools:
            reader.take(named.end())
            yield Piece("call", named[1])
            yield from arguments(reader)
        else:
            yield reader.content(blank)
