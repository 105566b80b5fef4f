"""Packed weights are mapped from a file at the second start, with the same bits, and a file that is not as it was
written, or is of other weights, is packed again."""

from __future__ import annotations

import functools
import json
import logging
import os
import random
import shutil
import subprocess
import sys
import threading
import zlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tests.formats.writers import awq, linear, quantize
from tests.models.checkpoints import Family, edit_tensors, with_head, write_checkpoint, write_eagle
from torch import Tensor

from infer import LLM
from infer.assemble import identity, kept
from infer.assemble.assembly import Assembly
from infer.commands.doctor import Doctor
from infer.contracts.cache import CachePoolProtocol
from infer.contracts.model import DraftingModel, ModelProtocol, Pass
from infer.contracts.params import SamplingParams
from infer.engine.exactness import checking, in_one_go
from infer.plugins.discovery import Plugins
from infer.settings import load_settings
from infer_kernels_cpu.provider import CpuKernels

PLUGINS = Plugins.discover()
WAIT_S = 120.0
DROPPED = "is dropped, and they are packed again"


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "LEAST", 0)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("base") / "qwen3", "qwen3")


@pytest.fixture
def packings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often the native code has packed a weight, in its one element."""
    made = [0]
    load = CpuKernels.__init__

    def counting(self: CpuKernels, *args: Any) -> None:
        load(self, *args)
        native, names = self.native, ("infer_pack", "infer_pack_grouped", "infer_quantize")

        class Counting:
            def __getattr__(self, name: str) -> Any:
                made[0] += name in names
                return getattr(native, name)

        self.native = Counting()  # type: ignore[assignment]

    monkeypatch.setattr(CpuKernels, "__init__", counting)
    return made


def assembled(path: Path, cache: Path | None, /, **sections: Any) -> Assembly:
    model = {"path": str(path), "weight_cache": None if cache is None else str(cache), **sections.pop("model", {})}
    usual = {"engine": {"max_batch_size": 2, "max_seq_len": 64}, "kernels": {"backend": "cpu"}}
    overrides = {**usual, **sections, "model": model}
    return Assembly(load_settings(PLUGINS, env={}, overrides=overrides, read_file=False).settings, PLUGINS)


@torch.inference_mode()
def logits(path: Path, cache: Path | None, /, **sections: Any) -> Tensor:
    """Of a few tokens, once what is to be kept has been written."""
    made = assembled(path, cache, **sections)
    model, pool = made.model, made.pool
    tokens = torch.arange(2, 14)
    place = pool.allocate(tokens.tolist())
    assert place is not None
    view = pool.batched_chunked_prefill_view([place.slot], [0], [len(tokens)])
    found = model.logits(model.forward(Pass(tokens, torch.arange(len(tokens)), view)))
    if made.kept_weights is not None:
        assert made.kept_weights.written.wait(WAIT_S)
    return found


def files(folder: Path) -> list[Path]:
    """What there is but for notes that weights were compared."""
    return sorted(file for file in folder.iterdir() if not file.name.endswith(kept.COMPARED))


FAMILIES: list[Family] = [
    "llama",
    "gemma3",
    "gemma4",
    "phi3",
    "qwen3_moe",
    "gpt_oss",
    "qwen3_next",
    "granite_hybrid",
    "nemotron_h",
    "lfm2_moe",
    "glm4_moe_lite",
]


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("family", [f if f == "llama" else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES])
def test_mapped_weights_are_those_that_were_packed(
    family: Family, quantization: str | None, tmp_path: Path, packings: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    path, model = write_checkpoint(tmp_path / "model", family), {"quantization": quantization}
    plain = logits(path, None, model=model)
    with caplog.at_level(logging.INFO):
        assert torch.equal(plain, logits(path, tmp_path / "kept", model=model))
        assert packings[0] > 0
        packings[0] = 0
        assert torch.equal(plain, logits(path, tmp_path / "kept", model=model))
    assert packings == [0]
    assert DROPPED not in caplog.text
    assert f"mapped from {files(tmp_path / 'kept')[0]}" in caplog.text


def test_doctor_says_where_they_are(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def row(**model: Any) -> dict[str, Any] | None:
        given = assembled(base, tmp_path, model=model).settings
        sources: defaultdict[str, str] = defaultdict(str)
        report: dict[str, Any] = Doctor(given, sources, PLUGINS).examine().data
        return report.get("packed")

    assert (before := row()) is not None
    assert not before["there"]
    assert row(weight_cache=None) is row(load_format="dummy") is row(weight_cache_gib=1e-6) is None
    monkeypatch.setattr(kept, "LEAST", 64 << 20)
    assert row() is None
    monkeypatch.setattr(kept, "LEAST", 0)
    logits(base, tmp_path)
    assert row() == row(weight_cache_gib=1e-6) == before | {"there": True}
    assert Path(before["path"]) in files(tmp_path)


def test_only_small_tensors_are_read_besides(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []

    def finite(x: Tensor) -> bool:
        seen.append(x)
        return True

    monkeypatch.setattr("infer_layers.table._finite", finite)
    logits(base, tmp_path)
    assert seen
    assert not any(x.is_meta for x in seen)
    seen.clear()
    logits(base, tmp_path)
    assert {x.dim() for x in seen if x.is_meta} == {2}
    assert {x.dim() for x in seen if not x.is_meta} == {1}


@pytest.mark.parametrize("form", ["awq", "bare names", "tied", "transformers"])
def test_checkpoints_of_other_forms(form: str, base: Path, tmp_path: Path, packings: list[int]) -> None:
    """Quantized ones, those whose names lack a prefix, those whose head is the embedding, and those of a family that
    does not say which of its weights are packed."""
    path, model = tmp_path / "model", {"family": "transformers" if form == "transformers" else "auto"}
    if form == "awq":
        config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
        quantize(base, path, linear(awq()), config)
    else:
        write_checkpoint(path, "qwen3", tied=form == "tied")
    if form == "bare names":
        edit_tensors(path, without_prefix)
    plain = logits(path, None, model=model)
    for packed in (True, False):
        packings[0] = 0
        assert torch.equal(plain, logits(path, tmp_path / "kept", model=model))
        assert bool(packings[0]) == packed


def without_prefix(tensors: dict[str, Tensor]) -> None:
    for name in list(tensors):
        tensors[name.removeprefix("model.")] = tensors.pop(name)


def test_the_file_is_a_safetensors_file_for_its_owner_alone(base: Path, tmp_path: Path) -> None:
    logits(base, tmp_path / "kept")
    (file,) = files(tmp_path / "kept")
    assert file.stat().st_mode & 0o777 == 0o600
    with safe_open(file, "pt") as tensors:
        assert {tensors.get_tensor(name).dtype for name in tensors.keys()} == {torch.uint8}  # noqa: SIM118
        assert '"checkpoint"' in tensors.metadata()["identity"]


def damage(file: Path, how: str) -> None:
    data = bytearray(file.read_bytes())
    if how == "a bit is another":
        data[-100] ^= 4
    elif how == "it ends early":
        del data[-4096:]
    elif how == "it goes on":
        data += bytes(64)
    elif how == "its header is no JSON":
        data[8] = ord("[")
    elif how == "its header is as long as can be":
        data[:8] = b"\xff" * 8
    elif how == "its header is a number":
        data[8 : 8 + int.from_bytes(data[:8], "little")] = b"7".ljust(int.from_bytes(data[:8], "little"))
    elif how == "it is empty":
        data.clear()
    elif how == "it has a weight less":
        data = data.replace(b'"data_offsets": [0, ', b'"data_offsets": [1, ', 1)
    elif how == "it is of others":
        data = data.replace(b"qwen3 of infer-models", b"qwen4 of infer-models", 1)
    file.write_bytes(data)


@pytest.mark.parametrize(
    "how",
    [
        "a bit is another",
        "it ends early",
        "it goes on",
        "its header is no JSON",
        "its header is as long as can be",
        "its header is a number",
        "it is empty",
        "it has a weight less",
        "it is of others",
    ],
)
def test_a_file_that_is_not_as_it_was_written(
    how: str, base: Path, tmp_path: Path, packings: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    plain = logits(base, tmp_path / "kept")
    (file,) = files(tmp_path / "kept")
    before = file.read_bytes()
    damage(file, how)
    assert file.read_bytes() != before
    packings[0] = 0
    assert torch.equal(plain, logits(base, tmp_path / "kept"))
    assert packings[0] > 0
    assert f"{file} {DROPPED}" in caplog.text
    assert file.read_bytes() == before


@pytest.fixture
def checksums(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many were computed, in its one element."""
    made = [0]

    def crc32(*args: Any) -> int:
        made[0] += 1
        return zlib.crc32(*args)

    monkeypatch.setattr(kept, "zlib", SimpleNamespace(crc32=crc32))
    return made


@pytest.mark.parametrize("since", ["nothing", "a bit is another", "the system has started", "no system says when"])
def test_a_file_is_compared_once_until_it_could_be_another(
    since: str,
    base: Path,
    tmp_path: Path,
    checksums: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    boot = tmp_path / "boot"
    boot.write_text("first")
    monkeypatch.setattr(kept, "BOOT", boot)
    plain = logits(base, tmp_path / "kept")
    (file,) = files(tmp_path / "kept")
    checksums[0] = 0
    assert torch.equal(plain, logits(base, tmp_path / "kept"))
    (compared,) = {*(tmp_path / "kept").iterdir()} - {file}
    assert checksums[0] > 0
    if since == "a bit is another":
        damage(file, since)
    elif since == "the system has started":
        boot.write_text("second")
    elif since == "no system says when":
        boot.unlink()
    os.utime(compared, (1, 1))
    checksums[0] = 0
    assert torch.equal(plain, logits(base, tmp_path / "kept"))
    assert (checksums[0] > 0) == (since != "nothing")
    assert (f"{file} {DROPPED}" in caplog.text) == (since == "a bit is another")
    assert not compared.exists() or compared.stat().st_mtime > 1, "the note says when the file was used last"


def resident(file: Path) -> int:
    """How many bytes of the file this process has mapped, and the system has found."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    places = [i for i, line in enumerate(lines) if line.endswith(f" {file}")]
    found = [next(line for line in lines[i:] if line.startswith("Rss:")) for i in places]
    return sum(int(line.split()[1]) << 10 for line in found)


def test_the_system_finds_all_pages_beside_the_start(tmp_path: Path) -> None:
    def found() -> None:
        for thread in threading.enumerate():
            if thread.name == kept.THREAD:
                thread.join(WAIT_S)

    made = functools.partial(kept.KeptWeights, tmp_path, 1 << 30, {"of": "a test"})
    weights = made()
    weights.keep([memoryview(random.Random(0).randbytes(1 << 23))])
    assert weights.written.wait(WAIT_S)
    made().open()  # which reads all of it, to compare it
    found()
    assert resident(weights.path) == 0
    file = weights.open()
    assert file is not None
    assert weights.open() is file
    assert file.find(1 << 23) is not None
    file.finish()
    found()
    assert resident(weights.path) >= 1 << 23


@pytest.mark.parametrize("damaged", [False, True])
def test_they_are_opened_before_there_is_memory_for_a_cache(
    damaged: bool, base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logits(base, tmp_path / "kept")
    (file,) = files(tmp_path / "kept")
    if damaged:
        damage(file, "a bit is another")
    made = assembled(base, tmp_path / "kept", engine={"max_batch_size": 2})
    opened = []

    def await_memory() -> None:
        assert not {"model", "length", "context", "pool"} & {*vars(made)}
        assert made.kept_weights is not None
        opened.append(made.kept_weights.mapped > 0)

    with caplog.at_level(logging.INFO):
        made.load(lambda *_: None, await_memory)
    assert opened == [not damaged]
    assert caplog.text.count(DROPPED) == damaged
    assert caplog.text.count("packed weights: mapped") == (not damaged)
    assert made.kept_weights is not None
    assert made.kept_weights.written.wait(WAIT_S)


def test_a_note_that_cannot_be_written(base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = logits(base, tmp_path / "kept")
    (file,) = files(tmp_path / "kept")
    file.with_suffix(kept.COMPARED).mkdir()
    assert torch.equal(plain, logits(base, tmp_path / "kept"))
    assert "that packed weights were compared cannot be kept" in caplog.text
    assert DROPPED not in caplog.text


def test_a_folder_in_place_of_the_file(base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What cannot be mapped or removed keeps no engine from starting."""
    plain = logits(base, tmp_path / "kept")
    (file,) = files(tmp_path / "kept")
    file.unlink()
    file.mkdir()
    assert torch.equal(plain, logits(base, tmp_path / "kept"))
    assert "cannot be" in caplog.text


@pytest.mark.parametrize("noticed", ["the system's date", "samples"])
def test_another_checkpoint_in_the_same_place(
    noticed: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tensors have the same names and shapes, its files the same sizes and dates."""
    if noticed == "samples":  # as where the file system keeps no date of its own
        monkeypatch.setattr(identity, "_dates", lambda file: (file.stat().st_mtime_ns, 0))
    else:
        monkeypatch.setattr(identity, "_samples", lambda path, number: ())
    path = tmp_path / "model"
    shutil.copytree(base, path)
    before = logits(path, tmp_path / "kept")
    (file,) = path.glob("*.safetensors")
    dates, data = file.stat(), bytearray(file.read_bytes())
    data[-1] ^= 0x80  # the sign of a float
    file.write_bytes(data)
    os.utime(file, ns=(dates.st_atime_ns, dates.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (dates.st_size, dates.st_mtime_ns)
    after = logits(path, tmp_path / "kept")
    assert torch.equal(after, logits(path, None))
    assert not torch.equal(after, before)
    assert len(files(tmp_path / "kept")) == 2


@pytest.mark.parametrize("number", [2, 64])
@pytest.mark.parametrize("size", [0, 1, 5000, 1 << 20])
def test_samples_are_few_and_reach_both_ends(size: int, number: int, tmp_path: Path) -> None:
    data = random.Random(size).randbytes(size)
    (tmp_path / "file").write_bytes(data)
    samples = [*identity._samples(tmp_path / "file", number)]
    assert len(samples) == number
    assert all(len(each) <= identity.SAMPLE for each in samples)
    assert data.startswith(samples[0])
    assert data.endswith(samples[-1])
    assert bool(samples[0]) == bool(samples[-1]) == bool(data)


def test_what_is_packed_otherwise_has_a_file_of_its_own(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "kept"
    ways: list[dict[str, Any]] = [
        {},
        {"model": {"quantization": "int8"}},
        {"model": {"quantization": "int8", "activations": "plain"}},
        {"model": {"quantization": "int8", "plain_layers": ["*.q_proj.weight"]}},
        {"model": {"dtype": "bfloat16"}},
        {"adapters": {"folder": str(tmp_path)}},
    ]
    for count, way in enumerate(ways, 1):
        logits(base, cache, **way)
        assert len(files(cache)) == count, way
    first, second = assembled(base, cache, **ways[-1]), assembled(base, cache, **ways[-1])._second(str(base), 64)
    paths = [
        each.kept_weights.path for each in (first, second, assembled(base, cache)) if each.kept_weights is not None
    ]
    assert paths[0] != paths[1] == paths[2], "a model that drafts is packed without places for adapters"
    monkeypatch.setenv("INFER_CPU_LEVEL", "portable")
    logits(base, cache)
    assert len(files(cache)) == len(ways) + 1
    for way in ways:
        logits(base, cache, **way, kernels={"backend": "reference"})
    assert len(files(cache)) == len(ways) + 1


def test_a_kernel_that_changes_is_noticed(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its level, version and settings stay the same."""
    logits(base, tmp_path)
    monkeypatch.setattr("infer_kernels_cpu.native.digest", lambda level: "another")
    logits(base, tmp_path)
    assert len(files(tmp_path)) == 2


def test_files_take_no_more_than_they_may(base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The one that was used last stays."""
    cache, size = tmp_path / "kept", 0.0
    quantized: dict[str, Any] = {"quantization": "int8"}
    logits(base, cache)
    size = files(cache)[0].stat().st_size / 2**30
    (plain,) = files(cache)
    logits(base, cache, model=quantized)
    (other,) = {*files(cache)} - {plain}
    os.utime(plain, (1, 1))
    os.utime(other, (2, 2))
    logits(base, cache)  # plain is mapped
    logits(base, cache, model={"dtype": "bfloat16", "weight_cache_gib": 1.7 * size})
    assert plain in files(cache)
    assert other not in files(cache)
    assert len(files(cache)) == 2
    with caplog.at_level(logging.INFO):
        logits(base, cache, model={"quantization": "int4", "weight_cache_gib": 0.01 * size})
    assert "packed weights are not kept" in caplog.text
    assert "model.weight_cache_gib" in caplog.text
    assert len(files(cache)) == 2


def test_a_disk_that_is_full(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache, plain = tmp_path / "kept", logits(base, None)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(kept, "_pieces", full)
        assert torch.equal(plain, logits(base, cache))
    assert f"packed weights cannot be kept in {cache}: No space left on device" in caplog.text
    assert files(cache) == []
    with monkeypatch.context() as patched:
        patched.setattr("os.statvfs", lambda path: SimpleNamespace(f_bavail=10, f_frsize=4096))
        with caplog.at_level(logging.INFO):
            logits(base, cache)
    assert "and the disk has 0.0 free" in caplog.text
    assert files(cache) == []


def test_a_process_that_ends_leaves_no_half_of_a_file(base: Path, tmp_path: Path) -> None:
    """One that ends while it writes, and one that was killed."""
    script = f"""
import atexit
from infer.assemble import identity, kept
from infer.assemble.kept import KeptWeights
from pathlib import Path

def endless(parts):
    print("it writes", flush=True)
    while True:
        yield memoryview(b"half")

kept.LEAST, kept._pieces = 0, endless
KeptWeights(Path({str(tmp_path)!r}), 1 << 30, {{}}).keep([memoryview(bytes(64))])
input()
"""
    with subprocess.Popen([sys.executable, "-c", script], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "it writes\n"
        assert [file.suffix for file in files(tmp_path)] == [".unfinished"]
        process.communicate("\n", WAIT_S)
        assert process.returncode == 0
    assert files(tmp_path) == []
    (tmp_path / f"some.{process.pid}.unfinished").touch()
    (tmp_path / f"some.{os.getpid()}.unfinished").touch()
    logits(base, tmp_path)
    assert sorted(file.suffix for file in files(tmp_path)) == [".safetensors", ".unfinished"]


def test_small_models_are_packed_sooner_than_they_are_found(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "LEAST", 64 << 20)
    logits(base, tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


def test_a_cache_leaves_room_for_what_is_mapped(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system counts a file's pages as free, even those that an engine needs all the time."""
    monkeypatch.setattr("infer.device.free_memory", lambda device: 1 << 22)
    sections: dict[str, Any] = {"engine": {"max_batch_size": 64}, "cache": {"paged": {"memory_fraction": 1.0}}}
    sizes = [assembled(base, None, **sections).pool.nbytes]
    for _ in range(2):
        made = assembled(base, tmp_path / "kept", **sections)
        sizes.append(made.pool.nbytes)
        assert made.kept_weights is not None
        assert made.kept_weights.written.wait(WAIT_S)
    page = made.pool.nbytes // (made.pool.free_tokens() // 16)
    (file,) = files(tmp_path / "kept")
    assert sizes[0] == sizes[1]
    assert abs(sizes[0] - sizes[2] - file.stat().st_size) <= page < sizes[0] - sizes[2]


@torch.inference_mode()
@pytest.mark.parametrize("quantization", [None, "int4"])
def test_a_coarse_head_is_mapped(quantization: str | None, tmp_path: Path, packings: list[int]) -> None:
    """That of a draft head, which is made of a weight that is packed itself."""
    path, found = with_head(tmp_path / "model", "qwen3_5"), list[Tensor]()
    for cache in (None, tmp_path / "kept", tmp_path / "kept"):
        packings[0] = 0
        made = assembled(path, cache, model={"quantization": quantization}, engine={"speculation": "mtp"})
        model = made.model
        assert isinstance(model, DraftingModel)
        assert model.draft_head is not None
        hidden_ND = torch.randn(3, model.draft_head.hidden_size, generator=torch.Generator().manual_seed(1))
        found.append(model.draft_head.logits(hidden_ND))
        if made.kept_weights is not None:
            assert made.kept_weights.written.wait(WAIT_S)
    assert packings == [0]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_cache_leaves_room_for_a_head_that_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken, make = list[int](), Assembly.make_pool

    def noted(self: Assembly, model: ModelProtocol, besides: int, **how: Any) -> CachePoolProtocol:
        taken.append(besides)
        return make(self, model, besides, **how)

    monkeypatch.setattr(Assembly, "make_pool", noted)
    base, head = write_checkpoint(tmp_path / "llama", "llama"), write_eagle(tmp_path / "head")
    engine = {"speculation": "eagle3", "eagle3": {"path": str(head)}}
    for _ in range(2):
        made = assembled(base, tmp_path / "kept", engine=engine)
        assert made.pool.nbytes
        for each in made._loaded:
            assert each.kept_weights is not None
            assert each.kept_weights.written.wait(WAIT_S)
    mapped = [file.stat().st_size for file in files(tmp_path / "kept")]
    assert len(mapped) == 2
    assert taken[1] - taken[0] == sum(mapped)


class Checks(list[str]):
    """What becomes of checks, at the start and in idle engines."""

    def __init__(self) -> None:
        self.over, self.begun = threading.Event(), threading.Event()
        self.endless = False
        """Whether idle checks do not end until something is asked."""


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Checks:
    seen = Checks()

    def watched(kind: str) -> Any:
        @functools.wraps(checking)
        def check(*parts: Any, **sizes: Any) -> Any:
            seen.append(f"{kind} begins")
            try:
                while "idle" in kind and seen.endless:
                    seen.begun.set()
                    yield
                faults = yield from checking(*parts, **sizes)
            except GeneratorExit:
                seen.append(f"{kind} is left")
                raise
            seen.append(f"{kind} ends")
            if "idle" in kind:
                seen.over.set()
            return faults

        return check

    monkeypatch.setattr("infer.assemble.assembly.checking", watched("the idle one"))
    monkeypatch.setattr("infer.assemble.assembly.self_check", in_one_go(watched("the first")))
    monkeypatch.setattr("infer.engine.engine.QUIET_S", 0.0)
    return seen


def started(path: Path, cache: Path, plugins: Sequence[object] = (), **engine: Any) -> LLM:
    sections: dict[str, Any] = {
        "engine": {"max_batch_size": 2, "max_seq_len": 64, **engine},
        "kernels": {"backend": "cpu", "threads": 1},
        "model": {"weight_cache": str(cache)},
    }
    llm = LLM(str(path), plugins=plugins, **sections)
    for thread in threading.enumerate():
        if thread.name == kept.THREAD:
            thread.join(WAIT_S)
    return llm


def settle(llm: LLM, checks: Checks) -> None:
    """Wait until an idle check has come to its end."""
    assert checks.over.wait(WAIT_S)
    llm.loop.between_steps(lambda: None).result(WAIT_S)


FIRST = ["the first begins", "the first ends"]
CONFIRMED = ["the idle one begins", "the idle one ends"]


def test_a_verdict_is_kept_and_confirmed_while_nothing_is_asked(
    base: Path, tmp_path: Path, checks: Checks, caplog: pytest.LogCaptureFixture
) -> None:
    with started(base, tmp_path) as llm:
        free = llm.loop._engine._reporter._pool.free_tokens()
    assert checks == FIRST
    with caplog.at_level(logging.INFO), started(base, tmp_path) as llm:
        settle(llm, checks)
        assert llm.served.exact
        assert llm.loop._engine._reporter._pool.free_tokens() == free
    assert checks[-2:] == CONFIRMED
    assert "the check finds what an earlier start had found" in caplog.text


def test_a_check_is_left_for_what_is_asked_and_begins_anew(base: Path, tmp_path: Path, checks: Checks) -> None:
    with started(base, tmp_path) as llm:
        expected = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, temperature=0))[0].token_ids
    checks.endless = True
    with started(base, tmp_path) as llm:
        assert checks.begun.wait(WAIT_S)
        checks.endless = False
        found = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, temperature=0))[0].token_ids
        settle(llm, checks)
    assert found == expected
    assert checks == [*FIRST, "the idle one begins", "the idle one is left", *CONFIRMED]


def test_a_verdict_that_is_not_confirmed(
    base: Path, tmp_path: Path, checks: Checks, caplog: pytest.LogCaptureFixture
) -> None:
    with started(base, tmp_path):
        pass
    (verdict,) = tmp_path.glob("*.verdict.json")
    verdict.write_text('{"faults": ["made up"]}')
    with started(base, tmp_path) as llm:
        assert "not exact: made up" in caplog.text
        settle(llm, checks)
        assert llm.served.exact
    assert "exactness: the check finds what an earlier start had not: nothing varies" in caplog.text
    assert json.loads(verdict.read_text()) == {"faults": []}
    assert checks == [*FIRST, *CONFIRMED]


@pytest.mark.parametrize("text", ["", "[]", '{"faults": 3}', '{"other": []}'])
def test_a_verdict_that_is_damaged(text: str, base: Path, tmp_path: Path, checks: Checks) -> None:
    with started(base, tmp_path):
        pass
    (verdict,) = tmp_path.glob("*.verdict.json")
    verdict.write_text(text)
    with started(base, tmp_path):
        pass
    assert checks == 2 * FIRST
    assert json.loads(verdict.read_text()) == {"faults": []}


def test_a_verdict_is_on_sizes_and_goes_with_its_weights(base: Path, tmp_path: Path, checks: Checks) -> None:
    with started(base, tmp_path):
        pass
    with started(base, tmp_path, max_batch_size=3):
        pass
    assert checks == 2 * FIRST
    assert len([*tmp_path.glob("*.verdict.json")]) == 2
    (weights,) = tmp_path.glob("*.safetensors")
    damage(weights, "a bit is another")
    with started(base, tmp_path):
        pass
    assert checks == 3 * FIRST
    assert len([*tmp_path.glob("*.verdict.json")]) == 1


def test_what_is_not_kept_has_no_verdict(
    base: Path, tmp_path: Path, checks: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "LEAST", 64 << 20)
    for _ in range(2):
        with started(base, tmp_path):
            pass
    assert checks == 2 * FIRST
    assert files(tmp_path) == []


@pytest.mark.slow
def test_no_compiler_is_imported_for_weights_without_values(tmp_path: Path) -> None:
    """torch's takes seconds, as long as everything else in a start."""
    paths = [str(write_checkpoint(tmp_path / family, family)) for family in FAMILIES]
    script = f"""
import sys
from infer.assemble.assembly import Assembly
from infer.commands.doctor import Doctor
from infer.plugins.discovery import Plugins
from infer.settings import load_settings

plugins = Plugins.discover()
for path in {paths!r}:
    for quantization in (None, "int4"):
        model = {{"path": path, "quantization": quantization}}
        loaded = load_settings(plugins, env={{}}, overrides={{"model": model}}, read_file=False)
        assembly = Assembly(loaded.settings, plugins)
        assembly.weights.sketch(assembly.context)
        assert "torch._dynamo" not in sys.modules, (path, quantization)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=WAIT_S)
