"""A runner without a model. Its K, V and states are integers that depend on all tokens before them, and a drawn token
depends on every integer that a real model would read: what a pool, a trie or a scheduler does wrong shows as a wrong
token.

Shapes: T tokens of a pass, n tokens of a sequence. All integers are modulo 2 ** 64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from infer.cache.state_manager import ZEROS
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


def _powers(base: int) -> Words:
    return np.fromiter((pow(base, i, 1 << 64) for i in range(LONGEST + 2)), np.uint64, LONGEST + 2)


POWERS, INVERSES = _powers(BASE), _powers(INVERSE)
POSITIONS = np.arange(LONGEST + 1)


def mixed(value: int) -> int:
    """A value's bits, spread (Steele et al., 2014: SplitMix64)."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return value ^ value >> 31


def keys(before: int, start: int, tokens_n: npt.NDArray[np.int64]) -> Words:
    """What stands for K and V of tokens at positions from ``start`` on: a sum over all tokens so far, each times a
    number of its own for its position. ``before`` is the key at the position before them."""
    n = len(tokens_n)
    each_n = (tokens_n + 1).astype(np.uint64) * INVERSES[start + 1 : start + 1 + n]
    return np.cumsum(each_n, dtype=np.uint64) + np.uint64(before)


def drawn(key: int, sums: Sequence[int], state: int, position: int, request: Request) -> int:
    """The token after a position, of what a model reads there: its own key, the sum of keys within each window, and the
    state."""
    value = mixed(key * POWERS[position + 1].item() + request.seed & MASK)
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
            key_n.append((before + (tokens[position] + 1) * INVERSES[position + 1].item()) & MASK)
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


class Executor:
    """A Runner over a paged pool. ``fault`` is called before a pass, and after it has been computed: it may raise."""

    def __init__(self, pool: PagedPool, max_batch_size: int, fault: Callable[[str, Batch], None]) -> None:
        self._pool = pool
        self._fault = fault
        self._windows = windows_of(pool)
        self._size = pool.storage.block_size
        self._block_of, self._place_of = np.divmod(POSITIONS, self._size)
        # One memory for all tables: a page that two of them have shows, too.
        self._keys = np.zeros(keys_of(pool), np.uint64)
        self._states = None
        if pool.state_storage is not None:
            self._states = np.zeros(pool.state_storage.manager.num_rows, np.uint64)
        self._last = np.zeros(max_batch_size, np.int64)
        """The token last drawn for each slot."""

    def launch(self, batch: Batch) -> Launched:
        self._fault("before", batch)
        if batch.decode_only:
            view = self._pool.decode_view(batch.slots)
        else:
            view = self._pool.batched_chunked_prefill_view(batch.slots, batch.starts, batch.lens)
        tokens_T = batch.token_ids_T.copy()
        tokens_T[batch.fed_rows] = self._last[batch.fed_slots]
        read_B, save_T = np.zeros(len(batch.slots), np.int64), None
        if self._states is not None:
            assert view.states is not None
            rows = view.states.rows
            read_B, save_T = rows.read_B.numpy().copy(), rows.save_T.numpy().copy()
        first, hidden = 0, list[Callable[[Request], int]]()
        for b, (start, length) in enumerate(zip(batch.starts, batch.lens, strict=True)):
            part = slice(first, first + length)
            saves = None if save_T is None else save_T[part]
            hidden += self._extend(view, b, start, tokens_T[part], int(read_B[b]), saves)
            first += length
        self._fault("after", batch)
        readers: list[Any] = []
        for readout in batch.readouts:
            assert isinstance(readout, Draw), "nothing else is asked for"
            rows_N = batch.rows_N[readout.first : readout.first + len(readout.of)]
            found = [hidden[row](request) for row, request in zip(rows_N.tolist(), readout.requests, strict=True)]
            last = found if readout.last_M is None else [found[n] for n in readout.last_M]
            self._last[readout.slots_M] = last
            readers.append(lambda found=found: Drawn(list(found), [None] * len(found)))
        return Launched(readers, lambda: None)

    def _extend(
        self, view: Any, b: int, start: int, tokens_n: npt.NDArray[np.int64], row: int, saves_n: Any
    ) -> list[Callable[[Request], int]]:
        """Write the keys of a sequence's new tokens, and its states; for each token, what draws the one after it."""
        end = start + len(tokens_n)
        sums_U: list[Words] = []
        key_n: Words | None = None
        for window, ragged in zip(self._windows, view.raggeds, strict=True):
            table = ragged.block_table_BP[b].numpy()
            low = 0 if window is None else max(0, start - window + 1)
            at = table[self._block_of[low:end]].astype(np.int64) * self._size + self._place_of[low:end]
            if key_n is None:
                before = int(self._keys[at[start - 1 - low]]) if start else 0
                key_n = keys(before, start, tokens_n)
            self._keys[at[start - low :]] = key_n
            totals = np.zeros(len(at) + 1, np.uint64)
            self._keys[at].cumsum(out=totals[1:])
            sums_n = totals[start + 1 - low :]
            if window is not None:
                sums_n = sums_n - totals[np.maximum(low, POSITIONS[start:end] + 1 - window) - low]
            sums_U.append(sums_n)
        assert key_n is not None
        state_n: Words = np.zeros(len(tokens_n), np.uint64)
        if self._states is not None:
            state_n = self._states[row] + np.cumsum(
                POSITIONS[start + 1 : end + 1].astype(np.uint64) * key_n, dtype=np.uint64
            )
            kept = saves_n >= 0
            self._states[saves_n[kept]] = state_n[kept]
            self._states[ZEROS] = 0
        sums_Un = [sums.tolist() for sums in sums_U]
        read = zip(key_n.tolist(), zip(*sums_Un, strict=True), state_n.tolist(), range(start, end), strict=True)
        return [functools.partial(drawn, *each) for each in read]


def keys_of(pool: PagedPool) -> int:
    """How many positions the pool's memory has."""
    first = pool.storage.k[0]
    assert isinstance(first, Tensor)
    return len(first) * pool.storage.block_size


def windows_of(pool: PagedPool) -> list[int | None]:
    """The window of each block table."""
    return [group.window for group in pool.block_manager.pages.groups for _ in range(group.pages)]
