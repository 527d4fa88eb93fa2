"""RadixTree: page-aligned edges over token ids, one root per namespace.

The tree knows pages only as integers: `PageLifecycle` takes and drops their references. Nothing
here costs time proportional to the number of cached prefixes, except `walk`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat

from minima_radix.eviction import POLICIES, VictimQueue
from minima_radix.node import TOKEN_BYTES, Node, common_tokens, token_bytes
from minima_radix.protection import Protection
from minima_radix.results import EvictedPage, InsertResult, MatchResult
from minima_radix.types import LifecycleError, Namespace


class RadixTree:
    """The prefix cache's index.

    Args:
        page_size: tokens of a page.
        policy: name of an eviction policy (see `eviction.POLICIES`).
        clock: seconds, never running backwards; times of access and of pins.
        head_pages: positions before this one are counted apart (see `pages_in_heads`).
    """

    def __init__(
        self,
        page_size: int,
        policy: str = "lru",
        clock: Callable[[], float] = time.monotonic,
        head_pages: int = 0,
    ) -> None:
        if page_size < 1:
            raise ValueError("page_size must be at least 1")
        if policy not in POLICIES:
            raise ValueError(f"unknown eviction policy {policy!r}; known: {', '.join(POLICIES)}")
        self.page_size = page_size
        self.policy = policy
        self.head_pages = head_pages
        self.pages_in_heads = 0
        """Pages in the tree with less than `head_pages` pages above them."""
        self.splits = 0
        """Times that a node was cut: as long as it stays, no node has got another parent."""
        self._clock = clock
        self._page_bytes = page_size * TOKEN_BYTES
        self._roots: dict[Namespace, Node] = {}
        self._node_of: dict[int, Node] = {}
        self._victims = VictimQueue(POLICIES[policy])
        self._protection = Protection()

    # ---- counters

    @property
    def total_pages(self) -> int:
        """Pages in the tree."""
        return len(self._node_of)

    @property
    def locked_pages(self) -> int:
        """Pages of nodes that live requests use."""
        return self._protection.locked_pages

    @property
    def pinned_pages(self) -> int:
        """Pages that pins protect, whether or not a request uses them too."""
        self._expire_pins()
        return self._protection.pinned_pages

    @property
    def evictable_pages(self) -> int:
        """Pages that eviction may take, leaf after leaf."""
        self._expire_pins()
        return len(self._node_of) - self._protection.protected_pages

    @property
    def victim_operations(self) -> int:
        """Heap operations that finding victims has cost so far."""
        return self._victims.operations

    # ---- match

    def match(
        self,
        namespace: Namespace,
        tokens: Sequence[int],
        limit: int | None = None,
        priority: int = 0,
    ) -> MatchResult:
        """Longest cached prefix of `tokens` (int32 ids; `array('i')` is fastest).

        At most `limit` tokens count, whole and partial page together. Counts as a hit and as an
        access, of this priority, of all nodes used. The result may end inside a node and holds
        nothing: `lock` it before anything else may change the tree.
        """
        data = token_bytes(tokens if limit is None else tokens[:limit])
        now = self._clock()
        root = self._roots.get(namespace)
        if root is None:
            return MatchResult(None, [], None, 0, 0)
        node, taken = root, 0
        pages: list[int] = []
        for step, step_pages in root.descend(data, self._page_bytes):
            node, taken = step, step_pages
            node.touch(now, priority)
            node.hits += 1
            pages += node.pages[:taken].tolist()
        partial_page, partial_tokens = None, 0
        rest = data[len(pages) * self._page_bytes :][: self._page_bytes]
        if rest and taken < len(node.pages):
            following = node.key[taken * self._page_bytes : (taken + 1) * self._page_bytes]
            partial_tokens = common_tokens(following, rest)
            if partial_tokens:
                partial_page = node.pages[taken]
        elif rest and (nearest := node.nearest_child(rest)) is not None:
            child, partial_tokens = nearest
            child.touch(now, priority)
            partial_page = child.pages[0]
        return MatchResult(node if pages else None, pages, partial_page, partial_tokens, taken)

    def probe(self, namespace: Namespace, tokens: Sequence[int], limit: int | None = None) -> int:
        """Tokens of whole cached pages that `match` would find; changes nothing."""
        root = self._roots.get(namespace)
        if root is None:
            return 0
        data = token_bytes(tokens if limit is None else tokens[:limit])
        return sum(taken for _, taken in root.descend(data, self._page_bytes)) * self.page_size

    def unprotected(
        self, namespace: Namespace, tokens: Sequence[int], limit: int | None = None
    ) -> list[int]:
        """Those of the whole pages that `match` would find which eviction may take now."""
        root = self._roots.get(namespace)
        if root is None:
            return []
        data = token_bytes(tokens if limit is None else tokens[:limit])
        pages: list[int] = []
        for node, taken in root.descend(data, self._page_bytes):
            if not node.lock_count and not node.pin_count:
                pages += node.pages[:taken]
        return pages

    # ---- insert

    def insert(
        self,
        namespace: Namespace,
        parent: Node | None,
        tokens: Sequence[int],
        pages: Sequence[int],
        priority: int = 0,
    ) -> InsertResult:
        """Binds pages to the position at the end of `parent` (None: the root).

        `tokens` are those of `pages` alone, len(pages) * page_size of them. Pages that the tree
        already has are not replaced: see `InsertResult.twins`; the others are the tree's from
        now on. Where `parent` is locked, one of its locks is the caller's; it stays where it is.
        """
        data = token_bytes(tokens)
        if not pages or len(data) != len(pages) * self._page_bytes:
            raise ValueError(f"{len(data) // TOKEN_BYTES} tokens do not fill {len(pages)} pages")
        now = self._clock()
        node = self._root(namespace) if parent is None else parent
        twins: list[int] = []
        for child, taken in node.descend(data, self._page_bytes):
            node = child if taken == len(child.pages) else self._split(child, taken)
            node.touch(now, priority)
            twins.extend(node.pages)
        if len(twins) < len(pages):
            new = pages[len(twins) :]
            key = data[len(twins) * self._page_bytes :]
            # A lock of somebody else means that his pages end where the node ends now.
            start = node.end
            if node.may_grow(own_locks=1 if node is parent else 0):
                node.key += key
                node.pages.extend(new)
                node.derived = None
                self._protection.grown(node, len(new))
            else:
                child = Node(namespace, node, start, key, new)
                node.add_child(key[: self._page_bytes], child)
                node = child
            self._node_of.update(zip(new, repeat(node)))
            self.pages_in_heads += min(len(new), max(self.head_pages - start, 0))
            node.touch(now, priority)
            self._victims.offer(node)
        return InsertResult(node, twins)

    def replace(self, page: int, position: int, new_page: int) -> None:
        """Puts `new_page` where `page` is (its `position` counts pages from the root)."""
        if not self.is_at(page, position):
            raise LifecycleError(f"page {page} is not at position {position}")
        node = self._node_of[page]
        node.pages[position - node.start] = new_page
        node.derived = None
        del self._node_of[page]
        self._node_of[new_page] = node

    def is_at(self, page: int, position: int) -> bool:
        """Whether the page is in the tree with `position` pages above it."""
        node = self._node_of.get(page)
        return (
            node is not None
            and node.start <= position < node.end
            and node.pages[position - node.start] == page
        )

    def position_of(self, page: int) -> int | None:
        """How many pages stand before the page in its sequence; None when not in the tree."""
        node = self._node_of.get(page)
        return None if node is None else node.start + node.pages.index(page)

    def _root(self, namespace: Namespace) -> Node:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(namespace, None, 0, b"", ())
        return root

    def _split(self, node: Node, count: int) -> Node:
        """Cuts a node after `count` pages; returns the new upper part."""
        upper = node.split(count, self._page_bytes)
        self.splits += 1
        self._node_of.update(zip(upper.pages, repeat(upper)))
        return upper

    # ---- locks

    def lock(self, node: Node, node_pages: int) -> Node:
        """Protects the path to the first `node_pages` pages of `node` from eviction.

        Splits the node when the run ends inside it. Returns the node that ends with the run:
        `unlock` takes that one.
        """
        if node_pages < len(node.pages):
            node = self._split(node, node_pages)
        self._protection.lock(node)
        return node

    def move_lock(self, node: Node, deeper: Node) -> None:
        """Moves a lock from `node` to a node below it (or to itself)."""
        self._protection.lock(deeper, above=node)

    def unlock(self, node: Node) -> None:
        """Takes a lock back; the node may become a victim."""
        if not node.lock_count:
            raise LifecycleError("unlock of a node that is not locked")
        self._protection.unlock(node)
        self._victims.offer(node)

    # ---- pins

    def pin(self, namespace: Namespace, tokens: Sequence[int], ttl_seconds: float) -> int:
        """Keeps the cached prefix of `tokens` from eviction for a time.

        Returns the number of tokens pinned: whole cached pages only, maybe fewer than given.
        Pinning the same prefix again sets a new time.
        """
        root = self._roots.get(namespace)
        found = [] if root is None else list(root.descend(token_bytes(tokens), self._page_bytes))
        if not found:
            return 0
        node, taken = found[-1]
        if taken < len(node.pages):
            node = self._split(node, taken)
        self._protection.pin(node, self._clock() + ttl_seconds)
        return node.end * self.page_size

    def unpin(self, namespace: Namespace, tokens: Sequence[int]) -> int:
        """Ends the longest pin on the path of `tokens`; returns its tokens (0: no pin)."""
        root = self._roots.get(namespace)
        if root is None:
            return 0
        path = [
            node
            for node, taken in root.descend(token_bytes(tokens), self._page_bytes)
            if taken == len(node.pages) and node.pinned_until is not None
        ]
        if not path:
            return 0
        self._end_pin(path[-1])
        return path[-1].end * self.page_size

    def break_pin(self) -> bool:
        """Ends the pin that would expire first; False when there is none."""
        node = self._protection.first_pin()
        if node is None:
            return False
        self._end_pin(node)
        return True

    def _expire_pins(self) -> None:
        if self._protection.may_have_pins:
            now = self._clock()
            while (node := self._protection.first_pin()) is not None:
                assert node.pinned_until is not None
                if node.pinned_until > now:
                    return
                self._end_pin(node)

    def _end_pin(self, node: Node) -> None:
        self._protection.unpin(node)
        self._victims.offer(node)

    # ---- eviction

    def evict_page(self, keep: int | None = None) -> EvictedPage | None:
        """Takes the last page of the best victim out of the tree, never the page `keep`.

        None when every leaf is locked or pinned (or ends with `keep`).
        """
        self._expire_pins()
        node = self._victims.victim(keep)
        if node is None:
            return None
        page = node.pages.pop()
        node.derived = None
        self.pages_in_heads -= node.end < self.head_pages
        del self._node_of[page]
        if node.pages:
            del node.key[-self._page_bytes :]
        else:
            self._remove(node)
        return EvictedPage(page, node)

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        parent.remove_child(bytes(node.key))
        node.parent = None  # no longer evictable: its queue entry is dropped when it comes up
        self._victims.offer(parent)
        if parent.parent is None and not parent.children:
            del self._roots[parent.namespace]

    # ---- inspection

    def walk(self) -> Iterator[Node]:
        """All nodes with pages, every parent before its children. O(nodes)."""
        waiting = list(self._roots.values())
        while waiting:
            node = waiting.pop()
            if node.pages:
                yield node
            waiting.extend(node.children.values())

    def __contains__(self, page: int) -> bool:
        return page in self._node_of
