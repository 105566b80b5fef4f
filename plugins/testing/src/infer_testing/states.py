"""States as random sequences leave and find them: a sequence's state stands for its tokens up to a position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from infer.contracts.states import StateSpec
from infer_testing.suite import Violation

SPECS = [StateSpec(((3, 4), (2, 5)), (torch.float32, torch.float32)), StateSpec(((6,),), (torch.float32,))]
"""Of two recurrent layers."""
PRIME = 999_983


class States:
    """What the states of a pool should hold, and who has left what."""

    def __init__(self, specs: Sequence[StateSpec]) -> None:
        self.specs = specs
        self.left: dict[float, str] = {}

    def carry(self, view: Any, parts: Sequence[tuple[Any, int, int]], rehearsed: bool = False) -> None:
        """One pass of all recurrent layers. Each part is a sequence (a ``Life``) that is extended by positions
        [start, start + n); those that repeat are padding. If ``rehearsed``, the pass is tried before."""
        if rehearsed and self.specs:
            with view.rehearsal():
                for layer in range(len(self.specs)):
                    tensors, rows = view.state(layer)
                    for part in tensors:
                        part[rows.save_T[rows.save_T >= 0]] = -1.0
        for layer, spec in enumerate(self.specs):
            self._carry(view, layer, len(spec.shapes), parts)

    def _carry(self, view: Any, layer: int, count: int, parts: Sequence[tuple[Any, int, int]]) -> None:
        tensors, rows = view.state(layer)
        offsets, reads, saves = rows.offsets_B1.tolist(), rows.read_B.tolist(), rows.save_T.tolist()
        if len(tensors) != count or offsets[-1] != len(saves) or not len(offsets) - 1 == len(reads) == len(parts):
            raise Violation(
                f"state({layer}) has {len(tensors)} tensors, {len(offsets)} offsets, {len(reads)} rows to read and "
                f"{len(saves)} to save, for {count} tensors and {len(parts)} sequences"
            )
        real = {id(life): b for b, (life, _, _) in reversed(list(enumerate(parts)))}
        for life, start, _ in (parts[b] for b in real.values()):
            for part in tensors:
                self._found(part[reads[real[id(life)]]], layer, life, start)
        saved: dict[int, int] = {}
        for b in real.values():
            life, start, n = parts[b]
            for i, row in enumerate(saves[offsets[b] : offsets[b + 1]]):
                if row >= 0:
                    others = [parts[c][0].name for c in real.values() if reads[c] == row and c != b]
                    if others or row in saved:
                        raise Violation(f"one row is saved for {life.name} and for, or read by, another sequence")
                    saved[row] = b
                    mark = self._mark(layer, life, start + i)
                    self.left[mark] = f"what {life.name} has left at position {start + i} in layer {layer}"
                    for part in tensors:
                        part[row] = mark
                elif i == n - 1:
                    raise Violation(f"the state of {life.name} after its last token is not saved")

    def _mark(self, layer: int, life: Any, position: int) -> float:
        return float((life.key(position) * 31 + layer) % PRIME + 1)

    def _found(self, found: Tensor, layer: int, life: Any, start: int) -> None:
        wanted = self._mark(layer, life, start - 1) if start else 0.0
        if (found == wanted).all():
            return
        value = float(found.flatten()[0])
        what = self.left.get(value, "what a rehearsal has left" if value < 0 else "zeros" if not value else "others'")
        raise Violation(
            f"in recurrent layer {layer}, {life.name} (slot {life.slot}) goes on at position {start} with {what}, not "
            "with the state that its own tokens leave"
        )
