"""GPTQ as AutoGPTQ and GPTQModel write it, in the formats ``gptq`` (zero points less one) and ``gptq_v2``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import AliasChoices, Field

from infer.contracts.weights import TensorFilesProtocol
from infer.weight import Weight
from infer_formats.config import CALIBRATION, GroupSize, Patterns, Table, bad
from infer_formats.files import FLOATS, Bits, QuantizedFiles, in_words, words

ONE_EACH: Mapping[Bits, int] = {4: 0x11111111, 8: 0x01010101}
"""What the format ``gptq`` takes from a word of zero points: one from each. A zero point of 0 borrows from its
neighbor, so it is the word that one has to be added to."""


class Changes(Table):
    """What ``dynamic`` says of some modules."""

    bits: Bits | None = None
    group_size: GroupSize | None = None
    sym: bool | None = None
    desc_act: bool | None = None
    HARMLESS = CALIBRATION


class GptqTable(Table):
    quant_method: str
    bits: Bits
    group_size: GroupSize
    sym: bool | None = None
    desc_act: bool | None = None
    """Whether columns went into groups by their activations. ``g_idx`` says then which group each is in."""
    checkpoint_format: Literal["gptq", "gptq_v2"] = Field(
        "gptq", validation_alias=AliasChoices("checkpoint_format", "format")
    )
    pack_dtype: Literal["int32"] = "int32"
    is_marlin_format: Literal[False] = False
    dynamic: dict[str, Changes] | None = None
    """What differs in the modules that a pattern matches. With ``-:`` before it, they are not quantized, which can be
    seen from their tensors."""
    HARMLESS = CALIBRATION


class Gptq(QuantizedFiles):
    method = "gptq"
    codes = ("qweight",)
    beside = ("qzeros", "scales", "g_idx")

    def __init__(self, config: Mapping[str, Any], files: TensorFilesProtocol) -> None:
        super().__init__(files)
        self._table = GptqTable.read(config, self.method)
        patterns = Patterns(self.method)
        self._dynamic = [
            (patterns.compile(f"dynamic.{key}", key.removeprefix("+:")), changes)
            for key, changes in (self._table.dynamic or {}).items()
            if not key.startswith("-:")
        ]

    def read(self, module: str) -> Weight:
        changes = [changes for pattern, changes in self._dynamic if pattern.matches(module)][:1]
        bits, size, symmetric = self._table.bits, self._table.group_size, self._table.sym
        reordered = self._table.desc_act
        for change in changes:
            bits = bits if change.bits is None else change.bits
            size = size if change.group_size is None else change.group_size
            symmetric = symmetric if change.sym is None else change.sym
            reordered = reordered if change.desc_act is None else change.desc_act
        K = groups_K = None
        if self.has(module, "g_idx"):
            groups_K = self.tensor(module, "g_idx", [torch.int32, torch.int64], (None,))
            K = len(groups_K)
        elif reordered and size != -1:
            raise bad(self.method, "desc_act", f"there is no {module + '.g_idx'!r}", reordered)
        words_WN = self.tensor(module, "qweight", [torch.int32], (None if K is None else words(K, bits), None))
        K, N = K or len(words_WN) * 32 // bits, words_WN.shape[1]
        size = K if size == -1 else size
        scales_GN = self.tensor(module, "scales", FLOATS, (-(-K // size), N))
        words_GW = self.tensor(module, "qzeros", [torch.int32], (len(scales_GN), words(N, bits)))
        if self._table.checkpoint_format == "gptq":
            words_GW = words_GW + ONE_EACH[bits]
        zeros_GN = in_words(words_GW, bits, N)
        if symmetric and not bool((zeros_GN == 2 ** (bits - 1)).all()):
            raise bad(self.method, "sym", f"the zero points in {module + '.qzeros'!r} are others", symmetric)
        codes = words_WN.t().contiguous().view(torch.uint8)
        return self.grouped(module, codes, scales_GN.t().contiguous(), zeros_GN.t(), bits, K, size, groups_K)
