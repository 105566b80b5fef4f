"""A server that keeps prefixes on disk, and is started again."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tests.models.checkpoints import write_checkpoint
from tests.serving import Body, running

from infer import LLM, SamplingParams
from infer.commands.cli import main
from infer_cache_paged import disk

PROMPT = list(range(1, 101))
ASKED = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "logprobs": 3}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "small", "qwen3")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kept"


def sections(checkpoint: Path, folder: Path | None, *, cache: Body | None = None, **more: Any) -> Body:
    paged = {} if folder is None else {"paged": {"disk": str(folder)}}
    kernels = {"backend": "reference", "threads": 1}
    return {"model": {"path": str(checkpoint)}, "kernels": kernels, "cache": paged | (cache or {}), **more}


async def ask(*given: Any, **more: Any) -> tuple[int, Any]:
    """Start a server, ask it, and end it. Returns how many tokens were cached, and the choices."""
    async with running(**sections(*given, **more)) as server:
        status, answer, _ = await server.post(ASKED)
        assert status == 200, answer
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["choices"]


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*/*") if path.is_file())


@pytest.mark.slow
async def test_a_restart_finds_what_was_served(checkpoint: Path, folder: Path) -> None:
    plain = await ask(checkpoint, None)
    assert await ask(checkpoint, folder) == plain
    assert plain[0] == 0
    assert await ask(checkpoint, folder) == (96, plain[1])
    many = {"max_batch_size": 2, "prefill_chunk_size": 16, "max_seq_len": 200}
    assert await ask(checkpoint, folder, engine=many) == (96, plain[1])
    copied = shutil.copytree(checkpoint, folder.parent / "copied")
    assert await ask(copied, folder) == (96, plain[1])


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize(
    ("family", "found"),
    [
        ("qwen3", 96),
        pytest.param("gemma3", 96, marks=pytest.mark.slow),
        pytest.param("qwen3_next", 80, marks=pytest.mark.slow),
    ],
)
def test_text_and_logprobs_keep_their_bits(family: Any, found: int, kv_dtype: str, tmp_path: Path) -> None:
    window: Body = {"window": 24} if family == "gemma3" else {}
    path, answers = write_checkpoint(tmp_path / "model", family, **window), []
    for kept in (None, tmp_path / "kept", tmp_path / "kept"):
        with LLM(**_llm(path, kept, kv_dtype)) as llm:
            answers.append(llm.generate([PROMPT], SamplingParams(max_tokens=20, temperature=0, logprobs=5))[0])
    assert [answer.num_cached for answer in answers] == [0, 0, found]
    assert len({repr((a.token_ids, a.text, a.logprobs)) for a in answers}) == 1


def _llm(path: Path, kept: Path | None, kv_dtype: str) -> Body:
    given = sections(path, kept, cache={"kv_dtype": kv_dtype})
    del given["model"]
    return {"path": str(path), **given}


async def test_other_weights_find_nothing(checkpoint: Path, folder: Path) -> None:
    await ask(checkpoint, folder)
    other = shutil.copytree(checkpoint, folder.parent / "other")
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, other / "model.safetensors")
    assert await ask(other, folder) == await ask(other, None)


async def test_what_is_not_computed_now_is_dropped(
    checkpoint: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file with a right digest of wrong bits, as kernels that have changed without saying so would have left it."""
    _, choices = await ask(checkpoint, folder)
    path = files(folder)[0]
    data = bytearray(path.read_bytes())
    data[-disk.DIGEST - 1] ^= 1
    data[-disk.DIGEST :] = hashlib.blake2b(data[: -disk.DIGEST], digest_size=disk.DIGEST).digest()
    path.write_bytes(data)
    assert await ask(checkpoint, folder) == (0, choices)
    assert "is not what is computed now; all of this generation is dropped" in caplog.text
    assert await ask(checkpoint, folder) == (96, choices)


@pytest.mark.slow
async def test_damaged_files_never_change_an_answer(
    checkpoint: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, choices = await ask(checkpoint, folder)
    draw = random.Random(0)
    for _ in range(4):
        paths = files(folder)
        bad = draw.sample(paths[1:], 3)
        bad[0].write_bytes(bad[0].read_bytes()[: draw.randrange(1000)])
        data = bytearray(bad[1].read_bytes())
        data[draw.randrange(len(data))] ^= 4
        bad[1].write_bytes(data)
        bad[2].write_bytes(draw.choice(paths).read_bytes())
        cached, found = await ask(checkpoint, folder)
        assert found == choices
        assert cached % 16 == 0
        assert cached < 96
        assert "is removed: " in caplog.text


async def test_a_busy_folder_refuses_a_second_server_and_a_purge(
    checkpoint: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--cache.paged.disk", str(folder)]
    async with running(**sections(checkpoint, folder)) as server:
        await server.post(ASKED)
        with pytest.raises(Exception, match="another process uses; give each server a folder of its own"):
            LLM(**_llm(checkpoint, folder, "auto"))
        assert main(["cache", "purge", *words]) == 2
        assert f"A server uses {folder}; stop it, then purge." in capsys.readouterr().err
    assert main(["cache", "list", *words]) == 0
    generation, *about = capsys.readouterr().out.split()
    assert about[:2] == ["6", "blocks,"]
    assert "torch.float32," in about
    assert main(["cache", "purge", "0" * 32, *words]) == 0
    assert len(files(folder)) == 6
    assert main(["cache", "purge", generation[:8], *words]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("6 blocks of ")
    assert files(folder) == []
    assert main(["cache", "list", *words]) == 0
    assert capsys.readouterr().out == f"{folder} has no blocks.\n"


def test_commands_without_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "list"]) == 2
    assert "cache.paged.disk is not set, so nothing is kept on disk; name the folder by" in capsys.readouterr().err
    words = ["--cache.paged.disk", str(tmp_path / "none")]
    assert main(["cache", "list", "abc", *words]) == 2
    assert "infer cache list lists all there is; leave 'abc' out." in capsys.readouterr().err
    assert main(["cache", "purge", *words]) == 0
    assert not (tmp_path / "none").exists()


SHAPE: Body = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "max_position_embeddings": 8448}


@pytest.mark.slow
def test_a_long_prompt_is_read_after_a_restart(tmp_path: Path) -> None:
    """8,200 tokens, of which a restart computes 8; what it took is printed, and nothing depends on it."""
    path = write_checkpoint(tmp_path / "model", "qwen3", **SHAPE)
    draw = random.Random(0)
    prompt, answers, took = [draw.randrange(1, 300) for _ in range(8200)], list[Any](), list[float]()
    for _ in range(2):
        with LLM(**_llm(path, tmp_path / "kept", "auto"), engine={"max_batch_size": 2, "max_seq_len": 8448}) as llm:
            began = time.perf_counter()
            events = llm.stream(prompt, SamplingParams(max_tokens=8, temperature=0, logprobs=5))
            answers.append([next(events)])
            took.append(time.perf_counter() - began)
            answers[-1] += events
    assert [answer[-1].num_cached for answer in answers] == [0, 8192]
    assert len({repr([(e.text, e.token_ids, e.logprobs) for e in answer]) for answer in answers}) == 1
    print(json.dumps({"cold": took[0], "restarted": took[1], "ratio": took[1] / took[0]}))
