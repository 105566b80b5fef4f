"""Checkpoints that bitsandbytes has quantized to int8 (LLM.int8; Dettmers et al., 2022), as transformers saves them.

A module has its codes in ``NAME.weight``, int8 [N, K], and each row's greatest magnitude in ``NAME.SCB``, fp32 [N]: a
value is code * SCB / 127. ``NAME.weight_format`` says how the codes are laid out; 0 is by rows. A tensor without an SCB
beside it is a plain weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from infer import CheckpointError, hookimpl
from infer.contracts.weights import TensorFilesProtocol, WeightFormatRegistration
from infer.weight import GroupedWeight, Weight

INFER_PLUGIN_API = 2
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class Int8:
    """A WeightFormatProtocol."""

    def __init__(self, config: Mapping[str, Any], files: TensorFilesProtocol) -> None:
        table = config.get("quantization_config")
        if not isinstance(table, dict) or table.get("load_in_8bit") is not True:
            raise CheckpointError(
                "config.json: quantization_config.load_in_8bit is not true; of bitsandbytes' formats, this plugin "
                "reads int8 only."
            )
        self._files = files
        self._all = frozenset(files.names())

    def names(self) -> Iterable[str]:
        for name in self._files.names():
            module, _, kind = name.rpartition(".")
            if kind not in ("SCB", "weight_format"):
                yield name
            elif f"{module}.weight" not in self._all:
                raise CheckpointError(f"The checkpoint has {name!r}, but no {module + '.weight'!r}.")

    def weight(self, name: str) -> Weight:
        tensor, module = self._files.tensor(name), name.removesuffix(".weight")
        if f"{module}.SCB" not in self._all:
            if tensor.dtype == torch.int8:
                raise CheckpointError(f"The checkpoint lacks {module + '.SCB'!r}, the scales of {name!r}.")
            return tensor
        if tensor.dtype != torch.int8 or tensor.ndim != 2:
            raise CheckpointError(f"{name!r} has an SCB, but is no int8 matrix: {_shown(tensor)}.")
        scales_N = self._files.tensor(f"{module}.SCB")
        if scales_N.shape != tensor.shape[:1] or scales_N.dtype not in FLOATS:
            raise CheckpointError(f"{module + '.SCB'!r} is {_shown(scales_N)}, not a float for each row of {name!r}.")
        self._check_layout(f"{module}.weight_format")
        codes = tensor.view(torch.uint8) ^ 128  # from -128..127 to 0..255, as GroupedWeight has them
        return GroupedWeight(codes, (scales_N.float() / 127)[:, None], bits=8)

    def _check_layout(self, name: str) -> None:
        if name in self._all:
            layout = self._files.tensor(name)
            if layout.numel() != 1 or layout.item() != 0:
                raise CheckpointError(f"{name!r} is not 0: the codes are laid out for a GPU; save the model anew.")


def _shown(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


@hookimpl
def infer_weight_formats() -> list[WeightFormatRegistration]:
    make = lambda config, files, settings: Int8(config, files)  # noqa: E731
    return [WeightFormatRegistration("bitsandbytes", make, "bitsandbytes' int8", methods=("bitsandbytes",))]
