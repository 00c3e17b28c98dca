"""Caches of one layer group that keeps all keys, as most models have."""

from collections.abc import Callable
from typing import Any

from tllm_spec.attention.geometry import KVPool
from tllm_spec.executor.resources.interface import BlockTable, PageGroup
from tllm_spec.executor.resources.kv_cache import KVCacheManager, KVGroup, SpanRoom
from tllm_spec.executor.resources.paged_cache import PagedCache


def cache_of(
    num_pages: int, page_size: int, copy_page: Callable[[int, int], None], **options: Any
) -> PagedCache:
    return PagedCache([PageGroup(num_pages, copy_page)], page_size, **options)


def manager_of(
    pool: KVPool, table: BlockTable, lookahead: int = 0, extra: int = 0
) -> KVCacheManager:
    """With a cache of the pool's pages."""
    cache = cache_of(pool.num_pages, pool.page_size, pool.copy_page, lookahead=lookahead)
    room = SpanRoom(pool.page_size, 0, 0)  # of no group here
    return KVCacheManager(cache, [KVGroup([pool], table)], room, extra_kv_tokens=extra)


def all_are_free(kv: KVCacheManager) -> bool:
    """Whether no request holds a page."""
    return kv.available() == [group.num_pages - 1 for group in kv.cache.groups]
