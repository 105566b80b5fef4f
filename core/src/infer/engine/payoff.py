"""How many draft tokens pay: what a pass costs by its rows, and how often drafts have been right."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import numpy as np
import torch

from infer.contracts.protocols import CachePoolProtocol, ModelProtocol, Pass
from infer.contracts.schedule import Sequence

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]

ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of rows for which the costs are measured. Beyond the last, costs grow as between the last two."""
REPEATS = 3
RATE = 0.1
"""How much of the difference between a step's time and the expected one goes into all costs, and once more into those
of its number of rows."""
FIRST = 3
SOONER = 0.5
"""Proposing takes longer now and then, as when a second model reads a prompt, so the least of the first times counts,
and a time below the expected one counts more than one above."""
MARGIN = 1.02
"""Drafts have to promise so many times the speed without them."""
TRIALS = 0.005
"""The part of all time that drafts may take which do not promise to pay, to find out whether they do."""
PRIOR = 2.0
"""How many verified drafts of a sequence weigh as much as what is known of all sequences."""
FADE, FADE_ALL = 0.9, 0.98
"""What a verification still counts after the next one, of the same sequence and of any."""
WAITING = 0.05
"""The part of a pass's time that it costs at least to ask, where the device waits for it."""
NOTHING = 0.25
"""How much of a wrong draft it counts that there is none, where asking for drafts makes the device wait."""


class Costs:
    """Expected seconds of a pass by its number of rows, without draft tokens and with them."""

    def __init__(self, measured: Mapping[int, float]) -> None:
        self._rows: Floats = np.array(sorted(measured), dtype=np.float64)
        self._seconds = np.array([[measured[int(rows)] for rows in self._rows]] * 2)

    def __call__(self, rows: np.ndarray[Any, Any] | Seq[int], drafts: bool) -> Floats:
        at, known = np.asarray(rows, dtype=np.float64), self._seconds[int(drafts)]
        found: Floats = np.interp(at, self._rows, known)
        if len(known) > 1:
            slope = max(0.0, (known[-1] - known[-2]) / (self._rows[-1] - self._rows[-2]))
            found = found + slope * np.maximum(at - self._rows[-1], 0)
        return found

    def learn(self, rows: int, drafts: bool, seconds: float) -> None:
        """Correct the costs by a pass. How fast the machine is changes all of them, and one slow pass little."""
        wrong = float(np.clip(seconds / self([rows], drafts)[0], 0.5, 2.0)) ** RATE
        self._seconds *= wrong
        below = max(0, int(np.searchsorted(self._rows, rows, side="right")) - 1)
        share = 1.0
        if below + 1 < len(self._rows):
            share = float((self._rows[below + 1] - rows) / (self._rows[below + 1] - self._rows[below]))
            self._seconds[int(drafts), below + 1] *= wrong ** (1 - share)
        self._seconds[int(drafts), below] *= wrong**share


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
        highest = max(most.values())
        right = np.array([self._chance(sequence) for sequence in able])
        gains = right[:, None] ** np.arange(1, highest + 1)
        gains *= np.arange(highest) < np.array([most[sequence] for sequence in able])[:, None]
        order = np.argsort(-gains, axis=None, kind="stable")
        tokens = len(most) + np.cumsum(gains.ravel()[order])
        extra = np.arange(1, len(order) + 1)
        plain = float(self._costs([rows], False)[0])
        speeds = tokens / (np.maximum(self._costs(rows + extra, True), plain) + self._each * extra)
        best = int(np.argmax(speeds))
        chosen = order[: best + 1] if speeds[best] > MARGIN * len(most) / plain else order[:0]
        counts = np.bincount(chosen // highest, minlength=len(able)) if len(chosen) else np.zeros(len(able), np.int64)
        plan = {sequence: int(count) for sequence, count in zip(able, counts, strict=True) if count}
        return plan or self._trial(rows, able, plain)

    def _trial(self, rows: int, able: Seq[Sequence], plain: float) -> dict[Sequence, int]:
        """One draft of one sequence, if there is time to spare."""
        price = float(self._costs([rows + 1], True)[0]) - plain + self._each
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
        plain = float(self._costs([rows - drafts], False)[0])
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


@torch.inference_mode()
def measure(model: ModelProtocol, pool: CachePoolProtocol, device: torch.device, most_rows: int) -> dict[int, float]:
    """Seconds of a pass, by its number of rows: the least of some repetitions. The pool is empty."""
    sizes = [rows for rows in ROWS if rows <= max(most_rows, 2)]
    found: dict[int, float] = {}
    for rows in sizes * (REPEATS + 1):
        place = pool.allocate([0] * rows, reuse=False)
        if place is None:
            continue
        began = time.perf_counter()
        ids = torch.zeros(rows, dtype=torch.int64, device=device)
        view = pool.batched_chunked_prefill_view([place.slot], [0], [rows])
        hidden = model.forward(Pass(ids, torch.arange(rows, device=device), view))
        model.logits(hidden).argmax(-1).tolist()
        found[rows] = min(found.get(rows, 3600.0), time.perf_counter() - began)
        pool.free(place.slot)
    return found
