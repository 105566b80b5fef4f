"""Which sequence owns which page, and which pages can be shared. Integers only, no tensors.

A page is free (it has no owner and nothing worth keeping), owned (by one sequence or, if shared, by several) or cached
(it has no owner, but its K/V may be used again). Pages whose K/V are complete are in a trie over blocks of tokens
(RadixAttention, Zheng et al., 2024, with one edge per block): a node stands for a page and for all the tokens before
it, and is found by comparing tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class Node:
    """A page that may be shared. A sequence that owns it owns its ancestors, too."""

    page: int
    edge: Hashable
    """The block's tokens; for the first block of a sequence, (salt, tokens)."""
    parent: Node | None
    children: dict[Hashable, Node] = field(default_factory=dict)
    owners: int = 0


@dataclass(eq=False, slots=True)
class Holding:
    """The pages that one sequence owns."""

    pages: list[int]
    nodes: list[Node]
    """The trie's nodes of the leading pages, which may be shared."""
    salt: str


class Pages:
    """The books of ``num_pages`` pages of ``block_size`` positions each. An owner is a slot, a small integer."""

    def __init__(self, num_pages: int, block_size: int, share: bool = True) -> None:
        self.block_size = block_size
        self.share = share
        self.root = Node(-1, None, None)
        self.free_list = list(reversed(range(num_pages)))
        self.cached: OrderedDict[Node, None] = OrderedDict()
        """Pages without an owner, least recently used first. A node always comes after its children: ``free`` enters
        children first, and a sequence that owns a child owns the node, too. So the first node is always a leaf."""
        self.holdings: dict[int, Holding] = {}

    @property
    def num_available(self) -> int:
        """How many pages can be handed out."""
        return len(self.free_list) + len(self.cached)

    def allocate(self, owner: int, token_ids: Sequence[int], *, reuse: bool = True, salt: str = "") -> int | None:
        """Give the owner pages for all the tokens, the leading ones from the trie as far as it has them. Returns how
        many tokens the pages from the trie hold (never all tokens, because the last one's logits have to be computed),
        or None, with nothing changed, if there are too few pages."""
        found = self._find(token_ids, salt) if reuse and self.share else []
        missing = self._blocks(len(token_ids)) - len(found)
        if missing > self.num_available - sum(node.owners == 0 for node in found):
            return None
        for node in found:
            self._own(node)
        pages = [node.page for node in found] + [self._take() for _ in range(missing)]
        self.holdings[owner] = Holding(pages, found, salt)
        return len(found) * self.block_size

    def grow(self, owner: int, num_tokens: int) -> bool:
        """Give the owner pages for ``num_tokens`` tokens in all; False, with nothing changed, if there are too few."""
        pages = self.holdings[owner].pages
        missing = self._blocks(num_tokens) - len(pages)
        if missing > self.num_available:
            return False
        pages.extend(self._take() for _ in range(missing))
        return True

    def commit(self, owner: int, token_ids: Sequence[int], num_computed: int) -> bool:
        """Enter the pages that the first ``num_computed`` tokens fill into the trie. If an equal page is there already,
        the owner takes that page and frees its own. Returns whether this has changed any of the owner's pages."""
        holding, size, swapped = self.holdings[owner], self.block_size, False
        if not self.share:
            return False
        for i in range(len(holding.nodes), num_computed // size):
            parent = holding.nodes[-1] if i else self.root
            edge: Hashable = tuple(token_ids[i * size : (i + 1) * size])
            if i == 0:
                edge = (holding.salt, edge)
            node = parent.children.get(edge)
            if node is None:
                node = parent.children[edge] = Node(holding.pages[i], edge, parent, owners=1)
            else:
                self._own(node)
                self.free_list.append(holding.pages[i])
                holding.pages[i] = node.page
                swapped = True
            holding.nodes.append(node)
        return swapped

    def free(self, owner: int) -> None:
        """Take all pages back. Those in the trie stay there until they are needed."""
        holding = self.holdings.pop(owner)
        self.free_list.extend(holding.pages[len(holding.nodes) :])
        for node in reversed(holding.nodes):
            node.owners -= 1
            if node.owners == 0:
                self.cached[node] = None

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _find(self, token_ids: Sequence[int], salt: str) -> list[Node]:
        """The longest chain of nodes that hold a proper prefix of the tokens."""
        size, found, node = self.block_size, [], self.root
        for begin in range(0, len(token_ids) - size, size):
            edge: Hashable = tuple(token_ids[begin : begin + size])
            child = node.children.get(edge if begin else (salt, edge))
            if child is None:
                break
            found.append(child)
            node = child
        return found

    def _own(self, node: Node) -> None:
        if node.owners == 0:
            del self.cached[node]
        node.owners += 1

    def _take(self) -> int:
        """A free page or, if there is none, the least recently used cached page, removed from the trie."""
        if self.free_list:
            return self.free_list.pop()
        node, _ = self.cached.popitem(last=False)
        assert node.parent is not None
        assert not node.children, "a page is let go before those that lead to it"
        del node.parent.children[node.edge]
        return node.page
