"""Moves sealed pages between tiers: a bounded number per step, copy before publish.

Positions become candidates when they leave the Recent window of a request (Minima-KV, section
3.1); the conversion is Algorithm 1's Retier. A candidate names a place in the sequence, never a
page: the page may have been replaced or evicted before its turn comes.
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

    @property
    def backlog(self) -> int:
        """Positions waiting for conversion."""
        return len(self._backlog)

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
        self.seconds += time.perf_counter() - started

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
