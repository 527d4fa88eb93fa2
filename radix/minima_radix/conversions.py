"""Retier, promotion and moves within a kind: copy, then publish, then release."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from minima_radix.counters import LifecycleCounters
from minima_radix.pool import PagePool
from minima_radix.room import CACHE_HOLDER, Room
from minima_radix.table import RequestTable
from minima_radix.tree import RadixTree
from minima_radix.types import LifecycleError, OutOfPages, ReferenceKind

_REQUEST = ReferenceKind.REQUEST
_CACHE = ReferenceKind.CACHE
_CONVERSION = ReferenceKind.CONVERSION


class Conversion(NamedTuple):
    """A sealed page that is being written again in another kind or place."""

    id: int
    """Holder id of its references on source and destination."""
    source: int
    destination: int
    position: int
    """Index of the page in its sequence, in pages."""
    kind: str
    """Kind of the destination."""


class Converter:
    """Begins, publishes and cancels conversions; `in_flight` has at most one of each source."""

    def __init__(
        self,
        pool: PagePool,
        tree: RadixTree | None,
        tables: dict[int, RequestTable],
        in_flight: dict[int, Conversion],
        room: Room,
        holder_ids: Iterator[int],
        counters: LifecycleCounters,
    ) -> None:
        self._pool = pool
        self._tree = tree
        self._tables = tables
        self._in_flight = in_flight
        self._room = room
        self._holder_ids = holder_ids
        self._counters = counters

    def begin(self, page: int, position: int, kind: str) -> Conversion:
        """Holds the source, then allocates the destination."""
        if page in self._in_flight:
            raise LifecycleError(f"page {page} is being converted already")
        if not self._is_sealed_at(page, position):
            raise LifecycleError(f"page {page} is not sealed at position {position}")
        holder = next(self._holder_ids)
        self._pool.acquire(page, _CONVERSION, holder)
        try:
            if kind == self._pool.kind_of(page):
                destination = self._pool.allocate_beside(page, _CONVERSION, holder)
            else:
                self._room.make(kind, 1, source=page)
                destination = self._pool.allocate(kind, _CONVERSION, holder)
        except OutOfPages:
            self._pool.release(page, _CONVERSION, holder)
            raise
        conversion = Conversion(holder, page, destination, position, kind)
        self._in_flight[page] = conversion
        return conversion

    def publish(self, conversion: Conversion) -> bool:
        """Exchanges the page everywhere, then lets go of both."""
        pool, source, destination = self._pool, conversion.source, conversion.destination
        self._end(conversion)
        holders = pool.request_holders(source)
        cached = pool.is_cached(source)
        for rid in holders:
            pool.acquire(destination, _REQUEST, rid)
            self._tables[rid].pages[conversion.position] = destination
            pool.release(source, _REQUEST, rid)
        if cached and self._tree is not None:
            pool.acquire(destination, _CACHE, CACHE_HOLDER)
            self._tree.replace(source, conversion.position, destination)
            pool.release(source, _CACHE, CACHE_HOLDER)
        published = bool(holders) or cached
        if published:
            self._count(pool.kind_of(source), conversion.kind)
        self._drop(conversion)
        return published

    def cancel(self, conversion: Conversion) -> None:
        """Lets go of both pages."""
        self._end(conversion)
        self._drop(conversion)

    def _end(self, conversion: Conversion) -> None:
        if self._in_flight.get(conversion.source) != conversion:
            raise LifecycleError(f"conversion {conversion.id} is not in flight")
        del self._in_flight[conversion.source]

    def _drop(self, conversion: Conversion) -> None:
        self._pool.release(conversion.source, _CONVERSION, conversion.id)
        self._pool.release(conversion.destination, _CONVERSION, conversion.id)

    def _count(self, source_kind: str, kind: str) -> None:
        self._counters.retiered_pages[source_kind, kind] += 1
        self._counters.compacted_pages += source_kind == kind

    def _is_sealed_at(self, page: int, position: int) -> bool:
        if self._tree is not None and page in self._tree:
            return self._tree.is_at(page, position)
        tables = [self._tables[rid] for rid in self._pool.request_holders(page)]
        return any(
            0 <= position < table.sealed_pages and table.pages[position] == page for table in tables
        )
