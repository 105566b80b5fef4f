"""A paged pool with a tier behind it: what is kept, when it is read back, and that nothing else ever is."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.attention import spec
from tests.cache_paged.tiers import Inline, Memory, Patient
from tests.support import CPU

from infer.contracts.attention import AttentionSpec, QuantizedKV
from infer.contracts.cache import Allocation, CacheContext, LastingPool
from infer.contracts.states import StateSpec
from infer.contracts.tier import BlockKey, TierProtocol
from infer.errors import SettingsError
from infer.kernels.reference import ReferenceKernels
from infer_cache_paged import PagedPool, PagedSettings, make_pool
from infer_cache_paged.tiered import STALL_S, TieredPool
from infer_testing import check_pool

SIZE = 4
PLAIN = [spec(), spec()]
WINDOWED = [spec(window=9), spec(window=9), spec()]
STATES = [StateSpec(((3,), (2, 2)), (torch.float32, torch.bfloat16))]
IDENTITY = {"checkpoint": "that one"}


def context(layers: Sequence[AttentionSpec] = PLAIN, batch: int = 3, identity: Any = IDENTITY, **keys: Any) -> CacheContext:
    given: dict[str, Any] = {"max_chunk": 8} | keys
    return CacheContext(layers, batch, 96, torch.float32, CPU, ReferenceKernels(), identity=lambda: identity, **given)


def make(tier: TierProtocol, *given: Any, clock: Any = lambda: 0.0, threads: Any = Inline, blocks: int = 40, **keys: Any) -> TieredPool:
    settings = PagedSettings(block_size=SIZE, num_blocks=blocks)
    return TieredPool(context(*given, **keys), settings, lambda head: tier, clock=clock, threads=threads)


def fill(pool: TieredPool, seed: int) -> None:
    """Give all tensors of the pool random bits, which stand for what a model computes."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors(pool):
        flat = tensor.view(-1).view(torch.uint8)
        flat.copy_(torch.randint(0, 256, flat.shape, generator=generator, dtype=torch.uint8))


def tensors(pool: TieredPool) -> list[torch.Tensor]:
    kvs = [*pool.storage.k, *pool.storage.v]
    found = [t for kv in kvs for t in ((kv.codes, kv.scales) if isinstance(kv, QuantizedKV) else (kv,))]
    return found + [part for layer in (pool.state_storage.parts if pool.state_storage else []) for part in layer]


Bits = dict[tuple[int, int], bytes]
"""By layer and block; the layer STATES stands for the recurrent layers' state after the block."""


def allocate(pool: TieredPool, tokens: Sequence[int], salt: str = "") -> Allocation:
    place = pool.allocate(tokens, salt=salt)
    while place is None and pool.loading:
        place = pool.allocate(tokens, salt=salt)
    assert place is not None
    return place


def serve(pool: TieredPool, tokens: Sequence[int], salt: str = "") -> tuple[int, Bits]:
    """Admit a prompt, compute it by chunks, and let it go. Returns how many tokens the cache had, and the bits that it
    computed."""
    place, bits = allocate(pool, tokens, salt), Bits()
    for start in range(place.num_cached, len(tokens), 8):
        count = min(8, len(tokens) - start)
        pool.batched_chunked_prefill_view([place.slot], [start], [count])
        pool.commit(place.slot, tokens, start + count)
        bits |= read(pool, place.slot, start // SIZE, (start + count) // SIZE)
    for i, node in enumerate(pool.block_manager.pages.holdings[place.slot].nodes):
        if node.state is not None:
            bits[-1, i] = state(pool, node.state)
    pool.free(place.slot)
    return place.num_cached, bits


def read(pool: TieredPool, slot: int, begin: int, end: int) -> Bits:
    """The bits of a slot's blocks, but for those behind a window, straight from the tensors."""
    manager, storage, bits = pool.block_manager, pool.storage, Bits()
    holding = manager.pages.holdings[slot]
    group_of = [k for k, group in enumerate(manager.pages.groups) for _ in range(group.pages)]
    parts = [1] * len(group_of) if storage._parts_U11 is None else storage._parts_U11.ravel().tolist()
    for layer, u in enumerate(storage.table_of):
        for i in range(max(begin, holding.firsts[group_of[u]]), end):
            page = int(manager._tables_USP[u, slot, i]) * parts[u]
            kvs = storage.k[layer], storage.v[layer]
            each = [t for kv in kvs for t in ((kv.codes, kv.scales) if isinstance(kv, QuantizedKV) else (kv,))]
            bits[layer, i] = b"".join(t[page].contiguous().view(torch.uint8).numpy().tobytes() for t in each)
    return bits


def state(pool: TieredPool, row: int) -> bytes:
    assert pool.state_storage is not None
    parts = [part[row].contiguous() for layer in pool.state_storage.parts for part in layer]
    return b"".join(part.view(torch.uint8).numpy().tobytes() for part in parts)


def rest(pool: TieredPool) -> None:
    while pool.rest():
        pass


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "int8": {"kv_dtype": "int8"},
    "windows": {"layers": WINDOWED},
    "int8 and windows": {"layers": WINDOWED, "kv_dtype": "int8"},
    "states": {"states": STATES},
    "states and drafts": {"states": STATES, "max_drafts": 3, "kv_dtype": "int8"},
    "windows and states": {"layers": WINDOWED, "states": STATES},
    "only windows": {"layers": [spec(window=9)]},
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@cases
def test_what_was_computed_is_there_after_a_restart_bit_for_bit(case: dict[str, Any]) -> None:
    tier, tokens = Memory(), [*range(60)]
    before = make(tier, **case)
    assert isinstance(before, LastingPool)
    fill(before, 1)
    cached, bits = serve(before, tokens)
    assert cached == 0
    before.close()
    assert tier.closed
    after = make(tier, **case)
    fill(after, 2)
    place = allocate(after, tokens)
    assert place.num_cached == (44 if "states" in case else 56), "a state is kept near the end of a prompt"
    depth = place.num_cached // SIZE
    found = read(after, place.slot, 0, depth)
    assert found == {at: bits[at] for at in found}
    windows = [None if layer.window is None else -(-(layer.window - 1) // SIZE) for layer in case.get("layers", PLAIN)]
    assert len(found) == sum(depth if window is None else window for window in windows)
    if "states" in case:
        assert after.block_manager.state_manager is not None
        assert state(after, after.block_manager.state_manager.row(place.slot)) == bits[-1, depth - 1]


class Forgetful(TieredPool):
    """It has nothing in memory of what no sequence uses, so that all that one finds has come from the tier."""

    def allocate(self, token_ids: Sequence[int], *, reuse: bool = True, salt: str = "") -> Allocation | None:
        pages = self.block_manager.pages
        while any(pages.cached):
            pages._evict()
        return super().allocate(token_ids, reuse=reuse, salt=salt)


@pytest.mark.parametrize("name", ["sequences", "little_room", "windows", "mixed", "quantized", "states"])
def test_random_lives_that_find_what_the_tier_has(name: str) -> None:
    tiers: list[Memory] = []

    def tier(head: bytes) -> Memory:
        tiers.append(Memory())
        return tiers[-1]

    check_pool(
        lambda given: Forgetful(
            replace(given, identity=lambda: IDENTITY), PagedSettings(block_size=4), tier, threads=Inline
        ),
        kv_dtypes=["int8"],
        states=True,
        only=[name],
    )
    assert sum(len(each.reads) for each in tiers) > 5
