"""MXFP4 as gpt-oss has it: the experts of a layer are stacked, in blocks of 32 values with a power of two as scale."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from infer.contracts.weights import TensorFilesProtocol
from infer.errors import CheckpointError
from infer.weight import GroupedWeight, Weight
from infer_formats.config import Table

VALUES = (0, 1, 2, 3, 4, 6, 8, 12)
"""The magnitudes of the codes, doubled, so that they are integers; the codes 8 to 15 are negative."""
BLOCK = 32
BLOCKS, SCALES = "_blocks", "_scales"
_EXPERT = re.compile(r"(.+)\.(\d+)\.(\w+)\.weight")


class Mxfp4Table(Table):
    quant_method: str
    modules_to_not_convert: list[str] | None = None
    """These modules have plain weights, by which they are recognized."""


@dataclass(frozen=True)
class _Stack:
    blocks: Tensor
    """uint8 [X, N, G, 16]."""
    scales: Tensor
    """uint8 [X, N, G]: exponents of 2, plus 127."""


class Mxfp4:
    """A WeightFormatProtocol. ``NAME.experts.PART_blocks`` and ``NAME.experts.PART_scales`` become weights
    ``NAME.experts.7.PART.weight``; all other tensors are plain weights."""

    method = "mxfp4"

    def __init__(self, config: Mapping[str, Any], files: TensorFilesProtocol) -> None:
        Mxfp4Table.read(config, self.method)
        self._files, self._all = files, frozenset(files.names())

    def names(self) -> Iterator[str]:
        for name in self._files.names():
            if name.endswith(BLOCKS):
                module, _, part = name.removesuffix(BLOCKS).rpartition(".")
                for index in range(len(self._stack(module, part).blocks)):
                    yield f"{module}.{index}.{part}.weight"
            elif not name.endswith(SCALES):
                yield name
            elif name.removesuffix(SCALES) + BLOCKS not in self._all:
                raise CheckpointError(f"The checkpoint has {name!r}, but no {name.removesuffix(SCALES) + BLOCKS!r}.")

    def weight(self, name: str) -> Weight:
        found = _EXPERT.fullmatch(name)
        if found is None or f"{found[1]}.{found[3]}{BLOCKS}" not in self._all:
            return self._files.tensor(name)
        stack, index = self._stack(found[1], found[3]), int(found[2])
        exponents = stack.scales[index].int()
        # The values are doubled, so that the scales are halved. The exponent 255 stands for NaN.
        scales_NG = (
            torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents - 128)
            .masked_fill_(exponents == 255, torch.nan)
            .bfloat16()
        )
        table = torch.tensor([*VALUES, *(-x for x in VALUES)], dtype=torch.float32)
        return GroupedWeight(stack.blocks[index].flatten(1), scales_NG, 4, table=table)

    def _stack(self, module: str, part: str) -> _Stack:
        """Raises CheckpointError if a tensor is missing, or not as it has to be."""
        tensors = []
        for kind in (BLOCKS, SCALES):
            name = f"{module}.{part}{kind}"
            if name not in self._all:
                raise CheckpointError(f"The checkpoint lacks {name!r}, which {self.method} weights need.")
            tensors.append(tensor := self._files.tensor(name))
            wanted = [*tensors[0].shape[:3], BLOCK // 2][: 4 if kind == BLOCKS else 3]
            if tensor.dtype != torch.uint8 or list(tensor.shape) != wanted or 0 in tensor.shape:
                raise CheckpointError(
                    f"The tensor {name!r} is {list(tensor.shape)} of type {str(tensor.dtype).removeprefix('torch.')}; "
                    f"{self.method} has uint8 [experts, rows, blocks{', 16' if kind == BLOCKS else ''}] there."
                )
        return _Stack(*tensors)
