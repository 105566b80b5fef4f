"""K/V in blocks, and one step's view on them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from infer.cache.books import Ints
from infer.contracts.protocols import AttentionSpec, CacheContext, KernelsProtocol, KVCacheView, Ragged, Rotary
from infer.device import caller, upload, zeros

Table_contra = TypeVar("Table_contra", contravariant=True)
View_co = TypeVar("View_co", bound=KVCacheView, covariant=True)


class StorageProtocol(Protocol[Table_contra, View_co]):
    """What ``Pool`` asks of a storage: views of its own making, and what it weighs."""

    @property
    def nbytes(self) -> int:
        """Bytes of everything that grows with the number of positions."""

    def view(
        self, table: Table_contra, starts: Sequence[int] | Ints, lens: Sequence[int] | Ints, *, fixed: bool = False
    ) -> View_co:
        """A view that extends sequence b, kept where row b of the table says, by positions
        [starts[b], starts[b] + lens[b]).

        ``fixed``: on tensors that stay where they are from one such view to the next, as
        ``CachePoolProtocol.decode_view`` wants them.
        """


class KVStorage:
    """K and V of every layer in the model's dtype: per layer two tensors [num_blocks, block_size, K, E].

    Starts zeroed: whatever is read is finite.
    """

    def __init__(self, context: CacheContext, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.layers: list[AttentionSpec] = list(context.layers)
        self.kernels: KernelsProtocol = context.kernels
        self.device = context.device
        shapes = [(num_blocks, block_size, spec.num_kv_heads, spec.head_size) for spec in self.layers]
        self.k = [zeros(s, context.dtype, context.device) for s in shapes]
        self.v = [zeros(s, context.dtype, context.device) for s in shapes]
        size, blocks = context.max_batch_size, -(-context.max_seq_len // block_size)
        self._fixed = {
            "starts_B": torch.zeros(size, dtype=torch.int32, device=context.device),
            "offsets_B1": torch.zeros(size + 1, dtype=torch.int32, device=context.device),
            "block_table_BP": torch.zeros((size, blocks), dtype=torch.int32, device=context.device),
            "flat_T": torch.zeros(size, dtype=torch.int64, device=context.device),
        }

    @staticmethod
    def bytes_per_token(layers: Iterable[AttentionSpec], dtype: torch.dtype) -> int:
        """What a position takes in all layers."""
        return sum(2 * spec.num_kv_heads * spec.head_size for spec in layers) * dtype.itemsize

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (*self.k, *self.v))

    def view(
        self,
        table_BP: Ints,
        starts: Sequence[int] | Ints,
        lens: Sequence[int] | Ints,
        *,
        fixed: bool = False,
    ) -> ExtendView:
        starts_B, lens_B = np.asarray(starts, dtype=np.int32), np.asarray(lens, dtype=np.int32)
        offsets_B1 = np.zeros(len(lens_B) + 1, dtype=np.int32)
        np.cumsum(lens_B, out=offsets_B1[1:])
        if offsets_B1[-1] == len(lens_B):
            sequence_T, position_T = offsets_B1[:-1], starts_B
        else:
            sequence_T = np.repeat(np.arange(len(lens_B)), lens_B)
            position_T = np.arange(offsets_B1[-1]) - np.repeat(offsets_B1[:-1] - starts_B, lens_B)
        block_T, within_T = np.divmod(position_T, self.block_size)
        tensors: dict[str, np.ndarray[Any, Any]] = {
            "starts_B": starts_B,
            "offsets_B1": offsets_B1,
            "block_table_BP": table_BP,
            "flat_T": table_BP[sequence_T, block_T].astype(np.int64) * self.block_size + within_T,
        }
        return ExtendView(
            self,
            (FixedRagged if fixed else Ragged)(
                starts=tuple(starts_B.tolist()),
                lens=tuple(lens_B.tolist()),
                offsets=tuple(offsets_B1.tolist()),
                **{name: self._put(array, self._fixed[name] if fixed else None) for name, array in tensors.items()},
            ),
        )

    def _put(self, array: np.ndarray[Any, Any], out: Tensor | None) -> Tensor:
        """Of rows that are shorter than those of ``out``, the beginnings."""
        if out is None or array.ndim == 1:
            return upload(array, self.device, out)
        upload(array, self.device, out[:, : array.shape[1]])
        return out[: len(array)]


class FixedRagged(Ragged):
    """Of a view on tensors that stay put. ``read`` says who asked for ``starts``, which do not."""

    read: str | None = None

    def __getattribute__(self, name: str) -> Any:
        if name == "starts":
            object.__setattr__(self, "read", f"{caller()} reads Ragged.starts")
        return super().__getattribute__(name)


class ExtendView:
    """One step's window on the storage. Everything is an extend: prefill, chunk and decode differ in lengths only."""

    def __init__(self, storage: KVStorage, ragged: Ragged) -> None:
        self.storage = storage
        self.ragged = ragged

    def attend(self, layer: int, q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, rotary: Rotary | None = None) -> Tensor:
        s, ragged = self.storage, self.ragged
        k_cache, v_cache = s.k[layer], s.v[layer]
        if rotary is None:
            s.kernels.store_kv(k_TKE, v_TKE, k_cache, v_cache, ragged.flat_T)
        else:
            q_THE = s.kernels.rope_store_kv(q_THE, k_TKE, v_TKE, rotary, k_cache, v_cache, ragged.flat_T)
        return s.kernels.extend_attention(q_THE, k_cache, v_cache, ragged, s.layers[layer])
