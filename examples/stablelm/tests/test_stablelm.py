from __future__ import annotations

from typing import Any

import pytest

import infer_stablelm
from infer import LLM, CheckpointError, SamplingParams
from infer_testing import check_model, tiny_checkpoint

FORMS: dict[str, dict[str, Any]] = {
    "StableLM 3B": {},
    "StableLM 2 1.6B": {"use_qkv_bias": True},
    "side by side": {"use_parallel_residual": True, "num_hidden_layers": 3},
}


@pytest.mark.parametrize("form", ["StableLM 3B", *(pytest.param(f, marks=pytest.mark.slow) for f in [*FORMS][1:])])
def test_it_keeps_the_contract_and_computes_what_transformers_does(form: str) -> None:
    folder = tiny_checkpoint("StableLmForCausalLM", plugins=[infer_stablelm], **FORMS[form])
    check_model(folder, plugins=[infer_stablelm], against="transformers")


def test_it_answers() -> None:
    folder = tiny_checkpoint("StableLmForCausalLM", plugins=[infer_stablelm])
    with LLM(str(folder), plugins=[infer_stablelm]) as llm:
        (answer,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
        assert len(answer.token_ids) == 8
        assert llm.served.exact


def test_what_it_does_not_compute_it_refuses() -> None:
    with pytest.raises(CheckpointError, match="qk_layernorm"):
        tiny_checkpoint("StableLmForCausalLM", plugins=[infer_stablelm], qk_layernorm=True)
