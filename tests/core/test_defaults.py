"""What requests get that do not say how to sample, and how long they may be: the checkpoint's values, and memory's."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from tests.models.checkpoints import write_checkpoint
from tests.serving import Body, chatty, running

from infer import LLM, CheckpointError, SamplingParams
from infer.cli import main

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
        body = {"state": "x", "questions": {"q": {"type": "yes_no", "instructions": "?"}}}
        _, decided, _ = await server.post(body, "/v1/decisions")
    async with running(engine=ENGINE, model=model | {"generation_config": "none"}) as server:
        assert (await server.get("/v1/models"))[1]["data"][0]["default_sampling_params"] == {}
        for path, body in asked.items():
            _, silent, _ = await server.post(body, path)
            assert said(silent) != shown[path]
            if path != "/v1/responses":
                assert said(silent) == said((await server.post(body | neutral, path))[1])
        body = {"state": "x", "questions": {"q": {"type": "yes_no", "instructions": "?"}}}
        assert (await server.post(body, "/v1/decisions"))[1]["answers"] == decided["answers"]


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
