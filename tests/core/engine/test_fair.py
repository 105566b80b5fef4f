"""Fair shares between API keys, and between the users of each."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from tests.core.engine.test_schedulers import Driver, chunks, make, sequence

from infer.contracts.request import Owner
from infer.contracts.scheduler import Schedule
from infer.engine.schedulers import ANSWER_COST, MOST_ABSENT, FairScheduler, Shares
from infer_testing.schedulers import CountingPool


def fair(pool: CountingPool | None = None, **keys: object) -> Driver:
    return make(pool, FairScheduler, **keys)


def ran(schedules: list[Schedule]) -> Counter[Owner]:
    """How many works each owner has had."""
    return Counter(work.sequence.request.owner for each in schedules for works in each.passes() for work in works)


def test_who_asks_much_does_not_keep_out_who_asks_little() -> None:
    driver = fair(max_batch_size=1)
    for order, key in enumerate(["greedy"] * 5 + ["modest"]):
        driver.scheduler.add(sequence(order, 4, 3, key=key))
    driver.run()
    assert driver.done == ["r0", "r5", "r1", "r2", "r3", "r4"]


def test_a_key_gets_no_more_by_naming_many_users() -> None:
    driver = fair(max_batch_size=2)
    for order in range(40):
        driver.scheduler.add(sequence(order, 4, 3, key="many", user=f"user {order}"))
    for order in range(40, 60):
        driver.scheduler.add(sequence(order, 4, 3, key="one", user="me"))
    for _ in range(60):
        driver.step()
    shares = Counter(owner.key for owner in ran(driver.log).elements())
    assert abs(shares["many"] - shares["one"]) <= 8, shares


def test_users_of_a_key_share_what_it_gets() -> None:
    driver = fair(max_batch_size=1)
    for order, user in enumerate("aaaab"):
        driver.scheduler.add(sequence(order, 4, 3, key="key", user=user))
    driver.scheduler.add(sequence(5, 4, 3, key="other", user="a"))
    driver.run()
    assert driver.done[:3] == ["r0", "r5", "r4"], "the other key's user a is somebody else"


def test_priority_orders_ones_own_requests_only() -> None:
    driver = fair(max_batch_size=1)
    for order, (key, priority) in enumerate((("a", 0), ("a", -5), ("b", 9), ("a", -6))):
        driver.scheduler.add(sequence(order, 4, 3, key=key, priority=priority))
    driver.run()
    assert driver.done == ["r3", "r2", "r1", "r0"]


def test_a_steps_prompt_tokens_are_shared() -> None:
    """Though the long prompts came first, and both run."""
    driver = fair(max_batch_size=4, prefill_chunk_size=8, max_tokens_per_step=8)
    for order in range(2):
        driver.scheduler.add(sequence(order, 80, 1, key="long"))
    driver.step()
    driver.scheduler.add(sequence(2, 12, 1, key="short"))
    given = [chunks(driver.step()) for _ in range(4)]
    assert given == [[("r2", 0, 8)], [("r0", 8, 8)], [("r2", 8, 4), ("r0", 16, 4)], [("r0", 20, 8)]]
    assert driver.done == ["r2"]


def test_no_more_prompts_are_part_way_than_may_be() -> None:
    driver = fair(max_batch_size=4, prefill_chunk_size=8, max_num_partial_prefills=1)
    driver.scheduler.add(sequence(0, 80, 1, key="long"))
    driver.step()
    driver.scheduler.add(sequence(1, 12, 1, key="other"))
    assert chunks(driver.step()) == [("r0", 8, 8)]


def test_who_finds_no_room_lets_nobody_pass() -> None:
    """Neither the owner's own, nor others', but prompts that are part-way go on."""
    driver = fair(CountingPool(3, 40), max_batch_size=3, prefill_chunk_size=8)
    for order, (prompt, key) in enumerate(((30, "a"), (20, "b"), (4, "c"), (4, "b"))):
        driver.scheduler.add(sequence(order, prompt, 1, key=key))
    assert [chunks(driver.step()) for _ in range(3)] == [[("r0", 0, 8)], [("r0", 8, 8)], [("r0", 16, 8)]]


def test_a_token_of_an_answer_counts_more_than_one_of_a_prompt_and_a_cached_one_nothing() -> None:
    class Half(CountingPool):
        def allocate(self, token_ids, *, reuse=True, salt=""):  # type: ignore[no-untyped-def]
            place = super().allocate(token_ids, reuse=reuse, salt=salt)
            return None if place is None else replace(place, num_cached=len(token_ids) // 2)

    driver = fair(Half(1, 1 << 20), max_batch_size=1)
    driver.scheduler.add(sequence(0, 10, 9, key="a"))
    for _ in range(3):
        driver.step()
    assert isinstance(driver.scheduler, FairScheduler)
    assert driver.scheduler._keys["a"] == 5 + 2 * ANSWER_COST


def preempting() -> Driver:
    """Of a, who has got more, r1 is preempted."""
    driver = fair(CountingPool(3, 18), max_batch_size=3)
    for order, key in enumerate("aab"):
        driver.scheduler.add(sequence(order, 4, 9, key=key))
    while not any(sequence.preemptions for sequence in driver.scheduler.seats.waiting):
        driver.step()
    return driver


def test_who_has_got_the_most_yields() -> None:
    assert [sequence.id for sequence in preempting().scheduler.seats.waiting] == ["r1"]


def test_the_preempted_resume_first() -> None:
    driver = preempting()
    for order in range(3, 6):
        driver.scheduler.add(sequence(order, 4, 2, key="c"))
    driver.run()
    admitted = [id for step in driver.log for id, *_ in chunks(step)]
    assert admitted.index("r1", 3) < admitted.index("r3")


def test_who_has_yielded_does_not_yield_again_while_others_can() -> None:
    driver = fair(max_batch_size=2)
    everyone = [sequence(order, prompt, 9, key=key) for order, (prompt, key) in enumerate(((8, "a"), (4, "b")))]
    for each in everyone:
        driver.scheduler.add(each)
    driver.step()
    assert driver.scheduler.victim() is everyone[0]
    everyone[0].preemptions = 1
    assert driver.scheduler.victim() is everyone[1]


def test_what_is_computed_again_does_not_count() -> None:
    driver = preempting()
    scheduler = driver.scheduler
    assert isinstance(scheduler, FairScheduler)
    while "r1" not in driver.done:
        before = scheduler._keys["a"]
        schedule = driver.step()
        again = [work for work in schedule.prefills if work.sequence.id == "r1"]
        if again:
            (work,) = again
            assert work.length > 4
            assert not schedule.decodes
            # Each one's last token had been drawn, but nothing had been computed from it.
            assert scheduler._keys["a"] - before == len(schedule.prefills)
            return
    raise AssertionError("it was not computed again")


def scheduler_of(driver: Driver) -> FairScheduler:
    assert isinstance(driver.scheduler, FairScheduler)
    return driver.scheduler


def refill(driver: Driver, key: str, user: str = "", prompt: int = 60, waiting: int = 4) -> None:
    """Have the key ask without a break, for answers of one token."""
    missing = waiting - sum(each.request.owner.key == key for each in driver.scheduler.seats.waiting)
    for _ in range(missing):
        order = len(driver.log) * 100 + len(driver.scheduler.seats.waiting)
        driver.scheduler.add(sequence(order, prompt, 1, key=key, user=user.format(order)))


STEPS: dict[str, Any] = {"max_batch_size": 8, "max_tokens_per_step": 64, "prefill_chunk_size": 64}


def test_a_slow_stream_saves_nothing_up_for_a_burst() -> None:
    driver = fair(**STEPS)
    driver.scheduler.add(sequence(0, 4, 9999, key="saver"))
    for _ in range(200):
        refill(driver, "busy")
        driver.step()
    driver.log.clear()
    for _ in range(40):
        refill(driver, "busy")
        refill(driver, "saver")
        driver.step()
    got = Counter[str]()
    for work in (work for each in driver.log for works in each.passes() for work in works):
        got[work.sequence.request.owner.key] += work.length * (2 if work.decode else 1)
    assert abs(got["busy"] - got["saver"]) <= 130, got


def test_who_comes_while_others_ask_is_not_behind_them() -> None:
    """Though streams that ask for nothing got tokens beside them."""
    driver = fair(**STEPS)
    for order in range(4):
        driver.scheduler.add(sequence(order, 4, 9999, key=f"stream {order}"))
    for _ in range(200):
        refill(driver, "busy")
        driver.step()
    driver.scheduler.add(sequence(1, 40, 1, key="new"))
    for _ in range(3):
        refill(driver, "busy")
        driver.step()
    assert "r1" in driver.done


def test_new_names_do_not_keep_out_who_has_got_something() -> None:
    driver = fair(**STEPS)
    driver.scheduler.add(sequence(0, 400, 1, user="old"))
    for _ in range(40):
        refill(driver, "", "user {}", prompt=64, waiting=4)
        driver.step()
    assert "r0" in driver.done


def test_who_was_preempted_has_saved_nothing_up() -> None:
    driver = fair(**STEPS)
    saver = sequence(0, 4, 9999, key="saver")
    driver.scheduler.add(saver)
    for _ in range(100):
        refill(driver, "busy")
        driver.step()
    driver.scheduler.seats.preempt(saver)
    refill(driver, "busy")
    driver.step()
    keys = scheduler_of(driver)._keys
    assert abs(keys["saver"] - keys["busy"]) <= 130


def test_a_pass_that_raised_changes_no_account() -> None:
    driver = fair(max_batch_size=4, max_tokens_per_step=8, prefill_chunk_size=8)
    both = [sequence(order, 80, 9, key=key) for order, key in enumerate("ab")]
    for each in both:
        driver.scheduler.add(each)
    for _ in range(3):
        driver.step()
    keys = scheduler_of(driver)._keys
    assert (keys["a"], keys["b"]) == (16, 8)
    for each in both:
        driver.scheduler.finish(each)
        each.restart()
        driver.scheduler.add(each)
    driver.step()
    assert (keys["a"], keys["b"]) == (16, 8), "b came first, with what it had computed already"
    assert both[1].num_computed == 8


def test_who_comes_back_has_saved_nothing_up_and_is_forgotten() -> None:
    shares = Shares()
    shares.begin({"a"}, {"a"})
    shares.give("a", 100.0)
    shares.begin({"a", "b"}, {"a", "b"})
    assert shares["b"] == 100.0
    shares.begin({"a"}, {"a"})
    assert len(shares) == 1, "b would be lifted to that again"
    shares.begin({"a", "b"}, {"a", "b"})
    shares.give("b", 8.0)
    shares.begin({"a"}, {"a"})
    assert shares["b"] == 108.0, "it has got more than others"
    shares.give("a", 9.0)
    shares.begin(set(), set())
    assert len(shares) == 0


def test_names_are_remembered_within_bounds() -> None:
    shares = Shares()
    for name in map(str, range(3 * MOST_ABSENT)):
        both = {"stays", name}
        shares.begin(both, both)
        shares.begin(both, {"stays"})
        shares.give(name, 1e6)
        assert len(shares) <= MOST_ABSENT + 2


def test_nothing_is_kept_of_who_has_left() -> None:
    driver = fair(max_batch_size=2)
    for order in range(9):
        driver.scheduler.add(sequence(order, 4, 2, key=f"key {order % 2}", user=f"user {order}"))
    driver.run()
    driver.step()
    scheduler = scheduler_of(driver)
    assert len(scheduler._keys) == len(scheduler._users) == 0
