"""What an ingress reads of requests: whether it is streamed and seeded, and by which prefixes its prompt may
be found in a replica's cache. No tokens: they would cost an ingress as much as its replicas.

A prompt's text is written as bytes in a form of which a longer conversation's begins with a shorter one's, and hashed
up to a number of lengths, the first being ``STEP`` bytes. Lengths grow by a fixed step first and by an eighth then, so
that a prompt has no more than ``MOST_BLOCKS`` of them. The hash up to a length covers the salt and all bytes before
it, so that equal hashes mean equal beginnings under equal salts, as they do for the pages of a replica's cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any

from pydantic_core import to_json

STEP = 256
"""Bytes between two of the first lengths: about 64 tokens, as text or as ids."""
EVEN = 16
"""How many lengths are ``STEP`` apart."""
MOST_BYTES = 4 << 20
FIELDS = ("tools", "functions", "chat_template_kwargs", "instructions", "system")
"""What chat templates write before the messages, or what changes how they write these."""
BILLING = "x-anthropic-billing-header:"


def _lengths() -> Iterator[int]:
    length = 0
    for _ in range(EVEN):
        length += STEP
        yield length
    while length < MOST_BYTES:
        length += length // 8
        yield length


LENGTHS = tuple(_lengths())
MOST_BLOCKS = len(LENGTHS)


def chain(text: bytes, salt: str = "") -> tuple[int, ...]:
    """The hashes of a text's beginnings, the shortest first."""
    hasher = blake2b(salt.encode(errors="surrogatepass"), digest_size=8, person=b"infer prefix")
    found, at = [], 0
    for length in LENGTHS:
        if length > len(text):
            break
        hasher.update(text[at:length])
        found.append(int.from_bytes(hasher.copy().digest(), "little"))
        at = length
    return tuple(found)


def prompt_bytes(data: Mapping[str, Any]) -> bytes:
    """The prompt of a body, such that the one of a longer conversation begins with it; empty if it has none. Of several
    prompts, the first."""
    for name in ("prompt", "input"):
        given = data.get(name)
        if isinstance(given, list) and given and isinstance(given[0], (str, list)):
            given = given[0]
        if isinstance(given, str):
            return _before(data) + given.encode(errors="surrogatepass")
        if isinstance(given, list) and given and type(given[0]) is int:
            return b"".join([each.to_bytes(4, "little") for each in given if type(each) is int and 0 <= each < 1 << 32])
        if isinstance(given, list):
            return _before(data) + _messages(given)
    given = data.get("messages")
    return _before(data) + _messages(given) if isinstance(given, list) else b""


def _before(data: Mapping[str, Any]) -> bytes:
    return b"".join([_json([name, _lasting(data[name])]) for name in FIELDS if data.get(name)])


def _lasting(value: object) -> object:
    """The value without the block that Claude Code changes in every request, and that replicas leave out, too."""
    if not isinstance(value, list):
        return value
    return [each for each in value if not (isinstance(each, dict) and str(each.get("text", "")).startswith(BILLING))]


def _messages(messages: list[Any]) -> bytes:
    return b"".join([_json(message) for message in messages])


def _json(value: object) -> bytes:
    return to_json(value, inf_nan_mode="constants") + b"\n"
