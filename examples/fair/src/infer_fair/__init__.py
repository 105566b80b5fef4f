"""Fair shares: requests of the user who has got the least go first (virtual token counters; Sheng et al., 2024).

A user's counter grows with what the user is given: a token of a prompt counts 1, one of an answer ``answer_cost``. The
waiting request of the user with the lowest counter is admitted next, so that a user with many requests does not keep
out one with few. Who has asked for nothing in the meantime saves nothing up: a user who comes back is lifted to the
lowest counter of those who are there.
"""

from __future__ import annotations

from collections import Counter

from pydantic import BaseModel, Field

from infer import hookimpl
from infer.contracts.scheduler import Schedule, SchedulerContext, SchedulerRegistration, Sequence
from infer.engine.schedulers import ContinuousScheduler
from infer.engine.seats import Step

INFER_PLUGIN_API = 2


class FairSettings(BaseModel, extra="forbid"):
    answer_cost: float = Field(2.0, ge=0, allow_inf_nan=False, description="what a token of an answer counts")


class FairScheduler(ContinuousScheduler):
    def __init__(self, context: SchedulerContext, settings: FairSettings) -> None:
        super().__init__(context.pool, context.engine)
        self._cost = settings.answer_cost
        self._open: Counter[str] = Counter()
        """How many requests each user has here, running or waiting; no user with none."""
        self._got: dict[str, float] = {}
        """The users' counters."""

    def add(self, sequence: Sequence) -> None:
        user = sequence.request.user
        if user not in self._open:
            self._got[user] = max(self._got.get(user, 0.0), self._least(0.0))
        self._open[user] += 1
        super().add(sequence)

    def finish(self, sequence: Sequence) -> None:
        super().finish(sequence)
        user = sequence.request.user
        self._open[user] -= 1
        if not self._open[user]:
            del self._open[user]
            # Whoever is not here and would be lifted anyway need not be remembered: names of users are the clients'.
            least = self._least(float("inf"))
            self._got = {name: got for name, got in self._got.items() if name in self._open or got > least}

    def schedule(self) -> Schedule:
        plan = super().schedule()
        for work in plan.decodes:
            self._got[work.sequence.request.user] += self._cost
        return plan

    def admit(self, step: Step) -> None:
        while waiting := self.seats.waiting:
            first = min(waiting, key=self._place)
            if not self.seats.admit(first, step):
                break
            if not first.recomputed:  # what is computed again is nobody's wish
                self._got[first.request.user] += first.num_prompt - first.num_cached

    def victim(self) -> Sequence:
        return max(self.seats.running, key=self._place)

    def _place(self, sequence: Sequence) -> tuple[int, float, int]:
        request = sequence.request
        return request.priority, self._got[request.user], sequence.order

    def _least(self, default: float) -> float:
        return min((self._got[user] for user in self._open), default=default)


@hookimpl
def infer_schedulers() -> list[SchedulerRegistration]:
    what = "users take turns: the one who has got the fewest tokens goes first"
    return [SchedulerRegistration("fair", FairScheduler, what, FairSettings)]
