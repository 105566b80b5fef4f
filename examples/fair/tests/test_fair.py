from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import infer_fair
from infer import LLM, Request, SamplingParams, hookimpl
from infer.contracts.records import RequestRecord
from infer.contracts.scheduler import SchedulerContext, Sequence
from infer.contracts.sections import EngineSettings
from infer_fair import FairScheduler, FairSettings
from infer_testing import check_scheduler, tiny_checkpoint


@pytest.mark.parametrize(
    ("answer_cost", "only"),
    [(2.0, ["little_room"]), *(pytest.param(cost, [], marks=pytest.mark.slow) for cost in (0.0, 2.0))],
)
def test_it_keeps_the_contract(answer_cost: float, only: list[str]) -> None:
    settings = FairSettings(answer_cost=answer_cost)
    check_scheduler(lambda context: FairScheduler(context, settings), only=only)


def test_who_asks_much_does_not_keep_out_who_asks_little() -> None:
    ended: list[str] = []

    class Watch:
        INFER_PLUGIN_API = 2

        @staticmethod
        @hookimpl
        def infer_request_finished(record: RequestRecord) -> None:
            ended.append(record.request_id)

    folder = tiny_checkpoint("LlamaForCausalLM")
    engine = {"batching_mode": "fair", "max_batch_size": 1}
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    with LLM(str(folder), plugins=[infer_fair, Watch], engine=engine) as llm:
        users = ["greedy"] * 5 + ["modest"]
        handles = [llm.submit([5, 6, 7], params, id=f"{user}{i}", user=user) for i, user in enumerate(users)]
        for handle in handles:
            assert [*handle.events()][-1].finish_reason == "length"
    assert sorted(ended) == sorted(handle.request.id for handle in handles)
    assert ended.index("modest5") <= 2, "it was the last to ask"


def test_who_comes_back_has_saved_nothing_up_and_names_are_forgotten() -> None:
    pool: Any = SimpleNamespace()
    scheduler = FairScheduler(SchedulerContext(pool, EngineSettings()), FairSettings())
    a, b = (Sequence(Request((1, 2), user=user), order, 10) for order, user in enumerate("ab"))
    scheduler.add(a)
    scheduler._got["a"] = 100.0
    scheduler.add(b)
    assert scheduler._got == {"a": 100.0, "b": 100.0}
    scheduler.finish(b)
    assert scheduler._got == {"a": 100.0}, "b would be lifted to that again"
    scheduler.finish(a)
    assert scheduler._got == {}
