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
        recent_kind: str,
        durable_quota_granules: int | None,
        compactor: Compactor,
        counters: LifecycleCounters,
    ) -> None:
        self._pool = pool
        self._tree = tree
        self._quota = durable_quota_granules
        # Open pages cannot move: a slab of the Recent kind may have some.
        self._sealed_kinds = tuple(k.name for k in pool.kinds if k.name != recent_kind)
        self._compactor = compactor
        self._counters = counters

    def obtainable(self, kind: str) -> int:
        """Pages of the kind that are free, or will be by eviction and compaction. O(kinds)."""
        return self._pool.attainable(kind, self._sealed_kinds)

    def make(self, kind: str, pages: int, source: int | None = None) -> None:
        """Evicts until `pages` of the kind can be allocated, or raises `OutOfPages`.

        Raises before it evicts anything when eviction cannot suffice. Stops evicting as soon as
        the free pages of other kinds add up to the slabs that are wanted, and names the kind to
        compact: moving pages together is cheaper than losing the cache. Where those pages cannot
        move now, a live request goes on evicting until a slab runs empty; a conversion (of
        `source`, which is never evicted) gives up, since it can be tried again later.

        Pins are broken last, the one that would end first before the others: a pin outranks the
        rest of the cache, never a live request.
        """
        pool = self._pool
        movable = self._sealed_kinds
        while pool.available(kind) < pages:
            if movable and self._compactor.slabs_suffice(kind, pages):
                compactable = self._compactor.kind_to_compact(kind)
                if compactable is not None:
                    raise OutOfPages(kind, compactable)
                if source is not None:
                    raise OutOfPages(kind)
                movable = ()
            if pool.attainable(kind, movable) < pages:
                raise OutOfPages(kind)
            if not self.evict(source) and not self._break_pin():
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
