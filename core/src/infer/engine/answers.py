"""The answers that decode together, as columns."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import compress, repeat
from operator import attrgetter, ge, is_
from typing import Any

from infer.contracts.request import TokenLogprobs
from infer.contracts.scheduler import PENDING
from infer.engine.answer import Answer
from infer.engine.batch import Lineup
from infer.engine.events import Events
from infer.engine.reporting import Counts

_PLAIN = attrgetter("plain")


class Answers:
    """The answers to sequences that decode together, one for each. What stays the same from step to step, as long as
    nobody comes or goes, is looked up once."""

    def __init__(self, lineup: Lineup, answers: Seq[Answer], counts: Counts) -> None:
        sequences = lineup.sequences
        self.lineup = lineup
        self._answers = answers
        self._counts = counts
        self._rows = range(len(answers))
        self._last = [sequence.max_len - 1 for sequence in sequences]
        """The index of each sequence's last token, if nothing ends it before."""
        self._cached = [sequence.num_cached for sequence in sequences]
        self._ids = [sequence.id for sequence in sequences]
        self._stops = frozenset[int]().union(*(answer.stops for answer in answers))

    def __len__(self) -> int:
        return len(self._answers)

    def __getitem__(self, row: int) -> Answer:
        return self._answers[row]

    def take(self, at: Seq[int], tokens: Seq[int | None], logprobs: Seq[TokenLogprobs | None]) -> Events:
        """As ``Answer.take`` for each, whose token has the index ``at`` in its sequence. Answers that have ended have
        no event. Only tokens that do more than add their text take a line of Python each."""
        texts: list[str | None] = [*map(dict.get, map(_PLAIN, self._answers), tokens)]
        single = {*compress(self._rows, map(is_, texts, repeat(None))), *compress(self._rows, map(ge, at, self._last))}
        single.update(compress(self._rows, logprobs))
        if not self._stops.isdisjoint(tokens):
            single.update(i for i, token in enumerate(tokens) if token in self._stops)
        known: list[Any] = [*tokens]
        for i in single:
            known[i] = PENDING
        for row, i, token in zip(self.lineup.tokens, at, known, strict=True):
            row[i] = token
        self._counts.generated += len(tokens) - len(single)
        whole = {
            i: None if self._answers[i].ended else self._answers[i].take(tokens[i], logprobs[i]) for i in sorted(single)
        }
        return Events(self._ids, tokens, texts, self._cached, whole)
