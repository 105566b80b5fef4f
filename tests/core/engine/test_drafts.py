"""How many drafts pay."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests import support
from tests.support import CPU, DTYPES, Recorder, slotted_pool, tiny_model

from infer.contracts.request import Request
from infer.contracts.scheduler import Sequence
from infer.engine.graphs import DecodeGraphs
from infer.engine.payoff import Costs, Payoff, Plan, measure
from infer.engine.runner import Runner


def sequences(count: int) -> list[Sequence]:
    return [Sequence(Request((1, 2, 3), id=str(i)), i, 100) for i in range(count)]


def rises(slope: float) -> Callable[[int], float]:
    """A pass's cost by its rows, 1 for one row."""
    return lambda rows: 1 - slope + slope * rows


def flat(rows: int) -> float:
    """A cost that reading weights bounds up to 8 rows, and arithmetic beyond."""
    return max(1.0, 0.6 + 0.05 * rows)


SIZES = (1, 2, 4, 8, 16, 32, 64)


def machine(rows: int) -> float:
    """What passes of a 0.6B model have taken on two cores, by rows: sixteen sequences leave little arithmetic to
    spare, and verifying their drafts takes longer than the start's passes of one sequence promise."""
    return float(np.interp(rows, [1, 4, 8, 16, 17, 20, 32, 64], [31, 33, 38, 57, 62, 70, 90, 148])) / 31


def promised(rows: int) -> float:
    return float(np.interp(rows, SIZES, [36, 35, 34, 36, 43, 61, 114])) / 31


def costs(cost: Callable[[int], float], fixed: float = 0.0) -> Costs:
    return Costs({rows: cost(rows) for rows in SIZES}, {rows: cost(rows) + fixed for rows in SIZES})


def speedup(
    cost: Callable[[int], float],
    right: list[float],
    *,
    steps: int = 150,
    measured: Callable[[int], float] | None = None,
    noise: float = 0.05,
    per_draft: float = 0.0,
    fixed: float = 0.03,
    slow: float = 0.0,
    seed: int = 1,
) -> float:
    """Tokens per second of sequences whose drafts are right with the given probabilities, divided by those without
    drafts. A pass with drafts takes ``fixed`` more, and each round of drafts ``per_draft``. Now and then (``slow``),
    something else makes a pass take twice as long, or the machine changes its speed."""
    draw = random.Random(seed)
    payoff = Payoff(costs(measured or cost, fixed if measured else 0.0))
    running = sequences(len(right))
    tokens, seconds, speed = dict.fromkeys(running, 0), 0.0, 1.0
    for _ in range(steps):
        plan = payoff.plan(len(running), dict.fromkeys(running, 8))
        asked = {**plan.counts, **dict.fromkeys(plan.guessing, 1)}
        drafts = sum(plan.counts.values())
        took = cost(len(running) + drafts) + fixed * bool(drafts)
        rounds = per_draft * max(asked.values(), default=0)
        seconds += took + rounds
        if draw.random() < slow / 3:
            speed = draw.choice([1.0, 1.3, 1.7])
        took *= speed * draw.uniform(1 - noise, 1 + noise) * (2 if draw.random() < slow else 1)
        if asked:
            payoff.proposed(plan, asked, rounds)
        for sequence, chance in zip(running, right, strict=True):
            count, good = plan.counts.get(sequence, 0), 0
            while good < count and draw.random() < chance:
                good += 1
            tokens[sequence] += 1 + good
            if count:
                payoff.verified(sequence, count, good)
            if sequence in plan.guessing:
                payoff.guessed(sequence, draw.random() < chance)
        payoff.learn(len(running) + drafts, drafts, took)
    assert min(tokens.values()) / seconds * cost(len(right)) > 0.93, "nobody pays for the drafts of others"
    return sum(tokens.values()) / seconds / (len(right) / cost(len(right)))


SLOPES = {"flat": flat, "gentle": rises(0.03), "medium": rises(0.1), "steep": rises(0.4), "proportional": rises(0.95)}


@pytest.mark.parametrize("batch", [1, pytest.param(4, marks=pytest.mark.slow), 16])
@pytest.mark.parametrize("shape", SLOPES)
def test_drafts_that_are_never_right_cost_next_to_nothing(shape: str, batch: int) -> None:
    assert speedup(SLOPES[shape], [0.0] * batch) > 0.99
    wrong = speedup(SLOPES[shape], [0.0] * batch, measured=rises(0.001), steps=400)
    assert wrong > 0.96, "though the costs were measured wrongly"


@pytest.mark.parametrize("batch", [1, pytest.param(4, marks=pytest.mark.slow), 16])
@pytest.mark.parametrize("chance", [0.2, pytest.param(0.5, marks=pytest.mark.slow), 0.8])
@pytest.mark.parametrize("shape", SLOPES)
def test_drafts_never_cost_more_than_they_bring(shape: str, chance: float, batch: int) -> None:
    assert speedup(SLOPES[shape], [chance] * batch) > 0.97
    assert speedup(SLOPES[shape], [chance] * batch, per_draft=0.2) > 0.97


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.5, 0.7, 0.8, 0.95])
def test_drafts_cost_little_on_a_busy_machine_whatever_the_start_promised(chance: float, batch: int) -> None:
    found = [
        speedup(
            machine, [chance] * batch, measured=promised, fixed=0.1, slow=0.03, steps=320, per_draft=2e-4, seed=seed
        )
        for seed in range(3)
    ]
    assert statistics.median(found) > 0.97


def test_drafts_that_are_right_pay() -> None:
    assert speedup(flat, [0.8]) > 3
    assert speedup(rises(0.1), [0.8]) > 1.9
    assert speedup(rises(0.03), [0.8] * 4) > 2
    assert speedup(rises(0.03), [0.9] * 16) > 1.2
    assert speedup(machine, [0.9] * 16, measured=promised, fixed=0.1) > 1.1
    for shape in SLOPES.values():
        assert speedup(shape, [0.8] * 8 + [0.0] * 8) > 0.97
    mixed = speedup(flat, [0.9, 0.0, 0.0, 0.0])
    assert mixed > 1.3, "those that are right are told from the others"


@pytest.mark.parametrize(("slope", "count"), [(0.6, 0), (0.4, 1), (0.1, 3)])
def test_as_many_drafts_are_verified_as_pay(slope: float, count: int) -> None:
    """Of drafts of which every other one is right, each adds half as many tokens as the one before. What is not
    measured costs as much as the next number of rows that is."""
    payoff = Payoff(costs(rises(slope)))
    (one,) = sequences(1)
    payoff._trials, payoff._per_draft = 0, 0.0
    for right in (True, False) * 100:
        payoff.guessed(one, right)
    assert payoff.plan(1, {one: 4}).counts == ({one: count} if count else {})


def test_what_is_seldom_right_is_guessed_again() -> None:
    """No pass computes guesses, but their being right shows that drafts would pay."""
    payoff = Payoff(costs(flat))
    (one,) = sequences(1)
    for _ in range(60):
        payoff.proposed(Plan({one: 8}), {one: 8}, 1e-3)
        payoff.verified(one, 8, 0)
    plans = []
    for _ in range(60):
        plan = payoff.plan(1, {one: 8})
        drafts = sum(plan.counts.values())
        plans.append((drafts, len(plan.guessing)))
        if drafts:
            payoff.verified(one, drafts, drafts)
        elif plan.guessing:
            payoff.proposed(plan, {one: 1}, 1e-3)
            payoff.guessed(one, True)
        payoff.learn(1 + drafts, drafts, flat(1 + drafts))
    assert plans[0] == (0, 0), "no time has been spared yet"
    assert (0, 1) in plans
    assert min(plans[-10:]) >= (7, 0)
    assert payoff.plan(1, {one: 3}) == ({one: 3}, ())
    assert payoff.plan(1, {one: 0}) == ({}, ())
    payoff.end(one)
    assert one not in payoff._acceptance


def test_drafts_that_lose_time_are_not_verified_until_it_is_made_up_for() -> None:
    """However promising they are."""
    payoff = Payoff(costs(flat))
    (one,) = sequences(1)
    payoff._trials, payoff._per_draft, payoff._per_ask = 0, 0.0, 0.0
    plans = []
    for _ in range(300):
        (drafts,) = payoff.plan(1, {one: 4}).counts.values() or [0]
        plans.append(drafts)
        payoff.guessed(one, True)
        payoff.learn(1 + drafts, drafts, 1.4 if drafts else 1.0)
    verified = sum(map(bool, plans))
    assert plans[0] > 0
    assert 4 <= verified * 0.4 / (1 - 0.4) <= 12
    assert any(plans[100:]), "it is tried again"


def test_drafts_that_have_always_been_right_are_not_certain() -> None:
    payoff = Payoff(costs(flat))
    (one,) = sequences(1)
    for _ in range(2000):
        plan = payoff.plan(1, {one: 8})
        payoff.proposed(plan, {one: 8}, 0.0)
        payoff.verified(one, 8, 8)
    assert payoff.plan(1, {one: 8}).counts == {one: 7}, "which cost no more than none"


def test_where_asking_makes_the_device_wait_nothing_to_propose_counts() -> None:
    for waits in (False, True):
        payoff = Payoff(costs(flat), waits=waits)
        (one,) = sequences(1)
        plans = []
        for _ in range(150):
            plan = payoff.plan(1, {one: 8})
            plans.append(plan)
            if plan.counts or plan.guessing:
                some = {**plan.counts, **dict.fromkeys(plan.guessing, 1)}
                payoff.proposed(plan, {} if len(plans) > 3 else some, 0.0)
            payoff.learn(1, 0, 1.0)
        assert plans[:3] == [({}, [one])] * 3, "to find out how long proposing takes"
        assert plans[3].counts[one] > 5
        assert bool(plans[-1].counts) != waits
        assert (sum(any(plan) for plan in plans[-20:]) < 5) == waits


def test_who_has_nothing_to_propose_at_first_does_not_make_the_device_wait_forever() -> None:
    payoff = Payoff(costs(flat), waits=True)
    (one,) = sequences(1)
    asked = 0
    for _ in range(200):
        plan = payoff.plan(1, {one: 8})
        if any(plan):
            asked += 1
            payoff.proposed(plan, {}, 0.0)
        payoff.learn(1, 0, 1.0)
    assert asked < 60


def test_who_reads_a_long_prompt_before_the_first_guess_is_asked_again() -> None:
    """A second model reads a prompt in chunks, each of which takes longer than several passes, and guesses then."""
    payoff = Payoff(costs(flat))
    (one,) = sequences(1)
    chunks, verified = 5, 0
    for _ in range(400):
        plan = payoff.plan(1, {one: 8})
        drafts, asked = sum(plan.counts.values()), any(plan)
        if asked:
            found = {} if chunks else {**plan.counts, **dict.fromkeys(plan.guessing, 1)}
            payoff.proposed(plan, found, 5.5 if chunks else 1e-3)
            chunks = max(0, chunks - 1)
        if drafts and not chunks:
            payoff.verified(one, drafts, drafts)
            verified += 1
        payoff.learn(1 + drafts, drafts, flat(1 + drafts))
    assert verified > 100


def test_guesses_go_on_whatever_one_takes() -> None:
    """Asking may take longer than the passes of all time that a budget holds."""
    payoff = Payoff(costs(flat))
    (one,) = sequences(1)
    payoff._trials, payoff._per_ask = 0, 5.5
    asked = 0
    for _ in range(6000):
        plan = payoff.plan(1, {one: 8})
        if any(plan):
            asked += 1
            payoff.proposed(plan, {}, 5.5)
        payoff.learn(1, 0, 1.0)
    assert 2 <= asked <= 12, "0.5 % of all time"


def test_costs_follow_what_passes_take() -> None:
    found = Costs(dict.fromkeys((1, 2, 4, 8), 1.0), dict.fromkeys((1, 2, 4, 8), 1.0))
    draw = random.Random(2)
    for _ in range(2000):
        rows = draw.choice([1, 2, 3, 6, 8])
        found.learn(rows, rows > 1, 0.04 * (1 + 0.1 * rows))
    for rows in (2, 3, 6, 8):
        assert found(rows, True) == pytest.approx(0.04 * (1 + 0.1 * rows), rel=0.1)
    assert found(1, False) == pytest.approx(0.044, rel=0.1)
    above = (2, 4, 4, 8, 8, 8, 8, 9, 10)
    assert found.with_drafts(1, 9).tolist() == pytest.approx([found(rows, True) for rows in above])
    assert found(12, True) > found(8, True), "beyond the last it grows on"


@pytest.mark.parametrize("recorded", [False, True])
def test_the_costs_of_passes_are_measured_up_to_what_a_batch_may_need(recorded: bool) -> None:
    model = tiny_model("llama")
    pool, recorder = slotted_pool(model, DTYPES[0], 2), Recorder(cheap=True)
    room = pool.free_tokens()
    graphs = DecodeGraphs(model, pool, CPU, 2, recorder) if recorded else None
    runner = Runner(model, pool, support.KERNELS, CPU, 2, graphs)
    plain, drafts = measure(runner, pool, pool.truncate, 18)
    assert sorted(plain) == sorted(drafts) == [1, 2, 4, 8, 16]
    assert all(0 < plain[rows] <= drafts[rows] < 60 for rows in plain)
    assert pool.free_tokens() == room
    assert set(recorder.replayed) <= {1}


def test_costs_are_positive_though_passes_of_one_row_were_slowed(monkeypatch: pytest.MonkeyPatch) -> None:
    now, model = [0.0], tiny_model("llama")
    pool = slotted_pool(model, DTYPES[0], 2)

    class Slowed:
        def launch(self, batch: Any) -> Any:
            rows = len(batch.token_ids_T)
            now[0] += 5.0 if batch.decode_only else 60.0 if rows == 1 else 10.0 + rows
            return self

        def results(self) -> None: ...

    monkeypatch.setattr("infer.engine.payoff.time.perf_counter", lambda: now[0])
    runner: Any = Slowed()
    assert measure(runner, pool, pool.truncate, 4) == ({1: 5.0, 2: 5.0, 4: 5.0}, {1: 60.0, 2: 12.0, 4: 14.0})
