"""`infer doctor`: what it says of a checkpoint is what there is once the checkpoint has been loaded."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.utils._safetensors import SafetensorsFileMetadata, SafetensorsRepoMetadata
from safetensors.torch import load_file, save_file
from tests.formats import writers
from tests.formats.gguf.files import write_gguf
from tests.formats.writers import compressed, compressed_config, linear, scheme
from tests.hub import serving
from tests.models.checkpoints import with_head, write_checkpoint, write_eagle
from tests.models_transformers.checkpoints import family_of
from tests.models_transformers.checkpoints import write as by_transformers
from tests.support import held, without
from torch import Tensor

from infer import hookimpl
from infer.assemble.assembly import start
from infer.checkpoint import Outlines
from infer.commands.cli import main
from infer.commands.doctor import Doctor, Report
from infer.contracts.kernels import KernelsRegistration
from infer.errors import CheckpointError
from infer.kernels.reference import ReferenceKernels
from infer.plugins.discovery import Plugins
from infer.settings import load_settings
from infer.weight import Weight

PLUGINS = Plugins.discover()
W4: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
MOE = {"num_experts": 8, "moe_intermediate_size": 32}
Write = Callable[[Path], Path]


def plain(family: Any = "llama", **config: Any) -> Write:
    return lambda folder: write_checkpoint(folder / "c", family, **config)


def packed(pack: writers.Pack, table: dict[str, Any], **config: Any) -> Write:
    return lambda folder: writers.write(folder, linear(pack), table, **config)[0]


def gguf(type: str, family: Any = "llama", **config: Any) -> Write:
    def write(folder: Path) -> Path:
        made = write_checkpoint(folder / "c", family, **{"hidden_size": 64, "intermediate_size": 96} | config)
        write_gguf(made, folder / "model.gguf", type)
        return folder / "model.gguf"

    return write


ASYMMETRIC = scheme(**W4 | {"symmetric": False})
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
CASES: dict[str, tuple[Write, dict[str, Any]]] = {
    "llama": (plain(), {}),
    "bfloat16, tied, in shards": (plain(dtype=torch.bfloat16, sharded=True), {"model": {"dtype": "float32"}}),
    "reference": (plain(), {"kernels": {"backend": "reference"}, "model": {"quantization": "int8"}}),
    "int8 weights and K/V": (
        plain("qwen3", head_dim=32),
        {"model": {"quantization": "int8"}, "cache": {"kv_dtype": "int8"}},
    ),
    "int4": (plain("qwen2", tied=False), {"model": {"quantization": "int4"}, "engine": {"max_seq_len": 100}}),
    "windows": (plain("gemma3", window=9), {"engine": {"max_batch_size": 3}}),
    "slotted": (plain("phi3"), {"cache": {"backend": "slotted"}, "engine": {"max_batch_size": 3}}),
    "experts": (plain("qwen3_moe"), {"model": {"quantization": "int8"}}),
    "stacked experts with biases and sinks": (plain("gpt_oss", window=9), {}),
    "longer than the memory": (plain(max_position_embeddings=20_000), {"cache": {"paged": {"memory_fraction": 0.001}}}),
    "gptq": (packed(writers.gptq(symmetric=False), GPTQ), {}),
    "gptq, shuffled": (packed(writers.gptq(shuffled=True), GPTQ | {"desc_act": True}), {}),
    "awq": (packed(writers.awq(), {"quant_method": "awq", "bits": 4, "group_size": 32}), {}),
    "compressed": (packed(compressed(scheme(**W4)), compressed_config(scheme(**W4))), {}),
    "compressed, asymmetric": (packed(compressed(ASYMMETRIC), compressed_config(ASYMMETRIC)), {}),
    "fp8": (
        packed(writers.fp8((16, 32)), {"quant_method": "fp8", "weight_block_size": [16, 32]}, family="qwen3"),
        {},
    ),
    "Q4_0": (gguf("Q4_0"), {}),
    "Q8_0, experts": (gguf("Q8_0", "mixtral"), {}),
    "states": (plain("granite_hybrid"), {"engine": {"speculation": "ngram", "max_draft_tokens": 3}}),
    "draft head": (
        lambda folder: with_head(folder / "c", "qwen3_5_moe"),
        {"engine": {"speculation": "mtp"}, "model": {"quantization": "int8"}},
    ),
    "EAGLE-3 head": (
        lambda folder: write_eagle(folder / "head") and write_checkpoint(folder / "c", "qwen3"),
        {
            "engine": {"speculation": "eagle3", "eagle3": {"path": "head"}},
            "model": {"quantization": "int8"},
            "cache": {"backend": "slotted"},
        },
    ),
    "states, slotted": (plain("lfm2"), {"cache": {"backend": "slotted"}, "engine": {"max_batch_size": 3}}),
}
FAST = (
    "llama",
    "int8 weights and K/V",
    "windows",
    "experts",
    "compressed, asymmetric",
    "Q4_0",
    "slotted",
    "reference",
    "states",
    "draft head",
    "EAGLE-3 head",
)


def examined(path: Path | str, *, plugins: Plugins = PLUGINS, **sections: Any) -> tuple[Report, Any]:
    """What the command finds, and the settings."""
    given = {"model": {"path": str(path)}, "kernels": {"threads": 1}}
    overrides = {name: given.get(name, {}) | sections.get(name, {}) for name in given | sections}
    loaded = load_settings(plugins, env={}, overrides=overrides, read_file=False)
    return Doctor(loaded.settings, loaded.sources, plugins).examine(), loaded.settings


@pytest.mark.parametrize(
    "case", [case if case in FAST else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_what_it_says_is_what_is_held_after_loading(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the byte: the model's tensors, and the pool's."""
    write, sections = CASES[case]
    free, drafts = 24_000_000_000, case.endswith(" head")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("infer.device.free_memory", lambda device: free)
    report, settings = examined(write(tmp_path), **sections)
    assert not report.problems
    free -= report.data["weights"]["bytes"]  # as it will be once the weights are loaded
    loop, served = start(settings, PLUGINS)
    try:
        loaded: Any = loop._engine
        weights, cache, sequences = (report.data[part] for part in ("weights", "cache", "sequences"))
        assert weights["exact"]
        assert weights["bytes"] == held(loaded._runner._model)
        assert weights["peak_bytes"] > weights["bytes"]
        pool = loaded._runner._pool
        states = pool.state_storage.parts if pool.state_storage else []
        assert cache["bytes"] == held([pool.storage.k, pool.storage.v, states])
        assert cache["state_bytes"] == held(states)
        assert cache["positions"] == served.cache_tokens
        assert sequences["max_seq_len"] == served.max_seq_len
        assert ("draft head" in report.data) == drafts
        if drafts:
            own = loaded._speculation._proposer._pool
            assert report.data["draft head"]["bytes"] == held([own.storage.k, own.storage.v])
            assert report.data["draft head"]["positions"] == own.free_tokens() == served.cache_tokens
            assert not any("engine.speculation" in note for note in report.notes), "all of it is counted"
    finally:
        loop.close()


@pytest.mark.parametrize(
    "name",
    [
        "GPTNeoXForCausalLM",
        *(pytest.param(f"{n}ForCausalLM", marks=pytest.mark.slow) for n in ("Cohere", "DeepseekV3")),
    ],
)
def test_a_model_by_transformers_modules_is_examined_and_starts(name: str, tmp_path: Path) -> None:
    """It has more positions than what needs no look at the memory, and modules that are never filled."""
    path = by_transformers(tmp_path / "c", name, max_position_embeddings=8192)
    report, settings = examined(path, model={"family": family_of(name)})
    assert not report.problems
    loop, served = start(settings, PLUGINS)
    try:
        loaded: Any = loop._engine
        assert report.data["sequences"]["max_seq_len"] == served.max_seq_len == 8192
        taken = held(
            loaded._runner._model, loaded._runner._pool, loaded._runner._pool.storage
        )  # and what passes work in
        assert 0.85 * taken < report.data["weights"]["bytes"] <= taken
    finally:
        loop.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("doctor") / "c", "llama")


def edited(folder: Path, to: Path, **config: Any) -> Path:
    """A copy of a checkpoint with other values in config.json."""
    shutil.copytree(folder, to)
    file = to / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return to


def problems(report: Report) -> str:
    return "\n".join(report.problems)


def test_too_little_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the weights, for the weights and no position, and for a pool that does not ask how much there is."""
    report, _ = examined(folder)
    weights, peak = (report.data["weights"][name] for name in ("bytes", "peak_bytes"))
    sizes = report.data["quantization"]["bytes"]
    assert sizes["int4"] < sizes["int8"] < sizes["none"] == weights
    each = report.data["cache"]["bytes_per_token"]

    def with_memory(nbytes: int, **sections: Any) -> str:
        monkeypatch.setattr("infer.device.free_memory", lambda device: nbytes)
        return problems(examined(folder, **sections)[0])

    assert "Loading takes" in with_memory(peak - 1)
    assert "model.quantization = int8 would fit" in with_memory(peak - 1)
    assert "a smaller checkpoint is needed" in with_memory(1000)
    assert "The cache has room for 0 positions" in with_memory(peak)
    assert not with_memory(weights + 2 * 16 * 512 * each + 4096)
    slotted = {"cache": {"backend": "slotted"}, "engine": {"max_batch_size": 4}}
    assert not with_memory(weights + 4 * 512 * each, **slotted)
    assert "Weights and cache take" in with_memory(weights + 4 * 512 * each - 1, **slotted)


def test_what_nobody_serves(folder: Path, tmp_path: Path) -> None:
    """One sentence each, and everything else is still said."""
    unheard = edited(folder, tmp_path / "a", architectures=["Unheard"])
    report, _ = examined(unheard, plugins=without("models_transformers"))
    assert "The checkpoint's architecture is Unheard, which no installed plugin knows" in problems(report)
    assert any("infer_models()" in note for note in report.notes)
    assert {"kernels", "pool", "format", "dtype", "threads"} <= report.data.keys()
    report, _ = examined(edited(folder, tmp_path / "b", quantization_config={"quant_method": "odd"}))
    assert "quant_method 'odd', which no installed plugin reads" in problems(report)
    tensors = load_file(folder / "model.safetensors")
    cut = edited(folder, tmp_path / "c")
    name = next(name for name in tensors if "up_proj" in name)
    save_file({key: value for key, value in tensors.items() if key != name}, cut / "model.safetensors")
    assert f"lacks '{name}'" in problems(examined(cut)[0]), "the model is filled without values"
    save_file(tensors | {name: tensors[name][1:].contiguous()}, cut / "model.safetensors")
    assert "config.json asks for [72, 48]" in problems(examined(cut)[0])
    (cut / "tokenizer.json").unlink()
    save_file(tensors, cut / "model.safetensors")
    assert "has no tokenizer.json" in problems(examined(cut)[0])
    wrong = examined(folder, engine={"max_seq_len": 10**6})[0]
    assert "engine.max_seq_len is 1000000, but the checkpoint was made for 512" in problems(wrong)
    report, _ = examined(folder, kernels={"backend": "nope"})
    assert "kernels.backend is 'nope'" in problems(report)


def test_sizes_beyond_reason_are_one_sentence(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, _ = examined(edited(folder, tmp_path / "a", max_position_embeddings=10**9))
    assert "max_position_embeddings is 1000000000; it has to be an integer from 2" in problems(report)
    report, _ = examined(edited(folder, tmp_path / "b", head_dim=10**19))
    assert "head_dim: Input should be at most 2147483647 (it is 10000000000000000000)" in problems(report)
    monkeypatch.setattr(torch, "outer", lambda *given: pytest.fail("tables of rotations have values"))
    report, _ = examined(edited(folder, tmp_path / "c", max_position_embeddings=1 << 24))
    assert "tables" not in problems(report)


def test_values_are_not_read(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of NaNs looks like any other."""
    odd = edited(folder, tmp_path / "c")
    tensors = {name: torch.full_like(x, torch.nan) for name, x in load_file(folder / "model.safetensors").items()}
    save_file(tensors, odd / "model.safetensors")
    assert not examined(odd)[0].problems
    with pytest.raises(CheckpointError, match="not finite"):
        start(examined(odd)[1], PLUGINS)


def doctor(path: str, home: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, because the hub's library reads the environment once."""
    command = [sys.executable, "-m", "infer.commands.cli", "doctor", path, "--kernels.backend", "reference", "--json"]
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "INFER_"))}
    plain |= {"HF_HOME": str(home / "home"), "HF_HUB_DISABLE_PROGRESS_BARS": "1"} | variables
    return subprocess.run(command, cwd=home, env=plain, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_checkpoint_of_the_hub_is_examined_before_it_is_downloaded(sharded: bool, tmp_path: Path) -> None:
    """The answer is that for the same checkpoint on the disk, and no weight has been sent, nor is anything kept."""
    made = write_checkpoint(tmp_path / "hub/org/name", "llama", sharded=sharded, vocab_size=4096, hidden_size=64)
    settings: dict[str, Any] = {"kernels": {"backend": "reference"}}
    with serving(tmp_path / "hub") as hub:
        answered = doctor("org/name", tmp_path, HF_ENDPOINT=hub.url)
    assert answered.returncode == 0, answered.stderr
    found, expected = json.loads(answered.stdout), examined(made, **settings)[0].data
    weights = sum(file.stat().st_size for file in made.glob("*.safetensors"))
    assert (found["model"]["path"], found["model"]["place"]) == ("org/name", None)
    headers = 4000  # of the files, which are written anew
    assert found["model"]["download_bytes"] == pytest.approx(weights, abs=headers)
    for report in (found, expected):
        assert report["weights"].pop("file_bytes") == pytest.approx(weights, abs=headers)
    assert any("have been fetched" in note for note in found["notes"])
    for part in ("family", "format", "dtype", "weights", "quantization", "texts"):
        assert found[part] == expected[part], part
    sent = sum(size for name, size in hub.sent.items() if name.endswith(".safetensors"))
    assert 0 < sent <= 100_001 * len([*made.glob("*.safetensors")]) < weights
    assert not [*(tmp_path / "home").rglob("*.safetensors")]
    assert not [*(tmp_path / "home").rglob("config.json")]


@pytest.mark.parametrize(
    ("path", "offline", "said"),
    [
        ("org/name", True, "HF_HUB_OFFLINE is set: go online, or run hf download org/name where that can be done"),
        ("org/name", False, "the hub cannot be reached: go online, or run hf download org/name"),
        ("org/name:Q4_0", False, "before they are downloaded: run infer pull org/name:Q4_0 first."),
        ("org/name/m.gguf", False, "before they are downloaded: run infer pull org/name/m.gguf first."),
    ],
)
def test_without_a_hub_it_says_what_to_do(path: str, offline: bool, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(repo_id: str, **options: Any) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("not there")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    with pytest.raises(CheckpointError) as refused:
        examined(path)
    assert said in str(refused.value)


def test_a_hub_names_no_file_outside_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its index of tensors is a stranger's."""
    metadata = SafetensorsFileMetadata(metadata={}, tensors={})
    odd = SafetensorsRepoMetadata(metadata={}, sharded=True, weight_map={}, files_metadata={"../x": metadata})

    def snapshot_download(repo_id: str, **options: Any) -> str:
        if "local_dir" not in options:
            raise huggingface_hub.errors.LocalEntryNotFoundError("not there")
        options["local_dir"].mkdir(parents=True)
        (options["local_dir"] / "config.json").write_text("{}")
        return str(options["local_dir"])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub.HfApi, "get_safetensors_metadata", lambda self, name, **options: odd)
    with pytest.raises(CheckpointError, match=r"index of tensors has .*, which is not a file's name"):
        examined("org/name")


def test_only_what_tells_a_form_is_read() -> None:
    """Zero points and groups are, for their values may need a minimum each; codes are not."""

    class Files:
        def __init__(self) -> None:
            self.read: list[str] = []
            self.held = {"codes": torch.ones(8, 64), "zeros": torch.ones(8, 2), "scales": torch.ones(8, 2)}

        def names(self) -> list[str]:
            return [*self.held]

        def tensor(self, name: str) -> Tensor:
            return self.held[name]

    class Format:
        def __init__(self, files: Any) -> None:
            self.files = files
            self.given: list[str] = []

        def names(self) -> list[str]:
            return ["weight"]

        def weight(self, name: str) -> Weight:
            tensors = {kind: self.files.tensor(kind) for kind in self.files.names()}
            self.given = [kind for kind, tensor in tensors.items() if not tensor.is_meta]
            assert bool(tensors["zeros"].all())
            codes: Tensor = tensors["codes"]
            return codes * 2

    format = Format(outlines := Outlines(Files()))
    weight = outlines.weight("weight", format)
    assert isinstance(weight, Tensor)
    assert (weight.is_meta, weight.shape) == (True, (8, 64))
    assert format.given == ["zeros", "scales"]


class Reading:
    """A family and kernels that cannot do without values."""

    INFER_PLUGIN_API = 2

    @staticmethod
    @hookimpl
    def infer_kernels() -> list[KernelsRegistration]:
        class Kernels(ReferenceKernels):
            def pack(self, weight_NK: Weight, bias_N: Tensor | None = None) -> Any:
                assert isinstance(weight_NK, Tensor)
                weight_NK.sum().item()
                return super().pack(weight_NK, bias_N)

        return [KernelsRegistration("reading", lambda device, settings: Kernels(), "reads what it packs")]


def test_kernels_that_read_what_they_pack(folder: Path) -> None:
    """The size is that of the weights, and the report says so."""
    report, _ = examined(folder, plugins=Plugins.discover([Reading()]), kernels={"backend": "reading"})
    assert not report.problems
    assert report.data["weights"]["exact"] is False
    stored = load_file(folder / "model.safetensors")
    assert report.data["weights"]["bytes"] == sum(x.nbytes for x in stored.values())
    assert any("before they are packed" in note for note in report.notes)


def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 0 if it would be served, 1 if not, 2 for bad input; for people and in JSON."""
    assert main(["doctor", str(folder), "--cache.paged.num_blocks", "40"]) == 0
    said = capsys.readouterr()
    assert "llama of infer-models" in said.out
    assert "640 positions of" in said.out
    assert "kernels.backend = auto (from default)" in said.out
    assert said.out.rstrip().endswith("It would be served.")
    assert "auto chose" not in said.err, "the report has it"
    odd = edited(folder, tmp_path / "c", architectures=["Unheard"])
    assert main(["doctor", str(odd), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["serves"], found["format"]["name"]) == (False, "safetensors")
    assert main(["doctor", str(tmp_path / "none")]) == 2
    assert main(["doctor", "--model.path", "none"]) == 2
    assert "model.path is not set" in capsys.readouterr().err
