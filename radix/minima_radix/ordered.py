"""A sorted set of byte strings in blocks, so that no change moves more than a block."""

from __future__ import annotations

from bisect import bisect_left, insort

_BLOCK = 512
"""Keys of a block when it is cut in two halves; both are a few hundred machine words."""


class OrderedKeys:
    """Sorted unique keys; adding, removing and finding neighbours take O(log keys) compares.

    A sorted list alone would move half of its entries with every change: with tens of thousands
    of siblings that is most of what an eviction costs.
    """

    __slots__ = ("_blocks", "_first")

    def __init__(self) -> None:
        self._blocks: list[list[bytes]] = []  # none of them empty
        self._first: list[
            bytes
        ] = []  # a lower bound of each block and an upper one of those before

    def __len__(self) -> int:
        return sum(map(len, self._blocks))

    def add(self, key: bytes) -> None:
        """Adds a key that is not there."""
        if not self._blocks:
            self._blocks.append([key])
            self._first.append(b"")
            return
        at = self._block_of(key)
        block = self._blocks[at]
        insort(block, key)
        if len(block) > _BLOCK:
            half = len(block) // 2
            self._blocks.insert(at + 1, block[half:])
            self._first.insert(at + 1, block[half])
            del block[half:]

    def remove(self, key: bytes) -> None:
        """Removes a key that is there."""
        at = self._block_of(key)
        block = self._blocks[at]
        del block[bisect_left(block, key)]
        if not block:
            del self._blocks[at], self._first[at]
            if self._first:
                self._first[0] = b""

    def neighbours(self, key: bytes) -> list[bytes]:
        """The greatest key below `key` and the smallest that is not below it, as far as there."""
        if not self._blocks:
            return []
        at = self._block_of(key)
        block = self._blocks[at]
        place = bisect_left(block, key)
        found = block[max(place - 1, 0) : place + 1]
        if place == 0 and at > 0:
            found.insert(0, self._blocks[at - 1][-1])
        elif place == len(block) and at + 1 < len(self._blocks):
            found.append(self._blocks[at + 1][0])
        return found

    def _block_of(self, key: bytes) -> int:
        """The block that has the key or would take it."""
        at = bisect_left(self._first, key)
        if at == len(self._first) or self._first[at] != key:
            at -= 1
        return max(at, 0)
