from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import infer_bitsandbytes
from infer import LLM, CheckpointError, SamplingParams
from infer_bitsandbytes import Int8
from infer_testing import check_weight_format, tiny_checkpoint

CONFIG = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}}


def quantized(plain: dict[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint's tensors as bitsandbytes rounds them: all linear layers but the head."""
    made = dict(plain)
    for name, weight_NK in plain.items():
        if weight_NK.ndim == 2 and name.startswith("model.layers"):
            module, top_N = name.removesuffix(".weight"), weight_NK.abs().amax(1)
            made[name] = (weight_NK * (127 / top_N)[:, None]).round().to(torch.int8)
            made[f"{module}.SCB"] = top_N
            made[f"{module}.weight_format"] = torch.zeros((), dtype=torch.uint8)
    return made


def read(tensors: dict[str, Tensor], **config: Any) -> Int8:
    files: Any = SimpleNamespace(names=lambda: list(tensors), tensor=tensors.__getitem__)
    return Int8(CONFIG | config, files)


def plain() -> dict[str, Tensor]:
    return load_file(tiny_checkpoint("LlamaForCausalLM") / "model.safetensors")


def test_it_keeps_the_contract_and_reads_what_was_written() -> None:
    tensors = quantized(plain())
    files: Any = SimpleNamespace(names=lambda: list(tensors), tensor=tensors.__getitem__)
    check_weight_format(lambda config, files: Int8(config, files), CONFIG, files, plain=plain())


def test_answers_are_those_of_the_rounded_weights(tmp_path: Path) -> None:
    """A checkpoint whose weights are the rounded ones has the same arithmetic without this plugin."""
    source, made = tiny_checkpoint("LlamaForCausalLM"), quantized(plain())
    rounded = {name: _value(name, made) for name in plain()}
    answers = []
    for folder, tensors, more in ((tmp_path / "int8", made, CONFIG), (tmp_path / "plain", rounded, {})):
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text()) | more))
        (folder / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
        with LLM(str(folder), plugins=[infer_bitsandbytes], kernels={"backend": "reference"}) as llm:
            params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
            answers.append([a.token_ids for a in llm.generate([[5, 6, 7], [8] * 30], params)])
    assert answers[0] == answers[1]


def _value(name: str, made: dict[str, Tensor]) -> Tensor:
    scales = made.get(f"{name.removesuffix('.weight')}.SCB")
    return made[name] if scales is None else made[name].float() * (scales / 127)[:, None]


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({f"{Q}.SCB": None}, rf"lacks '{Q}\.SCB'"),
        ({f"{Q}.weight": None}, rf"but no '{Q}\.weight'"),
        ({f"{Q}.SCB": torch.ones(3)}, r"is float32 \[3\], not a float for each row"),
        ({f"{Q}.weight": torch.ones(64, 64)}, r"is no int8 matrix: float32 \[64, 64\]"),
        ({f"{Q}.weight_format": torch.tensor(3)}, "laid out for a GPU"),
    ],
)
def test_a_damaged_checkpoint_is_refused(change: dict[str, Tensor | None], says: str) -> None:
    tensors = {name: tensor for name, tensor in (quantized(plain()) | change).items() if tensor is not None}
    format = read(tensors)
    with pytest.raises(CheckpointError, match=says):
        [format.weight(name) for name in format.names()]


def test_other_formats_of_bitsandbytes_are_refused() -> None:
    with pytest.raises(CheckpointError, match="load_in_8bit is not true"):
        read({}, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
