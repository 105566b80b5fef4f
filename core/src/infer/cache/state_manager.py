"""Which row of the states' tensors holds each sequence's state. Integers only, as in the block manager."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from infer.cache.arrays import Ints, Ints64, Slots

ZEROS = 0
"""The row of a sequence's state before its first token. Nobody saves it."""
SPARE = 1
"""The row that is saved where nobody is to read what was."""
OTHERS = 2
"""How many rows belong to no slot."""


class StateManager:
    """Each slot has a row of its own, which a pass updates in place. A subclass may add rows that keep a state for
    others: a sequence reads the row that ``open`` gives it, and saves its own."""

    def __init__(self, num_slots: int, num_snapshots: int = 0) -> None:
        self.num_rows = OTHERS + num_slots + num_snapshots
        self._own_S: Ints64 = np.arange(OTHERS, OTHERS + num_slots)
        self._row_S: Ints64 = np.full(num_slots, ZEROS)
        """The row with each slot's state."""

    def open(self, slot: int, row: int = ZEROS) -> None:
        """The slot is handed out, and its sequence begins with the state in that row."""
        self._row_S[slot] = row

    def close(self, slot: int) -> None:
        """The slot is taken back."""

    def extend(
        self, slots: Sequence[int] | Slots, starts: Sequence[int] | Ints, lens: Sequence[int] | Ints
    ) -> tuple[Ints64, Ints64]:
        """``StateRows.read_B`` and ``save_T`` of a pass that extends each slot by positions [start, start + length)."""
        slots_B = np.asarray(slots)
        ends_B = np.cumsum(lens)
        read_B, own_B = self._row_S[slots_B], self._own_S[slots_B]
        save_T: Ints64 = np.full(ends_B[-1], -1)
        save_T[ends_B - 1] = own_B
        self._row_S[slots_B] = own_B
        return read_B, save_T
