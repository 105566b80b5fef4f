"""Who holds which page: integers only, no tensors.

A page is free (nobody's, nothing worth keeping), owned (by one sequence or, if shared, by several) or cached (nobody's,
but what it holds may be wanted again). Pages whose K/V are complete are found through a trie over blocks of tokens
(RadixAttention, Zheng et al., 2024, with an edge per block): a node stands for a page and all the tokens before it,
and is found by comparing tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class Node:
    """A page that may be shared. Whoever owns it owns its ancestors too."""

    page: int
    edge: Hashable
    """The block's tokens; for a first block (salt, tokens)."""
    parent: Node | None
    children: dict[Hashable, Node] = field(default_factory=dict)
    owners: int = 0


@dataclass(eq=False, slots=True)
class Holding:
    """What one sequence owns."""

    pages: list[int]
    nodes: list[Node]
    """The leading pages that may be shared."""
    salt: str


class Pages:
    """``num_pages`` pages of ``block_size`` positions. Owners are named by small integers (slots)."""

    def __init__(self, num_pages: int, block_size: int, share: bool = True) -> None:
        self.block_size = block_size
        self.share = share
        self.root = Node(-1, None, None)
        self.free_list = list(reversed(range(num_pages)))
        self.cached: OrderedDict[Node, None] = OrderedDict()
        """Least recently used first. A node comes after its children: it is let go after them, and being taken up by a
        sequence takes it out of here. So the first one is always a leaf."""
        self.holdings: dict[int, Holding] = {}

    @property
    def num_available(self) -> int:
        """Pages that could be handed out."""
        return len(self.free_list) + len(self.cached)

    def allocate(self, owner: int, token_ids: Sequence[int], *, reuse: bool = True, salt: str = "") -> int | None:
        """Give the owner pages for all the tokens: leading ones from the trie, so far as it has them. Returns how many
        tokens those hold (never all: the last one's logits are wanted), or None, having done nothing, when there
        are too few pages."""
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
        """Have pages for so many tokens in all; False, having done nothing, when there are too few."""
        pages = self.holdings[owner].pages
        missing = self._blocks(num_tokens) - len(pages)
        if missing > self.num_available:
            return False
        pages.extend(self._take() for _ in range(missing))
        return True

    def commit(self, owner: int, token_ids: Sequence[int], num_computed: int) -> bool:
        """Enter into the trie the pages that the leading ``num_computed`` tokens fill. Where an equal one is there
        already, the owner takes that and gives its own back; True if so."""
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
        """Take everything back. What is in the trie stays there until its page is needed."""
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
        """A free page, or the least recently used cached one."""
        if self.free_list:
            return self.free_list.pop()
        node, _ = self.cached.popitem(last=False)
        assert node.parent is not None
        assert not node.children, "a page is let go before those that lead to it"
        del node.parent.children[node.edge]
        return node.page
