"""Quantized checkpoints, and the same weights dequantized.

compressed-tensors are written by that package. AWQ and GPTQ are packed here as their layouts are
documented: https://github.com/casper-hansen/AutoAWQ and https://github.com/ModelCloud/GPTQModel.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from safetensors.torch import load_file, save_file
from tests.models.checkpoints import write_checkpoint
from torch import Tensor

Scheme = QuantizationScheme
Packed = tuple[dict[str, Tensor], Tensor]
"""A module's tensors by kind, and its weight in float32."""
Pack = Callable[[str, Tensor], Packed | None]
"""(a module's name, its weight) -> what is stored; None for the weight as it is."""


def write(folder: Path, pack: Pack, quantization_config: Mapping[str, Any], **checkpoint: Any) -> tuple[Path, Path]:
    """A quantized checkpoint, and a plain one with its weights dequantized. The file has the tensors in the order of
    their names."""
    size: dict[str, Any] = {
        "family": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "tied": False,
    }
    plain = write_checkpoint(folder / "plain", **size | checkpoint)
    return quantize(plain, folder / "quantized", pack, quantization_config), plain


def quantize(plain: Path, quantized: Path, pack: Pack, quantization_config: Mapping[str, Any]) -> Path:
    """Write the checkpoint ``quantized``, and its weights dequantized in place of those of ``plain``."""
    shutil.copytree(plain, quantized)
    tensors, stored = load_file(plain / "model.safetensors"), {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        packed = pack(module, tensor) if kind == "weight" and tensor.ndim == 2 else None
        if packed is None:
            stored[name] = tensor
        else:
            kinds, tensors[name] = packed
            stored |= {f"{module}.{kind}": part.contiguous() for kind, part in kinds.items()}
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    save_file(stored, quantized / "model.safetensors", {"format": "pt"})
    configure(quantized, quantization_config)
    return quantized


def configure(folder: Path, quantization_config: Any) -> None:
    """Put a ``quantization_config`` into config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": quantization_config}))


def linear(pack: Pack) -> Pack:
    """Packs all weights but those of the embedding and the head."""
    return lambda module, weight: None if module.endswith(("embed_tokens", "lm_head")) else pack(module, weight)


def grid(weight: Tensor, rows: int, columns: int, bits: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Scales, and zero points of unsigned codes, for blocks of a weight; 0 for all rows or columns."""
    N, K = weight.shape
    rows, columns = rows or N, columns or K
    # A range has zero in it, so zeros may fill up the last blocks.
    filled = torch.nn.functional.pad(weight.double(), (0, -K % columns, 0, -N % rows))
    blocks = filled.view(len(filled) // rows, rows, -1, columns)
    low, high = blocks.amin((1, 3)).clamp(max=0), blocks.amax((1, 3)).clamp(min=0)
    if symmetric:
        scales = (torch.maximum(-low, high) * 2 / (2**bits - 1)).float()
        return scales, torch.full(scales.shape, 2 ** (bits - 1))
    scales = ((high - low) / (2**bits - 1)).float()
    return scales, (-low / scales.double()).round().clamp(0, 2**bits - 1).long()


def compressed(scheme: QuantizationScheme, dtype: torch.dtype = torch.float32) -> Callable[[str, Tensor], Packed]:
    """What the package stores for a weight, and what it makes of that. Scales are of ``dtype``."""
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    args: Any = scheme.weights
    blocks: Any = {"tensor": (0, 0), "channel": (1, 0), "group": (1, args.group_size), "block": args.block_structure}

    def pack(module: str, weight: Tensor) -> Packed:
        rows, columns = blocks[args.strategy]
        scales, zeros = grid(weight, rows, columns, args.num_bits, args.symmetric)
        if args.type == "float":
            scales = scales * 255 / 2 / 448
        zeros = (zeros - 2 ** (args.num_bits - 1)).to(torch.int8)
        if args.strategy == "tensor":
            scales, zeros = scales.flatten(), zeros.flatten()
        state = {"weight": weight, "weight_scale": scales.to(dtype).float(), "weight_zero_point": zeros}
        if args.symmetric:
            del state["weight_zero_point"]
        stored = compressor.compress(state, scheme)
        dequantized = compressor.decompress(stored, scheme)["weight"]
        return stored | {"weight_scale": scales.to(dtype)}, dequantized.float().contiguous()

    return pack


def compressed_config(*schemes: QuantizationScheme, **keys: Any) -> dict[str, Any]:
    """The table that the package writes."""
    formats = {scheme.format for scheme in schemes}
    config = QuantizationConfig(
        config_groups={f"group_{i}": scheme for i, scheme in enumerate(schemes)},
        format=formats.pop() if len(formats) == 1 else "mixed-precision",
        quantization_status="compressed",
        **{"ignore": ["lm_head"]} | keys,
    )
    written: dict[str, Any] = json.loads(config.model_dump_json())
    return written | {"version": "0.20.0", "sparsity_config": {}, "transform_config": {}}


def scheme(
    format: str = "pack-quantized", targets: list[str] | None = None, activations: Any = None, **args: Any
) -> QuantizationScheme:
    return QuantizationScheme(
        targets=targets or ["Linear"], format=format, weights=QuantizationArgs(**args), input_activations=activations
    )


def gptq(
    bits: int = 4,
    group_size: int = 32,
    symmetric: bool = True,
    v1: bool = True,
    shuffled: bool = False,
    dtype: torch.dtype = torch.float16,
) -> Callable[[str, Tensor], Packed]:
    """With ``v1``, 1 is taken from every zero point after it has been packed, as GPTQModel does: one from each part of
    a word, with borrows between them."""

    def pack(module: str, weight: Tensor) -> Packed:
        K = weight.shape[1]
        size = K if group_size == -1 else group_size
        order = torch.randperm(K, generator=torch.Generator().manual_seed(K)) if shuffled else torch.arange(K)
        group_of = torch.empty(K, dtype=torch.int32)
        group_of[order] = torch.arange(K, dtype=torch.int32) // size
        scales, zeros = grid(weight[:, order], 1, size, bits, symmetric)
        scales = scales.to(dtype)
        per_word = 32 // bits
        codes, dequantized = coded(weight, scales, zeros, group_of, bits)
        qweight = packed(codes, bits, range(per_word)).t().contiguous()
        qzeros = packed(zeros.t(), bits, range(per_word))
        if v1:
            qzeros = (qzeros - sum(2 ** (bits * i) for i in range(per_word))) % 2**32
        kinds = {"qweight": words(qweight), "qzeros": words(qzeros), "scales": scales.t(), "g_idx": group_of}
        return kinds, dequantized

    return pack


def awq(group_size: int = 32, dtype: torch.dtype = torch.float16) -> Callable[[str, Tensor], Packed]:
    def pack(module: str, weight: Tensor) -> Packed:
        K = weight.shape[1]
        size = K if group_size == -1 else group_size
        scales, zeros = grid(weight, 1, size, 4, symmetric=False)
        scales = scales.to(dtype)
        codes, dequantized = coded(weight, scales, zeros, torch.arange(K) // size, 4)
        place = (0, 4, 1, 5, 2, 6, 3, 7)  # of a row in its word
        qweight, qzeros = (packed(x.t(), 4, place) for x in (codes, zeros))
        return {"qweight": words(qweight), "qzeros": words(qzeros), "scales": scales.t()}, dequantized

    return pack


def coded(weight: Tensor, scales: Tensor, zeros: Tensor, group_of: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Unsigned codes of a weight whose columns are in these groups, and what they stand for."""
    scale, zero = scales.double()[:, group_of], zeros[:, group_of]
    codes = ((weight.double() / scale).round().long() + zero).clamp(0, 2**bits - 1)
    return codes, (scale * (codes - zero)).float()


def packed(codes: Tensor, bits: int, place: Sequence[int]) -> Tensor:
    """Unsigned words of 32 bits, in int64, of as many codes of a row as fit; ``place`` says where in a word."""
    rows, count = codes.shape
    filled = torch.nn.functional.pad(codes, (0, -count % len(place))).view(rows, -1, len(place))
    return (filled << (bits * torch.tensor(place))).sum(-1)


def words(unsigned: Tensor) -> Tensor:
    """int32 with the bits of these."""
    return torch.where(unsigned >= 2**31, unsigned - 2**32, unsigned).int()


def fp8(
    block: tuple[int, int] | None, kind: str = "weight_scale_inv", dtype: torch.dtype = torch.float32
) -> Callable[[str, Tensor], Packed]:
    """``block`` None: one scale for a weight."""

    def pack(module: str, weight: Tensor) -> Packed:
        N, K = weight.shape
        rows, columns = block or (N, K)
        scales = torch.empty(-(-N // rows), -(-K // columns))
        codes, dequantized = torch.empty(N, K, dtype=torch.float8_e4m3fn), torch.empty(N, K)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                scales[i, j] = (weight[at].abs().max() / 448).to(dtype).float()
                codes[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
                dequantized[at] = codes[at].float() * scales[i, j]
        return {"weight": codes, kind: (scales if block else scales[0]).to(dtype)}, dequantized

    return pack
