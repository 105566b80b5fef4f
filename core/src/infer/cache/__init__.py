"""The parts of a cache pool: block manager (who has which blocks: integers) and storage (tensors and views)."""

from infer.cache.block_manager import BlockManager, BlockManagerProtocol, Ints, SharingBlockManager
from infer.cache.pool import Pool
from infer.cache.storage import ExtendView, KVStorage, StorageProtocol

__all__ = [
    "BlockManager",
    "BlockManagerProtocol",
    "ExtendView",
    "Ints",
    "KVStorage",
    "Pool",
    "SharingBlockManager",
    "StorageProtocol",
]
