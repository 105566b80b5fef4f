"""A KV cache that keeps a ring of blocks for each layer with a sliding window, as Mistral's rolling buffer does.

A sequence takes the same memory however long it gets, so nobody is preempted for want of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, Field, PositiveInt

from infer import hookimpl
from infer.cache import BlockManager, ExtendView, Ints, KVStorage, Pool
from infer.contracts.cache import Allocation, CacheContext, CacheFactory, CacheRegistration
from infer.contracts.registration import Registration

INFER_PLUGIN_API = 2
LEAST_CHUNK = 16
"""As many positions can always be taken back, as wrong drafts are."""


class RollingSettings(BaseModel, extra="forbid"):
    block_size: PositiveInt = Field(16, description="positions per block")


class RollingBlockManager(BlockManager):
    """A block manager in which each slot has the same blocks for good. In a table with a window they form a ring: a
    block's place is taken again once the window and a chunk lie between."""

    def __init__(self, context: CacheContext, block_size: int, windows: Sequence[int | None]) -> None:
        size, longest = context.max_batch_size, context.max_seq_len
        super().__init__(size, longest, block_size, len(windows))
        self._blocks = -(-longest // block_size)
        self._chunk = max(context.max_chunk or longest, LEAST_CHUNK)
        # A chunk is written before its first query reads the window - 1 positions behind it.
        rings = [longest if window is None else window - 1 + self._chunk for window in windows]
        self._rings = [min(self._blocks, -(-ring // block_size)) for ring in rings]
        self.num_blocks = size * sum(self._rings)
        self._written = [0] * size
        """Per slot, how many positions have been written, taken back or not."""

    def allocate(self, token_ids: Sequence[int]) -> Allocation | None:
        if not self._free_slots or len(token_ids) > self.max_seq_len:
            return None
        slot = self._open(0)
        self._written[slot], begin = 0, slot * sum(self._rings)
        for table, ring in enumerate(self._rings):
            self._place(slot, [begin + i % ring for i in range(self._blocks)], table=table)
            begin += ring
        return Allocation(slot)

    def grow(self, slot: int, num_tokens: int) -> bool:
        self.length(slot)
        return num_tokens <= self.max_seq_len

    def free(self, slot: int) -> None:
        self._close(slot)

    def free_tokens(self) -> int:
        return len(self._free_slots) * self.max_seq_len

    def truncate(self, slot: int, num_tokens: int) -> None:
        self._written[slot] = max(self._written[slot], self.length(slot))
        super().truncate(slot, num_tokens)

    def least_tokens(self, slot: int) -> int:
        whole = all(ring == self._blocks for ring in self._rings)
        return 0 if whole else max(0, self._written[slot] - self._chunk)


class RollingPool(Pool[Ints, ExtendView]):
    def __init__(self, context: CacheContext, settings: RollingSettings) -> None:
        tables = _tables(context)
        block_manager = RollingBlockManager(context, settings.block_size, [window for window, _ in tables])
        layers = [layers for _, layers in tables]
        super().__init__(block_manager, KVStorage(context, block_manager.num_blocks, settings.block_size, layers))


def _tables(context: CacheContext) -> list[tuple[int | None, list[int]]]:
    """(window, layers) of each block table. Tables share memory, so they have about equally many layers."""
    windows: dict[int | None, list[int]] = {}
    for layer, spec in enumerate(context.layers):
        windows.setdefault(spec.window, []).append(layer)
    if len({(spec.num_kv_heads, spec.head_size) for spec in context.layers}) > 1:  # cannot share memory
        return [(None, list(range(len(context.layers))))]
    size = min(map(len, windows.values()))
    return [(window, all[i : i + size]) for window, all in windows.items() for i in range(0, len(all), size)]


@hookimpl
def infer_cache_pools() -> list[Registration[CacheFactory]]:
    what = "a ring of blocks for layers with a window: each sequence takes the same memory however long it gets"
    return [CacheRegistration("rolling", RollingPool, what, RollingSettings, kv_dtypes=("int8",))]
