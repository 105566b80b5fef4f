"""Written worlds: whatever happens in them, the books agree after each step, and everybody gets the answer that he
would get alone. ``make explore`` tries worlds that nobody has written down."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.examples import examples, seeded
from tests.simulation.world import run

MARKS = (
    "a cached block was evicted",
    "a block has another user",
    "a prefix was found",
    "a state was evicted",
    "a state was taken while one waits to be read",
    "step of several passes",
    "a prompt was cut",
    "preempted in the middle of its prompt",
    "preempted while it decoded",
    "a lower priority has waited for longer",
    "a share went before arrival",
    "drafts were right",
    "drafts taken back",
    "drafts taken back, at a block's edge",
    "memory ran out before a pass was computed",
    "a request's pass raised",
    "aborted",
    "aborted before its last token",
    "ended by stop",
    "ended by length",
    "ended by abort",
    "ended by error",
)
"""What has to happen in the written worlds together, or they would show little."""


def test_written_worlds() -> None:
    marks: Counter[str] = Counter()
    for seed in range(examples(40, 24)):
        marks += run(seed, 200).marks
    assert [mark for mark in MARKS if not marks[mark]] == []


@pytest.mark.slow
@pytest.mark.draws
@seeded(60)
def test_more_worlds(seed: int) -> None:
    run(1000 + seed, 300)
