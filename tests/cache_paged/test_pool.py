"""The paged pool: how large it is made, and what it hands to the kernels."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tests.attention import spec
from tests.support import CPU

import infer_cache_paged
from infer.errors import SettingsError
from infer.kernels.reference import ReferenceKernels
from infer.protocols import Allocation, CacheContext
from infer_cache_paged import PagedPool, PagedSettings

PER_TOKEN = 2 * (2 * 2 * 16) * 4
"""Bytes: two layers of K and V, two heads of 16, fp32."""


def make(max_batch_size: int = 3, max_seq_len: int = 40, **keys: Any) -> PagedPool:
    context = CacheContext([spec(), spec()], max_batch_size, max_seq_len, torch.float32, CPU, ReferenceKernels())
    return PagedPool(context, PagedSettings.model_validate(keys))


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes of free memory, as the pool is told."""
    amount = 100 * 16 * PER_TOKEN
    monkeypatch.setattr(infer_cache_paged, "_free_memory", lambda device: amount)
    return amount


def test_size_by_count(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        pool = make(num_blocks=5, block_size=8)
    assert pool.free_tokens() == 40
    assert [tuple(k.shape) for k in pool.storage.k] == [(5, 8, 2, 16)] * 2
    assert "5 pages of 8 positions, as set" in caplog.text


@pytest.mark.parametrize(
    ("keys", "pages"),
    [
        ({}, 9),  # three sequences of 40 need no more
        ({"memory_fraction": 0.2}, 20),
        ({"memory_fraction": 1.0}, 100),
        ({"memory_fraction": 0.2, "block_size": 32}, 10),
    ],
)
def test_size_by_memory(keys: dict[str, Any], pages: int, free: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        pool = make(**keys)
    assert pool.free_tokens() == pages * keys.get("block_size", 16)
    assert f"{pages} pages" in caplog.text
    assert f"{free / 2**30:.2f} GiB free" in caplog.text


def test_as_many_more_pages_as_quantised_ones_are_smaller(free: int) -> None:
    """Of 16 codes and a fp32 scale for each head, where 16 values of fp32 were."""
    layers, settings = [spec(), spec()], PagedSettings(memory_fraction=1.0)
    context = CacheContext(layers, 3, 40, torch.float32, CPU, ReferenceKernels(), kv_dtype="int8")
    pool = PagedPool(context, settings)
    assert pool.free_tokens() == 100 * 16 * 64 // 20
    assert pool.nbytes == 100 * 16 * PER_TOKEN
    assert infer_cache_paged.longest(context, settings, 0) == 100 * 16 * 64 // 20


def test_no_more_than_half_of_the_memory_unless_asked(free: int) -> None:
    assert make(max_batch_size=100).free_tokens() == 50 * 16


def test_count_and_fraction_exclude_each_other() -> None:
    with pytest.raises(SettingsError, match=r"num_blocks = 5 and cache.paged.memory_fraction = 0.5 both"):
        make(num_blocks=5, memory_fraction=0.5)


@pytest.mark.parametrize("key", [{"block_size": 0}, {"num_blocks": 0}, {"memory_fraction": 1.5}, {"blocks": 3}])
def test_impossible_settings(key: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        PagedSettings.model_validate(key)


def test_slots_and_pages_run_out_separately() -> None:
    pool = make(max_batch_size=2, num_blocks=4)
    assert pool.allocate(range(41)) is None, "longer than max_seq_len"
    first = pool.allocate(range(17))
    assert first == Allocation(0)
    assert pool.allocate(range(33)) is None, "two pages are left"
    assert pool.allocate(range(100, 101)) is not None
    assert pool.allocate(range(1)) is None, "no slot is left"
    assert pool.grow(0, 40)
    assert not pool.grow(0, 41), "longer than max_seq_len"
    assert not pool.grow(1, 17), "no page is left"
    pool.free(1)
    pool.free(0)
    assert pool.free_tokens() == 64


def test_a_slot_is_extended_only_where_it_has_room() -> None:
    pool = make(num_blocks=4)
    place = pool.allocate(range(17))
    assert place is not None
    pool.batched_chunked_prefill_view([place.slot], [0], [32])
    with pytest.raises(ValueError, match=r"room for 32 positions, not for 32\+1"):
        pool.decode_view([place.slot])
    assert pool.grow(place.slot, 33)
    ragged = pool.decode_view([place.slot]).ragged
    assert ragged.starts == (32,)
    assert ragged.flat_T.tolist() == [pool.books.pages.holdings[place.slot].pages[2] * 16]


def test_a_hit_starts_after_what_is_cached_and_reads_the_same_pages() -> None:
    pool = make(num_blocks=9)
    tokens = list(range(40))
    one = pool.allocate(tokens)
    assert one is not None
    pool.batched_chunked_prefill_view([one.slot], [0], [40])
    pool.commit(one.slot, tokens, 40)
    two = pool.allocate(tokens)
    assert two == Allocation(1, num_cached=32)
    assert pool.length(two.slot) == 32
    table = pool.batched_chunked_prefill_view([two.slot], [32], [8]).ragged.block_table_BP[0].tolist()
    pages = pool.books.pages.holdings[one.slot].pages
    assert table[:2] == pages[:2]
    assert table[2] != pages[2]


def test_a_slot_that_gives_its_own_page_for_an_equal_one_reads_that() -> None:
    pool = make(num_blocks=9)
    tokens = list(range(17))
    for slot in (0, 1):
        assert pool.allocate(tokens) == Allocation(slot)
    pool.batched_chunked_prefill_view([0, 1], [0, 0], [16, 16])
    pool.commit(0, tokens, 16)
    pool.commit(1, tokens, 16)
    assert pool.free_tokens() == 6 * 16
    table = pool.decode_view([0, 1]).ragged.block_table_BP.tolist()
    assert table[0][0] == table[1][0]
    assert table[0][1] != table[1][1]


@pytest.mark.parametrize("sharing", [True, False])
def test_a_pool_says_whether_it_shares(sharing: bool) -> None:
    pool = make(num_blocks=8, block_size=2, prefix_caching=sharing)
    assert pool.shares == sharing
    tokens = list(range(5))
    for cached in (0, 4 if sharing else 0):
        place = pool.allocate(tokens)
        assert place is not None
        assert place.num_cached == cached
        pool.commit(place.slot, tokens, 5)
        pool.free(place.slot)
