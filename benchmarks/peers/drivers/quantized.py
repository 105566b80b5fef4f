"""A plain checkpoint's layers in the formats that vLLM's CPU build multiplies: AWQ (int4 in groups of 128) and W8A8
(compressed-tensors: int8 per channel, activations quantized per token). Its values are rounded to the nearest code;
speed does not depend on how well they are chosen."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

GROUP = 128
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighboring outputs each nibble of an AWQ word holds, from the lowest."""


def awq(name: str, weight_NK: torch.Tensor) -> Mapping[str, torch.Tensor]:
    N, K = weight_NK.shape
    groups = weight_NK.float().view(N, K // GROUP, GROUP)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = ((high - low) / 15).half()
    zero = (-low / scale.float()).round().clamp(0, 15)
    codes = ((groups / scale.float()[..., None]).round() + zero[..., None]).clamp(0, 15).view(N, K)
    words = {"qweight": _words(codes.T), "qzeros": _words(zero.T), "scales": scale.T.contiguous()}
    return {f"{name}.{part}": value for part, value in words.items()}


def _words(codes_KN: torch.Tensor) -> torch.Tensor:
    K, N = codes_KN.shape
    nibbles = codes_KN.to(torch.int64).view(K, N // 8, 8)
    words = sum(nibbles[..., output] << 4 * place for place, output in enumerate(ORDER))
    assert isinstance(words, torch.Tensor)
    return (words - (words >> 31 << 32)).to(torch.int32).contiguous()


def w8a8(name: str, weight_NK: torch.Tensor) -> Mapping[str, torch.Tensor]:
    scale = weight_NK.float().abs().amax(-1, keepdim=True) / 127
    codes = (weight_NK.float() / scale).round().clamp(-127, 127).to(torch.int8)
    return {f"{name}.weight": codes, f"{name}.weight_scale": scale.bfloat16()}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}
Quantize = Callable[[str, torch.Tensor], Mapping[str, torch.Tensor]]
FORMATS: Mapping[str, tuple[Mapping[str, Any], Quantize]] = {"AWQ": (AWQ, awq), "W8A8": (W8A8, w8a8)}


def quantized(folder: Path, kind: str) -> Path:
    """The folder of the checkpoint in that format, which is written if it is not there."""
    out = folder.with_name(f"{folder.name}-{kind}")
    if not (out / "config.json").exists():
        described, convert = FORMATS[kind]
        out.mkdir(exist_ok=True)
        tensors: dict[str, torch.Tensor] = {}
        for name, value in load_file(folder / "model.safetensors").items():
            if "_proj." in name:
                tensors |= convert(name.removesuffix(".weight"), value)
            else:
                tensors[name] = value
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
        shutil.copy(folder / "tokenizer.json", out)
        config = json.loads((folder / "config.json").read_text())
        (out / "config.json").write_text(json.dumps(config | {"quantization_config": described}))
    return out
