"""What a replica's cache holds, in the terms of ingresses: the blocks of prompts, not of tokens.

A replica knows from each request's baggage by which blocks an ingress knows its prompt, and from its record how many
tokens that were. A cache keeps what was used last, leaves first, as far as it has room. ``HeldBlocks`` keeps the same
account of blocks and tokens, and so knows what has been evicted without asking the cache, which knows no texts."""

from __future__ import annotations

import base64
import struct
from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import islice

from infer_router.prefixes import LENGTHS, MOST_BLOCKS

ENTRY = "infer.prefix"
"""The entry of the W3C header ``baggage`` that has a prompt's blocks."""
MOST_BAGGAGE = 8000
"""Servers take headers of 8,190 bytes."""
MOST_CHANGES = 1 << 14
MOST_HELD = 1 << 16
"""How many blocks are accounted for, and how many changes are remembered for ingresses that ask what is new."""


def to_baggage(chain: Sequence[int]) -> str:
    return f"{ENTRY}={base64.urlsafe_b64encode(struct.pack(f'<{len(chain)}Q', *chain)).decode().rstrip('=')}"


def with_blocks(baggage: str, chain: Sequence[int]) -> str:
    """A client's header with these blocks in place of any that it has itself: what a client says that a replica holds
    would be told to all ingresses. Without them if it would be too long for a server."""
    entries = [entry for each in baggage.split(",") if (entry := each.strip()) and _name(entry) != ENTRY]
    if chain and sum(map(len, entries)) + len(entries) < MOST_BAGGAGE - 11 * MOST_BLOCKS:
        entries.insert(0, to_baggage(chain))
    return ",".join(entries)


def _name(entry: str) -> str:
    return entry.partition("=")[0].strip()


def from_baggage(baggage: str) -> tuple[int, ...]:
    """The blocks in a header, which anybody may have written; none if it has none."""
    for entry in baggage.split(","):
        _, _, value = entry.strip().partition("=")
        if _name(entry) == ENTRY and len(value) <= 11 * MOST_BLOCKS:
            try:
                data = base64.urlsafe_b64decode(value + "=" * (-len(value) % 4))
                return tuple(each for (each,) in struct.iter_unpack("<Q", data))
            except (ValueError, struct.error):
                return ()
    return ()


class HeldBlocks:
    """``capacity`` is how many tokens the cache has room for. ``server`` tells this account from others."""

    def __init__(self, capacity: int, server: str) -> None:
        self._capacity = capacity
        self._server = server
        self._blocks: OrderedDict[int, float] = OrderedDict()
        """The tokens of each block, the one to be evicted next first."""
        self._tokens = 0.0
        self._changes: deque[tuple[int, bool]] = deque(maxlen=MOST_CHANGES)
        self._count = 0

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def used(self, chain: Sequence[int], tokens: int) -> None:
        """A request of so many tokens, prompt and answer, has ended."""
        if not chain:
            return
        whole = LENGTHS[len(chain) - 1]
        for i in range(len(chain) - 1, -1, -1):  # the longest beginning is evicted first
            block, begin = chain[i], LENGTHS[i - 1] if i else 0
            if block in self._blocks:
                self._blocks.move_to_end(block)
                continue
            self._blocks[block] = share = tokens * (LENGTHS[i] - begin) / whole
            self._tokens += share
            self._change(block, True)
        while self._tokens > self._capacity or len(self._blocks) > MOST_HELD:
            block, share = self._blocks.popitem(last=False)
            self._tokens -= share
            self._change(block, False)

    def since(self, version: str) -> tuple[str, list[int], list[int]]:
        """What is held and no longer held since a version, and the version now. For a version that is not known, or too
        long ago, all that is held, the latest."""
        server, _, number = version.partition(".")
        now = f"{self._server}.{self._count}"
        behind = self._count - int(number) if server == self._server and number.isdecimal() else -1
        if not 0 <= behind <= len(self._changes):
            return now, [*islice(reversed(self._blocks), MOST_CHANGES)], []
        last = dict(islice(self._changes, len(self._changes) - behind, None))
        return now, [block for block, held in last.items() if held], [b for b, held in last.items() if not held]

    def _change(self, block: int, held: bool) -> None:
        self._changes.append((block, held))
        self._count += 1
