"""A survey of the radix tree as the page sees it: totals of subtrees, small nodes put together.

Works on arrays in the HTTP process; the scheduler has no part in it.
"""

from __future__ import annotations

import heapq
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
TIERS = ("recent", "anchor", "stale")
_PARTS = 24
"""In how many runs the children of a node that are not listed are told."""


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

    def summarise(
        self, focus: str, depth: int, limit: int, children: tuple[int, int] | None = None
    ) -> dict[str, Any]:
        """The largest nodes below one.

        Args:
            focus: id of a node, or "root".
            depth: levels below the focus at most.
            limit: nodes at most; the others are told as sums, in the node above them.
            children: only these of the focus's children, by rank of size: [first, end).

        Returns:
            found (False: the focus has left the tree, the answer is about the whole), path (to
            the focus), and nodes, parents first: id, parent (index into nodes), tokens before it,
            own and subtree pages by tier, number of nodes in the subtree and of children, hits,
            seconds since the last use, locked, and rest: what its children that are not listed
            come to, in a few runs of ranks. The focus has a range where `children` is given; it
            then stands for these children alone.
        """
        found = self._index.get(focus)
        # One namespace alone needs no row of its own above it.
        top = found or (1 if len(self._survey["namespaces"]) == 1 else 0)
        count = int(self._end[top] - self._first[top])
        if found is None or children is None or not children[0] < min(children[1], count):
            children = None
        first, end = (0, count) if children is None else (children[0], min(children[1], count))
        chosen, parents = self._choose(top, depth, limit, first, end)
        nodes = [self._describe(index) for index in chosen]
        listed = [0] * len(chosen)
        for place, parent in enumerate(parents):
            nodes[place]["parent"] = parent
            if parent >= 0:
                listed[parent] += 1
        for place, (index, known) in enumerate(zip(chosen, listed, strict=True)):
            stop = end if place == 0 else int(self._end[index] - self._first[index])
            start = known + (first if place == 0 else 0)
            if start < stop:
                parts = min(_PARTS, stop - start)
                edges = [start + (stop - start) * part // parts for part in range(parts + 1)]
                nodes[place]["rest"] = [
                    self._children_sum(index, low, high) for low, high in pairwise(edges)
                ]
        if children is not None:
            whole = self._children_sum(top, first, end)
            nodes[0] |= {"own": [0] * len(TIERS), "below": whole["pages"], "nodes": whole["nodes"]}
            nodes[0]["range"] = [first, end]
        return {
            "found": found is not None,
            "page_size": self._survey["page_size"],
            "tier_page_bytes": self._tier_page_bytes(),
            "total_nodes": self.num_nodes,
            "unseen_pages": self._unseen(),
            "path": [self._describe(index) for index in self._path(top)],
            "nodes": nodes,
        }

    def _unseen(self) -> int:
        """Pages beyond the limit of the survey. Other differences are changes during it."""
        if self._survey["complete"]:
            return 0
        return max(int(self._survey["pages_in_tree"]) - int(self._totals[0, :-1].sum()), 0)

    def _sum(self) -> None:
        """Pages by tier and nodes of every subtree: level by level, the deepest first."""
        totals = np.concatenate((self._own, (self._own.sum(axis=1) > 0)[:, None]), axis=1)
        order = np.argsort(self._depth, kind="stable")
        levels = np.searchsorted(self._depth[order], np.arange(self._depth.max(initial=0) + 2))
        for level in range(len(levels) - 2, 0, -1):
            members = order[levels[level] : levels[level + 1]]
            np.add.at(totals, self._parent[members], totals[members])
        self._totals = totals
        self._bytes = totals[:, : len(TIERS)] @ np.array(self._tier_page_bytes(), dtype=np.int64)

    def _sort_children(self) -> None:
        """All nodes but the root, by parent, the largest subtree of each first."""
        self._children = np.lexsort((-self._bytes, self._parent))[1:]
        parents = self._parent[self._children]
        nodes = np.arange(len(self._parent))
        self._first = np.searchsorted(parents, nodes)
        self._end = np.searchsorted(parents, nodes, side="right")
        self._running = np.zeros((len(nodes), self._totals.shape[1]), dtype=np.int64)
        np.cumsum(self._totals[self._children], axis=0, out=self._running[1:])

    def _children_sum(self, index: int, first: int, end: int) -> dict[str, Any]:
        """Pages by tier and nodes of some children of a node with all below, by rank of size."""
        start = int(self._first[index])
        sums = (self._running[start + end] - self._running[start + first]).tolist()
        return {"from": first, "to": end, "pages": sums[:-1], "nodes": sums[-1]}

    def _choose(
        self, top: int, depth: int, limit: int, first: int, end: int
    ) -> tuple[list[int], list[int]]:
        """The largest subtrees that hang together: node indices, and places of their parents."""
        chosen, parents = [top], [-1]
        # Of the children of a node only the next largest waits in the heap.
        heap: list[tuple[int, int, int, int]] = []

        def offer(at: int, place: int) -> None:
            node = chosen[place]
            stop = self._first[top] + end if place == 0 else self._end[node]
            if at < stop:
                child = int(self._children[at])
                heapq.heappush(heap, (-int(self._bytes[child]), child, at, place))

        offer(int(self._first[top]) + first, 0)
        while heap and len(chosen) < limit:
            _, child, at, place = heapq.heappop(heap)
            chosen.append(child)
            parents.append(place)
            offer(at + 1, place)
            if self._depth[child] - self._depth[top] < depth:
                offer(int(self._first[child]), len(chosen) - 1)
        return chosen, parents

    def _path(self, index: int) -> list[int]:
        path = [index]
        top = 1 if len(self._survey["namespaces"]) == 1 else 0
        while path[-1] > top:
            path.append(int(self._parent[path[-1]]))
        return path[::-1]

    def _describe(self, index: int) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "id": self._ids[index],
            "start": int(self._start[index]) * int(self._survey["page_size"]),
            "own": self._own[index].tolist(),
            "below": self._totals[index, :-1].tolist(),
            "nodes": int(self._totals[index, -1]),
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
