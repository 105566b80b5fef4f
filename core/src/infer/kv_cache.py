"""The storage, the view and the positions that every block-structured pool shares; pools differ in which blocks they
give to whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infer.device import caller, upload, zeros
from infer.protocols import AttentionSpec, CacheContext, KernelsProtocol, Ragged, Rotary

Ints = np.ndarray[tuple[int, ...], np.dtype[np.int32]]


class KVStorage:
    """K and V of every layer, in blocks: per layer two tensors [num_blocks, block_size, K, E].

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

    def view(
        self, table_BP: Ints, starts: Sequence[int], lens: Sequence[int], out: dict[str, Tensor] | None = None
    ) -> ExtendView:
        """A view that extends sequence b, kept in blocks ``table_BP[b]``, by positions starts[b]..starts[b]+lens[b].

        ``out`` has the tensors that the view is to use, by the names of ``Ragged``'s fields.
        """
        starts_B = np.array(starts, dtype=np.int32)
        if len(lens) == sum(lens):
            offsets_B1 = np.arange(len(lens) + 1, dtype=np.int32)
            sequence_T, position_T = offsets_B1[:-1], starts_B
        else:
            lens_B = np.array(lens, dtype=np.int32)
            offsets_B1 = np.zeros(len(lens) + 1, dtype=np.int32)
            np.cumsum(lens_B, out=offsets_B1[1:])
            sequence_T = np.repeat(np.arange(len(lens)), lens_B)
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
            (Ragged if out is None else FixedRagged)(
                starts=tuple(starts),
                lens=tuple(lens),
                offsets=tuple(offsets_B1.tolist()),
                **{name: self._place(array, out[name] if out else None) for name, array in tensors.items()},
            ),
        )

    def _place(self, array: np.ndarray[Any, Any], out: Tensor | None) -> Tensor:
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


class BlockPool:
    """What a pool over a KVStorage needs besides allocation: each slot's row of blocks, its length, and the views."""

    def __init__(self, context: CacheContext, num_blocks: int, block_size: int, max_blocks: int) -> None:
        self.storage = KVStorage(context, num_blocks, block_size)
        self._table_SP: Ints = np.zeros((context.max_batch_size, max_blocks), dtype=np.int32)
        size = context.max_batch_size
        self._capacity = [-1] * size
        """Positions that a slot has blocks for; -1 where it is not allocated."""
        self._lengths = [-1] * size
        self._fixed = {
            "starts_B": torch.zeros(size, dtype=torch.int32, device=context.device),
            "offsets_B1": torch.zeros(size + 1, dtype=torch.int32, device=context.device),
            "block_table_BP": torch.zeros((size, max_blocks), dtype=torch.int32, device=context.device),
            "flat_T": torch.zeros(size, dtype=torch.int64, device=context.device),
        }
        """Of the views that stay put."""

    def length(self, slot: int) -> int:
        if self._lengths[slot] < 0:
            raise ValueError(f"slot {slot} is not allocated")
        return self._lengths[slot]

    def batched_chunked_prefill_view(
        self, slots: Sequence[int], start_positions: Sequence[int], chunk_lens: Sequence[int]
    ) -> ExtendView:
        longest = self._extend(slots, start_positions, chunk_lens)
        blocks = -(-longest // self.storage.block_size)
        return self.storage.view(self._table_SP[slots, :blocks], start_positions, chunk_lens)

    def decode_view(self, slots: Sequence[int], rows: int | None = None) -> ExtendView:
        starts, lens = [self._lengths[slot] for slot in slots], [1] * len(slots)
        if rows is None:
            return self.batched_chunked_prefill_view(slots, starts, lens)
        blocks = -(-self._extend(slots, starts, lens) // self.storage.block_size)
        more = rows - len(slots)
        table_BP = self._table_SP[[*slots, *[slots[-1]] * more], :blocks]
        return self.storage.view(table_BP, starts + [starts[-1]] * more, [1] * rows, self._fixed)

    def _extend(self, slots: Sequence[int], starts: Sequence[int], lens: Sequence[int]) -> int:
        """Book the positions; the longest length after it."""
        if len(set(slots)) < len(slots):
            raise ValueError(f"slots {list(slots)} repeat; a step extends a slot once")
        lengths, capacity, longest = self._lengths, self._capacity, 0
        for slot, start, length in zip(slots, starts, lens, strict=True):
            end = start + length
            if start != lengths[slot] or start < 0:
                raise ValueError(f"slot {slot} holds {self.length(slot)} positions; a chunk cannot start at {start}")
            if length < 1 or end > capacity[slot]:
                raise ValueError(f"slot {slot} has room for {capacity[slot]} positions, not for {start}+{length}")
            if end > longest:
                longest = end
        for slot, length in zip(slots, lens, strict=True):
            lengths[slot] += length
        return longest
