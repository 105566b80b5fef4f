"""A paged KV cache: sequences take small pages as they grow, and share those of common prefixes (Kwon et al., 2023)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch
from pydantic import BaseModel, Field, PositiveInt

from infer import hookimpl
from infer.cache import BlockBooks, ExtendView, KVStorage, Pool
from infer.cache.books import Ints
from infer.errors import SettingsError
from infer.hookspecs import CacheRegistration, Registration
from infer.protocols import Allocation, CacheContext, CacheFactory
from infer_cache_paged.pages import Pages

INFER_PLUGIN_API = 1
log = logging.getLogger(__name__)

FRACTION = {"cpu": 0.5, "cuda": 0.9}
"""The default fraction, per device, of the memory that is free once the weights are loaded."""


class PagedSettings(BaseModel, extra="forbid"):
    block_size: PositiveInt = Field(16, description="positions per page")
    num_blocks: PositiveInt | None = Field(None, description="pages; none: as many as memory_fraction allows")
    memory_fraction: float | None = Field(
        None,
        gt=0,
        le=1,
        description="of the memory that is free once the weights are loaded; none: at most 0.5 on a CPU and 0.9 on a "
        "GPU, and no more than max_batch_size sequences of full length need (of 4096 positions, and one of full "
        "length, where engine.max_seq_len is not set)",
    )
    prefix_caching: bool = Field(True, description="let requests share the K/V of a common beginning")


class PagedBooks(BlockBooks):
    """Books whose blocks are pages."""

    def __init__(self, num_slots: int, max_seq_len: int, pages: Pages) -> None:
        super().__init__(num_slots, max_seq_len, pages.block_size)
        self.pages = pages
        self.shares = pages.share

    def allocate(self, token_ids: Sequence[int], *, reuse: bool = True, salt: str = "") -> Allocation | None:
        if not self._free_slots or len(token_ids) > self.max_seq_len:
            return None
        slot = self._free_slots[-1]
        num_cached = self.pages.allocate(slot, token_ids, reuse=reuse, salt=salt)
        if num_cached is None:
            return None
        self._open(num_cached)
        self._place(slot, self.pages.holdings[slot].pages)
        return Allocation(slot, num_cached)

    def grow(self, slot: int, num_tokens: int) -> bool:
        room = self._room[slot]
        if num_tokens <= room:
            return num_tokens <= self.max_seq_len
        if num_tokens > self.max_seq_len or not self.pages.grow(slot, num_tokens):
            return False
        self._place(slot, self.pages.holdings[slot].pages, room // self.block_size)
        return True

    def commit(self, slot: int, token_ids: Sequence[int], num_computed: int) -> None:
        if self.pages.commit(slot, token_ids, num_computed):
            self._place(slot, self.pages.holdings[slot].pages)

    def shared_tokens(self, slot: int) -> int:
        return len(self.pages.holdings[slot].nodes) * self.block_size

    def free(self, slot: int) -> None:
        self._close(slot)
        self.pages.free(slot)

    def free_tokens(self) -> int:
        return self.pages.num_available * self.block_size


class PagedPool(Pool[Ints, ExtendView]):
    """A pool whose books hand out pages."""

    books: PagedBooks
    storage: KVStorage

    def __init__(self, context: CacheContext, settings: PagedSettings) -> None:
        pages = Pages(_num_blocks(context, settings), settings.block_size, settings.prefix_caching)
        storage = KVStorage(context, len(pages.free_list), settings.block_size)
        super().__init__(PagedBooks(context.max_batch_size, context.max_seq_len, pages), storage)


def longest(context: CacheContext, settings: PagedSettings, yet_to_take: int) -> int:
    """How many positions all pages have together, and so one sequence at most. ``yet_to_take`` bytes of the memory that
    is free now will be taken before the pool is made."""
    if settings.num_blocks is not None:
        return settings.num_blocks * settings.block_size
    fraction = settings.memory_fraction or FRACTION[context.device.type]
    free = max(0, _free_memory(context.device) - yet_to_take)
    return int(fraction * free) // _page_bytes(context, settings) * settings.block_size


def _page_bytes(context: CacheContext, settings: PagedSettings) -> int:
    return settings.block_size * KVStorage.bytes_per_token(context)


def _num_blocks(context: CacheContext, settings: PagedSettings) -> int:
    """How many pages to make. The log shows how that was computed."""
    size = _page_bytes(context, settings)
    if settings.num_blocks is not None:
        if settings.memory_fraction is not None:
            raise SettingsError(
                f"cache.paged.num_blocks = {settings.num_blocks} and cache.paged.memory_fraction = "
                f"{settings.memory_fraction} both set the pool's size; leave one out."
            )
        log.info("paged cache: %d pages of %d positions, as set", settings.num_blocks, settings.block_size)
        return settings.num_blocks
    fraction = settings.memory_fraction or FRACTION[context.device.type]
    free = _free_memory(context.device)
    fitting = int(fraction * free) // size
    if context.num_tokens is None:
        wanted = context.max_batch_size * -(-context.max_seq_len // settings.block_size)
    else:
        wanted = -(-context.num_tokens // settings.block_size)
    chosen = fitting if settings.memory_fraction is not None else min(fitting, wanted)
    log.info(
        "paged cache: %d pages of %d positions (%.2f of %.2f GiB free / %d bytes = %d; wanted are %d)",
        chosen,
        settings.block_size,
        fraction,
        free / 2**30,
        size,
        fitting,
        wanted,
    )
    return chosen


def _free_memory(device: torch.device) -> int:
    """Bytes of free memory: the GPU's, or the machine's within the container's limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free: int = psutil.virtual_memory().available
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        free = min(free, int(text) - int(used.read_text()))
    return free


@hookimpl
def infer_cache_pools() -> list[Registration[CacheFactory]]:
    return [
        CacheRegistration(
            "paged",
            PagedPool,
            "pages on demand, prefixes shared",
            PagedSettings,
            priority=10,
            longest=longest,
            kv_dtypes=("int8",),
        )
    ]
