"""The bookkeeping of pages: worked examples, and a state machine against a model of what each page holds."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule
from tests.examples import examples

from infer_cache_paged import pages as pages_module
from infer_cache_paged.pages import ROLLBACK, Block, Group, Node, Pages, cost, fitting


def nodes(pages: Pages) -> Iterator[Node]:
    """All of the trie but its root."""
    stack = list(pages.root.children.values())
    while stack:
        node = stack.pop()
        yield node
        stack += node.children.values()


def whole(pages: Pages, owner: int, tokens: list[int], salt: str = "") -> int | None:
    """Allocate, and compute everything."""
    found = pages.allocate(owner, tokens, salt=salt)
    if found is not None:
        pages.commit(owner, tokens, len(tokens))
    return found


def test_a_common_prefix_is_held_once() -> None:
    pages = Pages(10, 4)
    prefix = list(range(8))
    assert whole(pages, 0, [*prefix, 50, 51]) == 0
    assert whole(pages, 1, [*prefix, 60]) == 8
    assert pages.holdings[0].tables[0][:2] == pages.holdings[1].tables[0][:2]
    assert pages.num_available == 10 - 4
    pages.free(0)
    assert pages.num_available == 10 - 3
    pages.free(1)
    assert pages.num_available == 10


def test_the_last_token_is_always_left_to_compute() -> None:
    pages = Pages(10, 4)
    whole(pages, 0, list(range(8)))
    assert whole(pages, 1, list(range(8))) == 4
    assert whole(pages, 2, list(range(9))) == 8


def test_what_is_not_computed_is_not_shared() -> None:
    pages = Pages(10, 4)
    tokens = list(range(12))
    pages.allocate(0, tokens)
    pages.commit(0, tokens, 7)
    assert pages.allocate(1, tokens) == 4
    pages.free(0)
    assert pages.allocate(2, tokens) == 4


def test_salts_keep_tenants_apart() -> None:
    pages = Pages(10, 4)
    tokens = list(range(9))
    whole(pages, 0, tokens, "alice")
    assert whole(pages, 1, tokens, "bob") == 0
    assert whole(pages, 2, tokens, "alice") == 8
    assert whole(pages, 3, tokens) == 0


def test_reuse_can_be_declined_and_sharing_turned_off() -> None:
    tokens = list(range(9))
    pages = Pages(10, 4)
    whole(pages, 0, tokens)
    assert pages.allocate(1, tokens, reuse=False) == 0
    alone = Pages(10, 4, share=False)
    whole(alone, 0, tokens)
    assert whole(alone, 1, tokens) == 0
    alone.free(0)
    assert not any(alone.cached)


def test_equal_pages_computed_twice_become_one() -> None:
    pages = Pages(10, 4)
    tokens = list(range(8))
    for owner in (0, 1):
        pages.allocate(owner, tokens)
    assert pages.num_available == 6
    assert not pages.commit(0, tokens, 8)
    assert pages.commit(1, tokens, 8)
    assert pages.holdings[0].tables == pages.holdings[1].tables
    assert pages.num_available == 8


def test_the_least_recently_used_leaf_goes_first() -> None:
    pages = Pages(6, 2)
    a, b = [1, 1, 2, 2, 9], [1, 1, 3, 3, 9]
    for owner, tokens in ((0, a), (1, b)):
        whole(pages, owner, tokens)
    pages.free(0)
    pages.free(1)
    assert pages.allocate(2, a) == 4, "a is used again, so b's own page is the oldest leaf"
    pages.free(2)
    assert pages.allocate(3, [7] * 8) == 0  # 4 pages: the free ones, and one of the three cached
    pages.free(3)
    assert pages.allocate(4, b, reuse=True) == 2, "the page of 3, 3 is gone, the page of 1, 1 is not"
    pages.free(4)
    assert pages.allocate(5, a) == 4


def test_of_a_chain_the_end_goes_first() -> None:
    pages = Pages(3, 2)
    whole(pages, 0, [1, 1, 2, 2, 3, 3])
    pages.free(0)
    assert pages.allocate(1, [9]) == 0
    pages.free(1)
    assert pages.allocate(2, [1, 1, 2, 2, 3, 3]) == 4


def test_nothing_happens_when_there_is_no_room() -> None:
    pages = Pages(4, 2)
    whole(pages, 0, [1, 1, 2, 2, 3])
    pages.free(0)
    whole(pages, 1, [9, 9, 9])
    before = (list(pages.free_list), list(pages.cached[0]))
    assert pages.allocate(2, [1, 1, 2, 2, 3, 3, 4]) is None
    assert not pages.grow(1, 9)
    assert (pages.free_list, list(pages.cached[0])) == before


def test_a_page_once_let_go_serves_any_number_of_tokens_again() -> None:
    pages = Pages(3, 2)
    for start in range(50):
        assert whole(pages, 0, [start] * 6) == 0
        pages.free(0)
    assert pages.num_available == 3
    assert len(list(nodes(pages))) <= 3


@pytest.fixture
def no_rollback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer_cache_paged.pages.ROLLBACK", 0)


def prefill(pages: Pages, owner: int, tokens: list[int], chunk: int = 8) -> int | None:
    """Allocate and compute chunk by chunk, as an engine does."""
    found = pages.allocate(owner, tokens)
    if found is not None:
        for length in [*range(found, len(tokens), chunk), len(tokens)]:
            pages.commit(owner, tokens, length)
            assert pages.slide(owner, length)
    return found


@pytest.mark.usefixtures("no_rollback")
def test_a_window_keeps_what_it_reaches() -> None:
    """Of 40 positions, the next one reads 7: two blocks in either table, which the trie may lose."""
    groups = [Group.make(2, 8, 4, 8), Group()]
    pages = Pages(100, 4, groups=groups)
    tokens = list(range(40))
    assert prefill(pages, 0, tokens) == 0
    assert [sum(block is not None for block in table) for table in pages.holdings[0].tables] == [2, 10]
    assert pages.num_available == 100 - 2 * 2 - 10
    assert cost(groups, 10) == 2 * 5 + 10, "while it is computed: the window and a chunk of 8"
    assert pages.grow(0, 41, 40)
    assert pages.num_available == 100 - 3 * 2 - 11


@pytest.mark.usefixtures("no_rollback")
@pytest.mark.parametrize("ended", [False, True])
def test_a_prefix_longer_than_the_window_is_found(ended: bool) -> None:
    pages = Pages(100, 4, groups=[Group.make(2, 8, 4, 8), Group()])
    tokens = list(range(40))
    prefill(pages, 0, tokens)
    for length in range(41, 60):
        assert pages.grow(0, length, length - 1)
    if ended:
        pages.free(0)
    assert pages.allocate(1, tokens) == 36
    assert pages.allocate(2, [*tokens[:20], 99, 98]) == 20, "where the first has been long ago"


@pytest.mark.usefixtures("no_rollback")
def test_a_prefix_is_found_only_where_the_window_is_complete() -> None:
    pages = Pages(28, 4, groups=[Group.make(2, 8, 4, 8), Group()])
    tokens = list(range(32))
    prefill(pages, 0, tokens)
    pages.free(0)
    assert pages.allocate(1, [99] * 16) == 0, "the 4 free pages, and 8 of what the window left first"
    pages.free(1)
    assert pages.allocate(2, tokens) == 28
    pages.free(2)
    assert pages.allocate(3, [98] * 32) == 0, "18 pages: the 12 free ones, and the last that the window reaches"
    pages.free(3)
    assert [node.blocks[1] is not None for node in nodes(pages)] == [True] * 7
    assert prefill(pages, 4, tokens) == 0
    assert pages.allocate(5, tokens) == 28


@pytest.mark.usefixtures("no_rollback")
def test_a_prefix_is_not_found_behind_a_gap_in_a_window() -> None:
    """Of ten blocks, the window's group has the first two and the last two: neither is enough before the ninth."""
    pages = Pages(30, 4, groups=[Group.make(2, 8, 4, 8), Group()])
    tokens = list(range(40))
    prefill(pages, 0, tokens)
    pages.free(0)
    assert pages.allocate(1, [*tokens[:8], 99]) == 8, "which makes the first two blocks the last ones to be evicted"
    pages.free(1)
    assert pages.allocate(2, [98] * 16) == 0
    pages.free(2)
    kept = [node.blocks[0] is not None for node in nodes(pages)]
    assert kept == [True] * 2 + [False] * 6 + [True] * 2
    assert pages.allocate(3, [*tokens, 99]) == 40
    pages.free(3)
    assert pages.allocate(4, tokens) == 8


def test_a_span_has_room_for_a_chunk_that_begins_anywhere() -> None:
    for window, size, chunk in itertools.product((1, 2, 5, 8), (1, 3, 4, 16), (1, 2, 4, 7)):
        positions = window - 1 + ROLLBACK + chunk
        blocks = [{p // size for p in range(begin, begin + positions)} for begin in range(size)]
        assert Group.make(1, window, size, chunk).span == max(map(len, blocks))


@pytest.mark.usefixtures("no_rollback")
def test_the_blocks_that_a_prompt_counts_on_getting_back_are_not_shared() -> None:
    """A prompt of ten blocks has five in the window's group at a time. The last ones take the place of the first, so
    nobody else may use those meanwhile."""
    groups = [Group.make(2, 8, 4, 8), Group()]
    pages = Pages(cost(groups, 10) + 5, 4, groups=groups)
    tokens = list(range(40))
    assert pages.allocate(0, tokens) == 0
    pages.commit(0, tokens, 8)
    assert pages.slide(0, 8)
    assert pages.allocate(1, [*tokens[:8], 99]) is None, "without a prefix, it takes nine pages"
    for length in (16, 24, 32, 40):
        assert pages.slide(0, length)
    pages.commit(0, tokens, 40)
    assert pages.allocate(1, [*tokens, 99]) == 40


@pytest.mark.usefixtures("no_rollback")
def test_a_prompt_that_does_not_fit_with_its_prefix_does_without() -> None:
    """With the prefix, the window's group needs the two blocks before the first chunk besides the chunk's own."""
    groups = [Group.make(2, 8, 4, 8), Group()]
    pages = Pages(cost(groups, 10), 4, groups=groups)
    common = list(range(8))
    for found in (0, 8):
        assert prefill(pages, 0, [*common, 99]) == found
        pages.free(0)
    assert prefill(pages, 0, [*common, *range(100, 132)]) == 0


@pytest.mark.usefixtures("no_rollback")
def test_nodes_that_are_left_without_a_page_go_with_their_owner() -> None:
    """Where all layers have windows, others may take every page of the nodes that an owner has left behind."""
    pages = Pages(16, 2, groups=[Group.make(1, 4, 2, 4)])
    prefill(pages, 0, list(range(20)))
    for length in range(21, 40):
        assert pages.grow(0, length, length - 1)
    for owner in range(1, 1 + pages.num_available):
        assert pages.allocate(owner, [99]) == 0
    assert not any(any(node.blocks) for node in nodes(pages))
    pages.free(0)
    assert not list(nodes(pages))


def test_how_many_blocks_fit() -> None:
    for groups in ([Group()], [Group.make(3, 9, 2, 4), Group.make(1, 20, 2, 4), Group(2)], [Group.make(2, 9, 2, 4)]):
        most = cost(groups, 10**6)
        for pages in range(min(most, 200)):
            blocks = fitting(groups, pages)
            assert cost(groups, blocks) <= pages < cost(groups, blocks + 1)
    assert fitting([Group.make(2, 9, 2, 4)], most) > 10**6, "any length"


MIXES: list[list[tuple[int, int | None]]] = [
    [(1, None)],
    [(1, 3), (2, None)],
    [(2, 6), (1, None)],
    [(1, 1), (1, None)],
    [(2, 5)],
    [(1, 2), (2, 7), (1, None)],
]
"""(pages per block, window) of each group."""


class PagesMachine(RuleBasedStateMachine):
    """Owners come, grow, compute, take back and go; ``held`` is what each page was last computed with, and for
    whom."""

    owners: Bundle[int] = Bundle("owners")

    @initialize(
        num=st.integers(8, 60),
        size=st.integers(1, 3),
        mix=st.sampled_from(MIXES),
        chunk=st.none() | st.integers(1, 6),
        rollback=st.integers(0, 2),
    )
    def start(self, num: int, size: int, mix: list[tuple[int, int | None]], chunk: int | None, rollback: int) -> None:
        pages_module.ROLLBACK = rollback
        self.num, self.size, self.chunk, self.rollback = num, size, chunk, rollback
        self.groups = [Group.make(pages, window, size, chunk) for pages, window in mix]
        self.pages = Pages(num, size, groups=self.groups)
        self.tokens: dict[int, list[int]] = {}
        self.salts: dict[int, str] = {}
        self.computed: dict[int, int] = {}
        self.least: dict[int, int] = {}
        """How short each owner may still be made."""
        self.held: dict[tuple[int, int], tuple[int, str, tuple[int, ...]]] = {}
        self.next = 0

    def prefix(self, owner: int, group: int, position: int) -> tuple[int, str, tuple[int, ...]]:
        return group, self.salts[owner], tuple(self.tokens[owner][: position + 1])

    def blocks(self, owner: int) -> Iterator[tuple[int, int, Block]]:
        """(group, index, pages) of everything that the owner has."""
        for k, table in enumerate(self.pages.holdings[owner].tables):
            yield from ((k, i, block) for i, block in enumerate(table) if block is not None)

    @rule(
        target=owners,
        common=st.integers(0, 24),
        own=st.lists(st.integers(0, 1), min_size=1, max_size=4),
        salt=st.sampled_from(["often"] * 3 + ["seldom"]),
    )
    def allocate(self, common: int, own: list[int], salt: str) -> int:
        owner, self.next = self.next, self.next + 1
        tokens, available = [1] * common + own, self.pages.num_available
        found = self.pages.allocate(owner, tokens, salt=salt)
        if found is None:
            assert available < cost(self.groups, -(-len(tokens) // self.size))
            assert self.pages.num_available == available
            return -1
        self.tokens[owner], self.salts[owner], self.computed[owner] = tokens, salt, found
        self.least[owner] = found
        assert found < len(tokens)
        return owner

    @rule(owner=owners, more=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def grow(self, owner: int, more: list[int]) -> None:
        if owner not in self.tokens:
            return
        wanted, computed = len(self.tokens[owner]) + len(more), self.computed[owner]
        before = self.pages.holdings[owner].room
        if self.pages.grow(owner, wanted, computed):
            self.tokens[owner] += more
        else:
            new = -(-wanted // self.size) - before
            assert sum(group.pages for group in self.groups) * new > self.pages.num_available
        if -(-wanted // self.size) > before:
            self.least[owner] = max(self.least[owner], computed - self.rollback)

    @rule(owner=owners, amount=st.integers(1, 9), commit=st.booleans(), always=st.booleans())
    def compute(self, owner: int, amount: int, commit: bool, always: bool) -> None:
        """Write K/V for some positions, perhaps after having said what has been written before."""
        if owner not in self.tokens:
            return
        begin = self.computed[owner]
        end = min(len(self.tokens[owner]), begin + amount)
        if commit:
            self.commit(owner)
        ready = min(map(len, self.pages.holdings[owner].tables)) * self.size
        if end > ready or always:
            reached = self.pages.slide(owner, begin, end)
            self.least[owner] = max(self.least[owner], begin - self.rollback)
            if not reached:
                assert self.chunk is not None
                assert end - begin > self.chunk, "there is always room for a chunk"
                return
        for k, table in enumerate(self.pages.holdings[owner].tables):
            for position in range(begin, end):
                block = table[position // self.size]
                assert block is not None
                for page in block:
                    self.held[page, position % self.size] = self.prefix(owner, k, position)
        self.computed[owner] = end

    @rule(owner=owners)
    def commit(self, owner: int) -> None:
        if owner in self.tokens:
            end = self.computed[owner]
            self.pages.commit(owner, self.tokens[owner], end)
            assert self.pages.slide(owner, end)
            self.least[owner] = max(self.least[owner], end // self.size * self.size, end - self.rollback)

    @rule(owner=owners, amount=st.integers(1, 3), bit=st.integers(0, 1))
    def truncate(self, owner: int, amount: int, bit: int) -> None:
        """Take positions back, whose tokens then are others."""
        if owner in self.tokens:
            end = self.computed[owner] = max(self.least[owner], self.computed[owner] - amount)
            self.tokens[owner][end:] = [bit] * (len(self.tokens[owner]) - end)

    @rule(owner=consumes(owners))
    def free(self, owner: int) -> None:
        if owner in self.tokens:
            self.pages.free(owner)
            del self.tokens[owner], self.salts[owner], self.computed[owner], self.least[owner]

    @invariant()
    def every_page_is_free_owned_or_cached(self) -> None:
        owned = {page for owner in self.tokens for _, _, block in self.blocks(owner) for page in block}
        cached = [page for k, found in enumerate(self.pages.cached) for node in found for page in node.blocks[k] or ()]
        assert sorted([*self.pages.free_list, *owned, *cached]) == list(range(self.num))
        assert self.pages.num_available == len(self.pages.free_list) + len(cached)
        owners = Counter(page for owner in self.tokens for _, _, block in self.blocks(owner) for page in block)
        unowned = {**dict.fromkeys(self.pages.free_list, 0), **dict.fromkeys(cached, 3)}
        expected = [unowned[page] if page in unowned else min(2, owners[page]) for page in range(self.num)]
        assert [*self.pages.states()] == expected

    @invariant()
    def a_page_has_one_place(self) -> None:
        places: dict[int, set[tuple[int, int, int, Node | None]]] = {}
        for owner in self.tokens:
            holding = self.pages.holdings[owner]
            for k, i, block in self.blocks(owner):
                shared = i < min(holding.shared[k], len(holding.nodes))
                for u, page in enumerate(block):
                    places.setdefault(page, set()).add((k, i, u, holding.nodes[i] if shared else None))
                    assert shared or sum(page in b for o in self.tokens for _, _, b in self.blocks(o)) == 1
        assert all(len(found) == 1 for found in places.values())

    @invariant()
    def counts_equal_owners(self) -> None:
        owners = Counter(node for owner in self.tokens for node in self.pages.holdings[owner].nodes)
        users = Counter((k, block) for owner in self.tokens for k, _, block in self.blocks(owner))
        for node in nodes(self.pages):
            assert node.owners == owners[node]
            assert node.owners or node.children or any(node.blocks), "nothing is left of the node"
            assert node.parent is not None
            assert node.parent is self.pages.root or node.parent.owners >= node.owners
            for k, block in enumerate(node.blocks):
                if block is None:
                    assert not node.users[k]
                    assert self.groups[k].window is not None
                    continue
                assert node.users[k] == users[k, block]
                assert (node.users[k] == 0) == (node in self.pages.cached[k])

    @invariant()
    def what_an_owner_reads_is_what_its_pages_hold(self) -> None:
        """Also for pages found or taken over from others, and after positions have been taken back: none is shared
        without equal tokens before and in it, and none is let go that a window still reaches."""
        for owner, end in self.computed.items():
            for k, group in enumerate(self.groups):
                first = 0 if group.window is None else max(0, self.least[owner] - group.window + 1)
                for position in range(first, end):
                    block = self.pages.holdings[owner].tables[k][position // self.size]
                    assert block is not None
                    for page in block:
                        assert self.held[page, position % self.size] == self.prefix(owner, k, position)

    def teardown(self) -> None:
        for owner in list(getattr(self, "tokens", ())):
            self.free(owner)
            self.every_page_is_free_owned_or_cached()
        if hasattr(self, "pages"):
            assert self.pages.num_available == self.num
            pages_module.ROLLBACK = ROLLBACK


TestPages = PagesMachine.TestCase
TestPages.settings = settings(
    max_examples=examples(300, 40),
    stateful_step_count=30,
    phases=[phase for phase in Phase if phase is not Phase.shrink],  # which would take minutes
)
