"""``check_pool``: ours pass, as do pools of strangers' block managers, and it names the bugs that are planted in
them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.examples import seeded
from tests.testing.planted import Bug, Bugs, caught
from torch import Tensor

from infer.cache import ExtendView, KVStorage, Pool
from infer.cache.arrays import Ints, Slots
from infer.contracts.attention import AttentionSpec, QuantizedKV, Ragged, Rotary
from infer.contracts.cache import Allocation, CacheContext, CachePoolProtocol, KVCacheView
from infer.kernels.reference import ReferenceKernels
from infer_cache_paged import PagedBlockManager, PagedPool, PagedSettings
from infer_cache_paged.pages import Pages
from infer_cache_paged.snapshots import Snapshots
from infer_cache_slotted import SlottedBlockManager, SlottedPool
from infer_testing import check_pool
from infer_testing.pool_machine import LONGEST, Machine, Pools
from infer_testing.pools import SUITE

MakePool = Callable[[CacheContext], CachePoolProtocol]
planted: Bugs[MakePool] = Bugs([])


def paged(block_size: int = 16, **keys: Any) -> MakePool:
    return lambda context: PagedPool(context, PagedSettings(block_size=block_size, **keys))


class Strangers:
    """By this one, a slot's positions lie backwards in its block; it neither shares nor takes positions back."""

    def __init__(self, context: CacheContext) -> None:
        self.slots, self.longest = context.max_batch_size, context.max_seq_len
        self.held: dict[int, int] = {}

    def allocate(self, token_ids: Sequence[int]) -> Allocation | None:
        free = [slot for slot in range(self.slots) if slot not in self.held]
        if not free or len(token_ids) > self.longest:
            return None
        self.held[free[-1]] = 0
        return Allocation(free[-1])

    def grow(self, slot: int, num_tokens: int) -> bool:
        return num_tokens <= self.longest

    def free(self, slot: int) -> None:
        del self.held[slot]

    def free_tokens(self) -> int:
        return (self.slots - len(self.held)) * self.longest

    def length(self, slot: int) -> int:
        return self.held[slot]

    def extend(self, slots: Sequence[int] | Slots, starts: Sequence[int] | Ints, lens: Sequence[int] | Ints) -> int:
        for slot, start in zip(slots, starts, strict=True):
            if self.held[int(slot)] != start:
                raise ValueError(f"slot {slot} holds {self.held[int(slot)]} positions")
        for slot, length in zip(slots, lens, strict=True):
            self.held[int(slot)] += int(length)
        return max(self.held[int(slot)] for slot in slots)

    def advance(self, slots_B: Slots) -> tuple[Ints, int]:
        starts = np.array([self.held[int(slot)] for slot in slots_B], dtype=np.int32)
        return starts, self.extend(slots_B, starts, np.ones_like(starts))

    def table(self, slots: Sequence[int] | Slots, num_tokens: int) -> Ints:
        return np.array(
            [[(int(slot) + 1) * self.longest - 1 - p for p in range(num_tokens)] for slot in slots], np.int32
        )


def strangers(context: CacheContext) -> CachePoolProtocol:
    return Pool(Strangers(context), KVStorage(context, context.max_batch_size * context.max_seq_len, 1))


OURS: dict[str, MakePool] = {
    "slotted": SlottedPool,
    "paged": paged(),
    "paged, blocks of 3": paged(3),
    "paged, alone": paged(prefix_caching=False),
    "strangers": strangers,
}


def test_sharing_is_tried_with_as_many_places_as_it_takes() -> None:
    for seed in range(8):
        check_pool(paged(), only=["sharing"], seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [kind if kind == "slotted" else pytest.param(kind, marks=pytest.mark.slow) for kind in OURS]
)
@pytest.mark.draws
@seeded()
def test_ours_pass(kind: str, seed: int) -> None:
    outcomes = list(SUITE.outcomes(Pools(OURS[kind], ("int8",), states=kind != "strangers"), seed=seed))
    assert not [str(outcome) for outcome in outcomes if outcome.violation]
    skipped = ["states"] * (kind == "strangers") + ["sharing"] * (kind not in list(OURS)[1:3])
    assert [outcome.name for outcome in outcomes if outcome.skipped] == skipped


@planted.each
def test_a_planted_bug_is_named(bug: Bug[MakePool]) -> None:
    caught(bug, lambda **keys: check_pool(bug.make, kv_dtypes=("int8",), states=True, **keys))


def pages(**methods: Callable[..., Any]) -> MakePool:
    """A paged pool whose Pages have other methods."""

    def make(context: CacheContext) -> CachePoolProtocol:
        pool = PagedPool(context, PagedSettings(block_size=4))
        pool.block_manager.pages.__class__ = type("Changed", (Pages,), methods)
        return pool

    return make


def block_manager(**methods: Callable[..., Any]) -> MakePool:
    """A paged pool whose block manager has other methods."""

    def make(context: CacheContext) -> CachePoolProtocol:
        made = PagedPool(context, PagedSettings(block_size=4))
        changed: Any = made.block_manager
        changed.__class__ = type("Changed", (PagedBlockManager,), methods)
        return Pool(changed, made.storage, made.state_storage)

    return make


def whole_prefix(self: Pages, owner: int, token_ids: Sequence[int], *, reuse: bool = True, salt: str = "") -> Any:
    return Pages.allocate(self, owner, token_ids, reuse=reuse, salt="")


planted("salts are ignored", "sequences", "committed by a sequence of equal salt|has written at position")(
    pages(allocate=whole_prefix)
)


def always_reuses(self: Pages, owner: int, token_ids: Sequence[int], *, reuse: bool = True, salt: str = "") -> Any:
    return Pages.allocate(self, owner, token_ids, salt=salt)


planted("reuse=False is ignored", "sequences", "with reuse=False gives num_cached")(pages(allocate=always_reuses))


def commits_ahead(self: Pages, owner: int, token_ids: Sequence[int], num_computed: int) -> bool:
    return Pages.commit(self, owner, token_ids, len(token_ids) // self.block_size * self.block_size)


planted("more is shared than is computed", "sequences", "have been committed by a sequence|reads, at position")(
    pages(commit=commits_ahead)
)


def never_cleared(self: PagedBlockManager, slot: int, begin: int = 0) -> None:
    PagedBlockManager._copy(self, slot, min(begin + 1, 2) if begin == 0 else begin)


planted("a slot's first page is its predecessor's", "sequences", r"reads, at position \d+, ")(
    block_manager(_copy=never_cleared)
)


def leaks(self: Pages, owner: int) -> None:
    Pages.free(self, owner)
    if self.free_list:
        self.free_list.pop()


planted("a page leaks with every end", "sequences", r"free_tokens\(\) is \d+ once all slots are free")(
    pages(free=leaks)
)


def lends(self: Pages, owner: int, num_tokens: int, length: int = 0) -> bool:
    fits = Pages.grow(self, owner, num_tokens, length)
    table = self.holdings[owner].tables[0]
    if fits and len(table) > 1 and len(self.holdings) > 1:
        other = next(holding for key, holding in self.holdings.items() if key != owner)
        table[-1] = other.tables[0][-1]
    return fits


planted("a sequence grows into a page of another", "sequences", r"what s\d+ has written at position \d+|raised")(
    pages(grow=lends)
)


def one_less(self: PagedBlockManager, slots: Any, starts: Any, lens: Any) -> int:
    longest = PagedBlockManager.extend(self, slots, starts, lens)
    if len(slots) > 1:
        self._lengths_S[slots[-1]] -= 1
    return longest


planted("the last of several chunks is not counted in full", "sequences", r"length\(\d\) is \d+, but \d+ positions")(
    block_manager(extend=one_less)
)


def stays(self: PagedBlockManager, slots_B: Slots) -> tuple[Ints, int]:
    starts, longest = PagedBlockManager.advance(self, slots_B)
    self._lengths_S[slots_B] = starts
    return starts, longest


planted("a decode does not advance the length", "sequences", r"length\(\d\) is \d+, but \d+ positions")(
    block_manager(advance=stays)
)


def keeps_length(self: PagedBlockManager, num_tokens: int) -> int:
    slot = self._free_slots.pop()
    self._lengths_S[slot] = max(num_tokens, 1)
    return slot


planted("a slot's counter does not start at 0", "slots", r"length\(\d\) is 1, but 0 positions")(
    block_manager(_open=keeps_length)
)


def too_few_slots(self: SlottedBlockManager, token_ids: Sequence[int]) -> Allocation | None:
    return None if len(self._free_slots) == 1 else SlottedBlockManager.allocate(self, token_ids)


def slotted(**methods: Callable[..., Any]) -> MakePool:
    def make(context: CacheContext) -> CachePoolProtocol:
        made = SlottedPool(context)
        changed: Any = made.block_manager
        changed.__class__ = type("Changed", (SlottedBlockManager,), methods)
        return Pool(changed, made.storage, made.state_storage)

    return make


planted("one slot is never handed out", "slots", r"gives None, though a slot is free")(slotted(allocate=too_few_slots))


def any_length(self: SlottedBlockManager, slot: int, num_tokens: int) -> bool:
    return True


planted("a sequence may grow beyond its region", "full_length", "room for more than max_seq_len")(
    slotted(grow=any_length)
)


def trusting(self: PagedBlockManager, slots: Any, starts: Any, lens: Any) -> int:
    self._lengths_S[np.asarray(slots)] = np.asarray(starts)
    return PagedBlockManager.extend(self, slots, starts, lens)


planted("a start that leaves a gap is believed", "wrong_starts", "though it holds 9 positions")(
    block_manager(extend=trusting)
)


def takes_back_nothing(self: PagedBlockManager, slot: int, num_tokens: int) -> None:
    PagedBlockManager.truncate(self, slot, min(self.length(slot), num_tokens + 1))


planted("one position too few is taken back", "sequences", r"length\(\d\) is \d+, but \d+ positions")(
    block_manager(truncate=takes_back_nothing)
)


class StorageOf:
    """A pool with another storage, in blocks of 4."""

    def __init__(self, kind: type[KVStorage]) -> None:
        self.kind = kind

    def __call__(self, context: CacheContext) -> CachePoolProtocol:
        made = PagedPool(context, PagedSettings(block_size=4))
        made.storage.__class__ = self.kind
        made.storage.view_type = self.kind.view_type
        return made


class Unturned(KVStorage):
    class View(ExtendView):
        def attend(
            self, layer: int, q_THE: Tensor, k_TKE: Tensor | None, v_TKE: Tensor | None, rotary: Rotary | None = None
        ) -> Tensor:
            if rotary is not None and k_TKE is not None:
                q_THE, _ = self.storage.kernels.rope(q_THE, k_TKE, rotary)
                rotary = None
            return super().attend(layer, q_THE, k_TKE, v_TKE, rotary)

    view_type = View


planted("K is written without its rotation", "sequences", "reads, at position")(StorageOf(Unturned))


class OneLayer(KVStorage):
    class View(ExtendView):
        def attend(
            self, layer: int, q_THE: Tensor, k_TKE: Tensor | None, v_TKE: Tensor | None, rotary: Rotary | None = None
        ) -> Tensor:
            return super().attend(0, q_THE, k_TKE, v_TKE, rotary)

    view_type = View


planted("layers write to one place, from where a later pass reads", "sequences", "in layer 0, the query at position")(
    StorageOf(OneLayer)
)


class OneSide(KVStorage):
    """It counts the bytes of K alone."""

    @property
    def nbytes(self) -> int:
        return super().nbytes // 2


planted("nbytes leaves out V", "size", r"nbytes is \d+ with .*; the \d+ positions need")(StorageOf(OneSide))


class DoubleInt8(KVStorage):
    """It counts a code as two bytes."""

    @property
    def nbytes(self) -> int:
        codes = [x.codes for x in (*self.k, *self.v) if isinstance(x, QuantizedKV)]
        return super().nbytes + sum(x.nbytes for x in codes)


planted("nbytes counts codes twice", "size", r"nbytes is \d+ with kv_dtype int8")(StorageOf(DoubleInt8))


class Silent(OneSide):
    """It stores K and V by itself, too, so that nobody sees its tensors."""

    class View(ExtendView):
        def attend(
            self, layer: int, q_THE: Tensor, k_TKE: Tensor | None, v_TKE: Tensor | None, rotary: Rotary | None = None
        ) -> Tensor:
            kernels, self.storage.kernels = self.storage.kernels, ReferenceKernels()
            try:
                return super().attend(layer, q_THE, k_TKE, v_TKE, rotary)
            finally:
                self.storage.kernels = kernels

    view_type = View


planted("nbytes leaves out V, of tensors that nobody sees", "size", r"K and V are stored in have not been seen")(
    StorageOf(Silent)
)
planted("free_tokens is a constant", "free_tokens", r"free_tokens\(\) was \d+ and is \d+ after a sequence of 96")(
    slotted(free_tokens=lambda self: 96)
)
planted("free_tokens is zero", "free_tokens", r"free_tokens\(\) is 0 in an empty pool")(
    slotted(free_tokens=lambda self: 0)
)


class Moving(KVStorage):
    def fixed_view(self, table: Ints, starts: Sequence[int] | Ints) -> ExtendView:
        return self.view(table, starts, np.ones(len(starts), dtype=np.int32))


planted("views of decodes are made anew", "recorded_views", "gives a view whose .* is not where that of the first")(
    StorageOf(Moving)
)


class Kept(KVStorage):
    """The tensors of all fixed views are those of the first one; ``starts`` are each view's own."""

    written: tuple[str, ...] = ("starts_B", "block_table_BP", "flat_T")
    first: Ragged | None = None

    def fixed_view(self, table: Ints, starts: Sequence[int] | Ints) -> ExtendView:
        made = self.view(table, starts, np.ones(len(starts), dtype=np.int32)).ragged
        first = self.first = self.first or made
        for name in self.written:
            getattr(first, name).copy_(getattr(made, name))
        tensors = first.starts_B, first.offsets_B1, first.block_table_BP, first.flat_T
        return ExtendView(self, Ragged(made.starts, made.lens, made.offsets, *tensors))


class Stale(Kept):
    written = ("block_table_BP", "flat_T")


def kept(storage: type[Kept]) -> MakePool:
    def make(context: CacheContext) -> CachePoolProtocol:
        sizes = context.max_batch_size, context.max_seq_len
        return Pool(SlottedBlockManager(*sizes), storage(context, *sizes))

    return make


planted("views of decodes keep where the first one started", "recorded_views", "reads, at position")(kept(Stale))


def test_a_view_that_keeps_its_tensors_is_enough() -> None:
    check_pool(kept(Kept), only=["recorded_views"])


def narrower(context: CacheContext) -> CachePoolProtocol:
    """Lets go of what a window still reaches."""
    cut: list[AttentionSpec] = [
        spec if spec.window is None else replace(spec, window=spec.window - 4) for spec in context.layers
    ]
    made = PagedPool(replace(context, layers=cut), PagedSettings(block_size=4))
    made.storage.layers = [*context.layers]
    return made


planted(
    "a window's last pages are let go too early", "windows", r"in layer \d, the query at position .* reads, at position"
)(narrower)


class Rounded(SlottedPool):
    """K/V of int8 that lose their sign."""

    def __init__(self, context: CacheContext) -> None:
        super().__init__(context)
        if context.kv_dtype == "int8":
            self.storage.kernels = replace_store(self.storage.kernels)


def replace_store(kernels: Any) -> Any:
    class Unsigned(type(kernels)):  # type: ignore[misc]
        def store_kv(self, k_TKE: Tensor, v_TKE: Tensor, *rest: Any) -> None:
            super().store_kv(k_TKE, v_TKE.abs(), *rest)

    return Unsigned()


planted("int8 values lose their sign", "quantized", "what nobody has written")(Rounded)
planted("shares is True, but nothing is", "sharing", "does not find any of 80 tokens")(
    pages(commit=lambda self, owner, token_ids, num_computed: False)
)


def unsteady(context: CacheContext) -> CachePoolProtocol:
    """A pool that gives the room of a refused prompt away."""
    made = PagedPool(context, PagedSettings(block_size=4))
    allocate = made.allocate

    def changed(token_ids: Sequence[int], *, reuse: bool = True, salt: str = "") -> Allocation | None:
        place = allocate(token_ids, reuse=reuse, salt=salt)
        if place is None and made.block_manager.pages.free_list:
            made.block_manager.pages.free_list.pop()
        return place

    made.allocate = changed  # type: ignore[method-assign]
    return made


planted("a refusal takes pages", "little_room", r"gives None, but free_tokens\(\) went from|once all slots are free")(
    unsteady
)


class Given(random.Random):
    """Draws all of a population, in the order of the slots or against it."""

    def __init__(self, backwards: bool) -> None:
        super().__init__(0)
        self.backwards = backwards

    def randint(self, a: int, b: int) -> int:
        return b

    def sample(self, population: Any, k: int, **keys: Any) -> Any:
        return population[::-1] if self.backwards else population[:]


@pytest.mark.parametrize("youngest_first", [False, True])
def test_a_sequence_that_has_left_is_asked_for_nothing_more(youngest_first: bool) -> None:
    """Of two sequences, the older one needs a page, for which the younger one leaves: before it has grown itself, or
    after that. The pool is right to refuse a slot that is free."""
    draw = Given(youngest_first)
    machine = Machine(Pools(paged(prefix_caching=False)), draw, num_tokens=LONGEST, max_batch_size=2)
    older = machine.allocate(4 * 16, reuse=False)
    younger = machine.allocate(machine.room - 4 * 16 - 10, reuse=False)
    assert older is not None
    assert younger is not None
    assert machine.pool.free_tokens() == 0
    machine.extend([older, younger], LONGEST)
    machine.decode()
    machine.watch()
    assert machine.lives == [older]
    assert older.length == 64, "it waits for the next step"
    machine.decode()
    assert older.length == 65
    machine.finish()


@pytest.mark.slow
def test_a_view_is_all_that_is_asked_of_a_pool() -> None:
    """No attribute beyond the contract: a pool that has its own views, without block manager and storage, is tried
    alike."""

    class View:
        def __init__(self, view: KVCacheView) -> None:
            self.__view = view

        def attend(
            self, layer: int, q_THE: Tensor, k_TKE: Tensor | None, v_TKE: Tensor | None, rotary: Rotary | None = None
        ) -> Tensor:
            return self.__view.attend(layer, q_THE, k_TKE, v_TKE, rotary)

    class Own:
        def __init__(self, context: CacheContext) -> None:
            inner = self.__inner = SlottedPool(context)
            for name in ("allocate", "grow", "commit", "free", "free_tokens", "length"):
                setattr(self, name, getattr(inner, name))

        @property
        def nbytes(self) -> int:
            return self.__inner.nbytes

        def batched_chunked_prefill_view(self, *args: Any) -> View:
            return View(self.__inner.batched_chunked_prefill_view(*args))

        def decode_view(self, *args: Any) -> View:
            return View(self.__inner.decode_view(*args))

    made: Any = Own
    check_pool(made)


def states(**methods: Callable[..., Any]) -> MakePool:
    """A paged pool whose snapshots have other methods, in blocks of 4."""

    def make(context: CacheContext) -> CachePoolProtocol:
        pool = PagedPool(context, PagedSettings(block_size=4, state_snapshots=2))
        if context.states:
            pool.block_manager.state_manager.__class__ = type("Changed", (Snapshots,), methods)
        return pool

    return make


def stale(self: Snapshots, slot: int, row: int = 0) -> None:
    """The slot keeps the row of its last sequence."""


planted("a slot begins with the state of its last sequence", "states", "goes on at position 0 with what")(
    states(open=stale)
)


def neighbors(self: Snapshots, slots: Any, starts: Any, lens: Any) -> Any:
    read, save = Snapshots.extend(self, slots, starts, lens)
    return read[::-1].copy(), save


planted("sequences of a pass read each other's states", "states", r"goes on at position \d+ with|read by, another")(
    states(extend=neighbors)
)


def late(self: Snapshots, slots: Any, starts: Any, lens: Any) -> Any:
    read, save = Snapshots.extend(self, slots, starts, lens)
    for i in range(len(save) - 1):
        if save[i] >= 0 and save[i + 1] < 0:
            save[i], save[i + 1] = -1, save[i]
    return read, save


planted("a snapshot is saved one token late", "states", r"goes on at position \d+ with what s\d+ has left at")(
    states(extend=late)
)


def hasty(self: Snapshots, slot: int, row: int) -> None:
    """Nobody notes that the row is still to be read."""


planted("a snapshot is evicted before it is read", "states", r"goes on at position \d+ with|read by, another")(
    states(_read=hasty)
)


def takes_back_no_state(self: Snapshots, slot: int, num_tokens: int) -> None:
    """The slot goes on from the state after its last draft token."""


planted("wrong drafts stay in the state", "states", r"goes on at position \d+ with what s\d+ has left at position")(
    states(truncate=takes_back_no_state)
)


def never(self: Any) -> Any:
    return nullcontext()


class Unrehearsed(KVStorage):
    class View(ExtendView):
        rehearsal = never

    view_type = View


planted("a rehearsal saves states", "states", "with what a rehearsal has left")(StorageOf(Unrehearsed))
