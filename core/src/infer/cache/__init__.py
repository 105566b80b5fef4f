"""The parts of a cache pool: a block manager (who has which blocks: integers) and a storage (tensors and views)."""

from infer.cache.arrays import Ints
from infer.cache.block_manager import BlockManager, BlockManagerProtocol, SharingBlockManager
from infer.cache.pool import Pool
from infer.cache.state_manager import StateManager
from infer.cache.states import StateStorage
from infer.cache.storage import ExtendView, KVStorage, StorageProtocol

__all__ = [
    "BlockManager",
    "BlockManagerProtocol",
    "ExtendView",
    "Ints",
    "KVStorage",
    "Pool",
    "SharingBlockManager",
    "StateManager",
    "StateStorage",
    "StorageProtocol",
]
