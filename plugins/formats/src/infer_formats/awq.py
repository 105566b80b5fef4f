"""AWQ's ``gemm`` layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import AliasChoices, Field
from torch import Tensor

from infer.contracts.weights import TensorFilesProtocol
from infer.weight import Weight
from infer_formats.config import CALIBRATION, GroupSize, Table
from infer_formats.files import FLOATS, QuantizedFiles, in_words

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of its eight columns each half byte of a word belongs to, from the least significant on."""
CHUNK = 1 << 17
"""How many words are regrouped at a time, so that they stay in a CPU's caches."""


class AwqTable(Table):
    quant_method: str
    bits: Literal[4] = Field(validation_alias=AliasChoices("bits", "w_bit"))
    group_size: GroupSize = Field(validation_alias=AliasChoices("group_size", "q_group_size"))
    zero_point: Literal[True] = True
    version: Literal["gemm", "GEMM"] = Field(
        "gemm", validation_alias=AliasChoices("version", "format", "checkpoint_format")
    )
    modules_to_not_convert: list[str] | None = None
    """These modules have plain weights, by which they are recognized."""
    HARMLESS = CALIBRATION | {"checkpoint_format", "pack_dtype", "sym"}


class Awq(QuantizedFiles):
    method = "awq"
    codes = ("qweight",)
    beside = ("qzeros", "scales")

    def __init__(self, config: Mapping[str, Any], files: TensorFilesProtocol) -> None:
        super().__init__(files)
        self._group_size = AwqTable.read(config, self.method).group_size

    def read(self, module: str) -> Weight:
        words_KW = self.tensor(module, "qweight", [torch.int32], (None, None))
        K, W = words_KW.shape
        size = K if self._group_size == -1 else self._group_size
        G, N = -(-K // size), W * 8
        scales_GN = self.tensor(module, "scales", FLOATS, (G, N))
        words_GW = self.tensor(module, "qzeros", [torch.int32], (G, W))
        column_of = torch.tensor(ORDER).argsort()
        zeros_GN = in_words(words_GW, 4, N).view(G, W, 8)[..., column_of].flatten(1)
        return self.grouped(module, rows_of(words_KW), scales_GN.t().contiguous(), zeros_GN.t(), 4, K, size)


def rows_of(words_KW: Tensor) -> Tensor:
    """The half bytes of words [K, N / 8], regrouped: those of a column, [N, K / 2] bytes. K counts as a multiple of
    eight."""
    if missing := -len(words_KW) % 8:
        words_KW = torch.nn.functional.pad(words_KW, (0, 0, 0, missing))
    groups, W = len(words_KW) // 8, words_KW.shape[1]
    rows = torch.empty(W, 8, groups, dtype=torch.int32)
    step = max(1, CHUNK // W)
    for begin in range(0, groups, step):
        chunk = words_KW[8 * begin : 8 * (begin + step)].view(-1, 8, W)
        words = list(chunk.transpose(0, 1).contiguous())
        # Eight words of eight half bytes each are a matrix, which is transposed: first its quarters change places, then
        # the quarters of each of these, and so on.
        for distance, mask in ((4, 0x0000FFFF), (2, 0x00FF00FF), (1, 0x0F0F0F0F)):
            for i in range(8):
                if i & distance == 0:
                    other, shift = i + distance, 4 * distance
                    change = (words[i] >> shift).bitwise_xor_(words[other]).bitwise_and_(mask)
                    words[other].bitwise_xor_(change)
                    words[i].bitwise_xor_(change.bitwise_left_shift_(shift))
        for column, word in zip(ORDER, words, strict=True):
            rows[:, column, begin : begin + step] = word.t()
    return rows.flatten(0, 1).view(torch.uint8)
