"""A goal for the time between tokens: what steps take is found, and what is cut takes no more than there is time
for."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import pytest
import torch
from tests.support import make_engine, random_prompt, tiny_model

from infer.contracts.params import SamplingParams
from infer.contracts.request import Request
from infer.contracts.scheduler import Schedule, Sequence, Work, Works
from infer.engine.batch import Batch
from infer.engine.pace import BEYOND, FIRST, SHARE, Amounts, Pace, _non_negative
from infer.engine.runner import Launched
from infer_bench.costs import non_negative

COSTS = Amounts(passes=30e-3, prompts=2e-3, tokens=5e-3, positions=4e-6, pairs=3e-7)
GOAL_S = 0.3


def sequence(order: int, length: int, computed: int, priority: int = 0) -> Sequence:
    made = Sequence(Request((1,) * length, SamplingParams(), str(order), priority=priority), order, length + 99)
    made.slot, made.num_computed, made.prefill_end = order, computed, length
    return made


def decodes(*lengths: int) -> Works:
    return Works.decodes([sequence(i, length, length) for i, length in enumerate(lengths, 100)])


def prefills(*given: tuple[int, int] | tuple[int, int, int]) -> list[Work]:
    """Of a prompt's length, how much of it is computed, and a priority. Chunks are of up to 512."""
    made = [sequence(i, *each) for i, each in enumerate(given)]
    return [each.extend(min(512, each.num_prompt - each.num_computed)) for each in made]


def seconds(*passes: Seq[Work], costs: Amounts = COSTS) -> float:
    """What a step of these passes takes."""
    works = [work for each in passes for work in each]
    prompts = any(not work.decode for work in works)
    return Amounts.of([w.start for w in works], [w.length for w in works], len(passes), prompts).seconds(costs)


def step(pace: Pace, schedule: Schedule, took: Callable[[Seq[Work]], float]) -> Schedule:
    """A step of one pass as the engine does it; returns what is computed."""
    cut = pace.cut(schedule)
    works = [*cut.decodes, *cut.prefills]
    pace.learn([Works.of(works)], took(works))
    return cut


def taught(noise: float = 0.0, goal_s: float = GOAL_S) -> Pace:
    """Has seen steps of all kinds."""
    pace, draw = Pace(goal_s), random.Random(0)
    for _ in range(200):
        running = decodes(*(draw.randrange(1, 3000) for _ in range(draw.randrange(1, 16))))
        prompt = draw.randrange(2, 4000)
        chunk = prefills((prompt, draw.randrange(prompt - 1))) if draw.random() < 0.5 else []
        works = [*running, *chunk]
        pace.learn([Works.of(works)], seconds(works) * (1 + noise * draw.uniform(-1, 1)))
    return pace


def lens(schedule: Schedule) -> dict[str, int]:
    return {work.sequence.id: work.length for work in schedule.prefills}


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("start", [0, 700, 3000])
def test_a_prompt_is_cut_to_the_goal_and_no_shorter(start: int, mixed: bool) -> None:
    running = decodes(50, 800, 2000)
    (cut,) = taught().cut(Schedule(running, prefills((4000, start)), mixed)).prefills
    assert cut == cut.sequence.extend(cut.length), "it goes on where it was"
    longer = cut.sequence.extend(cut.length + 1)
    took, more = (seconds([*running, each]) if mixed else seconds(running, [each]) for each in (cut, longer))
    assert took <= GOAL_S * (1 + 1e-6) < more * (1 + 1e-5)


def test_noise_does_little() -> None:
    running = decodes(50, 800, 2000)
    (cut,) = taught(noise=0.2).cut(Schedule(running, prefills((4000, 100)), True)).prefills
    assert seconds([*running, cut]) == pytest.approx(GOAL_S, rel=0.1)


def test_nothing_is_cut_if_nobody_waits_for_a_token() -> None:
    pace = taught()
    for schedule in (Schedule([], prefills((4000, 0)), True), Schedule(decodes(5), [], True)):
        assert pace.cut(schedule) is schedule


def test_the_first_prompt_has_half_of_the_time_and_the_shortest_the_rest() -> None:
    running, prompts = decodes(10), prefills((4000, 0), (3000, 0), (2004, 2000), (3, 0))
    cut = taught().cut(Schedule(running, prompts, True))
    found = lens(cut)
    assert [*found] == sorted(found), "in the scheduler's order"
    assert (found["2"], found["3"]) == (4, 3)
    assert seconds([*running, *cut.prefills]) == pytest.approx(GOAL_S, rel=0.05)
    (alone,) = taught().cut(Schedule(running, prompts[:1], True)).prefills
    assert alone.length == pytest.approx(2 * found["0"], abs=4)


def test_a_higher_priority_goes_before_a_shorter_prompt() -> None:
    prompts = prefills((4000, 0, 0), (3000, 0, 0), (6, 0, 1))
    assert lens(taught().cut(Schedule(decodes(10), prompts, True))).keys() == {"0", "1"}


@pytest.mark.parametrize("start", [0, 390_000])
def test_the_first_prompt_goes_on_where_the_goal_is_out_of_reach(start: int) -> None:
    """Also where it takes long to read what it has before it."""
    running, prompts = decodes(*[2000] * 15), prefills((400_000, start), (3, 0))
    (cut,) = taught(goal_s=1e-3).cut(Schedule(running, prompts, True)).prefills
    fixed = seconds(running) + COSTS.prompts + COSTS.positions * start
    assert seconds([*running, cut]) == pytest.approx((1 + SHARE) * fixed, rel=0.06)


def test_a_token_is_the_least() -> None:
    costs, pace = Amounts(1e-3, 0, 5e-2, 0, 0), Pace(1e-3)
    for _ in range(20):
        cut = step(pace, Schedule(decodes(9), prefills((400, 0)), True), lambda works: seconds(works, costs=costs))
        pace.learn([decodes(9)], seconds(decodes(9), costs=costs))
    assert lens(cut) == {"0": 1}


def test_passes_with_prompts_may_cost_more_whatever_is_in_them() -> None:
    """As where decodes are recorded and replayed."""
    costs, pace = Amounts(8e-3, 12e-3, 1e-5, 0, 0), Pace(18e-3)
    for _ in range(100):
        cut = step(pace, Schedule(decodes(100), prefills((4000, 0)), True), lambda works: seconds(works, costs=costs))
        pace.learn([decodes(100)], seconds(decodes(100), costs=costs))
    assert seconds([*decodes(100), *cut.prefills], costs=costs) == pytest.approx(20e-3 * (1 + SHARE), rel=0.05)


def test_little_is_computed_before_anything_is_known() -> None:
    pace = Pace(GOAL_S)
    running, prompts = decodes(10), prefills((4000, 0), (3000, 0))
    assert sum(lens(pace.cut(Schedule(running, prompts, True))).values()) == FIRST
    pace.learn([running], seconds(running))
    assert sum(lens(pace.cut(Schedule(running, prompts, True))).values()) == FIRST, "what prompts take is not known"


def test_chunks_grow_no_faster_than_what_is_known_of_them() -> None:
    """Up to some number of tokens, a pass may take as long as its weights take to be read."""

    def took(works: Seq[Work]) -> float:
        return 5e-5 * max(160, sum(work.length for work in works))

    pace, most = Pace(30e-3), 20
    pace.learn([Works.of([*decodes(9), *prefills((20, 0))])], took(prefills((20, 0))))
    for _ in range(60):
        pace.learn([decodes(10)], took(decodes(10)))
        cut = step(pace, Schedule(decodes(10), prefills((4000, 0)), True), took)
        assert cut.prefills[0].length <= BEYOND * most
        most = max(most, cut.prefills[0].length)
    assert took([*cut.decodes, *cut.prefills]) == pytest.approx(30e-3, rel=0.25)


def test_drafts_take_their_part() -> None:
    pace = taught()
    verified = [work._replace(length=5, drafts=(1,) * 4, draws=5) for work in decodes(50, 800, 2000)]
    for _ in range(200):
        pace.learn([Works.of(verified)], seconds(verified))
    (cut,) = pace.cut(Schedule(decodes(50, 800, 2000), prefills((4000, 0)), True)).prefills
    assert seconds([*verified, cut]) == pytest.approx(GOAL_S, rel=0.05)


def test_a_long_answer_makes_nothing_forgotten() -> None:
    running, prompts, pace = decodes(50, 800, 2000), prefills((4000, 0)), taught()
    for length in range(2000):
        pace.learn([decodes(length)], seconds(decodes(length)))
    (cut,) = pace.cut(Schedule(running, prompts, True)).prefills
    assert seconds([*running, cut]) == pytest.approx(GOAL_S, rel=0.05)


@pytest.mark.parametrize("slower", [0.3, 2, 10])
def test_another_speed_is_learned(slower: float) -> None:
    pace = taught(goal_s=slower * GOAL_S)
    took: Callable[[Seq[Work]], float] = lambda works: slower * seconds(works)  # noqa: E731
    for length in range(60):
        cut = step(pace, Schedule(decodes(length), prefills((4000, 10 * length)), True), took)
        pace.learn([decodes(length)], took(decodes(length)))
    assert took([*cut.decodes, *cut.prefills]) == pytest.approx(slower * GOAL_S, rel=0.15)


def test_steps_that_were_interrupted_are_not_counted() -> None:
    prompts, pace = Schedule(decodes(50, 800, 2000), prefills((4000, 0)), True), taught()
    before = lens(pace.cut(prompts))
    for _ in range(20):
        for longer in (10, 10, 1):
            pace.learn([decodes(9)], longer * seconds(decodes(9)))
    assert lens(pace.cut(prompts)) == before


def test_slow_first_steps_are_soon_forgotten() -> None:
    pace = Pace(GOAL_S)
    pace.learn([Works.of(prefills((100, 0)))], 10.0)
    pace.learn([decodes(100)], 5.0)
    for length in range(40):
        cut = step(pace, Schedule(decodes(length), prefills((4000, 10 * length)), True), seconds)
        pace.learn([decodes(length)], seconds(decodes(length)))
    assert seconds([*cut.decodes, *cut.prefills]) == pytest.approx(GOAL_S, rel=0.3)


def test_steps_that_take_no_time_are_no_fault() -> None:
    pace = Pace(GOAL_S)
    for _ in range(20):
        cut = step(pace, Schedule(decodes(9), prefills((4000, 0)), True), lambda works: 0.0)
        pace.learn([decodes(9)], 0.0)
    assert cut.prefills[0].length == 512


class Watching(Pace):
    """Notes how many tokens the passes have computed that it learns from."""

    def __init__(self) -> None:
        super().__init__(GOAL_S)
        self.seen: list[int] = []

    def learn(self, works: Seq[Works], seconds: float) -> None:
        self.seen.append(sum(sum(each.lens) for each in works))
        super().learn(works, seconds)


@pytest.mark.parametrize("lag", [0, 1])
def test_a_step_has_taken_what_the_passes_take_that_it_waits_for(lag: int) -> None:
    """With a pass in flight, that is the one before."""
    pace = Watching()
    stepper = make_engine(tiny_model("llama"), torch.float32, lag=lag, pace=pace)
    stepper.submit(random_prompt(40), "a", max_tokens=3)
    stepper.engine.step()
    assert pace.seen == [40][: 1 - lag]
    stepper.run()
    assert pace.seen == [40, 1, 1]


def test_nothing_is_learned_of_a_step_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    pace = Watching()
    stepper = make_engine(tiny_model("llama"), torch.float32, lag=1, pace=pace)
    for id in "ab":
        stepper.submit(random_prompt(40), id, max_tokens=9)
    stepper.engine.step()
    launch = stepper.engine._runner.launch

    def failing(batch: Batch) -> Launched:
        monkeypatch.setattr(stepper.engine._runner, "launch", launch)
        raise RuntimeError("once")

    monkeypatch.setattr(stepper.engine._runner, "launch", failing)
    stepper.engine.step()
    assert pace.seen == []
    stepper.run()
    assert [len(stepper.tokens(id)) for id in "ab"] == [9, 9]


@pytest.mark.parametrize("seed", range(20))
def test_the_fit_is_that_of_the_observations_themselves(seed: int) -> None:
    """By numpy's least squares, instead of by the normal equations."""
    rng = np.random.default_rng(seed)
    x_PC, y_P = rng.uniform(0, [1, 1, 100, 1e4, 1e6], (30, 5)), rng.uniform(0, 1, 30)
    found = _non_negative((x_PC.T @ x_PC).tolist(), (x_PC.T @ y_P).tolist())
    assert found == pytest.approx(non_negative(x_PC, y_P).tolist(), rel=1e-5, abs=1e-12)
    assert min(found) >= 0
