"""Scheduling on integers alone, with a pool that only counts and a model that takes no time."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from infer.contracts.params import SamplingParams
from infer.contracts.request import Owner, Request
from infer.contracts.scheduler import PENDING, Schedule, SchedulerContext, Sequence, Works
from infer.contracts.sections import EngineSettings
from infer.engine.schedulers import ContinuousScheduler, FairScheduler, StaticScheduler
from infer_testing.schedulers import CountingPool, SharingPool

DOCS = Path(__file__).parents[3] / "docs"


def sequence(
    order: int, prompt: int, new: int, first: int = 1, params: Any = (), user: str = "", key: str = "", **more: Any
) -> Sequence:
    """``first`` is the prompt's first token; ``more`` goes to the request."""
    more["owner"] = Owner(key, user)
    tokens = (first, *range(2, prompt + 1))
    request = Request(tokens, SamplingParams(max_tokens=new, **dict(params)), id=f"r{order}", **more)
    return Sequence(request, order, prompt + new)


@dataclass
class Driver:
    """Steps a scheduler as the engine does, with a model that always answers 7."""

    scheduler: ContinuousScheduler
    log: list[Schedule] = field(default_factory=list)
    done: list[str] = field(default_factory=list)

    def step(self) -> Schedule:
        schedule = self.scheduler.schedule()
        self.log.append(schedule)
        for works in schedule.passes():
            for work in works:
                s = work.sequence
                assert work.start == s.num_computed, "pieces join without gap or overlap"
                s.num_computed = work.end
                if work.draws:
                    s.tokens.append(7)
                    if len(s.tokens) >= s.max_len:
                        self.scheduler.finish(s)
                        self.done.append(s.id)
        return schedule

    def run(self, limit: int = 10_000) -> None:
        while self.scheduler.has_work():
            self.step()
            assert len(self.log) < limit, "the drain does not finish"


def make(
    pool: CountingPool | None = None, kind: type[ContinuousScheduler] = ContinuousScheduler, **keys: object
) -> Driver:
    chosen = EngineSettings.model_validate(keys)
    pool = pool or CountingPool(chosen.max_batch_size, 1 << 20)
    return Driver(kind(pool, chosen))  # type: ignore[arg-type]


def tokens(schedule: Schedule) -> int:
    return sum(work.length for works in schedule.passes() for work in works)


def chunks(schedule: Schedule) -> list[tuple[str, int, int]]:
    return [(w.sequence.id, w.start, w.length) for w in schedule.prefills]


def test_budget_64_with_three_decoding_and_a_prompt_of_150() -> None:
    driver = make(max_tokens_per_step=64, prefill_chunk_size=32)
    for order in range(3):
        driver.scheduler.add(sequence(order, 1, 50))
    driver.step()
    driver.scheduler.add(sequence(3, 150, 50))
    assert [tokens(driver.step()) for _ in range(8)] == [35, 35, 35, 35, 25, 4, 4, 4]


def test_decodes_are_columns_of_what_each_sequence_does_next() -> None:
    driver = make(max_batch_size=4)
    sequences = [sequence(order, 3 + order, 9) for order in range(3)]
    for one in sequences:
        driver.scheduler.add(one)
    driver.step()
    expected = [one.extend(1) for one in sequences]
    decodes = driver.scheduler.schedule().decodes
    assert list(decodes) == expected
    for works in (decodes, Works.of(expected)):
        assert [works[i] for i in (0, 1, -1)] == [expected[i] for i in (0, 1, -1)]
        assert list(works[1:]) == expected[1:]


def test_who_loses_its_place_and_gets_another_in_one_step_computes_its_prompt() -> None:
    """As a policy may want it that chooses anew in each step."""
    driver = make(prefill_chunk_size=2)
    seats, one = driver.scheduler.seats, sequence(0, 3, 9)
    driver.scheduler.add(one)
    for _ in range(4):
        driver.step()
    step = seats.begin(driver.scheduler.victim)
    seats.preempt(one)
    assert seats.admit(one, step)
    one.num_computed = 2
    assert chunks(driver.step()) == [("r0", 2, 2)]


def test_who_was_preempted_comes_back_once_its_last_token_is_known() -> None:
    driver = make()
    seats, one = driver.scheduler.seats, sequence(0, 3, 9)
    driver.scheduler.add(one)
    driver.step()
    one.tokens[-1] = PENDING  # drawn, and not read back
    seats.preempt(one)
    assert tokens(driver.step()) == 0
    one.tokens[-1] = 7
    assert chunks(driver.step()) == [("r0", 0, 4)]


def test_prompt_of_20_with_a_budget_of_8() -> None:
    driver = make(max_batch_size=4, max_tokens_per_step=8)
    driver.scheduler.add(sequence(0, 20, 3))
    steps = [driver.step() for _ in range(3)]
    assert [chunks(s) for s in steps] == [[("r0", 0, 8)], [("r0", 8, 8)], [("r0", 16, 4)]]
    assert len(steps[2].prefills[0].sequence.tokens) == 21, "only the final chunk samples"


def test_decoding_requests_get_a_token_in_every_step_of_a_chunked_prompt() -> None:
    driver = make(prefill_chunk_size=16, max_tokens_per_step=32)
    driver.scheduler.add(sequence(0, 4, 100))
    driver.step()
    driver.scheduler.add(sequence(1, 200, 4))
    while "r1" not in driver.done:
        assert next(w.sequence.id for w in driver.step().decodes) == "r0"


def test_four_requests_that_arrive_at_different_steps_under_a_budget_of_10() -> None:
    arrivals = {0: 5, 2: 17, 5: 26, 8: 4}
    pool = CountingPool(4, 1000)
    driver = make(pool, max_batch_size=4, max_tokens_per_step=10)
    everyone = []
    for step in range(40):
        if step in arrivals:
            everyone.append(sequence(step, arrivals[step], 6))
            driver.scheduler.add(everyone[-1])
        assert tokens(driver.step()) <= 10
    assert sorted(driver.done) == ["r0", "r2", "r5", "r8"]
    for s in everyone:
        assert len(s.tokens) == s.num_prompt + 6
    assert pool.free_tokens() == 1000


def test_the_cache_holds_prompt_and_generated_less_one() -> None:
    driver = make()
    one = sequence(0, 10, 5)
    driver.scheduler.add(one)
    last = {}
    while driver.scheduler.has_work():
        step = driver.step()
        last = {w.sequence.id: w.end for works in step.passes() for w in works}
    assert last == {"r0": 10 + 5 - 1}


@pytest.mark.parametrize(("mixed", "passes"), [(False, [["r0"], ["r1"]]), (True, [["r0", "r1"]])])
def test_decodes_come_first_and_the_lists_are_disjoint(mixed: bool, passes: list[list[str]]) -> None:
    driver = make(prefill_chunk_size=8, mixed_batches=mixed)
    driver.scheduler.add(sequence(0, 4, 9))
    driver.step()
    driver.scheduler.add(sequence(1, 30, 2))
    schedule = driver.step()
    assert [[w.sequence.id for w in works] for works in schedule.passes()] == passes


def test_ragged_invocations() -> None:
    """What a scheme that computes one fixed-size chunk per invocation needs five invocations for."""
    driver = make(prefill_chunk_size=128, max_tokens_per_step=256)
    driver.scheduler.add(sequence(0, 250, 1))
    driver.scheduler.add(sequence(1, 300, 1))
    invocations = []
    while driver.scheduler.has_work():
        invocations += [sum(work.length for work in works) for works in driver.step().passes()]
    assert invocations == [256, 250, 44]


def test_arrivals_of_one_step_are_prefilled_together() -> None:
    driver = make()
    for order in range(3):
        driver.scheduler.add(sequence(order, 5 + order, 2))
    assert chunks(driver.step()) == [("r0", 0, 5), ("r1", 0, 6), ("r2", 0, 7)]


def test_continuing_prefills_come_before_new_ones() -> None:
    driver = make(prefill_chunk_size=8, max_prefill_chunks_per_step=1)
    driver.scheduler.add(sequence(0, 20, 2))
    driver.step()
    driver.scheduler.add(sequence(1, 4, 2))
    assert [chunks(driver.step())[0][0] for _ in range(3)] == ["r0", "r0", "r1"]


@pytest.mark.parametrize("cap", [1, 2, 3])
def test_cap_on_chunks_per_step(cap: int) -> None:
    driver = make(prefill_chunk_size=8, max_prefill_chunks_per_step=cap)
    for order in range(5):
        driver.scheduler.add(sequence(order, 20, 2))
    assert len(driver.step().prefills) == cap
    driver.run()
    assert max(len(s.prefills) for s in driver.log) == cap


def test_cap_on_prompts_part_way() -> None:
    driver = make(prefill_chunk_size=8, max_num_partial_prefills=1)
    for order, prompt in enumerate((20, 20, 3)):
        driver.scheduler.add(sequence(order, prompt, 2))
    driver.run()
    for schedule in driver.log:
        assert sum(w.end < w.sequence.num_prompt for w in schedule.prefills) <= 1
    assert sorted(driver.done) == ["r0", "r1", "r2"]


def test_without_chunking_prompts_are_prefilled_whole() -> None:
    driver = make(use_chunked_prefill=False)
    driver.scheduler.add(sequence(0, 5000, 2))
    assert chunks(driver.step()) == [("r0", 0, 5000)]


def test_static_holds_a_batch_until_all_its_members_finish() -> None:
    driver = make(kind=StaticScheduler, max_batch_size=2, use_chunked_prefill=False)
    for order, new in enumerate((2, 6, 2)):
        driver.scheduler.add(sequence(order, 3, new))
    for _ in range(6):
        assert "r2" not in [w.sequence.id for works in driver.step().passes() for w in works]
    assert driver.done == ["r0", "r1"]
    assert chunks(driver.step()) == [("r2", 0, 3)]


def test_continuous_admits_as_soon_as_one_finishes() -> None:
    driver = make(max_batch_size=2)
    for order, new in enumerate((2, 6, 2)):
        driver.scheduler.add(sequence(order, 3, new))
    driver.step()
    driver.step()
    assert driver.done == ["r0"]
    assert chunks(driver.step()) == [("r2", 0, 3)]


def test_admission_is_in_arrival_order_even_when_a_later_one_would_fit() -> None:
    driver = make(CountingPool(4, 30), max_batch_size=4)
    for order, prompt in enumerate((20, 15, 2)):
        driver.scheduler.add(sequence(order, prompt, 2))
    assert [c[0] for c in chunks(driver.step())] == ["r0"]


def test_whole_room_is_taken_at_admission() -> None:
    pool = CountingPool(4, 100)
    driver = make(pool, prefill_chunk_size=10)
    driver.scheduler.add(sequence(0, 60, 2))
    driver.step()
    assert pool.free_tokens() == 40


def test_the_youngest_is_preempted_recomputed_and_resumes_first() -> None:
    driver = make(CountingPool(3, 20), max_batch_size=3)
    everyone = [sequence(order, 5, 8) for order in range(3)]
    for s in everyone:
        driver.scheduler.add(s)
    driver.run()
    assert next(s.preemptions for s in everyone) == 0
    assert everyone[2].preemptions >= 1
    assert driver.done == ["r0", "r1", "r2"]
    resumed = [w for schedule in driver.log for w in schedule.prefills if w.start == 0 and w.end > 5]
    assert resumed
    assert all(len(s.tokens) == 13 for s in everyone)


def documented(mark: str) -> dict[str, Any]:
    """The examples of docs/plugins.md that have the mark, as they stand there, after the first one with its imports."""
    first, *blocks = re.findall(r"```python\n(.*?)```", (DOCS / "plugins.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {"__name__": "my_plugin", "__file__": __file__}
    exec(first + "".join(textwrap.dedent(block) for block in blocks if mark in block), names)
    return names


DOCUMENTED = documented("(ContinuousScheduler)")
ShortestFirst: type[ContinuousScheduler] = DOCUMENTED["ShortestFirst"]
FairShares: type[ContinuousScheduler] = DOCUMENTED["FairShares"]


def test_a_policy_says_in_one_method_who_goes_first_and_who_yields() -> None:
    driver = make(CountingPool(2, 20), kind=ShortestFirst, max_batch_size=2)
    for order, (prompt, new) in enumerate(((4, 9), (4, 5), (4, 7), (3, 2))):
        driver.scheduler.add(sequence(order, prompt, new))
    driver.run()
    assert driver.done == ["r3", "r1", "r2", "r0"]
    driver = make(CountingPool(2, 14), kind=ShortestFirst, max_batch_size=2)
    everyone = [sequence(0, 4, 9), sequence(1, 4, 7)]
    for each in everyone:
        driver.scheduler.add(each)
    driver.run()
    assert [each.preemptions for each in everyone] == [1, 0], "not the youngest, but the longest"


def test_the_documented_policy_is_what_its_registration_makes() -> None:
    (registration,) = DOCUMENTED["infer_schedulers"]()
    context = SchedulerContext(CountingPool(2, 20), EngineSettings(max_batch_size=1))  # type: ignore[arg-type]
    driver = Driver(registration.factory(context, registration.settings()))
    for order, new in enumerate((5, 3, 4)):
        driver.scheduler.add(sequence(order, 4, new))
    driver.run()
    assert driver.done == ["r1", "r2", "r0"]


def test_a_policy_may_choose_anew_in_each_step() -> None:
    """Fair shares: who asks much does not keep out who asks little, and yields to them."""
    driver = make(CountingPool(4, 40), kind=FairShares, max_batch_size=4)
    users = ["a"] * 6 + ["b", "b", "c"]
    for order, user in enumerate(users):
        driver.scheduler.add(sequence(order, 4, 3, user=user))
    running = [work.sequence.request.owner.user for work in driver.step().prefills]
    assert running == ["a", "b", "c", "a"]
    driver.run()
    assert len(driver.done) == len(users)
    driver = make(CountingPool(3, 18), kind=FairShares, max_batch_size=3)
    everyone = [sequence(order, 4, 9, user=user) for order, user in enumerate("aab")]
    for each in everyone:
        driver.scheduler.add(each)
    driver.run()
    assert next(s.id for s in everyone if s.preemptions) == "r1", "not the youngest, but one of who has two"
    assert driver.done[0] == "r0"


def test_a_sequence_that_yields_after_its_token_was_planned_is_not_in_the_step() -> None:
    class EldestYields(ContinuousScheduler):
        def victim(self) -> Sequence:
            return self.seats.running[0]

    driver = make(CountingPool(2, 9), kind=EldestYields, max_batch_size=2)
    for order in range(2):
        driver.scheduler.add(sequence(order, 3, 4))
    planned = [[work.sequence.id for work in driver.step().decodes] for _ in range(3)]
    assert planned == [[], ["r0", "r1"], ["r1"]]


def group(pool: CountingPool, *, prompt: int = 20, new: int = 3, params: Any = (), **keys: Any) -> Driver:
    """Three answers to one prompt, and somebody else's behind them."""
    driver = make(pool, prefill_chunk_size=8, **keys)
    for order in range(3):
        driver.scheduler.add(sequence(order, prompt, new, group="g", params=params))
    driver.scheduler.add(sequence(3, 4, new, first=9))
    return driver


def test_answers_to_one_prompt_follow_the_first_once_its_prompt_is_in_the_cache() -> None:
    driver = group(SharingPool(4, 1000))
    assert [chunks(driver.step()) for _ in range(4)] == [
        [("r0", 0, 8), ("r3", 0, 4)],
        [("r0", 8, 8)],
        [("r0", 16, 4)],
        [("r1", 19, 1), ("r2", 19, 1)],
    ]
    driver.run()
    assert sorted(driver.done) == ["r0", "r1", "r2", "r3"]


def test_answers_to_one_prompt_wait_for_nobody_where_they_could_share_nothing() -> None:
    together = [("r0", 0, 8), ("r1", 0, 8), ("r2", 0, 8), ("r3", 0, 4)]
    assert chunks(group(CountingPool(4, 1000)).step()) == together
    scored = group(SharingPool(4, 1000), params={"prompt_logprobs": 0})
    assert chunks(scored.step()) == together, "who wants every position's logits finds nothing in the cache"


def test_the_next_takes_the_place_of_a_first_that_leaves_before_its_prompt_is_computed() -> None:
    driver = group(SharingPool(4, 1000))
    waits = driver.scheduler.seats.waiting[0]
    driver.scheduler.finish(waits)
    assert chunks(driver.step()) == [("r1", 0, 8), ("r3", 0, 4)]
    driver.scheduler.finish(driver.scheduler.seats.running[0])
    assert chunks(driver.step()) == [("r2", 8, 8)], "and what that had computed is not lost"
    driver.run()
    assert sorted(driver.done) == ["r2", "r3"]


def test_a_follower_that_leaves_leaves_the_first_and_the_others() -> None:
    driver = group(SharingPool(4, 1000))
    second = sequence(4, 20, 3, group="g")
    driver.scheduler.add(second)
    driver.step()
    driver.scheduler.finish(second)
    driver.run()
    assert sorted(driver.done) == ["r0", "r1", "r2", "r3"]


def test_a_first_that_ends_with_its_first_token_lets_all_others_follow_at_once() -> None:
    driver = group(SharingPool(4, 1000), prompt=6, new=1)
    driver.step()
    assert driver.done == ["r0", "r3"]
    assert chunks(driver.step()) == [("r1", 5, 1), ("r2", 5, 1)]


def test_a_first_whose_last_token_is_not_read_yet_has_its_prompt_in_the_cache() -> None:
    driver = group(SharingPool(4, 1000), prompt=6, new=1)
    (first, *_) = (work.sequence for work in driver.scheduler.schedule().prefills)
    first.num_computed = 6
    first.tokens.append(PENDING)
    assert [c for c in chunks(driver.scheduler.schedule()) if c[0] != "r3"] == [("r1", 5, 1), ("r2", 5, 1)]


def test_the_end_of_whoever_waits_or_runs_frees_theirs_and_only_theirs() -> None:
    pool = CountingPool(1, 100)
    driver = make(pool, max_batch_size=1, prefill_chunk_size=4)
    everyone = [sequence(order, 10, 5) for order in range(3)]
    for each in everyone:
        driver.scheduler.add(each)
    driver.step()
    driver.scheduler.finish(everyone[1])
    driver.scheduler.finish(everyone[0])
    assert pool.free_tokens() == 100
    driver.run()
    assert driver.done == ["r2"]


limits = st.fixed_dictionaries(
    {
        "max_batch_size": st.integers(1, 6),
        "prefill_chunk_size": st.integers(1, 40),
        "max_prefill_chunks_per_step": st.none() | st.integers(1, 4),
        "max_num_partial_prefills": st.none() | st.integers(1, 3),
        "budget_over_batch": st.none() | st.integers(0, 60),
    }
)
arrival = st.tuples(
    st.lists(st.integers(0, 30), min_size=1, max_size=4), st.integers(1, 50), st.integers(1, 20), st.sampled_from("ab")
)


@settings(max_examples=examples(500, 80))
@given(
    st.sampled_from([ContinuousScheduler, FairScheduler, StaticScheduler, ShortestFirst, FairShares]),
    limits,
    st.lists(arrival, min_size=1, max_size=8),
    st.integers(0, 200),
    st.data(),
)
def test_whatever_comes_everyone_ends_once_within_the_limits(
    kind: type[ContinuousScheduler],
    keys: dict[str, int | None],
    arrivals: list[tuple[list[int], int, int, str]],
    spare: int,
    data: st.DataObject,
) -> None:
    """Of each arrival, several answers to one prompt, which come together or one by one."""
    over = keys.pop("budget_over_batch")
    batch = keys["max_batch_size"]
    assert batch is not None
    budget = None if over is None else batch + over
    pool = data.draw(st.sampled_from([CountingPool, SharingPool]))(batch, 70 + spare)
    limits: dict[str, Any] = {**keys, "max_tokens_per_step": budget}
    driver = make(pool, kind, **limits)
    due = sorted((at, i) for i, (times, *_) in enumerate(arrivals) for at in times)
    everyone: list[Sequence] = []
    aborted: set[str] = set()
    computed: Counter[tuple[str, int]] = Counter()
    steps = 0
    while due or driver.scheduler.has_work():
        while due and due[0][0] <= steps:
            _, i = due.pop(0)
            times, prompt, new, user = arrivals[i]
            group = f"g{i}" if len(times) > 1 else ""
            everyone.append(sequence(len(everyone), prompt, new, first=99 + i, user=user, group=group))
            driver.scheduler.add(everyone[-1])
        if everyone and data.draw(st.integers(0, 15)) == 0:
            victim = data.draw(st.sampled_from(everyone))
            if victim.id not in {*driver.done, *aborted}:
                driver.scheduler.finish(victim)
                aborted.add(victim.id)
        schedule = driver.step()
        works = [w for part in schedule.passes() for w in part]
        assert len({w.sequence.id for w in works}) == len(works) <= batch
        assert budget is None or tokens(schedule) <= budget
        cap = keys["max_prefill_chunks_per_step"]
        assert cap is None or len(schedule.prefills) <= cap
        assert all(w.length <= (keys["prefill_chunk_size"] or 0) for w in schedule.prefills)
        assert works or not driver.scheduler.has_work(), "something always runs"
        for here in (driver.scheduler.seats.running, driver.scheduler.seats.waiting):
            assert here == sorted(here, key=driver.scheduler.key), "nobody overtakes"
        computed.update(
            (w.sequence.request.group, at)
            for w in works
            for at in range(w.start, min(w.end, w.sequence.num_prompt - 1))
        )
        steps += 1
        assert steps < 5000
    assert sorted(driver.done + list(aborted)) == sorted(s.id for s in everyone)
    assert pool.free_tokens() == pool.tokens
    assert len(pool.free_slots) == batch
    if isinstance(pool, SharingPool):
        again = [at for at, times in computed.items() if at[0] and times > 1]
        assert not again, "a group computes its prompt once, but for the last position"
