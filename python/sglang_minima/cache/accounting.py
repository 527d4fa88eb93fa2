"""Where every byte of the arena is, by kind and by who needs it (for /server_info, /metrics)."""

from __future__ import annotations

import dataclasses
from typing import Any

from minima_kernels import BF16, GRANULE, PageKind
from minima_radix import LifecycleCounters
from sglang_minima.cache.prefix_cache import PrefixCache


def _counters(counters: LifecycleCounters) -> dict[str, Any]:
    values = dataclasses.asdict(counters)
    values["retiered_pages"] = {
        f"{source}->{target}": count for (source, target), count in counters.retiered_pages.items()
    }
    return values


def _tiers(cache: PrefixCache) -> dict[str, dict[str, int]]:
    """Pages and bytes by tier. Anchors are known by their position."""
    profile, geometry = cache.profile, cache.arena.geometry
    kinds = cache.pool.stats().kinds
    stale = kinds[profile.stale.name].pages_used if profile.compresses else 0
    if cache.tree is not None:
        anchors = cache.tree.pages_in_heads  # a sealed page is in the tree
    else:
        tables = cache.lifecycle.tables.values()
        anchors = sum(min(profile.anchor_pages, table.sealed_pages) for table in tables)
    recent = kinds[profile.recent.name].pages_used - anchors
    return {
        tier: {"pages": pages, "bytes": pages * kind.bytes_per_page(geometry)}
        for tier, pages, kind in (
            ("recent", recent, profile.recent),
            ("anchor", anchors, profile.recent),
            ("stale", stale, profile.stale),
        )
    }


def report(cache: PrefixCache) -> dict[str, Any]:
    """Pages and bytes by kind; all bytes together are `arena_bytes`."""
    geometry = cache.arena.geometry
    stats = cache.pool.stats()
    raw = PageKind.uniform("bf16", BF16, geometry.num_layers)
    bf16_page = raw.bytes_per_page(geometry)
    kinds: dict[str, Any] = {}
    used_pages = used_bytes = 0
    for kind in cache.profile.kinds:
        entry = stats.kinds[kind.name]
        page_bytes = kind.bytes_per_page(geometry)
        kinds[kind.name] = {
            "pages_used": entry.pages_used,
            "pages_free": entry.pages_free,
            "slabs": entry.slabs,
            "page_bytes": page_bytes,
            "bits_per_value": kind.bits_per_value(geometry),
            "page_bytes_by_part": kind.account(geometry),
            "bytes_used": entry.pages_used * page_bytes,
            "bytes_free": entry.pages_free * page_bytes,
            "bytes_slab_waste": entry.granules_tail * GRANULE,
        }
        used_pages += entry.pages_used
        used_bytes += entry.pages_used * page_bytes
    recent = cache.profile.recent.name
    free_pages = stats.free_slabs * cache.pool.pages_per_slab(recent)
    free_pages += stats.kinds[recent].pages_free
    return {
        "arena_bytes": cache.arena.num_bytes,
        "free_slab_bytes": stats.free_slabs * cache.pool.slab_granules * GRANULE,
        "unassigned_bytes": stats.unassigned_granules * GRANULE,
        "kinds": kinds,
        "tiers": _tiers(cache),
        "pages_used": used_pages,
        "bytes_used": used_bytes,
        "compression_vs_bf16": used_pages * bf16_page / used_bytes if used_bytes else None,
        "pages_in_tree": 0 if cache.tree is None else cache.tree.total_pages,
        "pages_locked": 0 if cache.tree is None else cache.tree.locked_pages,
        "pages_evictable": 0 if cache.tree is None else cache.tree.evictable_pages,
        "tokens_available": free_pages * cache.page_size,
        "retier_backlog": cache.controller.backlog,
        "retier_seconds": cache.controller.seconds,
        "counters": _counters(cache.lifecycle.counters),
        "copied_tokens": cache.copied_tokens,
        "evictions": cache.evictions.snapshot(),
    }
