"""Isolation: which requests end when a pass raises. The others are computed again, and the culprits fail alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from infer.contracts.scheduler import Sequence, Work, Works
from infer.errors import InferError, one_line

STRIKES = 3
"""The engine ends after this many faults in a row that every request of the pass has when it runs alone."""
CALM = 256
"""After this many passes without a fault, a pass may have twice as many tokens as before, if memory was short."""


@dataclass(eq=False, slots=True)
class _Fault:
    """A pass that raised, while it is not known whose fault it is."""

    unknown: int
    """How many of its sequences have neither passed nor failed since."""
    failed: int = 0
    innocent: bool = False
    """Whether any of them has passed."""


@dataclass(eq=False, slots=True)
class _Suspects:
    """Sequences that run in passes of their own until each has computed what the fault was in."""

    fault: _Fault
    until: dict[Sequence, int]
    """Up to which position each sequence is a suspect."""
    most: int | None = None
    """The most tokens of a sequence that ran out of memory alone."""


class Isolation:
    """Finds the culprits of passes that raise, by bisection: the sequences of such a pass give up their slots, wait,
    and are computed again in two passes, and so on. One that raises alone is a culprit.

    If memory runs out, later passes have fewer tokens.
    """

    def __init__(self) -> None:
        self._suspects: dict[Sequence, _Suspects] = {}
        self._most: int | None = None
        """The most tokens of a pass, since memory ran out."""
        self._calm = 0
        self._strikes = 0

    @property
    def active(self) -> bool:
        """Whether passes have to be split. Each is then read before the next is launched, and has no drafts."""
        return bool(self._suspects) or self._most is not None

    def split(self, passes: Iterable[Seq[Work]]) -> list[Seq[Work]]:
        """The passes, with those of suspects apart, and none with more tokens than memory holds."""
        return [part for works in passes for apart in self._apart(works) for part in self._fitting(apart)]

    def _apart(self, works: Iterable[Work]) -> Iterable[list[Work]]:
        parts: defaultdict[_Suspects | None, list[Work]] = defaultdict(list)
        for work in works:
            suspects = self._suspects.get(work.sequence)
            if suspects is not None and suspects.most is not None:
                work = _cut(work, suspects.most)
            parts[suspects].append(work)
        return parts.values()

    def _fitting(self, works: list[Work]) -> list[list[Work]]:
        if self._most is None:
            return [works]
        parts: list[list[Work]] = [[]]
        taken = 0
        for work in works:
            work = _cut(work, self._most)
            if taken + work.length > self._most and parts[-1]:
                parts.append([])
                taken = 0
            parts[-1].append(work)
            taken += work.length
        return parts

    def passed(self, works: Works) -> None:
        """A pass has been launched without a fault."""
        if self._strikes and any(works.draws):
            self._strikes = 0
        if self._most is not None:
            self._calm += 1
            if self._calm == CALM:
                self._most, self._calm = self._most * 2, 0
                if self._most > 1 << 20:
                    self._most = None
        if not self._suspects:
            return
        for work in works:
            suspects = self._suspects.get(work.sequence)
            if suspects is not None and work.end >= suspects.until[work.sequence]:
                suspects.fault.innocent = True
                self._forget(work.sequence)

    def failed(self, works: Works, error: BaseException) -> list[Sequence]:
        """A pass has raised. Returns the culprits, which have to end; the other sequences have to be computed again.
        Raises InferError if this happens again and again to everybody."""
        sequences, tokens = [*works.sequences], sum(works.lens)
        known = self._suspects.get(sequences[0])  # a pass has suspects of one kind only
        fault = _Fault(len(sequences)) if known is None else known.fault
        until = {work.sequence: work.end for work in works}
        if known is not None:
            until = {sequence: max(end, known.until[sequence]) for sequence, end in until.items()}
        most: int | None = None
        if _no_memory(error):
            self._calm = 0
            if len(sequences) > 1:
                self._most = tokens // 2
            elif tokens > 1:
                most = tokens // 2
            else:
                self._most = None  # it was this request that needs too much, and not the number of tokens
        if len(sequences) == 1 and most is None:
            fault.failed += 1
            self._suspects[sequences[0]] = _Suspects(fault, until)
            self._forget(sequences[0])
            if not fault.unknown and not fault.innocent and fault.failed > 1:
                self._strikes += 1
                if self._strikes == STRIKES:
                    raise InferError(
                        f"{STRIKES} passes in a row failed, and then each of their requests alone: {one_line(error)}"
                    ) from error
            return sequences
        middle = (len(sequences) + 1) // 2
        for half in (sequences[:middle], sequences[middle:]):
            suspects = _Suspects(fault, {sequence: until[sequence] for sequence in half}, most)
            self._suspects.update(dict.fromkeys(half, suspects))
        return []

    def end(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        if sequence in self._suspects:
            self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        self._suspects.pop(sequence).fault.unknown -= 1


def _cut(work: Work, most: int) -> Work:
    return work if work.length <= most else work.sequence.extend(most)


def _no_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError)
