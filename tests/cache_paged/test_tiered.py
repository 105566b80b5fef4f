"""A paged pool with a tier behind it: what is kept, when it is read back, and that nothing else ever is."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tests.attention import spec
from tests.cache_paged.tiers import Inline, Memory, Patient
from tests.examples import slowly
from tests.support import CPU

from infer.contracts.adapters import Adapter
from infer.contracts.attention import AttentionSpec, QuantizedKV
from infer.contracts.cache import Allocation, CacheContext, LastingPool
from infer.contracts.request import Request
from infer.contracts.states import StateSpec
from infer.errors import SettingsError
from infer.kernels.reference import ReferenceKernels
from infer_cache_paged import PagedPool, PagedSettings, make_pool
from infer_cache_paged.tier import BlockKey, TierProtocol
from infer_cache_paged.tiered import STALL_S, TieredPool
from infer_testing import check_pool

SIZE = 4
PLAIN = [spec(), spec()]
WINDOWED = [spec(window=9), spec(window=9), spec()]
STATES = [StateSpec(((3,), (2, 2)), (torch.float32, torch.bfloat16))]
IDENTITY = {"checkpoint": "that one"}


def context(
    layers: Sequence[AttentionSpec] = PLAIN, batch: int = 3, identity: Any = IDENTITY, **keys: Any
) -> CacheContext:
    given: dict[str, Any] = {"max_chunk": 8} | keys
    return CacheContext(layers, batch, 96, torch.float32, CPU, ReferenceKernels(), identity=lambda: identity, **given)


def make(
    tier: TierProtocol,
    *given: Any,
    clock: Any = lambda: 0.0,
    threads: Any = Inline,
    blocks: int = 40,
    snapshots: int | None = None,
    **keys: Any,
) -> TieredPool:
    settings = PagedSettings(block_size=SIZE, num_blocks=blocks, state_snapshots=snapshots)
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
    "v is k": {"layers": [replace(layer, v_is_k=True) for layer in PLAIN], "kv_dtype": "int8"},
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


@pytest.mark.parametrize("name", ["sequences", "states", *slowly("little_room", "windows", "mixed", "quantized")])
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


def restarted(tier: Memory, seed: int = 2, **keys: Any) -> TieredPool:
    pool = make(tier, **keys)
    fill(pool, seed)
    return pool


def served(tier: Memory, tokens: Sequence[int], salt: str = "", **keys: Any) -> Bits:
    """What a pool computes, and leaves to the tier."""
    pool = restarted(tier, 1, **keys)
    bits = serve(pool, tokens, salt)[1]
    pool.close()
    return bits


def test_only_equal_salts_share() -> None:
    tier = Memory()
    served(tier, range(40), "mine")
    assert serve(restarted(tier), range(40), "yours")[0] == 0
    assert serve(restarted(tier), range(40))[0] == 0
    assert serve(restarted(tier), range(40), "mine")[0] == 36
    assert not any(b"mine" in head for head, _ in tier.kept.values())


def test_a_salt_may_be_any_text() -> None:
    """JSON can name half of a surrogate pair."""
    tier = Memory()
    served(tier, range(40), "\ud800")
    assert serve(restarted(tier), range(40), "\ud801")[0] == 0
    assert serve(restarted(tier), range(40), "\ud800")[0] == 36


def test_who_wants_every_position_computed_gets_it() -> None:
    tier = Memory()
    served(tier, range(40))
    pool = restarted(tier)
    assert pool.allocate(range(40), reuse=False) == Allocation(0)
    assert not tier.reads


def test_what_names_a_block_is_the_same_at_every_start_and_all_that_its_bits_depend_on() -> None:
    tokens, kept = range(40), Memory()
    served(kept, tokens)
    same = Memory()
    served(same, tokens, batch=7, blocks=99, max_chunk=64)
    assert same.kept.keys() == kept.kept.keys()
    for keys in (
        {"identity": {"checkpoint": "another"}},
        {"kv_dtype": "int8"},
        {"layers": [spec()]},
        {"layers": [spec(size=32)] * 2},
        {"layers": WINDOWED},
    ):
        other = Memory()
        served(other, tokens, **keys)
        assert other.kept.keys().isdisjoint(kept.kept)
        assert not {head for head, _ in other.kept.values()} & {head for head, _ in kept.kept.values()}
    assert not (sizes := PagedSettings(block_size=8)).prefix_caching or TieredPool(
        context(), sizes, lambda head: kept, threads=Inline
    ).allocate(tokens) == Allocation(0), "blocks of another size"


def test_tokens_are_compared_and_not_their_digests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer_cache_paged.tiered._digest", lambda data: "0" * 64)
    tier = Memory()
    bits = served(tier, range(40))
    pool = restarted(tier)
    place = allocate(pool, [*range(36)][::-1])
    assert place.num_cached == 0
    tier = Memory()
    bits = served(tier, range(40))
    place = allocate(pool := restarted(tier), [*range(20), *range(60, 80)])
    assert place.num_cached == 20
    found = read(pool, place.slot, 0, 5)
    assert found == {at: bits[at] for at in found}


def test_a_prompt_waits_while_it_is_read_and_nobody_else_does() -> None:
    tier, threads = Memory(), Patient()
    bits = served(tier, range(60))
    pool = restarted(tier, threads=lambda count, name: threads)
    running = allocate(pool, range(100, 110))
    room = pool.free_tokens()
    assert pool.allocate(range(60)) is None
    assert pool.loading
    assert pool.free_tokens() == room
    pool.batched_chunked_prefill_view([running.slot], [0], [8])  # goes on
    other = pool.allocate(range(200, 210))
    assert other is not None
    assert not pool.loading
    pool.free(other.slot)
    threads.work(3)
    assert pool.allocate(range(60)) is None
    assert pool.loading
    assert len(pool.block_manager.pages.nodes(range(60), "")) == 3, "what has been read is there already"
    threads.work()
    place = pool.allocate(range(60))
    assert place is not None
    assert place.num_cached == 56
    found = read(pool, place.slot, 0, 14)
    assert found == {at: bits[at] for at in found}
    assert sorted(tier.reads) == sorted({*tier.reads}), "nothing is read twice"


def test_little_is_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer_cache_paged.tiered.AHEAD", 1)
    tier, threads = Memory(), Patient()
    served(tier, range(60))
    pool = restarted(tier, threads=lambda count, name: threads)
    attempts = 0
    while (place := pool.allocate(range(60))) is None:
        assert len(threads.waiting) <= 2
        attempts += 1
        threads.work()
    assert (place.num_cached, attempts) == (56, 7)


def test_a_state_comes_after_a_block_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node would not stay in the trie without one, and its state would be read again."""
    monkeypatch.setattr("infer_cache_paged.tiered.AHEAD", 1)
    tier, case = Memory(), CASES["only windows"] | {"states": STATES}
    served(tier, range(60), **case)
    assert allocate(restarted(tier, **case), range(60)).num_cached == 44
    assert len(tier.reads) == len({*tier.reads}) == 3


def test_what_nobody_fetches_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer_cache_paged.tiered.AHEAD", 1)
    tier, threads = Memory(), Patient()
    for salt in "abcd":
        served(tier, range(60), salt)
    pool = restarted(tier, threads=lambda count, name: threads)
    for salt in "abcd":
        assert pool.allocate(range(60), salt=salt) is None
    assert len(pool._reading) == 4
    threads.work()
    assert len(tier.reads) == 4


def test_a_tier_that_hangs_holds_nobody_up_for_long(caplog: pytest.LogCaptureFixture) -> None:
    tier, threads, now = Memory(), Patient(), [0.0]
    served(tier, range(60))
    pool = restarted(tier, threads=lambda count, name: threads, clock=lambda: now[0])
    assert pool.allocate(range(60)) is None
    now[0] = STALL_S - 0.1
    assert pool.allocate(range(60)) is None
    now[0] = STALL_S
    assert pool.allocate(range(60)) == Allocation(0)
    assert not pool.loading
    assert "has yielded nothing for 5 s" in caplog.text


def test_no_prompt_waits_for_what_it_has_no_room_for() -> None:
    tier = Memory()
    served(tier, range(60))
    pool = restarted(tier, blocks=24)
    allocate(pool, range(100, 160))
    assert pool.allocate(range(60)) is None
    assert not pool.loading
    assert not tier.reads


def test_no_prompt_waits_for_a_state_that_there_is_no_row_for() -> None:
    tier, threads, tokens = Memory(), Patient(), range(60)
    served(tier, tokens, states=STATES)
    pool = restarted(tier, states=STATES, snapshots=1, threads=lambda count, name: threads)
    running = allocate(pool, range(100, 124))
    pool.batched_chunked_prefill_view([running.slot], [0], [8])  # saves the state near the prompt's end
    place = pool.allocate(tokens)
    assert place == Allocation(1)
    assert not tier.reads
    pool.free(place.slot)
    pool.free(running.slot)
    assert pool.allocate(tokens) is None
    assert pool.loading
    threads.work()
    assert pool.allocate(tokens) == Allocation(running.slot, 44)


def test_what_is_read_takes_no_pages_of_what_it_goes_on_from() -> None:
    """The pool has little room but that of the prompt's first blocks, which its windows do not reach."""
    tier = Memory()
    pool = restarted(tier, 1, layers=WINDOWED, blocks=24)
    bits = serve(pool, range(60))[1]
    rest(pool)
    serve(pool, range(16))
    for other in (range(1000, 1040), range(2000, 2018)):
        allocate(pool, other)
    place = allocate(pool, range(64))
    assert place.num_cached == 52
    found = read(pool, place.slot, 0, 13)
    assert found == {at: bits[at] for at in found}


@cases
def test_what_lies_behind_a_damaged_block_is_computed(case: dict[str, Any]) -> None:
    tokens = range(60)
    for broken in range(0, 14, 3):
        tier = Memory()
        bits = served(tier, tokens, **case)
        for name in [name for name in tier.kept if int(name[:6], 16) == broken]:
            tier.kept[name] = tier.kept[name][0] + b"?", tier.kept[name][1]
        pool = restarted(tier, **case)
        place = allocate(pool, tokens)
        depth = place.num_cached // SIZE
        windowed = all(layer.window for layer in case.get("layers", PLAIN))
        assert depth <= (14 if windowed else broken)
        found = read(pool, place.slot, 0, depth)
        assert found == {at: bits[at] for at in found}
        pool.free(place.slot)
        assert pool.free_tokens() == restarted(Memory(), **case).free_tokens()


def test_what_is_evicted_is_kept_first() -> None:
    tier = Memory()
    pool = restarted(tier, 1, blocks=24)
    bits = serve(pool, range(60))[1]
    assert not tier.kept
    serve(pool, range(100, 160))
    assert len(tier.kept) == 6, "as many as had to make room"
    place = allocate(pool, range(60))
    assert place.num_cached == 56
    found = read(pool, place.slot, 0, 14)
    assert found == {at: bits[at] for at in found}


def test_a_step_hands_over_copies_and_no_more_than_can_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer_cache_paged.tiered.BEHIND", 1)
    tier, threads = Memory(), Patient()
    pool = restarted(tier, 1, threads=lambda count, name: threads, blocks=24)
    monkeypatch.setattr("infer_cache_paged.tiered.NAP_S", 0)
    bits = serve(pool, range(60))[1]
    assert pool.rest()
    assert pool.rest()
    assert not tier.kept
    assert len(threads.waiting) == 2
    fill(pool, 3)  # the pages are used for something else
    threads.work()
    assert {payload for _, payload in tier.kept.values()} == {bits[0, i] + bits[1, i] for i in range(2)}, (
        "copies of what was there"
    )
    while pool.rest():
        threads.work()
    threads.work()
    assert len(tier.kept) == 15


def test_the_tier_is_told_what_is_used() -> None:
    tier = Memory()
    served(tier, range(40))
    pool = restarted(tier)
    serve(pool, range(40))
    rest(pool)
    assert len({*tier.used}) == 10
    assert {*tier.used} <= tier.kept.keys()


def compute(pool: TieredPool, bits: Bits, flip: bool = False) -> Any:
    """As the engine does for ``verify``: the slot's blocks get the bits that a model would compute."""

    def computed(token_ids: Sequence[int]) -> int:
        place = pool.allocate(token_ids, reuse=False)
        assert place is not None
        pool.batched_chunked_prefill_view([place.slot], [0], [len(token_ids)])
        page = int(pool.block_manager._tables_USP[0, place.slot, len(token_ids) // SIZE - 1])
        for layer, (k, v) in enumerate(zip(pool.storage.k, pool.storage.v, strict=True)):
            data = bytearray(bits[layer, len(token_ids) // SIZE - 1])
            data[-1] ^= flip
            half = len(data) // 2
            for kv, part in ((k, data[:half]), (v, data[half:])):
                assert isinstance(kv, torch.Tensor)
                kv[page].view(-1).view(torch.uint8).copy_(torch.frombuffer(part, dtype=torch.uint8))
        return place.slot

    return computed


def test_a_block_is_computed_again_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    tier = Memory()
    bits = served(tier, range(40))
    pool = restarted(tier)
    room = pool.free_tokens()
    pool.verify(compute(pool, bits))
    assert len(tier.kept) == 10
    assert "what was kept is what is computed now" in caplog.text
    pool.verify(lambda token_ids: None)
    assert len(tier.kept) == 10
    pool.verify(compute(pool, bits, flip=True))
    assert not tier.kept
    assert "is not what is computed now; all of this generation is dropped" in caplog.text
    assert pool.free_tokens() == room
    pool.verify(lambda token_ids: pytest.fail("there is nothing"))


def test_a_fault_of_the_tier_is_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Memory, key: BlockKey, payload: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Memory, "put", fail)
    served(Memory(), range(8))
    assert "was not kept" in caplog.text
    assert "a bug" in caplog.text


def test_what_is_left_when_time_is_over_is_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    now = iter(range(0, 1000, 6))
    tier = Memory()
    pool = make(tier, clock=lambda: next(now))
    fill(pool, 1)
    serve(pool, range(60))
    pool.close()
    assert len(tier.kept) == 8
    assert "7 blocks are not kept, since 10 s are over" in caplog.text


def test_refused_settings(tmp_path: Any) -> None:
    with pytest.raises(ValidationError, match="none while prefix_caching is false"):
        PagedSettings(disk=tmp_path, prefix_caching=False)
    with pytest.raises(ValidationError, match="disk_gib = 3 has no effect without disk"):
        PagedSettings(disk_gib=3)
    with pytest.raises(ValidationError):
        PagedSettings(disk=tmp_path, disk_gib=0)
    none = PagedSettings(disk=tmp_path, state_snapshots=0)
    with pytest.raises(SettingsError, match=r"cache.paged.disk keeps prefixes, .*state_snapshots is 0; leave one"):
        make_pool(context(states=STATES), none)
    assert not list(tmp_path.iterdir())


def test_a_pool_whose_bits_nobody_names_lasts_only_in_memory(tmp_path: Any) -> None:
    pool = make_pool(replace(context(), identity=None), PagedSettings(disk=tmp_path))
    assert type(pool) is PagedPool
    assert not isinstance(pool, LastingPool)
    assert not list(tmp_path.iterdir())


def test_the_block_that_is_computed_again_is_the_bases(caplog: pytest.LogCaptureFixture) -> None:
    """An adapter would have computed other bits of the same tokens."""
    caplog.set_level(logging.INFO)
    tier, adapted = Memory(), Request((1,), adapter=Adapter("mine", 0, "f" * 32, "")).prefix_salt
    served(tier, range(40), adapted)
    restarted(tier).verify(lambda token_ids: pytest.fail("the base has computed nothing"))
    assert len(tier.kept) == 10
    bits = served(tier, range(40))
    assert serve(restarted(tier), range(40), adapted)[0] == serve(restarted(tier), range(40))[0] == 36
    pool = restarted(tier)
    pool.verify(compute(pool, bits))
    assert "what was kept is what is computed now" in caplog.text
    pool.verify(compute(pool, bits, flip=True))
    assert not tier.kept
