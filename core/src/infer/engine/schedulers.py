"""Scheduling policies over ``Seats``: iteration-level scheduling (Orca, 2022) with chunked prefill (Sarathi-Serve,
2024)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Set
from typing import TYPE_CHECKING, Any

from infer.contracts.cache import CachePoolProtocol
from infer.contracts.request import Owner
from infer.contracts.scheduler import Schedule, Sequence, Work
from infer.engine.seats import Seats, Step

if TYPE_CHECKING:
    from infer.contracts.sections import EngineSettings

ANSWER_COST = 2.0
"""What a step of an answer counts, with whatever drafts are accepted in it, where a token of a prompt counts 1: it
takes a place for the whole step."""
MOST_ABSENT = 1024
"""How many names are remembered that have nothing here. Clients choose the names of users."""


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


class Shares:
    """How much each name has got. Who has got the least is to be served next: virtual token counters (Sheng et al.,
    "Fairness in Serving Large Language Models", 2024), whose lift for those who come is taken here from a virtual time
    as of weighted fair queueing (Demers et al., 1989), because the lowest count stands still while new names come.

    A name asks while it has prompts to compute. Nobody saves anything up: whoever begins to ask is lifted to the
    virtual time. It goes on by what each of those who ask would have got in equal shares, so those who have waited all
    along get ahead of those who have come later.
    """

    def __init__(self) -> None:
        self._got: dict[str, float] = {}
        self._time = 0.0
        self._here: Set[str] = frozenset()
        self._asking: Set[str] = frozenset()

    def __len__(self) -> int:
        """How many names are remembered."""
        return len(self._got)

    def __getitem__(self, name: str) -> float:
        """How much the name has got; what it will be lifted to, if no step has seen it."""
        return self._got.get(name, self._time)

    def begin(self, here: Set[str], asking: Set[str]) -> None:
        """A step begins. Of the names that have any sequences ``here``, some are ``asking``."""
        least = min((self._got[name] for name in asking & self._asking), default=0.0)
        self._time = max(self._time, least)
        for name in asking - self._asking:
            self._got[name] = max(self._got.get(name, 0.0), self._time)
        if here != self._here:  # who is away, and would be lifted higher anyway, need not be remembered
            least = self._time if len(self._got) - len(here) <= MOST_ABSENT else float("inf")
            self._got = {name: got for name, got in self._got.items() if name in here or got > least}
        self._here, self._asking = here, asking

    def give(self, name: str, amount: float) -> None:
        """Count what the name, which is here, gets."""
        self._got[name] += amount
        if name in self._asking:
            self._time += amount / len(self._asking)
        elif not self._asking:  # nobody waits for anything, so nobody owes anything
            self._time = max(self._time, self._got[name])


class FairScheduler(ContinuousScheduler):
    """Fair shares between API keys, and between the users of each key. The next place, and the next chunk of a prompt,
    go to the key that has got the fewest tokens, and there to the user who has. Priorities and arrival order one user's
    own requests. When the pool is full, who has got the most yields; who has yielded resumes before anybody else is
    admitted, and does not yield again while others can. To give some a larger share, override ``weight``."""

    def __init__(self, pool: CachePoolProtocol, settings: EngineSettings) -> None:
        super().__init__(pool, settings)
        self._few_partial = settings.max_num_partial_prefills is not None
        self._keys = Shares()
        self._users: defaultdict[str, Shares] = defaultdict(Shares)
        """The users of each key that has anything here."""

    def weight(self, owner: Owner) -> float:
        """How much the owner gets, in relation to others; more than 0. It divides what is counted for
        the user and for the key: a key whose users weigh more gets more, too."""
        return 1.0

    def schedule(self) -> Schedule:
        step = self.seats.begin(self.victim, chunks=False)
        self._begin()
        self._count(step.schedule.decodes, ANSWER_COST)
        self.admit(step)
        return step.schedule

    def _begin(self) -> None:
        """Tell the shares who is here, and who asks. Only a step tells them, so that a sequence that leaves and is
        added again because a pass raised does not lose its place."""
        here: defaultdict[str, set[str]] = defaultdict(set)
        asking: defaultdict[str, set[str]] = defaultdict(set)
        for sequence in (*self.seats.running, *self.seats.waiting):
            key, user = sequence.request.owner
            here[key].add(user)
            if not sequence.decoding:
                asking[key].add(user)
        self._keys.begin(set(here), set(asking))
        self._users = defaultdict(Shares, {key: self._users[key] for key in here})
        for key, users in self._users.items():
            users.begin(here[key], asking[key])

    def admit(self, step: Step) -> None:
        """Plan chunks, of prompts that are part-way and of those that wait, in the order of shares."""
        owners: defaultdict[Owner, list[Sequence]] = defaultdict(list)
        for sequence in (*self.seats.running, *(() if self.seats.full else self.seats.waiting)):
            if not sequence.decoding:
                owners[sequence.request.owner].append(sequence)
        queues = list(owners.values())
        for queue in queues:
            queue.sort(key=self._place, reverse=True)  # the owner's next one is at the end
        while queues := [queue for queue in queues if queue]:
            first = min(queues, key=lambda queue: self._place(queue[-1])).pop()
            if first.slot is not None:
                planned = self.seats.extend(first, step)
            elif not (planned := self.seats.admit(first, step)):  # nor is anybody else admitted
                queues = [[sequence for sequence in queue if sequence.slot is not None] for queue in queues]
            if planned:
                self._count(step.schedule.prefills[-1:])

    def victim(self) -> Sequence:
        return max(self.seats.running, key=self._place)

    def _place(self, sequence: Sequence) -> tuple[Any, ...]:
        """Where few prompts may be part-way, those that are go on. Whoever has yielded once comes back first, and is
        the last to yield again: computing a sequence anew for each one that comes would help nobody."""
        waits = self._few_partial and sequence.slot is None
        key, user = sequence.request.owner
        return waits, not sequence.recomputed, self._keys[key], self._users[key][user], self.seats.key(sequence)

    def _count(self, works: Iterable[Work], cost: float = 1.0) -> None:
        for work in works:
            sequence = work.sequence
            if (new := work.end - max(work.start, sequence.counted)) > 0:
                sequence.counted = work.end
                owner = sequence.request.owner
                amount = new * cost / self.weight(owner)
                self._keys.give(owner.key, amount)
                self._users[owner.key].give(owner.user, amount)
