"""Which pages to move together so that a slab runs empty and can change its kind."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from minima_radix.pool import PagePool
from minima_radix.table import RequestTable
from minima_radix.tree import RadixTree
from minima_radix.types import LifecycleError


class Compactor:
    """Looks for slabs that can be emptied into the free pages of other slabs of their kind."""

    def __init__(
        self,
        pool: PagePool,
        tree: RadixTree | None,
        tables: Mapping[int, RequestTable],
        converting: Container[int],
    ) -> None:
        self._pool = pool
        self._tree = tree
        self._tables = tables
        self._converting = converting

    def position_of(self, page: int) -> int:
        """Index of a sealed page in its sequence, in pages. Raises `LifecycleError` when the page
        is in no tree and not among the sealed pages of a table."""
        position = None if self._tree is None else self._tree.position_of(page)
        if position is not None:
            return position
        for rid in self._pool.request_holders(page):
            table = self._tables[rid]
            position = table.pages.index(page)
            if position < table.sealed_pages:
                return position
        raise LifecycleError(f"page {page} is not sealed")

    def moves(self, kind: str, max_pages: int) -> list[int]:
        """Pages of the sparsest slab that can be emptied, at most `max_pages`."""
        if self._pool.free_in_slabs(kind) < self._pool.pages_per_slab(kind):
            return []
        for pages in self._pool.slabs_by_use(kind):
            moves = self._moves_of_slab(pages)
            if moves:
                return moves[:max_pages]
        return []

    def slabs_suffice(self, kind: str, pages: int) -> bool:
        """Whether compaction of all other kinds could make `pages` of this kind available."""
        pool = self._pool
        slabs = sum(
            pool.free_in_slabs(other) // pool.pages_per_slab(other) for other in self._others(kind)
        )
        return pool.available(kind) + slabs * pool.pages_per_slab(kind) >= pages

    def kind_to_compact(self, kind: str) -> str | None:
        """Another kind of which a slab can be emptied now, or None."""
        return next((other for other in self._others(kind) if self.moves(other, 1)), None)

    def _others(self, kind: str) -> list[str]:
        return [spec.name for spec in self._pool.kinds if spec.name != kind]

    def _moves_of_slab(self, pages: Sequence[int]) -> list[int]:
        """The pages of a slab that must move to empty it; none when one of them cannot."""
        moves = []
        for page in pages:
            if page in self._converting or self._pool.is_limbo(page):
                continue  # leaves by itself
            if self._pool.conversion_holders(page) or not self._is_sealed(page):
                return []
            moves.append(page)
        return moves

    def _is_sealed(self, page: int) -> bool:
        if self._tree is not None and page in self._tree:
            return True
        tables = [self._tables[rid] for rid in self._pool.request_holders(page)]
        return any(page in table.pages[: table.sealed_pages] for table in tables)
