"""Making room: eviction on demand, the durable quota, flush."""

from __future__ import annotations

from minima_radix.compaction import Compactor
from minima_radix.counters import LifecycleCounters
from minima_radix.pool import PagePool
from minima_radix.tree import RadixTree
from minima_radix.types import OutOfPages, ReferenceKind

CACHE_HOLDER = 0
"""Holder id of the tree's references."""


class Room:
    """Takes pages from the cache, and only from it."""

    def __init__(
        self,
        pool: PagePool,
        tree: RadixTree | None,
        durable_quota_granules: int | None,
        compactor: Compactor,
        counters: LifecycleCounters,
    ) -> None:
        self._pool = pool
        self._tree = tree
        self._quota = durable_quota_granules
        self._compactor = compactor
        self._counters = counters

    def make(self, kind: str, pages: int, keep: int | None = None) -> None:
        """Evicts until `pages` of the kind can be allocated; never the page `keep`.

        Stops evicting and raises `OutOfPages` with a `compactable_kind` as soon as the free pages
        of the other kinds add up to the slabs that are wanted: moving those pages together is
        cheaper than losing the cache. Raises at once, evicting nothing, when eviction cannot
        suffice. Pins are broken last, the one that would end first before the others: a pin
        outranks the rest of the cache, never a live request.
        """
        pool = self._pool
        hopeless = False  # looking for pages to move is not free: once is enough
        while pool.available(kind) < pages:
            if pool.attainable(kind) < pages:
                raise OutOfPages(kind)
            if not hopeless and self._compactor.slabs_suffice(kind, pages):
                compactable = self._compactor.kind_to_compact(kind)
                if compactable is not None:
                    raise OutOfPages(kind, compactable)
                hopeless = True
            if not self.evict(keep) and not self._break_pin():
                raise OutOfPages(kind)

    def evict(self, keep: int | None = None) -> bool:
        """Drops the cache's reference of one victim; False when there is none."""
        evicted = None if self._tree is None else self._tree.evict_page(keep)
        if evicted is None:
            return False
        self._pool.release(evicted.page, ReferenceKind.CACHE, CACHE_HOLDER)
        self._counters.evicted_pages += 1
        return True

    def enforce_quota(self) -> None:
        """Evicts until the cache alone holds no more than its quota (pins may exceed it)."""
        if self._quota is not None:
            while self._pool.cache_only_granules > self._quota and self.evict():
                pass

    def flush(self) -> int:
        """Ends all pins and evicts all that no request has locked; returns the pages evicted."""
        pages = 0
        if self._tree is not None:
            while self._tree.break_pin():
                pass
            while self.evict():
                pages += 1
        return pages

    def _break_pin(self) -> bool:
        if self._tree is None or not self._tree.break_pin():
            return False
        self._counters.broken_pins += 1
        return True
