"""The contract of tiers, which keep the K/V of blocks outside the cache pool's memory: on a disk, for example."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol, TypeAlias

Payload: TypeAlias = "bytearray | memoryview"
"""Bytes that can be written to."""


class BlockKey(NamedTuple):
    """What a block's payload is found by."""

    name: str
    """Tells it from all others of one tier. It is fit for a file's name, and that of a block with fewer tokens before
    it comes first. It is only a digest: whoever finds a payload by it compares ``head``."""
    head: bytes
    """All that the payload depends on, and all tokens up to the end of the block."""
    nbytes: int
    """Of the payload."""


class TierProtocol(Protocol):
    """Keeps payloads of one generation: of blocks that differ in nothing but their tokens and salts.

    ``contains`` is called in the engine's thread, everything else in threads that may wait for a disk or a network,
    several at a time. A tier never gives a payload that it was not handed under the very same key. What it cannot keep
    or give back it logs, and does without: none of its methods raises an error for that."""

    def contains(self, name: str) -> bool:
        """Whether it probably has that block. It says so at once."""

    def get(self, key: BlockKey) -> Payload | None:
        """The payload; None if there is none, or none that is whole, and ``contains`` is then False."""

    def put(self, key: BlockKey, payload: Payload) -> None:
        """Keep a payload, in place of those that were used least recently if there is no more room."""

    def touch(self, names: Iterable[str]) -> None:
        """These blocks have been used, as far as there are any."""

    def first(self) -> tuple[bytes, Payload] | None:
        """The head and payload of the block whose name sorts first, which has few tokens before it; None if there is
        none."""

    def clear(self) -> None:
        """Forget all blocks of this generation."""

    def close(self) -> None:
        """Nothing is called any more."""
