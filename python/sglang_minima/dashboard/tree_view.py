"""A survey of the radix tree as the page sees it: totals of every subtree, small nodes put together.

Works on arrays in the HTTP process; the scheduler has no part in it.
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
TIERS = ("recent", "anchor", "stale")


class TreeSnapshot:
    """One survey (see `cache.survey`), below a root of its own that joins the namespaces.

    Args:
        survey: the scheduler's answer.
        taken: time.monotonic() of this process when it came.
    """

    def __init__(self, survey: dict[str, Any], taken: float) -> None:
        self.taken = taken
        self.seconds: float = survey["seconds"]
        self._survey = survey

        def column(name: str) -> IntArray:
            values = np.frombuffer(survey[name], dtype="<i4").astype(np.int64)
            return np.concatenate((np.zeros(1, dtype=np.int64), values))

        ids = np.frombuffer(survey["id"], dtype="<i8")
        self._ids = ["root", *(f"{value & 0xFFFFFFFFFFFFFFFF:016x}" for value in ids.tolist())]
        self._index = {name: index for index, name in enumerate(self._ids)}
        self._parent = column("parent") + 1
        self._parent[0] = -1
        self._depth = column("depth") + 1
        self._depth[0] = 0
        self._start, self._hits, self._locks = column("start"), column("hits"), column("locks")
        self._idle = np.concatenate((np.zeros(1), np.frombuffer(survey["idle"], dtype="<f4")))
        anchor, stale = column("anchor"), column("stale")
        self._own = np.stack((column("pages") - anchor - stale, anchor, stale), axis=1)
        self._sum()
        self._sort_children()

    @property
    def num_nodes(self) -> int:
        """Nodes with pages."""
        return int((self._own.sum(axis=1) > 0).sum())

    def summarise(self, focus: str, depth: int, limit: int) -> dict[str, Any]:
        """The largest nodes below one.

        Args:
            focus: id of a node, or "root".
            depth: levels below the focus at most.
            limit: nodes at most; the others are told as sums, in the node above them.

        Returns:
            found (False: the focus has left the tree, the answer is about the whole), path (to
            the focus), and nodes, parents first: id, parent (index into nodes), tokens before it,
            own and subtree pages by tier, number of nodes in the subtree and of children, hits,
            seconds since the last use, locked, and rest (of children that are not listed).
        """
        top = self._index.get(focus)
        chosen, parents = self._choose(top or 0, depth, limit)
        rest_nodes, rest_pages, rest_children = self._rest(chosen, parents)
        nodes = []
        for place, (index, parent) in enumerate(zip(chosen, parents, strict=True)):
            entry = self._describe(index)
            entry["parent"] = parent
            if rest_children[place]:
                entry["rest"] = {
                    "children": int(rest_children[place]),
                    "nodes": int(rest_nodes[place]),
                    "pages": rest_pages[place].tolist(),
                }
            nodes.append(entry)
        return {
            "found": top is not None,
            "page_size": self._survey["page_size"],
            "tier_page_bytes": self._tier_page_bytes(),
            "total_nodes": self.num_nodes,
            "unseen_pages": max(self._survey["pages_in_tree"] - int(self._below[0].sum()), 0),
            "path": [self._describe(index) for index in self._path(top or 0)],
            "nodes": nodes,
        }

    def _sum(self) -> None:
        """Pages by tier and nodes of every subtree: level by level, the deepest first."""
        totals = np.concatenate((self._own, (self._own.sum(axis=1) > 0)[:, None]), axis=1)
        order = np.argsort(self._depth, kind="stable")
        levels = np.searchsorted(self._depth[order], np.arange(self._depth.max(initial=0) + 2))
        for level in range(len(levels) - 2, 0, -1):
            members = order[levels[level] : levels[level + 1]]
            np.add.at(totals, self._parent[members], totals[members])
        self._below = totals[:, : len(TIERS)]
        self._nodes_below = totals[:, len(TIERS)]
        self._bytes = self._below @ np.array(self._tier_page_bytes(), dtype=np.int64)

    def _sort_children(self) -> None:
        """All nodes but the root, by parent, the largest subtree of each first."""
        self._children = np.lexsort((-self._bytes, self._parent))[1:]
        parents = self._parent[self._children]
        nodes = np.arange(len(self._parent))
        self._first = np.searchsorted(parents, nodes)
        self._end = np.searchsorted(parents, nodes, side="right")

    def _choose(self, top: int, depth: int, limit: int) -> tuple[list[int], list[int]]:
        """The largest subtrees that hang together: node indices, and places of their parents."""
        chosen, parents = [top], [-1]
        # Of the children of a node only the next largest waits in the heap.
        heap: list[tuple[int, int, int, int]] = []

        def offer(at: int, place: int) -> None:
            node = chosen[place]
            if at < self._end[node]:
                child = int(self._children[at])
                heapq.heappush(heap, (-int(self._bytes[child]), child, at, place))

        offer(int(self._first[top]), 0)
        while heap and len(chosen) < limit:
            _, child, at, place = heapq.heappop(heap)
            chosen.append(child)
            parents.append(place)
            offer(at + 1, place)
            if self._depth[child] - self._depth[top] < depth:
                offer(int(self._first[child]), len(chosen) - 1)
        return chosen, parents

    def _rest(self, chosen: list[int], parents: list[int]) -> tuple[IntArray, IntArray, IntArray]:
        """What of each chosen node's children was not chosen: nodes, pages by tier, children."""
        own_node = (self._own[chosen].sum(axis=1) > 0).astype(np.int64)
        nodes = self._nodes_below[chosen] - own_node
        pages = self._below[chosen] - self._own[chosen]
        children = (self._end - self._first)[chosen]
        listed, above = np.array(chosen[1:], dtype=np.int64), np.array(parents[1:], dtype=np.int64)
        np.subtract.at(nodes, above, self._nodes_below[listed])
        np.subtract.at(pages, above, self._below[listed])
        np.subtract.at(children, above, 1)
        return nodes, pages, children

    def _path(self, index: int) -> list[int]:
        path = [index]
        while path[-1] > 0:
            path.append(int(self._parent[path[-1]]))
        return path[::-1]

    def _describe(self, index: int) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "id": self._ids[index],
            "start": int(self._start[index]) * int(self._survey["page_size"]),
            "own": self._own[index].tolist(),
            "below": self._below[index].tolist(),
            "nodes": int(self._nodes_below[index]),
            "children": int(self._end[index] - self._first[index]),
            "hits": int(self._hits[index]),
            "idle": round(float(self._idle[index]), 1),
            "locked": bool(self._locks[index]),
        }
        # The roots of the namespaces come first in a survey.
        if 0 < index <= len(self._survey["namespaces"]):
            entry["namespace"] = self._survey["namespaces"][index - 1]
        return entry

    def _tier_page_bytes(self) -> list[int]:
        sizes = self._survey["page_bytes"]
        return [sizes["recent"], sizes["recent"], sizes["stale"]]
