"""Blocks of random bits have the values that the ``gguf`` package computes, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from infer.errors import CheckpointError
from infer.weight import GroupedWeight
from infer_formats.gguf.blocks import weight_of
from infer_formats.gguf.header import TYPES, TensorInfo

ROWS, BLOCKS = 7, 3
NUMBERS = {block.name: number for number, block in TYPES.items()}
FLOATS = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "IQ4_NL": [0], "Q6_K": [208]} | {
    "IQ4_XS": [0],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
}
"""Where a block has numbers in fp16."""


def random_blocks(name: str, rows: int = ROWS, blocks: int = BLOCKS, scale: float = 1.0) -> np.ndarray:
    """[rows, bytes]: random bits, with random numbers where the type has numbers."""
    generator = np.random.default_rng(len(name))
    nbytes = TYPES[NUMBERS[name]].nbytes
    bits = generator.integers(0, 256, (rows * blocks, nbytes), dtype=np.uint8)
    for at in FLOATS.get(name, []):
        numbers = generator.normal(size=(rows * blocks, 1), scale=scale).astype(np.float16)
        bits[:, at : at + 2] = numbers.view(np.uint8)
    if name == "MXFP4":
        bits[:, 0] = generator.integers(0, 255, rows * blocks) if scale == 1 else 122
    return bits.reshape(rows, -1)


@pytest.mark.parametrize("name", [name for name in NUMBERS if name not in ("F32", "F16", "BF16")])
def test_values_are_those_of_the_gguf_package(name: str) -> None:
    raw = random_blocks(name)
    kind = TYPES[NUMBERS[name]]
    weight = weight_of("w", TensorInfo(kind, (ROWS, BLOCKS * kind.values), 0), torch.from_numpy(raw))
    assert isinstance(weight, GroupedWeight)
    assert weight.int8_activations
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    assert gguf.GGMLQuantizationType[name] == NUMBERS[name]
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == (kind.values, kind.nbytes)
    assert expected.shape == tuple(weight.shape)
    assert np.array_equal(weight.dequantize().numpy(), expected)
    order = torch.randperm(ROWS)
    assert np.array_equal(weight.rows(order).dequantize().numpy(), expected[order])


def test_only_matrices_are_quantized() -> None:
    info = TensorInfo(TYPES[8], (32,), 0)
    with pytest.raises(CheckpointError, match=r"'w' has shape \[32\] and type Q8_0; only matrices are quantized"):
        weight_of("w", info, torch.zeros(34, dtype=torch.uint8))
