from __future__ import annotations

import pytest

import infer_weighted
from infer import LLM, SamplingParams, hookimpl
from infer.contracts.records import RequestRecord
from infer_testing import check_scheduler, tiny_checkpoint
from infer_weighted import WeightedScheduler, WeightedSettings


@pytest.mark.parametrize(
    ("weight", "only"),
    [(2.0, ["little_room"]), *(pytest.param(weight, [], marks=pytest.mark.slow) for weight in (0.1, 2.0))],
)
def test_it_keeps_the_contract(weight: float, only: list[str]) -> None:
    settings = WeightedSettings(users=["a"], weight=weight)
    check_scheduler(lambda context: WeightedScheduler(context, settings), only=only)


def test_who_weighs_more_gets_more() -> None:
    ended: list[str] = []

    class Watch:
        INFER_PLUGIN_API = 2

        @staticmethod
        @hookimpl
        def infer_request_finished(record: RequestRecord) -> None:
            ended.append(record.request_id[0])

    folder = tiny_checkpoint("LlamaForCausalLM")
    engine = {
        "batching_mode": "weighted",
        "weighted": {"users": ["heavy"], "weight": 3},
        "max_batch_size": 1,
        "max_seq_len": 64,
    }
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    with LLM(str(folder), plugins=[infer_weighted, Watch], engine=engine) as llm:
        first = llm.submit([5, 6, 7], SamplingParams(max_tokens=40, temperature=0, ignore_eos=True), id="first")
        users = ["light"] * 6 + ["heavy"] * 6
        handles = [llm.submit([5, 6, 7], params, id=f"{user}{i}", user=user) for i, user in enumerate(users)]
        for handle in (first, *handles):
            assert [*handle.events()][-1].finish_reason == "length"
    order = [each for each in ended if each != "f"]
    assert sorted(order) == sorted(user[0] for user in users)
    assert order[:8].count("h") == 6, "of four places, three"
