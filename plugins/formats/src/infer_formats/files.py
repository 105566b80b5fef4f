"""What the readers share: the tensors of quantized modules, checked, and the weights made from them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from infer.contracts.weights import TensorFilesProtocol
from infer.errors import CheckpointError
from infer.weight import GroupedWeight, Weight

log = logging.getLogger(__name__)

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
Bits = Literal[4, 8]


class QuantizedFiles:
    """A WeightFormatProtocol base. A quantized module NAME has one tensor of codes and others beside it, called
    NAME.KIND; all other tensors are plain weights."""

    method: ClassVar[str]
    codes: ClassVar[tuple[str, ...]]
    """The kinds of tensors that hold codes. A ``weight`` does if one of ``beside`` is there, too."""
    beside: ClassVar[tuple[str, ...]]
    """The kinds that stand beside codes."""

    def __init__(self, files: TensorFilesProtocol) -> None:
        self._files = files
        self._all = frozenset(files.names())
        self._logged: set[str] = set()
        self.unused: frozenset[str] = frozenset()
        """Kinds of tensors that say how to round activations or K/V, which infer does not do."""

    def read(self, module: str) -> Weight:
        """The weight of a quantized module. Raises CheckpointError."""
        raise NotImplementedError

    def names(self) -> Iterator[str]:
        for name in self._files.names():
            module, _, kind = name.rpartition(".")
            if kind in self.codes:
                yield f"{module}.weight"
            elif kind in self.beside:
                if not any(self.has(module, codes) for codes in self.codes):
                    raise CheckpointError(f"The checkpoint has {name!r}, but no {module + '.' + self.codes[0]!r}.")
            elif kind not in self.unused:
                yield name

    def weight(self, name: str) -> Weight:
        module, _, kind = name.rpartition(".")
        if kind == "weight" and any(self.has(module, other) for other in (*self.codes, *self.beside) if other != kind):
            return self.read(module)
        tensor = self._files.tensor(name)
        if kind == "weight" in self.codes and not tensor.dtype.itemsize > 1:
            raise self.lacks(module, self.beside[0])
        return tensor

    def has(self, module: str, kind: str) -> bool:
        return f"{module}.{kind}" in self._all

    def lacks(self, module: str, kind: str) -> CheckpointError:
        return CheckpointError(f"The checkpoint lacks {module + '.' + kind!r}, which {self.method} weights need.")

    def tensor(self, module: str, kind: str, dtypes: Sequence[torch.dtype], *shapes: tuple[int | None, ...]) -> Tensor:
        """A module's tensor of one of some types and, if there are any, shapes; None stands for any size. Raises
        CheckpointError."""
        name = f"{module}.{kind}"
        if name not in self._all:
            raise self.lacks(module, kind)
        tensor = self._files.tensor(name)
        if tensor.dtype not in dtypes:
            raise CheckpointError(
                f"The tensor {name!r} is of type {_called(tensor.dtype)}; {self.method} has "
                f"{' or '.join(map(_called, dtypes))} there."
            )
        if shapes and (0 in tensor.shape or not any(_fits(tensor.shape, shape) for shape in shapes)):
            wanted = " or ".join(_shown(shape) for shape in shapes)
            raise CheckpointError(
                f"The tensor {name!r} has shape {list(tensor.shape)}, but {self.method} asks for {wanted} there."
            )
        return tensor

    def log_once(self, level: int, text: str) -> None:
        """Log a sentence once."""
        if text not in self._logged:
            self._logged.add(text)
            log.log(level, "%s: %s", self.method, text)

    def grouped(
        self,
        module: str,
        codes: Tensor,
        scales_NG: Tensor,
        zeros_NG: Tensor | None,
        bits: Bits,
        K: int,
        group_size: int,
        groups_K: Tensor | None = None,
        int8_activations: bool = False,
    ) -> Weight:
        """The weight ``scale * (code - zero)``, where zero is ``2 ** (bits - 1)`` if there are none.

        ``codes`` are those of GroupedWeight, but rows may end with codes that do not count. ``groups_K`` says which
        group each column is in, if columns of a group need not be neighbors. If they are not, or not all groups have
        the same size, the weight is dequantized.
        """
        G = scales_NG.shape[1]
        if groups_K is not None and not 0 <= int(groups_K.min()) <= int(groups_K.max()) < G:
            raise CheckpointError(f"A column of {module!r} is in a group other than 0 to {G - 1} ({self.method}).")
        if zeros_NG is not None and bool((zeros_NG == 2 ** (bits - 1)).all()):
            zeros_NG = None
        whole = K % group_size == 0 and K * bits % 8 == 0
        neighbors_K = torch.arange(K) // group_size
        columns_K = neighbors_K if groups_K is None else groups_K.long()
        if whole and torch.equal(columns_K, neighbors_K):
            minimum_NG = None if zeros_NG is None else -(zeros_NG.float() * scales_NG.float()).contiguous()
            codes = codes[:, : K * bits // 8].contiguous()
            return GroupedWeight(codes, scales_NG, bits, minimum_NG, int8_activations=int8_activations)
        self.log_once(
            logging.WARNING,
            "weights whose groups are not neighbors of equal number are dequantized when they are read: they take as "
            "much memory as plain ones, and activations are not rounded",
        )
        values_NK = unpacked(codes, bits)[:, :K].float()
        values_NK -= 2 ** (bits - 1) if zeros_NG is None else _columns(zeros_NG, columns_K)
        values_NK *= _columns(scales_NG, columns_K)
        return values_NK


def unpacked(codes: Tensor, bits: int) -> Tensor:
    """uint8 [N, K * bits / 8] -> a code per byte, [N, K]; the lower half of a byte comes first."""
    if bits == 8:
        return codes
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)


def in_words(words_MW: Tensor, bits: int, count: int) -> Tensor:
    """``count`` codes of each row of int32 words, which hold them from their least significant bits on: uint8
    [M, count]."""
    return unpacked(words_MW.contiguous().view(torch.uint8), bits)[:, :count]


def words(count: int, bits: int) -> int:
    """How many words of 32 bits hold so many codes."""
    return -(-count * bits // 32)


def _columns(x_NG: Tensor, groups_K: Tensor) -> Tensor:
    """fp32 [N, K]: the column of each group in ``groups_K``."""
    return torch.from_numpy(np.take(x_NG.float().numpy(), groups_K.numpy(), axis=1))  # torch takes four times as long


def _called(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _fits(shape: torch.Size, wanted: tuple[int | None, ...]) -> bool:
    return len(shape) == len(wanted) and all(w in (None, n) for n, w in zip(shape, wanted, strict=True))


def _shown(shape: tuple[int | None, ...]) -> str:
    return f"[{', '.join('any' if size is None else str(size) for size in shape)}]"
