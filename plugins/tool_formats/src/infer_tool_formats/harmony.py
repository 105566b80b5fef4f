"""gpt-oss's answers: messages in channels, ``<|channel|>final<|message|>...``, of which some are calls.

The prompt has begun the first message with ``<|start|>assistant``. What the channel ``analysis`` holds is reasoning, a
message to ``functions.name`` is a call, and everything else is content.
"""

from __future__ import annotations

import re

from infer.contracts.text import CallForm, Piece, PieceKind, Tools
from infer.text.tool_formats.reader import BLANK, IN_JSON, SPACE, Marks, Reader, Steps, comes, prose

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
OPENING, CLOSING = f"{START}assistant", f"{CHANNEL}final{MESSAGE}"
"""How the prompt begins an answer, and how the answer's text for the user begins."""
TOKENS = (START, CHANNEL, CONSTRAIN, MESSAGE, RETURN, CALL)
"""Without ``<|end|>``, which other families have, too: what ends one message here begins the next."""
LOOK_AHEAD = 256
"""Headers are not longer."""
_TO = r"(?:\s*to=(?:functions\.)?([^\s<]+))?"
_HEADER = re.compile(
    rf"(?:{re.escape(START)}[\w.:/-]*{_TO})?{_TO}\s*(?:{re.escape(CHANNEL)}(\w*){_TO})?\s*(?:{re.escape(CONSTRAIN)})?\w*\s*"
)
_BEGINNINGS = (START, CHANNEL, CONSTRAIN, MESSAGE)
_MARKS = Marks(*_BEGINNINGS, END, RETURN, CALL)
_S, _W = r"[ \n]{0,4}", r"[a-z_]{0,16}"
_GIVEN = r"to=(functions\.)?NAME"
_KINDS = (rf"(?:[ \n]{{1,4}}{_W})?{_S}{MESSAGE}", rf"{_S}{CONSTRAIN}{_W}{_S}{MESSAGE}")
"""What may follow the recipient or the channel in a header: the kind of content, as a word or behind a mark."""
_FORM = CallForm(
    header="",
    named="",
    before=IN_JSON[0],
    after=IN_JSON[1] + SPACE,
    closing=None,
    marks=(START, CHANNEL, CONSTRAIN, MESSAGE),
    following=(START, CHANNEL, END, RETURN, CALL),
    hidden=(END,),
)
_NAMED = rf"to=(functions\.)?NAME([<{BLANK}](?s:.*))?"
FORMS = tuple(
    _FORM._replace(header=begin + kind, named=named)
    for begin, named in (
        (f"{CHANNEL}{_W}{_S}{_GIVEN}", f"{CHANNEL}[^<]*{_NAMED}"),
        (f"{START}assistant{_S}{_GIVEN}{_S}{CHANNEL}{_W}", f"{START}[^<]*{_NAMED}"),
        (f"^ ?{_GIVEN}{_S}{CHANNEL}{_W}", f"^ ?{_NAMED}"),
    )
    for kind in _KINDS
)
"""A function is named behind the channel or behind the role, of which the prompt has written the first. Its arguments
are JSON, as those of all functions."""


def harmony(reader: Reader, tools: Tools) -> Steps[None]:
    """Marks are dropped wherever they stand, and so are headers. A text without a header is content."""
    kind: PieceKind = "content"
    reported: set[PieceKind] = set()
    mark = yield from comes(reader, *_BEGINNINGS, " to=", "to=")
    while True:
        if mark in (END, RETURN, CALL):
            reader.take(len(mark))
            kind = "content"
        elif mark is not None:
            header = yield from _header(reader)
            if header is None:
                reader.take(len(mark) if mark in _BEGINNINGS else 0)
                kind = "content"
            else:
                channel, name = header[3], header[1] or header[2] or header[4]
                if name in tools:
                    yield Piece("call", name)
                    kind = "arguments"
                elif header[0].startswith(_BEGINNINGS[:2]) or name:
                    kind = "reasoning" if channel == "analysis" else "content"
                    if kind in reported:
                        yield Piece(kind, "\n")
                    reported.add(kind)
        mark = yield from prose(reader, _MARKS, kind)
        if mark is None:
            return


def _header(reader: Reader) -> Steps[re.Match[str] | None]:
    """Take a message's header, which ends with the mark before its text, or which the end of the answer has cut off.
    None if there is none here, with nothing taken."""
    while True:
        header, found, _ = reader.peek(LOOK_AHEAD).partition(MESSAGE)
        if found or reader.ended or len(header) == LOOK_AHEAD:
            break
        yield None
    match = _HEADER.fullmatch(header) if found or header.startswith((START, CHANNEL)) else None
    if match and (found or reader.ended):
        reader.take(len(header) + len(found))
        return match
    return None
