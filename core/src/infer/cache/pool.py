"""A cache pool, made of books and a storage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np

from infer.cache.books import BlockBooks, BooksProtocol, SharingBooks
from infer.cache.storage import StorageProtocol
from infer.contracts.cache import Allocation, KVCacheView, MappedPool, TruncatingPool

Table = TypeVar("Table")
View = TypeVar("View", bound=KVCacheView)


class Pool(Generic[Table, View]):
    """A ``CachePoolProtocol`` made of books and of a storage that understands their tables. It shares tokens only if
    the books are SharingBooks whose ``shares``, if they have it, is not False. It is a TruncatingPool or a MappedPool
    only if the books have what these have."""

    def __init__(self, books: BooksProtocol[Table], storage: StorageProtocol[Table, View]) -> None:
        self.books = books
        self.storage = storage
        self.grow = books.grow
        self.free = books.free
        self.free_tokens = books.free_tokens
        self.length = books.length
        if isinstance(books, BlockBooks):
            self.room: Sequence[int] = books.room
        if isinstance(books, TruncatingPool):
            self.truncate = books.truncate
        if isinstance(books, MappedPool):
            self.states = books.states
        self._slots: Sequence[int] = []
        """The slots of the last ``decode_view``."""
        self._slots_B = np.zeros(0, dtype=np.int64)
        self._sharing = books if isinstance(books, SharingBooks) and getattr(books, "shares", True) else None
        self.shares = self._sharing is not None

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes

    def allocate(self, token_ids: Sequence[int], *, reuse: bool = True, salt: str = "") -> Allocation | None:
        if self._sharing is None:
            return self.books.allocate(token_ids)
        return self._sharing.allocate(token_ids, reuse=reuse, salt=salt)

    def commit(self, slot: int, token_ids: Sequence[int], num_computed: int) -> None:
        if self._sharing is not None:
            self._sharing.commit(slot, token_ids, num_computed)

    def batched_chunked_prefill_view(
        self, slots: Sequence[int], start_positions: Sequence[int], chunk_lens: Sequence[int]
    ) -> View:
        longest = self.books.extend(slots, start_positions, chunk_lens)
        return self.storage.view(self.books.table(slots, longest), start_positions, chunk_lens)

    def decode_view(self, slots: Sequence[int], rows: int | None = None) -> View:
        if slots != self._slots:
            self._slots = list(slots)
            self._slots_B = np.fromiter(slots, np.int64, len(slots))
        slots_B = self._slots_B
        starts_B, longest = self.books.advance(slots_B)
        if rows is None:
            return self.storage.view(self.books.table(slots_B, longest), starts_B, np.ones_like(starts_B))
        if padding := rows - len(slots):
            slots_B, starts_B = (np.concatenate([x, np.repeat(x[-1:], padding)]) for x in (slots_B, starts_B))
        return self.storage.fixed_view(self.books.table(slots_B, longest), starts_B)
