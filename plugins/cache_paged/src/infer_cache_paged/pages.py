"""Which sequence owns which page, and which pages can be shared. Integers only, no tensors.

A block is ``block_size`` consecutive positions of a sequence. Layers with equal windows are a group, and each group
stores a block in pages of its own, as many as the group's layers need. All pages have the same size, so that every
group can use every page.

A page is free (it has no owner and nothing worth keeping), owned (by one sequence or, if shared, by several) or cached
(it has no owner, but its K/V may be used again). Blocks whose K/V are complete are in a trie over blocks of tokens
(RadixAttention, Zheng et al., 2024, with one edge per block): a node stands for a block and for all the tokens before
it, and is found by comparing tokens. It has the pages of each group that still keeps them.

A group with a window lets go of the blocks behind it. So a prefix can be used again up to a node before which each
group has the blocks that its window reaches; the other nodes on the way need not have any."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

Block = tuple[int, ...]
"""The pages of one block in one group."""

ROLLBACK = 16
"""How many of its last positions a sequence can always take back, unless it shares them: windows reach this much
further than they have to."""
ENDLESS = sys.maxsize


@dataclass(frozen=True, slots=True)
class Group:
    """Layers with the same window. ``make`` computes the numbers of blocks."""

    pages: int = 1
    """How many pages a block takes."""
    window: int | None = None
    """Position p reads positions p - window + 1 .. p."""
    tail: int = ENDLESS
    """How many blocks before the beginning of a block the position there reads."""
    span: int = ENDLESS
    """The most blocks that a sequence needs at a time, to compute a chunk and take positions back afterwards."""

    @classmethod
    def make(cls, pages: int, window: int | None, block_size: int, max_chunk: int | None) -> Group:
        """``max_chunk`` is the most positions by which a sequence is extended at a time; None if any number."""
        if window is None:
            return cls(pages)
        span = ENDLESS
        if max_chunk is not None:
            span = (window - 1 + ROLLBACK + max_chunk + block_size - 2) // block_size + 1
        return cls(pages, window, -(-(window - 1) // block_size), span)

    def first(self, length: int, block_size: int) -> int:
        """The first block that positions from ``length`` - ROLLBACK on read."""
        return 0 if self.window is None else max(0, (length - ROLLBACK - self.window + 1) // block_size)


def cost(groups: Sequence[Group], blocks: int) -> int:
    """How many pages a sequence of so many blocks needs, if it shares none."""
    return sum(group.pages * min(blocks, group.span) for group in groups)


def fitting(groups: Sequence[Group], pages: int) -> int:
    """How many blocks a sequence can have in so many pages: the most whose ``cost`` is no more."""
    blocks, each = 0, sum(group.pages for group in groups)
    for group in sorted(groups, key=lambda group: group.span):
        more = min(pages // each, group.span - blocks)
        blocks, pages = blocks + more, pages - more * each
        if blocks < group.span:
            return blocks
        each -= group.pages
        if not each:
            return ENDLESS
    return blocks


@dataclass(eq=False, slots=True)
class Node:
    """A block that may be shared. A sequence on whose way it lies has it in ``Holding.nodes``, with its ancestors."""

    edge: Hashable
    """The block's tokens; for the first block of a sequence, (salt, tokens)."""
    parent: Node | None
    blocks: list[Block | None]
    """Per group, the pages; None if the group does not have them."""
    users: list[int]
    """Per group, how many sequences have these pages in their tables."""
    children: dict[Hashable, Node] = field(default_factory=dict)
    owners: int = 0
    """How many sequences have the node in ``Holding.nodes``."""


@dataclass(eq=False, slots=True)
class Holding:
    """The blocks that one sequence owns."""

    tables: list[list[Block | None]]
    """Per group, the blocks from the first one on: None for those behind the window."""
    firsts: list[int]
    """Per group, the index of the first block that is not None."""
    shared: list[int]
    """Per group, the index of the first block that is not one of ``nodes``'."""
    nodes: list[Node]
    """The trie's nodes of the leading blocks."""
    room: int
    """How many blocks the sequence has been promised. A table that has fewer gets the others while the window moves
    on. Until it has them all, the blocks that it lets go must be enough for those that it takes. So it does not share
    its own before that, because letting go of a block that others use yields no page."""
    salt: str


class Pages:
    """The books of ``num_pages`` pages for blocks of ``block_size`` positions. An owner is a slot, a small integer."""

    def __init__(
        self, num_pages: int, block_size: int, share: bool = True, groups: Sequence[Group] = (Group(),)
    ) -> None:
        """Of ``groups``, those without a window come last."""
        self.num_pages = num_pages
        self.block_size = block_size
        self.share = share
        self.groups = tuple(groups)
        self.windowed = [k for k, group in enumerate(groups) if group.window is not None]
        self.root = self._node(None, None)
        self.free_list = list(reversed(range(num_pages)))
        self.cached: OrderedDict[tuple[Node, int], None] = OrderedDict()
        """(node, group) of the blocks in the trie that nobody uses, least recently used first. In a group without a
        window, a node always comes after its descendants, and after what other groups have of it and of them: ``free``
        enters them in this order, and whoever uses a block owns the node's ancestors. So whatever is evicted there is a
        leaf that no group has pages of."""
        self.holdings: dict[int, Holding] = {}
        self._num_cached = 0

    @property
    def num_available(self) -> int:
        """How many pages can be handed out."""
        return len(self.free_list) + self._num_cached

    def allocate(self, owner: int, token_ids: Sequence[int], *, reuse: bool = True, salt: str = "") -> int | None:
        """Give the owner blocks for all the tokens, the leading ones from the trie as far as it has them; in a group
        with a window, those that the first chunk needs. Returns how many tokens the blocks from the trie hold (never
        all tokens, because the last one's logits have to be computed), or None, with nothing changed, if there are too
        few pages."""
        room = self._blocks(len(token_ids))
        chains = [self._find(token_ids, salt)] if reuse and self.share else [[]]
        if self.windowed and chains[0]:
            chains.append([])  # A long prompt needs more pages at a time with a prefix than without.
        for found in chains:
            depth = len(found)
            firsts = [depth - min(depth, group.tail) for group in self.groups]
            lasts = [min(room, depth + group.span) for group in self.groups]
            needed = 0
            for k, group in enumerate(self.groups):
                unused = sum(node.users[k] == 0 for node in found[firsts[k] :])
                needed += group.pages * (lasts[k] - depth + unused)
            if needed <= self.num_available:
                break
        else:
            return None
        for node in found:
            node.owners += 1
        tables: list[list[Block | None]] = [[None] * first for first in firsts]
        for k, first in enumerate(firsts):
            for node in found[first:]:
                self._use(node, k)
                tables[k].append(node.blocks[k])
        holding = self.holdings[owner] = Holding(tables, firsts, [depth] * len(tables), found, room, salt)
        for k, last in enumerate(lasts):
            self._extend(holding, k, last)
        return depth * self.block_size

    def grow(self, owner: int, num_tokens: int, length: int = 0) -> bool:
        """Give the owner, which has computed ``length`` tokens, room for ``num_tokens`` tokens in all. Return False if
        there are too few pages; only blocks behind its windows may then be gone. A table that lacks blocks keeps those
        behind the window, too: they are to pay for the others."""
        holding, room = self.holdings[owner], self._blocks(num_tokens)
        if room <= holding.room:
            return True
        whole, each = [], 0
        for k, table in enumerate(holding.tables):
            if len(table) == holding.room:
                whole.append(k)
                each += self.groups[k].pages
        if self.windowed:
            self._let_go(holding, length, whole)
        if each * (room - holding.room) > self.num_available:
            return False
        holding.room = room
        for k in whole:
            self._extend(holding, k, room)
        return True

    def slide(self, owner: int, length: int, end: int = 0) -> bool:
        """Let go of the blocks behind the windows of an owner that has computed ``length`` tokens, and take those that
        its next chunk needs, which may reach up to ``end`` if that is further than usual. Return False if there are too
        few pages, which cannot be the case for a usual chunk."""
        holding, needed = self.holdings[owner], 0
        self._let_go(holding, length, self.windowed)
        for k in self.windowed:
            last = holding.firsts[k] + self.groups[k].span
            self._extend(holding, k, last)
            needed += self.groups[k].pages * max(0, self._blocks(end) - len(holding.tables[k]))
        if needed > self.num_available:
            return False
        for k in self.windowed:
            self._extend(holding, k, self._blocks(end))
        return True

    def commit(self, owner: int, token_ids: Sequence[int], num_computed: int) -> bool:
        """Enter the blocks that the first ``num_computed`` tokens fill into the trie. If an equal block is there
        already, the owner takes that one and frees its own. Returns whether this has changed any of the owner's
        pages."""
        holding, size, swapped = self.holdings[owner], self.block_size, False
        nodes = holding.nodes
        if not self.share:
            return False
        for i in range(len(nodes), num_computed // size):
            parent = nodes[-1] if i else self.root
            edge: Hashable = tuple(token_ids[i * size : (i + 1) * size])
            if i == 0:
                edge = (holding.salt, edge)
            node = parent.children.get(edge)
            if node is None:
                node = parent.children[edge] = self._node(edge, parent)
            node.owners += 1
            nodes.append(node)
        for k, table in enumerate(holding.tables):
            if len(table) < holding.room:
                continue
            for i in range(max(holding.shared[k], holding.firsts[k]), len(nodes)):
                own = table[i]
                assert own is not None
                if (block := nodes[i].blocks[k]) is None:
                    nodes[i].blocks[k] = own
                    nodes[i].users[k] = 1
                else:
                    self._use(nodes[i], k)
                    self.free_list.extend(own)
                    table[i] = block
                    swapped = True
            holding.shared[k] = len(nodes)
        return swapped

    def free(self, owner: int) -> None:
        """Take all blocks back. Those in the trie stay there until their pages are needed."""
        holding = self.holdings.pop(owner)
        for i in reversed(range(holding.room)):
            for k, table in enumerate(holding.tables):
                if holding.firsts[k] <= i < len(table):
                    self._put_back(holding, k, i)
            if i < len(holding.nodes):
                holding.nodes[i].owners -= 1
                self._prune(holding.nodes[i])

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _node(self, edge: Hashable, parent: Node | None) -> Node:
        return Node(edge, parent, [None] * len(self.groups), [0] * len(self.groups))

    def _find(self, token_ids: Sequence[int], salt: str) -> list[Node]:
        """The longest chain of nodes that hold a proper prefix of the tokens after which all groups can go on."""
        size, found, node = self.block_size, [], self.root
        for begin in range(0, len(token_ids) - size, size):
            edge: Hashable = tuple(token_ids[begin : begin + size])
            child = node.children.get(edge if begin else (salt, edge))
            if child is None:
                break
            found.append(child)
            node = child
        if not self.windowed:
            return found
        usable, runs = 0, [0] * len(self.groups)
        for depth, node in enumerate(found, 1):
            runs = [0 if block is None else run + 1 for run, block in zip(runs, node.blocks, strict=True)]
            if all(run >= min(depth, group.tail) for run, group in zip(runs, self.groups, strict=True)):
                usable = depth
        return found[:usable]

    def _extend(self, holding: Holding, k: int, last: int) -> None:
        """Take the blocks before index ``last`` that a table lacks."""
        table = holding.tables[k]
        table += [self._take(k) for _ in range(len(table), min(holding.room, last))]

    def _let_go(self, holding: Holding, length: int, groups: Iterable[int]) -> None:
        """Put the groups' blocks back that no position from ``length`` - ROLLBACK on reads."""
        for k in groups:
            first = self.groups[k].first(length, self.block_size)
            for i in range(holding.firsts[k], first):
                self._put_back(holding, k, i)
                holding.tables[k][i] = None
            holding.firsts[k] = max(holding.firsts[k], first)

    def _put_back(self, holding: Holding, k: int, i: int) -> None:
        """Free the i-th block of a table, or leave it to the trie."""
        block, node = holding.tables[k][i], holding.nodes[i] if i < len(holding.nodes) else None
        assert block is not None
        if node is not None and i < holding.shared[k]:
            node.users[k] -= 1
        elif node is not None and node.blocks[k] is None:
            node.blocks[k] = block
        else:
            self.free_list.extend(block)
            return
        if not node.users[k]:
            self.cached[node, k] = None
            self._num_cached += len(block)

    def _use(self, node: Node, k: int) -> None:
        if node.users[k] == 0:
            del self.cached[node, k]
            self._num_cached -= self.groups[k].pages
        node.users[k] += 1

    def _take(self, k: int) -> Block:
        """Pages for a block: free ones or, if there are too few, those of the least recently used cached blocks."""
        count = self.groups[k].pages
        if count == 1 and self.free_list:
            return (self.free_list.pop(),)
        while len(self.free_list) < count:
            (node, other), _ = self.cached.popitem(last=False)
            block, node.blocks[other] = node.blocks[other], None
            assert block is not None
            self._num_cached -= len(block)
            self.free_list.extend(block)
            if self.groups[other].window is None:
                assert not node.children, "a block is let go before those that lead to it"
            self._prune(node)
        block = tuple(self.free_list[-count:])
        del self.free_list[-count:]
        return block

    def _prune(self, node: Node) -> None:
        """Remove the node, and its ancestors, as far as nothing is left of them."""
        while node.parent is not None and not (node.owners or node.children or any(node.blocks)):
            del node.parent.children[node.edge]
            node = node.parent
