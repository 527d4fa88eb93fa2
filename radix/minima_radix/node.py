"""A node of the radix tree: a run of whole pages and the tokens that they hold."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from minima_radix.ordered import OrderedKeys
from minima_radix.types import Namespace

TOKEN_BYTES = 4
"""Tokens are compared as the bytes of int32 values: one memcmp for a whole run of pages."""


def token_bytes(tokens: Sequence[int]) -> bytes:
    """The tokens as int32 bytes. Raises OverflowError for an id outside int32."""
    if not (isinstance(tokens, array) and tokens.itemsize == TOKEN_BYTES):
        tokens = array("i", tokens)
    return tokens.tobytes()


def common_tokens(a: bytes | bytearray, b: bytes | bytearray) -> int:
    """Length in tokens of the longest common prefix of two runs of token bytes."""
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size // TOKEN_BYTES
    difference = int.from_bytes(a[:size], "little") ^ int.from_bytes(b[:size], "little")
    lowest_bit = (difference & -difference).bit_length() - 1
    return lowest_bit // (8 * TOKEN_BYTES)


class Node:
    """A run of pages. The root of a namespace is the one node without pages and parent.

    Invariants: every child begins with another first page; `start` is the number of pages above;
    `lock_count` and `pin_count` count the locks and pins of the node and of all nodes below.
    """

    __slots__ = (
        "_keys",
        "children",
        "derived",
        "hits",
        "key",
        "last_access",
        "lock_count",
        "namespace",
        "pages",
        "parent",
        "pin_count",
        "pinned_until",
        "priority",
        "queued",
        "start",
    )

    def __init__(
        self,
        namespace: Namespace,
        parent: Node | None,
        start: int,
        key: bytes | bytearray,
        pages: Sequence[int],
    ) -> None:
        self.namespace = namespace
        self.parent = parent
        self.start = start
        self.key = bytearray(key)
        self.pages = array("q", pages)
        self.children: dict[bytes, Node] = {}
        self._keys: OrderedKeys | None = None  # first pages of the children; None without any
        self.derived: Any = None
        """What somebody who reads `pages` has worked out from them; None again once they change."""
        self.last_access = 0.0
        self.hits = 0
        self.priority = 0
        self.lock_count = 0
        self.pin_count = 0
        self.pinned_until: float | None = None
        """Clock time until which a pin that ends exactly here holds; None = no such pin."""
        self.queued = False
        """Whether the victim queue has an entry of this node."""

    @property
    def end(self) -> int:
        """Number of pages from the root to the end of this node."""
        return self.start + len(self.pages)

    @property
    def evictable(self) -> bool:
        """Whether the last page may go: a leaf that nobody locked or pinned."""
        return not (self.children or self.lock_count or self.pin_count or self.parent is None)

    def add_child(self, first_page: bytes, child: Node) -> None:
        """Adds a child whose first page is new. O(log children) compares."""
        self.children[first_page] = child
        if self._keys is None:
            self._keys = OrderedKeys()
        self._keys.add(first_page)

    def remove_child(self, first_page: bytes) -> None:
        """Removes a child by its first page. O(log children) compares."""
        del self.children[first_page]
        assert self._keys is not None
        if self.children:
            self._keys.remove(first_page)
        else:
            self._keys = None

    def nearest_child(self, tokens: bytes) -> tuple[Node, int] | None:
        """The child whose first page shares the longest prefix with `tokens`, and its length.

        In sorted order that child is next to where `tokens` would stand: O(log children).
        None when no child shares a token.
        """
        if self._keys is None:
            return None
        best: tuple[bytes, int] | None = None
        for key in self._keys.neighbours(tokens):
            shared = common_tokens(key, tokens)
            if shared and (best is None or shared > best[1]):
                best = (key, shared)
        return None if best is None else (self.children[best[0]], best[1])

    def common_pages(self, tokens: bytes, offset: int, page_bytes: int) -> int:
        """Leading whole pages of this node equal to `tokens` from byte `offset` on."""
        key = self.key
        high = min(len(key), (len(tokens) - offset) // page_bytes * page_bytes)
        if high == len(key) and tokens.startswith(key, offset):
            return high // page_bytes
        low, high = 0, high // page_bytes
        while low < high:  # the first `low` pages are equal, page `high` is out of the question
            middle = (low + high + 1) // 2
            part = key[low * page_bytes : middle * page_bytes]
            if tokens.startswith(part, offset + low * page_bytes):
                low = middle
            else:
                high = middle - 1
        return low

    def descend(self, tokens: bytes, page_bytes: int) -> Iterator[tuple[Node, int]]:
        """The nodes below this one along `tokens`, each with its number of equal whole pages."""
        node, offset = self, 0
        while len(tokens) - offset >= page_bytes:
            child = node.children.get(tokens[offset : offset + page_bytes])
            if child is None:
                return
            taken = child.common_pages(tokens, offset, page_bytes)
            whole = taken == len(child.pages)
            yield child, taken
            if not whole:
                return
            offset += taken * page_bytes
            node = child

    def touch(self, now: float, priority: int) -> None:
        """Notes an access."""
        self.last_access = now
        self.priority = max(self.priority, priority)

    def may_grow(self, own_locks: int) -> bool:
        """Whether pages may be added here: a leaf that is used by nobody but whoever has
        `own_locks` of its locks."""
        return (
            self.parent is not None
            and not self.children
            and self.lock_count <= own_locks
            and not self.pin_count
        )

    def split(self, count: int, page_bytes: int) -> Node:
        """Cuts the node after `count` pages; returns the new upper part.

        The lower part keeps its identity, since locks, pins and queue entries mean its end.
        """
        parent = self.parent
        assert parent is not None and 0 < count < len(self.pages)
        head = count * page_bytes
        upper = Node(self.namespace, parent, self.start, self.key[:head], self.pages[:count])
        upper.last_access, upper.hits, upper.priority = self.last_access, self.hits, self.priority
        upper.lock_count, upper.pin_count = self.lock_count, self.pin_count
        parent.children[bytes(self.key[:page_bytes])] = upper
        del self.key[:head]
        del self.pages[:count]
        self.derived = None
        self.start += count
        self.parent = upper
        upper.add_child(bytes(self.key[:page_bytes]), self)
        return upper

    def path(self) -> Iterator[Node]:
        """This node and the nodes above it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent
