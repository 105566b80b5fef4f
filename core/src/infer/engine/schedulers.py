"""Scheduling policies over ``Seats``: iteration-level scheduling (Orca, 2022) with chunked prefill (Sarathi-Serve,
2024)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infer.contracts.cache import CachePoolProtocol
from infer.contracts.scheduler import Schedule, Sequence
from infer.engine.seats import Seats, Step

if TYPE_CHECKING:
    from infer.contracts.sections import EngineSettings


class ContinuousScheduler:
    """Continuous batching. Each step computes a token for every decoding sequence, then chunks of the prompts in
    prefill, then new prompts in order of priority and arrival, all within ``max_tokens_per_step``.

    A policy that only changes the order overrides ``key``; one that chooses anew in each step overrides ``admit`` and
    ``victim``.
    """

    def __init__(self, pool: CachePoolProtocol, settings: EngineSettings) -> None:
        self.seats = Seats(pool, settings, self.key)

    def key(self, sequence: Sequence) -> Any:
        """The sort key. The sequence with the lowest key is admitted first and gets its tokens first; the one with the
        highest is preempted first. A sequence's key must not change while the sequence runs or waits."""
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
        """Admit waiting sequences in order of their keys until the step or the pool has no room for the next one."""
        waiting = self.seats.waiting
        while waiting and self.seats.admit(waiting[0], step):
            pass

    def victim(self) -> Sequence:
        """The running sequence to preempt when the pool has no room for another one's next token, or for its own."""
        return self.seats.running[-1]


class StaticScheduler(ContinuousScheduler):
    """Static batching: runs a batch until all its sequences have finished, then admits the next. It is the baseline
    that continuous batching is compared with."""

    def admit(self, step: Step) -> None:
        if not self.seats.running:
            super().admit(step)
