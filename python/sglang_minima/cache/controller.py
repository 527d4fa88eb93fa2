"""Moves sealed pages between tiers: a bounded number per step, copy before publish.

Positions become candidates when they leave the Recent window of a request (Minima-KV, section
3.1); the conversion is Algorithm 1's Retier. A candidate names a place in the sequence, never a
page: the page may have been replaced or evicted before its turn comes.

The window of a request that has finished is of no use to anybody: its pages follow in idle time,
once a next turn that would take them up has had time to come, and before anything is evicted.
A page that a running request still counts as its window is never converted.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import NamedTuple

from minima_kernels import PageKind
from minima_kernels.transfer import retier
from minima_radix import Conversion, Node, OutOfPages, PageLifecycle
from sglang_minima.cache.arena import KVArena
from sglang_minima.scheduler.request import Request

_COMPACT_PAGES = 32

_QUIET = 2.0
"""Seconds after the end of a request before idle time is spent on its window."""


class _Left(NamedTuple):
    """A window page of a finished request."""

    position: int
    since: float
    """`time.monotonic()` of the end."""


class _Candidate(NamedTuple):
    request: Request
    node: Node | None
    """The tree node that held the position when it became a candidate."""
    position: int


class TierController:
    """Keeps the backlog of pages that should become Stale and converts it bit by bit."""

    def __init__(self, lifecycle: PageLifecycle, arena: KVArena) -> None:
        self._lifecycle = lifecycle
        self._arena = arena
        self._profile = arena.profile
        self._compresses = arena.profile.compresses
        self._backlog: deque[_Candidate] = deque()
        self.seconds = 0.0
        """Time spent converting pages."""
        self._left: dict[int, _Left] = {}
        """By page, the longest finished first."""

    @property
    def backlog(self) -> int:
        """Pages waiting for conversion, those of finished requests with them."""
        return len(self._backlog) + len(self._left)

    @property
    def left(self) -> int:
        """Window pages of finished requests that wait for their conversion (some may be gone)."""
        return len(self._left)

    @property
    def due(self) -> bool:
        """Whether an idle step has something to convert now."""
        if self._backlog:
            return True
        first = next(iter(self._left.values()), None)
        return first is not None and time.monotonic() - first.since >= _QUIET

    def observe(self, request: Request) -> None:
        """Queues the pages of a running request that have left its Recent window."""
        if not self._compresses:
            request.observe_at = sys.maxsize
            return
        table = request.table
        assert table is not None
        page_size = self._arena.geometry.page_size
        end = min(table.sealed_pages, self._profile.stale_end(request.written, page_size))
        for position in range(request.retier_cursor, end):
            if self._is_recent(table.pages[position]):
                self._backlog.append(_Candidate(request, table.node, position))
        request.retier_cursor = max(request.retier_cursor, end)
        request.observe_at = (request.retier_cursor + 1) * page_size + self._profile.window_tokens

    def leave(self, request: Request) -> None:
        """Notes the window of a request that is about to release its pages."""
        table = request.table
        assert table is not None
        if not self._compresses or table.node is None:
            return
        now = time.monotonic()
        for position in range(request.retier_cursor, table.sealed_pages):
            page = table.pages[position]
            if self._is_recent(page):
                self._left.pop(page, None)
                self._left[page] = _Left(position, now)

    def idle_step(self, limit: int) -> int:
        """Converts up to `limit` pages when nothing runs; returns how many."""
        done = self.step(limit)
        return done + self.compress_left(limit - done, _QUIET)

    def compress_left(self, limit: int, quiet: float = 0.0) -> int:
        """Converts up to `limit` window pages of requests that ended `quiet` seconds ago.

        Stops where the copies would cost a cached page. Returns how many were converted.
        """
        conversions: list[Conversion] = []
        before = time.monotonic() - quiet
        pool, stale = self._lifecycle.pool, self._profile.stale.name
        while self._left and len(conversions) < limit and pool.available(stale):
            page, left = next(iter(self._left.items()))
            if left.since > before:
                break
            del self._left[page]
            tree = self._lifecycle.tree
            # The page may have been evicted since, and be another's by now.
            if tree is None or not tree.is_at(page, left.position):
                continue
            if not self._is_recent(page) or self._in_a_window(page, left.position):
                continue
            conversions.append(self._lifecycle.begin_retier(page, left.position, stale))
        self._convert(conversions, self._profile.recent, self._profile.stale)
        return len(conversions)

    def compress_first(self, wanted: int) -> None:
        """Compresses what finished requests left before `wanted` new pages evict anything, as far
        as that gains room and needs no eviction itself.

        A free slab more is made than is wanted: without one nothing can be compressed.
        """
        if not self._compresses:
            return
        pool = self._lifecycle.pool
        recent, stale = self._profile.recent.name, self._profile.stale.name
        per_slab = pool.pages_per_slab(stale)
        gain = per_slab - pool.pages_per_slab(recent)  # of a slab full of compressed pages
        while (missing := wanted + pool.pages_per_slab(recent) - pool.available(recent)) > 0:
            pages = min(missing, pool.free_in_slabs(stale))
            if missing > pages and gain > 0:
                full = max(self.left - pages, 0) // per_slab
                pages += per_slab * min(-(-(missing - pages) // gain), full, pool.free_slabs)
            if not self.compress_left(pages):
                return

    def step(self, limit: int) -> int:
        """Converts up to `limit` pages of the backlog; returns how many were converted."""
        conversions: list[Conversion] = []
        chosen: set[int] = set()
        while self._backlog and len(conversions) < limit:
            candidate = self._backlog.popleft()
            page = self._resolve(candidate)
            # Several requests may have queued a page that they share.
            if page is None or page in chosen or not self._is_recent(page):
                continue
            if self._in_a_window(page, candidate.position):
                continue  # the one whose window it is queues it again
            try:
                conversions.append(
                    self._lifecycle.begin_retier(page, candidate.position, self._profile.stale.name)
                )
            except OutOfPages:
                # No room for the copy now: keep the page as it is, try again later.
                self._backlog.appendleft(candidate)
                break
            chosen.add(page)
        self._convert(conversions, self._profile.recent, self._profile.stale)
        return len(conversions)

    def settle(self, request: Request) -> None:
        """Gives every sealed page of a request the tier of its position (deterministic mode).

        Raises:
            OutOfPages: no room for the converted copy; the pages so far are settled.
        """
        table = request.table
        assert table is not None
        while request.retier_cursor < table.sealed_pages:
            position = request.retier_cursor
            page = table.pages[position]
            target = self._profile.kind_at(position)
            if self._lifecycle.pool.kind_of(page) != target.name:
                conversion = self._lifecycle.begin_retier(page, position, target.name)
                self._convert([conversion], self._profile.recent, target)
            request.retier_cursor = position + 1

    def compact(self, kind_name: str) -> bool:
        """Moves pages of a kind out of a sparse slab so that it becomes free for another kind.

        False when nothing could be moved.
        """
        kind = next(kind for kind in self._profile.kinds if kind.name == kind_name)
        conversions = []
        for page in self._lifecycle.compaction_moves(kind_name, _COMPACT_PAGES):
            position = self._lifecycle.position_of(page)
            try:
                conversions.append(self._lifecycle.begin_retier(page, position, kind_name))
            except OutOfPages:
                break
        self._convert(conversions, kind, kind)
        return bool(conversions)

    def _convert(self, conversions: list[Conversion], source: PageKind, target: PageKind) -> None:
        if not conversions:
            return
        started = time.perf_counter()
        retier(
            self._arena.buffer,
            [conversion.source for conversion in conversions],
            source,
            [conversion.destination for conversion in conversions],
            target,
            self._arena.geometry,
        )
        for conversion in conversions:
            self._lifecycle.publish(conversion)
            left = self._left.pop(conversion.source, None)
            if left is not None and source == target:
                self._left[conversion.destination] = left
        self.seconds += time.perf_counter() - started

    def _in_a_window(self, page: int, position: int) -> bool:
        """Whether a running request counts the page as its window."""
        size = self._arena.geometry.page_size
        tables = self._lifecycle.tables
        return any(
            position >= self._profile.stale_end(tables[rid].committed, size)
            for rid in self._lifecycle.pool.request_holders(page)
        )

    def _is_recent(self, page: int) -> bool:
        return self._lifecycle.pool.kind_of(page) == self._profile.recent.name

    def _resolve(self, candidate: _Candidate) -> int | None:
        """The page at the candidate's place now, or None when the place is gone."""
        table = candidate.request.table
        if table is not None:
            if candidate.position < table.sealed_pages:
                return table.pages[candidate.position]
            return None
        node = candidate.node
        # A split moves the front of a node into a new parent.
        while node is not None and node.parent is not None and candidate.position < node.start:
            node = node.parent
        # A node without a parent has left the tree; one that became shorter lost the page.
        if node is None or node.parent is None or candidate.position >= node.end:
            return None
        return node.pages[candidate.position - node.start]
