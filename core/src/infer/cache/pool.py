"""A cache pool, made of a block manager and a storage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from infer.cache.block_manager import BlockManager, BlockManagerProtocol, SharingBlockManager
from infer.cache.states import StateStorage
from infer.cache.storage import ExtendView, KVStorage, StorageProtocol
from infer.contracts.cache import Allocation, ForkingPool, KVCacheView, MappedPool, TruncatingPool

Table = TypeVar("Table")
View = TypeVar("View", bound=KVCacheView)


class Pool(Generic[Table, View]):
    """A ``CachePoolProtocol`` made of a block manager and of a storage that understands its tables. It shares tokens
    only if the block manager is a SharingBlockManager whose ``shares``, if it has that, is not False. It is a
    TruncatingPool, a MappedPool or a ForkingPool only if the block manager has what these have, a TruncatingPool with
    states only if these have rows for drafts, and a ForkingPool only with states."""

    def __init__(
        self,
        block_manager: BlockManagerProtocol[Table],
        storage: StorageProtocol[Table, View],
        states: StateStorage | None = None,
    ) -> None:
        """With ``states``, whose manager is the block manager's, the storage's views are ``ExtendView``s."""
        self.block_manager = block_manager
        self.storage = storage
        self.state_storage = states
        self.grow = block_manager.grow
        self.free = block_manager.free
        self.free_tokens = block_manager.free_tokens
        self.length = block_manager.length
        if isinstance(block_manager, BlockManager):
            self.room: Sequence[int] = block_manager.room
        if isinstance(block_manager, TruncatingPool) and (states is None or states.max_drafts):
            self.truncate = block_manager.truncate
        if isinstance(block_manager, MappedPool):
            self.states = block_manager.states
        if isinstance(block_manager, ForkingPool) and states is not None:
            self.forks = block_manager.forks
        self._slots: Sequence[int] = []
        """The slots of the last ``decode_view``."""
        self._slots_B = np.zeros(0, dtype=np.int64)
        self._sharing = (
            block_manager
            if isinstance(block_manager, SharingBlockManager) and getattr(block_manager, "shares", True)
            else None
        )
        self.shares = self._sharing is not None

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes + self.state_bytes

    @property
    def state_bytes(self) -> int:
        return 0 if self.state_storage is None else self.state_storage.nbytes

    def allocate(self, token_ids: Sequence[int], *, reuse: bool = True, salt: str = "") -> Allocation | None:
        if self._sharing is None:
            return self.block_manager.allocate(token_ids)
        return self._sharing.allocate(token_ids, reuse=reuse, salt=salt)

    def commit(self, slot: int, token_ids: Sequence[int], num_computed: int) -> None:
        if self._sharing is not None:
            self._sharing.commit(slot, token_ids, num_computed)

    def batched_chunked_prefill_view(
        self, slots: Sequence[int], start_positions: Sequence[int], chunk_lens: Sequence[int]
    ) -> View:
        longest = self.block_manager.extend(slots, start_positions, chunk_lens)
        view = self.storage.view(self.block_manager.table(slots, longest), start_positions, chunk_lens)
        if self.state_storage is not None:
            _of(view).states = self.state_storage.view(slots, start_positions, chunk_lens)
        return view

    def decode_view(self, slots: Sequence[int], rows: int | None = None) -> View:
        if slots != self._slots:
            self._slots = list(slots)
            self._slots_B = np.fromiter(slots, np.int64, len(slots))
        slots_B = self._slots_B
        starts_B, longest = self.block_manager.advance(slots_B)
        kept = self.state_storage
        if rows is None:
            one_B = np.ones_like(starts_B)
            view = self.storage.view(self.block_manager.table(slots_B, longest), starts_B, one_B)
            if kept is not None:
                _of(view).states = kept.view(slots_B, starts_B, one_B)
            return view
        padding = rows - len(slots)
        if kept is None:
            if padding:
                slots_B, starts_B = (np.concatenate([x, np.repeat(x[-1:], padding)]) for x in (slots_B, starts_B))
            return self.storage.fixed_view(self.block_manager.table(slots_B, longest), starts_B)
        states = kept.fixed_view(slots_B, starts_B, rows)
        table: Any = self.block_manager.table(slots_B, longest)
        if padding:
            assert isinstance(self.storage, KVStorage), "states are kept beside a KVStorage"
            more = [(0, 0)] * (table.ndim - 2) + [(0, padding), (0, 0)]
            table = np.pad(table, more, constant_values=self.storage.scratch)
            starts_B = np.pad(starts_B, (0, padding))
        view = self.storage.fixed_view(table, starts_B)
        _of(view).states = states
        return view


def _of(view: KVCacheView) -> ExtendView:
    assert isinstance(view, ExtendView), "states are kept beside a KVStorage"
    return view
