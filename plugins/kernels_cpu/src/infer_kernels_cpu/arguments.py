"""How tensors are handed to the native kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from infer.contracts.attention import KV, QuantizedKV
from infer.contracts.states import StateRows
from infer_kernels_cpu.packed import KINDS


def cache_pointers(cache: KV) -> tuple[int, int | None]:
    """The addresses of K's or V's values, or of its codes and scales."""
    if isinstance(cache, QuantizedKV):
        return cache.codes.data_ptr(), cache.scales.data_ptr()
    return cache.data_ptr(), None


def contiguous_rows(x: Tensor) -> Tensor:
    """x [T, n] with neighboring values side by side; its rows may be parts of longer ones."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def one_kind(x: Tensor, *others: Tensor) -> int:
    """The number of the element type that all of them have."""
    assert all(other.dtype == x.dtype for other in others), [x.dtype, *(other.dtype for other in others)]
    return KINDS[x.dtype]


def state_places(state: Tensor, dtype: torch.dtype, *shape: int) -> tuple[int, int]:
    """The address and the row's stride of states [R, *shape]."""
    assert (state.dtype, state.shape[1:]) == (dtype, shape)
    assert state.is_contiguous() or state[0].is_contiguous()
    return state.data_ptr(), state.stride(0)


def row_places(rows: StateRows, T: int) -> tuple[int, int, int, int]:
    """The addresses of offsets, rows to read and rows to save, and how many sequences there are."""
    assert len(rows.save_T) == T
    assert len(rows.offsets_B1) == len(rows.read_B) + 1
    return rows.offsets_B1.data_ptr(), rows.read_B.data_ptr(), rows.save_T.data_ptr(), len(rows.read_B)
