"""Which models have to leave so that another can be loaded. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Held:
    """A model that takes memory: it is being loaded, is loaded, or is on its way out."""

    name: str
    nbytes: int
    used: float
    """When it was last used; the least recently used one leaves first."""
    busy: bool = False
    """Whether it has open requests."""
    may_leave: bool = True
    """Whether it can be asked to leave: it is neither pinned nor being loaded."""
    leaving: bool = False
    """Whether it has been asked to leave; its memory is free soon."""


@dataclass(frozen=True)
class Placement:
    """``load``: there is room now. ``wait``: there will be, once ``evicted`` and all who leave already have left.
    ``full``: there will be room only after something else has happened, such as the end of a load."""

    answer: Literal["load", "wait", "full"]
    evicted: tuple[str, ...] = ()


def place(nbytes: int, memory: int, held: Iterable[Held]) -> Placement:
    """Where a model of ``nbytes`` may go, of ``memory`` bytes in all. As few models leave as have to, idle ones before
    busy ones, and of these the least recently used first."""
    there = [*held]
    free = memory - sum(each.nbytes for each in there)
    if nbytes <= free:
        return Placement("load")
    free += sum(each.nbytes for each in there if each.leaving)
    evicted: list[str] = []
    candidates = [each for each in there if each.may_leave and not each.leaving]
    for each in sorted(candidates, key=lambda each: (each.busy, each.used, each.name)):
        if nbytes <= free:
            break
        evicted.append(each.name)
        free += each.nbytes
    if nbytes > free:
        return Placement("full")
    sizes = {each.name: each.nbytes for each in there}
    for name in [*evicted]:  # one that was chosen early may be too small to matter
        if nbytes <= free - sizes[name]:
            evicted.remove(name)
            free -= sizes[name]
    return Placement("wait", tuple(evicted))
