"""How many draft tokens pay: what a pass costs by its rows, and how often drafts have been right."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from infer.contracts.params import SamplingParams
from infer.contracts.protocols import CachePoolProtocol
from infer.contracts.request import Request
from infer.contracts.schedule import Sequence, Work
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
FIRST = 3
SOONER = 0.5
"""Proposing takes longer now and then, as when a second model reads a prompt, so the least of the first times counts,
and a time below the expected one counts more than one above."""
MARGIN = 1.02
"""Drafts have to promise so many times the speed without them."""
SLOWEST = 0.97
"""No sequence may be slower than so many times its speed without drafts, whatever the others gain by theirs."""
TRIALS = 0.005
"""The part of all time that drafts may take which do not promise to pay, to find out whether they do."""
PRIOR = 1.0
"""How many verified drafts of a sequence weigh as much as what is known of all sequences."""
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


class Payoff:
    """Decides how many draft tokens to verify: as many as promise the most tokens per second of all sequences together.
    Each draft of a sequence is expected to be right as often as its last ones were; what is not known of it yet, is
    taken from all."""

    def __init__(self, costs: Costs, *, waits: bool = False) -> None:
        """``waits``: the device waits when a proposer is asked, even if it has nothing to propose."""
        self._costs = costs
        self._waits = waits
        self._chances: dict[Sequence, Chance] = {}
        self._all = Chance(1.0, 2.0)
        self._each = math.inf
        """Seconds that proposing a draft token takes."""
        self._first = FIRST
        """How many drafts have still to be asked for, one at a time, before that is known."""
        self._spare = self._price = 0.0
        """Seconds that trials may still take, and that the next one is expected to take."""
        self._turn = 0

    def plan(self, rows: int, most: Mapping[Sequence, int]) -> dict[Sequence, int]:
        """How many drafts each sequence should verify, of those that want any, in a pass of ``rows`` rows besides.
        ``most`` has every sequence that decodes, with the most drafts that it can verify."""
        able = [sequence for sequence, count in most.items() if count > 0]
        if not able:
            return {}
        if self._first > 0:
            return {able[0]: 1}
        plain = self._costs(rows, False)
        chances = [self._chance(sequence) for sequence in able]
        if sum(chance / (1 - chance) for chance in chances) < (MARGIN - 1) * len(most):
            return self._trial(rows, able, plain)
        highest = max(most.values())
        right = np.array(chances)
        gains = right[:, None] ** np.arange(1, highest + 1)
        gains *= np.arange(highest) < np.array([most[sequence] for sequence in able])[:, None]
        order = np.argsort(-gains, axis=None, kind="stable")
        tokens = len(most) + np.cumsum(gains.ravel()[order])
        extra = np.arange(1, len(order) + 1)
        seconds = np.maximum(self._costs.with_drafts(rows, len(order)), plain) + self._each * extra
        # Whoever has no draft gets one token per pass, however long others' drafts make it.
        everyone = np.cumsum(order % highest == 0) == len(most)
        fair = seconds * SLOWEST <= plain * np.where(everyone, 1 + min(chances), 1)
        speeds = np.where(fair, tokens / seconds, 0.0)
        best = int(np.argmax(speeds))
        chosen = order[: best + 1] if speeds[best] > MARGIN * len(most) / plain else order[:0]
        counts = np.bincount(chosen // highest, minlength=len(able)) if len(chosen) else np.zeros(len(able), np.int64)
        plan = {sequence: int(count) for sequence, count in zip(able, counts, strict=True) if count}
        return plan or self._trial(rows, able, plain)

    def _trial(self, rows: int, able: Seq[Sequence], plain: float) -> dict[Sequence, int]:
        """One draft of one sequence, if there is time to spare."""
        price = self._costs(rows + 1, True) - plain + self._each
        self._price = max(price, (WAITING if self._waits else TRIALS) * plain)
        if self._price > self._spare:
            return {}
        self._turn += 1
        return {able[self._turn % len(able)]: 1}

    def proposed(self, asked: Mapping[Sequence, int], found: Mapping[Sequence, int], seconds: float) -> None:
        """How many drafts were asked for and proposed, and how long that took."""
        if found:
            each = seconds / sum(found.values())
            if self._first > 0:
                self._each = min(each, self._each)
            else:
                self._each += (SOONER if each < self._each else RATE) * (each - self._each)
            self._first -= 1
        if self._waits:
            for sequence in asked.keys() - found.keys():
                self._count(sequence, 0, NOTHING)
                self._spare = max(0.0, self._spare - self._price)

    def verified(self, sequence: Sequence, proposed: int, right: int) -> None:
        """Of so many drafts, the first ``right`` were right."""
        self._count(sequence, right, min(right + 1, proposed))

    def learn(self, rows: int, drafts: int, seconds: float) -> None:
        """A pass that did nothing but decode and verify has taken so long."""
        plain = self._costs(rows - drafts, False)
        self._costs.learn(rows, drafts > 0, seconds)
        self._spare = min(self._spare + TRIALS * seconds, max(plain, self._price))
        if drafts == 1:
            self._spare = max(0.0, self._spare - max(seconds - plain, TRIALS * plain))

    def end(self, sequence: Sequence) -> None:
        self._chances.pop(sequence, None)

    def _chance(self, sequence: Sequence) -> float:
        right, tried = self._chances.get(sequence, Chance())
        return (right + PRIOR * self._all.right / self._all.tried) / (tried + PRIOR)

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
    spared = max(0.0, found[1] - found.pop(0))
    return {rows: seconds - spared for rows, seconds in found.items()}, found
