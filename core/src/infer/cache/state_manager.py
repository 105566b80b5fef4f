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
    """Each slot has rows of its own: one that passes update in place, and one more for each of ``max_drafts``, so that
    as many of an extension's last tokens can be taken back. A subclass may add rows that keep a state for others."""

    def __init__(self, num_slots: int, max_drafts: int = 0, num_snapshots: int = 0) -> None:
        self.num_rows = OTHERS + num_slots * (1 + max_drafts) + num_snapshots
        self.max_drafts = max_drafts
        self._each = 1 + max_drafts
        self._home_S: Ints64 = OTHERS + self._each * np.arange(num_slots)
        """The row of its own that the last token of each slot's next extension saves."""
        self._row_S: Ints64 = np.full(num_slots, ZEROS)
        """The row with each slot's state."""
        self._recent: dict[int, tuple[int, list[int]]] = {}
        """By slot: its length, and the rows with the states after its last tokens, the oldest first."""

    def open(self, slot: int, row: int = ZEROS) -> None:
        """The slot is handed out, and its sequence begins with the state in that row."""
        self._row_S[slot] = row
        self._recent.pop(slot, None)

    def close(self, slot: int) -> None:
        """The slot is taken back."""

    def extend(
        self, slots: Sequence[int] | Slots, starts: Sequence[int] | Ints, lens: Sequence[int] | Ints
    ) -> tuple[Ints64, Ints64]:
        """``StateRows.read_B`` and ``save_T`` of a pass that extends each slot by positions [start, start + length)."""
        slots_B = np.asarray(slots)
        ends_B = np.cumsum(lens)
        read_B, home_B = self._row_S[slots_B], self._home_S[slots_B]
        save_T: Ints64 = np.full(ends_B[-1], -1)
        save_T[ends_B - 1] = home_B
        self._row_S[slots_B] = home_B
        if self._each > 1:
            counts = (np.asarray(x).tolist() for x in (starts, lens))
            for slot, start, length, end, home in zip(
                slots_B.tolist(), *counts, ends_B.tolist(), home_B.tolist(), strict=True
            ):
                rows = [home]
                if length > 1:
                    own = OTHERS + slot * self._each
                    rows = [row for row in range(own, own + self._each) if row != home][: length - 1]
                    save_T[end - 1 - len(rows) : end - 1] = rows
                    rows.append(home)
                self._recent[slot] = start + length, rows
        return read_B, save_T

    def row(self, slot: int) -> int:
        """The row with the slot's state, once all passes that extend it have been launched."""
        return int(self._row_S[slot])

    def least(self, slot: int) -> int:
        """The fewest positions, besides none at all, that the slot can be truncated to."""
        length, rows = self._recent.get(slot, (0, [0]))
        return length - len(rows) + 1

    def truncate(self, slot: int, num_tokens: int) -> None:
        """Go back to the state after the first ``num_tokens`` positions, of which there are more."""
        if num_tokens:
            length, rows = self._recent[slot]
            self._recent[slot] = num_tokens, rows[: num_tokens - length]
            self._row_S[slot] = row = rows[num_tokens - length - 1]
            if OTHERS <= row - slot * self._each < OTHERS + self._each:
                self._home_S[slot] = row
        else:
            self.open(slot)
