"""Answers with adapters have the same bits in any company."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.adapters.checkpoints import linear, write_adapter
from tests.models.checkpoints import VOCAB, Family, write_checkpoint
from tests.support import Always

from infer import LLM, hookimpl
from infer.assemble import drafts
from infer.contracts.params import SamplingParams
from infer.contracts.records import RequestRecord
from infer.llm import Completion

NAMES = [None, "a", "b", "c"]
ASKED = 5
"""How many requests a mix has."""


def ask(seed: int) -> list[tuple[list[int], SamplingParams, str | None]]:
    """The requests of a mix. Some prompts begin alike, so that prefixes are found."""
    draw = random.Random(seed)
    common = [draw.randrange(2, VOCAB) for _ in range(40)]
    asked = []
    for _ in range(ASKED):
        own = [draw.randrange(2, VOCAB) for _ in range(draw.choice([1, 3, 20, 70]))]
        prompt = common[: draw.choice([0, 16, 40])] + own
        wanted = draw.choice([None, None, 0])
        params = SamplingParams(
            max_tokens=draw.choice([1, 4, 9]), seed=draw.randrange(99), logprobs=2, prompt_logprobs=wanted
        )
        asked.append((prompt, params, draw.choice(NAMES)))
    return asked


def bits(answer: Completion) -> object:
    return answer.token_ids, answer.logprobs, answer.prompt_logprobs


def together(llm: LLM, asked: list[tuple[list[int], SamplingParams, str | None]]) -> list[object]:
    handles = [llm.submit(prompt, params, adapter=adapter) for prompt, params, adapter in asked]
    answers = []
    for handle, (prompt, _, _) in zip(handles, asked, strict=True):
        answers.append(Completion(tuple(prompt)))
        for event in handle.events():
            answers[-1].add(event)
    return [bits(answer) for answer in answers]


KINDS: dict[str, tuple[Family, torch.dtype, dict[str, dict[str, Any]]]] = {
    "bfloat16": ("qwen3", torch.bfloat16, {}),
    "quantized": ("qwen3", torch.bfloat16, {"model": {"quantization": "int4"}}),
    "mixture": ("qwen3_moe", torch.float32, {}),
    "reference": ("llama", torch.float32, {"kernels": {"backend": "reference"}}),
    "recurrent": ("qwen3_5", torch.float32, {}),
    "drafts": ("qwen3", torch.float32, {"engine": {"speculation": "ngram", "max_batch_size": 3}}),
}


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, LLM]]:
    """A model with three adapters, and the same without a place for any."""
    family, dtype, sections = KINDS[request.param]
    folder: Path = tmp_path_factory.mktemp(request.param)
    base, load = write_checkpoint(folder / "base", family, dtype=dtype), []
    for seed, name in enumerate("abc"):
        targets = linear(family) if name == "a" else ["q_proj", "v_proj", *["down_proj"] * (family != "qwen3_moe")]
        write_adapter(base, folder / name, seed=seed, r=3 + 4 * seed, target_modules=targets)
        load.append(f"{name}={folder / name}")
    engine = {"prefill_chunk_size": 24, "max_seq_len": 160} | sections.get("engine", {})
    how: Any = sections | {"engine": engine}
    with LLM(str(base), adapters={"load": load}, **how) as llm, LLM(str(base), **how) as bare:
        yield llm, bare


def check(pair: tuple[LLM, LLM], seed: int) -> None:
    llm, bare = pair
    asked = ask(seed)
    found = together(llm, asked)
    for one, (prompt, params, adapter) in zip(found, asked, strict=True):
        (alone,) = together(llm if adapter else bare, [(prompt, params, adapter)])
        assert one == alone, (seed, prompt, params, adapter)


def test_mixes(pair: tuple[LLM, LLM]) -> None:
    for seed in range(4):
        check(pair, seed)


@pytest.mark.slow
def test_many_mixes(pair: tuple[LLM, LLM]) -> None:
    for seed in range(100, 130):
        check(pair, seed)


def test_adapters_change_answers(pair: tuple[LLM, LLM]) -> None:
    llm, _ = pair
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    answers = [llm.generate([[5, 6, 7, 8, 9]], params, adapter=name)[0].prompt_logprobs for name in NAMES]
    assert len({str(answer) for answer in answers}) == len(NAMES)


def test_what_is_decoded_is_what_a_prompt_of_the_whole_text_says(pair: tuple[LLM, LLM]) -> None:
    llm, _ = pair
    for name in NAMES:
        params = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=2)
        (said,) = llm.generate([[5, 6, 7, 8, 9]], params, adapter=name)
        whole = [5, 6, 7, 8, 9, *said.token_ids]
        (read,) = llm.generate([whole], SamplingParams(max_tokens=1, prompt_logprobs=2), adapter=name)
        assert read.prompt_logprobs is not None
        assert read.prompt_logprobs[5:] == said.logprobs


class Watch:
    """Keeps the records of finished requests."""

    INFER_PLUGIN_API = 2

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []

    @hookimpl
    def infer_request_finished(self, record: RequestRecord) -> None:
        self.records.append(record)


def test_a_second_model_drafts_for_the_base_and_for_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no adapters itself."""
    monkeypatch.setattr(drafts, "Payoff", lambda costs, waits: Always())
    base, watch, answers = write_checkpoint(tmp_path / "base", "qwen3"), Watch(), []
    write_adapter(base, tmp_path / "a")
    params = SamplingParams(max_tokens=12, temperature=0, logprobs=2, ignore_eos=True)
    for speculation in ({}, {"speculation": "draft", "draft": {"path": str(base)}}):
        engine: Any = {"max_seq_len": 64, "max_batch_size": 2} | speculation
        with LLM(str(base), adapters={"load": [f"a={tmp_path / 'a'}"]}, engine=engine, plugins=[watch]) as llm:
            answers.append([bits(llm.generate([[5, 6, 7, 8, 9]], params, adapter=name)[0]) for name in (None, "a")])
    assert answers[0] == answers[1]
    assert [record.proposed > 0 for record in watch.records] == [False, False, True, True]
