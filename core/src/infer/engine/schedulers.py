"""Who computes what in a step: iteration-level scheduling (Orca, 2022) with chunked prefill (Sarathi-Serve, 2024).
Policies over ``Seats``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infer.contracts.protocols import CachePoolProtocol
from infer.contracts.schedule import Schedule, Sequence
from infer.engine.seats import Seats, Step

if TYPE_CHECKING:
    from infer.settings import EngineSettings


class ContinuousScheduler:
    """Each step: a token for everyone who decodes, then chunks of prompts under way, then new prompts in arrival order,
    all within ``max_tokens_per_step``. Where requests have priorities, these come before arrival.

    A policy that differs in the order alone overrides ``key``; one that chooses anew in each step overrides ``admit``
    and ``victim``.
    """

    def __init__(self, pool: CachePoolProtocol, settings: EngineSettings) -> None:
        self.seats = Seats(pool, settings, self.key)

    def key(self, sequence: Sequence) -> Any:
        """The sequence with the lowest key is admitted first and gets its tokens first; the one with the highest is
        preempted first. A sequence's key must not change while the sequence is here."""
        return sequence.rank

    def add(self, sequence: Sequence) -> None:
        self.seats.add(sequence)

    def finish(self, sequence: Sequence) -> None:
        self.seats.finish(sequence)

    def has_work(self) -> bool:
        return self.seats.has_work()

    def schedule(self) -> Schedule:
        step = self.seats.begin(self.victim)
        self.admit(step)
        return step.schedule

    def admit(self, step: Step) -> None:
        """Admit whom the step and the pool have room for: by key, and nobody overtakes."""
        waiting = self.seats.waiting
        while waiting and self.seats.admit(waiting[0], step):
            pass

    def victim(self) -> Sequence:
        """Whom to preempt, among those that run, when the pool has no room for the next token of one of them."""
        return self.seats.running[-1]


class StaticScheduler(ContinuousScheduler):
    """Holds a batch until all its members finish, then takes the next. Stays as the comparison."""

    def admit(self, step: Step) -> None:
        if not self.seats.running:
            super().admit(step)
