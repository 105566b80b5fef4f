"""Quantized checkpoints that are damaged, hostile, or of a kind that is not read: one sentence says why."""

from __future__ import annotations

import copy
import functools
import logging
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.core.commands.test_cli import infer
from tests.examples import examples
from tests.formats import writers
from tests.formats.writers import awq, compressed, fp8, gptq, scheme
from torch import Tensor

from infer import LLM
from infer.errors import CheckpointError
from infer.weight import GroupedWeight, Weight
from infer_formats import infer_weight_formats
from infer_formats.config import Patterns

Q, V = "layers.0.q_proj", "layers.0.v_proj"
GROUPS = {"config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 16}}}}
CONFIGS: dict[str, dict[str, Any]] = {
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "pack-quantized", **GROUPS},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False, "desc_act": False},
    "fp8": {"quant_method": "fp8", "weight_block_size": [8, 16]},
}
PACK: Mapping[str, Callable[[str, Tensor], writers.Packed]] = {
    "compressed-tensors": compressed(scheme(num_bits=4, strategy="group", group_size=16), torch.bfloat16),
    "awq": awq(16),
    "gptq": gptq(group_size=16, symmetric=False),
    "fp8": fp8((8, 16)),
}
METHODS = tuple(CONFIGS)


class Files(dict[str, Tensor]):
    """A TensorFilesProtocol of tensors in memory."""

    def names(self) -> list[str]:
        return list(self)

    def tensor(self, name: str) -> Tensor:
        return self[name]


@functools.cache
def stored(method: str) -> MappingProxyType[str, Tensor]:
    """Two quantized modules and a plain one."""
    files = Files({"norm.weight": torch.ones(32)})
    for i, module in enumerate((Q, V)):
        kinds, _ = PACK[method](module, torch.randn(16, 32, generator=torch.Generator().manual_seed(i)))
        files |= {f"{module}.{kind}": tensor.contiguous() for kind, tensor in kinds.items()}
    return MappingProxyType(files)  # tests share it


def read(method: str, config: Any = None, files: Mapping[str, Tensor] | None = None) -> dict[str, Weight]:
    """All weights, by a reader made with ``config``."""
    (format,) = [r for r in infer_weight_formats() if method in r.methods]
    config = {"quantization_config": CONFIGS[method] if config is None else config}
    made = format.factory(config, Files(stored(method) if files is None else files), format.settings())
    return {name: made.weight(name) for name in made.names()}


def refusal(method: str, config: Any = None, files: Mapping[str, Tensor] | None = None) -> str:
    with pytest.raises(CheckpointError) as refused:
        read(method, config, files)
    sentence = str(refused.value)
    assert "\n" not in sentence
    assert len(sentence) < 600
    assert sentence.endswith(".")
    return sentence


def changed(method: str, path: str, value: Any) -> dict[str, Any]:
    """The config with another value at a path; ... for none at all."""
    config = copy.deepcopy(CONFIGS[method])
    table: Any = config
    *parents, key = path.split("/")
    for parent in parents:
        table = table.setdefault(parent, {})
    if value is ...:
        del table[key]
    else:
        table[key] = value
    return config


@pytest.mark.parametrize("method", METHODS)
def test_what_is_stored_here_is_read(method: str) -> None:
    weights = read(method)
    assert set(weights) == {"norm.weight", f"{Q}.weight", f"{V}.weight"}
    assert isinstance(weights[f"{Q}.weight"], GroupedWeight) == (method != "fp8")


G = "config_groups/g"
AT = "quantization_config.config_groups.g"
INT8 = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
CONFIG_CASES: list[tuple[str, str, Any, str]] = [
    (
        "compressed-tensors",
        "format",
        "marlin-24",
        "quantization_config.format is 'marlin-24'; compressed-tensors: infer",
    ),
    ("compressed-tensors", "format", None, "format is None"),
    ("compressed-tensors", "format", "mixed-precision", "format is 'mixed-precision'"),
    ("compressed-tensors", f"{G}/format", "nvfp4-pack-quantized", f"{AT}.format is 'nvfp4-pack-quantized'"),
    (
        "compressed-tensors",
        "config_groups",
        ...,
        "quantization_config.config_groups; compressed-tensors: Field required",
    ),
    ("compressed-tensors", "config_groups", {"W4A16": ["Linear"]}, "config_groups.W4A16 is ['Linear']"),
    ("compressed-tensors", "config_groups", {}, f"no group has a target for '{Q}'"),
    ("compressed-tensors", f"{G}/targets", ["LlamaMLP"], "its name, a pattern or 'Linear'"),
    ("compressed-tensors", f"{G}/targets", "Linear", f"{AT}.targets is 'Linear'"),
    ("compressed-tensors", "ignore", [Q], f"it names '{Q}', but the checkpoint has quantized weights of that"),
    ("compressed-tensors", "ignore", ["re:.*q_proj"], f"it names '{Q}'"),
    ("compressed-tensors", f"{G}/weights", None, f"{AT}.weights is None"),
    ("compressed-tensors", f"{G}/weights/num_bits", 3, "num_bits is 3; compressed-tensors: infer reads pack-quantized"),
    ("compressed-tensors", f"{G}/weights/num_bits", -4, "num_bits is -4"),
    ("compressed-tensors", f"{G}/weights/num_bits", "4", "num_bits is '4'"),
    ("compressed-tensors", f"{G}/weights/type", "float", f"{AT}.weights.type is 'float'"),
    ("compressed-tensors", f"{G}/weights/strategy", "tensor_group", "strategy is 'tensor_group'"),
    ("compressed-tensors", f"{G}/weights/strategy", "block", "strategy is 'block'"),
    ("compressed-tensors", f"{G}/weights/dynamic", True, "dynamic is True"),
    ("compressed-tensors", f"{G}/weights/group_size", 10**30, "group_size is 1000000000"),
    ("compressed-tensors", f"{G}/weights/group_size", 0, "group_size is 0"),
    ("compressed-tensors", f"{G}/weights/group_size", -16, "group_size is -16"),
    ("compressed-tensors", f"{G}/weights/group_size", 8, f"'{Q}.weight_scale' has shape [16, 2], but"),
    ("compressed-tensors", f"{G}/weights/group_size", None, f"'{Q}.weight_scale' has shape [16, 2], but"),
    ("compressed-tensors", f"{G}/weights/num_bits", 8, f"'{Q}.weight_packed' has shape [16, 4], but"),
    ("compressed-tensors", f"{G}/weights/symmetric", False, f"lacks '{Q}.weight_zero_point'"),
    ("compressed-tensors", "sparsity_config", {"format": "sparse-24-bitmask"}, "sparsity_config.format is 'sparse-24"),
    ("compressed-tensors", "transform_config", {"u": {}}, "quantization_config.transform_config is {'u': {}}"),
    ("compressed-tensors", f"{G}/input_activations", INT8 | {"dynamic": False}, "input_activations.dynamic is False"),
    ("compressed-tensors", f"{G}/input_activations", INT8 | {"num_bits": 4}, "input_activations.num_bits is 4"),
    ("compressed-tensors", f"{G}/output_activations", INT8, "output_activations is {"),
    ("compressed-tensors", "format", "int-quantized", f"lacks '{Q}.weight'"),
    ("awq", "bits", 8, "quantization_config.bits is 8; awq: Input should be 4"),
    ("awq", "bits", ..., "quantization_config.bits; awq: Field required"),
    ("awq", "version", "gemv", "version is 'gemv'; awq: Input should be 'gemm' or 'GEMM'"),
    ("awq", "version", 7, "version is 7"),
    ("awq", "zero_point", False, "zero_point is False"),
    ("awq", "group_size", 0, "group_size is 0; awq: Input should be -1 or greater than 0"),
    ("awq", "group_size", 32, f"'{Q}.scales' has shape [2, 16], but awq asks for [1, 16]"),
    ("gptq", "bits", 3, "bits is 3; gptq: Input should be 4 or 8"),
    ("gptq", "bits", True, "bits is True"),
    ("gptq", "bits", 8, f"'{Q}.qweight' has shape [4, 16], but gptq asks for [8, any]"),
    ("gptq", "group_size", 1.5, "group_size is 1.5"),
    ("gptq", "group_size", 8, f"'{Q}.scales' has shape [2, 16], but"),
    ("gptq", "checkpoint_format", "marlin", "checkpoint_format is 'marlin'"),
    ("gptq", "is_marlin_format", True, "is_marlin_format is True"),
    ("gptq", "pack_dtype", "int16", "pack_dtype is 'int16'"),
    ("gptq", "sym", True, f"sym is True; gptq: the zero points in '{Q}.qzeros' are others"),
    ("gptq", "dynamic", {"(": {}}, "quantization_config.dynamic.( is '('; gptq: this pattern cannot be used"),
    ("gptq", "dynamic", {".*": {"bits": 5}}, "quantization_config.dynamic..*.bits is 5"),
    ("fp8", "fmt", "e5m2", "fmt is 'e5m2'; fp8"),
    ("fp8", "activation_scheme", "sometimes", "activation_scheme is 'sometimes'"),
    ("fp8", "weight_block_size", [128], "weight_block_size is [128]"),
    ("fp8", "weight_block_size", [0, 8], "weight_block_size.0 is 0"),
    ("fp8", "weight_block_size", [16, 16], f"'{Q}.weight_scale_inv' has shape [2, 2], but fp8 asks for [1, 2] there"),
    (
        "fp8",
        "weight_block_size",
        None,
        f"'{Q}.weight_scale_inv' has shape [2, 2], but fp8 asks for [] or [1] or [1, 1]",
    ),
]


@pytest.mark.parametrize(("method", "path", "value", "says"), CONFIG_CASES)
def test_configs_that_are_refused(method: str, path: str, value: Any, says: str) -> None:
    assert says in refusal(method, changed(method, path, value))


CODES = {"compressed-tensors": "weight_packed", "awq": "qweight", "gptq": "qweight", "fp8": "weight"}
SCALES = {"compressed-tensors": "weight_scale", "awq": "scales", "gptq": "scales", "fp8": "weight_scale_inv"}


@pytest.mark.parametrize("method", METHODS)
def test_tensors_that_are_refused(method: str) -> None:
    codes, scales, good = f"{Q}.{CODES[method]}", f"{Q}.{SCALES[method]}", stored(method)

    def without(name: str) -> dict[str, Tensor]:
        return {other: tensor for other, tensor in good.items() if other != name}

    assert f"lacks {scales!r}, which {method} weights need" in refusal(method, files=without(scales))
    assert f"has {Q}." in refusal(method, files=without(codes)).replace("'", "")
    for dtype in (torch.int64, torch.uint8, torch.float32):
        wrong = good[codes].to(dtype)
        assert f"The tensor {codes!r} is of type {str(dtype)[6:]}; {method} has " in refusal(
            method, files=good | {codes: wrong}
        )
    wrong = good[scales].to(torch.float64)
    assert f"The tensor {scales!r} is of type float64" in refusal(method, files=good | {scales: wrong})
    cut = [] if method in ("awq", "fp8") else [good[codes][:-1]]  # the last block may be smaller
    for part in (good[codes][:0], good[codes][None], good[codes].flatten(), *cut):
        assert "has shape" in refusal(method, files=good | {codes: part.contiguous()})
    for part in (good[scales][1:], good[scales][:, 1:], good[scales].flatten()):
        assert f"The tensor {scales!r} has shape {list(part.shape)}, but {method} asks for [" in refusal(
            method, files=good | {scales: part.contiguous()}
        )


def test_layouts_by_the_keys_of_other_writers() -> None:
    """GPTQModel writes AWQ's under another key."""
    config = changed("awq", "version", ...)
    assert len(read("awq", config | {"checkpoint_format": "gemm"})) == 3
    assert "is 'gemv_fast'; awq: Input should be 'gemm'" in refusal("awq", config | {"checkpoint_format": "gemv_fast"})


def test_further_tensors_that_are_refused() -> None:
    good = dict(stored("gptq"))
    qzeros, g_idx = good[f"{Q}.qzeros"], good[f"{Q}.g_idx"]
    assert f"'{Q}.qzeros' has shape [2, 1]" in refusal("gptq", files=good | {f"{Q}.qzeros": qzeros[:, :1]})
    for beyond in (2, -1):
        wrong = g_idx.clone()
        wrong[3] = beyond
        says = f"A column of '{Q}' is in a group other than 0 to 1 (gptq)"
        assert says in refusal("gptq", files=good | {f"{Q}.g_idx": wrong})
    assert "g_idx' is of type float32" in refusal("gptq", files=good | {f"{Q}.g_idx": g_idx.float()})
    for module in (Q, V):
        del good[f"{module}.g_idx"]
    assert len(read("gptq", files=good)) == 3
    whole = {name: tensor[:1] if name.endswith(("scales", "qzeros")) else tensor for name, tensor in good.items()}
    assert len(read("gptq", changed("gptq", "desc_act", True) | {"group_size": -1}, whole)) == 3
    for config in changed("gptq", "desc_act", True), changed("gptq", "dynamic", {"+:.*": {"desc_act": True}}):
        says = f"config.json: quantization_config.desc_act is True; gptq: there is no '{Q}.g_idx'."
        assert refusal("gptq", config, good) == says
    good, name = dict(stored("compressed-tensors")), f"{Q}.weight_shape"
    for shape in ([16, 40], [15, 32], [-16, 32], [16, 2**40]):
        says = f"'{Q}.weight_packed' has shape [16, 4]"
        assert says in refusal("compressed-tensors", files=good | {name: torch.tensor(shape)})
    assert f"{name!r} has shape [3]" in refusal("compressed-tensors", files=good | {name: torch.ones(3).long()})
    for order in ("static", "weight", None, False):
        assert len(read("compressed-tensors", changed("compressed-tensors", f"{G}/weights/actorder", order))) == 3
    for order in ("group", "GROUP", "dynamic", True):
        says = f"{AT}.weights.actorder is {order!r}; compressed-tensors: there is no '{Q}.weight_g_idx'."
        assert says in refusal("compressed-tensors", changed("compressed-tensors", f"{G}/weights/actorder", order))
    good = dict(stored("fp8"))
    both = good | {f"{Q}.weight_scale": torch.ones(())}
    assert f"has weight_scale_inv and weight_scale of '{Q}'" in refusal("fp8", files=both)


def test_unused_scales_are_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    extra = {f"{Q}.input_scale": torch.ones(1)}
    assert f"{Q}.input_scale" in read("fp8", files=stored("fp8") | extra)  # nothing has said that it is not needed
    config = changed("fp8", "activation_scheme", "static")
    assert f"{Q}.input_scale" not in read("fp8", config, stored("fp8") | extra)
    assert "fp8 weights are dequantized when they are read" in caplog.text
    assert "activations are not rounded" in caplog.text
    config = changed("compressed-tensors", "kv_cache_scheme", {"num_bits": 8, "type": "float"})
    extra = {"layers.0.attn.k_scale": torch.ones(1), "layers.0.attn.v_scale": torch.ones(1)}
    assert len(read("compressed-tensors", config, stored("compressed-tensors") | extra)) == 3
    assert "kv_cache_scheme is not used" in caplog.text


def test_unknown_keys_are_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    assert not caplog.text
    read("gptq", CONFIGS["gptq"] | {"rotation": "hadamard", "damp_percent": 0.1, "novelty": None})
    assert "gptq: infer does not know quantization_config.rotation, and goes by the rest" in caplog.text
    read("compressed-tensors", changed("compressed-tensors", f"{G}/weights/twist", 1))
    assert f"infer does not know {AT}.weights.twist, and" in caplog.text
    assert len(caplog.records) == 2


def test_patterns_take_time_in_proportion() -> None:
    """Where a backtracking engine would never end."""
    name = "a" * 200
    began = time.process_time()
    for pattern in (r"(a+)+$", r"(a*)*b", r"(a|aa)+c", r"(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)[^a]"):
        made = Patterns("test").compile("here", pattern)
        assert made.matches(name) == pattern.endswith("$")
    assert time.process_time() - began < 10
    patterns = Patterns("test")
    for pattern, why in {
        "(?=a)": "look-ahead",
        r"(a)\1": "backreferences",
        "a{1000}{1000}{1000}": "size limit",
        "[": "unclosed",
        "a" * 201: "128 patterns of 200",
    }.items():
        with pytest.raises(CheckpointError, match=why):
            patterns.compile("here", pattern)
    patterns = Patterns("test")
    for _ in range(128):
        patterns.compile("here", "b")
    with pytest.raises(CheckpointError, match=r"config.json: quantization_config.here is 'b'; test: .*128 patterns"):
        patterns.compile("here", "b")


def test_patterns_match_as_those_of_python() -> None:
    """From the beginning of a name on, but not to its end."""
    for pattern in (
        r".*q_proj",
        r"q_proj",
        r"layers\.[0-9]+\.q",
        r"layers\.0\.q_proj$",
        r"layers.0$",
        r"k|layers\.1",
        r"k|proj",
    ):
        for name in (Q, V, "layers.11.q_proj"):
            assert Patterns("test").compile("here", pattern).matches(name) == bool(re.match(pattern, name))


KEYS = ["quant_method", "format", "config_groups", "targets", "weights", "num_bits", "group_size", "bits", "strategy"]
KEYS += ["ignore", "version", "zero_point", "sym", "dynamic", "weight_block_size", "type", "input_activations", "fmt"]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from([4, 8, 16, "int", "gemm"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=4), inner),
    max_leaves=8,
)


@given(st.sampled_from(METHODS), st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=4), VALUES, max_size=6))
@settings(max_examples=examples(100, 40))
def test_any_table_is_read_or_refused_in_one_sentence(method: str, changes: dict[str, Any]) -> None:
    sentence = ""
    try:
        read(method, CONFIGS[method] | changes)
    except CheckpointError as error:
        sentence = str(error)
    assert "\n" not in sentence
    assert len(sentence) < 1000


def test_users_get_one_sentence(tmp_path: Path) -> None:
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    quantized, _ = writers.write(tmp_path, writers.linear(awq()), config, num_hidden_layers=1)
    tensors = load_file(quantized / "model.safetensors")

    name = "model.layers.0.self_attn.q_proj"
    without = {kind: tensor for kind, tensor in tensors.items() if kind != f"{name}.qzeros"}
    damaged = tensors | {f"{name}.scales": tensors[f"{name}.scales"] * torch.nan}
    save_file(without, quantized / "model.safetensors")
    done = infer("generate", "x", "--model.path", str(quantized), "--kernels.backend", "reference", cwd=tmp_path)
    says = f"infer: The checkpoint lacks '{name}.qzeros', which awq weights need."
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, says), done.stderr
    save_file(damaged, quantized / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=f"The tensor '{name}.weight' holds values that are not finite as float32"
    ):
        LLM(str(quantized), kernels={"backend": "reference", "threads": 1})
