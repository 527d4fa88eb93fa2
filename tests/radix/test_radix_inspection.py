"""Looking at a tree finds what `match` finds, in bounded slices, and changes nothing."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from radix_world import NAMESPACES, FakeClock

from minima_radix import Namespace, Node, RadixTree, TreeWalk, Visit, trace

A, B = NAMESPACES


def state(tree: RadixTree) -> list[tuple[Any, ...]]:
    return sorted(
        (
            str(node.namespace),
            node.start,
            bytes(node.key),
            node.hits,
            node.last_access,
            node.lock_count,
            len(node.children),
        )
        for node in tree.walk()
    )


@given(
    page_size=st.integers(1, 4),
    sequences=st.lists(st.lists(st.integers(0, 2), min_size=4, max_size=20), max_size=10),
    query=st.lists(st.integers(0, 2), max_size=20),
    limit=st.none() | st.integers(0, 24),
)
def test_trace_finds_what_match_finds_and_changes_nothing(
    page_size: int, sequences: list[list[int]], query: list[int], limit: int | None
) -> None:
    tree = RadixTree(page_size, clock=FakeClock())
    for i, sequence in enumerate(sequences):
        count = len(sequence) // page_size
        pages = range(100 * i, 100 * i + count)
        tree.insert(A, None, sequence[: count * page_size], pages)
    before = state(tree)
    found = trace(tree, A, query, limit)
    assert state(tree) == before
    assert trace(tree, B, query, limit) == ([], None, 0)
    match = tree.match(A, query, limit)
    assert [page for node, taken in found.steps for page in node.pages[:taken]] == match.pages
    assert (found.partial_page, found.partial_tokens) == (match.partial_page, match.partial_tokens)


def grow(tree: RadixTree, namespace: Namespace, rng: random.Random, page: int) -> int:
    """Inserts a random sequence; returns the next free page."""
    tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 9))]
    tree.insert(namespace, None, tokens, range(page, page + len(tokens)))
    return page + len(tokens)


def check_order(visits: list[Visit]) -> None:
    index: dict[Node, int] = {}
    for position, visit in enumerate(visits):
        assert visit.node not in index, "a node is visited once"
        index[visit.node] = position
        assert visit.parent < position
        if visit.parent < 0:
            assert visit.depth == 0
        else:
            assert visit.depth == visits[visit.parent].depth + 1


@given(seed=st.integers(0, 2**32), budget=st.integers(1, 9))
def test_walk_visits_every_node_of_a_still_tree(seed: int, budget: int) -> None:
    rng = random.Random(seed)
    tree = RadixTree(1, clock=FakeClock())
    page = 0
    for _ in range(rng.randrange(20)):
        page = grow(tree, rng.choice(NAMESPACES), rng, page)
    walk = TreeWalk(tree, 1 << 20)
    visits: list[Visit] = []
    while not walk.done:
        some = walk.advance(budget)
        assert len(some) <= budget
        visits += some
    check_order(visits)
    assert {visit.node for visit in visits if visit.node.pages} == set(tree.walk())
    for visit in visits:
        assert visit.node.parent is (visits[visit.parent].node if visit.parent >= 0 else None)


@given(seed=st.integers(0, 2**32))
def test_walk_survives_changes_between_its_slices(seed: int) -> None:
    rng = random.Random(seed)
    tree = RadixTree(1, clock=FakeClock())
    page = 0
    for _ in range(10):
        page = grow(tree, A, rng, page)
    kept = [node for node in tree.walk()]
    walk = TreeWalk(tree, 1 << 20)
    visits: list[Visit] = []
    while not walk.done:
        visits += walk.advance(1)
        for _ in range(rng.randrange(3)):
            if rng.random() < 0.5:
                page = grow(tree, A, rng, page)  # may split a node
            else:
                tree.evict_page()
    check_order(visits)
    # What stayed in the tree all the time was found.
    live = set(tree.walk())
    assert {node for node in kept if node in live} <= {visit.node for visit in visits}


def test_walk_ends_at_its_limit_with_the_upper_levels() -> None:
    tree = RadixTree(1, clock=FakeClock())
    for i in range(50):
        tree.insert(A, None, [i, 100, 200], range(10 * i, 10 * i + 3))
        tree.insert(A, None, [i, 100, 300], range(10 * i + 5, 10 * i + 8))
    walk = TreeWalk(tree, 51)
    visits = walk.advance(1000)
    assert walk.done and len(visits) == 51
    assert {visit.depth for visit in visits} == {0, 1}


def test_work_of_a_slice_is_bounded_with_50_000_nodes() -> None:
    """A slice visits no more nodes than it may, however many there are and wherever they hang."""
    tree = RadixTree(1, clock=FakeClock())
    page = 0
    for i in range(10_000):  # siblings, and forks below them
        for tail in range(4):
            tree.insert(A, None, [i, 20_000 + tail], [page, page + 1])
            page += 2
    walk = TreeWalk(tree, 1 << 20)
    slices, total = 0, 0
    while not walk.done:
        count = len(walk.advance(256))
        assert count <= 256
        total += count
        slices += 1
    assert total == 50_001
    assert slices == -(-total // 256)


def test_long_nodes_use_up_the_budget() -> None:
    tree = RadixTree(1, clock=FakeClock())
    for i in range(8):
        tree.insert(A, None, [i] * 6400, range(6400 * i, 6400 * (i + 1)))
    walk = TreeWalk(tree, 1 << 20)
    assert [len(walk.advance(64)) for _ in range(4)] == [2, 1, 1, 1]
