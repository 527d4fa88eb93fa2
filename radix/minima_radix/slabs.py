"""Slabs and the book that the pool keeps of each page kind."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from minima_radix.types import ReferenceKind

_WANTED_SLABS = 16


@dataclass(frozen=True)
class PageKindSpec:
    """A page kind as the pool sees it: a name and a size in granules."""

    name: str
    granules: int

    def __post_init__(self) -> None:
        if self.granules < 1:
            raise ValueError(f"a page of kind {self.name} must have at least one granule")


def choose_slab_granules(
    kinds: Sequence[PageKindSpec], total_granules: int, max_waste: float = 0.02
) -> int:
    """The smallest slab whose unusable tail is at most `max_waste` of it for every kind.

    At least about 16 slabs are kept; when no such slab is small enough for that, the slab with
    the least waste among those that are. Raises ValueError when the arena is smaller than the
    largest page.
    """
    largest = max(kind.granules for kind in kinds)
    if total_granules < largest:
        raise ValueError(f"{total_granules} granules do not hold a page of {largest}")
    limit = max(largest, total_granules // _WANTED_SLABS)
    sizes = {kind.granules for kind in kinds}

    def waste(slab: int) -> float:
        return max(slab % size for size in sizes) / slab

    best = largest
    # Shrinking a slab by one granule shrinks the tails of all kinds, except where it is a whole
    # number of pages of some kind: only those sizes can be the smallest. The first good one comes
    # no later than largest / max_waste.
    multiples = [range(-(-largest // size) * size, limit + 1, size) for size in sizes]
    for slab in heapq.merge(*multiples):
        if waste(slab) <= max_waste:
            return slab
        if waste(slab) < waste(best):
            best = slab
    return best


class KindStats(NamedTuple):
    """Where the memory of one kind is. Pages by strongest reference sum to `pages_used`."""

    page_granules: int
    slabs: int
    pages_used: int
    pages_free: int
    granules_used: int
    granules_free: int
    granules_tail: int
    """Ends of the slabs that are too short for a page."""
    request_pages: int
    """Held by at least one live request."""
    cache_pages: int
    """Held by the cache alone: what eviction may take."""
    conversion_pages: int
    """Held by a conversion or a copy, and by no request."""
    reader_pages: int
    """Kept only until the batches in flight are done."""
    evictable_slabs: int
    """Slabs whose pages are all held by the cache alone: eviction can give them back."""


class PoolStats(NamedTuple):
    """Where every granule of the arena is: the parts sum exactly to `total_granules`."""

    kinds: dict[str, KindStats]
    slab_granules: int
    free_slabs: int
    unassigned_granules: int
    """Tail of the arena that is too short for a slab."""
    total_granules: int

    @property
    def accounted_granules(self) -> int:
        """Sum of all parts."""
        in_kinds = sum(
            k.granules_used + k.granules_free + k.granules_tail for k in self.kinds.values()
        )
        return in_kinds + self.free_slabs * self.slab_granules + self.unassigned_granules


class Slab:
    """A run of granules that belongs to one kind, or to none."""

    __slots__ = ("base", "free", "fresh", "held", "used")

    def __init__(self, base: int) -> None:
        self.base = base
        self.used = 0
        self.held = 0  # pages that somebody besides the cache holds
        self.fresh = 0  # pages from this index on were never taken since the slab was empty
        self.free: list[int] = []

    def take(self, book: KindBook) -> int:
        """An unused page of the slab; the slab must have one."""
        self.used += 1
        book.used += 1
        if self.free:
            return self.free.pop()
        page = self.base + self.fresh * book.spec.granules
        self.fresh += 1
        return page

    def give(self, page: int, book: KindBook) -> bool:
        """Takes a page back; True when the slab has become empty."""
        self.used -= 1
        book.used -= 1
        if self.used:
            self.free.append(page)
            return False
        self.free.clear()
        self.fresh = 0
        return True

    def addresses(self, book: KindBook) -> range:
        """Every address that a page may have since the slab was last empty."""
        step = book.spec.granules
        return range(self.base, self.base + self.fresh * step, step)


class KindBook:
    """What the pool knows about one kind: its slabs, and its pages by strongest reference."""

    def __init__(self, spec: PageKindSpec, slab_granules: int) -> None:
        self.spec = spec
        self.per_slab = slab_granules // spec.granules
        self.slabs: set[int] = set()
        self.used = 0
        self.evictable_slabs = 0
        self.states = [0] * len(ReferenceKind)
        self._open: list[int] = []  # heap of slab indices; may hold full or lost slabs
        self._queued: set[int] = set()  # the members of that heap, each once

    @property
    def free(self) -> int:
        """Free pages in the slabs of the kind."""
        return len(self.slabs) * self.per_slab - self.used

    def lowest_open_slab(self, slabs: Sequence[Slab]) -> int | None:
        """Index of the lowest slab of the kind with a free page. Amortised O(log slabs)."""
        while self._open:
            index = self._open[0]
            if index in self.slabs and slabs[index].used < self.per_slab:
                return index
            self._queued.remove(heapq.heappop(self._open))
        return None

    def add_slab(self, index: int, slab: Slab) -> None:
        """Gives the kind an empty slab."""
        assert slab.used == 0 and slab.held == 0
        self.slabs.add(index)
        self.evictable_slabs += 1
        self.reopen(index)

    def remove_slab(self, index: int) -> None:
        """Takes a slab that has become empty away from the kind."""
        self.slabs.remove(index)
        self.evictable_slabs -= 1

    def hold(self, slab: Slab) -> None:
        """Counts a page of the slab that from now on not only the cache holds."""
        self.evictable_slabs -= slab.held == 0
        slab.held += 1

    def let_go(self, slab: Slab) -> None:
        """Counts a page of the slab that from now on only the cache holds, or nobody."""
        slab.held -= 1
        self.evictable_slabs += slab.held == 0

    def reopen(self, index: int) -> None:
        """Notes that the slab has a free page."""
        if index not in self._queued:
            self._queued.add(index)
            heapq.heappush(self._open, index)

    def stats(self, slab_granules: int) -> KindStats:
        """The book as numbers."""
        size = self.spec.granules
        return KindStats(
            page_granules=size,
            slabs=len(self.slabs),
            pages_used=self.used,
            pages_free=self.free,
            granules_used=self.used * size,
            granules_free=self.free * size,
            granules_tail=len(self.slabs) * (slab_granules - self.per_slab * size),
            request_pages=self.states[ReferenceKind.REQUEST],
            cache_pages=self.states[ReferenceKind.CACHE],
            conversion_pages=self.states[ReferenceKind.CONVERSION],
            reader_pages=self.states[ReferenceKind.READER],
            evictable_slabs=self.evictable_slabs,
        )
