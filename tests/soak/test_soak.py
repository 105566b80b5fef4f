"""Written rounds of hostile clients, ordinary ones and faults; ``make soak`` draws others, and more of them."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from tests.soak.clients import HOSTILE, KNOWN, ORDINARY, Site, ViolationError, ask
from tests.soak.soak import Report, soak

pytestmark = pytest.mark.slow


SEED, ROUNDS = 18628, 7
"""Few rounds in which every client and both faults take part."""


def test_written_rounds(tmp_path: Path) -> None:
    report = Report()
    asyncio.run(soak(tmp_path, random.Random(SEED), ROUNDS, report))
    assert report.violations == []
    assert len(report.memory) == ROUNDS + 1
    assert {*report.taking_part} == {*(client.__name__ for client in (*ORDINARY, *HOSTILE)), "kill -9", "full disk"}


def test_an_answer_that_differs_is_noticed(tmp_path: Path) -> None:
    """And the canary's end is not taken for granted."""

    async def otherwise(site: Site, draw: random.Random) -> None:
        site.wanted["greedy"] = await ask(site, *KNOWN["sampled"])

    async def failing(site: Site, draw: random.Random) -> None:
        raise ViolationError("this one")

    report = Report()
    asyncio.run(soak(tmp_path, random.Random(0), 1, report, [otherwise], faults=False))
    assert report.violations == ["greedy is answered otherwise than at first"]
    report = Report()
    asyncio.run(soak(tmp_path, random.Random(0), 3, report, [failing], faults=False))
    assert report.violations == ["failing: ViolationError('this one')"]
    assert len(report.memory) == 1, "rounds go on after a violation"
    report = Report()
    asyncio.run(soak(tmp_path, random.Random(0), 3, report, [failing], faults=False, seconds=0))
    assert report.violations == [], "a round begins although the time is over"
