"""A paged pool with a tier behind it: what sequences have computed is kept there, and read back when a prompt begins
with the same tokens.

The engine's thread decides what is kept and read. It copies blocks between the pool's tensors and host memory, and
never waits for the tier, which other threads call. A block is kept when the engine has nothing else to do, when its
pages are about to be used for something else, or when the engine ends. What the tier has of a prompt is read when the
prompt is to be admitted, piece by piece: each attempt enters what has been read into the trie, as if a sequence that
had computed it had just left. The last attempt finds everything there."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from itertools import chain, islice
from typing import Any

from infer.contracts.cache import Allocation, CacheContext
from infer.contracts.request import is_of_base
from infer.errors import SettingsError
from infer_cache_paged.pages import Node
from infer_cache_paged.payloads import Payloads
from infer_cache_paged.pool import PagedPool, PagedSettings, block_tables
from infer_cache_paged.tier import BlockKey, Payload, TierProtocol

log = logging.getLogger(__name__)

STATE = 1 << 16
"""What stands for the recurrent layers' state after a block, where others are the indices of groups. It is greater than
these, so that a block's state comes after its K and V."""
AHEAD = 64 << 20
"""Bytes that are read before they can be entered, and that one attempt to admit a prompt enters at most."""
BEHIND = 128 << 20
"""Bytes that may wait to be written. What is to make room for others while there are as many is not kept."""
READERS = 2
STALL_S = 5.0
"""How long, in seconds, a prompt waits for a block, before what is not there is computed."""
DRAIN_S = 10.0
"""How long, in seconds, the engine's end may take to keep what is left."""
NAP_S = 0.005
"""How long, in seconds, ``rest`` waits for what is being written."""
AT_ONCE = 4
"""How many nodes ``rest`` looks through."""
MANY = 256
"""How many blocks the tier is told at a time that they have been used."""
INDEX = 6
"""Hexadecimal digits of a block's index, with which its name begins."""
ADAPTED = 1 << 4 * INDEX - 1
"""The index of a first block that was computed with an adapter: what comes first in a tier is the base's."""

Part = tuple[int, int]
"""The index of a block, and of a group or STATE."""


class TieredPool(PagedPool):
    """A LastingPool over the tier that ``open_tier`` makes, which is told what all keys of its generation begin with.
    ``clock`` is in seconds, and ``threads`` makes the threads that call the tier, as many as that."""

    def __init__(
        self,
        context: CacheContext,
        settings: PagedSettings,
        open_tier: Callable[[bytes], TierProtocol],
        *,
        clock: Callable[[], float] = time.monotonic,
        threads: Callable[[int, str], Executor] = ThreadPoolExecutor,
    ) -> None:
        super().__init__(context, settings)
        pages = self._pages = self.block_manager.pages
        self._snapshots = self.block_manager.snapshots
        if not pages.share:
            raise SettingsError(
                "cache.paged.disk keeps prefixes, but this cache shares none, since cache.paged.state_snapshots is 0; "
                "leave one of them out."
            )
        assert context.identity is not None, "a pool that lasts is told what its K and V depend on"
        tables = block_tables(context)
        self._payloads = Payloads(self.storage, tables, pages.groups, self.state_storage)
        self._parts = [*range(len(pages.groups)), *([STATE] if self._snapshots is not None else [])]
        self._nbytes = dict(zip(self._parts, [*self._payloads.nbytes, self._payloads.state_bytes], strict=False))
        identity = {
            **context.identity(),
            "block_size": str(settings.block_size),
            "windows": json.dumps([window for window, _ in tables]),
            "layout": self._payloads.layout(),
        }
        self._head = json.dumps(identity, sort_keys=True).encode()
        self.tier = open_tier(self._head)
        self._clock = clock
        self._unkept: dict[Node, None] = {}
        """Nodes of which the tier may lack a part, in the order in which they came."""
        self._used: list[str] = []
        """What the tier is yet to be told that it has been used."""
        self._writer = threads(1, "infer-tier-writer")
        self._reader = threads(READERS, "infer-tier-reader")
        self._writing: dict[str, Future[None]] = {}
        self._reading: OrderedDict[str, tuple[Future[Payload | None], float]] = OrderedDict()
        """What is read or waits to be entered, and when it was asked for."""
        largest = max(1, *self._nbytes.values())
        self._most_read, self._most_written = max(2, AHEAD // largest), max(2, BEHIND // largest)
        self.loading = False
        self.free = self._free
        pages.leaving = self._leaving
        if self._snapshots is not None:
            self._snapshots.leaving = lambda node: self._leaving(node, STATE)

    # Reading

    def allocate(self, token_ids: Sequence[int], *, reuse: bool = True, salt: str = "") -> Allocation | None:
        self.loading = reuse and self._load(token_ids, salt)
        return None if self.loading else super().allocate(token_ids, reuse=reuse, salt=salt)

    def _load(self, token_ids: Sequence[int], salt: str) -> bool:
        """Enter what has been read of the tokens' blocks, and have more of them read. Whether to wait for more."""
        while missing := self._missing(token_ids, salt):
            self._read(token_ids, salt, missing)
            ready, late = dict[Part, Payload](), None
            for part, name in islice(missing.items(), self._most_read):
                future, asked = self._reading[name]
                if not future.done():
                    late = asked
                    break
                del self._reading[name]
                if (payload := future.result()) is None:
                    break  # the tier does not have it any more
                ready[part] = payload
            if ready:
                self._enter(token_ids, salt, ready)
            elif late is not None and self._clock() - late >= STALL_S:
                log.warning("cache.paged.disk has yielded nothing for %g s; a prompt is computed instead", STALL_S)
                return False
            left = dict(islice(missing.items(), len(ready), None))
            if left and (late is not None or len(ready) == self._most_read):
                self._read(token_ids, salt, left)
                return True
        return False

    def _missing(self, token_ids: Sequence[int], salt: str) -> dict[Part, str]:
        """What the pool lacks of the tokens' blocks and the tier has, in the order of the blocks, with the names that
        it has in the tier; empty if the pool would gain nothing, or has no room for the sequence."""
        pages, manager, contains = self._pages, self.block_manager, self.tier.contains
        nodes, size = pages.nodes(token_ids, salt), pages.block_size
        always = [k for k in self._parts if k != STATE and k not in pages.windowed]
        there: list[dict[int, str]] = []
        """Per block, the names of its parts; empty if the pool has them."""
        name, gains = self._salted(salt), False
        # Without a row for a state, only those will do that the pool has.
        readable = self._parts if self._snapshots is None or self._snapshots.has_row else self._parts[:-1]
        for i in range((len(token_ids) - 1) // size):
            node, parts = nodes[i] if i < len(nodes) else None, dict[int, str]()
            own = token_ids[i * size : (i + 1) * size]
            name = _named(_first(salt) + i, name, own) if node is None else self._name(node)
            for part in self._parts:
                if node is not None and _has(node, part):
                    parts[part] = ""
                elif part in readable and contains(full := f"{name}.{part:x}"):
                    parts[part], gains = full, True
            if not parts or any(k not in parts for k in always):
                break
            there.append(parts)
        if not gains:
            return {}
        depth = next((n for n in range(len(there), 0, -1) if all(x in there[i] for i, x in self._reads(n))), 0)
        room = -(-len(token_ids) // size)
        if (
            depth <= len(pages.find(token_ids, salt)[0])
            or not manager.has_slot
            or len(token_ids) > manager.max_seq_len
            or pages.needed(nodes, depth, room) + pages.behind(nodes, depth) > pages.num_available
        ):
            return {}
        all_parts = chain(self._reads(depth), ((i, k) for k in always for i in range(depth)))
        # A node without the block of a group that has no window would be taken to have it, so that one comes first. A
        # node without any block would not stay, so the state comes last.
        order = sorted(all_parts, key=lambda part: (part[0], part[1] not in always, part[1]))
        return {(i, x): full for i, x in order if (full := there[i][x])}

    def _reads(self, depth: int) -> list[Part]:
        """What a sequence that begins with ``depth`` blocks reads, besides all blocks of layers without a window."""
        parts = [(depth - 1, STATE)] if STATE in self._parts else []
        for k in self._pages.windowed:
            parts += [(i, k) for i in range(max(0, depth - self._pages.groups[k].tail), depth)]
        return parts

    def _read(self, token_ids: Sequence[int], salt: str, missing: Mapping[Part, str]) -> None:
        """Have the first ones read. What nobody has fetched makes room for them."""
        for (i, part), name in islice(missing.items(), self._most_read):
            if name not in self._reading:
                key = self._key(name, part, salt, token_ids[: (i + 1) * self._pages.block_size])
                self._reading[name] = self._reader.submit(self.tier.get, key), self._clock()
            self._reading.move_to_end(name)
        while len(self._reading) > 2 * self._most_read:
            self._reading.popitem(last=False)[1][0].cancel()

    def _enter(self, token_ids: Sequence[int], salt: str, ready: Mapping[Part, Payload]) -> None:
        """Give what has been read a place in the trie."""
        blocks = [(i, part) for i, part in ready if part != STATE]
        nodes = self._pages.restore(token_ids, salt, max(i for i, _ in ready) + 1, blocks)
        for (i, part), payload in ready.items():
            if part != STATE:
                self._payloads.write_block(part, nodes[i].blocks[part] or (), payload)
            elif self._snapshots is not None and (row := self._snapshots.restore(nodes[i])) is not None:
                self._payloads.write_state(row, payload)

    # Keeping

    def rest(self) -> bool:
        for node in [*islice(self._unkept, AT_ONCE)]:
            if not all(self._keep(node, part) for part in self._parts):
                wait([*self._writing.values()], NAP_S, "FIRST_COMPLETED")
                return True
            del self._unkept[node]
        if not self._unkept:
            self._tell_used()
        return bool(self._unkept)

    def close(self) -> None:
        until = self._clock() + DRAIN_S
        while self.rest() and self._clock() < until:
            pass
        if self._unkept:
            log.warning("cache.paged.disk: %d blocks are not kept, since %g s are over", len(self._unkept), DRAIN_S)
        self._reader.shutdown(cancel_futures=True)
        self._writer.shutdown()
        self.tier.close()

    def _free(self, slot: int) -> None:
        nodes = [*self._pages.holdings[slot].nodes]
        self.block_manager.free(slot)
        self._unkept.update(dict.fromkeys(node for node in nodes if any(_has(node, part) for part in self._parts)))

    def _leaving(self, node: Node, part: int) -> None:
        """A part of a node is about to be lost."""
        self._keep(node, part)
        if not any(_has(node, other) for other in self._parts if other != part):
            self._unkept.pop(node, None)
        if len(self._used) >= MANY:
            self._tell_used()

    def _keep(self, node: Node, part: int) -> bool:
        """Have the tier keep a part of a node, if there is one that it lacks. False if too much waits to be written."""
        if not _has(node, part) or (name := f"{self._name(node)}.{part:x}") in self._writing:
            return True
        if self.tier.contains(name):
            self._used.append(name)
            return True
        if len(self._writing) >= self._most_written:
            return False
        if part == STATE:
            assert node.state is not None
            payload = self._payloads.state(node.state)
        else:
            payload = self._payloads.block(part, node.blocks[part] or ())
        self._writing[name] = future = self._writer.submit(self._put, name, node, part, payload)
        future.add_done_callback(lambda future: self._written(name, future))
        return True

    def _put(self, name: str, node: Node, part: int, payload: Payload) -> None:
        """In the writer's thread, which may read the nodes' edges and parents: they never change."""
        salt, token_ids = _prefix(node)
        self.tier.put(self._key(name, part, salt, token_ids), payload)

    def _written(self, name: str, future: Future[None]) -> None:
        self._writing.pop(name, None)
        if (error := future.exception()) is not None:
            log.error("cache.paged.disk: %s was not kept", name, exc_info=error)

    def _tell_used(self) -> None:
        if self._used:
            used, self._used = self._used, []
            self._writer.submit(self.tier.touch, used)

    # Trusting what is there

    def verify(self, compute: Callable[[Sequence[int]], int | None]) -> None:
        if (found := self.tier.first()) is None:
            return
        head, payload = found
        about, _, tokens = head.removeprefix(self._head + b"\n").partition(b"\n")
        token_ids, facts = array("I", tokens).tolist(), json.loads(about)
        if not facts["base"] or (slot := compute(token_ids)) is None:
            return
        part = facts["part"]
        if part == STATE and self.block_manager.state_manager is not None:
            computed = self._payloads.state(self.block_manager.state_manager.row(slot))
        else:
            table = self._pages.holdings[slot].tables[part]
            computed = self._payloads.block(part, table[len(token_ids) // self._pages.block_size - 1] or ())
        self.block_manager.free(slot)
        if computed == payload:
            log.info("cache.paged.disk: what was kept is what is computed now")
        else:
            log.warning(
                "cache.paged.disk: what was kept of %d tokens is not what is computed now; all of this generation is "
                "dropped",
                len(token_ids),
            )
            self.tier.clear()

    # Names

    def _name(self, node: Node) -> str:
        """What the tier calls a node of the trie, but for the part."""
        unnamed, each = list[Node](), node
        while not each.name:
            unnamed.append(each)
            if each.parent is None or each.parent.parent is None:
                break
            each = each.parent
        for each in reversed(unnamed):
            assert each.parent is not None, "the root is no block"
            salt, tokens = _edge(each)
            if each.parent.parent is None:
                each.name = _named(_first(salt), self._salted(salt), tokens)
            else:
                each.name = _named(int(each.parent.name[:INDEX], 16) + 1, each.parent.name, tokens)
        return node.name

    def _salted(self, salt: str) -> str:
        """What stands before the name of a first block."""
        return _digest(self._head + _salt_digest(salt).encode())

    def _key(self, name: str, part: int, salt: str, token_ids: Sequence[int]) -> BlockKey:
        about = json.dumps({"part": part, "salt": _salt_digest(salt), "base": is_of_base(salt)}).encode()
        return BlockKey(name, b"\n".join((self._head, about, _packed(token_ids))), self._nbytes[part])


def _has(node: Node, part: int) -> bool:
    return (node.state if part == STATE else node.blocks[part]) is not None


def _first(salt: str) -> int:
    """The index of the first block of sequences with a salt."""
    return 0 if is_of_base(salt) else ADAPTED


def _edge(node: Node) -> tuple[str, Sequence[int]]:
    """The salt and the tokens of a node's edge; the salt is empty but for a first block."""
    edge: Any = node.edge
    return edge if node.parent is not None and node.parent.parent is None else ("", edge)


def _prefix(node: Node) -> tuple[str, list[int]]:
    """The salt, and all tokens up to the end of the node's block."""
    salt, blocks = "", list[Sequence[int]]()
    each: Node | None = node
    while each is not None and each.parent is not None:
        salt, tokens = _edge(each)
        blocks.append(tokens)
        each = each.parent
    return salt, [*chain.from_iterable(reversed(blocks))]


def _packed(token_ids: Sequence[int]) -> bytes:
    """The tokens as 32-bit integers."""
    return array("I", token_ids).tobytes()


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def _salt_digest(salt: str) -> str:
    return _digest(salt.encode(errors="surrogatepass"))


def _named(index: int, before: str, token_ids: Sequence[int]) -> str:
    """The name of a block, by that of the one before it."""
    return f"{index:0{INDEX}x}-{_digest(before.encode() + _packed(token_ids))}"
