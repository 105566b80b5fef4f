"""What ``SchedulerProtocol`` promises, tried on one scheduler by an engine that computes nothing.

Requests come at random steps, some are aborted, the pool is full at times, and tokens may be read back one pass late.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from infer.contracts.cache import Allocation
from infer.contracts.params import SamplingParams
from infer.contracts.request import Owner, Request
from infer.contracts.scheduler import PENDING, Schedule, SchedulerContext, SchedulerProtocol, Sequence, Work
from infer.contracts.sections import EngineSettings
from infer.engine.checked import CheckedScheduler
from infer.engine.seats import Seats
from infer.errors import PluginError
from infer_testing.suite import Suite, Violation

MakeScheduler = Callable[[SchedulerContext], SchedulerProtocol]
LONGEST = 70
"""The longest sequence of any case."""
MOST_STEPS = 3000
"""A case has a few dozen sequences of at most LONGEST tokens: whoever plans anything useful needs far fewer."""
IDLE_STEPS = 3
"""How many steps in a row may plan nothing although there is work: with results one pass late, the last token of all
sequences may have been planned already."""


class CountingPool:
    """A pool without K/V: room for so many tokens in so many slots. Tokens are taken one by one, as by a paged pool of
    block size 1. Whatever a scheduler must not do with a pool raises Violation."""

    shares = False

    def __init__(self, slots: int, tokens: int) -> None:
        self.tokens = tokens
        self.free_slots = set(range(slots))
        self.held: dict[int, int] = {}
        self.computed: Callable[[int], int | None] = lambda slot: None
        """How many positions of a slot are computed, where somebody knows."""

    def allocate(self, token_ids: Seq[int], *, reuse: bool = True, salt: str = "") -> Allocation | None:
        if PENDING in token_ids:
            raise Violation("allocate is called with a PENDING token: the pool cannot know what it will be")
        if not self.free_slots or len(token_ids) > self.free_tokens():
            return None
        slot = self.free_slots.pop()
        self.held[slot] = len(token_ids)
        return Allocation(slot)

    def grow(self, slot: int, num_tokens: int) -> bool:
        more = max(0, num_tokens - self._held(slot, "grow"))
        if more > self.free_tokens():
            return False
        self.held[slot] += more
        return True

    def commit(self, slot: int, token_ids: Seq[int], num_computed: int) -> None:
        self._held(slot, "commit")
        if not 0 <= num_computed <= len(token_ids):
            raise Violation(f"commit says that {num_computed} of {len(token_ids)} tokens are computed")
        known = self.computed(slot)
        if known is not None and num_computed > known:
            raise Violation(f"commit says that {num_computed} tokens are computed; {known} are")
        if PENDING in token_ids[:num_computed]:
            raise Violation("commit goes beyond the first PENDING token: what is shared has to be known")

    def free(self, slot: int) -> None:
        self._held(slot, "free")
        del self.held[slot]
        self.free_slots.add(slot)

    def free_tokens(self) -> int:
        return self.tokens - sum(self.held.values())

    def _held(self, slot: int, what: str) -> int:
        if slot not in self.held:
            raise Violation(f"{what} is called for slot {slot}, which nobody has")
        return self.held[slot]


class SharingPool(CountingPool):
    """One that remembers whatever was computed, though it keeps no room free by that."""

    shares = True

    def __init__(self, slots: int, tokens: int) -> None:
        super().__init__(slots, tokens)
        self.known: set[tuple[str, tuple[int, ...]]] = set()
        self.salts: dict[int, str] = {}

    def allocate(self, token_ids: Seq[int], *, reuse: bool = True, salt: str = "") -> Allocation | None:
        place = super().allocate(token_ids)
        if place is None:
            return place
        self.salts[place.slot] = salt
        found = (n for n in range(len(token_ids) - 1, 0, -1) if (salt, tuple(token_ids[:n])) in self.known)
        return Allocation(place.slot, next(found, 0) if reuse else 0)

    def commit(self, slot: int, token_ids: Seq[int], num_computed: int) -> None:
        super().commit(slot, token_ids, num_computed)
        self.known |= {(self.salts[slot], tuple(token_ids[:n])) for n in range(1, num_computed + 1)}


@dataclass
class Schedulers:
    """What makes the scheduler that is tried."""

    make: MakeScheduler
    chunks: bool = True
    """As in its registration."""


SUITE: Suite[Schedulers] = Suite("check_scheduler")
check = SUITE.check


def check_scheduler(
    make: MakeScheduler,
    *,
    chunks: bool = True,
    only: Seq[str] = (),
    seed: int = 0,
    case: int | None = None,
) -> None:
    """Try everything that ``SchedulerProtocol`` promises on the schedulers that ``make`` makes. ``chunks`` is that of
    their registration. ``only`` names checks, ``case`` one case of each. Raises ConformanceError."""
    SUITE.enforce(Schedulers(make, chunks), only=only, seed=seed, case=case)


@dataclass
class Arrival:
    step: int
    sequence: Sequence
    ends: int
    """With how many tokens it ends, which the scheduler cannot know: at most ``max_len``."""


@dataclass
class Drive:
    """An engine without a model."""

    made: SchedulerProtocol
    pool: CountingPool
    engine: EngineSettings
    lag: int
    draw: random.Random
    arrivals: list[Arrival]
    aborts: float = 0.05
    """How likely some request is aborted in a step."""
    faults: int = 0
    """How many passes raise, so that their sequences are finished and added again."""
    open: dict[str, Arrival] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    flights: deque[Seq[Work]] = field(default_factory=deque)
    computed: Counter[tuple[str, int]] = field(default_factory=Counter)
    """How often each prompt position of a group was computed."""
    idle: int = 0
    keys: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scheduler = CheckedScheduler(self.made, "The scheduler", thorough=True)
        self.pool.computed = self.computed_in

    def computed_in(self, slot: int) -> int | None:
        sequences = (arrival.sequence for arrival in self.open.values())
        return next((sequence.num_computed for sequence in sequences if sequence.slot == slot), None)

    def run(self) -> None:
        step, left = 0, len(self.arrivals) // 2  # so that aborts cannot end everything that waits for ever
        while self.arrivals or self.made.has_work() or self.flights:
            while self.arrivals and self.arrivals[0].step <= step:
                arrival = self.arrivals.pop(0)
                self.open[arrival.sequence.id] = arrival
                self.scheduler.add(arrival.sequence)
            if left and self.open and self.draw.random() < self.aborts:
                left -= 1
                self.finish(self.draw.choice([*self.open.values()]).sequence)
            self.step()
            step += 1
            if step > MOST_STEPS:
                raise Violation(f"after {step} steps {', '.join(self.open)} have not ended: somebody waits for ever")
        if self.open:
            raise Violation(f"has_work() is False, but {', '.join(self.open)} have not ended")
        if (left := self.pool.free_tokens()) != self.pool.tokens or self.pool.held:
            raise Violation(f"all have ended, but slots {sorted(self.pool.held)} and room are taken ({left} free)")

    def step(self) -> None:
        try:
            schedule = self.scheduler.schedule()
        except PluginError as error:
            if isinstance(error.__cause__, Violation):
                raise error.__cause__ from None
            raise Violation(str(error)) from None
        self.check_limits(schedule)
        self.check_keys()
        passes = list(schedule.passes())
        lag = self.lag if passes else 0
        for works in passes:
            if self.faults and self.draw.random() < 0.2:
                self.faults -= 1
                self.settle(0)
                self.restart(works)
                continue
            for work in works:
                self.launch(work)
            self.flights.append(works)
            self.settle(lag)
        self.settle(lag)
        self.idle = 0 if passes or not self.made.has_work() else self.idle + 1
        if self.idle > IDLE_STEPS:
            raise Violation(
                f"nothing is planned, though there is work: {', '.join(self.open)} wait; slots "
                f"{sorted(self.pool.held)} are taken and {self.pool.free_tokens()} positions free"
            )

    def launch(self, work: Work) -> None:
        sequence = work.sequence
        slot = sequence.slot
        if slot not in self.pool.held:
            raise Violation(f"{sequence.id} is planned in slot {slot}, which the pool has not given out")
        if others := [one.sequence.id for one in self.open.values() if one.sequence.slot == slot][1:]:
            raise Violation(f"{others[0]} and others are in slot {slot} at once")
        assert slot is not None
        if work.end > self.pool.held[slot]:
            raise Violation(
                f"{sequence.id} is planned up to position {work.end}, but its slot has room for "
                f"{self.pool.held[slot]}: grow has not been called, or was False"
            )
        if work.start != sequence.num_computed:
            raise Violation(f"{sequence.id} is planned from {work.start} on; {sequence.num_computed} is next")
        group = sequence.request.group
        self.computed.update((group, at) for at in range(work.start, min(work.end, sequence.num_prompt - 1)) if group)
        sequence.num_computed = work.end
        if work.draws:
            sequence.tokens.append(PENDING)

    def restart(self, works: Seq[Work]) -> None:
        """The pass has raised: its sequences are computed again."""
        for work in works:
            if work.sequence.id in self.open:
                arrival = self.open[work.sequence.id]
                self.finish(work.sequence)
                work.sequence.restart()
                self.ended.remove(work.sequence.id)
                self.open[work.sequence.id] = arrival
                self.scheduler.add(work.sequence)

    def settle(self, left: int) -> None:
        """Read the results of all but the last passes; tokens of sequences that have ended are dropped."""
        while len(self.flights) > left:
            for work in self.flights.popleft():
                sequence = work.sequence
                if work.draws and sequence.id in self.open:
                    sequence.tokens[len(sequence.tokens) - sequence.pending] = 7
                    if len(sequence.tokens) - sequence.pending >= self.open[sequence.id].ends:
                        self.finish(sequence)

    def finish(self, sequence: Sequence) -> None:
        slot = sequence.slot
        self.scheduler.finish(sequence)
        del self.open[sequence.id]
        self.ended.add(sequence.id)
        if slot is not None and slot in self.pool.held:
            raise Violation(f"finish({sequence.id}) does not free its slot {slot} at once")

    def check_limits(self, schedule: Schedule) -> None:
        engine, works = self.engine, [*schedule.decodes, *schedule.prefills]
        tokens, budget = sum(work.length for work in works), engine.max_tokens_per_step
        if budget is not None and tokens > budget:
            raise Violation(f"a step computes {tokens} tokens; engine.max_tokens_per_step is {budget}")
        running = sum(arrival.sequence.slot is not None for arrival in self.open.values())
        if running > engine.max_batch_size:
            raise Violation(f"{running} sequences run at once; engine.max_batch_size is {engine.max_batch_size}")
        cap = engine.max_prefill_chunks_per_step
        if cap is not None and len(schedule.prefills) > cap:
            raise Violation(f"a step has {len(schedule.prefills)} chunks; engine.max_prefill_chunks_per_step is {cap}")
        longest = max((work.length for work in schedule.prefills), default=0)
        if engine.use_chunked_prefill and longest > engine.prefill_chunk_size:
            raise Violation(f"a chunk has {longest} tokens; engine.prefill_chunk_size is {engine.prefill_chunk_size}")
        partial, most = (
            [w for w in schedule.prefills if w.end < w.sequence.prefill_end],
            engine.max_num_partial_prefills,
        )
        if partial and not engine.use_chunked_prefill:
            work = partial[0]
            raise Violation(
                f"the prompt of {work.sequence.id} is cut at {work.end}, though engine.use_chunked_prefill is off"
            )
        if most is not None and len(partial) > most:
            raise Violation(f"{len(partial)} prompts are left part-way; engine.max_num_partial_prefills is {most}")
        for work in works:
            if work.sequence.id in self.ended:
                raise Violation(f"{work.sequence.id} is planned, though it has ended")
            if not work.decode and work.sequence.prefill_end < work.sequence.num_prompt:
                raise Violation(f"prefill_end of {work.sequence.id} is below its prompt's length")

    def check_keys(self) -> None:
        """Those by which a scheduler's ``Seats`` sort: they keep sequences sorted."""
        for seats in filter(lambda one: isinstance(one, Seats), getattr(self.made, "__dict__", {}).values()):
            for id, arrival in self.open.items():
                key = seats.key(arrival.sequence)
                if (first := self.keys.setdefault(id, key)) != key:
                    raise Violation(
                        f"key({id}) was {first!r} and is {key!r}; it must not change while the sequence runs or waits"
                    )


def drive(
    s: Schedulers,
    draw: random.Random,
    *,
    sharing: bool,
    lag: int,
    spare: int,
    aborts: float = 0.05,
    faults: int = 0,
) -> Drive:
    """Requests that come in the first steps, several of which may ask for answers to one prompt."""
    batch = draw.randint(1, 6)
    chunked = s.chunks and draw.random() < 0.8
    budget = draw.choice([None, batch + draw.randint(0, 60)]) if chunked else None
    keys: dict[str, Any] = {
        "max_batch_size": batch,
        "use_chunked_prefill": chunked,
        "mixed_batches": draw.random() < 0.5,
        "max_tokens_per_step": budget,
        "max_prefill_chunks_per_step": draw.choice([None, None, 1, 3]),
    }
    if chunked:
        keys |= {
            "prefill_chunk_size": draw.choice([1, 5, 16, 40]),
            "max_num_partial_prefills": draw.choice([None, None, 1, 2]),
        }
    engine = EngineSettings.model_validate(keys)
    pool = (SharingPool if sharing else CountingPool)(batch, LONGEST + spare)
    arrivals: list[Arrival] = []
    for i in range(draw.randint(1, 8)):
        prompt, new = draw.randint(1, 50), draw.randint(1, 20)
        answers, salt = draw.choice([1, 1, 3]), draw.choice(["", "", "x"])
        tokens, group = (100 + i, *range(2, prompt + 1)), f"g{i}" if answers > 1 else ""
        user, priority = draw.choice("ab"), draw.choice([0, 0, 1])
        for _ in range(answers):
            request = Request(
                tokens,
                SamplingParams(max_tokens=new),
                id=f"r{len(arrivals)}",
                cache_salt=salt,
                priority=priority,
                owner=Owner(draw.choice("xy"), user),
                group=group,
            )
            sequence = Sequence(request, len(arrivals), prompt + new)
            arrivals.append(Arrival(draw.randint(0, 30), sequence, prompt + draw.randint(1, new)))
    arrivals.sort(key=lambda arrival: arrival.step)
    for order, arrival in enumerate(arrivals):  # the order of arrival
        arrival.sequence.order = order
        arrival.sequence.rank = (arrival.sequence.request.priority, order)
    made = s.make(SchedulerContext(pool, engine))  # type: ignore[arg-type]
    return Drive(made, pool, engine, lag, draw, arrivals, aborts, faults)


@check("Everyone ends, whatever comes, within all limits, and nothing is left in the pool", 200)
def drains(s: Schedulers, draw: random.Random) -> None:
    drive(s, draw, sharing=False, lag=0, spare=200).run()


@check("The same where the pool is full, so that some have to yield and are computed again", 200)
def little_room(s: Schedulers, draw: random.Random) -> None:
    drive(s, draw, sharing=False, lag=0, spare=draw.randrange(40)).run()


@check("The same where tokens are read back one pass late: some sequences turn out to have ended before", 200)
def late_results(s: Schedulers, draw: random.Random) -> None:
    drive(s, draw, sharing=draw.random() < 0.5, lag=1, spare=draw.choice([0, 20, 200])).run()


@check("The same where many requests are aborted, waiting, in prefill or decoding", 150)
def aborts(s: Schedulers, draw: random.Random) -> None:
    drive(s, draw, sharing=draw.random() < 0.5, lag=draw.choice([0, 1]), spare=draw.choice([0, 200]), aborts=0.5).run()


@check("The same where passes raise: their sequences are finished, and added again to be computed anew", 150)
def raising(s: Schedulers, draw: random.Random) -> None:
    drive(s, draw, sharing=draw.random() < 0.5, lag=draw.choice([0, 1]), spare=draw.choice([0, 200]), faults=9).run()


@check(
    "In a pool that shares, answers to one prompt wait until the first has it in the cache: it is computed once", 200
)
def shared_prompts(s: Schedulers, draw: random.Random) -> None:
    made = drive(s, draw, sharing=True, lag=draw.choice([0, 1]), spare=200, aborts=0.02)
    made.run()
    if twice := [key for key, times in made.computed.items() if times > 1]:
        group, at = min(twice)
        raise Violation(
            f"position {at} of a prompt that the pool shares was computed {made.computed[group, at]} times for the "
            f"answers of group {group}: the others did not wait for the first, or commit was not called"
        )
