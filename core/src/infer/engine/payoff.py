"""How many draft tokens pay: what a pass costs by its rows, and how often drafts have been right."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from infer.contracts.cache import CachePoolProtocol
from infer.contracts.params import SamplingParams
from infer.contracts.request import Request
from infer.contracts.scheduler import Sequence, Work
from infer.engine.batch import pack
from infer.engine.runner import Runner

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]

ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of rows for which the costs are measured. Beyond the last, costs grow as between the last two."""
REPEATS = 4
"""A pass is replayed from the third or fourth time on."""
RATE = 0.1
"""How much of the difference between a step's time and the expected one goes into all costs, and once more into those
of its number of rows."""
FIRST, VAIN = 3, 0.1
"""So many drafts are asked for, one at a time, before it is known how long proposing takes; an ask that yields none
counts so much of one that yields a draft."""
SOONER = 0.5
"""Proposing takes longer now and then, as when a second model reads a prompt, so the least of the first times counts,
and a time below the expected one counts more than one above."""
MARGIN = 1.05
"""Drafts have to promise so many times the speed without them."""
SLOWEST = 0.98
"""No sequence may be slower than so many times its speed without drafts, whatever the others gain by theirs."""
SPARE = 0.005
"""The part of all time that guesses may take, and as much again that drafts may lose."""
RESERVE = 2.0
"""How many passes' time of a single row drafts may lose before they have gained anything, or of what they have gained;
and how many they may owe at most."""
OUTLIER = 2.0
"""A pass's time above so many times the expected one is not blamed on its drafts."""
SURE = 0.99
"""No draft is expected to be right more often."""
PRIOR = 2.0
"""How many verified drafts of a sequence weigh as much as what is known of all sequences."""
DOUBT = 8.0
"""The same where the question is whether a sequence's drafts make up for the time of all others': the least of many
chances would often be too low by mere bad luck."""
FADE, FADE_ALL = 0.95, 0.95
"""What a verification still counts after the next one, of the same sequence and of any."""
WAITING = 0.05
"""The part of a pass's time that it costs at least to ask, where the device waits for it."""
NOTHING = 0.25
"""How much of a wrong draft it counts that there is none, where asking for drafts makes the device wait."""


class Costs:
    """Expected seconds of a pass by its number of rows, without draft tokens and with them."""

    def __init__(self, plain: Mapping[int, float], drafts: Mapping[int, float]) -> None:
        """Measured seconds, for the same numbers of rows."""
        self._rows = sorted(plain)
        self._seconds = [[measured[rows] for rows in self._rows] for measured in (plain, drafts)]

    def __call__(self, rows: int, drafts: bool) -> float:
        below, share = self._place(rows)
        known = self._seconds[drafts]
        return known[below] + (known[below + 1] - known[below]) * share if share else known[below]

    def with_drafts(self, rows: int, most: int) -> Floats:
        """Of passes of ``rows`` rows and 1, 2, ... ``most`` drafts."""
        known, (*_, last) = self._seconds[True], self._rows
        counts = np.arange(rows + 1, rows + most + 1)
        # Between two known numbers the greater counts, because products cost more by whole tiles of rows.
        found: Floats = np.array(known)[np.minimum(np.searchsorted(self._rows, counts), len(known) - 1)]
        if counts[-1] > last and len(known) > 1:
            slope = max(0.0, (known[-1] - known[-2]) / (last - self._rows[-2]))
            found += slope * np.maximum(counts - last, 0)
        return found

    def learn(self, rows: int, drafts: bool, seconds: float) -> None:
        """Correct the costs by a pass. How fast the machine is changes all of them, and one slow pass little."""
        wrong = min(2.0, max(0.5, seconds / self(rows, drafts))) ** RATE
        for known in self._seconds:
            known[:] = [wrong * value for value in known]
        below, share = self._place(rows)
        known = self._seconds[drafts]
        known[below] *= wrong ** (1 - min(share, 1))
        if share:
            known[below + 1] *= wrong ** min(share, 1)

    def _place(self, rows: int) -> tuple[int, float]:
        """The index of a known number of rows, and the way from there to the next one: 0 if it is exact, above 1 if it
        is beyond the last."""
        at = self._rows
        below = min(max(bisect_right(at, rows) - 1, 0), max(len(at) - 2, 0))
        if len(at) == 1 or rows <= at[0]:
            return below, 0.0
        return below, (rows - at[below]) / (at[below + 1] - at[below])


class Chance(NamedTuple):
    """How many of a sequence's drafts have been right, and how many were compared with a drawn token. Both fade."""

    right: float = 0.0
    tried: float = 0.0


class Plan(NamedTuple):
    """For whom to propose drafts."""

    counts: Mapping[Sequence, int]
    """How many drafts each sequence verifies, of those that verify any."""
    guessing: Seq[Sequence] = ()
    """Others, for whom one draft is proposed and no pass computes it: it is compared with the token that is drawn
    without it."""


class Payoff:
    """Decides how many draft tokens to verify: as many as promise the most tokens per second of all sequences together.
    Each draft of a sequence is expected to be right as often as its last ones were; what is not known of it yet, is
    taken from all.

    Promises may be wrong, because costs and chances are. So an account is kept of what drafts have gained or lost, by
    passes' real times, and nothing is verified while they have lost more than they may."""

    def __init__(self, costs: Costs, *, waits: bool = False) -> None:
        """``waits``: the device waits when a proposer is asked, even if it has nothing to propose."""
        self._costs = costs
        self._waits = waits
        self._chances: dict[Sequence, Chance] = {}
        self._all = Chance(1.0, 2.0)
        self._each = self._ask = math.inf
        """Seconds that proposing a draft token takes, and that asking for one does."""
        self._first: float = FIRST
        """How many drafts have still to be asked for, one at a time, before that is known."""
        self._account = RESERVE * costs(1, False)
        """Seconds that drafts may still lose."""
        self._guesses = self._wait = 0.0
        """Seconds that guesses may take, and that the device waits for those of this step."""
        self._right = 0
        """How many of this step's drafts were right."""
        self._turn = 0

    def plan(self, rows: int, most: Mapping[Sequence, int]) -> Plan:
        """For a pass of ``rows`` rows besides drafts. ``most`` has every sequence that decodes, with the most drafts
        that it can verify."""
        self._right = 0
        able = [sequence for sequence, count in most.items() if count > 0]
        if not able:
            return Plan({})
        if self._first > 0:
            return Plan({}, able[:1])
        counts = self._counts(rows, most, able) if self._account >= 0 else {}
        return Plan(counts, self._guessing([sequence for sequence in able if sequence not in counts], rows))

    def _counts(self, rows: int, most: Mapping[Sequence, int], able: Seq[Sequence]) -> dict[Sequence, int]:
        chances = [self._chance(sequence) for sequence in able]
        if sum(chance / (1 - chance) for chance in chances) < (MARGIN - 1) * len(most):
            return {}
        plain, highest = self._costs(rows, False), max(most.values())
        right = np.array(chances)
        gains = right[:, None] ** np.arange(1, highest + 1)
        gains *= np.arange(highest) < np.array([most[sequence] for sequence in able])[:, None]
        # Whoever has no draft gets one token per pass, however long others' drafts make it. So the drafts are added in
        # two ways: by their chances alone, and each sequence's first before all others.
        seconds = np.maximum(self._costs.with_drafts(rows, gains.size), plain)
        seconds = seconds + self._each * np.arange(1, gains.size + 1)
        least = 1 + min(self._chance(sequence, DOUBT) for sequence in able)
        order, fastest = np.arange(0), MARGIN * len(most) / plain
        first = np.where(np.arange(highest) == 0, 1.0, 0.0)
        for keys in (gains, gains + first) if len(able) == len(most) else (gains,):
            by_key = np.argsort(-keys, axis=None, kind="stable")
            everyone = np.cumsum(by_key % highest == 0) == len(most)
            fair = seconds * SLOWEST <= plain * np.where(everyone, least, 1)
            speeds = np.where(fair, (len(most) + np.cumsum(gains.ravel()[by_key])) / seconds, 0.0)
            best = int(np.argmax(speeds))
            if speeds[best] > fastest:
                order, fastest = by_key[: best + 1], speeds[best]
        counts = np.bincount(order // highest, minlength=len(able)).tolist()
        return {sequence: count for sequence, count in zip(able, counts, strict=True) if count}

    def _guessing(self, able: Seq[Sequence], rows: int) -> Seq[Sequence]:
        """Some of the sequences, in turn: as many as there is time for."""
        self._wait = WAITING * self._costs(rows, False) if self._waits else 0.0
        count = min(len(able), int((self._guesses - self._wait) / max(self._ask, 1e-9)))
        if count <= 0:
            return ()
        self._turn += count
        return [able[(self._turn + i) % len(able)] for i in range(count)]

    def proposed(self, plan: Plan, found: Mapping[Sequence, int], seconds: float) -> None:
        """How many drafts were proposed, and how long that took."""
        asked = [*plan.counts, *plan.guessing]
        every = seconds / len(asked)
        each = seconds / sum(found.values()) if found else None
        if self._first > 0:
            self._ask = min(every, self._ask)
            self._each = self._each if each is None else min(each, self._each)
            self._first -= VAIN if each is None else 1
        else:
            self._ask += RATE * (every - self._ask)
            if each is not None:
                rate = SOONER if each < self._each else RATE
                self._each = each if math.isinf(self._each) else self._each + rate * (each - self._each)
        if plan.counts:
            self._account -= seconds
        else:
            self._guesses = max(0.0, self._guesses - seconds - self._wait)
        if self._waits:
            for sequence in asked:
                if sequence not in found:
                    self._count(sequence, 0, NOTHING)

    def verified(self, sequence: Sequence, proposed: int, right: int) -> None:
        """Of so many drafts, the first ``right`` were right."""
        self._right += right
        self._count(sequence, right, min(right + 1, proposed))

    def guessed(self, sequence: Sequence, right: bool) -> None:
        """A guess was right or wrong."""
        self._count(sequence, int(right), 1)

    def learn(self, rows: int, drafts: int, seconds: float) -> None:
        """A pass that did nothing but decode and verify has taken so long."""
        decodes = rows - drafts
        if drafts:
            took = min(seconds, OUTLIER * self._costs(rows, True))
            self._account += self._costs(decodes, False) * (1 + self._right / decodes) - took
        self._costs.learn(rows, drafts > 0, seconds)
        most, spare = RESERVE * self._costs(1, False), SPARE * seconds
        self._account = min(max(self._account + spare, -most), most)
        self._guesses = min(self._guesses + spare, most)

    def end(self, sequence: Sequence) -> None:
        self._chances.pop(sequence, None)

    def _chance(self, sequence: Sequence, prior: float = PRIOR) -> float:
        right, tried = self._chances.get(sequence, Chance())
        return min(SURE, (right + prior * self._all.right / self._all.tried) / (tried + prior))

    def _count(self, sequence: Sequence, right: int, tried: float) -> None:
        own = self._chances.get(sequence, Chance())
        self._chances[sequence] = Chance(FADE * own.right + right, FADE * own.tried + tried)
        self._all = Chance(FADE_ALL * self._all.right + right, FADE_ALL * self._all.tried + tried)


def measure(
    runner: Runner, pool: CachePoolProtocol, truncate: Callable[[int, int], None], most_rows: int
) -> tuple[dict[int, float], dict[int, float]]:
    """Seconds of passes without drafts and with them, by their number of rows: the least of some repetitions. Without
    drafts, a pass is replayed where it can be, which spares as much with one row as with several. The pool is empty."""
    sizes = [rows for rows in ROWS if rows <= max(most_rows, 2)]
    place = pool.allocate([0] * sizes[-1], reuse=False)
    assert place is not None, "the pool is empty before the first request"
    sequence = Sequence(Request((0,), SamplingParams(temperature=0)), 0, sizes[-1])
    sequence.slot = place.slot
    decode = Work(sequence, 0, 1, 1, True)
    works = {0: decode} | {n: decode._replace(length=n, draws=n, drafts=(0,) * (n - 1)) for n in sizes}
    works[1] = decode._replace(decode=False)  # not replayed
    found = dict.fromkeys(works, math.inf)
    for _ in range(REPEATS):
        for rows, work in works.items():
            began = time.perf_counter()
            runner.launch(pack([work])).results()
            found[rows] = min(found[rows], time.perf_counter() - began)
            truncate(place.slot, 0)
    pool.free(place.slot)
    replayed = found.pop(0)
    spared = max(0.0, found[1] - replayed)
    # Where something else has slowed the passes of one row, less is spared than that.
    return {rows: min(seconds, max(seconds - spared, replayed)) for rows, seconds in found.items()}, found
