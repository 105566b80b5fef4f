"""Random tensors, and comparisons that say where two tensors differ."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from infer.device import same_bits
from infer_testing.suite import Violation

TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""How far a result may be from the exact one, as a part of that value and of the values' mean magnitude, in its row or
in all rows: enough for any order of summation, and for weights of attention that are rounded to the model's dtype."""


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def differing(found: Tensor, expected: Tensor, dtype: torch.dtype, terms: Tensor | None = None) -> Tensor:
    """Where a result is not the exact one but for rounding; two NaNs, or equal infinities, do not differ. ``terms`` are
    what the values are computed from, if they may cancel out: rounding errors are parts of these."""
    a, b = found.detach().cpu().double(), expected.detach().cpu().double()
    sizes = (b if terms is None else terms).detach().cpu().double().abs()
    sizes = sizes.where(sizes.isfinite(), torch.nan)
    scale = torch.fmax(sizes.nanmean(), sizes.nanmean(-1, keepdim=True) if sizes.ndim else sizes)
    bound = TOLERANCES[dtype] * (b.abs() + scale.nan_to_num()) + 1e-30
    return ~(((a - b).abs() <= bound) & b.isfinite() | (a == b) | a.isnan() & b.isnan())


def compare(
    what: str, found: Tensor, expected: Tensor, dtype: torch.dtype, rows: str = "row", terms: Tensor | None = None
) -> None:
    """Raises Violation unless ``found`` has the shape of ``expected``, the dtype, and its values but for rounding
    (``differing``)."""
    if found.shape != expected.shape:
        raise Violation(f"{what} has the shape {list(found.shape)}, not {list(expected.shape)}")
    if found.dtype != dtype:
        raise Violation(f"{what} is of {found.dtype}, not {dtype}")
    wrong = differing(found, expected, dtype, terms)
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        place = f"{rows} {at[0]}" + (f", at {list(at[1:])}" if len(at) > 1 else "")
        raise Violation(
            f"{what} is {found[at].item():.6g} in {place}, but {expected[at].item():.6g} is right; "
            f"{int(wrong.sum())} of {wrong.numel()} values differ"
        )


def equal_bits(what: str, found: Tensor, expected: Tensor) -> None:
    """Raises Violation unless the tensors are the same, bit for bit."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise Violation(
            f"{what} is {list(found.shape)} of {found.dtype}, not {list(expected.shape)} of {expected.dtype}"
        )
    wide = found.element_size() > 1
    if not (same_bits(found, expected) if wide else torch.equal(found, expected)):
        different = (found != expected).flatten(1).any(1) if found.ndim > 1 else found != expected
        rows = different.nonzero().flatten().tolist()
        raise Violation(f"{what} has other bits, first in row {rows[0] if rows else 0}")


@contextmanager
def unchanged(what: str, **tensors: Tensor) -> Iterator[None]:
    """Raises Violation if what is done within writes to one of the tensors."""
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    yield
    for name, tensor in tensors.items():
        if not torch.equal(tensor.nan_to_num(), before[name].nan_to_num()):
            raise Violation(f"{what} writes to its argument {name}")


def nbytes_of(packed: object) -> int:
    """Bytes of all tensors that an object has in its attributes, or in containers there."""
    if isinstance(packed, Tensor):
        return packed.nbytes
    if isinstance(packed, (list, tuple)):
        return sum(map(nbytes_of, packed))
    return sum(map(nbytes_of, getattr(packed, "__dict__", {}).values()))
