"""Every kind of valid checkpoint loads, and every broken one is refused in one sentence."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors
from huggingface_hub.utils._paths import filter_repo_objects
from safetensors.torch import save_file
from torch import Tensor

from infer import LLM
from infer.checkpoint import Checkpoint, Folder, Outlines, dummy_tensors, tensor_files, tensors
from infer.checkpoint.files import INDEX, SINGLE
from infer.checkpoint.locate import locate as locate_path
from infer.errors import MAX_MESSAGE, CheckpointError, PluginError
from infer.plugins.discovery import Plugins

DEMO = Plugins.discover().checkpoints["demo"]
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 64,
    "eos_token_id": 2,
}
TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4), "c": torch.zeros(2)}
SHARDS = {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_json(tmp_path / "config.json", CONFIG)
    save_file(TENSORS, tmp_path / SINGLE)
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write_json(tmp_path / "config.json", CONFIG)
    write_json(tmp_path / INDEX, {"metadata": {}, "weight_map": SHARDS})
    for file in set(SHARDS.values()):
        save_file({name: TENSORS[name] for name in SHARDS if SHARDS[name] == file}, tmp_path / file)
    return tmp_path


def write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value))


def locate(path: object, **bundled: Path) -> Checkpoint:
    place = locate_path(str(path), bundled=bundled, suffixes=("/",))
    return Checkpoint(Folder(place))


def find(path: object, suffixes: Sequence[str] = (".gguf", ".one")) -> Path:
    return locate_path(str(path), bundled={}, suffixes=("/", *suffixes))


def refused(call: Callable[[], object]) -> str:
    """The sentence a checkpoint is refused with: one line that ends like a sentence."""
    with pytest.raises(CheckpointError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith(".")
    assert not text.endswith("..")
    assert len(text) <= MAX_MESSAGE
    assert text.isprintable()
    return text


def load(folder: Path) -> dict[str, Tensor]:
    files = locate(folder).container.tensors()
    return {name: files.tensor(name) for name in files.names()}


def same(tensors: dict[str, Tensor]) -> bool:
    return tensors.keys() == TENSORS.keys() and all(torch.equal(tensors[n], TENSORS[n]) for n in TENSORS)


# Finding it


def test_a_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert locate(folder).path == folder
    monkeypatch.chdir(folder.parent)
    assert locate(folder.name).config == CONFIG
    monkeypatch.setenv("HOME", str(folder.parent))
    assert locate(f"~/{folder.name}").path == folder


def test_a_bundled_name_and_a_folder_before_it(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert locate("demo", demo=folder).path == folder
    (tmp_path / "elsewhere" / "demo").mkdir(parents=True)
    write_json(tmp_path / "elsewhere" / "demo" / "config.json", {"here": 1})
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert locate("demo", demo=folder).config == {"here": 1}


def test_nothing_of_that_name(folder: Path) -> None:
    text = refused(lambda: locate("nonesuch", demo=folder, tiny=folder))
    tried = "'nonesuch' is neither a folder or file nor a bundled name (demo, tiny)"
    assert text == f"{tried}, and it cannot be a hub id, which reads org/name, org/name:TAG or org/name/FILE."


@pytest.mark.parametrize(
    "path", ["/no/where", "./org/name", "../org", "a/b/c", "org/", "/name", "org/na me", "~/no", "org/na\0me"]
)
def test_what_cannot_be_a_hub_id(path: str) -> None:
    assert "it cannot be a hub id" in refused(lambda: locate(path))


def test_a_place_that_cannot_be_looked_into(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "cannot be read: File name too long." in refused(lambda: locate("a" * 300))

    def deny(self: Path, pattern: str = "") -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "glob", deny)
    assert refused(lambda: locate(folder)) == f"{str(folder)!r} cannot be read: Permission denied."


def test_a_file_that_nothing_reads() -> None:
    with pytest.raises(PluginError, match=r"a file \(\.json\) that no installed plugin reads; .*infer-formats"):
        LLM(str(DEMO / "config.json"))


def test_a_folder_of_one_file(folder: Path) -> None:
    """It stands for the file, unless there are safetensors."""
    (folder / "a.GGUF").touch()
    (folder / "mmproj.json").touch()
    assert find(folder) == folder
    (folder / SINGLE).unlink()
    assert find(folder) == folder / "a.GGUF"
    assert find(folder, ()) == folder
    (folder / "b.one").touch()
    assert refused(lambda: find(folder)).endswith(
        "holds 2 files of weights (a.GGUF, b.one); add the name of one to model.path."
    )


def test_a_revision_is_for_hub_ids(folder: Path) -> None:
    bundled = {"demo": folder}
    for path in (str(folder), "demo"):
        with pytest.raises(CheckpointError, match="'v1'"):
            locate_path(path, bundled=bundled, suffixes=(), revision="v1")


def test_a_hub_id_is_downloaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def snapshot_download(repo_id: str, **options: Any) -> str:
        asked.append((repo_id, options["revision"], options["allow_patterns"], options["ignore_patterns"]))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    named = ("tekken.json", "tiktoken.model")
    assert locate_path("org/Name-1.5_x", bundled={}, suffixes=(), tokenizers=named, revision="v1") == folder
    (call,) = asked
    assert call[:2] == ("org/Name-1.5_x", "v1")
    wanted = filter_repo_objects(
        [
            "model-1.safetensors",
            INDEX,
            "tokenizer.json",
            "tekken.json",
            "tiktoken.model",
            "tokenizer.model",
            "x.bin",
            "original/a.safetensors",
            "consolidated.safetensors",
            "1_Pooling/config.json",
            "1_Pooling/a.safetensors",
            "2_Dense/config.json",
            "additional_chat_templates/tool_use.jinja",
            "adapter/adapter_config.json",
            "adapter/adapter_model.safetensors",
        ],
        allow_patterns=call[2],
        ignore_patterns=call[3],
    )
    assert list(wanted) == [
        *("model-1.safetensors", INDEX, "tokenizer.json", "tekken.json", "tiktoken.model", "1_Pooling/config.json"),
        "additional_chat_templates/tool_use.jinja",
    ]


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("org/name:Q4_K_M", "name-Q4_K_M.gguf"),
        ("org/name:q4_k_m", "name-Q4_K_M.gguf"),
        ("org/name:F16", "sub/f16.gguf"),
        ("org/name:BF16", "name.bf16.gguf"),
        ("org/name:bf16", "name.bf16.gguf"),
        ("org/name/name.bf16.gguf", "name.bf16.gguf"),
        ("org/name/sub/f16.gguf", "sub/f16.gguf"),
        ("org/name:Q4_K", None),
        ("org/name:Q8_0", None),
        ("org/name:IQ1", "several"),
        ("org/name/other.gguf", None),
        ("org/name/../name.bf16.gguf", "id"),
        ("org/name/config.json", "id"),
        ("org/name:*", "id"),
        ("org/name:", "id"),
        ("org/name", "config"),
    ],
)
def test_a_file_of_the_hub(path: str, found: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name, or by the end of its name as llama.cpp and vLLM write it. The snapshot has what was asked for."""
    names = ["name-Q4_K_M.gguf", "name-UD-Q4_K_M_XL.gguf", "mmproj-F16.gguf", "sub/f16.gguf", "name.bf16.gguf"]
    names += ["name-Q8_0-00001-of-00002.gguf", "a-IQ1.gguf", "b-IQ1.gguf", "README.md"]

    def snapshot_download(repo_id: str, **options: Any) -> str:
        assert repo_id == "org/name"
        given = {"allow_patterns": options["allow_patterns"], "ignore_patterns": options["ignore_patterns"]}
        for name in filter_repo_objects(names, **given):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    says = {
        None: "the hub's org/name has no such file; give the name of one, as in org/name/FILE.gguf.",
        "several": "several files of that kind (a-IQ1.gguf, b-IQ1.gguf)",
        "id": "cannot be a hub id, which reads org/name, org/name:TAG or org/name/FILE.",
        "config": "has no config.json, so it is not a checkpoint; if it holds GGUF files, add the name of one",
    }
    if found in says:
        assert says[found] in refused(lambda: find(path))
    else:
        assert find(path) == tmp_path / str(found)
    assert "reads: pip install -r dist/infer-formats.txt" in refused(lambda: find("org/name:Q8_0", ()))


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (errors.GatedRepoError, "org/name is gated: accept its terms at https://huggingface.co/org/name"),
        (errors.RepositoryNotFoundError, "the hub has no org/name that this HF_TOKEN may read"),
        (errors.RevisionNotFoundError, "the hub has no org/name that this HF_TOKEN may read"),
        (errors.LocalEntryNotFoundError, "the hub cannot be reached"),
        (OSError, "org/name cannot be downloaded: several lines."),
        (RuntimeError, "org/name cannot be downloaded: several lines."),
    ],
)
def test_what_the_hub_may_answer(kind: type[Exception], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(repo_id: str, **options: Any) -> str:
        raise kind.__new__(kind, "several\n\nlines.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    assert says in refused(lambda: locate("org/name"))


def test_offline_with_and_without_a_cached_copy(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub library itself, with the network forbidden."""
    cache = tmp_path / "cache"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    assert "it is not wholly in the cache and HF_HUB_OFFLINE is set: go online" in refused(lambda: locate("org/name"))
    repo = cache / "models--org--name"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("0" * 40)
    (repo / "snapshots").mkdir()
    (repo / "snapshots" / ("0" * 40)).symlink_to(folder)
    assert same(load(Path("org/name")))


# What it says of itself


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "has no config.json, so it is not a checkpoint."),
        ("", "config.json is not valid JSON: Expecting value"),
        ('{"a": 1', "config.json is not valid JSON"),
        ("[" * 200_000, "config.json is not valid JSON: maximum recursion"),
        ("[1]", "config.json holds a JSON list instead of an object"),
        ('{"quantization_config": {"bits": 4}}', "quantization_config is {'bits': 4}; it has to be a table with"),
        ('{"text_config": {"quantization_config": {}}}', "quantization_config is {}; it has to be a table with"),
        ('{"quantization_config": "' + "x" * 9999 + '"}', "x…x"),
    ],
)
def test_a_broken_config(text: str | None, says: str, folder: Path) -> None:
    (folder / "config.json").unlink()
    if text is not None:
        (folder / "config.json").write_text(text)
    assert says in refused(lambda: locate(folder).quant_method)


def test_a_message_repeats_what_a_file_says_in_short() -> None:
    """And escapes what a terminal would obey."""
    found = CheckpointError(f"The tensor '\x1b[2J\n\ud800{'a' * 5000}z' is odd.")
    assert str(found).startswith(r"The tensor '\x1b[2J\n\ud800aaaa")
    assert str(found).endswith("aaz' is odd.")
    assert len(str(found)) == MAX_MESSAGE


def test_a_config_that_is_not_text(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"\xff\xfe\x00{")
    assert "config.json is not valid JSON" in refused(lambda: locate(folder))
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    assert "config.json cannot be read: Is a directory" in refused(lambda: locate(folder))


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({}, torch.float32),
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"torch_dtype": "float16"}, torch.float16),
        ({"dtype": None, "torch_dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": "bfloat16", "torch_dtype": "float16"}, torch.bfloat16),
        ({"torch_dtype": "float16", "text_config": {"dtype": "bfloat16"}}, torch.bfloat16),
        ({"text_config": {"torch_dtype": "bfloat16"}}, torch.bfloat16),
        ({"torch_dtype": "bfloat16", "text_config": {}}, torch.bfloat16),
    ],
)
def test_dtype(config: dict[str, Any], dtype: torch.dtype, folder: Path) -> None:
    write_json(folder / "config.json", config)
    assert locate(folder).dtype == dtype


@pytest.mark.parametrize("value", ["int8", "float8_e4m3fn", "float64", 3, ["bfloat16"]])
def test_other_dtypes_are_refused(value: object, folder: Path) -> None:
    write_json(folder / "config.json", {"dtype": value})
    text = refused(lambda: locate(folder).dtype)
    assert f"dtype is {value!r}; it has to be float32, float16, bfloat16." in text


def test_max_positions(folder: Path) -> None:
    assert locate(folder).max_positions == 64
    write_json(folder / "config.json", {"text_config": {"max_position_embeddings": 32}})
    assert locate(folder).max_positions == 32
    write_json(folder / "config.json", {"model_max_length": 16})
    assert locate(folder).max_positions == 16
    write_json(folder / "config.json", {"model_max_length": 1e30, "max_position_embeddings": 8})
    assert locate(folder).max_positions == 8
    write_json(folder / "config.json", {})
    assert locate(folder).max_positions == sys.maxsize
    bad: list[Any] = [0, 1, -1, 1.5, "many", True, 10**9]
    for value in bad:
        write_json(folder / "config.json", {"max_position_embeddings": value})
        assert "an integer from 2 (" in refused(lambda: locate(folder).max_positions)


@pytest.mark.parametrize("value", [0, -1, 10**9, 1.5, "many"])
def test_layers_beyond_reason_cost_no_memory(value: object, folder: Path) -> None:
    for config in ({"num_hidden_layers": value}, {"text_config": {"num_hidden_layers": value}}):
        write_json(folder / "config.json", config)
        assert f"num_hidden_layers is {value!r}" in refused(lambda: locate(folder))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "chat_template.jinja", SINGLE])
def test_a_pipe_is_not_waited_for(name: str, folder: Path) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    if name == "chat_template.jinja":
        assert locate(folder).chat_template is None
    else:
        assert "not a regular file" in refused(lambda: (load(folder), locate(folder).eos_token_ids))


def test_the_demo_is_a_package(folder: Path) -> None:
    assert "pip install -r dist/infer-demo.txt" in refused(lambda: locate("demo"))


def test_architectures(folder: Path) -> None:
    assert locate(folder).architectures == ("LlamaForCausalLM",)
    for value in (None, ()):
        write_json(folder / "config.json", {"architectures": value})
        assert locate(folder).architectures == ()
    wrong: list[Any] = ["Llama", [1], {"a": 1}]
    for names in wrong:
        write_json(folder / "config.json", {"architectures": names})
        assert "a list of names" in refused(lambda: locate(folder).architectures)


def test_end_of_sequence_comes_from_all_places(folder: Path) -> None:
    assert locate(folder).eos_token_ids == {2}
    write_json(folder / "generation_config.json", {"eos_token_id": [2, 5]})
    assert locate(folder).eos_token_ids == {2, 5}
    write_json(folder / "config.json", {"eos_token_id": [0], "text_config": {"eos_token_id": 7}})
    assert locate(folder).eos_token_ids == {0, 2, 5, 7}
    write_json(folder / "config.json", {"eos_token_id": None})
    write_json(folder / "generation_config.json", {})
    assert locate(folder).eos_token_ids == frozenset()


@pytest.mark.parametrize("value", [-1, True, 1.0, "</s>", [2, None], [[2]], {}])
def test_an_end_of_sequence_that_is_none(value: object, folder: Path) -> None:
    write_json(folder / "config.json", {"eos_token_id": value})
    assert "eos_token_id is" in refused(lambda: locate(folder).eos_token_ids)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_an_end_of_sequence_beyond_the_vocabulary_is_refused_at_load(file: str, tmp_path: Path) -> None:
    demo = Plugins.discover().checkpoints["demo"]
    for each in demo.iterdir():
        (tmp_path / each.name).symlink_to(each)
    config = json.loads((demo / "config.json").read_text())
    beyond = config["vocab_size"]
    given = config if file == "config.json" else {}
    (tmp_path / file).unlink(missing_ok=True)
    write_json(tmp_path / file, given | {"eos_token_id": [0, beyond]})
    locate(tmp_path).check_ids(beyond + 1)
    with pytest.raises(CheckpointError, match=rf"eos_token_id, in .* has {beyond}, but .* 0 to {beyond - 1}"):
        LLM(str(tmp_path))


def test_a_broken_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{")
    assert "generation_config.json is not valid JSON" in refused(lambda: locate(folder).eos_token_ids)


def test_tokenizer_file(folder: Path) -> None:
    (folder / "tokenizer.model").touch()
    assert "has no tokenizer.json" in refused(lambda: locate(folder).container.tokenizer())
    (folder / "tokenizer.json").write_bytes(b"{}")
    assert locate(folder).container.tokenizer() == b"{}"


# Its tensors


def test_one_file(folder: Path) -> None:
    assert same(load(folder))


def test_several_files(sharded: Path) -> None:
    assert same(load(sharded))


def test_one_file_goes_before_an_index(folder: Path) -> None:
    (folder / INDEX).write_text("{")
    assert same(load(folder))


def test_names_are_checked_before_any_tensor_is_read(sharded: Path) -> None:
    (sharded / "two.safetensors").unlink()
    with pytest.raises(CheckpointError):
        tensor_files(sharded)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_file_is_mapped_no_longer_than_its_large_tensors_live(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.checkpoint.tensors.MAPPED", 1 << 16)
    save_file({name: torch.ones(1 << 15) for name in "ab"}, folder / SINGLE)
    files = tensor_files(folder)

    def mapped() -> bool:
        return str(folder) in Path("/proc/self/maps").read_text()

    for name in files.names():
        tensor = files.tensor(name)
        assert mapped()
        assert tensor.sum() == 1 << 15
        del tensor
        assert not mapped()


def test_outlines_open_a_file_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.checkpoint.tensors.MAPPED", 1 << 16)
    save_file({name: torch.ones(1 << 15) for name in "abc"}, folder / SINGLE)
    outlines, opened = Outlines(tensor_files(folder)), list[Path]()
    open_ = tensors._open

    def opening(file: Path) -> Any:
        opened.append(file)
        return open_(file)

    monkeypatch.setattr(tensors, "_open", opening)
    assert all(outlines.tensor(name).is_meta for name in outlines.names())
    assert opened == [folder / SINGLE]


def test_an_outline_is_the_tensor_without_its_values(folder: Path) -> None:
    dtypes = *tensors.DTYPES.values(), torch.float64, torch.bool, torch.float8_e5m2
    given = {str(dtype): torch.zeros(3, 5, dtype=dtype) for dtype in dtypes} | {"scalar": torch.tensor(1.0)}
    save_file(given, folder / SINGLE)
    files = tensor_files(folder)
    for name, tensor in given.items():
        outline = files.outline(name)
        assert outline.is_meta
        assert (outline.dtype, outline.shape, outline.stride()) == (tensor.dtype, tensor.shape, tensor.stride())


@pytest.mark.parametrize("keep", [0, 4, 8, 40, -1])
def test_a_truncated_file(keep: int, folder: Path) -> None:
    data = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(data[:keep])
    assert f"{SINGLE} is incomplete or damaged" in refused(lambda: load(folder))


def test_a_header_of_too_many_tensors(folder: Path) -> None:
    """It is refused by its length, before anything is made of it."""
    entry = '"{:0100}": {{"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}'
    header = f"{{{', '.join(map(entry.format, range(110_000)))}}}".encode()
    (folder / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    assert f"{SINGLE} has a header of {len(header)} bytes; infer reads headers of" in refused(lambda: load(folder))


def test_a_file_with_a_tail(folder: Path) -> None:
    (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes() + b"\0")
    assert f"{SINGLE} is incomplete or damaged" in refused(lambda: load(folder))


def test_a_git_lfs_pointer(folder: Path) -> None:
    (folder / SINGLE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")
    assert "it is a Git LFS pointer, not the file itself" in refused(lambda: load(folder))


def test_a_directory_in_its_place(folder: Path) -> None:
    (folder / SINGLE).unlink()
    (folder / SINGLE).mkdir()
    assert f"{SINGLE} cannot be read" in refused(lambda: load(folder))


def test_a_type_that_torch_has_not(folder: Path) -> None:
    header = json.dumps({"a": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}).encode()
    (folder / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0\0")
    assert re.search(r"'a' of .* cannot be read", refused(lambda: load(folder)))
    assert re.search(r"'a' of .* cannot be read", refused(lambda: tensor_files(folder).outline("a")))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.gguf", "a.pt"])
def test_other_formats(name: str, folder: Path) -> None:
    (folder / SINGLE).rename(folder / name)
    text = refused(lambda: load(folder))
    hint = ", and GGUF by pip install -r dist/infer-formats.txt" if name == "model.gguf" else ""
    assert text.endswith(f"has no {SINGLE} and no {INDEX}; it has {name}, but infer reads safetensors only{hint}.")


def test_no_weights_at_all(folder: Path) -> None:
    (folder / SINGLE).unlink()
    assert refused(lambda: load(folder)) == f"{folder} has no {SINGLE} and no {INDEX}."


def test_a_missing_shard(sharded: Path) -> None:
    (sharded / "two.safetensors").unlink()
    assert f"two.safetensors is missing, though {INDEX} lists it" in refused(lambda: load(sharded))


def test_a_tensor_that_only_the_index_has(sharded: Path) -> None:
    write_json(sharded / INDEX, {"weight_map": SHARDS | {"d": "one.safetensors"}})
    assert f"one.safetensors lacks 'd', which {INDEX} lists" in refused(lambda: load(sharded))


def test_a_tensor_that_the_index_has_not(sharded: Path) -> None:
    write_json(sharded / INDEX, {"weight_map": {k: v for k, v in SHARDS.items() if k != "c"}})
    assert f"two.safetensors holds 'c', which {INDEX} does not list" in refused(lambda: load(sharded))


def test_a_tensor_that_two_files_have(sharded: Path) -> None:
    save_file({"a": TENSORS["a"], "b": TENSORS["b"]}, sharded / "one.safetensors")
    text = refused(lambda: load(sharded))
    assert f"one.safetensors holds 'b', which {INDEX} puts in another file" in text


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": ["a"]}'])
def test_a_broken_index(index: str, sharded: Path) -> None:
    (sharded / INDEX).write_text(index)
    assert INDEX in refused(lambda: load(sharded))


@pytest.mark.parametrize(
    "file",
    [
        *("../one.safetensors", "/etc/passwd", "sub/one.safetensors", "..", "", ".", 3, None),
        *("a\0", "a\n", "\ud800", "\x1b[2J", "a" * 256),
    ],
)
def test_an_index_cannot_point_elsewhere(file: object, sharded: Path) -> None:
    write_json(sharded / INDEX, {"weight_map": {"a": file}})
    text = refused(lambda: load(sharded))
    assert f"puts 'a' in {file!r}, which is not a file's name" in text


# Made-up ones

SHAPES = {
    "model.norm.weight": (5,),
    "x.bias": (7,),
    "x.weight": (40, 30),
    "y.weight": (40, 30),
    "e": (3000, 700),
}


def dummies(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return dict(dummy_tensors(SHAPES, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dummy_tensors(dtype: torch.dtype) -> None:
    made = dummies(dtype)
    assert {name: tuple(tensor.shape) for name, tensor in made.items()} == SHAPES
    assert all(tensor.dtype == dtype for tensor in made.values())
    assert (made["model.norm.weight"] == 1).all()
    assert len(set(made["x.bias"].tolist())) > 1
    for name in ("x.weight", "y.weight", "e"):
        values = made[name].float()
        assert values.std() == pytest.approx(0.02, rel=0.1)
        assert values.mean() == pytest.approx(0, abs=0.002)
    assert len(set(map(tuple, made["e"][:, :8].tolist()))) == 3000, "rows differ, though the values repeat"


def test_dummy_tensors_depend_on_name_and_shape_alone() -> None:
    first, again = dummies(), dummies()
    assert all(torch.equal(first[name], again[name]) for name in SHAPES)
    assert not torch.equal(first["x.weight"], first["y.weight"])
    alone = dict(dummy_tensors({"e": SHAPES["e"]}, torch.float32))
    assert torch.equal(alone["e"], first["e"])


GENERATION = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0, "repetition_penalty": 1.05}


def test_sampling_values_are_those_of_generation_config(folder: Path) -> None:
    assert locate(folder).sampling == {}
    file = folder / "generation_config.json"
    write_json(file, GENERATION | {"do_sample": True, "eos_token_id": 2, "max_length": 20, "typical_p": 0.5})
    assert locate(folder).sampling == GENERATION
    write_json(file, GENERATION | {"top_k": None, "do_sample": False})
    assert locate(folder).sampling == {k: v for k, v in GENERATION.items() if k != "top_k"} | {"temperature": 0}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("temperature", "hot"), ("temperature", math.nan), ("top_p", 1.5), ("top_k", 0.5), ("min_p", True)),
        *(("do_sample", 0), ("do_sample", "no"), ("repetition_penalty", 0)),
    ],
)
def test_a_bad_sampling_value_is_refused_with_the_way_out(key: str, value: object, folder: Path) -> None:
    write_json(folder / "generation_config.json", {key: value})
    text = refused(lambda: locate(folder).sampling)
    assert f"generation_config.json: {key} is {value!r}" in text
    assert 'model.generation_config = "none"' in text
