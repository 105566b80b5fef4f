"""``engine.speculation``: choosing a proposer, a second model, and what cannot work."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.core.engine.test_schedulers import documented
from tests.support import Always
from tokenizers import Tokenizer

from infer import LLM, InferError, SamplingParams, SettingsError, hookimpl
from infer.assemble import assembly
from infer.commands import cli
from infer.contracts.cache import CacheRegistration
from infer.contracts.records import RequestRecord
from infer.plugins.discovery import Plugins
from infer_cache_slotted import SlottedPool

PROMPTS = ["def add(a, b):\n    return a + b\n\ndef add(a, b):\n", "x = 1\nx = 1\nx = 1\n", "import os\n"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, logprobs=2),
    SamplingParams(temperature=0.8, seed=3, max_tokens=24, repetition_penalty=1.1),
]
SMALL: dict[str, Any] = {"cache": {"backend": "slotted"}, "kernels": {"threads": 1}}


class Watch:
    """Keeps the records of finished requests, and offers what the documentation shows."""

    INFER_PLUGIN_API = 2

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []

    @hookimpl
    def infer_proposers(self) -> Any:
        return documented("class Cycle:")["infer_proposers"]()

    @hookimpl
    def infer_request_finished(self, record: RequestRecord) -> None:
        self.records.append(record)


def answers(engine: dict[str, Any], watch: Watch | None = None) -> Any:
    keys = {"max_batch_size": 2, "max_seq_len": 256} | engine
    with LLM("demo", engine=keys, plugins=[watch] if watch else [], **SMALL) as llm:
        outputs = [llm.generate(PROMPTS, params) for params in PARAMS]
        return [(out.token_ids, out.text, out.logprobs, out.finish_reason) for group in outputs for out in group]


@pytest.fixture(scope="module")
def plain() -> Any:
    return answers({})


@pytest.mark.parametrize("name", ["ngram", "draft", "cycle"])
def test_answers_are_the_same_whoever_proposes(name: str, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "Payoff", lambda costs, waits: Always())
    watch = Watch()
    more = {"draft": {"path": "demo"}, "max_draft_tokens": 5} if name == "draft" else {}
    assert answers({"speculation": name, **more}, watch) == plain
    proposed, accepted = (sum(getattr(record, key) for record in watch.records) for key in ("proposed", "accepted"))
    assert 0 < accepted <= proposed
    if name == "draft":  # the same model: what it proposes, it draws as well, unless a penalty intervenes
        assert all(record.accepted == record.proposed > 12 for record in watch.records[: len(PROMPTS)])


def test_a_second_model_has_to_be_there_and_to_know_the_same_tokens(tmp_path: Path) -> None:
    def refused(**draft: Any) -> str:
        with pytest.raises(InferError) as caught:
            LLM("demo", engine={"speculation": "draft", "draft": draft, "max_seq_len": 64}, **SMALL)
        return str(caught.value)

    assert "engine.draft.path names no model" in refused()
    assert "nowhere" in refused(path="/nowhere")
    folder = Path(shutil.copytree(Plugins.discover().checkpoints["demo"], tmp_path / "demo"))
    state = json.loads((folder / "tokenizer.json").read_text())
    vocab = state["model"]["vocab"]
    first, second = list(vocab)[300:302]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (folder / "tokenizer.json").write_text(json.dumps(state))
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    assert f"engine.draft.path = {str(folder)!r} has another tokenizer than model.path" in refused(path=str(folder))


def test_a_pool_that_cannot_take_positions_back_is_refused() -> None:
    class Forward(SlottedPool):
        def __getattribute__(self, name: str) -> Any:
            if name == "truncate":
                raise AttributeError(name)
            return super().__getattribute__(name)

    class Stranger:
        INFER_PLUGIN_API = 2

        @hookimpl
        def infer_cache_pools(self) -> Any:
            return [CacheRegistration("forward", lambda context, settings: Forward(context), "only grows")]

    with pytest.raises(SettingsError, match=r'speculation is "ngram", but Forward cannot take positions back'):
        LLM(
            "demo",
            plugins=[Stranger()],
            cache={"backend": "forward"},
            engine={"speculation": "ngram", "max_seq_len": 64},
            kernels={"threads": 1},
        )


def test_a_limit_on_drafts_without_any_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"max_draft_tokens = 4 has no effect while engine.speculation is none"):
        LLM("demo", engine={"max_draft_tokens": 4})
    with pytest.raises(SettingsError, match=r"shortest = 6 is above longest = 4"):
        LLM("demo", engine={"speculation": "ngram", "ngram": {"shortest": 6}})


def test_plugins_shows_who_proposes(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("none", "ngram"):
        assert cli.main(["plugins", "--json", "--engine.speculation", name]) == 0
        rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["parts"] if row["slot"] == "proposer"}
        assert {row: rows[row]["chosen"] for row in ("ngram", "draft")} == {
            "ngram": "yes" if name == "ngram" else "no",
            "draft": "no",
        }
