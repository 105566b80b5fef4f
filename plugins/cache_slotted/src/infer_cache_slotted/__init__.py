"""A slotted KV cache: every sequence has one contiguous region of ``max_seq_len`` positions, reserved in advance."""

from __future__ import annotations

from collections.abc import Sequence

from infer import hookimpl
from infer.cache import BlockManager, ExtendView, KVStorage, Pool, StateManager, StateStorage
from infer.cache.arrays import Ints
from infer.contracts.cache import Allocation, BlockState, CacheContext, CacheFactory, CacheRegistration
from infer.contracts.registration import Registration

INFER_PLUGIN_API = 2


class SlottedBlockManager(BlockManager):
    """A block manager in which each slot's block table has a single block, of ``max_seq_len`` positions."""

    def __init__(self, num_slots: int, max_seq_len: int) -> None:
        super().__init__(num_slots, max_seq_len, block_size=max_seq_len)

    def allocate(self, token_ids: Sequence[int]) -> Allocation | None:
        if not self._free_slots or len(token_ids) > self.max_seq_len:
            return None
        slot = self._open(0)
        self._place(slot, [slot])
        return Allocation(slot)

    def grow(self, slot: int, num_tokens: int) -> bool:
        self.length(slot)
        return num_tokens <= self.max_seq_len

    def free(self, slot: int) -> None:
        self._close(slot)

    def free_tokens(self) -> int:
        return len(self._free_slots) * self.max_seq_len

    def states(self) -> bytes:
        return bytes(BlockState.FREE if length < 0 else BlockState.OWNED for length in self._lengths_S)


class SlottedPool(Pool[Ints, ExtendView]):
    """A pool with one block of ``max_seq_len`` positions per slot."""

    storage: KVStorage

    def __init__(self, context: CacheContext) -> None:
        size, longest = context.max_batch_size, context.max_seq_len
        block_manager, states = SlottedBlockManager(size, longest), None
        if context.states:
            manager = block_manager.state_manager = StateManager(size, context.max_drafts)
            states = StateStorage(context.states, manager, size, context.device)
        super().__init__(block_manager, KVStorage(context, size, longest), states)


@hookimpl
def infer_cache_pools() -> list[Registration[CacheFactory]]:
    return [
        CacheRegistration(
            "slotted",
            lambda context, settings: SlottedPool(context),
            "one contiguous region of max_seq_len per sequence",
            states=True,
            kv_dtypes=("int8",),
        )
    ]
