"""The engine's own record of a request, and the plan of a step. Integers only."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from infer.contracts.request import Request

PENDING = -1
"""Stands in ``Sequence.tokens`` for a token that the device has drawn, or will have by the time it is needed there, but
that has not been read back yet."""


@dataclass(eq=False, slots=True)
class Sequence:
    """A request on its way: its tokens, and how far the cache has come with them."""

    request: Request
    order: int
    """Arrival order."""
    max_len: int
    """Tokens, prompt included, at which it ends for want of room."""
    id: str = field(init=False)
    rank: tuple[int, int] = field(init=False)
    """Priority, then arrival order: the key of core's schedulers."""
    tokens: list[int] = field(init=False)
    num_prompt: int = field(init=False)
    num_computed: int = 0
    """Leading positions whose K/V are in the cache, or will be before anything later runs. The scheduler sets it at
    admission, the engine with each pass."""
    prefill_end: int = 0
    """Positions to compute before it decodes: the tokens it had when it was admitted. Set by the scheduler."""
    slot: int | None = None
    """Its place in the cache while it runs. Set by the scheduler."""
    num_cached: int = 0
    """Prompt tokens found in the cache at first admission. Set by the scheduler."""
    preemptions: int = 0
    pending: int = 0
    """How many PENDING tokens ``tokens`` ends with. Set by the engine."""
    prompt_scored: int = 0
    """Prompt positions whose logprobs have been computed. Set by the engine."""
    started: float | None = None
    """When it first got into a pass, on ``time.perf_counter``. Set by the engine."""

    def __post_init__(self) -> None:
        self.id = self.request.id
        self.tokens = list(self.request.prompt_token_ids)
        self.num_prompt = len(self.tokens)
        self.rank = (self.request.priority, self.order)

    @property
    def decoding(self) -> bool:
        return self.slot is not None and self.num_computed >= self.prefill_end

    @property
    def complete(self) -> bool:
        """All its tokens are drawn, though perhaps not read back."""
        return len(self.tokens) >= self.max_len

    def extend(self, length: int) -> Work:
        """Its next piece of work."""
        start = self.num_computed
        return Work(self, start, length, int(start + length == len(self.tokens)), start >= self.prefill_end)


class Work(NamedTuple):
    """Extend ``sequence`` by positions [start, start + length)."""

    sequence: Sequence
    start: int
    length: int
    draws: int
    """Tokens that it yields, one after each of its last positions: one where it reaches the last known token, else
    none. (More than one checks drafts.)"""
    decode: bool
    """What the sequence had when it was admitted is behind it."""

    @property
    def end(self) -> int:
        return self.start + self.length


new_work: Callable[[tuple[Sequence, int, int, int, bool]], Work] = functools.partial(tuple.__new__, Work)
"""A Work of all its fields, in a third of the time: one is made for every token."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step. A sequence is in at most one of the lists."""

    decodes: list[Work]
    prefills: list[Work]
    mixed: bool = False

    def passes(self) -> Iterator[list[Work]]:
        """What goes through the model together: everything if ``mixed``, so that the weights are read once; else
        decodes first, for the sake of inter-token latency."""
        parts = [self.decodes + self.prefills] if self.mixed else [self.decodes, self.prefills]
        yield from (works for works in parts if works)
