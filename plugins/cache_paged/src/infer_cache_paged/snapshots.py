"""Snapshots: the states of recurrent layers, kept where prefixes end, so that a sequence can go on from there.

A snapshot is a row that a pass has saved in place of the sequence's own. It belongs to a node of the trie, and is
never written again: whoever begins there reads it, and saves a row of its own. Snapshots are made

- near the end of each prompt, where the next turn of a conversation begins. Chat templates end a prompt by a few tokens
  that the next turn may not repeat, so the last ``TAIL`` tokens do not count;
- at the prompt's *forks*, where its template may render a later prompt otherwise: without reasoning, for example;
- where a prompt leaves a path of the trie, if that saves at least ``LEAST`` tokens the next time;
- at the end of each block that is generated, in place of the one before.

A conversation goes on from one of its last prompt's snapshots: near the end or, if the template drops what it has shown
before, from a fork. The pool learns which of the two is usual. Once the next prompt is computed, all that it does not
need itself have served, unless several sequences have begun with them.

When rows are short, the last one that is left is for the end of a prompt, and not for what comes before it there. The
snapshots go first that have served. Then go those that nobody has begun with, but for those of the usual kind. Then
goes the least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Literal

import numpy as np

from infer.cache import StateManager
from infer.cache.arrays import Ints, Ints64, Slots
from infer_cache_paged.pages import Holding, Node

TAIL = 16
LEAST = 64
NEVER = np.iinfo(np.int64).max
Kind = Literal["end", "fork"]
Group = dict[Node, Kind | None]
"""The nodes from one of which a conversation goes on after a prompt; None stands for what was generated."""


@dataclass(slots=True)
class Plan:
    """The snapshots of one running sequence."""

    borders: list[int]
    """Positions after which its prompt asks for one, the last one first."""
    prompt: int
    """How many tokens it was admitted with."""
    end: int
    """That near the end of its prompt."""
    known: int
    """How many leading blocks it began with."""
    begun: Node | None = None
    """That whose snapshot the sequence's first pass reads."""
    forks: list[int] = field(default_factory=list)
    """After how many blocks later prompts may leave this one."""
    group: Group = field(default_factory=dict)
    saved: list[tuple[int, int]] = field(default_factory=list)
    """(position, row) of each one that is saved but belongs to no node yet."""


class Snapshots(StateManager):
    """A StateManager that keeps snapshots in ``count`` rows. ``block_size`` is that of the trie."""

    def __init__(self, num_slots: int, max_drafts: int, count: int, block_size: int) -> None:
        super().__init__(num_slots, max_drafts, count)
        self.count = count
        self.block_size = block_size
        self._free = list(reversed(range(self.num_rows - count, self.num_rows)))
        self._served: OrderedDict[Node, int] = OrderedDict()
        self._kept: OrderedDict[Node, int] = OrderedDict()
        """Nodes with a state, those that go first and the others, and how many sequences have begun with each. The
        first one of either goes before the rest."""
        self._groups: dict[Node, Group] = {}
        self._forking = 0.0
        """The share of conversations that have lately gone on from a fork."""
        self._uses = [0] * self.num_rows
        """By row: how many nodes, plans and slots need it."""
        self._next_S: Ints64 = np.full(num_slots, NEVER)
        """The position of each slot's next snapshot."""
        self._plans: dict[int, Plan] = {}
        self.leaving: Callable[[Node], object] | None = None
        """Called before a node's snapshot is given up."""
        self._reading: dict[int, int] = {}
        """The snapshot's row that a slot reads in its next pass."""

    def begin(self, slot: int, holding: Holding, num_tokens: int) -> None:
        """After ``open``: the slot's sequence has ``num_tokens`` tokens, of which it shares those of the holding's
        nodes."""
        size, cached = self.block_size, len(holding.nodes)
        begun = holding.nodes[-1] if cached else None
        if begun is not None:
            row = begun.state
            assert row is not None, "a prefix ends at a snapshot"
            self._row_S[slot] = row
            self._read(slot, row)
        end, found = (num_tokens - TAIL) // size, holding.found
        borders = [end * size] if end > cached else []
        if end > found and (found - cached) * size >= LEAST:
            borders.append(found * size)
        self._plans[slot] = plan = Plan(borders, num_tokens, end * size, cached, begun)
        self._next_S[slot] = self._following(plan, cached * size)

    def forks(self, slot: int, positions: Sequence[int]) -> None:
        """After ``begin``, and before the first pass: later prompts may leave the slot's after so many tokens."""
        plan, size = self._plans[slot], self.block_size
        plan.forks = [position // size for position in positions]
        new = [fork * size for fork in plan.forks if plan.known < fork < plan.end // size]
        plan.borders = sorted({*plan.borders, *new}, reverse=True)
        self._next_S[slot] = self._following(plan, plan.known * size)

    def close(self, slot: int) -> None:
        if (row := self._reading.pop(slot, None)) is not None:
            self._release(row)
        self._next_S[slot] = NEVER
        if plan := self._plans.pop(slot, None):
            for _, row in plan.saved:
                self._release(row)

    def extend(
        self, slots: Sequence[int] | Slots, starts: Sequence[int] | Ints, lens: Sequence[int] | Ints
    ) -> tuple[Ints64, Ints64]:
        read_B, save_T = super().extend(slots, starts, lens)
        slots_B, starts_B = np.asarray(slots), np.asarray(starts)
        read = []
        for slot in slots_B.tolist() if self._reading else ():
            if (row := self._reading.pop(slot, None)) is not None:
                read.append(row)
                self._count(self._plans[slot])
        ends_B = starts_B + lens
        for b in (self._next_S[slots_B] <= ends_B).nonzero()[0].tolist():
            slot, start, end = int(slots_B[b]), int(starts_B[b]), int(ends_B[b])
            first = int(np.sum(lens[:b])) - start
            while (border := int(self._next_S[slot])) <= end:
                if border > self._plans[slot].prompt:
                    border = end // self.block_size * self.block_size  # the last of several
                if (row := self._take(slot, border)) is not None:
                    save_T[first + border - 1] = row
                    if border == end:
                        self._row_S[slot] = row
                        self._read(slot, row)
                    if slot in self._recent:
                        rows = self._recent[slot][1]
                        if end - border < len(rows):
                            rows[border - end - 1] = row
                self._next_S[slot] = self._following(self._plans[slot], border)
        for row in read:  # only now, or another slot might save what this pass still reads
            self._release(row)
        return read_B, save_T

    def truncate(self, slot: int, num_tokens: int) -> None:
        before = self._reading.pop(slot, None)
        super().truncate(slot, num_tokens)
        plan = self._plans[slot]
        if (row := int(self._row_S[slot])) >= self.num_rows - self.count:
            self._read(slot, row)
        if before is not None:
            self._release(before)
        while plan.saved and plan.saved[-1][0] > num_tokens:
            self._release(plan.saved.pop()[1])
        self._next_S[slot] = self._following(plan, num_tokens)

    def commit(self, slot: int, nodes: Sequence[Node]) -> None:
        """The slot's leading blocks are ``nodes`` of the trie."""
        plan = self._plans[slot]
        while plan.saved and plan.saved[0][0] <= len(nodes) * self.block_size:
            border, row = plan.saved.pop(0)
            block = border // self.block_size
            node, prompt = nodes[block - 1], border == plan.end
            if node.state is None:
                node.state = row
                self._served[node] = 0
            else:
                self._release(row)
            if prompt or border > plan.prompt or block in plan.forks:
                self._join(plan, node, "end" if prompt else "fork" if block in plan.forks else None)
            if prompt:
                self._succeed(plan, nodes[: plan.known])

    def _succeed(self, plan: Plan, known: Sequence[Node]) -> None:
        """The sequence, which began with the ``known`` nodes, has a snapshot near the end of its prompt: what it went
        on from has served, but for what it would go on from at its forks."""
        before = [*self._groups.get(known[-1], ())] if known else []
        for fork in plan.forks:
            if (node := next((node for node in reversed(known[:fork]) if node.state is not None), None)) is not None:
                self._join(plan, node, "fork")
        for node in (*before, *known):
            if node.state is not None and node not in plan.group and self._begun(node) < 2:
                self._served[node] = self._drop(node)
                self._served.move_to_end(node, last=False)

    def _join(self, plan: Plan, node: Node, kind: Kind | None) -> None:
        """A conversation may go on from the sequence's prompt at this node."""
        self._leave(node)
        self._groups[node], plan.group[node] = plan.group, kind
        begun, usual = self._drop(node), "fork" if self._forking > 0.5 else "end"
        (self._kept if begun > 1 or kind == usual else self._served)[node] = begun

    def _leave(self, node: Node) -> None:
        self._groups.pop(node, {}).pop(node, None)

    def _count(self, plan: Plan) -> None:
        """The sequence has begun with its snapshot, and not only asked for room."""
        begun, plan.begun = plan.begun, None
        if begun is not None and begun.state is not None:
            self._kept[begun] = self._drop(begun) + 1
            if kind := self._groups.get(begun, {}).get(begun):
                self._forking += ((kind == "fork") - self._forking) / 4

    def forget(self, node: Node) -> None:
        """The node leaves the trie, or its snapshot is to go."""
        assert node.state is not None
        if self.leaving is not None:
            self.leaving(node)
        self._drop(node)
        self._leave(node)
        self._release(node.state)
        node.state = None

    def _begun(self, node: Node) -> int:
        return self._served[node] if node in self._served else self._kept[node]

    def _drop(self, node: Node) -> int:
        """Take the node from where it stands, and return how many sequences have begun with it."""
        return self._served.pop(node) if node in self._served else self._kept.pop(node)

    def _following(self, plan: Plan, position: int) -> int:
        """The position of the next snapshot behind ``position``."""
        while plan.borders and plan.borders[-1] <= position:
            plan.borders.pop()
        if plan.borders:
            return plan.borders[-1]
        return (max(plan.prompt, position) // self.block_size + 1) * self.block_size

    def _take(self, slot: int, border: int) -> int | None:
        """A row for a new snapshot of the slot; None if all are in use."""
        plan = self._plans[slot]
        if border > plan.prompt and plan.saved and plan.saved[-1][0] > plan.prompt:
            self._release(plan.saved.pop()[1])
        if border < plan.end and len([*islice(chain(self._free, self._unused()), 2)]) < 2:
            return None  # the last one is for the end of the prompt
        if (row := self._row()) is not None:
            plan.saved.append((border, row))
        return row

    def _unused(self) -> Iterator[Node]:
        """The nodes whose snapshots can be given up now, in the order in which they go."""
        nodes = chain(self._served, self._kept)
        return (node for node in nodes if node.state is not None and self._uses[node.state] == 1)

    @property
    def has_row(self) -> bool:
        """Whether there is a row for a further snapshot."""
        return bool(self._free) or any(True for _ in self._unused())

    def _row(self) -> int | None:
        """A row that nobody needs, or whose snapshot goes first; None if all are in use."""
        if not self._free:
            if (node := next(self._unused(), None)) is None:
                return None
            self.forget(node)
        row = self._free.pop()
        self._uses[row] = 1
        return row

    def restore(self, node: Node) -> int | None:
        """A row for a snapshot of the node, which has none; the caller writes it. None if all are in use."""
        node.state = row = self._row()
        if row is not None:
            self._kept[node] = 0
        return row

    def _read(self, slot: int, row: int) -> None:
        self._uses[row] += 1
        self._reading[slot] = row

    def _release(self, row: int) -> None:
        self._uses[row] -= 1
        if not self._uses[row]:
            self._free.append(row)
