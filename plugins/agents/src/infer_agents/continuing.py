"""Going on with a stored response: a prompt that begins with the very tokens of the last one and its answer.

Chat templates show an answer again in another way than it was written: without its reasoning, or with other white
space. The tokens that were computed are in the cache, and they are what the model has said. So only what follows the
answer is taken from the template: a mark stands in place of the answer, and the text behind the mark is what the
template writes from the answer's end on."""

from __future__ import annotations

import itertools
import secrets
from array import array
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from infer.errors import RequestError

Turns = Sequence[dict[str, Any]]


def marked(turns: Turns, answer: int, mark: str, *, calls: bool) -> list[dict[str, Any]]:
    """The turns with a mark at the end of the turn ``answer``: in its last call if it has ``calls``, else in its
    text."""
    said = {name: value for name, value in turns[answer].items() if name not in ("reasoning_content", "tool_calls")}
    if calls:
        *others, last = turns[answer]["tool_calls"]
        made = last | {"function": last["function"] | {"arguments": {mark: mark}}}
        said["tool_calls"] = [*others, made]
    else:
        said["content"] = mark
    return [*turns[:answer], said, *turns[answer + 1 :]]


async def following(turns: Turns, answer: int, stop: str, render: Callable[[Turns], Awaitable[str]]) -> str | None:
    """The text that the chat template writes behind the turn ``answer``. ``stop`` is the text of the token that ended
    it. None if the template does not let it be told from the answer."""
    mark = secrets.token_hex(8)

    async def behind(calls: bool) -> str | None:
        try:
            text = await render(marked(turns, answer, mark, calls=calls))
        except RequestError:  # of a conversation that the client has not sent
            return None
        return text.rpartition(mark)[2] if mark in text else None

    plain = await behind(calls=False)
    if plain is None or not turns[answer].get("tool_calls"):
        return plain
    called = await behind(calls=True)
    if called is None or called.endswith(plain):
        return None if called is None else plain
    # The end of a call is another one than that of a text, as in gpt-oss's format.
    pairs = zip(reversed(called), reversed(plain), strict=False)
    begin = len(called) - sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    at = called.rfind(stop, 0, begin + len(stop)) if stop else -1
    return called[at:] if at >= 0 and at < begin <= at + len(stop) else None


def packed(tokens: Sequence[int]) -> bytes:
    return array("I", tokens).tobytes()


def unpacked(tokens: bytes) -> list[int]:
    return array("I", tokens).tolist()
