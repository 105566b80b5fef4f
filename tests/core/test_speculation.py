"""``engine.speculation``: choosing a proposer, a second model, and what cannot work."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.core.engine.test_schedulers import documented
from tests.models.checkpoints import edit_tensors, with_head, write_checkpoint
from tests.support import Always
from tokenizers import Tokenizer
from torch import Tensor

from infer import LLM, InferError, SamplingParams, SettingsError, hookimpl
from infer.assemble import drafts
from infer.commands import cli
from infer.contracts.cache import CacheRegistration
from infer.contracts.records import RequestRecord, StepRecord
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
        self.steps = 0

    @hookimpl
    def infer_proposers(self) -> Any:
        return documented("class Cycle:")["infer_proposers"]()

    @hookimpl
    def infer_request_finished(self, record: RequestRecord) -> None:
        self.records.append(record)

    @hookimpl
    def infer_step_finished(self, record: StepRecord) -> None:
        self.steps += 1


def answers(engine: dict[str, Any], watch: Watch | None = None) -> Any:
    keys = {"max_batch_size": 2, "max_seq_len": 256} | engine
    with LLM("demo", engine=keys, plugins=[watch] if watch else [], **SMALL) as llm:
        outputs = [llm.generate(PROMPTS, params) for params in PARAMS]
        return [(out.token_ids, out.text, out.logprobs, out.finish_reason) for group in outputs for out in group]


@pytest.fixture(scope="module")
def plain() -> Any:
    return answers({})


@pytest.mark.parametrize("name", ["ngram", "suffix", "draft", "cycle"])
def test_answers_are_the_same_whoever_proposes(name: str, plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "Payoff", lambda costs, waits: Always())
    watch = Watch()
    more = {"draft": {"path": "demo"}, "max_draft_tokens": 5} if name == "draft" else {}
    assert answers({"speculation": name, **more}, watch) == plain
    proposed, accepted = (sum(getattr(record, key) for record in watch.records) for key in ("proposed", "accepted"))
    assert 0 < accepted <= proposed
    if name == "draft":  # the same model: what it proposes, it draws as well, unless a penalty intervenes
        assert all(record.accepted == record.proposed > 12 for record in watch.records[: len(PROMPTS)])


def test_an_answer_that_somebody_had_before_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "Payoff", lambda costs, waits: Always())
    watch = Watch()
    engine: dict[str, Any] = {"speculation": "suffix", "max_draft_tokens": 8, "max_batch_size": 2, "max_seq_len": 256}
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=64, ignore_eos=True)
    with LLM("demo", engine=engine, plugins=[watch], **SMALL) as llm:
        first, second = (llm.generate("import", params)[0] for _ in range(2))
    assert first.token_ids == second.token_ids
    alone, after = (record.accepted for record in watch.records)
    assert after > max(alone, 40)


def test_a_second_model_with_windows_reads_a_long_prompt_by_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cache has room for as many positions at a time as a chunk has."""
    monkeypatch.setattr(drafts, "Payoff", lambda costs, waits: Always())
    path, watch = write_checkpoint(tmp_path / "model", "gemma3", window=32, max_position_embeddings=512), Watch()
    engine: dict[str, Any] = {"prefill_chunk_size": 64, "max_seq_len": 512, "max_batch_size": 1}
    engine |= {"speculation": "draft", "draft": {"path": str(path)}}
    with LLM(str(path), engine=engine, plugins=[watch], kernels={"threads": 1}) as llm:
        llm.generate([[5 + i % 50 for i in range(450)]], SamplingParams(max_tokens=16, temperature=0, ignore_eos=True))
    assert watch.records[0].accepted == watch.records[0].proposed > 0


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


def successors(tensors: dict[str, Tensor]) -> None:
    """Make token t + 1 follow token t, as the model and its head see it: their layers add nothing, and the output head
    has each token's embedding in the next one's place. The draft head ignores hidden states."""
    for name, x in tensors.items():
        adds = name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight"))
        if adds or ("norm" in name and "linear_attn" not in name):
            x.zero_()
    embedding, fc = tensors["model.embed_tokens.weight"], tensors["mtp.fc.weight"]
    tensors["lm_head.weight"] = embedding.roll(1, 0)
    fc.zero_()
    fc[:, : len(fc)] = torch.eye(len(fc))


@pytest.fixture(scope="module")
def predictable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = with_head(tmp_path_factory.mktemp("mtp"), "qwen3_5_moe", tied=False)
    edit_tensors(folder, successors)
    return folder


@pytest.mark.parametrize("quantization", [None, "int4"])
@pytest.mark.parametrize("backend", ["slotted", "paged"])
def test_a_models_own_head_saves_passes(
    backend: str, quantization: str | None, predictable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafts, "Payoff", lambda costs, waits: Always())

    def passes(**engine: Any) -> tuple[Any, int, list[RequestRecord]]:
        watch = Watch()
        keys: dict[str, Any] = {"engine": {"max_batch_size": 2, "max_seq_len": 64} | engine, "kernels": {"threads": 1}}
        keys |= {"model": {"quantization": quantization}, "cache": {"backend": backend}}
        with LLM(str(predictable), plugins=[watch], **keys) as llm:
            outputs = llm.generate(["kettle", "a"], SamplingParams(temperature=0, max_tokens=25))
        return [out.token_ids for out in outputs], watch.steps, watch.records

    plain, many, _ = passes()
    found, few, records = passes(speculation="mtp", max_draft_tokens=5)
    assert found == plain
    assert all(ids == [*range(ids[0], ids[0] + 25)] for ids in map(list, plain))
    assert [(record.proposed, record.accepted) for record in records] == [(20, 20)] * 2
    assert (many, few) == (25, 5)


def test_a_model_without_a_draft_head_is_refused(tmp_path: Path) -> None:
    """Before its weights are loaded."""

    def refused(path: str) -> str:
        with pytest.raises(SettingsError) as caught:
            LLM(path, engine={"speculation": "mtp", "max_seq_len": 64}, **SMALL)
        return str(caught.value)

    why = (
        'engine.speculation is "mtp", but the checkpoint has no draft head that the model plugin {!r} of infer-models '
        "knows{}; choose ngram or draft."
    )
    assert refused("demo") == why.format("llama", "")
    folder = str(write_checkpoint(tmp_path, "qwen3_5"))
    assert refused(folder) == why.format("qwen3_5", " (no tensor mtp.pre_fc_norm_embedding.weight)")
    other = str(write_checkpoint(tmp_path / "other", "glm4_moe"))
    assert refused(other) == why.format("glm4_moe", " (no tensor model.layers.4.enorm.weight)")
    with LLM(folder, model={"load_format": "dummy"}, engine={"speculation": "mtp", "max_seq_len": 64}, **SMALL) as llm:
        (out,) = llm.generate(["a"], SamplingParams(temperature=0, max_tokens=4))
        assert len(out.token_ids) == 4


def test_nothing_is_kept_for_a_head_that_is_not_asked(predictable: Path) -> None:
    for name in ("mtp", "ngram"):
        with LLM(str(predictable), engine={"speculation": name, "max_seq_len": 64}, **SMALL) as llm:
            loaded: Any = llm.loop._engine
            assert loaded._runner._keep_hidden == (name == "mtp")
            assert (loaded._runner._model.draft_head is None) == (name != "mtp")
