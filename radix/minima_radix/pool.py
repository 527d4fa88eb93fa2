"""PagePool: slabs of one arena, pages of several kinds, references by holder.

An address counts granules, a unit whose bytes only the owner of the arena knows. A page id *is*
the address of its first granule. A slab belongs to one kind at a time and returns to the common
pool with its last page, so memory flows between kinds as the mix changes.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from minima_radix.references import PageRecord, PageReferences
from minima_radix.slabs import KindBook, PageKindSpec, PoolStats, Slab, choose_slab_granules
from minima_radix.types import OutOfPages, PageReferenceError, ReferenceKind

_CACHE = ReferenceKind.CACHE
_READER = ReferenceKind.READER


class ReadLease(NamedTuple):
    """A batch in flight. Holds every page that a request or conversion held when it was opened."""

    id: int


class PagePool:
    """Allocates pages and counts who holds them.

    Args:
        kinds: the page kinds; names are unique.
        total_granules: size of the arena.
        slab_granules: size of a slab; None chooses it (see `choose_slab_granules`).
    """

    def __init__(
        self,
        kinds: Sequence[PageKindSpec],
        total_granules: int,
        slab_granules: int | None = None,
    ) -> None:
        if slab_granules is None:
            slab_granules = choose_slab_granules(kinds, total_granules)
        if len({kind.name for kind in kinds}) != len(kinds):
            raise ValueError("page kinds must have unique names")
        if not kinds or max(kind.granules for kind in kinds) > slab_granules:
            raise ValueError("a slab must hold at least one page of every kind")
        if total_granules < slab_granules:
            raise ValueError("the arena must hold at least one slab")
        self.kinds = tuple(kinds)
        self.total_granules = total_granules
        self.slab_granules = slab_granules
        self._books = {kind.name: KindBook(kind, slab_granules) for kind in kinds}
        self._kind_index = {kind.name: index for index, kind in enumerate(kinds)}
        self._slabs = [Slab(i * slab_granules) for i in range(total_granules // slab_granules)]
        self.slab_kinds = array("b", [-1]) * len(self._slabs)
        """Index into `kinds` of each slab, -1 for a free one: the kind of an allocated page is
        `slab_kinds[page // slab_granules]`. Only the pool writes it; it never moves in memory."""
        self._free_slabs = list(range(len(self._slabs)))  # ascending: already a heap
        self._pages: dict[int, PageRecord] = {}
        self._leases: dict[int, None] = {}  # open leases, oldest first
        self._last_lease = 0
        self._limbo: list[tuple[int, int]] = []  # heap of (read_until, page)

    # ---- pages

    def allocate(self, kind: str, reference: ReferenceKind, holder: int) -> int:
        """Takes a page of the lowest slab that has one, so that high slabs run empty.

        The page comes with one reference: it is never unowned. Raises `OutOfPages`.
        """
        book = self._book(kind)
        record = self._owned(book, reference, holder)
        index = book.lowest_open_slab(self._slabs)
        if index is None:
            if not self._free_slabs:
                raise OutOfPages(kind)
            index = heapq.heappop(self._free_slabs)
            book.add_slab(index, self._slabs[index])
            self.slab_kinds[index] = self._kind_index[kind]
        return self._take(record, index)

    def allocate_beside(self, page: int, reference: ReferenceKind, holder: int) -> int:
        """Takes a page of the same kind in the fullest *other* slab of that kind (compaction).

        Never opens a new slab: that would gain nothing. Raises `OutOfPages`.
        """
        book = self._record(page).book
        record = self._owned(book, reference, holder)
        best: int | None = None
        for index in book.slabs:
            slab = self._slabs[index]
            if slab.used == book.per_slab or index == page // self.slab_granules:
                continue
            if best is None or slab.used > self._slabs[best].used:
                best = index
        if best is None:
            raise OutOfPages(book.spec.name)
        return self._take(record, best)

    def acquire(self, page: int, reference: ReferenceKind, holder: int) -> None:
        """Adds a reference to a page that is held already.

        Raises `PageReferenceError` when the holder has this reference, or when the page is free
        or only kept for readers.
        """
        record = self._record(page)
        before = record.state()
        if before is _READER:
            raise PageReferenceError(f"page {page} is only kept for readers")
        record.attach(page, reference, holder)
        after = record.state()
        if after is not before:
            self._restate(page, record.book, before, after)

    def release(self, page: int, reference: ReferenceKind, holder: int) -> None:
        """Drops a reference; with the last one the page is free, once no open lease may read it.

        Raises `PageReferenceError` when the holder does not have this reference.
        """
        record = self._record(page)
        before = record.state()
        record.detach(page, reference, holder)
        if reference is not _CACHE and not record.requests and not record.conversions:
            record.read_until = self._last_lease
        after = record.state()
        if after is before:
            return
        self._restate(page, record.book, before, after)
        if after is _READER:
            if self._leases and next(iter(self._leases)) <= record.read_until:
                heapq.heappush(self._limbo, (record.read_until, page))
            else:
                self._free(page)

    # ---- readers

    def begin_read(self) -> ReadLease:
        """Opens a lease for a batch. A batch reads only pages that requests or conversions hold:
        of those none is reused before the lease ends. O(1)."""
        self._last_lease += 1
        self._leases[self._last_lease] = None
        return ReadLease(self._last_lease)

    def end_read(self, lease: ReadLease) -> None:
        """Ends a lease and frees what was kept for it alone. Raises `PageReferenceError` when it
        has ended already."""
        if lease.id not in self._leases:
            raise PageReferenceError(f"read lease {lease.id} is not open")
        del self._leases[lease.id]
        oldest = next(iter(self._leases), self._last_lease + 1)
        while self._limbo and self._limbo[0][0] < oldest:
            self._free(heapq.heappop(self._limbo)[1])

    # ---- questions

    def kind_of(self, page: int) -> str:
        """Kind of an allocated page. Raises `PageReferenceError` for a free one."""
        return self._record(page).book.spec.name

    def granules_of(self, kind: str) -> int:
        """Granules of one page of the kind."""
        return self._book(kind).spec.granules

    def available(self, kind: str) -> int:
        """Pages of the kind that can be allocated now: in its own slabs and in free slabs."""
        book = self._book(kind)
        return book.free + len(self._free_slabs) * book.per_slab

    def attainable(self, kind: str, movable_kinds: Collection[str] = ()) -> int:
        """What `available(kind)` becomes once all pages that only the cache holds are evicted.

        For `movable_kinds`: once the pages that stay are moved together as well. O(kinds).
        """
        own = self._book(kind)
        slabs = len(self._free_slabs)
        for name, book in self._books.items():
            if book is own:
                continue
            if name in movable_kinds:
                staying = book.used - book.states[_CACHE]
                slabs += len(book.slabs) + -staying // book.per_slab
            else:
                slabs += book.evictable_slabs
        return own.free + own.states[_CACHE] + slabs * own.per_slab

    @property
    def free_slabs(self) -> int:
        """Slabs that belong to no kind now."""
        return len(self._free_slabs)

    def free_in_slabs(self, kind: str) -> int:
        """Free pages in the slabs that the kind has."""
        return self._book(kind).free

    def pages_per_slab(self, kind: str) -> int:
        """Pages of the kind that a slab holds."""
        return self._book(kind).per_slab

    def request_holders(self, page: int) -> Collection[int]:
        """Rids of the requests that hold the page."""
        return tuple(self._record(page).requests)

    def conversion_holders(self, page: int) -> Collection[int]:
        """Ids of the conversions and copies that hold the page."""
        return tuple(self._record(page).conversions)

    def is_cached(self, page: int) -> bool:
        """Whether the tree holds the page."""
        return self._record(page).cache is not None

    def is_limbo(self, page: int) -> bool:
        """Whether only leases keep the page."""
        return self._record(page).state() is _READER

    @property
    def cache_only_granules(self) -> int:
        """Granules of the pages that only the cache holds. O(kinds)."""
        return sum(book.states[_CACHE] * book.spec.granules for book in self._books.values())

    def stats(self) -> PoolStats:
        """Where every granule is. O(kinds)."""
        return PoolStats(
            {name: book.stats(self.slab_granules) for name, book in self._books.items()},
            self.slab_granules,
            len(self._free_slabs),
            self.total_granules - len(self._slabs) * self.slab_granules,
            self.total_granules,
        )

    def references(self) -> Iterator[PageReferences]:
        """Every allocated page with its references, in no order. O(pages)."""
        for page, record in self._pages.items():
            yield PageReferences(
                page,
                record.book.spec.name,
                record.requests,
                record.cache is not None,
                record.conversions,
                record.read_until,
            )

    def open_leases(self) -> list[int]:
        """Ids of the open leases, oldest first."""
        return list(self._leases)

    def slabs_by_use(self, kind: str) -> Iterator[list[int]]:
        """Allocated pages of each slab of the kind, sparsest slab first. O(slabs), then O(pages)
        of the slabs that are asked for."""
        book = self._book(kind)
        for slab in sorted((self._slabs[i] for i in book.slabs), key=lambda slab: slab.used):
            yield [page for page in slab.addresses(book) if page in self._pages]

    # ---- internals

    def _book(self, kind: str) -> KindBook:
        try:
            return self._books[kind]
        except KeyError:
            raise ValueError(f"unknown page kind {kind!r}") from None

    def _record(self, page: int) -> PageRecord:
        try:
            return self._pages[page]
        except KeyError:
            raise PageReferenceError(f"page {page} is free") from None

    def _owned(self, book: KindBook, reference: ReferenceKind, holder: int) -> PageRecord:
        record = PageRecord(book)
        record.attach(-1, reference, holder)
        return record

    def _take(self, record: PageRecord, index: int) -> int:
        page = self._slabs[index].take(record.book)
        self._pages[page] = record
        state = record.state()
        record.book.states[state] += 1
        if state is not _CACHE:
            record.book.hold(self._slabs[index])
        return page

    def _restate(
        self, page: int, book: KindBook, before: ReferenceKind, after: ReferenceKind
    ) -> None:
        book.states[before] -= 1
        book.states[after] += 1
        if before is _CACHE:
            book.hold(self._slabs[page // self.slab_granules])
        elif after is _CACHE:
            book.let_go(self._slabs[page // self.slab_granules])

    def _free(self, page: int) -> None:
        book = self._pages.pop(page).book
        book.states[_READER] -= 1
        index = page // self.slab_granules
        book.let_go(self._slabs[index])
        if self._slabs[index].give(page, book):
            book.remove_slab(index)
            self.slab_kinds[index] = -1
            heapq.heappush(self._free_slabs, index)
        else:
            book.reopen(index)
