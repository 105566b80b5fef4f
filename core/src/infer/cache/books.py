"""A cache pool's books: which blocks each slot has, and how many positions it holds. Integers only, so that a pool can
be tested, simulated and replaced without a tensor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np

from infer.contracts.protocols import Allocation

Ints = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
Slots = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Table_co = TypeVar("Table_co", covariant=True)


class BooksProtocol(Protocol[Table_co]):
    """What ``Pool`` asks of books. ``Table`` is theirs and their storage's to choose: one array of blocks for all
    layers, or one for each kind of layer."""

    def allocate(self, token_ids: Sequence[int]) -> Allocation | None:
        """Room for so many tokens, or None, having done nothing, when there is none now."""

    def grow(self, slot: int, num_tokens: int) -> bool:
        """Make room for ``num_tokens`` positions in all; False, having done nothing, when there is none now."""

    def free(self, slot: int) -> None: ...

    def free_tokens(self) -> int:
        """Positions that could still be allocated."""

    def length(self, slot: int) -> int:
        """Positions of the slot that have been booked as written. ValueError for a slot that is not allocated."""

    def lengths(self, slots: Sequence[int] | Slots) -> Ints:
        """The same of many."""

    def extend(self, slots: Sequence[int] | Slots, starts: Sequence[int] | Ints, lens: Sequence[int] | Ints) -> int:
        """Book positions [start, start + length) of each slot as written; the longest length afterwards.

        A slot named twice, a start other than its length, or more positions than it has room for is a ValueError, and
        then nothing is booked.
        """

    def table(self, slots: Sequence[int] | Slots, num_tokens: int) -> Table_co:
        """Where the leading ``num_tokens`` positions of the slots are."""


@runtime_checkable
class SharingBooks(Protocol):
    """Books of a pool whose sequences may share what their tokens have in common."""

    def allocate(self, token_ids: Sequence[int], *, reuse: bool = True, salt: str = "") -> Allocation | None:
        """As ``CachePoolProtocol.allocate``."""

    def commit(self, slot: int, token_ids: Sequence[int], num_computed: int) -> None:
        """As ``CachePoolProtocol.commit``."""


@runtime_checkable
class TruncatingBooks(Protocol):
    """Books that can take positions back: what drafts need that turn out wrong."""

    def truncate(self, slot: int, num_tokens: int) -> None:
        """The slot holds its leading ``num_tokens`` positions only. ValueError for more than it holds, or for fewer
        than it may share with others."""


class BlockBooks(ABC):
    """One table of blocks for all layers: each slot's row, its length and its room, an array for each.

    A subclass says which blocks a slot has: it calls ``_open`` when it hands out a slot, ``_place`` when it gives the
    slot blocks, and ``_close``.
    """

    def __init__(self, num_slots: int, max_seq_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.max_seq_len = max_seq_len
        self._table_SP: Ints = np.zeros((num_slots, -(-max_seq_len // block_size)), dtype=np.int32)
        self._lengths_S: Ints = np.full(num_slots, -1, dtype=np.int32)
        """-1 where a slot is not allocated."""
        self._room_S: Ints = np.full(num_slots, -1, dtype=np.int32)
        """Positions that a slot has blocks for; -1 where it is not allocated."""
        self._free_slots = list(reversed(range(num_slots)))

    @abstractmethod
    def allocate(self, token_ids: Sequence[int]) -> Allocation | None: ...

    @abstractmethod
    def grow(self, slot: int, num_tokens: int) -> bool: ...

    @abstractmethod
    def free(self, slot: int) -> None: ...

    @abstractmethod
    def free_tokens(self) -> int: ...

    def length(self, slot: int) -> int:
        if self._lengths_S[slot] < 0:
            raise ValueError(f"slot {slot} is not allocated")
        return int(self._lengths_S[slot])

    def lengths(self, slots: Sequence[int] | Slots) -> Ints:
        return self._lengths_S[slots]

    def extend(self, slots: Sequence[int] | Slots, starts: Sequence[int] | Ints, lens: Sequence[int] | Ints) -> int:
        starts_B, lens_B = np.asarray(starts, dtype=np.int32), np.asarray(lens, dtype=np.int32)
        slots_B = np.asarray(slots)
        if len(set(slots_B.tolist())) < len(slots_B):
            raise ValueError(f"slots {slots_B.tolist()} repeat; a step extends a slot once")
        ends_B, lengths_B, room_B = starts_B + lens_B, self._lengths_S[slots_B], self._room_S[slots_B]
        wrong = (starts_B != lengths_B) | (starts_B < 0) | (lens_B < 1) | (ends_B > room_B)
        if wrong.any():
            b = int(wrong.argmax())
            slot, start, room = int(slots_B[b]), int(starts_B[b]), int(room_B[b])
            if start != lengths_B[b] or start < 0:
                raise ValueError(f"slot {slot} holds {self.length(slot)} positions; a chunk cannot start at {start}")
            raise ValueError(f"slot {slot} has room for {room} positions, not for {start}+{int(lens_B[b])}")
        self._lengths_S[slots_B] = ends_B
        return int(ends_B.max())

    def table(self, slots: Sequence[int] | Slots, num_tokens: int) -> Ints:
        """[B, P]."""
        return self._table_SP[slots, : -(-num_tokens // self.block_size)]

    def truncate(self, slot: int, num_tokens: int) -> None:
        """The slot keeps its blocks."""
        length, least = self.length(slot), self.shared_tokens(slot)
        if not least <= num_tokens <= length:
            raise ValueError(f"slot {slot} can be cut to {least}..{length} positions, not to {num_tokens}")
        self._lengths_S[slot] = num_tokens

    def shared_tokens(self, slot: int) -> int:
        """Leading positions of a slot that others may read, too."""
        return 0

    def _open(self, num_tokens: int) -> int:
        """The next free slot, which holds so many positions already."""
        slot = self._free_slots.pop()
        self._lengths_S[slot] = num_tokens
        return slot

    def _place(self, slot: int, blocks: Sequence[int], begin: int = 0) -> None:
        """The slot has these blocks; those before ``begin`` are as they were."""
        self._table_SP[slot, begin : len(blocks)] = blocks[begin:]
        self._room_S[slot] = len(blocks) * self.block_size

    def _close(self, slot: int) -> None:
        self.length(slot)
        self._lengths_S[slot] = self._room_S[slot] = -1
        self._free_slots.append(slot)
