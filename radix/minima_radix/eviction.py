"""Which leaf loses a page first: policies, and the queue that they order.

A policy is one function from a node to a key; the leaf with the smallest key is the victim. A key
must never decrease while its node lives (accesses, hits and priorities only grow): the queue
keeps old keys and corrects them when they come up.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from minima_radix.node import Node

Policy = Callable[[Node], tuple[float, ...]]

_PROTECTED_HITS = 2

_Entry = tuple[Any, ...]
"""The policy's key, then a number that no other entry has, then the node: flat, since a heap of
many leaves spends its time on fetching what it compares."""


def lru(node: Node) -> tuple[float, ...]:
    """Least recently used first."""
    return (node.last_access,)


def lfu(node: Node) -> tuple[float, ...]:
    """Least often hit first, the least recently used of those."""
    return (node.hits, node.last_access)


def slru(node: Node) -> tuple[float, ...]:
    """Two segments: what was hit less than twice goes before everything else, lru in each."""
    return (node.hits >= _PROTECTED_HITS, node.last_access)


def priority(node: Node) -> tuple[float, ...]:
    """Lowest priority of the requests that wrote or hit it first, lru among equals."""
    return (node.priority, node.last_access)


POLICIES: dict[str, Policy] = {"lru": lru, "lfu": lfu, "slru": slru, "priority": priority}


class VictimQueue:
    """A heap that is never rebuilt: each node has at most one entry.

    An entry's key is the node's key when it was pushed, hence a lower bound of the present one;
    an entry that comes up with an old key goes back with the new one. That is paid for by the
    access that changed the key, so `victim` is O(log leaves) amortised.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heap: list[_Entry] = []
        self._pushes = 0
        self.operations = 0
        """Heap operations so far; tests bound them."""

    def __len__(self) -> int:
        return len(self._heap)

    def offer(self, node: Node) -> None:
        """Enters a node that may have become evictable."""
        if not node.queued and node.evictable:
            node.queued = True
            self.operations += 1
            heapq.heappush(self._heap, self._entry(node, self._policy(node)))

    def victim(self, keep: int | None = None) -> Node | None:
        """The evictable node with the smallest key whose last page is not `keep`, or None.

        The node keeps its entry: the next call finds it again while it stays the smallest.
        """
        kept: _Entry | None = None
        found: Node | None = None
        while self._heap and found is None:
            *key, _, node = self._heap[0]
            if not node.evictable:
                node.queued = False
                self._pop()
            elif (now := self._policy(node)) != tuple(key):
                self.operations += 1
                heapq.heapreplace(self._heap, self._entry(node, now))
            elif keep is not None and node.pages[-1] == keep:
                kept = self._pop()  # a page ends at most one node
            else:
                found = node
        if kept is not None:
            self.operations += 1
            heapq.heappush(self._heap, kept)
        return found

    def _entry(self, node: Node, key: tuple[float, ...]) -> _Entry:
        self._pushes += 1
        return (*key, self._pushes, node)

    def _pop(self) -> _Entry:
        self.operations += 1
        return heapq.heappop(self._heap)
