"""The bookkeeping of pages: worked examples, and a state machine against a model of what each page holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from infer_cache_paged.pages import Node, Pages


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
    assert pages.holdings[0].pages[:2] == pages.holdings[1].pages[:2]
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
    assert not alone.cached


def test_equal_pages_computed_twice_become_one() -> None:
    pages = Pages(10, 4)
    tokens = list(range(8))
    for owner in (0, 1):
        pages.allocate(owner, tokens)
    assert pages.num_available == 6
    assert not pages.commit(0, tokens, 8)
    assert pages.commit(1, tokens, 8)
    assert pages.holdings[0].pages == pages.holdings[1].pages
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
    before = (list(pages.free_list), list(pages.cached))
    assert pages.allocate(2, [1, 1, 2, 2, 3, 3, 4]) is None
    assert not pages.grow(1, 9)
    assert (pages.free_list, list(pages.cached)) == before


def test_a_page_once_let_go_serves_any_number_of_tokens_again() -> None:
    pages = Pages(3, 2)
    for start in range(50):
        assert whole(pages, 0, [start] * 6) == 0
        pages.free(0)
    assert pages.num_available == 3
    assert len(list(nodes(pages))) <= 3


class PagesMachine(RuleBasedStateMachine):
    """Owners come, grow, compute and go; ``held`` is what each page was last computed with."""

    owners: Bundle[int] = Bundle("owners")

    @initialize(num=st.integers(4, 12), size=st.integers(1, 3))
    def start(self, num: int, size: int) -> None:
        self.num, self.size = num, size
        self.pages = Pages(num, size)
        self.tokens: dict[int, list[int]] = {}
        self.salts: dict[int, str] = {}
        self.computed: dict[int, int] = {}
        self.held: dict[tuple[int, int], tuple[str, tuple[int, ...]]] = {}
        self.next = 0

    def table(self, owner: int) -> list[int]:
        return self.pages.holdings[owner].pages

    def prefix(self, owner: int, position: int) -> tuple[str, tuple[int, ...]]:
        return self.salts[owner], tuple(self.tokens[owner][: position + 1])

    @rule(target=owners, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9), salt=st.sampled_from("xxy"))
    def allocate(self, tokens: list[int], salt: str) -> int:
        owner, self.next = self.next, self.next + 1
        available = self.pages.num_available
        found = self.pages.allocate(owner, tokens, salt=salt)
        if found is None:
            assert available < -(-len(tokens) // self.size)
            assert self.pages.num_available == available
            return -1
        self.tokens[owner], self.salts[owner], self.computed[owner] = list(tokens), salt, found
        assert found < len(tokens)
        return owner

    @rule(owner=owners, more=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def grow(self, owner: int, more: list[int]) -> None:
        if owner in self.tokens:
            available, table = self.pages.num_available, list(self.table(owner))
            wanted = len(self.tokens[owner]) + len(more)
            if self.pages.grow(owner, wanted):
                self.tokens[owner] += more
                assert self.table(owner)[: len(table)] == table
            else:
                assert -(-wanted // self.size) - len(table) > available == self.pages.num_available

    @rule(owner=owners, amount=st.integers(1, 9))
    def compute(self, owner: int, amount: int) -> None:
        """Write K/V for some positions, then say so."""
        if owner in self.tokens:
            begin = self.computed[owner]
            end = self.computed[owner] = min(len(self.tokens[owner]), begin + amount)
            for position in range(begin, end):
                page = self.table(owner)[position // self.size]
                self.held[page, position % self.size] = self.prefix(owner, position)
            self.pages.commit(owner, self.tokens[owner], end)

    @rule(owner=consumes(owners))
    def free(self, owner: int) -> None:
        if owner in self.tokens:
            self.pages.free(owner)
            del self.tokens[owner], self.salts[owner], self.computed[owner]

    @invariant()
    def every_page_is_free_owned_or_cached(self) -> None:
        owned = {page for owner in self.tokens for page in self.table(owner)}
        cached = [node.page for node in self.pages.cached]
        assert sorted([*self.pages.free_list, *owned, *cached]) == list(range(self.num))

    @invariant()
    def counts_equal_owners(self) -> None:
        owners = Counter(page for owner in self.tokens for page in self.table(owner))
        for node in nodes(self.pages):
            assert node.owners == owners[node.page]
            assert (node.owners == 0) == (node in self.pages.cached)
            assert node.parent is not None
            assert node.parent is self.pages.root or node.parent.owners >= node.owners
        shared = {node.page for node in nodes(self.pages)}
        assert all(count == 1 or page in shared for page, count in owners.items())

    @invariant()
    def what_an_owner_has_computed_is_what_its_pages_hold(self) -> None:
        """Also for pages found or taken over from others: none is shared without equal tokens before and in it."""
        for owner, end in self.computed.items():
            for position in range(end):
                page = self.table(owner)[position // self.size]
                assert self.held[page, position % self.size] == self.prefix(owner, position)

    def teardown(self) -> None:
        for owner in list(getattr(self, "tokens", ())):
            self.pages.free(owner)
            del self.tokens[owner], self.computed[owner]
            self.every_page_is_free_owned_or_cached()
        if hasattr(self, "pages"):
            assert self.pages.num_available == self.num


TestPages = PagesMachine.TestCase
TestPages.settings = settings(max_examples=600, stateful_step_count=30, deadline=None)
