"""A runner without a model. Its K, V and states are integers that depend on all tokens before them, and a drawn token
depends on every integer that a real model would read: what a pool, a trie or a scheduler does wrong shows as a wrong
token.

Shapes: T tokens of a pass, n tokens of a sequence. All integers are modulo 2 ** 64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from infer.cache.arrays import Ints, Ints64
from infer.cache.state_manager import StateManager
from infer.cache.storage import ExtendView
from infer.contracts.request import Request
from infer.engine.batch import Batch, Draw
from infer.engine.runner import Drawn, Launched
from infer_cache_paged import PagedPool

Words = npt.NDArray[np.uint64]

VOCAB = 101
MASK = (1 << 64) - 1
BASE = 0x9E3779B97F4A7C15
INVERSE = pow(BASE, -1, 1 << 64)
LONGEST = 4096


def _powers(base: int) -> list[int]:
    return [pow(base, i, 1 << 64) for i in range(LONGEST + 2)]


POWERS, INVERSES = _powers(BASE), _powers(INVERSE)
INVERSES_L: Words = np.array(INVERSES, np.uint64)
POSITIONS = np.arange(LONGEST + 1)
COUNTS_L: Words = np.arange(LONGEST + 2, dtype=np.uint64)


def mixed(value: int) -> int:
    """A value's bits, spread (Steele et al., 2014: SplitMix64)."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return value ^ value >> 31


def keys(before: int, start: int, tokens_n: npt.NDArray[np.int64]) -> Words:
    """What stands for K and V of tokens at positions from ``start`` on: a sum over all tokens so far, each times a
    number of its own for its position. ``before`` is the key at the position before them."""
    n = len(tokens_n)
    each_n = (tokens_n + 1).astype(np.uint64) * INVERSES_L[start + 1 : start + 1 + n]
    return each_n.cumsum() + np.uint64(before)


def drawn(key: int, sums: Sequence[int], state: int, position: int, request: Request) -> int:
    """The token after a position, of what a model reads there: its own key, the sum of keys within each window, and the
    state."""
    value = mixed(key * POWERS[position + 1] + request.seed & MASK)
    for each in (*sums, state):
        value = mixed(value ^ each)
    return value % VOCAB


def answer(
    request: Request, ends: frozenset[int], windows: Sequence[int | None], states: bool, longest: int
) -> list[int]:
    """What the request is answered with if it is alone in the world, computed from its tokens and nothing else."""
    tokens, found, state = list(request.prompt_token_ids), list[int](), 0
    most = request.params.max_tokens
    key_n = list[int]()
    totals = [0]  # of all keys before each position
    while len(tokens) < longest and (most is None or len(found) < most):
        for position in range(len(key_n), len(tokens)):
            before = key_n[-1] if key_n else 0
            key_n.append((before + (tokens[position] + 1) * INVERSES[position + 1]) & MASK)
            totals.append((totals[-1] + key_n[-1]) & MASK)
            state = (state + (position + 1) * key_n[-1]) & MASK
        position = len(tokens) - 1
        sums = [
            totals[-1] - totals[0 if window is None else max(0, position + 1 - window)] & MASK for window in windows
        ]
        tokens.append(drawn(key_n[-1], sums, state if states else 0, position, request))
        found.append(tokens[-1])
        if found[-1] in ends:
            break
    return found


class Seen(ExtendView):
    """What a pass sees: the block tables themselves, [U, B, P] or [B, P] of one, and the rows of states."""

    def __init__(self, table: Ints) -> None:
        self.table_UBP = table if table.ndim == 3 else table[None]
        self.states = None


class Storage:
    """Stands for the tensors of K and V, whose views take longer to make than all else in a step."""

    nbytes = 0

    def view(self, table: Ints, starts: object, lens: object) -> Seen:
        return Seen(table)


@dataclass
class StateStorage:
    """Stands for the tensors of states. A view is what the manager says: the rows to read, and those to save."""

    manager: StateManager

    def view(self, slots: Any, starts: Any, lens: Any) -> tuple[Ints64, Ints64]:
        return self.manager.extend(slots, starts, lens)


class Executor:
    """A Runner over a paged pool, whose storage it replaces. ``fault`` is called before a pass, and after it has been
    computed: it may raise."""

    def __init__(self, pool: PagedPool, max_batch_size: int, fault: Callable[[str, Batch], None]) -> None:
        self._pool = pool
        self._fault = fault
        self._windows = windows_of(pool)
        pages, manager = pool.block_manager.pages, pool.block_manager.state_manager
        pool.storage = cast(Any, Storage())
        self._size = pages.block_size
        self._block_of, self._place_of = np.divmod(POSITIONS, self._size)
        # One memory for all tables: a page that two of them have shows, too. The last page is behind windows.
        self._keys: Words = np.zeros((pages.num_pages + 1, self._size), np.uint64)
        self._states: Words | None = None
        if manager is not None:
            pool.state_storage = cast(Any, StateStorage(manager))
            self._states = np.zeros(manager.num_rows, np.uint64)
        self._last = np.zeros(max_batch_size, np.int64)
        """The token last drawn for each slot."""

    def launch(self, batch: Batch) -> Launched:
        self._fault("before", batch)
        view: Any
        if batch.decode_only:
            view = self._pool.decode_view(batch.slots)
        else:
            view = self._pool.batched_chunked_prefill_view(batch.slots, batch.starts, batch.lens)
        tokens_T = batch.token_ids_T
        if len(batch.fed_rows):
            tokens_T = tokens_T.copy()
            tokens_T[batch.fed_rows] = self._last[batch.fed_slots]
        assert len(batch.readouts) < 2, "nothing but draws is asked for"
        draw = batch.readouts[0] if batch.readouts else None
        requests: list[Request] = []
        wanted: list[int] = []
        if draw is not None:
            assert isinstance(draw, Draw), "nothing but draws is asked for"
            wanted = batch.rows_N[draw.first : draw.first + len(draw.of)].tolist()
            requests = draw.requests
        found: list[int] = []
        first = 0
        for b, (start, length) in enumerate(zip(batch.starts, batch.lens, strict=True)):
            part = slice(first, first + length)
            end = n = len(found)
            while end < len(wanted) and wanted[end] < first + length:
                end += 1
            at = [start + row - first for row in wanted[n:end]]
            row, saves_n = (0, None) if view.states is None else (view.states[0][b], view.states[1][part])
            read = self._extend(view.table_UBP[:, b], start, tokens_T[part], at, row, saves_n)
            found += [drawn(*each, request) for each, request in zip(read, requests[n:end], strict=True)]
            first += length
        self._fault("after", batch)
        readers: list[Any] = []
        if isinstance(draw, Draw):
            self._last[draw.slots_M] = found if draw.last_M is None else [found[n] for n in draw.last_M]
            readers.append(lambda: Drawn(list(found), [None] * len(found)))
        return Launched(readers, lambda: None)

    def _extend(
        self, table_UP: Ints, start: int, tokens_n: npt.NDArray[np.int64], wanted: list[int], row: int, saves_n: Any
    ) -> Iterator[tuple[int, list[int], int, int]]:
        """Write the keys of a sequence's new tokens, and its states. For each wanted position, in order: its key, the
        sum of keys in each window, the state, and the position itself, of which ``drawn`` makes the token after it."""
        size, end, keys_PS = self._size, start + len(tokens_n), self._keys
        before = 0
        if start:
            block, place = divmod(start - 1, size)
            before = int(keys_PS[table_UP[0, block], place])
        key_n: Any
        if end == start + 1:  # as mostly: Python is faster than numpy then
            key_n = [(before + (int(tokens_n[0]) + 1) * INVERSES[end]) & MASK]
            keys_PS[table_UP[:, start // size], start % size] = key_n[0]
        else:
            key_n = keys(before, start, tokens_n)
            keys_PS[table_UP[:, self._block_of[start:end]], self._place_of[start:end]] = key_n
        state_n: Any = [0] * len(tokens_n)
        if self._states is not None:
            state = int(self._states[row])
            if end == start + 1:
                state_n = [(state + end * key_n[0]) & MASK]
                if (saved := int(saves_n[0])) >= 0:
                    self._states[saved] = state_n[0]
            else:
                state_n = (COUNTS_L[start + 1 : end + 1] * key_n).cumsum() + np.uint64(state)
                kept = saves_n >= 0
                self._states[saves_n[kept]] = state_n[kept]
        sums_U: list[list[int]] = []
        for window, table_P in zip(self._windows, table_UP, strict=True) if wanted else ():
            low = 0 if window is None else max(0, wanted[0] - window + 1)
            skipped, blocks = low // size * size, table_P[low // size : (end - 1) // size + 1]
            key_l = keys_PS[blocks].ravel()[low - skipped : end - skipped]
            if wanted == [end - 1]:
                sums_U.append([int(np.add.reduce(key_l))])
                continue
            totals = [0, *key_l.cumsum().tolist()]
            lows = [low if window is None else max(low, position + 1 - window) for position in wanted]
            sums_U.append(
                [
                    (totals[position + 1 - low] - totals[lowest - low]) & MASK
                    for position, lowest in zip(wanted, lows, strict=True)
                ]
            )
        for i, position in enumerate(wanted):
            n = position - start
            yield int(key_n[n]), [sums[i] for sums in sums_U], int(state_n[n]), position


def windows_of(pool: PagedPool) -> list[int | None]:
    """The window of each block table."""
    return [group.window for group in pool.block_manager.pages.groups for _ in range(group.pages)]
