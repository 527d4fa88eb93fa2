"""What the dashboard sees of the cache: a survey of the whole tree, and the path of one prompt.

A survey goes on between steps, a bounded number of nodes at a time, so that no request waits for
it; everybody who asks meanwhile gets the same one. It holds counts, times and hashes, no tokens.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from minima_radix import Namespace, Node, RadixTree, TreeWalk, trace
from sglang_minima.cache.prefix_cache import MIN_COPY_TOKENS, PrefixCache

MAX_NODES = 200_000
MIN_NODES, MAX_NODES_AT_ONCE = 64, 4096
_NODES_PER_SECOND = 5000
"""Of the steps' own time: about 2 % more, since a node costs 2 to 5 microseconds."""

_INT32 = 2**31 - 1

NO_TREE = "the server shares no prefixes (--disable-radix-cache)"


class Surveys:
    """Answers everybody who wants a survey of the tree, with as few walks as possible."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._survey: _Survey | None = None
        self._asked: list[str] = []

    @property
    def active(self) -> bool:
        """Whether there is work left to do."""
        return self._survey is not None

    def ask(self, reply_to: str) -> None:
        """Notes that somebody waits for a survey.

        Raises:
            ValueError: there is no tree.
        """
        if self._cache.tree is None:
            raise ValueError(NO_TREE)
        self._asked.append(reply_to)
        if self._survey is None:
            self._survey = _Survey(self._cache, self._cache.tree)

    def advance(self, step_seconds: float = 0.0) -> list[tuple[str, dict[str, Any]]]:
        """Visits some more nodes; the answers (to whom, what) when the survey is complete.

        Args:
            step_seconds: what the step before took; the work done here is in proportion, within
                `MIN_NODES` and `MAX_NODES_AT_ONCE`.
        """
        budget = min(max(int(step_seconds * _NODES_PER_SECOND), MIN_NODES), MAX_NODES_AT_ONCE)
        if self._survey is None or not self._survey.advance(budget):
            return []
        result, asked = self._survey.result(), self._asked
        self._survey, self._asked = None, []
        return [(reply_to, result) for reply_to in asked]


class _Survey:
    """Columns of numbers, one row a node, parents before children."""

    def __init__(self, cache: PrefixCache, tree: RadixTree) -> None:
        self._cache = cache
        self._tree = tree
        self._walk = TreeWalk(tree, MAX_NODES)
        self._started = time.monotonic()
        self._namespaces: list[dict[str, Any]] = []
        self._ids = array("q")
        self._used = array("d")
        self._columns = {
            name: array("i")
            for name in ("parent", "depth", "start", "pages", "anchor", "stale", "hits", "locks")
        }

    def advance(self, budget: int) -> bool:
        """Visits some more nodes; True when all have been."""
        visits = self._walk.advance(budget)
        anchors = self._cache.profile.anchor_pages
        ids = self._ids
        for node, parent, _ in visits:
            if parent < 0:
                self._namespaces.append(_named(node.namespace, len(self._namespaces)))
            ids.append(_identity(node, None if parent < 0 else ids[parent]))
        nodes = [visit.node for visit in visits]
        self._used.extend([node.last_access for node in nodes])
        for name, values in (
            ("parent", [visit.parent for visit in visits]),
            ("depth", [visit.depth for visit in visits]),
            ("start", [node.start for node in nodes]),
            ("pages", [len(node.pages) for node in nodes]),
            ("anchor", [min(max(anchors - node.start, 0), len(node.pages)) for node in nodes]),
            ("stale", self._stale(nodes)),
            ("hits", [min(node.hits, _INT32) for node in nodes]),
            ("locks", [min(node.lock_count, _INT32) for node in nodes]),
        ):
            self._columns[name].extend(values)
        return self._walk.done

    def result(self) -> dict[str, Any]:
        """The survey as a message: little-endian columns, and what they need to be understood."""
        cache, now = self._cache, time.monotonic()
        geometry = cache.arena.geometry
        used = np.frombuffer(self._used)
        idle = np.where(used > 0, now - used, np.float64(now - self._started))
        return {
            "page_size": cache.page_size,
            "page_bytes": {
                "recent": cache.profile.recent.bytes_per_page(geometry),
                "stale": cache.profile.stale.bytes_per_page(geometry),
            },
            "complete": self._walk.complete,
            "pages_in_tree": self._tree.total_pages,
            "seconds": now - self._started,
            "namespaces": self._namespaces,
            "id": self._ids.tobytes(),
            "idle": idle.astype(np.float32).tobytes(),
            **{name: column.tobytes() for name, column in self._columns.items()},
        }

    def _stale(self, nodes: Sequence[Node]) -> list[int]:
        """Stale pages of each node."""
        if not self._cache.profile.compresses or not nodes:
            return [0] * len(nodes)
        pages = array("q")
        for node in nodes:
            pages += node.pages
        kinds = self._cache.kind_indices(np.frombuffer(pages, dtype=np.int64))
        owners = np.repeat(np.arange(len(nodes)), [len(node.pages) for node in nodes])
        counts: list[int] = np.bincount(owners[kinds == 1], minlength=len(nodes)).tolist()
        return counts


def _identity(node: Node, above: int | None) -> int:
    """A number that stays the same from survey to survey, and tells nobody the tokens.

    Python's hashes of strings and bytes are keyed with a secret of the process.

    Args:
        node: the root of a namespace, or a node with pages.
        above: the number of its parent; None for a root.
    """
    if above is None:
        return hash(node.namespace)
    return hash((above, bytes(node.key[: len(node.key) // len(node.pages)])))


def _hex(identity: int) -> str:
    return f"{identity & 0xFFFFFFFFFFFFFFFF:016x}"


def _named(namespace: Namespace, index: int) -> dict[str, Any]:
    # The salt is a tenant's secret: it is not shown.
    return {
        "name": "default namespace" if namespace.salt is None else f"tenant {index + 1}",
        "lora": namespace.lora,
    }


def describe_match(
    cache: PrefixCache, namespace: Namespace, tokens: Sequence[int]
) -> dict[str, Any]:
    """What a request with this prompt would find, page by page; takes and touches nothing.

    Returns:
        page_size, tokens, matched_tokens (whole pages), copied_tokens (of a page that the prompt
        leaves in its middle), path (the ids of the tree nodes on the way, the root first), and
        pages: for each cached page its kind, tier, hits, whether a live request uses it, and
        which node of the path has it.

    Raises:
        ValueError: there is no tree.
    """
    if cache.tree is None:
        raise ValueError(NO_TREE)
    # The last token is always computed: its logits are wanted.
    found = trace(cache.tree, namespace, tokens, len(tokens) - 1)
    names = [kind.name for kind in cache.profile.kinds]
    pages: list[dict[str, Any]] = []
    identity = hash(namespace)
    path = [_hex(identity)]
    for number, (node, taken) in enumerate(found.steps, 1):
        identity = _identity(node, identity)
        path.append(_hex(identity))
        kinds = cache.kind_indices(np.array(node.pages[:taken], dtype=np.int64)).tolist()
        for kind in kinds:
            sealed = "anchor" if len(pages) < cache.profile.anchor_pages else "recent"
            pages.append(
                {
                    "kind": names[kind],
                    "tier": "stale" if kind else sealed,
                    "hits": node.hits,
                    "locked": node.lock_count > 0,
                    "node": number,
                }
            )
    copies = found.partial_tokens >= MIN_COPY_TOKENS and not cache.deterministic
    return {
        "page_size": cache.page_size,
        "tokens": len(tokens),
        "matched_tokens": len(pages) * cache.page_size,
        "copied_tokens": found.partial_tokens if copies else 0,
        "path": path,
        "pages": pages,
    }
