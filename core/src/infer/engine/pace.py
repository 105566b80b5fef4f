"""A goal for the time between tokens: what a step computes of prompts is cut by what it will take, so that whoever
waits for the next token has it in time. An answer does not depend on where its prompt is cut."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from itertools import chain, combinations
from operator import mul
from typing import NamedTuple

from infer.contracts.scheduler import Schedule, Work, Works
from infer.contracts.sections import EngineSettings

KEPT = 0.98
"""The weight of what was known, beside each new step of the same kind."""
RATE = 0.05
"""The weight of the newest step in moving averages: of the machine's speed, and of tokens per decode."""
EVERY = 8
"""Costs are fitted anew once so many steps have been timed."""
OUTLIER = 3.0
"""A step that takes this many times as long as expected has been interrupted, and is not counted. At the third in a
row, all that was known is forgotten."""
FIRST = 16
"""Tokens of prompts in a step, while it is not known what they take."""
BEYOND = 2
"""Beside decodes, a step computes at most this many times the prompt tokens of any such step that has been timed."""
SHARE = 0.25
"""The first prompt may take at least this part of what the step takes without its tokens, so that it goes on where the
goal is out of reach."""


class Amounts(NamedTuple):
    """What the time of a step is a linear form of. With seconds in place of numbers: what one of each takes."""

    passes: float
    prompts: float
    """Whether the step computes prompts: a pass of decodes alone may be recorded and cost less."""
    tokens: float
    positions: float
    """Positions whose K and V are read, once for each sequence."""
    pairs: float
    """Pairs of a token and a position that it attends to."""

    @classmethod
    def of(cls, starts: Seq[int], lens: Seq[int], passes: int = 0, prompts: bool = False) -> Amounts:
        tokens = sum(lens)
        return cls(passes, prompts, tokens, sum(starts) + tokens, count_pairs(starts, lens))

    def seconds(self, costs: Amounts) -> float:
        return float(sum(map(mul, self, costs)))


class Fit:
    """Least squares with no coefficient below 0, weighted by the inverse of the time. Old observations fade."""

    def __init__(self) -> None:
        size = len(Amounts._fields)
        self.squares = [[0.0] * size for _ in range(size)]
        self.products = [0.0] * size
        self.count = 0
        self.outliers = 0
        """In a row."""

    def add(self, amounts: Amounts, seconds: float) -> None:
        self.count += 1
        weights = [value / seconds for value in amounts]
        for row, weight in zip(self.squares, weights, strict=True):
            row[:] = [KEPT * known + weight * other for known, other in zip(row, weights, strict=True)]
        self.products = [KEPT * known + weight for known, weight in zip(self.products, weights, strict=True)]


class Pace:
    """Knows from the steps so far what a step takes, and cuts what is planned of prompts to ``goal_s`` seconds."""

    @classmethod
    def of(cls, settings: EngineSettings) -> Pace | None:
        """None if ``engine.target_itl_ms`` sets no goal."""
        return None if settings.target_itl_ms is None else cls(settings.target_itl_ms / 1000)

    def __init__(self, goal_s: float) -> None:
        self._goal_s = goal_s
        self._each = 1.0
        """Tokens per decode, a moving average: more than 1 with drafts, which are added later."""
        self._forget()

    def _forget(self) -> None:
        self._fits = Fit(), Fit()
        """Of steps without prompts and with them: a long answer does not make what prompts take forgotten."""
        self._costs: Amounts | None = None
        """None until they are known."""
        self._timed = 0
        """Steps since the last fit."""
        self._slowness = 1.0
        """Recent times of steps relative to what the fit expects."""
        self._most = FIRST
        """The most prompt tokens of a step that was timed."""

    def learn(self, works: Seq[Works], seconds: float) -> None:
        """A step has taken ``seconds`` for the passes of these works. Only steps with decodes count, which are what is
        cut: prompts alone come in far larger chunks."""
        seconds = max(seconds, 1e-9)
        lens = [*chain(*(each.lens for each in works))]
        decodes = [*chain(*(each.decode for each in works))]
        if not any(decodes):
            return
        of_decodes, prompts = sum(map(mul, lens, decodes)), not all(decodes)
        amounts = Amounts.of([*chain(*(each.starts for each in works))], lens, len(works), prompts)
        if self._costs is not None:
            ratio, fit = seconds / max(amounts.seconds(self._costs), 1e-9), self._fits[prompts]
            fit.outliers = fit.outliers + 1 if ratio > OUTLIER * self._slowness else 0
            if 0 < fit.outliers < 3:
                return
            if fit.outliers:
                self._forget()
            else:
                self._slowness += RATE * (ratio - self._slowness)
        self._fits[prompts].add(amounts, seconds)
        self._timed += 1
        self._most = max(self._most, sum(lens) - of_decodes)
        self._each += RATE * (of_decodes / sum(decodes) - self._each)

    def cut(self, schedule: Schedule) -> Schedule:
        """The schedule with no more of its prompts than there is time for, if anybody waits for a token besides. The
        first prompt gets at least half of the time. The rest goes by priority, then shortest remaining first."""
        decodes, prefills = schedule.decodes, schedule.prefills
        if not (decodes and prefills):
            return schedule
        works, tokens = Works.of(decodes), BEYOND * self._most
        without = Amounts.of(works.starts, works.lens, 1)._replace(tokens=self._each * len(works))
        costs, left, least = self._fitted(without), float(FIRST), 0.0
        if costs is None:
            costs = Amounts(0, 0, 1, 0, 0)
        else:
            alone = without.seconds(costs)
            fixed = costs.prompts + (0 if schedule.mixed else costs.passes)
            left = self._goal_s / self._slowness - alone - fixed
            least = costs.positions * prefills[0].start
            least += SHARE * (alone + fixed + least)
        lens = [0] * len(prefills)

        def take(i: int, time: float) -> float:
            nonlocal tokens
            start = prefills[i].start
            lens[i] = length = min(prefills[i].length, _longest(costs, start, time), tokens)
            tokens -= length
            return Amounts.of([start], [length]).seconds(costs) if length else 0.0

        spare = rest = max(0.0, min(left / 2, left - least))
        for i in sorted(range(1, len(prefills)), key=lambda i: _turn(prefills[i])):
            rest -= take(i, rest)
        take(0, max(left - spare + rest, least))
        lens[0] = max(1, lens[0])
        kept = [
            work if length == work.length else work.sequence.extend(length)
            for work, length in zip(prefills, lens, strict=True)
            if length
        ]
        return Schedule(decodes, kept, schedule.mixed)

    def _fitted(self, typical: Amounts) -> Amounts | None:
        """The costs, fitted anew if it is time to. ``typical`` are the amounts of a step."""
        count = sum(fit.count for fit in self._fits)
        if count >= 2 and self._timed >= (EVERY if count > 2 * EVERY else 1):
            one, other = self._fits
            squares = [[*map(sum, zip(*rows, strict=True))] for rows in zip(one.squares, other.squares, strict=True)]
            products = [*map(sum, zip(one.products, other.products, strict=True))]
            before, self._costs, self._timed = self._costs, Amounts(*_non_negative(squares, products)), 0
            if before is not None:  # what the fit has learned of the speed does not count twice
                ratio = typical.seconds(before) / max(typical.seconds(self._costs), 1e-9)
                self._slowness = min(max(self._slowness * ratio, 1 / OUTLIER), OUTLIER)
        return self._costs


def count_pairs(starts: Seq[int], lens: Seq[int]) -> int:
    """Pairs of a token at positions [start, start + length) and a position that it attends to."""
    before: int = sum(map(mul, starts, lens))
    return before + sum([length * (length + 1) // 2 for length in lens])


def _turn(work: Work) -> tuple[int, int]:
    sequence = work.sequence
    return sequence.request.priority, sequence.prefill_end - work.start


def _longest(costs: Amounts, start: int, time: float) -> int:
    """How many positions from ``start`` on take no more than ``time``: the root of a quadratic form."""
    linear, left = costs.tokens + costs.positions + costs.pairs * (start + 0.5), time - costs.positions * start
    if left <= 0:
        return 0
    if not linear and not costs.pairs:
        return 1 << 62
    return int(2 * left / (linear + math.sqrt(linear * linear + 2 * costs.pairs * left)))


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
    """x with a x = b, where ``a`` is symmetric and positive semidefinite; None if there is more than one."""
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
