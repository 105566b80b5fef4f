"""``infer.LLM``: infer in Python."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.models.checkpoints import write_checkpoint
from tokenizers import Tokenizer, models

from infer import LLM, PLUGIN_API, CheckpointError, RequestError, SamplingParams, SettingsError, hookimpl
from infer.assemble import texts
from infer.assemble.assembly import start
from infer.assemble.texts import read_beforehand
from infer.contracts.request import Event, Request
from infer.contracts.scheduler import SchedulerRegistration, Sequence
from infer.contracts.text import ToolFormatRegistration
from infer.engine.engine import Engine, Message
from infer.engine.loop import Mailbox
from infer.engine.schedulers import ContinuousScheduler
from infer.plugins.discovery import Plugins
from infer.settings import load_settings
from infer.text.tool_formats.reader import scripted
from infer_tool_formats.objects import bare


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    engine = {"prefill_chunk_size": 256, "max_batch_size": 3, "max_waiting_requests": 1, "max_seq_len": 512}
    with LLM("demo", cache={"backend": "slotted"}, engine=engine, kernels={"threads": 1}) as llm:
        yield llm


def test_the_documented_example(llm: LLM) -> None:
    out = llm.generate(["def f(", [1, 2, 3]], SamplingParams(max_tokens=8, temperature=0, logprobs=5))
    assert [len(o.token_ids) for o in out] == [8, 8]
    assert out[1].prompt_token_ids == (1, 2, 3)
    assert out[0].finish_reason == "length"
    assert out[0].logprobs is not None
    assert [entry.token_id for entry in out[0].logprobs] == out[0].token_ids
    assert all(len(entry.top) == 5 for entry in out[0].logprobs)
    assert llm.served.tokenizer is not None
    assert out[0].text == llm.served.tokenizer.decode(out[0].token_ids)


def test_priorities_age_as_settings_say() -> None:
    ranks: list[float] = []

    class Watching(ContinuousScheduler):
        def add(self, sequence: Sequence) -> None:
            ranks.append(sequence.rank[0])
            super().add(sequence)

    class Plugin:
        INFER_PLUGIN_API = 2

        @staticmethod
        @hookimpl
        def infer_schedulers() -> list[SchedulerRegistration]:
            make = lambda context, settings: Watching(context.pool, context.engine)  # noqa: E731
            return [SchedulerRegistration("watching", make, "a test's")]

    engine = {"batching_mode": "watching", "priority_aging_s": 5e5, "max_seq_len": 64, "max_batch_size": 2}
    with LLM("demo", plugins=[Plugin], cache={"backend": "slotted"}, engine=engine) as llm:
        for priority in (0, 3):
            assert [*llm.submit([5, 6], SamplingParams(max_tokens=1), priority=priority).events()]
    assert 1.5e6 <= ranks[1] - ranks[0] < 1.6e6


def test_the_tokenizer_of_another_model(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(Plugins.discover().checkpoints["demo"], tmp_path / "demo"))
    config = json.loads((folder / "config.json").read_text())
    write = (folder / "config.json").write_text
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    with LLM(str(folder)) as llm:  # an added token may lie beyond the model's vocabulary
        assert llm.served.tokenizer.get_vocab_size() > llm.served.vocab_size
    other = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = other["model"]["vocab"]
    other["model"]["vocab"] = {token: id + 5000 * (token == "q") for token, id in vocabulary.items()}
    (folder / "tokenizer.json").write_text(json.dumps(other))
    with LLM(str(folder)) as llm, pytest.raises(RequestError, match=f"prompt holds token id {vocabulary['q'] + 5000}"):
        llm.generate("q")
    write(json.dumps(config | {"vocab_size": 512}))
    with pytest.raises(CheckpointError, match="has 4096 tokens, but the model's ids end at 511"):
        LLM(str(folder), model={"load_format": "dummy"})
    write(json.dumps(config | {"vocab_size": 8192, "eos_token_id": 5000}))
    with pytest.raises(CheckpointError, match="token 5000 ends an answer"):
        LLM(str(folder), model={"load_format": "dummy"})


@pytest.mark.parametrize("small", [True, False])
def test_small_texts_are_read_before_there_is_memory(
    small: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if not small:
        monkeypatch.setattr("infer.assemble.blueprint.SMALL_TOKENIZER_BYTES", 0)
    plugins, before = Plugins.discover(), list[str]()
    settings = load_settings(plugins, env={}, overrides={"model": {"path": "demo"}}, read_file=False).settings
    with caplog.at_level("INFO"):
        loop, _ = start(settings, plugins, lambda: before.extend(caplog.messages))
    loop.close()
    assert any(message.startswith("tokenizer: ") for message in before) == small
    assert not any(message.startswith(("weights", "cache ")) for message in before)
    assert {message.partition(" ")[0] for message in caplog.messages} >= {"tokenizer:", "cache"}


def test_a_tokenizer_that_is_known_beforehand_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plugins = Plugins.discover()
    settings = load_settings(plugins, env={}, read_file=False).settings
    read_beforehand(plugins.checkpoints["demo"] / "tokenizer.json", settings, plugins)
    monkeypatch.setattr("infer.assemble.texts.Tokenizer", None)  # nothing else can be read
    with LLM("demo") as llm:
        assert llm.served.tokenizer.encode("def f").ids
    with pytest.raises(CheckpointError, match="cannot be read: 'NoneType'"):
        LLM("demo")


def test_a_tokenizer_of_another_model_is_let_go_before_one_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read, held = texts._parsed, list[int]()

    def reading(data: bytes, marks: frozenset[str]) -> Tokenizer:
        held.append(len(texts.beforehand))
        return read(data, marks)

    monkeypatch.setattr(texts, "_parsed", reading)
    texts.beforehand[b"", frozenset()] = Tokenizer(models.BPE())
    with LLM("demo"):
        assert held == [0]


def test_more_prompts_than_places_and_each_its_own_params(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in range(1, 10)]
    out = llm.generate(["x = "] * 9, params)
    assert [len(o.token_ids) for o in out] == list(range(1, 10))
    assert all(out[8].token_ids[: len(o.token_ids)] == o.token_ids for o in out)


def test_prompts_arrive_together(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one message: the engine cannot begin a step with some of them. Those that find no place follow."""
    messages: list[Message] = []
    submit = Engine.submit

    def record(engine: Engine, message: Message) -> None:
        messages.append(message)
        submit(engine, message)

    monkeypatch.setattr(Engine, "submit", record)
    llm.generate([[1, 2, 3]] * 5, SamplingParams(max_tokens=2))
    sizes = [len(message) for message in messages if isinstance(message, tuple)]
    assert sizes[0] == 4
    assert sum(sizes) == 5


def test_a_seed_repeats_alone_and_in_company(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, temperature=1.2, seed=7)
    (alone,) = llm.generate("class ", params)
    first, other, again = llm.generate(["class ", "import ", "class "], params)
    assert alone.text == first.text == again.text != other.text


def test_stream_gives_the_same_in_pieces_and_leaving_early_aborts(llm: LLM) -> None:
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    events = list(llm.stream("import ", params))
    assert "".join(e.text for e in events) == llm.generate("import ", params)[0].text
    for _ in llm.stream("import ", SamplingParams(max_tokens=400, ignore_eos=True)):
        break
    llm.generate("x", SamplingParams(max_tokens=1))
    assert llm.loop.num_open == 0


async def test_astream(llm: LLM) -> None:
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    events = [event async for event in llm.astream("import ", params)]
    assert "".join(e.text for e in events) == llm.generate("import ", params)[0].text
    early = llm.astream("import ", SamplingParams(max_tokens=400, ignore_eos=True))
    await anext(early)
    await early.aclose()
    llm.generate("x", SamplingParams(max_tokens=1))
    assert llm.loop.num_open == 0


async def test_passes_that_have_piled_up_do_not_hold_up_the_event_loop(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[int] = [0]

    def submit(request: Request, mailbox: Mailbox) -> None:
        for i in range(100):
            mailbox([Event(request.id, (i,))])
        mailbox([Event(request.id, finish_reason="length")])

    async def others() -> None:
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(llm.loop, "submit", submit)
    task = asyncio.create_task(others())
    seen = [turns[0] async for _ in llm.astream("x")]
    task.cancel()
    assert len(set(seen)) == 101


def test_prompt_logprobs(llm: LLM) -> None:
    (out,) = llm.generate([[4, 5, 6, 7]], SamplingParams(max_tokens=3, ignore_eos=True, prompt_logprobs=2))
    assert out.prompt_logprobs is not None
    assert out.prompt_logprobs[0] is None
    assert [p.token_id for p in out.prompt_logprobs if p] == [5, 6, 7]


def test_bad_prompts_are_refused_before_any_is_begun(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[object] = []
    monkeypatch.setattr(llm.loop, "submit_all", lambda *of: begun.append(of))
    with pytest.raises(RequestError, match="empty"):
        llm.generate(["fine", []])
    with pytest.raises(RequestError, match="2 prompts came with 1"):
        llm.generate(["a", "b"], [SamplingParams()])
    assert not begun


def test_threads_may_share_it(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    expected = llm.generate("def ", params)[0].text
    found: list[str] = []

    def work() -> None:
        found.append("".join(event.text for event in llm.stream("def ", params)))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 3


def test_settings_are_checked_as_everywhere() -> None:
    with pytest.raises(SettingsError, match=r"Did you mean 'engine.max_batch_size'"):
        LLM("demo", engine={"max_batch_sizes": 2})
    with pytest.raises(SettingsError, match=r"engine.max_seq_len is 9999, but the checkpoint was made for 2048"):
        LLM("demo", engine={"max_seq_len": 9999})


@pytest.mark.slow
def test_a_program_may_end_without_closing_it() -> None:
    program = 'from infer import LLM; print(LLM("demo", engine={"max_seq_len": 64}).generate("def")[0].finish_reason)'
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "length\n"), done.stderr


def test_chat_is_generate_of_what_the_template_makes(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, temperature=0)
    answer = llm.chat([{"role": "user", "content": "a loop"}], params)
    assert answer.text == llm.generate(llm.encode("# a loop\n"), params)[0].text


class Marked:
    """A plugin with a format of tool calls."""

    INFER_PLUGIN_API = PLUGIN_API

    @hookimpl
    def infer_tool_formats(self) -> list[ToolFormatRegistration]:
        return [ToolFormatRegistration("marked", scripted(bare), "a test's", marks=("<|ring|>",))]


@pytest.mark.parametrize("mark", ["[TOOL_CALLS]", "<|python_tag|>", "<|action_start|>", "<think>", "<|ring|>"])
def test_marks_of_calls_are_told_though_they_are_special_tokens(tmp_path: Path, mark: str) -> None:
    folder = write_checkpoint(tmp_path / "c", "llama")
    file = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    state = json.loads(tokenizer.to_str())
    (state["added_tokens"][1],) = [token | {"content": mark} for token in state["added_tokens"] if token["id"] == 1]
    state["model"]["vocab"] = {mark if id == 1 else text: id for text, id in state["model"]["vocab"].items()}
    file.write_text(json.dumps(state))
    before = Tokenizer.from_file(str(file))
    sections: dict[str, dict[str, object]] = {
        "model": {"dtype": "float32"},
        "kernels": {"threads": 1},
        "engine": {"max_seq_len": 64},
    }
    with LLM(str(folder), plugins=[Marked()], **sections) as llm:
        served = llm.served.tokenizer
        answer = llm.generate(["x"], SamplingParams(max_tokens=2, min_tokens=2, logit_bias={1: 100}, temperature=0))[0]
    text = f"a{mark}b <eos>"
    assert served.encode(text).ids == before.encode(text).ids
    assert before.decode([1, 0]) == ""
    assert served.decode([1, 0]) == mark
    assert answer.text == mark * 2
