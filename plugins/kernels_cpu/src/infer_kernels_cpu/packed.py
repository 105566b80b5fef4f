"""What the native kernels make of weights."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from infer.contracts.kernels import PackedMemory
from infer.device import pages
from infer.kernels.reference import PackedExperts
from infer_kernels_cpu import native

KINDS = {torch.float32: 0, torch.bfloat16: 1}
"""The native code's numbers of the element types."""
SCALES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The native code's numbers of the types of scales."""


@dataclass(frozen=True)
class Packed:
    """A weight [N, K] in the layout in which the native code multiplies it, and its bias."""

    words: Tensor
    N: int
    K: int
    gated: bool
    dtype: torch.dtype
    bias_N: Tensor | None


@dataclass(frozen=True)
class PackedGrouped(Packed):
    """A grouped weight, whose layout ``matrix`` describes; it points to ``words``."""

    matrix: native.GroupedMatrix

    @property
    def form(self) -> tuple[Any, ...]:
        """What all experts of a mixture have to have in common."""
        fields = ("N", "K", "group", "bits", "scales", "minimum", "table", "int8")
        return tuple(getattr(self.matrix, name) for name in fields)


@dataclass(frozen=True)
class Mixture(PackedExperts):
    """Experts whose weights all have the same form, and the structure that points to them."""

    native: native.Mixture
    pointed: tuple[Any, ...]
    """The arrays that the structure points to."""


@dataclass(frozen=True)
class PackedAdapter:
    """What an adapter changes in one product, as the native code reads it."""

    native: native.Adapter
    pointed: tuple[Any, ...]
    """What the structure points to."""


class AdapterTable:
    """The adapters of one product by slot, as pointers that stay where they are."""

    def __init__(self, slots: int) -> None:
        self.pointers = (ctypes.c_void_p * slots)()
        self.address = ctypes.addressof(self.pointers)
        self.kept: list[PackedAdapter | None] = [None] * slots


class Shelf:
    """Memory for ``count`` results of equal size side by side, so that they get huge pages together. A result of
    another size gets memory of its own."""

    def __init__(self, count: int) -> None:
        self._left, self._memory, self._size = count, memoryview(b""), 0

    def __call__(self, nbytes: int) -> memoryview:
        if not self._size:
            self._memory, self._size = memoryview(pages(nbytes * self._left)), nbytes
        if nbytes != self._size or len(self._memory) < nbytes:
            return memoryview(pages(nbytes))
        part, self._memory = self._memory[:nbytes], self._memory[nbytes:]
        return part


def small(nbytes: int) -> Any:
    """Memory for a result that is too small for huge pages."""
    return torch.empty(nbytes, dtype=torch.uint8).numpy()


def room(
    count: int, dtype: torch.dtype, memory: Callable[[int], Any], weight: Tensor, kept: PackedMemory | None
) -> tuple[Tensor, bool]:
    """A tensor for ``count`` words of a packed ``weight``, and whether they have to be packed: in ``kept`` if it has
    them, on the meta device if the weight is, and otherwise in ``memory``."""
    nbytes = count * dtype.itemsize
    if kept is not None and (there := kept.find(nbytes)) is not None:
        return torch.frombuffer(there, dtype=dtype), False
    if weight.is_meta:
        return torch.empty(count, dtype=dtype, device="meta"), False
    made = memoryview(memory(nbytes))
    if kept is not None:
        kept.add(made)
    return torch.frombuffer(made, dtype=dtype), True


def alike(weights: Sequence[Packed]) -> bool:
    """Whether one product can do for all of them."""
    return len({x.form if isinstance(x, PackedGrouped) else (x.N, x.K, x.dtype) for x in weights}) == 1


def addresses(weights: Sequence[Packed]) -> Any:
    """An array of pointers to the weights as the native code expects them."""
    places = [ctypes.addressof(x.matrix) if isinstance(x, PackedGrouped) else x.words.data_ptr() for x in weights]
    return (ctypes.c_void_p * len(places))(*places)


def biases(weights: Sequence[Packed]) -> Any:
    """An array of pointers to the biases; None if there are none."""
    places = [None if x.bias_N is None else x.bias_N.data_ptr() for x in weights]
    return (ctypes.c_void_p * len(places))(*places) if any(places) else None
