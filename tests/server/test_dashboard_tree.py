"""The tree as the page sees it: sums that are true, and few enough blocks, whatever the tree."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sglang_minima.dashboard.tree_view import TreeSnapshot

BYTES = {"recent": 200, "stale": 90}
TIER_BYTES = (200, 200, 90)


def survey_of(parents: list[int], own: list[tuple[int, int, int]]) -> dict[str, Any]:
    """A survey of a tree: parents come first; `own` are recent, anchor and stale pages."""
    depth: list[int] = []
    for parent in parents:
        depth.append(0 if parent < 0 else depth[parent] + 1)
    columns = {
        "parent": parents,
        "depth": depth,
        "start": depth,
        "pages": [sum(pages) for pages in own],
        "anchor": [pages[1] for pages in own],
        "stale": [pages[2] for pages in own],
        "hits": list(range(len(parents))),
        "locks": [index % 2 for index in range(len(parents))],
    }
    names = [{"name": f"n{i}", "lora": None} for i in range(parents.count(-1))]
    return {
        "page_size": 16,
        "page_bytes": BYTES,
        "pages_in_tree": sum(columns["pages"]) + 7,
        "complete": False,
        "seconds": 0.5,
        "namespaces": names,
        "id": np.arange(1, len(parents) + 1, dtype="<i8").tobytes(),
        "idle": np.zeros(len(parents), dtype="<f4").tobytes(),
        **{name: np.array(values, dtype="<i4").tobytes() for name, values in columns.items()},
    }


def random_tree(rng: random.Random, count: int, roots: int) -> TreeSnapshot:
    parents = [-1] * roots + [rng.randrange(i) for i in range(roots, count)]
    own = [(0, 0, 0)] * roots
    own += [(rng.randrange(9), rng.randrange(3), rng.randrange(9)) for _ in range(count - roots)]
    own = [pages if i < roots or sum(pages) else (1, 0, 0) for i, pages in enumerate(own)]
    return TreeSnapshot(survey_of(parents, own), 0.0)


def size(pages: list[int]) -> int:
    return sum(n * each for n, each in zip(pages, TIER_BYTES, strict=True))


def check_view(view: dict[str, Any], depth: int, limit: int) -> None:
    """Every node is what it has itself, what is listed below it, and the rest."""
    nodes = view["nodes"]
    assert len(nodes) <= limit
    level: list[int] = []
    for place, node in enumerate(nodes):
        assert node["parent"] < max(place, 0)
        level.append(0 if place == 0 else level[node["parent"]] + 1)
    assert max(level) <= depth
    for place, node in enumerate(nodes):
        listed = [other for other in nodes if other["parent"] == place]
        rest = node.get("rest", [])
        for tier in range(3):
            parts = [other["below"][tier] for other in listed]
            parts += [part["pages"][tier] for part in rest]
            assert node["below"][tier] == node["own"][tier] + sum(parts)
        below = sum(other["nodes"] for other in listed) + sum(part["nodes"] for part in rest)
        assert node["nodes"] == below + (sum(node["own"]) > 0)
        sizes = [size(other["below"]) for other in listed]
        assert sizes == sorted(sizes, reverse=True)
        first, end = node.get("range", (0, node["children"]))
        ranks = [first + len(listed), *[part["to"] for part in rest]]
        assert [part["from"] for part in rest] == ranks[:-1]
        assert ranks[-1] == end


@given(
    seed=st.integers(0, 2**32),
    count=st.integers(2, 60),
    roots=st.integers(1, 3),
    depth=st.integers(1, 6),
    limit=st.integers(1, 30),
)
def test_every_view_adds_up(seed: int, count: int, roots: int, depth: int, limit: int) -> None:
    rng = random.Random(seed)
    tree = random_tree(rng, max(count, roots + 1), roots)
    whole = tree.summarise("root", 64, 2000)
    check_view(whole, 64, 2000)
    assert len(whole["nodes"]) == max(count, roots + 1) + (roots > 1)
    view = tree.summarise("root", depth, limit)
    check_view(view, depth, limit)
    for node in rng.sample(whole["nodes"], min(4, len(whole["nodes"]))):
        view = tree.summarise(node["id"], depth, limit)
        check_view(view, depth, limit)
        assert view["found"] and view["nodes"][0]["id"] == node["id"]
        assert view["nodes"][0]["below"] == node["below"]
        assert view["path"][-1]["id"] == node["id"]
        first = rng.randrange(node["children"] + 1)
        end = rng.randrange(first, node["children"] + 3)
        part = tree.summarise(node["id"], depth, limit, (first, end))
        check_view(part, depth, limit)
        if first < min(end, node["children"]):
            assert part["nodes"][0]["range"] == [first, min(end, node["children"])]


def test_ranges_of_the_rest_lead_to_every_node() -> None:
    """Zooming into what is put together shows all of it at last."""
    tree = TreeSnapshot(survey_of([-1, *[0] * 5000], [(0, 0, 0), *[(1, 0, 0)] * 5000]), 0.0)
    focus = tree.summarise("root", 5, 100)["nodes"][0]["id"]
    seen: set[str] = set()
    waiting = [(0, 5000, 1)]
    while waiting:
        first, end, clicks = waiting.pop()
        assert clicks <= 3
        top, *listed = tree.summarise(focus, 5, 100, (first, end))["nodes"]
        seen.update(node["id"] for node in listed)
        waiting += [(part["from"], part["to"], clicks + 1) for part in top.get("rest", [])]
    assert len(seen) == 5000


def test_largest_nodes_are_the_ones_listed() -> None:
    own = [(0, 0, 0), *[(n, 0, 0) for n in range(1, 101)]]
    tree = TreeSnapshot(survey_of([-1, *[0] * 100], own), 0.0)
    nodes = tree.summarise("root", 3, 11)["nodes"]
    assert [node["own"][0] for node in nodes[1:]] == list(range(100, 90, -1))
    assert nodes[0]["nodes"] == 100


def test_unknown_focus_shows_the_whole() -> None:
    tree = random_tree(random.Random(1), 20, 2)
    view = tree.summarise("0123", 3, 50)
    assert not view["found"]
    assert view["nodes"][0]["id"] == "root"
    assert view["unseen_pages"] == 7


def test_empty_tree() -> None:
    tree = TreeSnapshot(survey_of([], []), 0.0)
    (node,) = tree.summarise("root", 3, 50)["nodes"]
    assert (node["nodes"], node["below"], node["children"]) == (0, [0, 0, 0], 0)


def test_50_000_nodes_stay_few_blocks() -> None:
    flat = [-1, *[0] * 50_000]
    chain = [-1, *range(3000)]
    bushy = [-1, *[max(0, (i - 1) // 12) for i in range(1, 50_000)]]
    for parents in (flat, chain, bushy):
        tree = TreeSnapshot(survey_of(parents, [(0, 0, 0), *[(1, 0, 1)] * (len(parents) - 1)]), 0)
        view = tree.summarise("root", 12, 800)
        check_view(view, 12, 800)
        assert tree.num_nodes == len(parents) - 1
