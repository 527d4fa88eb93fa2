"""The checker sees each kind of damage."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from radix_world import NAMESPACES, World

from minima_radix import InvariantViolation, ReferenceKind, check

A = NAMESPACES[0]


@pytest.fixture
def world() -> World:
    """Requests 1 and 2 share page (1, 1); the first has an open page; (7, 7) is only cached."""
    world = World(2)
    for rid, prompt in ((1, (1, 1, 2, 2, 3)), (2, (1, 1, 4, 4)), (3, (7, 7))):
        world.admit(rid, A, prompt)
        world.step(rid, len(prompt) - world.lifecycle.table(rid).committed)
    world.release(3)
    check(world.lifecycle)
    return world


def leak_a_page(world: World) -> None:
    world.pool.allocate("fp8", ReferenceKind.REQUEST, 77)


def free_a_page_in_use(world: World) -> None:
    world.pool.release(world.lifecycle.table(1).pages[2], ReferenceKind.REQUEST, 1)


def forget_the_cache_reference(world: World) -> None:
    world.pool.release(world.lifecycle.table(1).pages[0], ReferenceKind.CACHE, 0)


def forget_a_conversion(world: World) -> None:
    world.begin(world.lifecycle.table(1).pages[0], 0, "tq3")
    world.lifecycle.conversions.clear()


def cover_a_position_twice(world: World) -> None:
    pages = world.lifecycle.table(1).pages
    pages[2] = pages[1]


def commit_without_pages(world: World) -> None:
    world.lifecycle.table(1).committed = 7


def seal_the_open_page(world: World) -> None:
    world.lifecycle.table(1).sealed_pages = 3


def share_an_open_page(world: World) -> None:
    world.pool.acquire(world.lifecycle.table(1).pages[2], ReferenceKind.CACHE, 0)


def lose_a_lock(world: World) -> None:
    node = world.lifecycle.table(1).node
    assert node is not None
    world.tree.unlock(node)


def lock_the_wrong_node(world: World) -> None:
    table = world.lifecycle.table(1)
    assert table.node is not None
    table.node = table.node.parent


def evict_a_parent(world: World) -> None:
    node = world.lifecycle.table(1).node
    assert node is not None and node.parent is not None
    node.parent = None


def break_an_edge(world: World) -> None:
    node = world.lifecycle.table(1).node
    assert node is not None
    node.key.append(0)


def lose_a_victim(world: World) -> None:
    node = world.tree.match(A, (7, 7)).node
    assert node is not None
    node.queued = False


def pin_without_a_pin(world: World) -> None:
    node = world.tree.match(A, (7, 7)).node
    assert node is not None
    node.pin_count += 1


def miscount_locked_pages(world: World) -> None:
    world.tree._protection.locked_pages += 1


def miscount_states(world: World) -> None:
    world.pool._books["fp8"].states[ReferenceKind.CACHE] += 1


def miscount_used_pages(world: World) -> None:
    world.pool._books["fp8"].used += 1


def miscount_evictable_slabs(world: World) -> None:
    world.pool._books["fp8"].evictable_slabs += 1


def lose_a_slab(world: World) -> None:
    world.pool._free_slabs.pop()


def invent_a_page(world: World) -> None:
    page = world.lifecycle.table(1).pages[0]
    world.pool._pages[page + 1] = world.pool._pages[page]


def keep_an_empty_slab(world: World) -> None:
    index = world.pool._free_slabs.pop(0)
    world.pool._books["fp8"].add_slab(index, world.pool._slabs[index])


def index_a_page_elsewhere(world: World) -> None:
    page = world.lifecycle.table(1).pages[0]
    world.tree._node_of[page] = world.tree.match(A, (7, 7)).node


def move_a_node(world: World) -> None:
    node = world.tree.match(A, (7, 7)).node
    assert node is not None
    node.start += 1


def remove_a_locked_node(world: World) -> None:
    node = world.lifecycle.table(1).node
    assert node is not None
    world.tree._remove(node)


def never_free_after_reading(world: World) -> None:
    lease = world.lifecycle.begin_read()
    world.release(1)
    world.pool._limbo.clear()
    world.lifecycle.end_read(lease)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (leak_a_page, "requests [77] recorded, [] found"),
        (free_a_page_in_use, "is free but in use"),
        (forget_the_cache_reference, "cached False recorded, 1 times in the tree"),
        (forget_a_conversion, "conversions"),
        (cover_a_position_twice, "a page serves two positions"),
        (commit_without_pages, "7 tokens do not fit"),
        (seal_the_open_page, "sealed or bound before it is written"),
        (share_an_open_page, "is shared"),
        (lose_a_lock, "locks and"),
        (lock_the_wrong_node, "its lock does not end with its bound pages"),
        (evict_a_parent, "its parent is gone"),
        (break_an_edge, "tokens and pages do not match"),
        (lose_a_victim, "eviction does not know this leaf"),
        (pin_without_a_pin, "0 locks and 1 pins counted, 0 and 0 found"),
        (miscount_locked_pages, "locked pages counted"),
        (miscount_states, "cache pages counted"),
        (miscount_used_pages, "pages in use, "),
        (miscount_evictable_slabs, "evictable slabs"),
        (lose_a_slab, "granules are accounted for"),
        (invent_a_page, "outside the slabs"),
        (keep_an_empty_slab, "a slab of 2 pages has 0 in use"),
        (index_a_page_elsewhere, "a page is indexed elsewhere"),
        (move_a_node, "does not begin where its parent ends"),
        (remove_a_locked_node, "its bound pages are not those of the tree"),
        (never_free_after_reading, "is lost"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_damage_is_seen(world: World, damage: Callable[[World], None], words: str) -> None:
    damage(world)
    with pytest.raises(InvariantViolation) as error:
        check(world.lifecycle)
    assert any(words in violation for violation in error.value.violations), str(error.value)
    assert all(violation in str(error.value) for violation in error.value.violations)
