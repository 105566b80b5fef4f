"""FP8 as in Qwen3-FP8 and DeepSeek-V3: e4m3 weights with a scale per block, or one for all."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from infer.contracts.weights import TensorFilesProtocol
from infer.errors import CheckpointError
from infer.weight import Weight
from infer_formats.config import Size, Table
from infer_formats.files import FLOATS, QuantizedFiles
from infer_formats.floats import E4M3, PLAIN, dequantized


class Fp8Table(Table):
    quant_method: str
    activation_scheme: Literal["dynamic", "static"] = "dynamic"
    fmt: Literal["e4m3", "float8_e4m3fn"] = "e4m3"
    weight_block_size: Annotated[list[Size], Field(min_length=2, max_length=2)] | None = None
    modules_to_not_convert: list[str] | None = None
    """These modules, and ``ignored_layers``, have plain weights, by which they are recognized."""
    ignored_layers: list[str] | None = None
    HARMLESS = frozenset({"dequantize", "is_checkpoint_fp8_serialized", "modules_to_convert", "scale_fmt"})


class Fp8(QuantizedFiles):
    method = "fp8"
    codes = ("weight",)
    beside = ("weight_scale_inv", "weight_scale")

    def __init__(self, config: Mapping[str, Any], files: TensorFilesProtocol) -> None:
        super().__init__(files)
        table = Fp8Table.read(config, self.method)
        self._block = table.weight_block_size
        if table.activation_scheme == "static":
            self.unused = frozenset({"input_scale", "activation_scale"})
        self.log_once(logging.INFO, PLAIN)

    def read(self, module: str) -> Weight:
        kinds = [kind for kind in self.beside if self.has(module, kind)]
        if len(kinds) > 1:
            raise CheckpointError(f"The checkpoint has {' and '.join(kinds)} of {module!r}; {self.method} has one.")
        floats = [*FLOATS, torch.float8_e8m0fnu]
        codes_NK = self.tensor(module, "weight", [E4M3], (None, None))
        N, K = codes_NK.shape
        if self._block is None:
            scale = self.tensor(module, kinds[0], floats, (), (1,), (1, 1))
            return dequantized(codes_NK, scale.reshape(1, 1), (N, K))
        rows, columns = self._block
        scales = self.tensor(module, kinds[0], floats, (-(-N // rows), -(-K // columns)))
        return dequantized(codes_NK, scales, (rows, columns))
