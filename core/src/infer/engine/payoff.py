"""How many draft tokens to verify: as many as make the batch fastest, by what passes cost and how often drafts are
right. If the estimates are wrong, drafts can lose only a small part of all time."""

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
"""Numbers of rows for which costs are measured. Beyond the last, costs grow as between the last two."""
RATE = 0.05
"""The weight of the newest observation in a moving average: of costs, of acceptance rates, of proposing times."""
OUTLIER = 2.0
"""A pass that takes longer than this many times the expected time counts as if it took that long."""
TOLERANCE = 0.02
"""The part of its speed that a sequence may lose to the drafts of others. Drafts of all sequences together must promise
to gain at least as much."""
SPARE = 0.005
"""The part of all time that guesses may take, and the part that drafts may lose."""
RESERVE = 2.0
"""A budget holds at most this many times the time of a pass of one row, and what drafts owe is at most that."""
PRIOR = 2.0
"""A sequence's own acceptance rate and that of all sequences weigh the same once it has verified this many drafts."""
TRIALS = 3
"""How many guesses are asked for, one per step, before any draft is verified: they show how long proposing takes."""
IN_VAIN = 0.1
"""What a trial counts that yields no guess: a second model may still be reading the prompt."""
WAITING = 0.05
"""The part of a pass that the device waits at least, where it waits for the proposer."""


class Costs:
    """Expected seconds of a pass by its number of rows, without draft tokens and with them."""

    def __init__(self, plain: Mapping[int, float], drafts: Mapping[int, float]) -> None:
        """Measured seconds, for the same numbers of rows."""
        self._rows = sorted(plain)
        self._seconds = [[measured[rows] for rows in self._rows] for measured in (plain, drafts)]

    def __call__(self, rows: int, drafts: bool) -> float:
        below, share = self._place(rows)
        known = self._seconds[drafts]
        if not share:
            return known[below]
        slope = known[below + 1] - known[below]
        return known[below] + (max(0.0, slope) if share > 1 else slope) * share

    def with_drafts(self, rows: int, most: int) -> Floats:
        """Seconds of passes of ``rows`` rows and 1, 2, ... ``most`` drafts, [most]."""
        known, (*_, last) = self._seconds[True], self._rows
        counts = np.arange(rows + 1, rows + most + 1)
        # Between two known numbers the greater counts, because products cost more by whole tiles of rows.
        found: Floats = np.array(known)[np.minimum(np.searchsorted(self._rows, counts), len(known) - 1)]
        if counts[-1] > last and len(known) > 1:
            slope = max(0.0, (known[-1] - known[-2]) / (last - self._rows[-2]))
            found += slope * np.maximum(counts - last, 0)
        return found

    def learn(self, rows: int, drafts: bool, seconds: float) -> None:
        """Correct the costs by the time of a pass. All costs change with the speed of the machine; those of this number
        of rows change twice as much."""
        ratio = min(max(seconds / self(rows, drafts), 1 / OUTLIER), OUTLIER) ** (2 * RATE)
        for known in self._seconds:
            known[:] = [ratio * value for value in known]
        below, share = self._place(rows)
        known = self._seconds[drafts]
        known[below] *= ratio ** (1 - min(share, 1))
        if share:
            known[below + 1] *= ratio ** min(share, 1)

    def _place(self, rows: int) -> tuple[int, float]:
        """The index of a known number of rows, and the way from there to the next one: 0 if it is exact, above 1 if it
        is beyond the last."""
        at = self._rows
        below = min(max(bisect_right(at, rows) - 1, 0), max(len(at) - 2, 0))
        if len(at) == 1 or rows <= at[0]:
            return below, 0.0
        return below, (rows - at[below]) / (at[below + 1] - at[below])


class Acceptance(NamedTuple):
    """Counts of drafts that were compared with the token drawn at their position. Old ones fade."""

    accepted: float = 0.0
    compared: float = 0.0

    def add(self, accepted: int, compared: int) -> Acceptance:
        return Acceptance((1 - RATE) * self.accepted + accepted, (1 - RATE) * self.compared + compared)

    def rate(self, prior: float, weight: float) -> float:
        """The acceptance rate, as if ``weight`` earlier comparisons had had the rate ``prior``."""
        return (self.accepted + weight * prior) / (self.compared + weight)


class Plan(NamedTuple):
    """For whom to propose drafts."""

    counts: Mapping[Sequence, int]
    """How many drafts each sequence verifies, of those that verify any."""
    guessing: Seq[Sequence] = ()
    """Other sequences, which guess: one draft is proposed, no pass computes it, and it is compared with the token that
    is drawn without it."""


class Payoff:
    """Decides how many draft tokens to verify: the number that promises the most tokens per second of all sequences.

    Estimates are the costs of passes, the acceptance rate of each sequence and the time of proposing. They may be
    wrong, so two budgets of real time bound what drafts may lose. Each earns ``SPARE`` of all time. Drafts pay what
    passes with them have lost, and are credited with what they have gained; while their budget is overdrawn, nothing is
    verified. Guesses pay what asking for them takes, but where drafts are asked for as well, those pay for all. Guesses
    find out at no risk whether drafts would be right."""

    def __init__(self, costs: Costs, *, waits: bool = False) -> None:
        """``waits``: the device waits when a proposer is asked, even if it has nothing to propose."""
        self._costs = costs
        self._waits = waits
        self._acceptance: dict[Sequence, Acceptance] = {}
        self._all = Acceptance()
        self._per_draft = self._per_ask = math.inf
        """Expected seconds of proposing, by draft token and by sequence that is asked."""
        self._trials: float = TRIALS
        """How many trials are left. While there are any, nothing is verified."""
        self._drafts_budget = RESERVE * costs(1, False)
        self._guesses_budget = 0.0
        """Seconds left to lose, and to guess in."""
        self._accepted = 0
        """How many drafts of this step were right."""
        self._wait = 0.0
        """Seconds that the device waits in this step if the proposer is asked."""
        self._turn = 0
        """Counts guesses, so that sequences take turns."""

    def plan(self, rows: int, most: Mapping[Sequence, int]) -> Plan:
        """Plan a pass of ``rows`` rows besides drafts. ``most`` has every sequence that decodes, with the most drafts
        that it can verify."""
        self._accepted = 0
        able = [sequence for sequence, count in most.items() if count > 0]
        if not able:
            return Plan({})
        if self._trials > 0:
            return Plan({}, able[:1])
        self._wait = WAITING * self._costs(rows, False) if self._waits else 0.0
        counts = self._counts(rows, most, able) if self._drafts_budget >= 0 else {}
        return Plan(counts, self._guessing([sequence for sequence in able if sequence not in counts]))

    def _counts(self, rows: int, most: Mapping[Sequence, int], able: Seq[Sequence]) -> dict[Sequence, int]:
        """How many drafts of each sequence to verify; {} if none pay."""
        rates = [self._rate(sequence) for sequence in able]
        if sum([rate / (1 - rate) for rate in rates]) < TOLERANCE * len(most):
            return {}  # drafts without end and at no cost would not gain enough
        deepest = max(most.values())
        # Tokens that each draft adds: the chance that it and all before it are right, [able, deepest].
        gains = np.array(rates)[:, None] ** np.arange(1, deepest + 1)
        gains *= np.arange(deepest) < np.array([most[sequence] for sequence in able])[:, None]
        plain = self._costs(rows, False)
        seconds = np.maximum(self._costs.with_drafts(rows, gains.size), plain)
        seconds = seconds + self._per_draft * np.arange(1, gains.size + 1)
        # A sequence without a draft gets one token per pass, however long the drafts of others make the pass. So drafts
        # are added in two orders: the likeliest first, and the first draft of every sequence before any second one.
        orders = [gains]
        if len(able) == len(most):
            orders.append(gains + (np.arange(deepest) == 0))
        chosen, fastest = np.arange(0), (1 + TOLERANCE) * len(most) / plain
        for keys in orders:
            order = np.argsort(-keys, axis=None, kind="stable")
            all_draft = np.cumsum(order % deepest == 0) == len(most)
            slowest = np.where(all_draft, 1 + min(rates), 1)  # tokens that the slowest sequence gets
            speeds = (len(most) + np.cumsum(gains.ravel()[order])) / seconds
            speeds[slowest / seconds < (1 - TOLERANCE) / plain] = 0
            best = int(np.argmax(speeds))
            if speeds[best] > fastest:
                chosen, fastest = order[: best + 1], speeds[best]
        counts = np.bincount(chosen // deepest, minlength=len(able)).tolist()
        return {sequence: count for sequence, count in zip(able, counts, strict=True) if count}

    def _guessing(self, able: Seq[Sequence]) -> Seq[Sequence]:
        """Some of the sequences, in turn: as many as the budget pays for."""
        count = min(len(able), int((self._guesses_budget - self._wait) / max(self._per_ask, 1e-9)))
        if count <= 0:
            return ()
        self._turn += count
        return [able[(self._turn + i) % len(able)] for i in range(count)]

    def proposed(self, plan: Plan, found: Mapping[Sequence, int], seconds: float) -> None:
        """Learn how many drafts were proposed for whom, and how long that took."""
        # Now and then proposing takes much longer, as when a second model reads a prompt. So the least of the last
        # times is expected.
        self._per_ask = min(seconds / (len(plan.counts) + len(plan.guessing)), (1 + RATE) * self._per_ask)
        if found:
            self._per_draft = min(seconds / sum(found.values()), (1 + RATE) * self._per_draft)
        self._trials -= 1 if found else IN_VAIN
        if plan.counts:
            # A pass with drafts takes its own time, waiting included; asked in vain, the device has waited for nothing.
            in_vain = found.keys().isdisjoint(plan.counts)
            self._drafts_budget -= seconds + self._wait if in_vain else seconds
        else:
            least = -RESERVE * self._costs(1, False)
            self._guesses_budget = max(least, self._guesses_budget - seconds - self._wait)

    def verified(self, sequence: Sequence, proposed: int, right: int) -> None:
        """Learn that the first ``right`` of so many drafts were right. Those after the first wrong one tell nothing."""
        self._accepted += right
        self._compare(sequence, right, min(right + 1, proposed))

    def guessed(self, sequence: Sequence, right: bool) -> None:
        """Learn whether a guess was right."""
        self._compare(sequence, int(right), 1)

    def learn(self, rows: int, drafts: int, seconds: float) -> None:
        """Learn the time of a pass that did nothing but decode and verify."""
        decodes = rows - drafts
        if drafts:
            took = min(seconds, OUTLIER * self._costs(rows, True))
            self._drafts_budget += self._costs(decodes, False) * (1 + self._accepted / decodes) - took
        self._costs.learn(rows, drafts > 0, seconds)
        earned, most = SPARE * seconds, RESERVE * self._costs(1, False)
        self._drafts_budget = min(max(self._drafts_budget + earned, -most), most)
        # The budget can always grow to the price of one guess, so that guessing never ends.
        guess = 0.0 if math.isinf(self._per_ask) else self._per_ask + self._wait
        self._guesses_budget = min(self._guesses_budget + earned, max(most, guess))

    def end(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""
        self._acceptance.pop(sequence, None)

    def _rate(self, sequence: Sequence) -> float:
        """The acceptance rate expected of a sequence, in (0, 1): never certain."""
        of_all = self._all.rate(prior=0.5, weight=0.5)
        return self._acceptance.get(sequence, Acceptance()).rate(of_all, PRIOR)

    def _compare(self, sequence: Sequence, accepted: int, compared: int) -> None:
        self._acceptance[sequence] = self._acceptance.get(sequence, Acceptance()).add(accepted, compared)
        self._all = self._all.add(accepted, compared)


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
    for _ in range(4):  # a pass is replayed from the third or fourth time on
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
