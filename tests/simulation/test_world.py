"""Written worlds: whatever happens in them, the books agree after each step, and everybody gets the answer that he
would get alone. ``make explore`` tries worlds that nobody has written down."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from tests.examples import examples, explored, seeded
from tests.simulation.__main__ import failure, main
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
@seeded(200)
def test_more_worlds(seed: int) -> None:
    World(1000 + seed).live(2000 if explored is None else 300)


def test_a_run_ends_in_time_and_says_what_it_has_missed(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--seed", "0", "--steps", "3", "--workers", "1"]
    assert main([*few, "--worlds", "2"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["worlds"], found["failed"]) == ("2 of 2", 0)
    assert "a cached block was evicted" in found["missed"]
    assert main([*few, "--worlds", "2", "--seconds", "0"]) == 1
    assert json.loads(capsys.readouterr().out)["worlds"] == "0 of 2"
    assert main([*few, "--worlds", "1"]) == 0, "one world need not have everything"


def test_a_world_that_fails_says_how_it_is_seen_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: World) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(World, "walk", broken)
    with pytest.raises(RuntimeError, match="broken") as raised:
        World(3).live(20)
    assert raised.value.__notes__ == ["python -m tests.simulation --seed 3 --worlds 1 --steps 8"]


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
