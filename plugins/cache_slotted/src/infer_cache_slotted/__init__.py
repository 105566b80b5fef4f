"""A slotted KV cache: every sequence owns one region of ``max_seq_len`` positions, reserved up front."""

from __future__ import annotations

from collections.abc import Sequence

from infer import hookimpl
from infer.hookspecs import Registration
from infer.kv_cache import BlockPool
from infer.protocols import Allocation, CacheContext, CacheFactory, NoSettings

INFER_PLUGIN_API = 1


class SlottedPool(BlockPool):
    """A slot is a sequence whose block table has one block as long as a sequence may become."""

    def __init__(self, context: CacheContext) -> None:
        super().__init__(context, context.max_batch_size, context.max_seq_len, 1)
        self.max_seq_len = context.max_seq_len
        self._table_SP[:, 0] = range(context.max_batch_size)
        self._free = list(reversed(range(context.max_batch_size)))

    def allocate(self, token_ids: Sequence[int], *, reuse: bool = True, salt: str = "") -> Allocation | None:
        """A whole slot, at length 0; ``reuse`` and ``salt`` have no bearing, as nothing is ever shared."""
        if not self._free or len(token_ids) > self.max_seq_len:
            return None
        slot = self._free.pop()
        self._lengths[slot] = 0
        self._capacity[slot] = self.max_seq_len
        return Allocation(slot)

    def grow(self, slot: int, num_tokens: int) -> bool:
        self.length(slot)
        return num_tokens <= self.max_seq_len

    def commit(self, slot: int, token_ids: Sequence[int], num_computed: int) -> None:
        self.length(slot)

    def free(self, slot: int) -> None:
        self.length(slot)
        self._lengths[slot] = self._capacity[slot] = -1
        self._free.append(slot)

    def free_tokens(self) -> int:
        return len(self._free) * self.max_seq_len


@hookimpl
def infer_cache_pools() -> list[Registration[CacheFactory]]:
    return [
        Registration(
            "slotted",
            lambda context, settings: SlottedPool(context),
            "one contiguous region of max_seq_len per sequence",
            NoSettings,
        )
    ]
