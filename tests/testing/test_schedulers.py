"""``check_scheduler``: ours and the documented ones pass, and it names the bugs that are planted in them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.core.engine.test_schedulers import FairShares, ShortestFirst
from tests.examples import seeded, slowly
from tests.testing.planted import Bug, Bugs, caught

from infer.contracts.scheduler import Schedule, SchedulerContext, SchedulerProtocol, Sequence, Work
from infer.engine.schedulers import ContinuousScheduler, FairScheduler, StaticScheduler
from infer.engine.seats import Seats, Step
from infer_testing import check_scheduler

MakeScheduler = Callable[[SchedulerContext], SchedulerProtocol]
planted: Bugs[MakeScheduler] = Bugs([])


def of(kind: type[ContinuousScheduler]) -> MakeScheduler:
    return lambda context: kind(context.pool, context.engine)


@pytest.mark.parametrize(
    "kind", [ContinuousScheduler, *slowly(FairScheduler, StaticScheduler, ShortestFirst, FairShares)]
)
@pytest.mark.draws
@seeded()
def test_ours_pass(kind: type[ContinuousScheduler], seed: int) -> None:
    check_scheduler(of(kind), chunks=kind is not StaticScheduler, seed=seed)


@planted.each
def test_a_planted_bug_is_named(bug: Bug[MakeScheduler]) -> None:
    caught(bug, lambda **keys: check_scheduler(bug.make, **keys))


def limited(**keys: Any) -> MakeScheduler:
    """A scheduler that goes by other settings."""
    return lambda context: ContinuousScheduler(context.pool, context.engine.model_copy(update=keys))


planted("the budget is forgotten", "drains", r"a step computes \d+ tokens; engine.max_tokens_per_step is \d+")(
    limited(max_tokens_per_step=None)
)
planted("chunks may be longer", "drains", r"a chunk has \d+ tokens; engine.prefill_chunk_size is \d+")(
    limited(prefill_chunk_size=64)
)
planted("prompts are always cut", "drains", "though engine.use_chunked_prefill is off")(
    limited(use_chunked_prefill=True, prefill_chunk_size=1)
)
planted(
    "any number of chunks is computed", "drains", r"a step has \d+ chunks; engine.max_prefill_chunks_per_step is \d"
)(limited(max_prefill_chunks_per_step=None))
planted(
    "any number of prompts is part-way", "drains", r"prompts are left part-way; engine.max_num_partial_prefills is \d"
)(limited(max_num_partial_prefills=None))


class AsksAgain(ContinuousScheduler):
    def admit(self, step: Step) -> None:
        while self.seats.waiting:
            for sequence in self.seats.waiting[:2]:
                self.seats.admit(sequence, step)


class TakesWhoWaits(ContinuousScheduler):
    def victim(self) -> Sequence:
        return (self.seats.waiting or self.seats.running)[-1]


planted(
    "who had no room is asked for again, for ever",
    "drains",
    r"failed: ValueError: admit was False \d+ times in a row.* \(test_schedulers.py:\d+\)",
)(of(AsksAgain))
planted("someone who waits has to yield", "little_room", r"failed: ValueError: r\d+ does not run.* victim")(
    of(TakesWhoWaits)
)


def seats(**methods: Callable[..., Any]) -> MakeScheduler:
    """A continuous scheduler whose seats have other methods."""

    def make(context: SchedulerContext) -> SchedulerProtocol:
        made = ContinuousScheduler(context.pool, context.engine)
        made.seats.__class__ = type("Changed", (Seats,), methods)
        return made

    return make


@planted("a request of low priority is never admitted", "drains", r"nothing is planned, though there is work: r\d+")
@of
class Starves(ContinuousScheduler):
    def admit(self, step: Step) -> None:
        waiting = self.seats.waiting
        while waiting and waiting[0].request.priority == 0 and self.seats.admit(waiting[0], step):
            pass


@planted("who has more tokens comes later", "drains", r"key\(r\d+\) was \d+ and is \d+; it must not change")
@of
class Younger(ContinuousScheduler):
    def key(self, sequence: Sequence) -> int:
        return len(sequence.tokens)


@planted("the order is drawn anew each time", "drains", r"key\(r\d+\) was 0\.\d+ and is 0\.\d+; it must not change")
@of
class Drawn(ContinuousScheduler):
    def __init__(self, *args: Any) -> None:
        self.draw = random.Random(0)
        super().__init__(*args)

    def key(self, sequence: Sequence) -> float:
        return self.draw.random()


@planted("so it is by a scheduler of its own", "drains", r"key\(r\d+\) was 0\.\d+ and is 0\.\d+; it must not change")
def drawn(context: SchedulerContext) -> SchedulerProtocol:
    class Own:
        def __init__(self) -> None:
            made, draw = ContinuousScheduler(context.pool, context.engine), random.Random(0)
            self.places = made.seats = Seats(context.pool, context.engine, lambda sequence: draw.random())
            self.add, self.schedule, self.finish, self.has_work = made.add, made.schedule, made.finish, made.has_work

    return Own()


@planted("sequences preempt each other for ever", "drains", "somebody waits for ever")
@of
class Swaps(ContinuousScheduler):
    def schedule(self) -> Schedule:
        for sequence in [*self.seats.running] if self.seats.waiting else []:
            self.seats.preempt(sequence)
        return super().schedule()


def forgets(self: Seats, sequence: Sequence) -> None:
    Seats.preempt(self, sequence)
    self.waiting.remove(sequence)


planted("who has been preempted is forgotten", "little_room", r"has_work\(\) is False, but r\d+.* not ended")(
    seats(preempt=forgets)
)


class LazyScheduler(ContinuousScheduler):
    """Frees slots with the next step."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.over: list[Sequence] = []

    def finish(self, sequence: Sequence) -> None:
        self.over.append(sequence)

    def has_work(self) -> bool:
        return bool(self.over) or super().has_work()

    def schedule(self) -> Schedule:
        for sequence in self.over:
            super().finish(sequence)
        self.over.clear()
        return super().schedule()


planted("slots are freed one step late", "drains", r"finish\(r\d+\) does not free its slot \d at once")(
    of(LazyScheduler)
)


@planted("an abort of who waits is not noticed", "aborts", r"planned r\d+ from 0 on .* though it has ended")
@of
class DeafScheduler(ContinuousScheduler):
    def finish(self, sequence: Sequence) -> None:
        if sequence.slot is not None:
            super().finish(sequence)


@planted("who has ended once cannot come back", "raising", r"has_work\(\) is False, but r\d+.* not ended")
@of
class Once(ContinuousScheduler):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.over: set[Sequence] = set()

    def add(self, sequence: Sequence) -> None:
        if sequence not in self.over:
            super().add(sequence)

    def finish(self, sequence: Sequence) -> None:
        if sequence not in self.over:
            super().finish(sequence)
        self.over.add(sequence)


def without_room(self: Seats, victim: Callable[[], Sequence]) -> Step:
    grow, self._pool.grow = self._pool.grow, lambda slot, num_tokens: True  # type: ignore[method-assign]
    try:
        return Seats.begin(self, victim)
    finally:
        self._pool.grow = grow  # type: ignore[method-assign]


planted("decodes take no room", "drains", "grow has not been called, or was False")(seats(begin=without_room))


def commits_ahead(self: Seats, sequence: Sequence) -> None:
    self._pool.commit(self._slot(sequence), sequence.tokens, len(sequence.tokens))


planted("what is not computed yet is shared", "drains", r"commit says that \d+ tokens are computed; \d+ are")(
    seats(_commit=commits_ahead)
)


def admits_pending(self: Seats, sequence: Sequence, step: Step) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sequence, "pending", 0)
        return Seats.admit(self, sequence, step)


planted("who was preempted is admitted before its token is known", "late_results", "called with a PENDING token")(
    seats(admit=admits_pending)
)
planted("nothing is ever shared", "shared_prompts", r"was computed \d times for the answers of group")(
    seats(_commit=lambda self, sequence: None)
)


def apart(context: SchedulerContext) -> SchedulerProtocol:
    made = ContinuousScheduler(context.pool, context.engine)
    made.seats._shares = False
    return made


planted("answers to one prompt do not wait for the first", "shared_prompts", "the others did not wait for the first")(
    apart
)


class Edited(ContinuousScheduler):
    """Changes works."""

    def schedule(self) -> Schedule:
        schedule = super().schedule()
        return replace(schedule, prefills=[self.edit(work) for work in schedule.prefills])

    def edit(self, work: Work) -> Work:
        raise NotImplementedError


@planted("a chunk begins one position late", "drains", r"which is not what its extend\(\d+\) gives")
@of
class Gap(Edited):
    def edit(self, work: Work) -> Work:
        return work._replace(start=work.start + (work.start > 0))


@planted("tokens are drawn after every chunk", "drains", r"which is not what its extend\(\d+\) gives")
@of
class DrawsAlways(Edited):
    def edit(self, work: Work) -> Work:
        return work._replace(draws=1)


@planted("a sequence is in a step twice", "drains", "though it is in the same step already")
@of
class Twice(ContinuousScheduler):
    def schedule(self) -> Schedule:
        schedule = super().schedule()
        return replace(schedule, decodes=[*schedule.decodes, *schedule.decodes[:1]])


@planted("a sequence that is read late gets one token too many", "late_results", "though 0 of its tokens|grow has not")
@of
class PlansAhead(ContinuousScheduler):
    def schedule(self) -> Schedule:
        schedule = super().schedule()
        there = {work.sequence.id for work in (*schedule.decodes, *schedule.prefills)}
        ahead: list[Work] = []
        for sequence in self.seats.running:
            if sequence.id not in there and sequence.decoding and sequence.num_computed >= len(sequence.tokens) - 1:
                ahead.append(sequence.extend(1))
        return replace(schedule, decodes=[*schedule.decodes, *ahead])
