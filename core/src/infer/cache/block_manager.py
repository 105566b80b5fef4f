"""A cache pool's block manager: which blocks each slot has, and how many positions it holds. Integers only, so that a
pool can be tested, simulated and replaced without a tensor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np

from infer.cache.arrays import Bools, Ints, Slots
from infer.cache.state_manager import StateManager
from infer.contracts.cache import Allocation

Table_co = TypeVar("Table_co", covariant=True)


class BlockManagerProtocol(Protocol[Table_co]):
    """What ``Pool`` needs from a block manager. It and the storage agree on the type of ``Table``: one array of blocks
    for all layers, for example, or one per kind of layer."""

    def allocate(self, token_ids: Sequence[int]) -> Allocation | None:
        """Allocate a slot with room for these tokens; None, with nothing changed, if there is no room now."""

    def grow(self, slot: int, num_tokens: int) -> bool:
        """Make room for ``num_tokens`` positions in all; False, with nothing changed, if there is no room now."""

    def free(self, slot: int) -> None: ...

    def free_tokens(self) -> int:
        """How many positions can still be allocated."""

    def length(self, slot: int) -> int:
        """How many positions of the slot are booked as written. Raises ValueError if the slot is not allocated."""

    def extend(self, slots: Sequence[int] | Slots, starts: Sequence[int] | Ints, lens: Sequence[int] | Ints) -> int:
        """Book positions [start, start + length) of each slot as written, and return the greatest length afterward.

        Raises ValueError, with nothing booked, if a slot occurs twice, a start is not the slot's length, or a slot has
        too little room.
        """

    def advance(self, slots_B: Slots) -> tuple[Ints, int]:
        """``extend`` each slot by its next position. Returns these positions and the greatest length afterward."""

    def table(self, slots: Sequence[int] | Slots, num_tokens: int) -> Table_co:
        """Where the first ``num_tokens`` positions of the slots are stored."""


@runtime_checkable
class SharingBlockManager(Protocol):
    """The block manager of a pool in which sequences may share the blocks of a common prefix."""

    def allocate(self, token_ids: Sequence[int], *, reuse: bool = True, salt: str = "") -> Allocation | None:
        """As ``CachePoolProtocol.allocate``."""

    def commit(self, slot: int, token_ids: Sequence[int], num_computed: int) -> None:
        """As ``CachePoolProtocol.commit``."""


class BlockManager(ABC):
    """A block manager with one block table for all layers, or with several: per slot a row of blocks in each, a length
    and a room, each in one array.

    A subclass decides which blocks a slot has: it has ``allocate``, ``grow``, ``free`` and ``free_tokens``. It calls
    ``_open`` to hand out a slot (as long as ``_free_slots`` has one), ``_place`` to give the slot blocks, and
    ``_close`` to take the slot back. These names are a part of the contract, though only for subclasses.
    """

    def __init__(self, num_slots: int, max_seq_len: int, block_size: int, num_tables: int = 1) -> None:
        self.block_size = block_size
        self.max_seq_len = max_seq_len
        shape = num_tables, num_slots, -(-max_seq_len // block_size)
        self._tables_USP: Ints = np.zeros(shape, dtype=np.int32)
        self._table_SP: Ints = self._tables_USP[0]
        """The first table, or the only one."""
        self._lengths_S: Ints = np.full(num_slots, -1, dtype=np.int32)
        """-1 if the slot is not allocated."""
        self._room_S: Ints = np.full(num_slots, -1, dtype=np.int32)
        """How many positions the slot has blocks for; -1 if the slot is not allocated."""
        self.room: Sequence[int] = self._room_S.data
        """The same numbers as Python's integers, which numpy takes several times as long to make."""
        self.state_manager: StateManager | None = None
        """For a model with recurrent layers, which row holds each slot's state; the subclass sets it."""
        self._free_slots = list(reversed(range(num_slots)))
        self._distinct_B: Slots | None = None
        """The slots that the last ``advance`` found to differ from each other. It often gets them again, since a pool's
        array of slots stays the same while the same sequences decode."""

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

    def extend(self, slots: Sequence[int] | Slots, starts: Sequence[int] | Ints, lens: Sequence[int] | Ints) -> int:
        starts_B, lens_B = np.asarray(starts, dtype=np.int32), np.asarray(lens, dtype=np.int32)
        slots_B, ends_B = np.asarray(slots), starts_B + lens_B
        if len(set(slots_B.tolist())) < len(slots_B):
            raise ValueError(f"slots {slots_B.tolist()} repeat; a step extends a slot once")
        if self._wrong(slots_B, starts_B, ends_B).any():
            for b in (ends_B > self._room_S[slots_B]).nonzero()[0]:
                self.reach(int(slots_B[b]), int(ends_B[b]))
            if (wrong_B := self._wrong(slots_B, starts_B, ends_B)).any():
                b = int(wrong_B.argmax())
                slot, start, room = int(slots_B[b]), int(starts_B[b]), int(self._room_S[slots_B[b]])
                if start != self._lengths_S[slot] or start < 0:
                    raise ValueError(
                        f"slot {slot} holds {self.length(slot)} positions; a chunk cannot start at {start}"
                    )
                raise ValueError(f"slot {slot} has room for {room} positions, not for {start}+{int(lens_B[b])}")
        self._lengths_S[slots_B] = ends_B
        return int(ends_B.max())

    def _wrong(self, slots_B: Slots, starts_B: Ints, ends_B: Ints) -> Bools:
        """Which slots cannot be extended so. One that is not allocated has the length -1, and room for -1 positions."""
        wrong_B: Bools = (
            (starts_B != self._lengths_S[slots_B]) | (ends_B > self._room_S[slots_B]) | (ends_B <= starts_B)
        )
        return wrong_B

    def advance(self, slots_B: Slots) -> tuple[Ints, int]:
        starts_B = self._lengths_S[slots_B]
        ends_B = starts_B + 1
        if np.count_nonzero(ends_B > self._room_S[slots_B]) or (
            slots_B is not self._distinct_B and len(set(slots_B.tolist())) < len(slots_B)
        ):
            self.extend(slots_B, starts_B, np.ones_like(starts_B))  # raises, and says why, unless they ``reach``
        self._distinct_B = slots_B
        self._lengths_S[slots_B] = ends_B
        return starts_B, int(ends_B[ends_B.argmax()])

    def table(self, slots: Sequence[int] | Slots, num_tokens: int) -> Ints:
        """Blocks, [B, P], or [U, B, P] of U tables."""
        tables = self._table_SP if len(self._tables_USP) == 1 else self._tables_USP
        return tables[..., slots, : -(-num_tokens // self.block_size)]

    def truncate(self, slot: int, num_tokens: int) -> None:
        """Shorten the slot; it keeps its blocks."""
        length, least, states = self.length(slot), self.least_tokens(slot), self.state_manager
        if states is not None and (num_tokens or least):
            least = max(least, states.least(slot))
        if not least <= num_tokens <= length:
            raise ValueError(f"slot {slot} can be cut to {least}..{length} positions, not to {num_tokens}")
        if states is not None and num_tokens < length:
            states.truncate(slot, num_tokens)
        self._lengths_S[slot] = num_tokens

    def least_tokens(self, slot: int) -> int:
        """How many of the slot's leading positions cannot be taken back, because other sequences may read them, too, or
        because what the position after fewer would read is gone."""
        return 0

    def reach(self, slot: int, end: int) -> bool:
        """Called if the slot is to be extended to ``end``, for which it has too few blocks. A subclass that gives a
        slot its blocks bit by bit gives it more; False if it cannot."""
        return False

    def _open(self, num_tokens: int) -> int:
        """Hand out a free slot that already holds ``num_tokens`` positions."""
        slot = self._free_slots.pop()
        self._lengths_S[slot] = num_tokens
        if self.state_manager is not None:
            self.state_manager.open(slot)
        return slot

    def _place(self, slot: int, blocks: Sequence[int], begin: int = 0, table: int = 0) -> None:
        """Set the slot's blocks in a table. Those before index ``begin`` have not changed. The slot has room for as
        many positions as the blocks that were placed last, so all tables get equally many."""
        self._tables_USP[table, slot, begin : len(blocks)] = blocks[begin:]
        self._room_S[slot] = len(blocks) * self.block_size

    def _close(self, slot: int) -> None:
        """Take a slot back. Raises ValueError if it is not allocated."""
        self.length(slot)
        if self.state_manager is not None:
            self.state_manager.close(slot)
        self._lengths_S[slot] = self._room_S[slot] = -1
        self._free_slots.append(slot)
