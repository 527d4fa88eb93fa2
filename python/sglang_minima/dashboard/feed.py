"""Keeps the latest survey of the tree, and asks for another only when somebody looks."""

from __future__ import annotations

import asyncio
import time

from sglang_minima.dashboard.tree_view import TreeSnapshot
from sglang_minima.entrypoints.errors import HttpError
from sglang_minima.tokenization.manager import TokenizerManager

_MIN_AGE = 2.0
_STALE = 8.0
_LONGEST = 120.0
_PATIENCE = 20.0
"""Seconds to wait for a survey."""
_REST = 4.0
"""A survey may begin when the last one is older than this many times what it took."""


class TreeFeed:
    """The tree as it was a moment ago, at a bounded cost for the scheduler."""

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager
        self._latest: TreeSnapshot | None = None
        self._refresh: asyncio.Task[None] | None = None

    async def latest(self) -> TreeSnapshot:
        """The latest survey. One that is not quite new is renewed meanwhile; without any, or with
        a very old one, this waits for the next.

        Raises:
            HttpError: 404, the server has no tree.
            EngineDead: the server lost a process.
            TimeoutError: the scheduler did not answer in time.
        """
        snapshot = self._latest
        refreshing = self._refresh is not None and not self._refresh.done()
        if not refreshing and (snapshot is None or self._is_old(snapshot)):
            self._refresh = asyncio.get_running_loop().create_task(self._renew())
            # Nobody may be waiting for it: an error shows when the next one asks.
            self._refresh.add_done_callback(lambda task: task.cancelled() or task.exception())
        if snapshot is None or time.monotonic() - snapshot.taken > _STALE:
            assert self._refresh is not None
            try:
                await asyncio.wait_for(asyncio.shield(self._refresh), _PATIENCE)
            except TimeoutError:
                # A scheduler with very long steps: better the last tree than none.
                if snapshot is None:
                    raise
            snapshot = self._latest
            assert snapshot is not None
        return snapshot

    def close(self) -> None:
        """Stops waiting for a survey."""
        if self._refresh is not None:
            self._refresh.cancel()

    def _is_old(self, snapshot: TreeSnapshot) -> bool:
        return time.monotonic() - snapshot.taken > max(_MIN_AGE, _REST * snapshot.seconds)

    async def _renew(self) -> None:
        reply = await self._manager.control("survey", timeout=_LONGEST)
        if not reply.ok:
            raise HttpError(404, str(reply.value))
        taken = time.monotonic()
        loop = asyncio.get_running_loop()
        self._latest = await loop.run_in_executor(None, TreeSnapshot, reply.value, taken)
