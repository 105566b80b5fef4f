"""The parts of a cache pool: books (who has which blocks: integers) and storage (tensors and views)."""

from infer.cache.books import BlockBooks, BooksProtocol, Ints, SharingBooks
from infer.cache.pool import Pool
from infer.cache.storage import ExtendView, KVStorage, StorageProtocol

__all__ = [
    "BlockBooks",
    "BooksProtocol",
    "ExtendView",
    "Ints",
    "KVStorage",
    "Pool",
    "SharingBooks",
    "StorageProtocol",
]
