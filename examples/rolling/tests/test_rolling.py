from __future__ import annotations

from typing import Any

import pytest
import torch

import infer_rolling
from infer import LLM, SamplingParams
from infer.contracts.attention import AttentionSpec
from infer.contracts.cache import CacheContext
from infer.kernels.reference import ReferenceKernels
from infer_rolling import RollingPool, RollingSettings
from infer_testing import check_pool, tiny_checkpoint


@pytest.mark.parametrize(
    ("block_size", "only"),
    [(16, ["windows"]), *(pytest.param(n, [], marks=pytest.mark.slow) for n in (1, 50))],
)
def test_it_keeps_the_contract(block_size: int, only: list[str]) -> None:
    settings = RollingSettings(block_size=block_size)
    check_pool(lambda context: RollingPool(context, settings), kv_dtypes=("int8",), only=only)


def test_a_long_sequence_takes_no_more_than_window_and_chunk() -> None:
    def nbytes(window: int | None, longest: int) -> int:
        layers, cpu = [AttentionSpec(4, 2, 32, 1.0, window=window)] * 4, torch.device("cpu")
        context = CacheContext(layers, 2, longest, torch.float32, cpu, ReferenceKernels(), max_chunk=32)
        return RollingPool(context, RollingSettings()).nbytes

    assert nbytes(33, 1000) == nbytes(33, 10_000) == nbytes(None, 64)


def test_answers_are_those_of_any_other_pool() -> None:
    folder = tiny_checkpoint("MistralForCausalLM", sliding_window=20)
    prompts = [[5 + i % 50 for i in range(n)] for n in (3, 60, 150)]
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=1, ignore_eos=True, logprobs=3)
    answers: list[Any] = []
    for backend in ("slotted", "rolling"):
        cache = {"backend": backend}
        with LLM(str(folder), plugins=[infer_rolling], cache=cache, engine={"prefill_chunk_size": 32}) as llm:
            answers.append([(a.token_ids, a.logprobs) for a in llm.generate(prompts, params)])
    assert answers[0] == answers[1]
