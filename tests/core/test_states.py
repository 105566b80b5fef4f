"""Models with recurrent layers, from the settings on: what is refused, what memory is taken, and what is used again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.models.checkpoints import write_checkpoint
from tests.support import Always

from infer import LLM, SamplingParams, SettingsError, hookimpl
from infer.assemble import drafts
from infer.contracts.cache import CacheRegistration
from infer.contracts.records import RequestRecord
from infer_cache_slotted import SlottedPool

SMALL: dict[str, Any] = {"kernels": {"threads": 1}}
ENGINE: dict[str, Any] = {"max_batch_size": 4, "max_seq_len": 512}


class Watch:
    """Keeps the records of finished requests, and brings a pool that keeps no states."""

    INFER_PLUGIN_API = 2

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []

    @hookimpl
    def infer_request_finished(self, record: RequestRecord) -> None:
        self.records.append(record)

    @hookimpl
    def infer_cache_pools(self) -> Any:
        return [CacheRegistration("forgetful", lambda context, settings: SlottedPool(context), "keeps no states")]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with layers of Mamba and of attention."""
    return write_checkpoint(tmp_path_factory.mktemp("hybrid"), "granite_hybrid", max_position_embeddings=512)


def answers(path: Path, prompts: Sequence[Sequence[int]], watch: Watch | None = None, **sections: Any) -> list[Any]:
    """Each prompt's answer, one after the other."""
    keys = SMALL | {"engine": ENGINE, "model": {"dtype": "float32"}} | sections
    params = SamplingParams(temperature=0, max_tokens=40, logprobs=3, ignore_eos=True)
    with LLM(str(path), plugins=[watch] if watch else [], **keys) as llm:
        outputs = [llm.generate([list(prompt)], params)[0] for prompt in prompts]
    return [(output.token_ids, output.logprobs) for output in outputs]


def turns(number: int) -> Iterator[list[int]]:
    """The prompts of a conversation whose answers are rendered otherwise than they were generated: without reasoning,
    and with tools' JSON written anew."""
    history, ending = list(range(20, 220)), [3, 4, 5]
    for turn in range(number):
        history += [300 + turn, *range(40, 52)]
        yield history + ending
        history += [6, *range(60 + turn, 70 + turn)]


def test_a_conversation_finds_all_but_its_last_turn(hybrid: Path) -> None:
    watch, prompts = Watch(), list(turns(10))
    found = answers(hybrid, prompts, watch)
    assert found == answers(hybrid, prompts, cache={"paged": {"prefix_caching": False}})
    cached = [record.num_cached for record in watch.records]
    # Prompt n's own end is one of the last 16 tokens that may be rendered otherwise, and then a border of blocks.
    assert all(number > len(before) - 32 for number, before in zip(cached[1:], prompts, strict=False))


@pytest.mark.parametrize("backend", ["slotted", "paged"])
def test_drafts_leave_answers_as_they_are(backend: str, hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, watch = [[*range(30, 60)] * 3, [7, 8] * 20], Watch()
    plain = answers(hybrid, prompts, cache={"backend": backend})
    monkeypatch.setattr(drafts, "Payoff", lambda costs, waits: Always())
    engine = ENGINE | {"speculation": "ngram", "max_draft_tokens": 3}
    assert answers(hybrid, prompts, watch, cache={"backend": backend}, engine=engine) == plain
    assert sum(record.proposed for record in watch.records) > 0


def test_a_pool_without_states_is_refused(hybrid: Path) -> None:
    sentence = 'The model has recurrent layers, whose states cache.backend "forgetful" of .* does not keep; choose'
    with pytest.raises(SettingsError, match=sentence):
        LLM(str(hybrid), plugins=[Watch()], cache={"backend": "forgetful"}, engine=ENGINE, **SMALL)


def test_a_second_model_with_states_is_refused(hybrid: Path) -> None:
    engine = ENGINE | {"speculation": "draft", "draft": {"path": str(hybrid)}, "max_seq_len": 64}
    with pytest.raises(SettingsError, match="is a model with recurrent layers, whose states cannot be taken back"):
        LLM(str(hybrid), engine=engine, **SMALL)
