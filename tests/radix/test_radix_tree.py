from __future__ import annotations

from array import array
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st
from radix_world import NAMESPACES, FakeClock, leaves

from minima_radix import LifecycleError, Namespace, RadixTree
from minima_radix.node import common_tokens, token_bytes

A, B = NAMESPACES


def tree_of(page_size: int = 2, policy: str = "lru") -> RadixTree:
    return RadixTree(page_size, policy, FakeClock())


def pages_for(tree: RadixTree, tokens: list[int], first: int) -> list[int]:
    return list(range(first, first + len(tokens) // tree.page_size))


def shared_length(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))))


@given(
    page_size=st.integers(1, 5),
    sequences=st.lists(st.lists(st.integers(-1, 2), min_size=5, max_size=25), max_size=12),
    query=st.lists(st.integers(-1, 2), max_size=25),
    limit=st.integers(0, 30),
)
def test_match_finds_the_longest_prefix_and_the_best_partial_page(
    page_size: int, sequences: list[list[int]], query: list[int], limit: int
) -> None:
    tree = tree_of(page_size)
    content: dict[int, tuple[int, ...]] = {}
    for i, sequence in enumerate(sequences):
        whole = sequence[: len(sequence) // page_size * page_size]
        pages = pages_for(tree, whole, 100 * i)
        result = tree.insert(A, None, whole, pages)
        for position, page in enumerate(pages[len(result.twins) :], len(result.twins)):
            content[page] = tuple(whole[: (position + 1) * page_size])
        assert result.node.end == len(pages)
    assert tree.total_pages == len(content)

    match = tree.match(A, array("i", query), limit)

    seen = tuple(query[:limit])
    whole_tokens = len(match.pages) * page_size
    assert [content[page] for page in match.pages] == [
        seen[:end] for end in range(page_size, whole_tokens + 1, page_size)
    ]
    best = 0
    for tokens in content.values():
        best = max(best, shared_length(tokens, seen))
    assert best == whole_tokens + match.partial_tokens
    assert match.partial_tokens < page_size
    if match.partial_page is None:
        assert match.partial_tokens == 0
    else:
        assert content[match.partial_page][:best] == seen[:best]
    assert tree.probe(A, query, limit) == whole_tokens


def test_the_best_partial_child_is_found_among_many() -> None:
    tree = tree_of(8)
    for i in range(500):
        tree.insert(A, None, [1, 1, 1, i, i, i, i, i], [i])
    match = tree.match(A, [1, 1, 1, 250, 250, 250, 7, 7])
    assert (match.node, match.pages, match.partial_page, match.partial_tokens) == (None, [], 250, 6)


def test_a_limit_inside_an_equal_page_makes_it_partial() -> None:
    tree = tree_of(4)
    tree.insert(A, None, list(range(8)), [10, 11])
    match = tree.match(A, list(range(8)), limit=7)
    assert (match.pages, match.partial_page, match.partial_tokens) == ([10], 11, 3)


def test_namespaces_never_meet() -> None:
    tree = tree_of()
    tree.insert(A, None, [1, 2], [7])
    others = [
        B,
        A._replace(salt=None),
        A._replace(lora="a"),
        A._replace(profile="fp8"),
        Namespace("", None, "minima"),
    ]
    for namespace in others:
        assert tree.match(namespace, [1, 2]).pages == []
        assert tree.match(namespace, [1]).partial_page is None
        assert tree.pin(namespace, [1, 2], 10.0) == 0
    tree.insert(B, None, [1, 2], [8])
    assert tree.match(B, [1, 2]).pages == [8]


def test_comparison_is_on_tokens_not_on_bytes_that_happen_to_align() -> None:
    assert common_tokens(token_bytes([1, 256]), token_bytes([1, 257])) == 1
    assert common_tokens(token_bytes([1, 256]), token_bytes([1, 1])) == 1
    assert token_bytes([5, -1]) == token_bytes(array("q", [5, -1])) == token_bytes((5, -1))
    with pytest.raises(OverflowError):
        token_bytes([1 << 40])


def test_inserting_twins_keeps_the_first_and_splits() -> None:
    tree = tree_of()
    first = tree.insert(A, None, [1, 1, 2, 2, 3, 3], [10, 11, 12])
    second = tree.insert(A, None, [1, 1, 2, 2, 4, 4], [20, 21, 22])
    assert first.twins == [] and second.twins == [10, 11]
    assert [list(n.pages) for n in second.node.path()] == [[22], [10, 11]]
    third = tree.insert(A, None, [1, 1], [30])  # ends inside: the run is cut there
    assert third.twins == [10] and third.node.end == 1
    assert tree.total_pages == 4 and {20, 21, 30}.isdisjoint(
        page for node in tree.walk() for page in node.pages
    )


def test_a_leaf_grows_for_its_only_user() -> None:
    tree = tree_of()
    node = tree.lock(tree.insert(A, None, [1, 1], [1]).node, 1)
    assert tree.insert(A, node, [2, 2], [2]).node is node and list(node.pages) == [1, 2]
    assert tree.locked_pages == 2
    tree.lock(node, 2)  # a second user's pages end here
    child = tree.insert(A, node, [3, 3], [3]).node
    assert child is not node and tree.locked_pages == 2


def test_a_leaf_that_another_user_locked_does_not_grow() -> None:
    tree = tree_of()
    top = tree.lock(tree.insert(A, None, [1, 1], [1]).node, 1)
    tree.lock(top, 1)
    theirs = tree.insert(A, top, [2, 2], [2]).node
    tree.move_lock(top, theirs)
    mine = tree.insert(A, top, [2, 2, 3, 3], [8, 9])
    assert mine.twins == [2] and mine.node is not theirs and theirs.end == 2


def test_locking_inside_a_node_splits_it() -> None:
    tree = tree_of()
    leaf = tree.insert(A, None, [1, 1, 2, 2, 3, 3], [1, 2, 3]).node
    match = tree.match(A, [1, 1, 2, 2, 9, 9])
    assert (match.node, match.node_pages) == (leaf, 2)
    upper = tree.lock(match.node, match.node_pages)
    assert (list(upper.pages), list(leaf.pages), leaf.parent) == ([1, 2], [3], upper)
    assert (tree.locked_pages, tree.evictable_pages) == (2, 1)
    assert tree.evict_page().page == 3
    assert tree.evict_page() is None
    tree.unlock(upper)
    assert [tree.evict_page().page, tree.evict_page().page] == [2, 1]
    assert tree.total_pages == 0 and list(tree.walk()) == []
    with pytest.raises(LifecycleError):
        tree.unlock(upper)


def evict_all(tree: RadixTree) -> list[int]:
    pages = []
    while (evicted := tree.evict_page()) is not None:
        pages.append(evicted.page)
    return pages


def test_a_parent_goes_after_its_children() -> None:
    tree = tree_of()
    tree.insert(A, None, [1, 1, 2, 2, 3, 3], [1, 2, 3])
    tree.insert(A, None, [1, 1, 4, 4], [8, 4])
    order = evict_all(tree)
    assert sorted(order) == [1, 2, 3, 4] and order[-1] == 1
    assert order.index(3) < order.index(2)


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("lru", [2, 3, 4, 1]),
        ("lfu", [3, 4, 1, 2]),
        ("slru", [3, 4, 1, 2]),
        ("priority", [2, 4, 1, 3]),
    ],
)
def test_policies_choose_different_victims(policy: str, order: list[int]) -> None:
    tree = tree_of(policy=policy)
    for page in (1, 2, 3, 4):
        tree.insert(A, None, [page, page], [page], priority=int(page == 3))
    for _ in range(3):
        tree.match(A, [2, 2])  # often, but long ago
    for page in (3, 4, 1):
        tree.match(A, [page, page])
    if policy == "slru":  # once is not enough, twice protects
        tree.match(A, [1, 1])
        assert evict_all(tree) == [3, 4, 2, 1]
    else:
        assert evict_all(tree) == order


def test_probe_is_no_access() -> None:
    tree = tree_of()
    for page in (1, 2):
        tree.insert(A, None, [page, page], [page])
    assert tree.probe(A, [1, 1, 5]) == 2
    assert tree.evict_page().page == 1


def test_a_hit_lends_its_priority() -> None:
    """What an important request uses is not the first to go, whoever wrote it."""
    tree = tree_of(policy="priority")
    for page in (1, 2, 3):
        tree.insert(A, None, [page, page], [page], priority=int(page == 2))
    tree.match(A, [1, 1], priority=5)
    tree.match(A, [1, 1], priority=0)
    assert evict_all(tree) == [3, 2, 1]


def test_unprotected_pages_of_a_match() -> None:
    tree = tree_of()
    node = tree.insert(A, None, [1, 1, 2, 2, 3, 3], [1, 2, 3]).node
    tree.insert(A, node, [4, 4], [4])
    assert tree.unprotected(A, [1, 1, 2, 2, 9, 9]) == [1, 2]
    locked = tree.lock(node, 2)
    assert tree.unprotected(A, [1, 1, 2, 2, 3, 3, 4, 4], 7) == [3]
    tree.unlock(locked)
    tree.pin(A, [1, 1, 2, 2], 5.0)
    assert tree.unprotected(A, [1, 1, 2, 2, 3, 3, 4, 4]) == [3, 4]
    assert tree.unprotected(B, [1, 1]) == []


def test_what_was_derived_from_pages_goes_with_them() -> None:
    tree = tree_of()
    node = tree.insert(A, None, [1, 1, 2, 2, 3, 3], [1, 2, 3]).node
    node.derived = "kept"
    tree.match(A, [1, 1, 2, 2])
    tree.unlock(tree.lock(node, 3))
    assert node.derived == "kept" and tree.splits == 0
    tree.insert(A, node, [4, 4], [4])
    assert node.derived is None  # it grew
    node.derived = "kept"
    tree.replace(2, 1, 20)
    assert node.derived is None
    node.derived = "kept"
    assert tree.evict_page().page == 4 and node.derived is None
    node.derived = "kept"
    upper = tree.lock(node, 1)
    assert (upper.derived, node.derived, tree.splits) == (None, None, 1)


def test_eviction_can_spare_one_page() -> None:
    tree = tree_of()
    tree.insert(A, None, [1, 1, 2, 2], [1, 2])
    tree.insert(A, None, [3, 3], [3])
    assert tree.evict_page(keep=2).page == 3
    assert tree.evict_page(keep=2) is None
    assert tree.evict_page(keep=1).page == 2


def test_pins_protect_for_their_time() -> None:
    clock = FakeClock()
    tree = RadixTree(2, clock=clock)
    tree.insert(A, None, [1, 1, 2, 2, 3, 3], [1, 2, 3])
    assert tree.pin(A, [1, 1, 2, 2, 9, 9], 10.0) == 4  # what is cached of it
    assert (tree.pinned_pages, tree.evictable_pages) == (2, 1)
    assert evict_all(tree) == [3]
    clock.now += 6.0
    assert tree.pin(A, [1, 1, 2, 2], 10.0) == 4  # renewed
    clock.now += 6.0
    assert evict_all(tree) == [] and tree.pinned_pages == 2
    clock.now += 6.0
    assert tree.evictable_pages == 2 and evict_all(tree) == [2, 1]


def test_pins_nest_and_end_one_by_one() -> None:
    tree = tree_of()
    tree.insert(A, None, [1, 1, 2, 2], [1, 2])
    tree.pin(A, [1, 1], 100.0)
    tree.pin(A, [1, 1, 2, 2], 50.0)
    assert tree.unpin(A, [1, 1, 5, 5]) == 2  # the short one: the long one is not on this path
    assert tree.pinned_pages == 2
    tree.pin(A, [1, 1], 100.0)
    assert tree.break_pin() and tree.pinned_pages == 1  # the long one would have ended first
    assert tree.unpin(A, [1, 1, 2, 2]) == 2 and tree.unpin(A, [1, 1, 2, 2]) == 0
    assert not tree.break_pin()
    assert tree.pinned_pages == 0 and evict_all(tree) == [2, 1]


def test_a_renewed_pin_is_broken_by_its_new_time() -> None:
    tree = tree_of()
    tree.insert(A, None, [1, 1], [1])
    tree.insert(A, None, [2, 2], [2])
    tree.pin(A, [1, 1], 10.0)
    tree.pin(A, [2, 2], 50.0)
    tree.pin(A, [1, 1], 100.0)
    assert tree.break_pin() and evict_all(tree) == [2]


def test_a_pin_covers_its_tokens_and_no_more() -> None:
    tree = tree_of()
    node = tree.insert(A, None, [1, 1, 2, 2], [1, 2]).node
    tree.pin(A, [1, 1, 2, 2], 100.0)
    assert tree.insert(A, node, [3, 3], [3]).node is not node  # the pinned leaf does not grow
    tree.lock(node, 1)  # cut in two: both parts stay pinned
    assert (tree.pinned_pages, [n.pin_count for n in node.path()]) == (2, [1, 1])
    assert evict_all(tree) == [3]
    assert tree.break_pin() and tree.pinned_pages == 0
    assert evict_all(tree) == [2]


def test_a_namespace_without_pages_is_forgotten() -> None:
    tree = tree_of()
    for i in range(10):
        tree.insert(Namespace(str(i), None, "minima"), None, [1, 1, 2, 2], [2 * i, 2 * i + 1])
    evict_all(tree)
    assert not tree._roots
    tree.insert(A, None, [1, 1], [1])
    assert tree.match(A, [1, 1]).pages == [1]


def test_replace_swaps_a_page_in_place() -> None:
    tree = tree_of()
    tree.insert(A, None, [1, 1, 2, 2], [1, 2])
    tree.replace(2, 1, 20)
    assert tree.match(A, [1, 1, 2, 2]).pages == [1, 20]
    assert 2 not in tree and tree.position_of(20) == 1 and tree.position_of(2) is None
    with pytest.raises(LifecycleError):
        tree.replace(20, 0, 5)
    assert evict_all(tree) == [20, 1]


def test_eviction_among_many_leaves_is_not_a_walk() -> None:
    leaf_count = 50_000
    tree = tree_of(1)
    for page in range(leaf_count):
        tree.insert(A, None, [page], [page])
    assert len(leaves(tree)) == leaf_count
    for page in range(100):
        tree.match(A, [page])  # outdated keys of the oldest leaves
    before = tree.victim_operations
    assert [tree.evict_page().page for _ in range(1000)] == list(range(100, 1100))
    # 100 corrected keys, and one pop for each leaf that ran empty.
    assert tree.victim_operations - before <= 100 + 1000
    before = tree.victim_operations
    for page in range(2000, 3000):  # hits without evictions cost the queue nothing
        node = tree.lock(tree.match(A, [page]).node, 1)
        tree.unlock(node)
    assert tree.victim_operations == before
    assert len(tree._victims) <= leaf_count


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError):
        RadixTree(0)
    with pytest.raises(ValueError, match="lru"):
        RadixTree(1, policy="random")
    with pytest.raises(ValueError):
        tree_of().insert(A, None, [1, 1, 1], [1])
    with pytest.raises(ValueError):
        tree_of().insert(A, None, [], [])
