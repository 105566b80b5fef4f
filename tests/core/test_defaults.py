"""The defaults of requests: sampling parameters from the checkpoint, and the longest length that memory allows."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import support
from tests.models.checkpoints import with_head, write_checkpoint
from tests.serving import Body, chatty, running

from infer import LLM, CheckpointError, InferError, SamplingParams, SettingsError
from infer.assemble.assembly import Assembly
from infer.assemble.blueprint import draft_head
from infer.assemble.devices import for_device
from infer.assemble.sizes import Meter
from infer.commands.cli import main
from infer.contracts.cache import StatefulPool
from infer.contracts.sections import EngineSettings, Settings
from infer.engine.batch import Batch
from infer.engine.runner import Launched, Runner
from infer.plugins.discovery import Plugins
from infer.settings import load_settings

ENGINE = {"max_batch_size": 4, "max_seq_len": 256}
KERNELS = {"threads": 1}
OWN = {"temperature": 30.0, "top_k": 40, "repetition_penalty": 1.3}
"""Values with which no answer is what it would be without them."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_checkpoint(tmp_path_factory.mktemp("own") / "c", "llama")
    (folder / "generation_config.json").write_text(json.dumps(OWN))
    return folder


async def test_silent_requests_are_sampled_as_the_checkpoint_says(folder: Path, tmp_path: Path) -> None:
    model = chatty(tmp_path, path=str(folder))
    asked: dict[str, Body] = {
        "/v1/completions": {"prompt": [5, 6], "max_tokens": 20, "seed": 3, "ignore_eos": True},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 20, "seed": 3},
        "/v1/responses": {"input": "x", "max_output_tokens": 20, "seed": 3},
    }
    neutral = {"temperature": 1.0, "top_k": 0, "repetition_penalty": 1.0}
    shown: dict[str, Any] = {}

    def said(answer: Body) -> Any:
        return answer.get("choices") or answer["output"][0]["content"]

    async with running(engine=ENGINE, model=model) as server:
        assert (await server.get("/v1/models"))[1]["data"][0]["default_sampling_params"] == OWN
        for path, body in asked.items():
            _, silent, _ = await server.post(body, path)
            shown[path] = said(silent)
            more = OWN if path != "/v1/responses" else {"temperature": OWN["temperature"]}
            _, explicit, _ = await server.post(body | more, path)
            assert said(silent) == said(explicit)
            if path == "/v1/responses":
                assert silent["temperature"] == OWN["temperature"]
                _, cold, _ = await server.post(body | {"temperature": 0.0}, path)
                assert cold["temperature"] == 0
                assert said(cold) != said(silent)
            else:
                _, other, _ = await server.post(body | neutral, path)
                _, part, _ = await server.post(body | {"temperature": 1.0, "top_p": None}, path)
                assert len({json.dumps(said(each)) for each in (silent, other, part)}) == 3
    async with running(engine=ENGINE, model=model | {"generation_config": "none"}) as server:
        assert (await server.get("/v1/models"))[1]["data"][0]["default_sampling_params"] == {}
        for path, body in asked.items():
            _, silent, _ = await server.post(body, path)
            assert said(silent) != shown[path]
            if path != "/v1/responses":
                assert said(silent) == said((await server.post(body | neutral, path))[1])


def test_no_params_are_the_checkpoints_and_explicit_ones_are_not_touched(folder: Path) -> None:
    with LLM(str(folder), engine=ENGINE, kernels=KERNELS) as llm:
        prompt = [5, 6]
        explicit = SamplingParams(seed=1, max_tokens=16)
        with LLM(str(folder), engine=ENGINE, kernels=KERNELS, model={"generation_config": "none"}) as plain:
            assert plain.request(prompt).params == SamplingParams()
            assert llm.generate([prompt], explicit)[0].token_ids == plain.generate([prompt], explicit)[0].token_ids
        assert llm.request(prompt).params == SamplingParams(**OWN)
        assert llm.submit(prompt).request.params == SamplingParams(**OWN)
        likely = llm.generate([prompt], SamplingParams(temperature=0))[0].token_ids
        assert llm.generate([prompt])[0].token_ids != likely


@pytest.mark.slow
def test_do_sample_false_is_greedy_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(tmp_path / "c", "llama")
    (folder / "generation_config.json").write_text('{"do_sample": false}')
    section = chatty(tmp_path, path=str(folder))
    common = [f"--model.{key}={value}" for key, value in section.items()] + ["--kernels.threads=1"]

    def said(*args: str) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
        assert main([*args, *common]) == 0
        return capsys.readouterr().out

    for command in (["generate", "ab"], ["chat"]):
        greedy = said(*command, "--max-tokens=16", "--temperature=0")
        assert said(*command, "--max-tokens=16") == greedy
        assert said(*command, "--max-tokens=16", "--temperature=5") != greedy
        assert said(*command, "--max-tokens=16", "--model.generation_config=none", "--temperature=0") == greedy
    (folder / "generation_config.json").write_text('{"top_p": 7}')
    with pytest.raises(CheckpointError, match="top_p is 7"):
        LLM(str(folder), engine=ENGINE)
    LLM(str(folder), engine=ENGINE, kernels=KERNELS, model={"generation_config": "none"}).close()


FEWER = "fewer than the checkpoint may allow:"
KV_BYTES = 4 * 2 * 2 * 12 * 4
"""Per position: layers, K and V, heads, their size, float32."""


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("long") / "c", "llama", max_position_embeddings=20_000))


def started(path: str, caplog: pytest.LogCaptureFixture, **sections: Any) -> tuple[int, int, str]:
    """(positions of a sequence, positions of the cache, what the log says of the former first)."""
    caplog.clear()
    with caplog.at_level("INFO"), LLM(path, kernels=KERNELS, **sections) as llm:
        lines = [message for message in caplog.messages if message.startswith("engine.max_seq_len: ")]
        assert f" {llm.served.max_seq_len} positions" in lines[-1]
        return llm.served.max_seq_len, llm.served.cache_tokens, lines[0].removeprefix("engine.max_seq_len: ")


@pytest.mark.slow
def test_a_sequence_may_be_as_long_as_the_checkpoint_allows_and_the_cache_holds(
    long: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = started(long, caplog)
    assert found == (20_000, 16 * 4096, "20000 positions, all that the checkpoint was made for")
    assert started(long, caplog, engine={"max_batch_size": 2})[:2] == (20_000, 20_000), "one of full length"
    with LLM(long, engine={"max_seq_len": 6000}, kernels=KERNELS) as llm:
        assert (llm.served.max_seq_len, llm.served.cache_tokens) == (6000, 16 * 6000), "as asked for"
    few = started(long, caplog, cache={"paged": {"num_blocks": 300}})
    assert few == (4800, 4800, f"4800 positions, {FEWER} memory holds no more")
    slotted = started(long, caplog, cache={"backend": "slotted"}, engine={"max_batch_size": 2})
    assert slotted[:2] == (4096, 8192)
    assert slotted[2].startswith(f"4096 positions, {FEWER} cache.backend slotted reserves")
    monkeypatch.setattr("infer.device.free_memory", lambda device: 2 * 5000 * KV_BYTES + 10**5)
    held, room, line = started(long, caplog)
    assert held <= room
    assert 4500 < held < 5000
    assert "memory holds no more" in line
    smaller, room, _ = started(long, caplog, cache={"kv_dtype": "int8"})
    assert smaller <= room
    assert 3 * 4500 < smaller < 3 * 5000, "12 codes and a scale take a third of 12 values"
    with pytest.raises(SettingsError, match=r"enlarge the cache or lower engine.max_seq_len"):
        LLM(long, engine={"max_seq_len": 20_000}, kernels=KERNELS)


def test_weights_count_at_their_quantized_size(
    long: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infer.device.free_memory", lambda device: 2 * 6000 * KV_BYTES)

    def counted(**model: Any) -> int:
        """Bytes that are left for fewer positions than without weights."""
        with LLM(long, kernels={"threads": 1}, model=model) as llm:
            loaded: Any = llm.loop._engine
            weights = support.held(loaded._runner._model, loaded._runner._model.rotary)
            taken = (6000 - llm.served.max_seq_len) * 2 * KV_BYTES
        assert 0 <= taken - weights < 16 * 2 * KV_BYTES, "a page more than the weights take, at most"
        return weights

    assert counted(quantization="int8") < 0.5 * counted()


def test_the_cache_leaves_room_for_the_largest_pass(
    long: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device whose memory is counted; the passes of a full batch take no more than the trial did."""
    tried: list[int] = []
    passes: list[int] = []

    def counted(run: Callable[[], object], device: torch.device) -> int:
        with Meter("cpu") as meter:
            run()
        tried.append(meter.peak)
        return tried[-1]

    launch = Runner.launch

    def observed(self: Runner, batch: Batch) -> Launched:
        with Meter("cpu") as meter:
            launched = launch(self, batch)
        passes.append(meter.peak)
        return launched

    free = 40 << 20
    engine = {"max_batch_size": 4, "max_tokens_per_step": 800, "prefill_chunk_size": 300}
    cache = {"paged": {"memory_fraction": 1.0}}
    monkeypatch.setattr("infer.device.free_memory", lambda device: free)
    without = started(long, caplog, engine=engine, cache=cache)[1]
    monkeypatch.setattr("infer.device.taken_by", counted)
    monkeypatch.setattr(Runner, "launch", observed)
    prompts = [[3 + i] * 900 for i in range(4)]
    params = [SamplingParams(max_tokens=4, temperature=1.0, top_k=50, logprobs=20, seed=i) for i in range(4)]
    with LLM(long, kernels=KERNELS, engine=engine, cache=cache) as llm:
        llm.generate(prompts, params)
        room = llm.served.cache_tokens
    (trial,) = tried
    assert max(passes) <= trial
    assert room * KV_BYTES + max(passes) <= free < without * KV_BYTES + max(passes)


def test_no_memory_for_the_largest_pass(long: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(run: Callable[[], object], device: torch.device) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("infer.device.taken_by", full)
    with pytest.raises(InferError, match=r"pass of 8192 tokens .*out of memory.* lower engine.max_tokens_per_step"):
        LLM(long, kernels=KERNELS)


def test_passes_on_a_gpu_are_longer_and_limited() -> None:
    def sizes(**engine: Any) -> tuple[int, int | None]:
        found = for_device(Settings(engine=EngineSettings(**engine)), torch.device("cuda")).engine
        return found.prefill_chunk_size, found.max_tokens_per_step

    assert sizes() == (2048, 8192)
    assert sizes(max_batch_size=9000) == (2048, 9000)
    assert sizes(prefill_chunk_size=512, max_tokens_per_step=None) == (512, None)
    assert sizes(use_chunked_prefill=False) == (512, None)
    plain = Settings()
    assert for_device(plain, torch.device("cpu")) is plain


def test_a_checkpoint_that_does_not_say_how_long_and_a_cache_smaller_than_a_short_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_checkpoint(tmp_path / "c", "llama")
    assert started(str(folder), caplog)[:2] == (512, 16 * 512)
    assert started(str(folder), caplog, cache={"paged": {"num_blocks": 10}})[:2] == (160, 160)
    assert "engine.max_seq_len: 160 positions, since the cache has no more" in caplog.messages
    config = json.loads((folder / "config.json").read_text())
    del config["max_position_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    held, _, line = started(str(folder), caplog)
    assert held == 4096
    assert "config.json does not say" in line


@pytest.mark.slow
def test_a_long_sequence_fills_its_cache_to_the_last_position(long: str) -> None:
    prompt = [2 + i % 300 for i in range(4780)]
    found = []
    engines: list[dict[str, int]] = [{}, {"max_seq_len": 4800}]
    for engine in engines:
        with LLM(long, engine=engine, cache={"paged": {"num_blocks": 300}}, kernels=KERNELS) as llm:
            params = SamplingParams(max_tokens=None, temperature=0, ignore_eos=True)
            (answer,) = llm.generate([prompt], params)
            assert (len(answer.token_ids), answer.finish_reason) == (20, "length")
            found.append(answer.token_ids)
    assert found[0] == found[1]


def test_the_cache_leaves_room_for_that_of_the_draft_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For as many positions as it has itself, beside its weights; and how long a sequence may be follows from that."""
    folder, free = with_head(tmp_path, "qwen3_next", max_position_embeddings=20_000), 2 << 20
    plugins = Plugins.discover()
    monkeypatch.setattr("infer.device.free_memory", lambda device: free)

    def positions(name: str) -> tuple[int, int, int]:
        """Of a sequence and of the model's cache, and the bytes that weights and all K and V of so many take."""
        overrides = {
            "model": {"path": str(folder)},
            "engine": {"max_batch_size": 4, "speculation": name, "max_draft_tokens": 1},
            "cache": {"paged": {"memory_fraction": 1.0, "prefix_caching": False}},
        }
        assembly = Assembly(load_settings(plugins, env={}, overrides=overrides, read_file=False).settings, plugins)
        sketch = assembly.weights.sketch(assembly.context)
        pool, head = assembly.make_pool(sketch.model, sketch.nbytes), draft_head(sketch.model)
        assert isinstance(pool, StatefulPool)
        kv = pool.nbytes - pool.state_bytes
        taken = sketch.nbytes + pool.nbytes + (kv if head else 0)  # one layer each
        return assembly.length[0], pool.free_tokens(), taken

    (long, many, plain), (short, few, whole) = positions("ngram"), positions("mtp")
    assert 0.9 * free < plain < 1.01 * free
    assert 0.7 * free < whole < 1.01 * free
    assert 0.25 * many < few < 0.6 * many
    assert 0.25 * long < short < 0.6 * long
