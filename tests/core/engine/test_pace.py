"""Steps that end in time: costs that are known are found, and what is cut takes no more than there is time for."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import numpy as np
import pytest

from infer.contracts.params import SamplingParams
from infer.contracts.request import Request
from infer.contracts.scheduler import Schedule, Sequence, Work, Works
from infer.engine.pace import FIRST, SHARE, Amounts, Pace, _non_negative
from infer_bench.costs import non_negative

COSTS = Amounts(passes=30e-3, tokens=5e-3, positions=4e-6, pairs=3e-7)
GOAL_S = 0.1


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


def seconds(*passes: Seq[Work]) -> float:
    """What these passes take by the costs."""
    works = [Works.of(each) for each in passes if each]
    return sum(Amounts.of(each.starts, each.lens, 1).times(COSTS) for each in works)


def taught(noise: float = 0.0, goal_s: float = GOAL_S) -> Pace:
    """Has seen steps of all kinds."""
    pace, draw = Pace(goal_s), random.Random(0)
    for _ in range(200):
        running = decodes(*(draw.randrange(1, 3000) for _ in range(draw.randrange(1, 16))))
        prompt = draw.randrange(2, 4000)
        chunk = prefills((prompt, draw.randrange(prompt - 1))) if draw.random() < 0.5 else []
        passes = [Works.of([*running, *chunk])]
        pace.learn(passes, seconds(*passes) * (1 + noise * draw.uniform(-1, 1)))
    return pace


def lens(schedule: Schedule) -> dict[str, int]:
    return {work.sequence.id: work.length for work in schedule.prefills}


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("start", [0, 700, 3000])
def test_a_prompt_is_cut_to_the_goal_and_no_shorter(start: int, mixed: bool) -> None:
    running = decodes(50, 800, 2000)
    (cut,) = taught(goal_s=0.2).cut(Schedule(running, prefills((4000, start)), mixed)).prefills
    longer = cut.sequence.extend(cut.length + 1)
    assert cut == cut.sequence.extend(cut.length), "it goes on where it was"
    took, more = (seconds([*running, each]) if mixed else seconds(running, [each]) for each in (cut, longer))
    assert took <= 0.2 * (1 + 1e-6) < more * (1 + 1e-5)


def test_noise_does_little() -> None:
    running = decodes(50, 800, 2000)
    (cut,) = taught(noise=0.2).cut(Schedule(running, prefills((4000, 100)), True)).prefills
    assert seconds([*running, cut]) == pytest.approx(GOAL_S, rel=0.1)


def test_who_waits_for_no_token_is_not_cut() -> None:
    pace = taught()
    for schedule in (Schedule([], prefills((4000, 0)), True), Schedule(decodes(5), [], True)):
        assert pace.cut(schedule) is schedule


def test_the_first_prompt_has_half_of_the_time_and_the_shortest_the_rest() -> None:
    running, prompts = decodes(10), prefills((4000, 0), (3000, 0), (2004, 2000), (3, 0))
    cut = taught(goal_s=0.2).cut(Schedule(running, prompts, True))
    found = lens(cut)
    assert [*found] == sorted(found), "in the scheduler's order"
    assert (found["2"], found["3"]) == (4, 3)
    assert seconds([*running, *cut.prefills]) == pytest.approx(0.2, rel=0.1)
    assert seconds(cut.prefills[:1]) - COSTS.passes == pytest.approx((0.2 - seconds(running)) / 2, rel=0.2)
    (alone,) = taught(goal_s=0.2).cut(Schedule(running, prompts[:1], True)).prefills
    assert alone.length > 1.8 * found["0"]


def test_a_higher_priority_goes_before_a_shorter_prompt() -> None:
    prompts = prefills((4000, 0, 0), (3000, 0, 0), (6, 0, 1))
    assert lens(taught().cut(Schedule(decodes(10), prompts, True))).keys() == {"0", "1"}


def test_prompts_go_on_where_the_goal_is_out_of_reach() -> None:
    running = decodes(*[2000] * 15)
    (cut,) = taught(goal_s=1e-3).cut(Schedule(running, prefills((4000, 0)), True)).prefills
    assert seconds([*running, cut]) == pytest.approx((1 + SHARE) * seconds(running), rel=0.06)
    (least,) = taught(goal_s=1e-3).cut(Schedule(decodes(1), prefills((400_000, 399_000)), True)).prefills
    assert least.length == 1


def test_little_is_computed_before_anything_is_known() -> None:
    pace = Pace(GOAL_S)
    running, prompts = decodes(10), prefills((4000, 0), (3000, 0))
    assert sum(lens(pace.cut(Schedule(running, prompts, True))).values()) == FIRST
    pace.learn([running], seconds(running))
    assert sum(lens(pace.cut(Schedule(running, prompts, True))).values()) == FIRST, "what prompts take is not known"


def test_a_long_answer_makes_nothing_forgotten_and_another_speed_is_learned() -> None:
    running, prompts = decodes(50, 800, 2000), prefills((4000, 0))
    pace = taught(goal_s=0.3)
    for length in range(2000):
        pace.learn([decodes(length)], seconds(decodes(length)))
    (before,) = pace.cut(Schedule(running, prompts, True)).prefills
    assert seconds([*running, before]) == pytest.approx(0.3, rel=0.06)
    for length in range(100):  # the machine is half as fast
        cut = pace.cut(Schedule(decodes(length), prefills((4000, 10 * length)), True))
        chunk = [*cut.decodes, *cut.prefills]
        pace.learn([Works.of(chunk)], 2 * seconds(chunk))
        pace.learn([decodes(length)], 2 * seconds(decodes(length)))
    (after,) = pace.cut(Schedule(running, prompts, True)).prefills
    assert 2 * seconds([*running, after]) == pytest.approx(0.3, rel=0.1)


def test_a_step_that_was_interrupted_is_not_counted() -> None:
    running, prompts, pace = decodes(50, 800, 2000), prefills((4000, 0)), taught()
    before = lens(pace.cut(Schedule(running, prompts, True)))
    for _ in range(100):
        pace.learn([running], 10 * seconds(running))
    assert lens(pace.cut(Schedule(running, prompts, True))) == before


@pytest.mark.parametrize("seed", range(20))
def test_the_fit_is_that_of_the_observations_themselves(seed: int) -> None:
    """By numpy's least squares, instead of by the normal equations."""
    rng = np.random.default_rng(seed)
    x_PC, y_P = rng.uniform(0, [1, 100, 1e4, 1e6], (30, 4)), rng.uniform(0, 1, 30)
    found = _non_negative((x_PC.T @ x_PC).tolist(), (x_PC.T @ y_P).tolist())
    assert found == pytest.approx(non_negative(x_PC, y_P).tolist(), rel=1e-5, abs=1e-12)
    assert min(found) >= 0
