"""Damaged and hostile files are refused in one sentence, at once and without taking memory by their numbers."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.formats.gguf.files import write_gguf
from tests.models.checkpoints import Family, write_checkpoint

from infer import LLM
from infer.checkpoint import Checkpoint
from infer.commands import cli
from infer.errors import CheckpointError
from infer_formats.gguf import GGUF, GGUFFormat
from infer_formats.gguf.header import MAX_VALUES, read_header
from infer_formats.gguf.metadata import Metadata

U32, STRING, ARRAY = 4, 8, 9
MANY = 1 << 62
SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
FAST: dict[str, Any] = {"kernels": {"backend": "reference", "threads": 1}, "cache": {"backend": "slotted"}}


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def setting(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dimensions + struct.pack("<IQ", kind, offset)


def file_of(*parts: bytes, settings: int = 0, tensors: int = 0, version: int = 3, data: int = 0) -> bytes:
    header = b"GGUF" + struct.pack("<IQQ", version, tensors, settings) + b"".join(parts)
    return header + bytes(-len(header) % 32) + bytes(data)


def array(kind: int, count: int, values: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + values


BAD = {
    "empty": (b"", "is no GGUF file: it has 0 bytes"),
    "magic": (b"PK" + bytes(40), "is no GGUF file: it does not begin with 'GGUF'"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid", "it is a Git LFS pointer, not the file itself"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "it is big-endian, but infer reads little-endian GGUF"),
    "version 1": (file_of(version=1), "it has version 1, but infer reads little-endian GGUF of the versions 2 and 3"),
    "settings": (file_of(settings=MANY), f"it claims {MANY} settings"),
    "tensors": (file_of(tensors=MANY), f"it claims {MANY} tensors"),
    "settings beyond": (file_of(settings=60_000), "its header goes on beyond the end of the file, at 32 bytes"),
    "long key": (file_of(struct.pack("<Q", MANY), settings=1), "its header goes on beyond the end of the file"),
    "long array": (file_of(setting("a", ARRAY, array(0, MANY)), settings=1), f"a claims {MANY} values"),
    "empty array": (file_of(setting("a", ARRAY, array(STRING, MAX_VALUES)), settings=1), "goes on beyond the end"),
    "nested": (file_of(setting("a", ARRAY, array(ARRAY, 1, array(0, 0))), settings=1), "array of the unknown type 9"),
    "kind": (file_of(setting("a", 13, bytes(8)), settings=1), "a is of the unknown type 13"),
    "text": (file_of(setting("a", STRING, text(b"\xff\xfe")), settings=1), "the text at byte 37 is not UTF-8"),
    "twice": (file_of(setting("a", 0, b"\1") * 2, settings=2), "it has the setting 'a' twice"),
    "tensor twice": (file_of(tensor("t", (1,)) * 2, tensors=2, data=4), "it has the tensor 't' twice"),
    "dimensions": (file_of(tensor("t", (1,) * 5), tensors=1), "the tensor 't' has 5 dimensions"),
    "no dimensions": (file_of(tensor("t", ()), tensors=1), "the tensor 't' has 0 dimensions"),
    "no rows": (file_of(tensor("t", (32, 0)), tensors=1), r"'t' has shape \[0, 32\]"),
    "large": (file_of(tensor("t", (MANY, MANY)), tensors=1), r"the tensor 't' ends at byte \d+, but the file has 96"),
    "far": (file_of(tensor("t", (1,), offset=MANY), tensors=1), "the tensor 't' ends at byte .*, but the file has 64"),
    "cut": (file_of(tensor("t", (9,)), tensors=1, data=32), "the tensor 't' ends at byte 100, but the file has 96"),
    "odd": (file_of(tensor("t", (1,), offset=4), tensors=1, data=99), "the tensor 't' is not aligned to 32 bytes"),
    "blocks": (file_of(tensor("t", (40, 2), 8), tensors=1), r"shape \[2, 40\], which Q8_0, in blocks of 32, cannot"),
    "known type": (
        file_of(tensor("t", (256,), 10), tensors=1),
        "the tensor 't' is of type Q2_K; infer reads F32, F16",
    ),
    "type": (file_of(tensor("t", (256,), 77), tensors=1), "the tensor 't' is of type 77; infer reads F32, F16"),
    "alignment": (
        file_of(setting("general.alignment", U32, struct.pack("<I", 0)), settings=1),
        "general.alignment is 0; it has to be a power of two",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file(case: str, tmp_path: Path) -> None:
    raw, says = BAD[case]
    file = tmp_path / "model.gguf"
    file.write_bytes(raw)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=says) as caught:
        read_header(file)
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small checkpoint."""
    folder = write_checkpoint(tmp_path_factory.mktemp("sound") / "hub", "llama", **SMALL)
    write_gguf(folder, folder / "model.gguf", "Q8_0")
    return (folder / "model.gguf").read_bytes()


@settings(max_examples=examples(300, 100), suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_damage_is_a_checkpoint_error_or_none(data: st.DataObject, sound: bytes, tmp_path: Path) -> None:
    """Bytes of the header are changed, and the file is cut."""
    raw = bytearray(sound)
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, 9000))
        raw[at] = data.draw(st.sampled_from([0, 1, 127, 128, 255]) | st.integers(0, 255))
    file = tmp_path / "model.gguf"
    file.write_bytes(raw[: data.draw(st.just(len(raw)) | st.integers(0, len(raw)))])
    try:
        read_all(file)
    except CheckpointError as error:
        text = str(error)
        assert text.endswith(".")
        assert "\n" not in text


def read_all(file: Path) -> None:
    container = GGUF(file)
    checkpoint = Checkpoint(container)
    _ = checkpoint.sampling, checkpoint.special_tokens, checkpoint.chat_template, checkpoint.max_positions
    container.tokenizer()
    weights = GGUFFormat(checkpoint.config, container.tensors())
    for name in weights.names():
        weights.weight(name)


Edit = Callable[[gguf.GGUFWriter, dict[str, Any]], None]


def edited(key: str, value: Any) -> Edit:
    """A file with another value of a setting; None for none."""

    def edit(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
        writer.kv_data[0].pop(key, None)
        adders: dict[type, Callable[[str, Any], None]] = {str: writer.add_string, list: writer.add_array}
        adders |= {int: writer.add_int64, float: writer.add_float32, bool: writer.add_bool}
        if value is not None:
            adders[type(value)](key, value)

    return edit


def mixed_up(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Says that there are two experts, and brings three."""
    writer.add_expert_count(2)
    writer.add_expert_used_count(1)
    writer.add_tensor("blk.0.ffn_gate_exps.weight", torch.ones(3, 72, 48).numpy())


def odd(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """A tensor of gates and ups that cannot have as many of both."""
    writer.add_expert_count(2)
    writer.add_expert_used_count(1)
    writer.add_tensor("blk.0.ffn_gate_up_exps.weight", torch.ones(2, 71, 48).numpy())


WRONG: dict[str, tuple[Edit, str]] = {
    "architecture": (
        edited("general.architecture", "mamba"),
        "architecture 'mamba'; .* llama, qwen2, qwen3, gemma2, gemma3",
    ),
    "no architecture": (
        edited("general.architecture", None),
        "is of the architecture None; infer reads",
    ),
    "size": (
        edited("llama.embedding_length", "wide"),
        "llama.embedding_length is 'wide'; it has to be one whole",
    ),
    "huge": (edited("llama.embedding_length", 1 << 40), f"llama.embedding_length is {1 << 40}; it has to be one whole"),
    "negative": (edited("llama.block_count", -1), "llama.block_count is -1; it has to be one whole number from 1"),
    "layers": (
        edited("llama.block_count", 10**6),
        "num_hidden_layers is 1000000; it has to be",
    ),
    "none": (edited("llama.context_length", None), "does not say llama.context_length"),
    "short": (edited("llama.context_length", 1), "max_position_embeddings is 1; it has to be an integer from 2 \\("),
    "eps": (
        edited("llama.attention.layer_norm_rms_epsilon", None),
        "does not say llama.attention.layer_norm_rms",
    ),
    "nan": (edited("llama.rope.freq_base", float("nan")), "llama.rope.freq_base is nan; it has to be a number"),
    "heads": (edited("llama.attention.head_count", [4, 3]), r"head_count is \[4, 3\]; it has to be one whole number"),
    "values": (edited("llama.attention.value_length", 9), "the heads' keys have 12 values; infer needs as many"),
    "rotated": (edited("llama.rope.dimension_count", 6), "dimension_count is 6; it has to be the size of a head, 12"),
    "several widths": (
        edited("llama.feed_forward_length", [72, 56]),
        r"feed_forward_length is \[72, 56\]; it has to be one whole number",
    ),
    "encoder": (edited("llama.attention.causal", False), "attention.causal is False; it has to be true: infer serves"),
    "width": (edited("llama.embedding_length", 64), r"has shape \[320, 48\], but .*\.gguf asks for \[320, 64\]"),
    "experts": (edited("llama.expert_count", 5000), "expert_count is 5000; it has to be at most 4096 for llama"),
    "shares": (edited("llama.expert_count", 8), "does not say llama.expert_used_count"),
    "stacks": (mixed_up, "'blk.0.ffn_gate_exps.weight' has shape .*, but there are 2 experts"),
    "halves": (odd, "'blk.0.ffn_gate_up_exps.weight' has shape .*; its rows have to be as many gates as ups"),
    "split": (edited("split.count", 3), "is one of 3 parts of a checkpoint; .* ends in -00001-of-00003.gguf"),
    "scaling": (
        edited("llama.rope.scaling.type", "su"),
        "type is 'su'; it has to be none, linear, yarn",
    ),
    "template": (edited("tokenizer.chat_template", 7), "tokenizer.chat_template is 7; it has to be a text"),
    "tokens": (edited("tokenizer.ggml.tokens", [1, 2]), r"tokens is \[1, 2\]; it has to be a list of strs"),
    "sampling": (edited("general.sampling.temp", "hot"), "temperature is 'hot': Input should be a valid number"),
    "end": (
        edited("tokenizer.ggml.eot_token_id", 4000),
        "has 4000, but the model's token ids are 0 to 319",
    ),
}


MIXED: dict[str, tuple[Family, str, Any, str]] = {
    "kv heads": ("lfm2", "lfm2.attention.head_count_kv", 2, "is 2; it has to be for each of 4 layers either 0 or the"),
    "unlike": ("lfm2", "lfm2.attention.head_count_kv", [0, 2, 1, 0], r"is \[0, 2, 1, 0\]; it has to be for each of 4"),
    "none": ("lfm2", "lfm2.attention.head_count_kv", [0] * 4, r"is \[0, 0, 0, 0\]; it has to be for each of 4 layers"),
    "few": ("lfm2", "lfm2.attention.head_count_kv", [0, 2], r"is \[0, 2\]; it has to be for each of 4 layers"),
    "silent": ("nemotron_h", "nemotron_h.feed_forward_length", None, "does not say nemotron_h.feed_forward_length"),
    "size": ("nemotron_h", "nemotron_h.ssm.inner_size", 50, "is 50; it has to be a multiple of ssm.time_step_rank, 6"),
    "expand": ("granite_hybrid", "granitehybrid.ssm.inner_size", 60, "is 60; .* a multiple of embedding_length, 48"),
    "delta heads": ("qwen3_5", "qwen35.ssm.time_step_rank", 5, "is 5; it has to be a multiple of ssm.group_count, 2"),
    "delta sizes": ("qwen3_5", "qwen35.ssm.inner_size", 50, "is 50; it has to be a multiple of ssm.time_step_rank, 6"),
    "drafting": ("qwen3_5", "qwen35.nextn_predict_layers", 4, "is 4; it has to be fewer than block_count, 4"),
    "tied": (
        "falcon_h1",
        "falcon-h1.vocab_size",
        None,
        "lacks 'output.weight', and a file of falcon-h1 does not say what",
    ),
    "still": (
        "granite",
        "granite.rope.scaling.finetuned",
        False,
        "finetuned is False; it has to be true: infer reads no",
    ),
    "groups": (
        "nemotron_h",
        "nemotron_h_moe.expert_group_count",
        4,
        "expert_group_count is 4; it has to be 1: infer chooses no groups of experts",
    ),
    "latent key": (
        "deepseek_v3",
        "deepseek2.attention.key_length_mla",
        None,
        "does not say deepseek2.attention.key_length_mla",
    ),
    "latent size": (
        "deepseek_v3",
        "deepseek2.attention.key_length_mla",
        24,
        r"'blk.0.attn_k_b.weight' has shape \[4, 20, 12\]; by the settings of the file, it has to be \[4, 20, 16\]",
    ),
    "latent rank": (
        "deepseek_v3",
        "deepseek2.attention.kv_lora_rank",
        None,
        "does not say deepseek2.attention.kv_lora",
    ),
    "latent rotation": (
        "youtu",
        "deepseek2.rope.dimension_count",
        20,
        "key_length_mla is 20; it has to be more than rope.dimension_count, 20",
    ),
    "latent temperature": (
        "deepseek_v2",
        "deepseek2.attention.temperature_scale",
        0.1,
        "temperature_scale is 0.1.*; it has to be 0: infer reads no attention that is scaled by positions",
    ),
    "growing queries": (
        "ministral3",
        "mistral3.rope.scaling.type",
        None,
        "temperature_scale is 0.1.*; it has to be 0, as rope.scaling.type is not yarn",
    ),
    "windows' base": ("olmo3", "olmo2.rope.freq_base_swa", 7.0, "is 7.0; it has to be rope.freq_base, 10000"),
    "latent gating": (
        "deepseek_v3",
        "deepseek2.expert_gating_func",
        4,
        "expert_gating_func is 4; it has to be 1, a softmax, or 2, a sigmoid",
    ),
    "delta gating": (
        "kimi_linear",
        "kimi-linear.expert_gating_func",
        1,
        "expert_gating_func is 1; it has to be 2, a sigmoid",
    ),
    "delta size": ("kimi_linear", "kimi-linear.kda.head_dim", None, "does not say kimi-linear.kda.head_dim"),
    "latent shares": ("deepseek_v2", "deepseek2.expert_weights_norm", True, "norm_topk_prob.*False"),
    "latent layers": (
        "deepseek_v3",
        "deepseek2.nextn_predict_layers",
        4,
        "nextn_predict_layers is 4; it has to be fewer than block_count, 4",
    ),
    "gating": ("lfm2_moe", "lfm2moe.expert_gating_func", 1, "expert_gating_func is 1; it has to be 2, a sigmoid"),
}


@pytest.mark.parametrize("case", MIXED)
def test_settings_of_layers_of_several_kinds_that_are_wrong(case: str, tmp_path: Path) -> None:
    family, key, value, says = MIXED[case]
    mixed: dict[str, Any] = {"hybrid_override_pattern": "ME*M"} if key.startswith("nemotron_h_moe") else {}
    folder = write_checkpoint(tmp_path / "hub", family, **mixed)
    write_gguf(folder, tmp_path / "model.gguf", edit=edited(key, value))
    with pytest.raises(CheckpointError, match=says), LLM(str(tmp_path / "model.gguf"), **FAST):
        pass


@pytest.mark.parametrize("case", WRONG)
def test_settings_that_are_wrong(case: str, tmp_path: Path) -> None:
    edit, says = WRONG[case]
    folder = write_checkpoint(tmp_path / "hub", "llama", num_hidden_layers=1)
    write_gguf(folder, tmp_path / "model.gguf", edit=edit)
    with pytest.raises(CheckpointError, match=says) as caught, LLM(str(tmp_path / "model.gguf"), **FAST):
        pass
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("sizes", [[], [3, -1], [3, 1 << 40]])
def test_a_list_of_sizes_that_is_wrong(sizes: list[int]) -> None:
    meta = Metadata(Path("model.gguf"), {"widths": sizes})
    with pytest.raises(
        CheckpointError, match=r"^model.gguf: widths is .*; it has to be one or more whole numbers from 0"
    ):
        meta.each("widths")


def test_tensors_that_are_missing_or_unknown(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "hub", "qwen3", num_hidden_layers=2)
    odd = torch.ones(3).numpy()
    write_gguf(folder, tmp_path / "model.gguf", edit=lambda writer, _: writer.add_tensor("blk.0.odd.weight", odd))
    with pytest.raises(CheckpointError, match=r"holds the tensor 'blk.0.odd.weight', which this model does not have"):
        LLM(str(tmp_path / "model.gguf"), **FAST)
    write_gguf(folder, tmp_path / "model.gguf", edit=edited("qwen3.block_count", 3))
    with pytest.raises(CheckpointError, match=r"lacks 'model.layers.2.input_layernorm.weight', .* more"):
        LLM(str(tmp_path / "model.gguf"), **FAST)


def test_the_command_line_says_it_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(BAD["big-endian"][0])
    assert cli.main(["generate", "--model.path", str(file), "hello"]) == 2
    assert "it is big-endian" in capsys.readouterr().err
