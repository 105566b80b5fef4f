"""Isolation: which requests end when a pass raises. The others are computed again, and the culprits fail alone."""

from __future__ import annotations

import errno
from collections import defaultdict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from infer.contracts.scheduler import Sequence, Work, Works
from infer.errors import InferError, one_line

STRIKES = 3
"""After so many requests that have failed alone, passes of no client tell whether any would."""
CALM = 256
"""After this many passes without a fault, a limit of passes is doubled, or lifted if it has split none of them."""
UNLIMITED = 1 << 62


@dataclass(eq=False, slots=True)
class _Fault:
    """A pass that raised, while it is not known whose fault it is."""

    unknown: int
    """How many of its sequences have neither passed nor failed since."""
    failed: int = 0
    together: int = UNLIMITED
    """The fewest of them that have raised together, other than for lack of memory."""


@dataclass(eq=False, slots=True)
class _Suspects:
    """Sequences that run in passes of their own until each has computed what the fault was in."""

    fault: _Fault
    until: dict[Sequence, int]
    """Up to which position each sequence is a suspect."""
    most: int | None = None
    """The most tokens of a sequence that ran out of memory alone."""


@dataclass(eq=False, slots=True)
class _Limit:
    """What a pass may have at most, because one with more has raised."""

    tokens: int = UNLIMITED
    sequences: int = UNLIMITED
    calm: int = 0
    """How many passes have not raised since the limit was set or doubled."""
    used: bool = False
    """Whether it has split any pass since."""

    def split(self, works: Iterable[Work]) -> list[list[Work]]:
        parts: list[list[Work]] = [[]]
        taken = 0
        for work in works:
            part = _cut(work, self.tokens)
            if parts[-1] and (taken + part.length > self.tokens or len(parts[-1]) == self.sequences):
                parts.append([])
                taken = 0
            parts[-1].append(part)
            taken += part.length
            self.used = self.used or part is not work or len(parts) > 1
        return parts

    def passed(self) -> _Limit | None:
        """The limit of the next pass, after one that has not raised."""
        self.calm += 1
        if self.calm < CALM:
            return self
        return _Limit(self.tokens * 2, self.sequences * 2) if self.used else None


class Isolation:
    """Finds the culprits of passes that raise, by bisection: the sequences of such a pass give up their slots, wait,
    and are computed again in two passes, and so on. One that raises alone is a culprit.

    If memory runs out, later passes have fewer tokens. If sequences raise only together, later passes have fewer
    sequences.
    """

    def __init__(self) -> None:
        self._suspects: dict[Sequence, _Suspects] = {}
        self._limit: _Limit | None = None
        self._strikes = 0

    @property
    def active(self) -> bool:
        """Whether passes have to be split. Each is then read before the next is launched, and has no drafts."""
        return bool(self._suspects) or self._limit is not None

    def split(self, passes: Iterable[Seq[Work]]) -> list[Seq[Work]]:
        """The passes, with those of suspects apart, and none above the limit."""
        limit = self._limit
        apart = (part for works in passes for part in self._apart(works))
        return [*apart] if limit is None else [part for works in apart for part in limit.split(works)]

    def _apart(self, works: Iterable[Work]) -> Iterable[list[Work]]:
        parts: defaultdict[_Suspects | None, list[Work]] = defaultdict(list)
        for work in works:
            suspects = self._suspects.get(work.sequence)
            if suspects is not None and suspects.most is not None:
                work = _cut(work, suspects.most)
            parts[suspects].append(work)
        return parts.values()

    def passed(self, works: Works) -> None:
        """A pass has been launched without a fault."""
        if self._limit is not None:
            self._limit = self._limit.passed()
        if not self._suspects:
            return
        for work in works:
            suspects = self._suspects.get(work.sequence)
            if suspects is not None and work.end >= suspects.until[work.sequence]:
                fault = suspects.fault
                self._forget(work.sequence)
                if not fault.unknown and not fault.failed and fault.together < UNLIMITED:
                    self._lower(sequences=fault.together // 2)  # they raise only together

    def failed(self, works: Works, error: BaseException) -> list[Sequence]:
        """A pass has raised. Returns the culprits, which have to end; the other sequences have to be computed again."""
        sequences, tokens = [*works.sequences], sum(works.lens)
        known = self._suspects.get(sequences[0])  # a pass has suspects of one kind only
        fault = _Fault(len(sequences)) if known is None else known.fault
        until = {work.sequence: work.end for work in works}
        if known is not None:
            until = {sequence: max(end, known.until[sequence]) for sequence, end in until.items()}
        most: int | None = None
        if _no_memory(error):
            if len(sequences) > 1:
                self._lower(tokens=tokens // 2)
            elif tokens > 1:
                most = tokens // 2
            else:
                self._limit = None  # it was this request that needs too much, and not the number of tokens
        elif len(sequences) > 1:
            fault.together = min(fault.together, len(sequences))
        if len(sequences) == 1 and most is None:
            fault.failed += 1
            self._suspects[sequences[0]] = _Suspects(fault, until)
            self._forget(sequences[0])
            self._strikes += 1
            return sequences
        middle = (len(sequences) + 1) // 2
        for half in (sequences[:middle], sequences[middle:]):
            suspects = _Suspects(fault, {sequence: until[sequence] for sequence in half}, most)
            self._suspects.update(dict.fromkeys(half, suspects))
        return []

    def doubt(self, probe: Callable[[], bool]) -> None:
        """Culprits have ended. After every STRIKES of them, ``probe`` computes passes of no client: it raises what they
        raise, and returns False if there is no room for them. Raises InferError if they fail, too."""
        if self._strikes < STRIKES:
            return
        try:
            tried = probe()
        except Exception as error:
            raise InferError(
                f"{self._strikes} requests failed, each alone, and so does a pass of none: {one_line(error)}"
            ) from error
        if tried:
            self._strikes = 0

    def end(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        if sequence in self._suspects:
            self._forget(sequence)

    def _lower(self, tokens: int = UNLIMITED, sequences: int = UNLIMITED) -> None:
        limit = self._limit or _Limit()
        self._limit = _Limit(min(tokens, limit.tokens), min(sequences, limit.sequences))

    def _forget(self, sequence: Sequence) -> None:
        self._suspects.pop(sequence).fault.unknown -= 1


def _cut(work: Work, most: int) -> Work:
    return work if work.length <= most else work.sequence.extend(most)


def _no_memory(error: BaseException) -> bool:
    if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):  # torch, on a CPU
        return True
    no_pages = isinstance(error, OSError) and error.errno == errno.ENOMEM  # mmap
    return no_pages or isinstance(error, MemoryError | torch.OutOfMemoryError)
