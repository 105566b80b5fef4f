"""The storage and the view that every block-structured pool shares; pools differ in bookkeeping only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from infer.protocols import AttentionSpec, CacheContext, KernelsProtocol, Ragged


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
        self.k = [torch.zeros(s, dtype=context.dtype, device=context.device) for s in shapes]
        self.v = [torch.zeros(s, dtype=context.dtype, device=context.device) for s in shapes]

    def view(self, tables: Sequence[Sequence[int]], starts: Sequence[int], lens: Sequence[int]) -> ExtendView:
        """A view that extends sequence b, kept in blocks ``tables[b]``, by positions starts[b] .. starts[b]+lens[b]."""
        lens_B = np.asarray(lens, dtype=np.int64)
        starts_B = np.asarray(starts, dtype=np.int64)
        offsets = np.concatenate(([0], np.cumsum(lens_B)))
        table_BP = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
        for b, blocks in enumerate(tables):
            table_BP[b, : len(blocks)] = blocks
        sequence_T = np.repeat(np.arange(len(lens_B)), lens_B)
        position_T = np.arange(offsets[-1]) - np.repeat(offsets[:-1] - starts_B, lens_B)
        block_T = table_BP[sequence_T, position_T // self.block_size]
        flat_T = block_T.astype(np.int64) * self.block_size + position_T % self.block_size
        return ExtendView(
            self,
            Ragged(
                starts=tuple(starts),
                lens=tuple(lens),
                offsets=tuple(offsets.tolist()),
                starts_B=torch.from_numpy(starts_B.astype(np.int32)).to(self.device),
                offsets_B1=torch.from_numpy(offsets.astype(np.int32)).to(self.device),
                block_table_BP=torch.from_numpy(table_BP).to(self.device),
                flat_T=torch.from_numpy(flat_T).to(self.device),
            ),
        )


class ExtendView:
    """One step's window on the storage. Everything is an extend: prefill, chunk and decode differ in lengths only."""

    def __init__(self, storage: KVStorage, ragged: Ragged) -> None:
        self.storage = storage
        self.ragged = ragged

    def attend(
        self, layer: int, q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, rotary: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        s, ragged = self.storage, self.ragged
        k_cache, v_cache = s.k[layer], s.v[layer]
        if rotary is None:
            s.kernels.store_kv(k_TKE, v_TKE, k_cache, v_cache, ragged.flat_T)
        else:
            q_THE = s.kernels.rope_store_kv(q_THE, k_TKE, v_TKE, *rotary, k_cache, v_cache, ragged.flat_T)
        return s.kernels.extend_attention(q_THE, k_cache, v_cache, ragged, s.layers[layer])
