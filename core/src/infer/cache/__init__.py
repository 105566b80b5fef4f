"""What cache pools are made of: books (integers) and storage (tensors and views)."""

from infer.cache.books import BlockBooks, BooksProtocol, SharingBooks, TruncatingBooks
from infer.cache.pool import Pool
from infer.cache.storage import ExtendView, KVStorage, StorageProtocol

__all__ = [
    "BlockBooks",
    "BooksProtocol",
    "ExtendView",
    "KVStorage",
    "Pool",
    "SharingBooks",
    "StorageProtocol",
    "TruncatingBooks",
]
