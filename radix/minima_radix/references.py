"""References of one page: who holds it, and which of them counts most."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from minima_radix.slabs import KindBook
from minima_radix.types import PageReferenceError, ReferenceKind

_REQUEST = ReferenceKind.REQUEST
_CACHE = ReferenceKind.CACHE
_CONVERSION = ReferenceKind.CONVERSION
_READER = ReferenceKind.READER
_NOBODY: frozenset[int] = frozenset()


class PageReferences(NamedTuple):
    """All references of one page, for checks and dashboards."""

    page: int
    kind: str
    requests: Collection[int]
    cached: bool
    conversions: Collection[int]
    read_until: int
    """Newest lease that may read the page, counted when its last request or conversion left."""


class PageRecord:
    """References of one allocated page.

    `attach` and `detach` take the page's address only for what their errors say.
    """

    __slots__ = ("book", "cache", "conversions", "read_until", "requests")

    def __init__(self, book: KindBook) -> None:
        self.book = book
        self.requests: AbstractSet[int] = _NOBODY
        self.conversions: AbstractSet[int] = _NOBODY
        self.cache: int | None = None
        self.read_until = 0

    def state(self) -> ReferenceKind:
        """The strongest reference: what keeps the page from being evicted or freed."""
        if self.requests:
            return _REQUEST
        if self.conversions:
            return _CONVERSION
        return _READER if self.cache is None else _CACHE

    def attach(self, page: int, reference: ReferenceKind, holder: int) -> None:
        """Adds a reference. Raises `PageReferenceError` when the holder has it already."""
        if reference is _CACHE:
            if self.cache is not None:
                raise PageReferenceError(f"page {page} is in the cache already")
            self.cache = holder
            return
        if reference is _READER:
            raise PageReferenceError("readers hold pages by leases: begin_read()")
        holders = self.requests if reference is _REQUEST else self.conversions
        if holder in holders:
            raise PageReferenceError(f"{reference.name} {holder} holds page {page} already")
        if isinstance(holders, set):
            holders.add(holder)
        elif reference is _REQUEST:
            self.requests = {holder}
        else:
            self.conversions = {holder}

    def detach(self, page: int, reference: ReferenceKind, holder: int) -> None:
        """Drops a reference. Raises `PageReferenceError` when the holder does not have it."""
        if reference is _CACHE and self.cache == holder:
            self.cache = None
            return
        holders = self.requests if reference is _REQUEST else self.conversions
        if reference in (_CACHE, _READER) or not isinstance(holders, set) or holder not in holders:
            raise PageReferenceError(f"{reference.name} {holder} does not hold page {page}")
        holders.remove(holder)
        if not holders:  # most pages have no such holder: the shared empty set costs nothing
            if reference is _REQUEST:
                self.requests = _NOBODY
            else:
                self.conversions = _NOBODY
