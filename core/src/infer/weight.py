"""The weights that kernels multiply by: a plain one is a tensor [N, K], a grouped one has codes of 4 or 8 bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from infer.errors import CheckpointError

LEAST = 2.0**-100
"""A group of values of no greater magnitude than any below this is quantized to zeros: scales and their inverses stay
normal floats."""
GROUP = {4: 32, 8: 64}
"""How many neighbors share a scale, by the bits of their codes, or the largest part of it that divides a row. With 8
bits, groups of 32 are hardly more accurate, and a product with them takes a fifth longer."""


def exponential(x: Tensor) -> Tensor:
    """e^x, of the shape of ``x``. On the meta device, torch would import its compiler for that, which takes seconds."""
    return torch.empty_like(x) if x.is_meta else x.exp()


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The rows of all parts; as for ``exponential``, not by torch on the meta device."""
    first = parts[0]
    if first.is_meta:
        return first.new_empty(sum(map(len, parts)), *first.shape[1:])
    return torch.cat(list(parts))


@dataclass(frozen=True)
class GroupedWeight:
    """A quantized weight [N, K]: a code of ``bits`` per value, and a scale per group of K / G neighbors in a row.

    A value is ``scale * code + minimum`` if there are minima, ``scale * table[code]`` if there is a table, and
    ``scale * (code - 2 ** (bits - 1))`` otherwise; it is computed in fp32, then rounded to ``dtype``.

    Raises CheckpointError if shapes or types do not fit each other.
    """

    codes: Tensor
    """uint8 [N, K * bits / 8]; with 4 bits, a byte's lower half is the earlier code."""
    scales_NG: Tensor
    bits: Literal[4, 8] = 4
    minimum_NG: Tensor | None = None
    table: Tensor | None = None
    """[16]: the value of each code, for codes of 4 bits."""
    int8_activations: bool = False
    """Whether a product rounds the activations to int8, too, with a scale per row and ``activation_group`` neighbors:
    ``quantize_rows``. A table then has integers from -128 to 127."""
    dtype: torch.dtype = torch.float32
    """The dtype of the activations that the weight is multiplied with."""

    def __post_init__(self) -> None:
        (N, K), G = self.shape, self.scales_NG.shape[-1]
        if self.codes.dtype != torch.uint8 or self.scales_NG.shape != (N, G) or not 0 < G <= K or K % G:
            kind = str(self.codes.dtype).removeprefix("torch.")
            raise CheckpointError(
                f"A grouped weight has {list(self.codes.shape)} {kind} codes and {list(self.scales_NG.shape)} scales, "
                f"which do not fit {self.bits} bits."
            )
        if self.minimum_NG is not None and (self.table is not None or self.minimum_NG.shape != (N, G)):
            raise CheckpointError("A grouped weight has a minimum per scale, or a table, but not both.")
        if self.table is not None and (self.bits != 4 or self.table.shape != (16,)):
            raise CheckpointError("A grouped weight has a table of 16 values for its codes of 4 bits.")
        if self.table is not None and self.int8_activations and not _int8(self.table):
            raise CheckpointError("Activations are int8 for weights with a table of integers only.")

    @property
    def shape(self) -> torch.Size:
        """[N, K]."""
        return torch.Size((self.codes.shape[0], self.codes.shape[1] * 8 // self.bits))

    @property
    def group_size(self) -> int:
        """How many neighbors in a row share a scale."""
        return self.shape[1] // self.scales_NG.shape[1]

    @property
    def activation_group(self) -> int:
        """How many neighboring activations share a scale if they are int8: the weight's group, or the largest part of
        it with at most 128."""
        group = self.group_size
        return max(size for size in range(1, 129) if group % size == 0)

    @property
    def nbytes(self) -> int:
        """Bytes of the codes and of ``floats``."""
        return sum(x.nbytes for x in (self.codes, *self.floats))

    @property
    def floats(self) -> list[Tensor]:
        """The scales, and the minima or the table if there are any."""
        return [x for x in (self.scales_NG, self.minimum_NG, self.table) if x is not None]

    @property
    def _tensors(self) -> dict[str, Tensor]:
        """All tensors, by their fields."""
        return {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}

    def to(self, device: torch.device, dtype: torch.dtype) -> GroupedWeight:
        """The weight on ``device``, for activations of ``dtype``. On the meta device, a table keeps its values, which
        are part of the weight's form."""
        tensors = self._tensors
        if device.type == "meta":
            tensors.pop("table", None)
        moved: dict[str, Any] = {name: x.to(device) for name, x in tensors.items()}
        if dtype == self.dtype and all(moved[name] is x for name, x in tensors.items()):
            return self
        return replace(self, **moved, dtype=dtype)

    def clone(self) -> GroupedWeight:
        """A copy."""
        copies: dict[str, Any] = {name: x.clone() for name, x in self._tensors.items()}
        return replace(self, **copies)

    def rows(self, order_N: Tensor) -> GroupedWeight:
        """A copy of the rows ``order_N``, in that order."""
        names = ("codes", "scales_NG", "minimum_NG")
        picked: dict[str, Any] = {
            name: x.index_select(0, order_N) for name in names if (x := getattr(self, name)) is not None
        }
        return replace(self, **picked)

    def columns(self, order: Tensor) -> GroupedWeight:
        """A copy in which so many equal parts of each row, of whole groups, come in that order."""
        names = ("codes", "scales_NG", "minimum_NG")
        picked: dict[str, Any] = {
            name: x.view(len(x), len(order), -1).index_select(1, order).flatten(1)
            for name in names
            if (x := getattr(self, name)) is not None
        }
        return replace(self, **picked)

    def stacks_with(self, other: GroupedWeight) -> bool:
        """Whether ``stack`` can stack the two."""
        alike = all(
            getattr(self, name) == getattr(other, name) for name in ("bits", "group_size", "int8_activations", "dtype")
        )
        if self.shape[1] != other.shape[1] or (self.minimum_NG is None) != (other.minimum_NG is None):
            return False
        if self.table is None or other.table is None:
            return alike and self.table is other.table
        return alike and torch.equal(self.table, other.table)

    @staticmethod
    def stack(parts: Sequence[GroupedWeight]) -> GroupedWeight:
        """One weight of the parts' rows, in their order."""
        first, minima = parts[0], [x for part in parts if (x := part.minimum_NG) is not None]
        return replace(
            first,
            codes=joined([part.codes for part in parts]),
            scales_NG=joined([part.scales_NG for part in parts]),
            minimum_NG=joined(minima) if minima else None,
        )

    def dequantize(self) -> Tensor:
        """[N, K] in ``dtype``."""
        if self.codes.is_meta:
            return torch.empty(self.shape, dtype=self.dtype, device="meta")
        codes = self.codes
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
        if self.table is not None:
            values_NK = self.table.float()[codes.long()]
        else:
            values_NK = codes.float()
            if self.minimum_NG is None:
                values_NK = values_NK - 2 ** (self.bits - 1)
        values_NGk = values_NK.view(*self.scales_NG.shape, -1) * self.scales_NG.float()[..., None]
        if self.minimum_NG is not None:
            values_NGk = values_NGk + self.minimum_NG.float()[..., None]
        return values_NGk.flatten(1).to(self.dtype)

    def __str__(self) -> str:
        return f"{self.bits}-bit weights in groups of {self.group_size}"


def unfilled(weight_NK: Weight, bits: Literal[4, 8]) -> GroupedWeight:
    """What quantizing a weight yields (``infer/kernels/quantize.py``), with arbitrary codes and scales."""
    N, K = weight_NK.shape
    device = (weight_NK if isinstance(weight_NK, Tensor) else weight_NK.codes).device
    scales_NG = torch.empty(N, K // math.gcd(K, GROUP[bits]), dtype=torch.bfloat16, device=device)
    codes = torch.empty(N, K * bits // 8, dtype=torch.uint8, device=device)
    return GroupedWeight(codes, scales_NG, bits, int8_activations=True, dtype=weight_NK.dtype)


def divided(x: Tensor, by: float) -> Tensor:
    """x / by, of the shape of ``x``, rounded once on every device. On a GPU, torch would multiply by the inverse of a
    number, which is rounded itself."""
    return x / x.new_full((), by)


def quantize_rows(x_TK: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Round activations to integers q from -127 to 127 and scales s, so that x is about q * s: q fp32 [T, G, group], s
    fp32 [T, G, 1]. A group's scale is its greatest absolute value / 127; halves round to even. A value that is not
    finite makes its group's scale so."""
    x_TGk = x_TK.float().view(*x_TK.shape[:-1], x_TK.shape[-1] // group, group)
    top_TG1 = x_TGk.abs().amax(-1, keepdim=True)
    inverse_TG1 = torch.where(top_TG1 < LEAST, 0.0, torch.full_like(top_TG1, 127) / top_TG1)
    return (x_TGk * inverse_TG1).round(), divided(top_TG1, 127)


def _int8(values: Tensor) -> bool:
    return bool(((values == values.round()) & (values >= -128) & (values <= 127)).all())


def form_of(weight: Tensor | GroupedWeight) -> str:
    """What a person calls it."""
    return str(weight) if isinstance(weight, GroupedWeight) else "plain weights"


Weight: TypeAlias = Tensor | GroupedWeight
