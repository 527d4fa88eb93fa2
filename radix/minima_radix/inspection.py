"""Looks at a tree without touching it: the path of a prompt, and a walk in bounded slices.

Nothing here takes a reference, counts as an access or a hit, or splits a node.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from minima_radix.node import TOKEN_BYTES, Node, common_tokens, token_bytes
from minima_radix.tree import RadixTree
from minima_radix.types import Namespace


class Trace(NamedTuple):
    """What `RadixTree.match` would find for a prompt."""

    steps: list[tuple[Node, int]]
    """The nodes on the way, each with its number of equal whole pages."""
    partial_page: int | None
    """The page after those that the prompt leaves in its middle."""
    partial_tokens: int
    """Leading tokens of that page that are equal."""


def trace(
    tree: RadixTree, namespace: Namespace, tokens: Sequence[int], limit: int | None = None
) -> Trace:
    """The longest cached prefix of `tokens`, of at most `limit` tokens, as `match` finds it."""
    node = tree._roots.get(namespace)
    if node is None:
        return Trace([], None, 0)
    data = token_bytes(tokens if limit is None else tokens[:limit])
    size = tree.page_size * TOKEN_BYTES
    steps = list(node.descend(data, size))
    taken = 0
    if steps:
        node, taken = steps[-1]
    rest = data[sum(pages for _, pages in steps) * size :][:size]
    if not rest:
        return Trace(steps, None, 0)
    if taken < len(node.pages):
        shared = common_tokens(node.key[taken * size : (taken + 1) * size], rest)
        return Trace(steps, node.pages[taken] if shared else None, shared)
    nearest = node.nearest_child(rest)
    if nearest is None:
        return Trace(steps, None, 0)
    return Trace(steps, nearest[0].pages[0], nearest[1])


class Visit(NamedTuple):
    """A node that a walk has come to."""

    node: Node
    parent: int
    """Which visit, counted from 0, its parent was; -1 for the root of a namespace."""
    depth: int
    """0 for the root of a namespace."""


class TreeWalk:
    """A walk over all nodes, roots included, that rests whenever the caller wants.

    Parents come before their children, levels near the roots first. The tree may change between
    two slices: a node that has left it is passed over, one that a split has put above a visited
    node's child is found with that child, and one that is new below a visited node may be missed.

    Args:
        tree: the tree to look at.
        max_nodes: the walk ends after so many nodes.
    """

    def __init__(self, tree: RadixTree, max_nodes: int) -> None:
        self._roots = set(tree._roots.values())
        self._waiting = deque(tree._roots.values())
        self._visits: dict[Node, int] = {}
        self._depths: list[int] = []
        self._max_nodes = max_nodes

    @property
    def done(self) -> bool:
        """Whether there is nothing left to visit."""
        return not self._waiting or len(self._visits) >= self._max_nodes

    @property
    def complete(self) -> bool:
        """Whether the walk has come to everything, not only to its limit."""
        return not self._waiting

    def advance(self, budget: int) -> list[Visit]:
        """Goes on until `budget` is used up: a node costs 1, and 1 more for every 64 pages."""
        visits: list[Visit] = []
        while budget > 0 and not self.done:
            node = self._waiting.popleft()
            budget -= 1
            left = node.parent is None and node not in self._roots
            if left or node in self._visits:
                continue
            path = [node]
            while (parent := path[-1].parent) is not None and parent not in self._visits:
                path.append(parent)
            for step in reversed(path):
                visits.append(self._visit(step))
                budget -= len(step.pages) // 64 + (step is not node)
        return visits

    def _visit(self, node: Node) -> Visit:
        parent = -1 if node.parent is None else self._visits[node.parent]
        depth = 0 if parent < 0 else self._depths[parent] + 1
        self._visits[node] = len(self._visits)
        self._depths.append(depth)
        room = self._max_nodes - len(self._visits)
        self._waiting.extend(islice(node.children.values(), max(room, 0)))
        return Visit(node, parent, depth)
