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
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

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
    """The most blocks that a sequence needs at a time, to compute a chunk and take positions back afterward."""

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


def numbers(blocks: Iterable[Block | None]) -> Iterator[int]:
    """The blocks' pages, end to end."""
    return chain.from_iterable(filter(None, blocks))


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
    state: int | None = None
    """The row with the recurrent layers' state after the block's last token; None if it is not kept."""
    name: str = ""
    """What a tier calls the block and all before it; empty until somebody asks for it."""


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
    found: int = 0
    """How many leading blocks the trie had K/V of; the sequence shares fewer if no state is kept after the last."""


class Pages:
    """Who has which of ``num_pages`` pages for blocks of ``block_size`` positions. An owner is a slot, a small
    integer."""

    def __init__(
        self,
        num_pages: int,
        block_size: int,
        share: bool = True,
        groups: Sequence[Group] = (Group(),),
        forget: Callable[[Node], None] | None = None,
    ) -> None:
        """Of ``groups``, those without a window come last. With ``forget``, a prefix can be used again only up to a
        node with a state, and ``forget`` is called for such a node when it leaves the trie."""
        self.num_pages = num_pages
        self.block_size = block_size
        self.share = share
        self.groups = tuple(groups)
        self.windowed = [k for k, group in enumerate(groups) if group.window is not None]
        self.root = self._node(None, None)
        self.free_list = list(reversed(range(num_pages)))
        self.cached: list[OrderedDict[Node, int]] = [OrderedDict() for _ in groups]
        """Per group, the nodes whose blocks nobody uses, least recently used first, with the time on ``clock``. Of
        several groups, the one whose first node has the earliest time is evicted from; at equal times, one with a
        window. In a group without a window, a node always comes after its descendants, and after what other groups have
        of it and of them: ``free`` enters them in this order, and whoever uses a block owns the node's ancestors. So
        whatever is evicted there is a leaf that no group has pages of."""
        self.forget = forget
        self.leaving: Callable[[Node, int], object] | None = None
        """Called before the pages of a cached block are freed: the node, and the index of its group."""
        self.clock = 0
        self.holdings: dict[int, Holding] = {}

    @property
    def num_available(self) -> int:
        """How many pages can be handed out."""
        available = len(self.free_list)
        for k, cached in enumerate(self.cached):
            available += self.groups[k].pages * len(cached)
        return available

    def states(self) -> bytes:
        """What each page is: 0 if it is free, 1 or 2 if one or several sequences have it, 3 if it is cached."""
        states = bytearray(b"\3") * self.num_pages
        for page in self.free_list:
            states[page] = 0
        for holding in self.holdings.values():
            for first, table in zip(holding.firsts, holding.tables, strict=True):
                for page in numbers(table[first:]):
                    states[page] = 1 if states[page] == 3 else 2
        return bytes(states)

    def allocate(self, owner: int, token_ids: Sequence[int], *, reuse: bool = True, salt: str = "") -> int | None:
        """Give the owner blocks for all the tokens, the leading ones from the trie as far as it has them; in a group
        with a window, those that the first chunk needs. Returns how many tokens the blocks from the trie hold (never
        all tokens, because the last one's logits have to be computed), or None, with nothing changed, if there are too
        few pages."""
        room = self._blocks(len(token_ids))
        chains: list[list[Node]] = [[]]
        known = 0
        if reuse and self.share:
            found, known = self.find(token_ids, salt)
            chains = [found]
        if self.windowed and chains[0]:
            chains.append([])  # A long prompt needs more pages at a time with a prefix than without.
        for found in chains:
            depth = len(found)
            if self.needed(found, depth, room) <= self.num_available:
                break
        else:
            return None
        firsts = [max(0, depth - group.tail) for group in self.groups]
        for node in found:
            node.owners += 1
        tables: list[list[Block | None]] = []
        holding = Holding(tables, firsts, [depth] * len(firsts), found, room, salt, known)
        for k, first in enumerate(firsts):
            self._use(found[first:], k)
            table: list[Block | None] = [None] * first
            table += [node.blocks[k] for node in found[first:]]
            tables.append(table)
        for k, group in enumerate(self.groups):  # once all that was found is used, so that none of it is evicted
            self._extend(holding, k, depth + group.span)
        self.holdings[owner] = holding
        return depth * self.block_size

    def needed(self, nodes: Sequence[Node], depth: int, room: int) -> int:
        """How many pages a sequence of ``room`` blocks takes of the available ones, if it begins with ``depth`` blocks
        that others have computed, of which the trie has these ``nodes``."""
        needed = 0
        for k, group in enumerate(self.groups):
            first, last = max(0, depth - group.tail), min(room, depth + group.span)
            used = sum(1 for node in nodes[first:depth] if node.users[k])
            needed += group.pages * (last - first - used)
        return needed

    def behind(self, nodes: Sequence[Node], depth: int) -> int:
        """How many of the available pages ``restore`` keeps, though a sequence that begins with ``depth`` blocks does
        not need them: those of the ``nodes``' blocks that its windows do not reach."""
        return sum(
            self.groups[k].pages
            for k in self.windowed
            for node in nodes[: max(0, depth - self.groups[k].tail)]
            if node.blocks[k] is not None and not node.users[k]
        )

    def grow(self, owner: int, num_tokens: int, length: int = 0) -> bool:
        """Give the owner, which has computed ``length`` tokens, room for ``num_tokens`` tokens in all. Return False if
        there are too few pages; only blocks behind its windows may then be gone. A table that lacks blocks keeps those
        behind the window, too: they are to pay for the others."""
        holding, room = self.holdings[owner], self._blocks(num_tokens)
        more = room - holding.room
        if more <= 0:
            return True
        whole = [k for k, table in enumerate(holding.tables) if len(table) == holding.room]
        if self.windowed:
            self._let_go(holding, length, whole)
        if more * sum([self.groups[k].pages for k in whole]) > self.num_available:
            return False
        holding.room = room
        for k in whole:
            self._extend(holding, k, room)
        return True

    def slide(self, owner: int, length: int, end: int = 0) -> bool:
        """Let go of the blocks behind the windows of an owner that has computed ``length`` tokens, and take those that
        its next chunk needs, which may reach up to ``end`` if that is further than usual. Return False if there are too
        few pages, which cannot be the case for a usual chunk."""
        holding, last, needed = self.holdings[owner], self._blocks(end), 0
        self._let_go(holding, length, self.windowed)
        for k in self.windowed:
            self._extend(holding, k, holding.firsts[k] + self.groups[k].span)
            needed += self.groups[k].pages * max(0, last - len(holding.tables[k]))
        if needed > self.num_available:
            return False
        if needed:
            for k in self.windowed:
                self._extend(holding, k, last)
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
                node, own = nodes[i], table[i]
                assert own is not None
                if (block := node.blocks[k]) is None:
                    node.blocks[k] = own
                    node.users[k] = 1
                else:
                    self._use([node], k)
                    self.free_list.extend(own)
                    table[i] = block
                    swapped = True
            holding.shared[k] = len(nodes)
        return swapped

    def free(self, owner: int) -> None:
        """Take all blocks back. Those in the trie stay there until their pages are needed."""
        holding = self.holdings.pop(owner)
        self._put_back(holding, [len(table) for table in holding.tables], -1)
        for node in reversed(holding.nodes):
            node.owners -= 1
            if not node.owners and not node.children:
                self._prune(node)

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _node(self, edge: Hashable, parent: Node | None) -> Node:
        return Node(edge, parent, [None] * len(self.groups), [0] * len(self.groups))

    def nodes(self, token_ids: Sequence[int], salt: str) -> list[Node]:
        """The longest chain of nodes that hold a proper prefix of the tokens, whatever is left of their blocks."""
        size, found, node = self.block_size, [], self.root
        for begin in range(0, len(token_ids) - size, size):
            edge: Hashable = tuple(token_ids[begin : begin + size])
            child = node.children.get(edge if begin else (salt, edge))
            if child is None:
                break
            found.append(child)
            node = child
        return found

    def restore(
        self, token_ids: Sequence[int], salt: str, depth: int, lacking: Sequence[tuple[int, int]]
    ) -> list[Node]:
        """Enter the first ``depth`` blocks of the tokens into the trie, and pages for those that are ``lacking``,
        (index, group) each, whose K and V the caller writes there before anybody can read them. It is then as though a
        sequence that had all these blocks had just left. There have to be as many pages as they need, besides those
        that the trie has of them. Returns the nodes."""
        size, chain, node = self.block_size, list[Node](), self.root
        for begin in range(0, depth * size, size):
            edge: Hashable = tuple(token_ids[begin : begin + size])
            if not begin:
                edge = (salt, edge)
            if (child := node.children.get(edge)) is None:
                child = node.children[edge] = self._node(edge, node)
            child.owners += 1  # while others are evicted
            chain.append(child)
            node = child
        self._renew(chain)
        needed = sum(self.groups[k].pages for _, k in lacking)
        while len(self.free_list) < needed:
            self._evict()
        for i, k in lacking:
            chain[i].blocks[k] = tuple(self.free_list.pop() for _ in range(self.groups[k].pages))
        self._renew(chain)
        for node in reversed(chain):
            node.owners -= 1
        if chain and not chain[-1].owners and not chain[-1].children:
            self._prune(chain[-1])
        return chain

    def _renew(self, chain: Sequence[Node]) -> None:
        """Let those blocks of a chain that nobody uses be the last to be evicted, the first ones after all others."""
        self.clock += 2 * len(chain)
        time = self.clock - len(chain)
        for k, cached in enumerate(self.cached):
            for i, node in reversed([*enumerate(chain)]):
                if node.blocks[k] is not None and not node.users[k]:
                    cached.pop(node, None)
                    cached[node] = time - i

    def find(self, token_ids: Sequence[int], salt: str) -> tuple[list[Node], int]:
        """The longest chain of nodes that hold a proper prefix of the tokens after which all groups, and the recurrent
        layers, can go on; and how long it would be without the latter."""
        found = self.nodes(token_ids, salt)
        depth = self._windows(found, len(found))
        known = depth
        if self.forget is not None:
            while depth and found[depth - 1].state is None:
                depth = self._windows(found, depth - 1)
        return found[:depth], known

    def _windows(self, found: Sequence[Node], depth: int) -> int:
        """The most of the first ``depth`` nodes after which every group has the blocks that its window reaches."""
        moved = bool(self.windowed)
        begins = [depth] * len(self.groups)  # per group: it has the blocks from there up to ``depth``
        while moved:
            moved = False
            for k in self.windowed:
                begin, tail = min(begins[k], depth), self.groups[k].tail
                while begin > max(0, depth - tail):
                    begin -= 1
                    if found[begin].blocks[k] is None:
                        depth, moved = begin, True
                begins[k] = begin
        return depth

    def _extend(self, holding: Holding, k: int, last: int) -> None:
        """Take the blocks before index ``last`` that a table lacks: free pages or, if there are too few, those of the
        least recently used cached blocks."""
        table, pages, free = holding.tables[k], self.groups[k].pages, self.free_list
        count = pages * (min(holding.room, last) - len(table))
        if count <= 0:
            return
        while len(free) < count:
            self._evict()
        if count == 1:
            table.append((free.pop(),))
            return
        taken = reversed(free[-count:])
        del free[-count:]
        table.extend(zip(*[taken] * pages, strict=True))

    def _let_go(self, holding: Holding, length: int, groups: Iterable[int]) -> None:
        """Put the groups' blocks back that no position from ``length`` - ROLLBACK on reads."""
        firsts = list(holding.firsts)
        for k in groups:
            firsts[k] = max(firsts[k], self.groups[k].first(length, self.block_size))
        if firsts == holding.firsts:
            return
        self._put_back(holding, firsts, 1)
        for table, begin, end in zip(holding.tables, holding.firsts, firsts, strict=True):
            table[begin:end] = [None] * (end - begin)
        holding.firsts = firsts

    def _put_back(self, holding: Holding, ends: Sequence[int], step: int) -> None:
        """Free each group's blocks before index ``ends[k]``, or leave them to the trie: the first ones first if
        ``step`` is 1, the last ones first if it is -1."""
        nodes, count = holding.nodes, len(holding.nodes)
        self.clock += 2 * count
        time = self.clock - count
        for k, (table, begin, end) in enumerate(zip(holding.tables, holding.firsts, ends, strict=True)):
            if end > count:
                self.free_list.extend(numbers(table[max(begin, count) : end]))
                end = count
            cached, shared = self.cached[k], holding.shared[k]
            for i in range(begin, end)[::step]:
                node = nodes[i]
                if i < shared:
                    users = node.users
                    users[k] -= 1
                    if users[k]:
                        continue
                elif node.blocks[k] is None:
                    node.blocks[k] = table[i]
                else:
                    self.free_list.extend(table[i] or ())
                    continue
                cached[node] = time + step * i

    def _use(self, nodes: Iterable[Node], k: int) -> None:
        """Count one more sequence that has the nodes' blocks of a group in its table."""
        cached = self.cached[k]
        for node in nodes:
            users = node.users
            if not users[k]:
                del cached[node]
            users[k] += 1

    def _evict(self) -> None:
        """Free the pages of the least recently used block that nobody uses."""
        k = 0
        if len(self.groups) > 1:
            times = [next(iter(cached.values()), ENDLESS) for cached in self.cached]
            k = times.index(min(times))
        node, _ = self.cached[k].popitem(last=False)
        if self.leaving is not None:
            self.leaving(node, k)
        block, node.blocks[k] = node.blocks[k], None
        assert block is not None
        self.free_list.extend(block)
        if self.groups[k].window is None:
            assert not node.children, "a block is let go before those that lead to it"
        self._prune(node)

    def _prune(self, node: Node) -> None:
        """Remove the node, and its ancestors, as far as nothing is left of them."""
        while not (node.owners or node.children or node.parent is None or any(node.blocks)):
            del node.parent.children[node.edge]
            if node.state is not None and self.forget is not None:
                self.forget(node)
            node = node.parent
