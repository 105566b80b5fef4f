"""The engine accepts valid plans of a scheduler and refuses invalid ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support import MAX_SEQ_LEN, VOCAB, make_engine, paged_pool, random_prompt, slotted_pool, tiny_model

from infer import PluginError
from infer.contracts.params import SamplingParams
from infer.contracts.registration import NoSettings
from infer.contracts.request import Request
from infer.contracts.scheduler import Schedule, Sequence
from infer.contracts.sections import EngineSettings
from infer.engine.checked import CheckedPool, CheckedScheduler
from infer.engine.schedulers import ContinuousScheduler


class Bad(ContinuousScheduler):
    """Plans as core does, and then something of its own with it."""

    spoil: Callable[[Schedule], Any] = staticmethod(lambda plan: plan)

    def schedule(self) -> Schedule:
        spoiled: Schedule = self.spoil(super().schedule())
        return spoiled


def checked(spoil: Callable[[Schedule], Any], thorough: bool = True) -> CheckedScheduler:
    model = tiny_model("llama")
    bad = Bad(slotted_pool(model, torch.float32), EngineSettings(max_batch_size=4, prefill_chunk_size=8))
    bad.spoil = spoil
    return CheckedScheduler(bad, "The scheduler plugin 'bad' of somebody", thorough=thorough, patience_s=0.0)


def sequence(id: str, length: int = 12) -> Sequence:
    prompt = random_prompt(length)
    request = Request.make(prompt, SamplingParams(), vocab_size=VOCAB, max_seq_len=MAX_SEQ_LEN, id=id)
    return Sequence(request, 0, 64)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda plan: None, "planned a NoneType, not a Schedule"),
        (lambda plan: replace(plan, prefills=[3]), "planned a int in prefills, not a Work"),
        (
            lambda plan: Schedule([], plan.prefills * 2),
            "planned a from 0 on for 8, though it is in the same step already",
        ),
        (lambda plan: Schedule(plan.prefills, []), "in decodes; decodes are of length 1"),
        (lambda plan: Schedule([], [sequence("b").extend(3)]), "planned b .* though it has ended"),
        (lambda plan: Schedule([], [plan.prefills[0]._replace(length=13)]), "though 12 of its tokens are left"),
        (lambda plan: Schedule([], [plan.prefills[0]._replace(start=3)]), r"not what its extend\(8\) gives"),
        (lambda plan: 1 / 0, r"failed: ZeroDivisionError: division by zero \(test_checked.py:\d+\)"),
        (lambda plan: NoSettings().nothing, r"failed: AttributeError: .*'nothing' \(test_checked.py:\d+\)"),  # type: ignore[attr-defined]
    ],
)
def test_a_bad_plan_is_one_sentence_that_names_the_scheduler(spoil: Callable[[Schedule], Any], why: str) -> None:
    scheduler = checked(spoil)
    scheduler.add(sequence("a"))
    with pytest.raises(PluginError, match=rf"^The scheduler plugin 'bad' of somebody .*{why}"):
        scheduler.schedule()


def test_a_sequence_without_a_slot_is_not_run() -> None:
    scheduler = checked(lambda plan: Schedule([], [waiting.extend(8)]))
    waiting = sequence("w")
    scheduler.add(waiting)
    scheduler._scheduler.seats.waiting.clear()  # type: ignore[attr-defined]
    with pytest.raises(PluginError, match="though it has no slot"):
        scheduler.schedule()


@pytest.mark.parametrize("thorough", [True, False], ids=["a plugin's", "core's"])
def test_planning_nothing_for_ever_ends(thorough: bool) -> None:
    scheduler = checked(lambda plan: Schedule([], []), thorough)
    assert not scheduler.schedule().prefills, "without work that is right"
    assert not scheduler.schedule().prefills
    scheduler.add(sequence("a"))
    scheduler.schedule()
    scheduler.add(sequence("b"))  # somebody came: what is planned now may differ
    scheduler.schedule()
    with pytest.raises(
        PluginError, match=r"'bad' of somebody has planned nothing for 0 s, though it has work \(requests: 2\)"
    ):
        scheduler.schedule()


def test_a_scheduler_that_waits_for_a_pool_that_loads_is_not_stuck() -> None:
    bad, loading = checked(lambda plan: Schedule([], []))._scheduler, [True]
    scheduler = CheckedScheduler(bad, "The scheduler", thorough=True, patience_s=0.0, loading=lambda: loading[0])
    scheduler.add(sequence("a"))
    for _ in range(5):
        scheduler.schedule()
    loading.clear()
    loading.append(False)
    scheduler.schedule()
    with pytest.raises(PluginError, match="has planned nothing"):
        scheduler.schedule()


@pytest.mark.parametrize("call", ["add", "finish"])
@pytest.mark.parametrize("error", [ValueError("lost"), SystemExit(3)])
def test_a_fault_in_any_method_names_the_scheduler(
    call: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object) -> None:
        raise error

    scheduler = checked(lambda plan: plan)
    monkeypatch.setattr(scheduler._scheduler, call, fail)
    with pytest.raises(PluginError, match=r"'bad' of somebody failed: \w+: (lost|3) \(test_checked.py:\d+\)"):
        getattr(scheduler, call)(sequence("a"))


@pytest.mark.parametrize("call", ["allocate", "grow", "commit", "free", "free_tokens"])
def test_a_fault_in_the_pool_names_the_pool(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object, **more: object) -> None:
        raise ValueError("lost")

    pool = paged_pool(tiny_model("llama"), torch.float32)
    monkeypatch.setattr(pool, call, fail)
    named: Any = CheckedPool(pool, "The cache plugin 'leaky' of somebody")
    assert named.room is pool.room
    keys = EngineSettings(max_batch_size=2)
    scheduler = CheckedScheduler(ContinuousScheduler(named, keys), "The scheduler plugin 'fair'", thorough=True)
    asked = sequence("a")

    def live() -> None:
        scheduler.add(asked)
        scheduler.schedule()
        scheduler.finish(asked)
        named.free_tokens()
        named.grow(0, 1)

    with pytest.raises(PluginError, match=r"^The cache plugin 'leaky' of somebody failed: ValueError: lost"):
        live()


def test_who_is_here_is_work_whatever_the_scheduler_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine without work waits for the next message, and a forgotten request would wait with it."""
    scheduler = checked(lambda plan: plan)
    monkeypatch.setattr(scheduler._scheduler, "has_work", lambda: False)
    assert not scheduler.has_work()
    scheduler.add(waiting := sequence("a"))
    assert scheduler.has_work()
    scheduler.finish(waiting)
    assert not scheduler.has_work()


@pytest.mark.parametrize("lag", [0, 1])
def test_sound_plans_pass(lag: int) -> None:
    """Mixed lengths, preemption, aborts: what core plans is never refused."""
    model = tiny_model("llama")
    plain, watched = (
        make_engine(
            model, torch.float32, pool=paged_pool(model, torch.float32, num_blocks=20), lag=lag, prefill_chunk_size=16
        )
        for _ in range(2)
    )
    inner = watched.engine._scheduler
    watched.engine._scheduler = CheckedScheduler(inner, "core's", thorough=True)
    assert plain.run_six() == watched.run_six()
    assert sum(record.preemptions for record in watched.finished) > 0
