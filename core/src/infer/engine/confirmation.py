"""A verdict on exactness that was kept from an earlier start, and its confirmation while nobody waits."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

Steps = Generator[None, None, list[str]]
"""A check that yields after each piece of its work, and returns a phrase for whatever varies."""


@dataclass
class Verdict:
    """What the check of exactness has found."""

    faults: list[str]
    """A phrase for whatever varies."""

    @property
    def exact(self) -> bool:
        return not self.faults


class Confirmation:
    """A check that runs piece by piece while an engine has nothing to compute. ``settled`` is told what it has found;
    an engine that has work again in the middle begins anew the next time."""

    def __init__(self, begin: Callable[[], Steps], settled: Callable[[list[str]], None]) -> None:
        self._begin, self._settled = begin, settled
        self._steps: Steps | None = None
        self.left = True
        """Whether something is left to do."""

    def rest(self) -> bool:
        """Do a piece; False if nothing is left."""
        if self._steps is None:
            self._steps = self._begin()
        try:
            next(self._steps)
        except StopIteration as end:
            self.left, self._steps = False, None
            self._settled(end.value)
        return self.left

    def interrupt(self) -> None:
        """There is work: leave the pool as it was."""
        if self._steps is not None:
            self._steps.close()
            self._steps = None
