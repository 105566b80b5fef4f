"""A GGUF file is served like the folder that it was written from: template, defaults, name, and by a hub id."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import pytest
import torch
from tests.formats.gguf.files import byte_level, write_gguf
from tests.models.checkpoints import write_checkpoint

from infer import LLM, SamplingParams
from infer.checkpoint import Checkpoint
from infer.commands import cli
from infer.errors import CheckpointError, PluginError
from infer.plugins.discovery import Plugins
from infer_formats.gguf import GGUF

FAST: dict[str, Any] = {"kernels": {"backend": "reference", "threads": 1}, "cache": {"backend": "slotted"}}
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder, and another that holds nothing but the file."""
    folder = write_checkpoint(tmp_path_factory.mktemp("hub") / "hub", "qwen3", dtype=torch.bfloat16)
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    defaults = {"temperature": 0.5, "top_k": 7, "top_p": 0.75, "repetition_penalty": 1.5, "eos_token_id": [0, 5]}
    (folder / "generation_config.json").write_text(json.dumps(defaults))

    def edit(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
        writer.add_chat_template(TEMPLATE)
        writer.add_float32("general.sampling.temp", 0.5)
        writer.add_int32("general.sampling.top_k", 7)
        writer.add_float32("general.sampling.top_p", 0.75)
        writer.add_float32("general.sampling.penalty_repeat", 1.5)
        writer.add_eot_token_id(5)

    alone = tmp_path_factory.mktemp("alone") / "tiny-BF16.gguf"
    write_gguf(folder, alone, "BF16", edit=edit, tokenizer=lambda writer, at: byte_level(writer, at, "gpt-2"))
    return folder, alone


@pytest.mark.slow
def test_a_checkpoint_in_several_files(tmp_path: Path) -> None:
    folder, split = write_checkpoint(tmp_path / "hub", "llama"), tmp_path / "split"
    split.mkdir()
    write_gguf(folder, tmp_path / "whole.gguf")
    write_gguf(folder, split / "tiny.gguf", part=5)
    files = sorted(split.iterdir())
    assert len(files) > 2
    found = []
    for path in (tmp_path / "whole.gguf", split, files[0]):
        with LLM(str(path), **FAST) as llm:
            found.append(llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=8))[0].token_ids)
    assert found[0] == found[1] == found[2]
    with pytest.raises(CheckpointError, match=r"give model\.path the first of them"):
        LLM(str(files[1]), **FAST)
    shutil.copy(files[0], files[1])
    with pytest.raises(CheckpointError, match=r"but so has .*-00001-of-"):
        LLM(str(files[0]), **FAST)
    files[1].unlink()
    with pytest.raises(CheckpointError, match=r"-00002-of-.* cannot be read: No such file"):
        LLM(str(files[0]), **FAST)


def answers(path: Path | str) -> Any:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "The kettle"}]
    with LLM(str(path), **FAST) as llm:
        served = llm.served
        assert served.template is not None
        params = SamplingParams(temperature=0, max_tokens=12, logprobs=2, repetition_penalty=1)
        prompts = ["The kettle began it", [5, 6, 7]]
        found = [(answer.token_ids, answer.text, answer.logprobs) for answer in llm.generate(prompts, params)]
        rendered = served.template.render(messages)
        return found, rendered, dict(served.sampling), served.vocab_size, served.max_seq_len, served.exact


def test_the_file_is_served_as_its_folder(checkpoint: tuple[Path, Path]) -> None:
    folder, file = checkpoint
    wanted = answers(folder)
    assert wanted[2] == {"temperature": 0.5, "top_k": 7, "top_p": 0.75, "repetition_penalty": 1.5}
    assert answers(file) == wanted
    assert answers(file.parent) == wanted


def test_chat_templates_by_name(checkpoint: tuple[Path, Path], tmp_path: Path) -> None:
    folder, _ = checkpoint
    several = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": f"tools{TEMPLATE}"}]
    write_gguf(folder, tmp_path / "two.gguf", edit=lambda writer, _: writer.add_chat_template(several))
    read = Checkpoint(GGUF(tmp_path / "two.gguf"))
    assert (read.chat_template, read.tool_template) == (TEMPLATE, f"tools{TEMPLATE}")


def test_its_name_is_what_the_user_wrote(checkpoint: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    file = checkpoint[1]
    with LLM(str(file), **FAST) as llm:
        assert llm.served.name == str(file)
    asked: list[Any] = []

    def snapshot_download(repo_id: str, **options: Any) -> str:
        asked.append((repo_id, options["revision"]))
        return str(file.parent)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with LLM("org/tiny-GGUF:bf16", **FAST, model={"revision": "v1"}) as llm:
        assert llm.served.name == "org/tiny-GGUF:bf16"
    assert asked == [("org/tiny-GGUF", "v1")]


def test_a_tokenizer_of_its_own(checkpoint: tuple[Path, Path], tmp_path: Path) -> None:
    """A file without one needs ``model.tokenizer``."""
    folder, _ = checkpoint
    write_gguf(folder, tmp_path / "bare.gguf", tokenizer=lambda writer, _: writer.add_tokenizer_model("no_vocab"))
    with LLM(str(tmp_path / "bare.gguf"), **FAST, model={"tokenizer": str(folder / "tokenizer.json")}) as llm:
        assert llm.encode("The kettle")


def test_plugins_are_listed(checkpoint: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plugins", "--json", "--model.path", str(checkpoint[1])]) == 0
    rows = {(row["slot"], row["name"]): row for row in json.loads(capsys.readouterr().out)["parts"]}
    for slot, name in (("container", "gguf"), ("weights", "gguf")):
        assert rows[slot, name]["chosen"] == "yes"
    assert rows["container", "folder"]["chosen"] == "no"
    assert rows["container", "gguf"]["why"] == "by the ending of the checkpoint's file: .gguf; the only one"


def test_without_the_plugin(checkpoint: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    discover, others = Plugins.discover, [entry for entry in entry_points(group="infer") if entry.name != "formats"]
    monkeypatch.setattr(Plugins, "discover", lambda extra=(): discover(extra, installed=others))
    with pytest.raises(PluginError, match=r"a file \(\.gguf\) that no .* pip install -r dist/infer-formats.txt brings"):
        LLM(str(checkpoint[1]), **FAST)


def test_safetensors_come_first(checkpoint: tuple[Path, Path], tmp_path: Path) -> None:
    """A folder that holds them is a folder, whatever else it holds."""
    folder = Path(shutil.copytree(checkpoint[0], tmp_path / "both"))
    shutil.copy(checkpoint[1], folder / "model.gguf")
    with LLM(str(folder), **FAST) as llm:
        assert llm.served.sampling["top_k"] == 7
