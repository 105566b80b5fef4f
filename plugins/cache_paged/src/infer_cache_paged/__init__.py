"""A paged KV cache: sequences take small pages as they grow, and share those of common prefixes (Kwon et al., 2023)."""

from __future__ import annotations

from infer import hookimpl
from infer.contracts.cache import CacheContext, CacheFactory, CacheRegistration
from infer.contracts.command import CommandRegistration
from infer.contracts.registration import Registration
from infer_cache_paged.command import COMMAND
from infer_cache_paged.disk import DiskTier
from infer_cache_paged.pool import PagedBlockManager, PagedPool, PagedSettings, longest
from infer_cache_paged.tiered import TieredPool

__all__ = ["PagedBlockManager", "PagedPool", "PagedSettings", "TieredPool", "longest", "make_pool"]

INFER_PLUGIN_API = 2


def make_pool(context: CacheContext, settings: PagedSettings) -> PagedPool:
    """A pool; with a disk behind it if the settings ask for one, and the context says what K and V depend on."""
    if settings.disk is None or context.identity is None:
        return PagedPool(context, settings)
    folder, limit = settings.disk.expanduser(), int(settings.disk_gib * 2**30)
    return TieredPool(context, settings, lambda generation: DiskTier(folder, generation, limit))


@hookimpl
def infer_cache_pools() -> list[Registration[CacheFactory]]:
    return [
        CacheRegistration(
            "paged",
            make_pool,
            "pages on demand, prefixes shared",
            PagedSettings,
            priority=10,
            longest=longest,
            states=True,
            kv_dtypes=("int8",),
        )
    ]


@hookimpl
def infer_commands() -> list[CommandRegistration]:
    return [COMMAND]
