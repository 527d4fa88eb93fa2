"""What keeps nodes from eviction: locks of live requests, and pins with a time to live."""

from __future__ import annotations

import heapq

from minima_radix.node import Node


class Protection:
    """Locks and pins, with counters of pages that are always exact.

    A lock or pin of a node protects the whole path to it, and is counted in every node of the
    path. The pins are a heap by end; a pin that was ended or renewed leaves an outdated entry.
    """

    def __init__(self) -> None:
        self.locked_pages = 0
        self.pinned_pages = 0
        self.protected_pages = 0
        """Locked or pinned."""
        self._pins: list[tuple[float, int, Node]] = []
        self._pushes = 0

    @property
    def may_have_pins(self) -> bool:
        """False when there is certainly no pin."""
        return bool(self._pins)

    def lock(self, node: Node, above: Node | None = None) -> None:
        """Locks the path to `node`, or only its part below `above`."""
        self._change(node, above, 1, 0)

    def unlock(self, node: Node) -> None:
        """Takes back a lock of the path to `node`."""
        self._change(node, None, -1, 0)

    def pin(self, node: Node, until: float) -> None:
        """Pins the path to `node`, or sets another end for the pin that ends there."""
        if node.pinned_until is None:
            self._change(node, None, 0, 1)
        node.pinned_until = until
        self._pushes += 1
        heapq.heappush(self._pins, (until, self._pushes, node))

    def unpin(self, node: Node) -> None:
        """Ends the pin that ends at `node`."""
        node.pinned_until = None
        self._change(node, None, 0, -1)

    def first_pin(self) -> Node | None:
        """The node at which the pin ends that expires before all others."""
        while self._pins:
            until, _, node = self._pins[0]
            if node.pinned_until == until:
                return node
            heapq.heappop(self._pins)
        return None

    def grown(self, node: Node, pages: int) -> None:
        """Counts pages that were added to a node."""
        if node.lock_count:
            self.locked_pages += pages
        if node.pin_count:
            self.pinned_pages += pages
        if node.lock_count or node.pin_count:
            self.protected_pages += pages

    def _change(self, node: Node, above: Node | None, locks: int, pins: int) -> None:
        for step in node.path():
            if step is above:
                return
            self.grown(step, -len(step.pages))
            step.lock_count += locks
            step.pin_count += pins
            self.grown(step, len(step.pages))
