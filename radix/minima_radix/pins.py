"""Pins of the tree by the time they end."""

from __future__ import annotations

import heapq

from minima_radix.node import Node


class PinQueue:
    """A heap of pins. A pin that was ended or renewed leaves an outdated entry, skipped later."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Node]] = []
        self._pushes = 0

    def __bool__(self) -> bool:
        return bool(self._heap)

    def push(self, node: Node, until: float) -> None:
        """Sets the time until which the pin that ends at `node` holds."""
        node.pinned_until = until
        self._pushes += 1
        heapq.heappush(self._heap, (until, self._pushes, node))

    def first(self, expired_at: float | None = None) -> Node | None:
        """The pin that ends first; only if it ends by `expired_at` where that is given."""
        while self._heap:
            until, _, node = self._heap[0]
            if node.pinned_until != until:
                heapq.heappop(self._heap)
            elif expired_at is not None and until > expired_at:
                return None
            else:
                return node
        return None
