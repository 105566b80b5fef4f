"""A pool's block manager: what it refuses, how it takes positions back, and that it needs no tensors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.support import slotted_pool, tiny_model

from infer.cache import BlockManager, Pool
from infer.cache.arrays import Ints
from infer.contracts.cache import Allocation
from infer_cache_paged import PagedBlockManager
from infer_cache_paged.pages import Pages
from infer_cache_slotted import SlottedBlockManager


@pytest.mark.parametrize(
    ("slots", "starts", "lens", "says"),
    [
        ([0, 0], [4, 4], [1, 1], "slots [0, 0] repeat"),
        ([0], [3], [1], "slot 0 holds 4 positions; a chunk cannot start at 3"),
        ([0], [5], [1], "slot 0 holds 4 positions; a chunk cannot start at 5"),
        ([1], [0], [1], "slot 1 is not allocated"),
        ([1], [-1], [1], "slot 1 is not allocated"),
        ([0], [4], [0], "not for 4+0"),
        ([0], [4], [317], "slot 0 has room for 320 positions, not for 4+317"),
    ],
)
def test_what_would_be_written_elsewhere_is_refused(
    slots: list[int], starts: list[int], lens: list[int], says: str
) -> None:
    """And nothing is booked: the slot goes on where it was, to its last position."""
    pool = slotted_pool(tiny_model("llama"), torch.float32, 2)
    place = pool.allocate([1])
    assert place is not None
    assert place.slot == 0
    pool.batched_chunked_prefill_view([0], [0], [4])
    with pytest.raises(ValueError, match=re.escape(says)):
        pool.batched_chunked_prefill_view(slots, starts, lens)
    pool.batched_chunked_prefill_view([0], [4], [316])
    assert pool.length(0) == 320


def test_a_decode_that_would_write_elsewhere_is_refused() -> None:
    """And nothing is booked for the other slots."""
    pool = slotted_pool(tiny_model("llama"), torch.float32, 3)
    assert [pool.allocate([slot + 1]) for slot in (0, 1)] == [Allocation(0), Allocation(1)]
    pool.batched_chunked_prefill_view([0, 1], [0, 0], [4, 320])
    for slots, says in (
        ([0, 0], "slots [0, 0] repeat"),
        ([0, 1], "slot 1 has room for 320 positions, not for 320+1"),
        ([0, 2], "slot 2 is not allocated"),
    ):
        for _ in range(2):
            with pytest.raises(ValueError, match=re.escape(says)):
                pool.decode_view(slots)
            assert (pool.length(0), pool.length(1)) == (4, 320)
    pool.decode_view([0])
    assert pool.length(0) == 5


def block_manager(kind: str) -> BlockManager:
    if kind == "slotted":
        return SlottedBlockManager(3, 40)
    return PagedBlockManager(3, 40, Pages(9, 8))


@pytest.mark.parametrize("kind", ["slotted", "paged"])
def test_block_managers_take_positions_back(kind: str) -> None:
    found = block_manager(kind)
    place = found.allocate(range(10))
    assert place is not None
    found.extend([place.slot], [0], [10])
    found.grow(place.slot, 14)
    found.extend([place.slot], [10], [4])
    found.truncate(place.slot, 11)
    assert found.length(place.slot) == 11
    found.extend([place.slot], [11], [3])
    for too_many in (15, -1):
        with pytest.raises(ValueError, match=rf"slot 0 can be cut to 0..14 positions, not to {too_many}"):
            found.truncate(place.slot, too_many)
    found.free(place.slot)
    with pytest.raises(ValueError, match="slot 0 is not allocated"):
        found.truncate(place.slot, 0)


def test_what_others_may_share_is_not_taken_back() -> None:
    found = PagedBlockManager(3, 40, Pages(9, 8))
    tokens = list(range(20))
    assert found.allocate(tokens) == Allocation(0)
    found.extend([0], [0], [20])
    found.commit(0, tokens, 20)
    with pytest.raises(ValueError, match=r"slot 0 can be cut to 16..20 positions, not to 15"):
        found.truncate(0, 15)
    found.truncate(0, 16)
    assert found.allocate(tokens) == Allocation(1, num_cached=16), "what was committed is still there"


class Counting:
    """A storage that keeps nothing, and says what it was asked for."""

    nbytes = 0

    def view(self, table: Ints, starts: Any, lens: Any) -> Any:
        return table.tolist(), list(starts), list(lens)

    def fixed_view(self, table: Ints, starts: Any) -> Any:
        return table.tolist(), list(starts)


@pytest.mark.parametrize("kind", ["slotted", "paged"])
def test_a_pool_is_simulated_without_tensors(kind: str) -> None:
    pool: Pool[Ints, Any] = Pool(block_manager(kind), Counting())
    for slot in (0, 1):
        assert pool.allocate([7] * 5, salt=str(slot)) == Allocation(slot)
    pool.batched_chunked_prefill_view([0, 1], [0, 0], [3, 5])
    block = {"slotted": [[1], [0]], "paged": [[1], [0]]}[kind]
    assert pool.decode_view([0]) == ([[0]], [3], [1])
    assert pool.grow(1, 6)
    assert pool.decode_view([1, 0], 4) == ([*block, [0], [0]], [5, 4, 4, 4])
    assert [pool.length(slot) for slot in (0, 1)] == [5, 6]


class OnlySlots:
    """A block manager that can do the least: no sharing, no truncation, any table."""

    def __init__(self) -> None:
        self.inner = SlottedBlockManager(2, 8)
        for name in ("grow", "free", "free_tokens", "length", "extend", "advance"):
            setattr(self, name, getattr(self.inner, name))

    def allocate(self, token_ids: Sequence[int]) -> Allocation | None:
        return self.inner.allocate(token_ids)

    def table(self, slots: Sequence[int], num_tokens: int) -> str:
        return f"{list(slots)} up to {num_tokens}"


class Words:
    nbytes = 0

    def view(self, table: str, starts: Any, lens: Any) -> Any:
        return table

    def fixed_view(self, table: str, starts: Any) -> Any:
        return table


def test_block_managers_need_neither_share_nor_truncate_and_choose_their_tables() -> None:
    made: Any = OnlySlots()
    pool: Pool[str, Any] = Pool(made, Words())
    assert pool.allocate([1, 2], reuse=False, salt="x") == Allocation(0)
    pool.commit(0, [1, 2], 2)
    assert pool.batched_chunked_prefill_view([0], [0], [2]) == "[0] up to 2"
    assert not hasattr(pool, "truncate")
    assert hasattr(Pool(block_manager("paged"), Counting()), "truncate")
