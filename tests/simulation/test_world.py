"""Written worlds: whatever happens in them, the books agree after each step, and everybody gets the answer that he
would get alone. ``make explore`` tries worlds that nobody has written down."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.examples import examples, seeded
from tests.simulation.__main__ import failure
from tests.simulation.world import MARKS, World


def test_written_worlds() -> None:
    marks: Counter[str] = Counter()
    for seed in range(examples(40, 24)):
        world = World(seed)
        world.live(200)
        marks += world.marks
    assert [mark for mark in MARKS if not marks[mark]] == []


@pytest.mark.slow
@pytest.mark.draws
@seeded(60)
def test_more_worlds(seed: int) -> None:
    World(1000 + seed).live(300)


def test_a_world_that_fails_is_made_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the fault needs: here, that a third request has come."""
    step = World.step

    def broken(self: World) -> None:
        step(self)
        if len(self.requests) > 2:
            raise RuntimeError("three have come")

    monkeypatch.setattr(World, "step", broken)
    found = failure(3, 200)
    assert found is not None
    assert found.why == "RuntimeError: three have come"
    shorter = World(3, faults=found.faults)
    with pytest.raises(RuntimeError, match="three have come"):
        shorter.live(found.steps)
    assert shorter.steps == found.steps
    assert str(found) == f"python -m tests.simulation --seed 3 --worlds 1 --steps {found.steps} --no-faults"
