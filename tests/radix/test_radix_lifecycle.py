from __future__ import annotations

import pytest
from radix_world import NAMESPACES, FakeClock, World

from minima_radix import (
    LifecycleError,
    OutOfPages,
    PageKindSpec,
    PageLifecycle,
    PagePool,
    PageReferenceError,
    RadixTree,
    ReferenceKind,
    Sealed,
    check,
)

A, B = NAMESPACES


def tokens(*values: int, page_size: int = 4) -> tuple[int, ...]:
    """One full page of each value."""
    return tuple(value for value in values for _ in range(page_size))


def run(world: World, rid: int, prompt: tuple[int, ...]) -> int:
    """Admits and prefills a whole prompt; returns its cached tokens."""
    cached = world.admit(rid, A, prompt).cached_tokens
    assert world.step(rid, len(prompt) - cached)
    world.verify()
    return cached


@pytest.fixture
def world() -> World:
    return World(4)


def test_append_commit_seal(world: World) -> None:
    lifecycle = world.lifecycle
    prompt = (*tokens(1, 2), 3)
    assert lifecycle.admit(1, A, prompt, 8).cached_tokens == 0
    pages = lifecycle.reserve(1, 9)
    assert len(pages) == 3 and lifecycle.reserve(1, 9) == []
    assert lifecycle.seal(1, prompt) == []  # nothing is written yet
    lifecycle.commit(1, 9)
    assert lifecycle.seal(1, prompt) == [Sealed(0, pages[0], None), Sealed(1, pages[1], None)]
    assert lifecycle.seal(1, prompt) == []
    table = lifecycle.table(1)
    assert (list(table.pages), table.committed, table.sealed_pages, table.bound_pages) == (
        (pages, 9, 2, 2)
    )
    assert world.tree.total_pages == world.tree.locked_pages == 2
    check(lifecycle)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_the_next_turn_finds_prompt_and_answer(page_size: int) -> None:
    world = World(page_size)
    conversation: tuple[int, ...] = ()
    for turn in range(4):
        prompt = (*conversation, *[10 + turn] * page_size, 1)
        cached = run(world, turn, prompt)
        assert cached == len(conversation) // page_size * page_size
        world.live[turn].tokens = conversation = (*prompt, *[20 + turn] * page_size)
        assert world.step(turn, page_size)
        world.release(turn)
        world.verify()
    world.close()


def test_pages_are_shared_in_the_middle_of_a_prefill(world: World) -> None:
    prompt = tokens(1, 2, 3)
    world.admit(1, A, prompt)
    world.step(1, 6)
    assert world.admit(2, A, prompt).cached_tokens == 4
    assert world.lifecycle.table(2).pages[0] == world.lifecycle.table(1).pages[0]
    world.verify()


def test_twins_end_on_the_same_pages(world: World) -> None:
    prompt = tokens(1, 2)
    world.admit(1, A, prompt)
    world.admit(2, A, prompt)
    world.step(1, 8)
    own = world.lifecycle.reserve(2, 8)
    world.allocated(own)
    used = world.pool.stats().kinds["fp8"].pages_used
    world.step(2, 8)
    assert world.lifecycle.table(2).pages == world.lifecycle.table(1).pages
    assert world.pool.stats().kinds["fp8"].pages_used == used - 2
    assert world.lifecycle.counters.deduplicated_pages == 2
    world.verify()


def test_a_twin_takes_the_page_in_the_kind_that_the_tree_has(world: World) -> None:
    prompt = tokens(1, 2)
    world.admit(1, A, prompt)
    run(world, 2, prompt)
    source = world.lifecycle.table(2).pages[0]
    stale = world.begin(source, 0, "tq3")
    assert world.publish(stale)
    world.step(1, 8)
    assert world.lifecycle.table(1).pages[0] == stale.destination
    assert world.pool.kind_of(stale.destination) == "tq3"
    world.verify()


def test_copy_on_write_holds_its_source(world: World) -> None:
    run(world, 1, tokens(1, 2))
    world.release(1)
    admission = world.admit(2, A, (*tokens(1), 2, 2, 9, 9, 9))
    assert (admission.cached_tokens, admission.partial_tokens) == (4, 2)
    assert admission.partial_page is not None
    world.lifecycle.flush()
    assert admission.partial_page not in world.tree
    assert world.pool.kind_of(admission.partial_page) == "fp8"  # still there to copy from
    world.lifecycle.end_copy(2)
    with pytest.raises(PageReferenceError):
        world.pool.kind_of(admission.partial_page)
    with pytest.raises(LifecycleError):
        world.lifecycle.end_copy(2)
    assert world.lifecycle.counters.copies_on_write == 1
    check(world.lifecycle)


def test_an_abort_drops_the_copy_and_the_open_page_but_not_sealed_ones(world: World) -> None:
    run(world, 1, tokens(1, 2))
    world.release(1)
    world.admit(2, A, (*tokens(1), 2, 2, *tokens(9)))
    world.step(2, 5)
    world.admit(3, A, (*tokens(1), 2, 2, *tokens(8)))
    world.release(3)
    world.release(2)
    world.verify()
    assert world.pool.stats().kinds["fp8"].pages_used == world.tree.total_pages == 3
    for call in (world.lifecycle.release, world.lifecycle.table):
        with pytest.raises(LifecycleError):
            call(2)


def test_a_rid_is_admitted_once(world: World) -> None:
    world.admit(1, A, tokens(1))
    with pytest.raises(LifecycleError):
        world.lifecycle.admit(1, A, tokens(1), 3)
    check(world.lifecycle)


def test_tokens_beyond_the_pages_are_not_committed(world: World) -> None:
    world.admit(1, A, tokens(1))
    world.lifecycle.reserve(1, 4)
    for count in (5, -1):
        with pytest.raises(LifecycleError):
            world.lifecycle.commit(1, count)
    world.lifecycle.commit(1, 4)
    with pytest.raises(LifecycleError):
        world.lifecycle.seal(1, (1, 1))
    world.contents[world.lifecycle.table(1).pages[0]] = (A, tokens(1))
    world.seal(1)
    world.verify()


# ---- kinds


def test_retier_and_promotion_publish_to_every_reader(world: World) -> None:
    prompt = tokens(1, 2, 3)
    run(world, 1, prompt)
    run(world, 2, prompt)
    source = world.lifecycle.table(1).pages[1]
    for kind in ("tq3", "fp8"):
        page = world.lifecycle.table(1).pages[1]
        conversion = world.begin(page, 1, kind)
        assert world.lifecycle.table(2).pages[1] == page  # not yet
        assert world.publish(conversion)
        for rid in (1, 2):
            assert world.lifecycle.table(rid).pages[1] == conversion.destination
        assert world.tree.match(A, prompt).pages[1] == conversion.destination
        world.verify()
    assert world.lifecycle.counters.retiered_pages == {("fp8", "tq3"): 1, ("tq3", "fp8"): 1}
    assert world.lifecycle.counters.compacted_pages == 0
    assert source not in world.tree or world.lifecycle.position_of(source) == 1


def test_the_source_waits_for_its_readers(world: World) -> None:
    run(world, 1, tokens(1))
    lease = world.begin_read()
    conversion = world.begin(world.lifecycle.table(1).pages[0], 0, "tq3")
    assert world.publish(conversion)
    assert world.pool.is_limbo(conversion.source)
    world.end_read(lease)
    with pytest.raises(PageReferenceError):
        world.pool.kind_of(conversion.source)


def test_nobody_wants_the_result_any_more(world: World) -> None:
    run(world, 1, tokens(1))
    conversion = world.begin(world.lifecycle.table(1).pages[0], 0, "tq3")
    world.release(1)
    world.lifecycle.flush()
    assert not world.publish(conversion)
    assert not list(world.pool.references())
    assert not world.lifecycle.counters.retiered_pages


def test_a_cancelled_conversion_leaves_the_source(world: World) -> None:
    run(world, 1, tokens(1))
    source = world.lifecycle.table(1).pages[0]
    conversion = world.begin(source, 0, "tq3")
    world.cancel(conversion)
    world.verify()
    assert list(world.lifecycle.table(1).pages) == [source]
    for call in (world.lifecycle.publish, world.lifecycle.cancel):
        with pytest.raises(LifecycleError):
            call(conversion)


@pytest.mark.parametrize("cached", [True, False])
def test_only_sealed_pages_are_converted_once_at_a_time(cached: bool) -> None:
    world = World(4, cached=cached)
    run(world, 1, (*tokens(1, 2), 3))
    table = world.lifecycle.table(1)
    for page, position in ((table.pages[2], 2), (table.pages[0], 1), (table.pages[0], 7)):
        with pytest.raises(LifecycleError):
            world.lifecycle.begin_retier(page, position, "tq3")
    conversion = world.begin(table.pages[0], 0, "tq3")
    with pytest.raises(LifecycleError):
        world.lifecycle.begin_retier(table.pages[0], 0, "tq3")
    with pytest.raises(LifecycleError):  # what is being filled is not sealed
        world.lifecycle.begin_retier(conversion.destination, 0, "fp8")
    assert world.lifecycle.position_of(table.pages[1]) == 1
    with pytest.raises(LifecycleError):
        world.lifecycle.position_of(table.pages[2])
    assert world.publish(conversion)
    world.verify()
    world.close()


def test_without_room_a_conversion_holds_nothing() -> None:
    world = World(4, total_granules=10)
    run(world, 1, tokens(1, 2))
    with pytest.raises(OutOfPages):
        world.lifecycle.begin_retier(world.lifecycle.table(1).pages[0], 0, "tq3")
    world.verify()


def test_a_conversion_never_evicts_its_source() -> None:
    world = World(4, total_granules=20)
    run(world, 1, tokens(1, 2))
    world.release(1)
    run(world, 2, tokens(3, 4))
    world.release(2)
    oldest = world.tree.match(A, tokens(1, 2)).pages[1]  # in an evictable leaf's end
    world.tree.match(A, tokens(3, 4))
    conversion = world.begin(oldest, 1, "tq3")
    assert world.publish(conversion) and conversion.destination in world.tree
    world.verify()


# ---- memory


def test_requests_evict_the_cache_and_never_each_other() -> None:
    world = World(4, total_granules=20)
    run(world, 1, tokens(1, 2))
    world.release(1)
    run(world, 2, tokens(3, 4))
    assert world.lifecycle.counters.evicted_pages == 0
    run(world, 3, tokens(5, 6))
    assert world.lifecycle.counters.evicted_pages == 2
    world.admit(4, A, tokens(7))
    before = world.pool.stats()
    with pytest.raises(OutOfPages) as error:
        world.lifecycle.reserve(4, 1)
    assert not error.value.fragmented and world.pool.stats() == before
    world.verify()


def test_nothing_is_evicted_when_it_would_not_suffice() -> None:
    world = World(4, total_granules=20)
    run(world, 1, tokens(1))
    world.release(1)
    world.admit(2, A, tokens(5, 6, 7, 8, 9))
    with pytest.raises(OutOfPages):
        world.lifecycle.reserve(2, 20)
    assert world.tree.total_pages == 1


def scattered_world(held: tuple[int, ...]) -> World:
    """Three slabs of TQ3 pages in the cache, `held` of them in use, and one slab of FP8 pages.

    Cached page i has the token i; slabs hold five TQ3 or two FP8 pages. Requests 100 and 101 have
    an FP8 page each.
    """
    world = World(1, total_granules=40)
    for value in range(15):
        run(world, value, (value,))
        (page,) = world.lifecycle.table(value).pages
        assert world.publish(world.begin(page, 0, "tq3"))
        if value not in held:
            world.release(value)
    run(world, 100, (100,))
    run(world, 101, (101,))
    assert world.pool.available("fp8") == 0
    return world


def fix_in_place(world: World, *rids: int) -> None:
    for rid in rids:
        world.pool.acquire(world.lifecycle.table(rid).pages[0], ReferenceKind.CONVERSION, 900)


def test_scattered_memory_is_compacted_not_evicted() -> None:
    world = scattered_world(held=(0, 5, 10))
    world.admit(200, A, (200,))
    assert world.lifecycle.obtainable("fp8") == 4  # the three held pages fit in one slab
    with pytest.raises(OutOfPages) as error:
        world.lifecycle.reserve(200, 1)
    assert error.value.fragmented and error.value.compactable_kind == "tq3"
    assert world.lifecycle.counters.evicted_pages == 5  # one slab's worth
    assert world.lifecycle.compaction_moves("tq3", 9) == list(world.lifecycle.table(0).pages)
    assert world.compact("tq3") == 1
    assert world.step(200, 1)
    assert world.lifecycle.counters.evicted_pages == 5
    assert world.lifecycle.counters.compacted_pages == 1
    world.verify()


def test_when_pages_cannot_move_a_request_goes_on_evicting() -> None:
    world = scattered_world(held=(0, 5, 10))
    fix_in_place(world, 0, 5, 10)
    world.release(100)
    world.admit(200, A, (200,))
    assert world.lifecycle.reserve(200, 1)  # the page of request 100, the last in the cache
    assert world.lifecycle.counters.evicted_pages == 13


def test_when_no_slab_can_run_empty_the_rest_of_the_cache_is_spared() -> None:
    world = scattered_world(held=(0, 5, 10))
    fix_in_place(world, 0, 5, 10)
    world.admit(200, A, (200,))
    with pytest.raises(OutOfPages) as error:
        world.lifecycle.reserve(200, 1)
    assert not error.value.fragmented
    assert world.lifecycle.counters.evicted_pages == 5


def test_a_conversion_gives_up_where_a_request_goes_on() -> None:
    world = scattered_world(held=(0, 5, 10))
    fix_in_place(world, 0, 5, 10)
    world.release(100)
    with pytest.raises(OutOfPages) as error:
        world.lifecycle.begin_retier(world.lifecycle.table(0).pages[0], 0, "fp8")
    assert not error.value.fragmented
    assert world.lifecycle.counters.evicted_pages == 5


def test_compaction_empties_a_sparse_slab() -> None:
    world = World(1, total_granules=60)
    for value in range(15):
        run(world, value, (value,))
        (page,) = world.lifecycle.table(value).pages
        assert world.publish(world.begin(page, 0, "tq3"))
    slabs = world.pool.stats().kinds["tq3"].slabs
    assert slabs == 3
    # Leave 3, 2 and 1 pages in the slabs.
    for value in (0, 1, 5, 6, 7, 10, 11, 12, 13):
        world.release(value)
    world.lifecycle.flush()
    moves = world.lifecycle.compaction_moves("tq3", 10)
    assert moves == [world.lifecycle.table(14).pages[0]]
    assert world.compact("tq3") == 1
    assert world.pool.stats().kinds["tq3"].slabs == 2
    assert world.lifecycle.counters.compacted_pages == 1
    world.verify()
    # Six pages in two slabs: ten places, less than a slab is free.
    assert world.lifecycle.compaction_moves("tq3", 10) == []


def test_a_slab_with_an_open_page_is_not_compacted(world: World) -> None:
    run(world, 1, tokens(1))
    run(world, 2, (9, 9))
    run(world, 3, tokens(3))
    run(world, 4, (8, 8))
    run(world, 5, tokens(5, 6))
    for rid in (1, 3):
        world.release(rid)
    world.lifecycle.flush()
    assert [len(slab) for slab in world.pool.slabs_by_use("fp8")] == [1, 1, 2]
    # The sparse slabs hold the open pages of 2 and 4: the full one can be emptied instead.
    assert world.lifecycle.compaction_moves("fp8", 9) == list(world.lifecycle.table(5).pages)
    assert len(world.lifecycle.compaction_moves("fp8", 1)) == 1
    assert world.compact("fp8") == 2
    assert world.lifecycle.compaction_moves("fp8", 9) == []
    world.verify()


def test_the_durable_quota_bounds_what_the_cache_keeps_alone() -> None:
    world = World(4, quota=10)
    run(world, 1, tokens(1, 2, 3))
    assert world.pool.cache_only_granules == 0  # live requests are no part of it
    world.release(1)
    assert world.pool.cache_only_granules == 10 and world.tree.total_pages == 2
    run(world, 2, tokens(1, 2, 4))
    world.tree.pin(A, tokens(1, 2, 4), 60.0)
    world.release(2)
    assert world.tree.total_pages == 3  # pinned
    world.verify()


def test_a_pin_outranks_the_cache_but_no_live_request() -> None:
    world = World(4, total_granules=20)
    run(world, 1, tokens(1, 2))
    world.release(1)
    assert world.tree.pin(A, tokens(1, 2), 1000.0) == 8
    run(world, 2, tokens(3, 4))
    world.release(2)
    run(world, 3, tokens(5, 6))
    assert world.tree.probe(A, tokens(1, 2)) == 8 and world.tree.probe(A, tokens(3, 4)) == 0
    run(world, 4, tokens(7))
    assert world.tree.probe(A, tokens(1, 2)) == 4 and world.lifecycle.counters.broken_pins == 1
    world.verify()


def test_flush_keeps_what_live_requests_use(world: World) -> None:
    run(world, 1, tokens(1, 2))
    run(world, 2, tokens(1, 3))
    world.tree.pin(A, tokens(1, 3), 60.0)
    world.release(2)
    assert world.lifecycle.flush() == 1
    assert world.tree.total_pages == world.tree.locked_pages == 2
    world.verify()


def test_preempted_requests_come_back_to_their_pages(world: World) -> None:
    prompt = (*tokens(1, 2), 3)
    run(world, 1, prompt)
    pages = list(world.lifecycle.table(1).pages)
    world.release(1)
    assert world.admit(1, A, prompt).pages == pages[:2]
    world.verify()


def test_without_a_tree_pages_are_private() -> None:
    world = World(4, cached=False)
    run(world, 1, tokens(1, 2))
    assert world.admit(2, A, tokens(1, 2)).cached_tokens == 0
    table = world.lifecycle.table(1)
    assert (table.sealed_pages, table.bound_pages, table.node) == (2, 0, None)
    conversion = world.begin(table.pages[0], 0, "tq3")
    assert world.publish(conversion) and table.pages[0] == conversion.destination
    world.release(1)
    assert world.pool.stats().free_slabs == 6 and world.lifecycle.flush() == 0
    world.verify()


def test_priority_reaches_the_eviction_policy() -> None:
    lifecycle = PageLifecycle(
        pool := PagePool([PageKindSpec("fp8", 1)], 4, 1),
        RadixTree(1, "priority", FakeClock()),
        1,
        "fp8",
    )
    for rid, priority in ((1, 5), (2, 0), (3, 1)):
        lifecycle.admit(rid, A, (rid,), 0, priority)
        lifecycle.reserve(rid, 1)
        lifecycle.commit(rid, 1)
        lifecycle.seal(rid, (rid,))
        lifecycle.release(rid)
    lifecycle.admit(9, A, (9, 9, 9), 2)
    lifecycle.reserve(9, 3)
    assert lifecycle.tree is not None and lifecycle.tree.probe(A, (1,)) == 1
    assert pool.available("fp8") == 0


def test_misuse_is_refused() -> None:
    pool = PagePool([PageKindSpec("fp8", 1)], 4, 1)
    with pytest.raises(ValueError):
        PageLifecycle(pool, RadixTree(2), 4, "fp8")
    with pytest.raises(ValueError):
        PageLifecycle(pool, None, 4, "bf16")
