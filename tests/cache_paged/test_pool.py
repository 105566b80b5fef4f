"""The paged pool: how large it is made, and what it hands to the kernels."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tests.attention import spec
from tests.models.checkpoints import write_checkpoint
from tests.support import CPU

import infer_cache_paged
from infer import LLM, SamplingParams
from infer.contracts.attention import AttentionSpec
from infer.contracts.cache import Allocation, CacheContext
from infer.contracts.states import StateSpec
from infer.errors import SettingsError
from infer.kernels.reference import ReferenceKernels
from infer_cache_paged import PagedPool, PagedSettings
from infer_cache_paged.pages import ROLLBACK, cost

PER_TOKEN = 2 * (2 * 2 * 16) * 4
"""Bytes: two layers of K and V, two heads of 16, fp32."""


SNAPSHOTS = {"state_snapshots": 3, "prefix_caching": False}


def make(max_batch_size: int = 3, max_seq_len: int = 40, **keys: Any) -> PagedPool:
    context = CacheContext([spec(), spec()], max_batch_size, max_seq_len, torch.float32, CPU, ReferenceKernels())
    return PagedPool(context, PagedSettings.model_validate(keys))


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes of free memory, as the pool is told."""
    amount = 100 * 16 * PER_TOKEN
    monkeypatch.setattr("infer.device.free_memory", lambda device: amount)
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


def test_as_many_more_pages_as_quantized_ones_are_smaller(free: int) -> None:
    """Of 16 codes and a fp32 scale for each head, where 16 values of fp32 were."""
    layers, settings = [spec(), spec()], PagedSettings(memory_fraction=1.0)
    context = CacheContext(layers, 3, 40, torch.float32, CPU, ReferenceKernels(), kv_dtype="int8")
    pool = PagedPool(context, settings)
    assert pool.free_tokens() == 100 * 16 * 64 // 20
    assert pool.nbytes == 100 * 16 * PER_TOKEN
    assert infer_cache_paged.longest(context, settings, 0) == 100 * 16 * 64 // 20


def test_no_more_than_half_of_the_memory_unless_asked(free: int) -> None:
    assert make(max_batch_size=100).free_tokens() == 50 * 16


def test_states_that_leave_no_room(free: int) -> None:
    """Two rows that belong to nobody, and for each of three sequences one for its state, one for each of two drafts and
    one for a snapshot."""
    states = [StateSpec(((free // 28,),), (torch.float32,))]
    context = CacheContext([spec()], 3, 40, torch.float32, CPU, ReferenceKernels(), states=states, max_drafts=2)
    assert PagedPool(replace(context, max_batch_size=1), PagedSettings(memory_fraction=1.0)).free_tokens()
    with pytest.raises(SettingsError, match=r"states of 3 sequences leave no room .* 0.5 of the .*max_draft_tokens"):
        PagedPool(context, PagedSettings())


def test_count_and_fraction_exclude_each_other() -> None:
    with pytest.raises(SettingsError, match=r"num_blocks = 5 and cache.paged.memory_fraction = 0.5 both"):
        make(num_blocks=5, memory_fraction=0.5)


@pytest.mark.parametrize(
    "key", [{"block_size": 0}, {"num_blocks": 0}, {"memory_fraction": 1.5}, {"blocks": 3}, SNAPSHOTS]
)
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
    block = pool.block_manager.pages.holdings[place.slot].tables[0][2]
    assert block is not None
    assert ragged.flat_T.tolist() == [block[0] * 16]


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
    blocks = pool.block_manager.pages.holdings[one.slot].tables[0]
    assert [(page,) for page in table[:2]] == blocks[:2]
    assert (table[2],) != blocks[2]


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


GEMMA = [AttentionSpec(4, 1, 256, 1.0, None if (i + 1) % 6 == 0 else 512) for i in range(26)]
"""Gemma 3 1B: 22 layers with a window of 512, and 4 without."""
FULL = [replace(spec, window=None) for spec in GEMMA]


def gemma(layers: list[AttentionSpec], batch: int = 16, max_seq_len: int = 5000, **keys: Any) -> PagedPool:
    context = CacheContext(layers, batch, max_seq_len, torch.bfloat16, CPU, ReferenceKernels(), max_chunk=512)
    return PagedPool(context, PagedSettings.model_validate(keys))


def held(pool: PagedPool) -> int:
    """Bytes of the pages that nobody else can have."""
    pages = pool.block_manager.pages
    return (pages.num_pages - pages.num_available) * (pool.nbytes // pool.storage.k[0].shape[0])


def prefill(pool: PagedPool, tokens: list[int], chunk: int = 512) -> Allocation | None:
    """Allocate, and compute chunk by chunk."""
    place = pool.allocate(tokens)
    if place is not None:
        for start in range(place.num_cached, len(tokens), chunk):
            pool.commit(place.slot, tokens, start)
            pool.batched_chunked_prefill_view([place.slot], [start], [min(chunk, len(tokens) - start)])
        pool.commit(place.slot, tokens, len(tokens))
    return place


def decode(pool: PagedPool, slot: int, count: int) -> None:
    for _ in range(count):
        assert pool.grow(slot, pool.length(slot) + 1)
        pool.decode_view([slot])


@pytest.mark.parametrize("more", [0, 1, 40])
def test_what_a_long_sequence_holds(more: int) -> None:
    """All that windows reach, and all positions of the other layers, of 4096 and more."""
    pool = gemma(GEMMA, num_blocks=300)
    place = prefill(pool, list(range(4096)))
    assert place is not None
    decode(pool, place.slot, more)
    whole = gemma(FULL, num_blocks=300)
    other = prefill(whole, list(range(4096)))
    assert other is not None
    decode(whole, other.slot, more)
    assert held(whole) == -(-(4096 + more) // 16) * 16 * 26 * 2 * 256 * 2
    assert held(pool) <= 0.28 * held(whole)


@pytest.mark.usefixtures("four")
def test_as_many_more_sequences_run() -> None:
    counts = []
    for layers in (FULL, GEMMA):
        pool = gemma(layers, batch=100, memory_fraction=1.0)
        count = 0
        while prefill(pool, [count] * 4096) is not None:
            count += 1
        counts.append(count)
    assert counts[0] == 4
    assert counts[1] >= 13


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for four sequences of 4096 positions in all layers."""
    monkeypatch.setattr("infer.device.free_memory", lambda device: 4 * 4096 * 26 * 1024)


@pytest.mark.parametrize("then", ["computed", "decoded on", "ended", "decoded on and ended", "preempted"])
def test_a_prompt_longer_than_the_window_is_computed_once(then: str) -> None:
    pool = gemma(GEMMA, num_blocks=600)
    tokens = list(range(2000))
    place = prefill(pool, tokens)
    assert place == Allocation(0)
    if "decoded on" in then:
        decode(pool, 0, 700)
    if "ended" in then or then == "preempted":
        pool.free(0)
    again = prefill(pool, tokens)
    assert again is not None
    assert again.num_cached == 1984
    other = pool.allocate([*tokens[:1000], *range(5000, 5600)])
    assert other is not None
    assert other.num_cached == 992, "also where the window had gone on"


def test_a_window_keeps_what_may_be_taken_back() -> None:
    pool = gemma(GEMMA, num_blocks=600)
    prefill(pool, list(range(3000)))
    for _ in range(100):
        decode(pool, 0, 1)
        length = pool.length(0)
        if length >= 2992 + ROLLBACK:
            pool.truncate(0, length - ROLLBACK)
            table = pool.decode_view([0]).raggeds[0].block_table_BP[0].tolist()
            first = (length - ROLLBACK - 511) // 16
            assert pool.block_manager.pages.num_pages not in table[first:]
            pool.batched_chunked_prefill_view([0], [length - ROLLBACK + 1], [ROLLBACK - 1])
    with pytest.raises(ValueError, match=r"slot 0 can be cut to 30\d\d..3100 positions, not to 3000"):
        pool.truncate(0, 3000)


def test_what_is_behind_the_window_is_the_page_of_zeros() -> None:
    """Also while a prompt is computed that nobody commits, and for a slot whose last tenant was shorter."""
    pool = gemma(GEMMA, num_blocks=400)
    pool.allocate([1] * 100)
    pool.free(0)
    pool.allocate(range(4000))
    nowhere = pool.block_manager.pages.num_pages
    for start in range(0, 4000, 500):
        view = pool.batched_chunked_prefill_view([0], [start], [500])
        first = max(0, start - 511)
        for layer, own in enumerate(GEMMA):
            ragged = view.raggeds[pool.storage.table_of[layer]]
            table = ragged.block_table_BP[0].tolist()
            begin = 0 if own.window is None else first // 16
            assert nowhere not in table[begin:]
            assert set(table[: max(0, begin - 1)]) <= {nowhere}
            places = [table[p // 16] * 16 + p % 16 for p in range(start, start + 500)]
            assert ragged.flat_T.tolist() == places
            assert ragged.flat_T.is_contiguous()
    assert len({id(k) for k in pool.storage.k}) == 4
    assert not any(k[nowhere].any() for k in pool.storage.k if isinstance(k, torch.Tensor))


def test_a_chunk_that_is_longer_than_agreed_finds_room_or_is_refused() -> None:
    pool = gemma(GEMMA, num_blocks=145)  # 1015 pages; two prompts of 1600 positions take 100 + 6 * 66 each
    assert pool.allocate(range(1600)) == Allocation(0)
    pool.batched_chunked_prefill_view([0], [0], [1100])
    pool.free(0)
    for slot in (0, 1):
        assert pool.allocate([slot] * 1600) == Allocation(slot)
    with pytest.raises(ValueError, match=r"slot 0 has room for 1056 positions, not for 0\+1600"):
        pool.batched_chunked_prefill_view([0], [0], [1600])
    assert pool.length(0) == 0
    for start in range(0, 1600, 400):
        pool.batched_chunked_prefill_view([0, 1], [start, start], [400, 400])


def test_free_positions_are_those_of_long_sequences(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        pool = gemma(GEMMA, num_blocks=500, max_seq_len=4096)
    assert "22 of 26 layers" in caplog.text
    assert "a sequence of 4096 positions takes 652 pages instead of 1792" in caplog.text
    groups = pool.block_manager.pages.groups
    assert cost(groups, 256) == 256 + 6 * 66 == 652
    rest = 3500 - 5 * 652
    assert pool.free_tokens() == (5 * 256 + rest // 7) * 16
    context = CacheContext(GEMMA, 1, 10**6, torch.bfloat16, CPU, ReferenceKernels(), max_chunk=512)
    assert infer_cache_paged.longest(context, PagedSettings(num_blocks=500), 0) == (3500 - 6 * 66) * 16


@pytest.mark.parametrize(
    ("layers", "windows", "tables", "sharing"),
    [
        (GEMMA, [512, None], 7, 4),
        (FULL, [None], 1, 26),
        ([replace(spec, window=5000) for spec in GEMMA], [None], 1, 26),
        ([replace(spec, window=4999) for spec in GEMMA], [4999], 1, 26),
        ([*GEMMA[:5], AttentionSpec(4, 2, 96, 1.0)], [None], 1, 6),
        ([*GEMMA[:5], AttentionSpec(4, 2, 128, 1.0)], [512, None], 6, 1),
        ([*GEMMA[:5], AttentionSpec(4, 1, 512, 1.0)], [512, None], 4, 2),
        ([*GEMMA[:5] * 2, *[AttentionSpec(4, 1, 128, 1.0)] * 5], [512, None], 5, 5),
        ([*FULL[:23], GEMMA[0]], [512, None], 9, 3),
        ([*GEMMA[:2], replace(GEMMA[0], window=64), FULL[0]], [64, 512, None], 4, 1),
    ],
    ids=[
        *("gemma", "no windows", "windows that nothing exceeds", "one window", "unequal widths", "other shapes"),
        *("wider heads", "smaller heads", "few", "two windows"),
    ],
)
def test_layers_share_tables_by_window(
    layers: list[AttentionSpec], windows: list[int | None], tables: int, sharing: int
) -> None:
    """A table's layers share their pages; all tables share the same memory."""
    pool = gemma(layers, num_blocks=320)
    assert [group.window for group in pool.block_manager.pages.groups] == windows
    assert sum(group.pages for group in pool.block_manager.pages.groups) == len({*pool.storage.table_of}) == tables
    assert max(pool.storage.table_of.count(u) for u in range(tables)) == sharing
    assert len({k.data_ptr() for k in pool.storage.k if isinstance(k, torch.Tensor)}) == sharing
    memory = [x.untyped_storage() for x in (*pool.storage.k, *pool.storage.v) if isinstance(x, torch.Tensor)]
    assert pool.nbytes == sum({each.data_ptr(): each.nbytes() for each in memory}.values())
    assert pool.block_manager.pages.num_pages == 320 * tables
    assert pool.free_tokens() >= 320 * 16


def test_a_model_with_windows_is_served_in_a_pool_that_only_chunks_fit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The check at the start computes no longer chunks either."""
    kinds = [*["sliding_attention"] * 3, "full_attention"]
    folder = write_checkpoint(tmp_path, "gemma3", window=9, layer_types=kinds, max_position_embeddings=1200)
    prompt, params = [5 + i % 40 for i in range(700)], SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    answers = []
    for backend, keys in (("slotted", {}), ("paged", {"paged": {"num_blocks": 42}})):
        engine = {"max_seq_len": 1200, "max_batch_size": 2, "prefill_chunk_size": 16}
        with caplog.at_level(logging.INFO), LLM(str(folder), engine=engine, cache={"backend": backend, **keys}) as llm:
            assert llm.served.exact
            answers.append([answer.token_ids for answer in llm.generate([prompt] * 2, params)])
    assert answers[0] == answers[1]
    assert "a sequence of 1200 positions takes 99 pages instead of 300" in caplog.text


def test_a_slot_that_cannot_grow_forgets_what_is_behind_its_window() -> None:
    """Its pages may be others' as soon as another sequence has made room."""
    pool = gemma(GEMMA, num_blocks=105, prefix_caching=False)  # 735 pages
    assert prefill(pool, [1] * 1600) == Allocation(0)
    decode(pool, 0, 64)
    assert pool.allocate([2] * 960) == Allocation(1)
    while pool.grow(0, pool.length(0) + 1):
        pool.decode_view([0])
    length, pages = pool.length(0), pool.block_manager.pages
    assert pages.holdings[0].firsts[0] == (length - ROLLBACK - 511) // 16
    pool.free(1)
    table = pool.block_manager.table([0], length)[0, 0].tolist()
    assert table == [pages.num_pages if block is None else block[0] for block in pages.holdings[0].tables[0]]
    decode(pool, 0, 20)
