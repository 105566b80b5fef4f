"""What ``ToolFormatFactory`` and ``PartProtocol`` promise, tried on one call as a model writes it."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infer.contracts.text import PartProtocol, Piece, Tools
from infer_testing.suite import Suite, Violation

BEFORE = "Let me see, one moment (it takes 3 or 4).\n\n"
LOOK_AHEAD = 1024
"""The most characters of plain text that a reader may hold back."""
DELTAS = (1 << 8, 1 << 10, 1 << 12, 1 << 14, 1 << 16)
"""Of a long answer, after which the time is taken."""
NOTICEABLE_S = 0.25
"""A reader that takes less is quick enough."""
MakeReader = Callable[[Tools], PartProtocol]
KINDS = ("content", "reasoning", "call", "arguments")


@dataclass
class ToolFormats:
    """What makes the readers of a format, and a call that is written in it."""

    make: MakeReader
    text: str
    """An answer that is a call and nothing else."""
    name: str
    arguments: Mapping[str, Any]
    schema: Mapping[str, Any]
    two: str = ""
    """An answer that is two of these calls and nothing else, where that is not ``text`` twice."""

    def read(self, parts: Iterable[str], others: bool = False) -> list[Piece]:
        """The pieces of an answer that arrives in parts, and may call the function, or only ``others``. Neighboring
        pieces of one kind are joined."""
        part = self.make({"some_other_function" if others else self.name: self.schema})
        found: list[Piece] = []
        for piece in (*(piece for text in parts for piece in part.push(text)), *part.flush()):
            if not isinstance(piece, Piece) or piece.kind not in KINDS or not isinstance(piece.text, str):
                raise Violation(f"{piece!r} is no Piece of a kind that there is: {', '.join(KINDS)}")
            if found and found[-1].kind == piece.kind != "call":
                found[-1] = Piece(piece.kind, found[-1].text + piece.text)
            elif piece.text or piece.kind == "call":
                found.append(piece)
        return found


SUITE: Suite[ToolFormats] = Suite("check_tool_format")
check = SUITE.check


def check_tool_format(
    make: MakeReader,
    text: str,
    name: str,
    arguments: Mapping[str, Any],
    *,
    schema: Mapping[str, Any] | None = None,
    two: str | None = None,
    only: Sequence[str] = (),
    seed: int = 0,
    case: int | None = None,
) -> None:
    """Try everything that a tool format promises on ``text``, an answer that calls the function ``name`` with
    ``arguments`` and says nothing else. ``make`` makes a reader from the tools that an answer may call, and ``schema``
    is the JSON schema of the arguments, if the format needs it. ``two`` is an answer that calls it twice, where that is
    not ``text`` twice. ``only`` names checks, ``case`` one case of each. Raises ConformanceError."""
    subject = ToolFormats(make, text, name, arguments, schema or {"type": "object"}, two or "")
    SUITE.enforce(subject, only=only, seed=seed, case=case)


def joined(pieces: Iterable[Piece], kind: str) -> str:
    return "".join(piece.text for piece in pieces if piece.kind == kind)


@check("A call is a piece with the function's name and pieces with its arguments in JSON, and nothing of it is content")
def reads(f: ToolFormats, draw: random.Random) -> None:
    found = f.read([f.text])
    calls = [piece.text for piece in found if piece.kind == "call"]
    if calls != [f.name]:
        raise Violation(f"{f.text!r} is read as calls of {calls}, not as one of {f.name!r}")
    try:
        given = json.loads(joined(found, "arguments"))
    except ValueError:
        raise Violation(f"the arguments are {joined(found, 'arguments')!r}, which is not JSON") from None
    if given != f.arguments:
        raise Violation(f"the arguments are {given}, not {dict(f.arguments)}")
    if rest := joined(found, "content").strip():
        raise Violation(f"{rest!r} of the call is content")


@check("Each of two calls is read, with arguments of its own")
def both(f: ToolFormats, draw: random.Random) -> None:
    text = f.two or 2 * f.text
    found = f.read([text])
    calls = [piece.text for piece in found if piece.kind == "call"]
    if calls != [f.name] * 2:
        raise Violation(f"{text!r} is read as calls of {calls}, not as two of {f.name!r}")
    given = [piece.text for piece in found if piece.kind == "arguments"]
    if given != [joined(f.read([f.text]), "arguments")] * 2:
        raise Violation(f"the arguments of {text!r} are {given}")
    if rest := joined(found, "content").strip():
        raise Violation(f"{rest!r} of the calls is content")


@check("What stands before a call is content, and comes before it")
def prose(f: ToolFormats, draw: random.Random) -> None:
    found = f.read([BEFORE + f.text])
    first = next((i for i, piece in enumerate(found) if piece.kind == "call"), len(found))
    if joined(found[:first], "content").strip() != BEFORE.strip() or first == len(found):
        raise Violation(f"{BEFORE!r} and the call are read as {found}")


@check("The pieces are the same however the text is cut", 60)
def cuts(f: ToolFormats, draw: random.Random) -> None:
    text = draw.choice([f.text, BEFORE + f.text, f.text + f.text, BEFORE + f.text[: draw.randrange(len(f.text))]])
    whole = f.read([text])
    size = draw.choice([1, 2, 3, 7])
    ends = sorted({0, len(text), *draw.sample(range(len(text)), len(text) // size)})
    found = f.read([text[begin:end] for begin, end in itertools.pairwise(ends)])
    if found != whole:
        raise Violation(f"{text!r} is read as {found} if it comes cut at {ends}, and as {whole} if it comes whole")


@check("What looks like a call of a function that the answer may not call is content")
def others(f: ToolFormats, draw: random.Random) -> None:
    found = f.read([f.text], others=True)
    if any(piece.kind in ("call", "arguments") for piece in found) or not joined(found, "content").strip():
        raise Violation(f"where {f.name!r} is no tool, {f.text!r} is read as {found}")


@check("An answer may be cut off anywhere: nothing raises, and what comes of the call is how the whole one begins", 60)
def cut_off(f: ToolFormats, draw: random.Random) -> None:
    whole, end = f.read([f.text]), draw.randrange(len(f.text))
    found = f.read([f.text[:end]])
    calls = [piece.text for piece in found if piece.kind == "call"]
    if calls not in ([], [f.name]):
        raise Violation(f"{f.text[:end]!r} is read as calls of {calls}")
    told, given = joined(found, "arguments"), joined(whole, "arguments")
    if not given.startswith(told) and not told.startswith(given):  # which the beginning of a closing mark may follow
        raise Violation(f"the arguments of {f.text[:end]!r} are {told!r}")


@check("Text without a call is told as it comes: a reader holds back no more than a bounded look-ahead", 4)
def early(f: ToolFormats, draw: random.Random) -> None:
    part, text = f.make({f.name: f.schema}), draw.choice(["word ", "1, 2; ", "wörter - "]) * 1000
    told = sum(len(piece.text) for i in range(0, len(text), 50) for piece in part.push(text[i : i + 50]))
    if len(text) - told > LOOK_AHEAD:
        raise Violation(f"of {len(text)} characters without a call, {len(text) - told} are held back")
    told += sum(len(piece.text) for piece in part.flush())
    if told != len(text):
        raise Violation(f"of {len(text)} characters without a call, {told} are told")


@check("A character that may begin a call, and begins none, is content")
def lone(f: ToolFormats, draw: random.Random) -> None:
    for text in (f"{BEFORE}{f.text[0]} and so on", BEFORE + f.text[0]):
        if (content := joined(f.read([text]), "content")) != text:
            raise Violation(f"{text!r} is read as the content {content!r}")


@check("Reading takes time in proportion to the text: it runs between the answers to others")
def proportion(f: ToolFormats, draw: random.Random) -> None:
    last = next((value for value in reversed([*f.arguments.values()]) if isinstance(value, str) and value), "")
    within = f.text.rfind(last) + 1 if last in f.text else len(f.text) // 2
    for what, begin, more in (
        ("text without a call", "", "word"),
        ("what may begin a call, again and again", "", f"{f.text[0]} x "),
        ("a call that goes on and on", f.text[:within], "more"),
    ):
        times: list[float] = []
        for deltas, seconds in _reading(f, begin, more):
            # Halfway between the 16 times of a reader in proportion and the 256 of one that reads all again: other work
            # on the machine does not make one look like the other.
            if seconds > NOTICEABLE_S and len(times) > 1 and seconds > 64 * times[-2]:
                raise Violation(f"{deltas} deltas of {what} take over 64 times as long as {deltas // 16} of them")
            times.append(seconds)


def _reading(f: ToolFormats, begin: str, more: str) -> Iterator[tuple[int, float]]:
    """The CPU time to read an answer, after so many deltas, each time four times as many."""
    part, spent, done = f.make({f.name: f.schema}), 0.0, 0
    deque(part.push(begin), maxlen=0)
    for deltas in DELTAS:
        began = time.thread_time()
        for _ in range(deltas - done):
            deque(part.push(more), maxlen=0)
        spent, done = spent + time.thread_time() - began, deltas
        yield deltas, spent
