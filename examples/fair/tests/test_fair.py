from __future__ import annotations

import pytest

import infer_fair
from infer import LLM, SamplingParams, hookimpl
from infer.hookspecs import RequestRecord
from infer.testing import check_scheduler, tiny_checkpoint
from infer_fair import FairScheduler, FairSettings


@pytest.mark.parametrize("answer_cost", [2.0, pytest.param(0.0, marks=pytest.mark.slow)])
def test_it_keeps_the_contract(answer_cost: float) -> None:
    check_scheduler(lambda context: FairScheduler(context, FairSettings(answer_cost=answer_cost)))


def test_who_asks_much_does_not_keep_out_who_asks_little() -> None:
    ended: list[str] = []

    class Watch:
        INFER_PLUGIN_API = 1

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
