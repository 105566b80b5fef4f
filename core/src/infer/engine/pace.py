"""Steps that end in time: what a step computes of prompts is cut by what it will take, so that whoever waits for the
next token has it within a goal. An answer does not depend on where its prompt is cut."""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import chain, combinations
from operator import mul
from typing import NamedTuple

from infer.contracts.scheduler import Schedule, Work, Works

KEPT = 0.98
"""The weight of what was known, beside each new step of the same kind."""
RATE = 0.05
"""The weight of the newest step in the machine's speed, which changes faster than what a step is made of."""
EVERY = 8
"""Costs are fitted anew once so many steps have been timed."""
OUTLIER = 3.0
"""A step that takes this many times as long as expected has been interrupted, and is not counted."""
FIRST = 32
"""Tokens of prompts in a step, while it is not known what they take."""
SHARE = 0.25
"""Prompts may take at least this part of what the step takes without them, so that they go on where the goal is out of
reach."""


class Amounts(NamedTuple):
    """What the time of a step is a linear form of."""

    passes: float
    tokens: float
    positions: float
    """Whose K and V sequences read."""
    pairs: float
    """Of a token and a position that it attends to."""

    @classmethod
    def of(cls, starts: Iterable[int], lens: Iterable[int], passes: int = 0) -> Amounts:
        tokens = positions = pairs = 0
        for start, length in zip(starts, lens, strict=True):
            tokens += length
            positions += start + length
            pairs += length * start + length * (length + 1) // 2
        return cls(passes, tokens, positions, pairs)

    def times(self, seconds: Amounts) -> float:
        return float(sum(map(mul, self, seconds)))


class Fit:
    """Least squares with no coefficient below 0, weighted by the inverse of the time. Old observations fade."""

    def __init__(self) -> None:
        size = len(Amounts._fields)
        self.squares = [[0.0] * size for _ in range(size)]
        self.products = [0.0] * size
        self.count = 0

    def add(self, amounts: Amounts, seconds: float) -> None:
        self.count += 1
        weights = [value / seconds for value in amounts]
        for row, weight in zip(self.squares, weights, strict=True):
            row[:] = [KEPT * known + weight * other for known, other in zip(row, weights, strict=True)]
        self.products = [KEPT * known + weight for known, weight in zip(self.products, weights, strict=True)]


class Pace:
    """Knows from the steps so far what a step takes, and cuts what is planned of prompts to ``goal_s`` seconds."""

    def __init__(self, goal_s: float) -> None:
        self._goal_s = goal_s
        self._fits = Fit(), Fit()
        """Of steps without prompts and with them: a long answer does not make what prompts take forgotten."""
        self._seconds: Amounts | None = None
        """What one of each takes; None until it is known."""
        self._timed = 0
        """Steps since the last fit."""
        self._slowness = 1.0
        """What steps take of late, by what they should."""
        self._last: Amounts
        """Of the step that was timed last."""

    def learn(self, works: Seq[Works], seconds: float) -> None:
        """A step has taken ``seconds`` for the passes of these works."""
        amounts = Amounts.of(chain(*(each.starts for each in works)), chain(*(each.lens for each in works)), len(works))
        if self._seconds is not None:
            ratio = seconds / max(amounts.times(self._seconds), 1e-9)
            if ratio > OUTLIER * self._slowness:
                return
            self._slowness += RATE * (ratio - self._slowness)
        prompts = any(not all(each.columns[4]) for each in works)
        self._fits[prompts].add(amounts, seconds)
        self._last = amounts
        self._timed += 1

    def cut(self, schedule: Schedule) -> Schedule:
        """The schedule, with no more of its prompts than there is time for, if anybody waits for a token besides. The
        first prompt has half of the time at least, and goes on by a token at least. The others come as their priority
        says, and of the same priority those first of which least is left."""
        decodes, prefills = schedule.decodes, schedule.prefills
        if not (decodes and prefills):
            return schedule
        seconds, works = self._known(), Works.of(decodes)
        if seconds is None:
            seconds, left = Amounts(0, 1, 0, 0), float(FIRST)
        else:
            without = Amounts.of(works.starts, works.lens, 1).times(seconds)
            left = self._goal_s / self._slowness - without - (0 if schedule.mixed else seconds.passes)
            left = max(left, SHARE * without)
        lens = [0] * len(prefills)

        def take(i: int, time: float) -> float:
            lens[i] = length = min(prefills[i].length, _longest(seconds, prefills[i].start, time))
            return Amounts.of([prefills[i].start], [length]).times(seconds) if length else 0.0

        others = sorted(range(1, len(prefills)), key=lambda i: _turn(prefills[i]))
        spare = left / 2
        for i in others:
            spare -= take(i, spare)
        take(0, left / 2 + spare)
        lens[0] = max(1, lens[0])
        kept = [
            work if length == work.length else work.sequence.extend(length)
            for work, length in zip(prefills, lens, strict=True)
            if length
        ]
        return Schedule(decodes, kept, schedule.mixed)

    def _known(self) -> Amounts | None:
        """What one of each takes."""
        if all(fit.count for fit in self._fits) and (self._seconds is None or self._timed >= EVERY):
            one, other = self._fits
            squares = [[*map(sum, zip(*rows, strict=True))] for rows in zip(one.squares, other.squares, strict=True)]
            products = [*map(sum, zip(one.products, other.products, strict=True))]
            before, self._seconds = self._seconds, Amounts(*_non_negative(squares, products))
            if before is not None:  # what the fit has learned of the speed does not count twice
                last, now = (self._last.times(each) for each in (before, self._seconds))
                self._slowness *= last / now if now else 1.0
            self._timed = 0
        return self._seconds


def _turn(work: Work) -> tuple[int, int]:
    sequence = work.sequence
    return sequence.rank[0], sequence.prefill_end - work.start


def _longest(seconds: Amounts, start: int, time: float) -> int:
    """How many positions from ``start`` on take no more than ``time``: the root of a quadratic form."""
    _, token, position, pair = seconds
    linear, left = token + position + pair * (start + 0.5), time - position * start
    if left <= 0:
        return 0
    if not linear and not pair:
        return 1 << 62
    return int(2 * left / (linear + math.sqrt(linear * linear + 2 * pair * left)))


def _non_negative(squares: Seq[Seq[float]], products: Seq[float]) -> list[float]:
    """The solution of least squares, given its normal equations, among those with no coefficient below 0. There are
    few: every subset of them is tried."""
    size = len(products)
    best, least = [0.0] * size, 0.0
    for count in range(1, size + 1):
        for chosen in combinations(range(size), count):
            found = _solved([[squares[i][j] for j in chosen] for i in chosen], [products[i] for i in chosen])
            if found is None or min(found) < 0:
                continue
            rest = -sum(x * products[i] for x, i in zip(found, chosen, strict=True))  # less what all have in common
            if rest < least:
                best, least = [0.0] * size, rest
                for x, i in zip(found, chosen, strict=True):
                    best[i] = x
    return best


def _solved(a: list[list[float]], b: list[float]) -> list[float] | None:
    """Of a x = b, with a symmetric and not negative; None if it has no one solution."""
    scale = [math.sqrt(row[i]) for i, row in enumerate(a)]
    if not all(scale):
        return None
    n = len(b)
    rows = [[a[i][j] / scale[i] / scale[j] for j in range(n)] + [b[i] / scale[i]] for i in range(n)]
    for i in range(n):
        if rows[i][i] < 1e-9:
            return None
        for k in range(i + 1, n):
            factor = rows[k][i] / rows[i][i]
            rows[k] = [x - factor * y for x, y in zip(rows[k], rows[i], strict=True)]
    found = [0.0] * n
    for i in reversed(range(n)):
        found[i] = (rows[i][n] - sum(rows[i][j] * found[j] for j in range(i + 1, n))) / rows[i][i]
    return [x / s for x, s in zip(found, scale, strict=True)]
