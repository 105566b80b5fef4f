"""The paged pool: how large it is made, and which block tables it has."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np
from pydantic import BaseModel, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from infer import device
from infer.cache import BlockManager, ExtendView, KVStorage, Pool, StateManager, StateStorage
from infer.cache.arrays import Ints
from infer.cache.state_manager import OTHERS
from infer.cache.storage import parts_of_a_place, width
from infer.contracts.cache import Allocation, CacheContext
from infer.contracts.registration import ONE_PROCESS
from infer.errors import SettingsError
from infer_cache_paged.pages import ENDLESS, Group, Pages, cost, fitting, numbers
from infer_cache_paged.snapshots import Snapshots

log = logging.getLogger(__name__)

FRACTION = {"cpu": 0.5, "cuda": 0.9}
"""The default fraction, per device, of the memory that is free once the weights are loaded."""
STATES = 0.2
"""How much memory snapshots of states take by default, as a share of that of K and V."""
MOST_TABLES = 8
"""About how many block tables a model has at most: every step fills in all of them."""


class PagedSettings(BaseModel, extra="forbid"):
    block_size: PositiveInt = Field(16, description="positions per page")
    num_blocks: PositiveInt | None = Field(
        None,
        description="blocks of positions that fit in all layers; none: as many as memory_fraction allows. Layers with "
        "a window need fewer",
    )
    memory_fraction: float | None = Field(
        None,
        gt=0,
        le=1,
        description="of the memory that is free once the weights are loaded; none: at most 0.5 on a CPU and 0.9 on a "
        "GPU, and no more than max_batch_size sequences of full length need (of 4096 positions, and one of full "
        "length, where engine.max_seq_len is not set)",
    )
    prefix_caching: bool = Field(True, description="let requests share the K/V of a common beginning")
    state_snapshots: NonNegativeInt | None = Field(
        None,
        description="for models with recurrent layers, how many states to keep where prefixes end; none: as many as "
        "take a fifth of the memory of K and V",
    )
    disk: Path | None = Field(
        None,
        description="a folder of this server's own in which prefixes outlive it; none: they end with the process. What "
        "is in there tells what was asked",
        json_schema_extra=ONE_PROCESS,
    )
    disk_gib: PositiveFloat = Field(10.0, description="the most that the folder may take, in GiB")

    @model_validator(mode="after")
    def _snapshots_of_prefixes(self) -> Self:
        if self.state_snapshots is not None and not self.prefix_caching:
            raise ValueError(
                f"state_snapshots = {self.state_snapshots} has no effect while prefix_caching is false; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _prefixes_on_disk(self) -> Self:
        if self.disk is not None and not self.prefix_caching:
            raise ValueError(
                "disk keeps prefixes, of which there are none while prefix_caching is false; leave one out"
            )
        if self.disk is None and "disk_gib" in self.model_fields_set:
            raise ValueError(f"disk_gib = {self.disk_gib:g} has no effect without disk; leave it out, or set disk")
        return self


class PagedBlockManager(BlockManager):
    """A block manager whose blocks are pages. There is a table for each page of a block: a group's tables have the same
    entries, but different pages."""

    def __init__(
        self, num_slots: int, max_seq_len: int, pages: Pages, state_manager: StateManager | None = None
    ) -> None:
        super().__init__(num_slots, max_seq_len, pages.block_size, sum(group.pages for group in pages.groups))
        self.pages = pages
        self.state_manager = state_manager
        self.snapshots = state_manager if isinstance(state_manager, Snapshots) else None
        self._entries = self._tables_USP.data
        """The tables, for one entry at a time."""
        self.shares = pages.share
        self._longest = -(-max_seq_len // pages.block_size)
        self._most = cost(pages.groups, self._longest)
        """How many pages a sequence of full length needs."""

    def allocate(self, token_ids: Sequence[int], *, reuse: bool = True, salt: str = "") -> Allocation | None:
        if not self._free_slots or len(token_ids) > self.max_seq_len:
            return None
        slot = self._free_slots[-1]
        num_cached = self.pages.allocate(slot, token_ids, reuse=reuse, salt=salt)
        if num_cached is None:
            return None
        self._open(num_cached)
        if self.snapshots is not None:
            self.snapshots.begin(slot, self.pages.holdings[slot], len(token_ids))
        self._copy(slot)
        return Allocation(slot, num_cached)

    def forks(self, slot: int, positions: Sequence[int]) -> None:
        if self.snapshots is not None:
            self.snapshots.forks(slot, positions)

    def grow(self, slot: int, num_tokens: int) -> bool:
        room = self.room[slot]
        if num_tokens <= room:
            return num_tokens <= self.max_seq_len
        if num_tokens > self.max_seq_len:
            return False
        changed = self._changing(slot)
        grown = self.pages.grow(slot, num_tokens, int(self._lengths_S[slot]))
        self._copy(slot, changed)
        return grown

    def commit(self, slot: int, token_ids: Sequence[int], num_computed: int) -> None:
        swapped = self.pages.commit(slot, token_ids, num_computed)
        if self.snapshots is not None:
            self.snapshots.commit(slot, self.pages.holdings[slot].nodes)
        if self.pages.windowed:
            changed = 0 if swapped else self._changing(slot)
            self.pages.slide(slot, self.length(slot))
            self._copy(slot, changed)
        elif swapped:
            self._copy(slot)

    def reach(self, slot: int, end: int) -> bool:
        holding = self.pages.holdings.get(slot)
        if holding is None or end > holding.room * self.block_size:
            return False
        changed = self._changing(slot)
        reached = self.pages.slide(slot, self.length(slot), end)
        self._copy(slot, changed)
        return reached

    def least_tokens(self, slot: int) -> int:
        holding = self.pages.holdings[slot]
        least = len(holding.nodes) * self.block_size
        for group, first in zip(self.pages.groups, holding.firsts, strict=True):
            if group.window is not None and first:
                least = max(least, first * self.block_size + group.window - 1)
        return least

    def free(self, slot: int) -> None:
        self._close(slot)
        self.pages.free(slot)

    def free_tokens(self) -> int:
        """As many as sequences of full length, and one shorter sequence, would have: with windows, a short one needs
        more pages per position than a long one."""
        number, rest = divmod(self.pages.num_available, self._most)
        return (number * self._longest + fitting(self.pages.groups, rest)) * self.block_size

    def states(self) -> bytes:
        return self.pages.states()

    @property
    def has_slot(self) -> bool:
        """Whether a slot is free."""
        return bool(self._free_slots)

    def _changing(self, slot: int) -> int:
        """The first index at which the slot's tables can change while its windows move on and it gets more room."""
        firsts = self.pages.holdings[slot].firsts
        return min((firsts[k] for k in self.pages.windowed), default=self.room[slot] // self.block_size)

    def _copy(self, slot: int, begin: int = 0) -> None:
        """Copy the slot's blocks from index ``begin`` on into the tables. What is behind a window is in the page of
        zeros, which comes after all others."""
        holding, row, room = self.pages.holdings[slot], 0, ENDLESS
        for k, table in enumerate(holding.tables):
            start, end, last = begin, len(table), row + self.pages.groups[k].pages
            if (first := holding.firsts[k]) > begin:
                self._tables_USP[row:last, slot, begin:first] = self.pages.num_pages
                start = first
            if (end - start) * (last - row) < 8:  # as nearly always; numpy takes longer to make an array
                for i in range(start, end):
                    for u, page in enumerate(table[i] or (), row):
                        self._entries[u, slot, i] = page
            else:
                new = np.fromiter(numbers(table[start:]), np.int32)
                self._tables_USP[row:last, slot, start:end] = new.reshape(end - start, -1).T
            row, room = last, min(room, end)
        self._room_S[slot] = room * self.block_size


class PagedPool(Pool[Ints, ExtendView]):
    """A pool whose block manager hands out pages."""

    block_manager: PagedBlockManager
    storage: KVStorage

    def __init__(self, context: CacheContext, settings: PagedSettings) -> None:
        tables = block_tables(context)
        groups = _groups(tables, context, settings)
        batch, manager, states, number = context.max_batch_size, None, None, _num_pages(context, settings)
        if context.states:
            count, each = _num_snapshots(context, settings, number), _state_bytes(context)
            drafts = context.max_drafts
            manager = Snapshots(batch, drafts, count, settings.block_size) if count else StateManager(batch, drafts)
            states = StateStorage(context.states, manager, batch, context.device)
            log.info("paged cache: %d states of %d bytes, %d of them snapshots", manager.num_rows, each, count)
        forget = manager.forget if isinstance(manager, Snapshots) else None
        share = settings.prefix_caching and (manager is None or forget is not None)
        pages = Pages(number, settings.block_size, share, groups, forget)
        if pages.windowed:
            blocks = -(-context.max_seq_len // settings.block_size)
            log.info(
                "paged cache: %d of %d layers keep no more than their window and a chunk; a sequence of %d positions "
                "takes %d pages instead of %d",
                sum(len(layers) for window, layers in tables if window is not None),
                len(context.layers),
                context.max_seq_len,
                cost(groups, blocks),
                blocks * sum(group.pages for group in groups),
            )
        num_pages = pages.num_pages + bool(pages.windowed)  # the last one stays zero: what is behind a window
        storage = KVStorage(context, num_pages, settings.block_size, [layers for _, layers in tables])
        super().__init__(PagedBlockManager(batch, context.max_seq_len, pages, manager), storage, states)


def block_tables(context: CacheContext) -> list[tuple[int | None, list[int]]]:
    """(window, layers) of each block table, those without a window last. The layers of a table share their pages and
    have one shape, and all tables fill about as much of a page. A window that no sequence exceeds is none."""
    alike: dict[tuple[int, int, int], list[int]] = {}
    for layer, spec in enumerate(context.layers):
        window = spec.window if spec.window is not None and spec.window < context.max_seq_len else ENDLESS
        alike.setdefault((window, spec.num_kv_heads, spec.head_size), []).append(layer)
    windows, groups = sorted({window for window, *_ in alike}), [alike[key] for key in sorted(alike)]
    widths = [width(context.layers[layers[0]]) for layers in groups]
    if len(windows) < 2 or any(max(widths) % each for each in widths):
        one = windows[0] if len(windows) == 1 else ENDLESS
        return [(None if one == ENDLESS else one, list(range(len(context.layers))))]
    parts = parts_of_a_place(context.layers, groups)
    places = [-(-len(layers) // n) for layers, n in zip(groups, parts, strict=True)]
    size = max(min(places), -(-sum(places) // MOST_TABLES))
    return [
        (None if window == ENDLESS else window, layers[i : i + size * n])
        for (window, *_), layers, n in zip(sorted(alike), groups, parts, strict=True)
        for i in range(0, len(layers), size * n)
    ]


def _groups(
    tables: Sequence[tuple[int | None, list[int]]], context: CacheContext, settings: PagedSettings
) -> list[Group]:
    counts = Counter(window for window, _ in tables)
    return [Group.make(pages, window, settings.block_size, context.max_chunk) for window, pages in counts.items()]


def longest(context: CacheContext, settings: PagedSettings, yet_to_take: int) -> int:
    """How many positions one sequence can have in all pages, of the memory that ``yet_to_take`` bytes leave."""
    context = replace(context, yet_to_take=yet_to_take)
    groups = _groups(block_tables(context), context, settings)
    if settings.num_blocks is not None:
        pages = settings.num_blocks * sum(group.pages for group in groups)
    else:
        pages = _fitting(context, settings)[0]
    return fitting(groups, pages) * settings.block_size


def _page_bytes(context: CacheContext, settings: PagedSettings) -> int:
    return settings.block_size * KVStorage.bytes_per_token(context, [layers for _, layers in block_tables(context)])


def _state_bytes(context: CacheContext) -> int:
    """Bytes of one sequence's state in all recurrent layers."""
    return sum(spec.nbytes for spec in context.states)


def _num_snapshots(context: CacheContext, settings: PagedSettings, pages: int) -> int:
    """How many states to keep besides those of running sequences."""
    if not settings.prefix_caching:
        return 0
    if settings.state_snapshots is not None:
        return settings.state_snapshots
    return max(context.max_batch_size, int(STATES * pages * _page_bytes(context, settings)) // _state_bytes(context))


def _num_pages(context: CacheContext, settings: PagedSettings) -> int:
    """How many pages to make. The log shows how that was computed."""
    groups, size = _groups(block_tables(context), context, settings), _page_bytes(context, settings)
    if settings.num_blocks is not None:
        if settings.memory_fraction is not None:
            raise SettingsError(
                f"cache.paged.num_blocks = {settings.num_blocks} and cache.paged.memory_fraction = "
                f"{settings.memory_fraction} both set the pool's size; leave one out."
            )
        pages = settings.num_blocks * sum(group.pages for group in groups)
        log.info("paged cache: %d pages of %d positions, as set", pages, settings.block_size)
        return pages
    fits, fraction, free = _fitting(context, settings)
    batch, most = context.max_batch_size, -(-context.max_seq_len // settings.block_size)
    if context.num_tokens is None:
        wanted = batch * cost(groups, most)
    else:
        each = -(-context.num_tokens // batch // settings.block_size)
        wanted = max(batch * cost(groups, each), cost(groups, most))
    if context.states and not fits:
        raise SettingsError(
            f"The states of {batch} sequences leave no room for K and V in {fraction:g} of the {free / 2**30:.2f} GiB "
            f"that are free: each takes {_state_bytes(context)} bytes, and as many for each token that may be taken "
            "back. Lower engine.max_batch_size or engine.max_draft_tokens, or raise cache.paged.memory_fraction."
        )
    chosen = fits if settings.memory_fraction is not None else min(fits, wanted)
    log.info(
        "paged cache: %d pages of %d positions (%.2f of %.2f GiB free / %d bytes = %d; wanted are %d)",
        chosen,
        settings.block_size,
        fraction,
        free / 2**30,
        size,
        fits,
        wanted,
    )
    return chosen


def _fitting(context: CacheContext, settings: PagedSettings) -> tuple[int, float, int]:
    """How many pages fit into the pool's part of memory, that fraction, and the bytes it is taken of."""
    fraction = settings.memory_fraction or FRACTION[context.device.type]
    free = max(0, device.free_memory(context.device) - context.yet_to_take)
    room, page = int(fraction * free), float(_page_bytes(context, settings))
    if context.states:
        rows = OTHERS + context.max_batch_size * (1 + context.max_drafts)
        if settings.prefix_caching and settings.state_snapshots is None:
            rows += context.max_batch_size
            page *= 1 + STATES
        else:
            rows += _num_snapshots(context, settings, 0)
        room = max(0, room - rows * _state_bytes(context))
    return int(room / page), fraction, free
