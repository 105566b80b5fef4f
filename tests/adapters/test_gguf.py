"""GGUF adapters, written as llama.cpp's converter does, against the same in PEFT's form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.adapters.checkpoints import scored, write_adapter
from tests.models.checkpoints import HEADS, write_checkpoint

from infer import LLM
from infer.errors import CheckpointError
from infer_formats.gguf.adapters import GGUFAdapter

TOKENS = [*range(9, 70)]
PARTS = {
    **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
}


def turned(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """``LlamaModel.permute`` of llama.cpp's convert_hf_to_gguf.py."""
    rows = weight.shape[0]
    return weight.reshape(heads, 2, rows // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def convert(peft: Path, file: Path, arch: str, alpha: float = 6.0, kind: str = "lora", **more: Any) -> Path:
    writer = gguf.GGUFWriter(file, arch)
    writer.add_type("adapter")
    writer.add_string("adapter.type", kind)
    writer.add_float32("adapter.lora.alpha", alpha)
    if "invocation" in more:
        writer.add_array("adapter.alora.invocation_tokens", more["invocation"])
    for name, values in load_file(peft / "adapter_model.safetensors").items():
        layer, part = name.removesuffix(".weight").split("layers.")[1].split(".", 1)
        path, _, factor = part.rpartition(".lora_")
        if arch == "llama" and factor == "B" and path[-6:] in ("q_proj", "k_proj"):
            values = turned(values, HEADS if path.endswith("q_proj") else 2)
        own = more.get("renamed", PARTS[path])
        writer.add_tensor(f"blk.{layer}.{own}.weight.lora_{factor.lower()}", np.ascontiguousarray(values))
        if "renamed" in more and factor == "B":
            break
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_both_forms_give_the_same_bits(family: Any, tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", family)
    write_adapter(base, tmp_path / "one")
    file = convert(tmp_path / "one", tmp_path / "two.gguf", family)
    with LLM(str(base), adapters={"load": [f"one={tmp_path / 'one'}", f"two={file}"]}) as llm:
        assert scored(llm, TOKENS, "one") == scored(llm, TOKENS, "two") != scored(llm, TOKENS)


def test_without_an_alpha_factors_are_not_scaled(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", "qwen3")
    write_adapter(base, tmp_path / "one")
    for alpha, scale in ((0.0, 1.0), (6.0, 1.5)):
        read = GGUFAdapter(convert(tmp_path / "one", tmp_path / "two.gguf", "qwen3", alpha), {})
        assert {change.scale for change in read.changes().values()} == {scale}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"kind": "control_vector"}, "adapter.type is 'control_vector', but that of a LoRA adapter is 'lora'."),
    "aLoRA": ({"invocation": [5, 6]}, "adapter.alora.invocation_tokens asks for an activated LoRA"),
    "delta": ({"arch": "qwen35"}, "infer reads no GGUF adapters of 'qwen35', whose layers GGUF keeps in another order"),
    "unknown": ({"arch": "phi9"}, "is of the architecture 'phi9'"),
    "experts": ({"arch": "qwen3moe", "renamed": "ffn_up_exps"}, "'blk.0.ffn_up_exps.weight'; experts of a mixture"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_sentences(name: str, tmp_path: Path) -> None:
    how, said = REFUSED[name]
    base = write_checkpoint(tmp_path / "base", "qwen3")
    write_adapter(base, tmp_path / "one", target_modules=["q_proj"])
    file = convert(tmp_path / "one", tmp_path / "two.gguf", **{"arch": "qwen3"} | how)
    with pytest.raises(CheckpointError, match=said):
        GGUFAdapter(file, {}).changes()
