"""A slotted KV cache: every sequence owns one region of ``max_seq_len`` positions, reserved up front."""

from __future__ import annotations

from collections.abc import Sequence

from infer import hookimpl
from infer.hookspecs import Registration
from infer.kv_cache import ExtendView, KVStorage
from infer.protocols import Allocation, CacheContext, CacheFactory, NoSettings

INFER_PLUGIN_API = 1


class SlottedPool:
    """A slot is a sequence whose block table has one block as long as a sequence may become."""

    def __init__(self, context: CacheContext) -> None:
        self.max_seq_len = context.max_seq_len
        self.storage = KVStorage(context, context.max_batch_size, context.max_seq_len)
        self._free = list(reversed(range(context.max_batch_size)))
        self._lengths: dict[int, int] = {}

    def allocate(self, token_ids: Sequence[int], *, reuse: bool = True, salt: str = "") -> Allocation | None:
        """A whole slot, at length 0; ``reuse`` and ``salt`` have no bearing, as nothing is ever shared."""
        if not self._free or len(token_ids) > self.max_seq_len:
            return None
        slot = self._free.pop()
        self._lengths[slot] = 0
        return Allocation(slot)

    def grow(self, slot: int, num_tokens: int) -> bool:
        self.length(slot)
        return num_tokens <= self.max_seq_len

    def free(self, slot: int) -> None:
        self.length(slot)
        del self._lengths[slot]
        self._free.append(slot)

    def free_tokens(self) -> int:
        return len(self._free) * self.max_seq_len

    def length(self, slot: int) -> int:
        if slot not in self._lengths:
            raise ValueError(f"slot {slot} is not allocated")
        return self._lengths[slot]

    def batched_chunked_prefill_view(
        self, slots: Sequence[int], start_positions: Sequence[int], chunk_lens: Sequence[int]
    ) -> ExtendView:
        extends = list(zip(slots, start_positions, chunk_lens, strict=True))
        if len(set(slots)) < len(slots):
            raise ValueError(f"slots {list(slots)} repeat; a step extends a slot once")
        for slot, start, length in extends:
            if start != self.length(slot):
                raise ValueError(f"slot {slot} holds {self.length(slot)} positions; a chunk cannot start at {start}")
            if length < 1 or start + length > self.max_seq_len:
                raise ValueError(f"slot {slot} has {self.max_seq_len} positions; no room for {start}+{length}")
        self._lengths.update({slot: start + length for slot, start, length in extends})
        return self.storage.view([[slot] for slot in slots], start_positions, chunk_lens)

    def decode_view(self, slots: Sequence[int]) -> ExtendView:
        return self.batched_chunked_prefill_view(slots, [self.length(s) for s in slots], [1] * len(slots))


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
