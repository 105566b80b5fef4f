"""Scheduling on integers alone: a pool that counts, and a model that takes no time."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.contracts.params import SamplingParams
from infer.contracts.request import Request
from infer.engine.schedulers import ContinuousScheduler, StaticScheduler
from infer.protocols import PENDING, Allocation, Schedule, Sequence
from infer.settings import EngineSettings


class CountingPool:
    """Room for so many tokens in so many slots; tokens are taken one by one, as a paged pool of block size 1 would."""

    def __init__(self, slots: int, tokens: int) -> None:
        self.tokens = tokens
        self.free_slots = set(range(slots))
        self.held: dict[int, int] = {}

    def allocate(self, token_ids: Seq[int], *, reuse: bool = True, salt: str = "") -> Allocation | None:
        if not self.free_slots or len(token_ids) > self.free_tokens():
            return None
        slot = self.free_slots.pop()
        self.held[slot] = len(token_ids)
        return Allocation(slot)

    def grow(self, slot: int, num_tokens: int) -> bool:
        more = max(0, num_tokens - self.held[slot])
        if more > self.free_tokens():
            return False
        self.held[slot] += more
        return True

    def commit(self, slot: int, token_ids: Seq[int], num_computed: int) -> None:
        assert 0 <= num_computed <= len(token_ids)
        assert PENDING not in token_ids[:num_computed]

    def free(self, slot: int) -> None:
        del self.held[slot]
        self.free_slots.add(slot)

    def free_tokens(self) -> int:
        return self.tokens - sum(self.held.values())


def sequence(order: int, prompt: int, new: int) -> Sequence:
    request = Request(tuple(range(1, prompt + 1)), SamplingParams(max_tokens=new), id=f"r{order}")
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


class ShortestFirst(ContinuousScheduler):
    """Who may take the fewest tokens goes first."""

    def key(self, sequence: Sequence) -> tuple[int, int, int]:
        return (sequence.request.priority, sequence.max_len, sequence.order)


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
arrival = st.tuples(st.integers(0, 30), st.integers(1, 50), st.integers(1, 20))


@settings(max_examples=500, deadline=None)
@given(limits, st.lists(arrival, min_size=1, max_size=12), st.integers(0, 200), st.data())
def test_whatever_comes_everyone_ends_once_within_the_limits(
    keys: dict[str, int | None], arrivals: list[tuple[int, int, int]], spare: int, data: st.DataObject
) -> None:
    over = keys.pop("budget_over_batch")
    batch = keys["max_batch_size"]
    assert batch is not None
    budget = None if over is None else batch + over
    pool = CountingPool(batch, 70 + spare)
    limits: dict[str, Any] = {**keys, "max_tokens_per_step": budget}
    driver = make(pool, **limits)
    due = sorted(enumerate(arrivals), key=lambda a: a[1][0])
    everyone: list[Sequence] = []
    aborted: set[str] = set()
    steps = 0
    while due or driver.scheduler.has_work():
        while due and due[0][1][0] <= steps:
            _, (_, prompt, new) = due.pop(0)
            everyone.append(sequence(len(everyone), prompt, new))
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
        orders = [s.order for s in driver.scheduler.running]
        assert orders == sorted(orders)
        waiting = [s.order for s in driver.scheduler.waiting]
        assert waiting == sorted(waiting), "nobody overtakes"
        steps += 1
        assert steps < 5000
    assert sorted(driver.done + list(aborted)) == sorted(s.id for s in everyone)
    assert pool.free_tokens() == pool.tokens
    assert len(pool.free_slots) == batch
