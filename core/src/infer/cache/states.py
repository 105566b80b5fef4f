"""The states of recurrent layers: their tensors, and a pass's view of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from infer.cache.arrays import Ints, Ints64, Slots
from infer.cache.state_manager import SPARE, ZEROS, StateManager
from infer.contracts.states import State, StateRows, StateSpec
from infer.device import FixedTensor, upload, zeros


class PassStates:
    """What one pass reads and saves of the states."""

    def __init__(self, storage: StateStorage, rows: StateRows) -> None:
        self.storage = storage
        self.rows = rows

    def state(self, layer: int) -> State:
        """``StatefulView.state``."""
        return State(self.storage.parts[layer], self.rows)

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """``StatefulView.rehearsal``."""
        save_T = self.rows.save_T
        kept_T = save_T.clone()
        save_T.masked_fill_(save_T >= 0, SPARE)
        try:
            yield
        finally:
            save_T.copy_(kept_T)


class StateStorage:
    """For each recurrent layer, a tensor [rows, *shape] of each of its parts; zeros at first."""

    def __init__(
        self, specs: Sequence[StateSpec], manager: StateManager, max_batch_size: int, device: torch.device
    ) -> None:
        self.manager = manager
        self.max_drafts = manager.max_drafts
        self.device = device
        self.parts = [
            tuple(
                zeros((manager.num_rows, *shape), dtype, device)
                for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
            )
            for spec in specs
        ]
        self._offsets_S1 = torch.arange(max_batch_size + 1, dtype=torch.int32, device=device)
        self._read_S, self._save_S = (
            FixedTensor(torch.zeros(max_batch_size, dtype=torch.int64, device=device)) for _ in range(2)
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return sum(part.nbytes for parts in self.parts for part in parts)

    def view(
        self, slots: Sequence[int] | Slots, starts: Sequence[int] | Ints, lens: Sequence[int] | Ints
    ) -> PassStates:
        """Book a pass that extends each slot by positions [start, start + length)."""
        read_B, save_T = self.manager.extend(slots, starts, lens)
        offsets_B1 = np.zeros(len(read_B) + 1, dtype=np.int32)
        np.cumsum(lens, out=offsets_B1[1:])
        return PassStates(self, StateRows(*(upload(x, self.device) for x in (offsets_B1, read_B, save_T))))

    def fixed_view(self, slots_B: Slots, starts_B: Ints, rows: int) -> PassStates:
        """Book a pass that extends each slot by one position, on tensors that keep their addresses. It is filled up to
        ``rows`` rows with some that read zeros, and save what nobody reads."""
        read_B, save_B = self.manager.extend(slots_B, starts_B, np.ones_like(starts_B))
        for fixed, values_B, filler in ((self._read_S, read_B, ZEROS), (self._save_S, save_B, SPARE)):
            padded: Ints64 = np.full(rows, filler)
            padded[: len(values_B)] = values_B
            fixed.write(padded)
        return PassStates(
            self,
            StateRows(self._offsets_S1[: rows + 1], self._read_S.tensor[:rows], self._save_S.tensor[:rows]),
        )
