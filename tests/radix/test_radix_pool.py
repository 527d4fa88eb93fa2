from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minima_radix import (
    OutOfPages,
    PageKindSpec,
    PagePool,
    PageReferenceError,
    ReferenceKind,
    choose_slab_granules,
)

REQUEST, CACHE = ReferenceKind.REQUEST, ReferenceKind.CACHE
CONVERSION, READER = ReferenceKind.CONVERSION, ReferenceKind.READER

FP8, TQ3 = PageKindSpec("fp8", 5), PageKindSpec("tq3", 2)


@pytest.fixture
def pool() -> PagePool:
    """Four slabs of 2 FP8 or 5 TQ3 pages, and a tail of 3 granules."""
    return PagePool([FP8, TQ3], 43, 10)


def allocate(pool: PagePool, kind: str, count: int) -> list[int]:
    return [pool.allocate(kind, REQUEST, 1) for _ in range(count)]


def release(pool: PagePool, pages: list[int]) -> None:
    for page in pages:
        pool.release(page, REQUEST, 1)


def test_slabs_flow_between_kinds(pool: PagePool) -> None:
    fp8 = allocate(pool, "fp8", 8)
    assert pool.available("fp8") == pool.available("tq3") == 0
    with pytest.raises(OutOfPages) as error:
        pool.allocate("tq3", REQUEST, 1)
    assert error.value.needed_kind == "tq3" and not error.value.fragmented
    release(pool, fp8[:1])
    assert (pool.available("fp8"), pool.available("tq3")) == (1, 0)  # half a slab
    release(pool, fp8[1:2])
    assert (pool.available("fp8"), pool.available("tq3")) == (2, 5)
    tq3 = allocate(pool, "tq3", 5)
    assert tq3 == [0, 2, 4, 6, 8]
    assert {pool.kind_of(page) for page in tq3} == {"tq3"}


def test_allocation_prefers_the_lowest_slab(pool: PagePool) -> None:
    pages = allocate(pool, "fp8", 6)
    release(pool, [pages[5], pages[1], pages[2]])
    assert allocate(pool, "fp8", 3) == [5, 10, 25]


def test_stats_account_for_every_granule(pool: PagePool) -> None:
    pages = allocate(pool, "fp8", 3)
    pool.allocate("tq3", CACHE, 0)
    pool.acquire(pages[0], CONVERSION, 9)
    pool.release(pages[0], REQUEST, 1)
    stats = pool.stats()
    assert stats.accounted_granules == stats.total_granules == 43
    assert stats.free_slabs == 1 and stats.unassigned_granules == 3
    fp8, tq3 = stats.kinds["fp8"], stats.kinds["tq3"]
    assert (fp8.slabs, fp8.pages_used, fp8.pages_free) == (2, 3, 1)
    assert (fp8.request_pages, fp8.conversion_pages, fp8.evictable_slabs) == (2, 1, 0)
    assert (tq3.slabs, tq3.cache_pages, tq3.evictable_slabs) == (1, 1, 1)
    assert pool.cache_only_granules == 2


@pytest.mark.parametrize("reference", [REQUEST, CACHE, CONVERSION])
def test_a_holder_takes_and_drops_a_reference_once(
    pool: PagePool, reference: ReferenceKind
) -> None:
    page = pool.allocate("fp8", reference, 7)
    with pytest.raises(PageReferenceError):
        pool.acquire(page, reference, 7)
    with pytest.raises(PageReferenceError):
        pool.release(page, reference, 8)
    pool.release(page, reference, 7)
    for call in (pool.acquire, pool.release):
        with pytest.raises(PageReferenceError):
            call(page, reference, 7)
    assert pool.available("fp8") == 8


def test_a_page_lives_until_its_last_reference(pool: PagePool) -> None:
    page = pool.allocate("fp8", REQUEST, 1)
    pool.acquire(page, REQUEST, 2)
    pool.acquire(page, CACHE, 0)
    pool.acquire(page, CONVERSION, 3)
    assert sorted(pool.request_holders(page)) == [1, 2] and pool.is_cached(page)
    for reference, holder in ((REQUEST, 1), (CONVERSION, 3), (REQUEST, 2)):
        pool.release(page, reference, holder)
        assert pool.kind_of(page) == "fp8"
    assert pool.cache_only_granules == 5
    pool.release(page, CACHE, 0)
    with pytest.raises(PageReferenceError):
        pool.kind_of(page)


def test_readers_hold_pages_by_leases_only(pool: PagePool) -> None:
    with pytest.raises(PageReferenceError):
        pool.allocate("fp8", READER, 1)
    page = pool.allocate("fp8", REQUEST, 1)
    with pytest.raises(PageReferenceError):
        pool.acquire(page, READER, 1)
    assert pool.stats().free_slabs == 3


def test_a_lease_keeps_what_was_held_when_it_began(pool: PagePool) -> None:
    first, second = allocate(pool, "fp8", 2)
    early = pool.begin_read()
    pool.release(first, REQUEST, 1)
    late = pool.begin_read()
    pool.release(second, REQUEST, 1)
    assert pool.stats().kinds["fp8"].reader_pages == 2
    with pytest.raises(PageReferenceError):
        pool.acquire(first, REQUEST, 2)  # its content may be replaced any moment
    pool.end_read(early)
    assert pool.stats().kinds["fp8"].reader_pages == 1
    pool.end_read(late)
    assert pool.available("fp8") == 8
    with pytest.raises(PageReferenceError):
        pool.end_read(late)


def test_leases_may_end_in_any_order(pool: PagePool) -> None:
    first = pool.begin_read()
    page = pool.allocate("fp8", REQUEST, 1)
    second = pool.begin_read()
    pool.release(page, REQUEST, 1)
    third = pool.begin_read()
    pool.end_read(second)
    assert pool.is_limbo(page)
    pool.end_read(first)
    assert pool.available("fp8") == 8  # the third began when the page was gone
    pool.end_read(third)


def test_a_page_that_only_the_cache_held_has_no_readers(pool: PagePool) -> None:
    page = pool.allocate("fp8", REQUEST, 1)
    pool.acquire(page, CACHE, 0)
    pool.release(page, REQUEST, 1)
    pool.begin_read()
    pool.release(page, CACHE, 0)  # an eviction while a batch of other requests runs
    assert pool.available("fp8") == 8


def test_readers_outlive_the_cache_when_a_request_left_during_the_batch(pool: PagePool) -> None:
    page = pool.allocate("fp8", REQUEST, 1)
    pool.acquire(page, CACHE, 0)
    lease = pool.begin_read()
    pool.release(page, REQUEST, 1)
    pool.release(page, CACHE, 0)
    assert pool.is_limbo(page)
    pool.end_read(lease)
    assert pool.available("fp8") == 8


def test_attainable_counts_what_eviction_alone_and_with_moves_gives(pool: PagePool) -> None:
    tq3 = [pool.allocate("tq3", CACHE, 0) for _ in range(20)]
    assert pool.attainable("fp8") == 8 and pool.available("fp8") == 0
    for page in (tq3[0], tq3[5]):
        pool.acquire(page, REQUEST, 1)
    assert pool.attainable("fp8") == 4  # two slabs have a page that stays
    assert pool.attainable("fp8", ["tq3"]) == 6  # one slab holds both


def test_allocate_beside_fills_the_fullest_other_slab(pool: PagePool) -> None:
    tq3 = allocate(pool, "tq3", 15)
    release(pool, [tq3[0], tq3[1], tq3[5], tq3[10], tq3[11], tq3[12]])
    assert pool.allocate_beside(tq3[13], CONVERSION, 1) == tq3[5]
    assert pool.allocate_beside(tq3[6], CONVERSION, 2) in tq3[:2]
    with pytest.raises(OutOfPages):
        alone = pool.allocate("fp8", REQUEST, 1)
        pool.allocate_beside(alone, CONVERSION, 1)


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError):
        PagePool([FP8, FP8], 100, 10)
    with pytest.raises(ValueError):
        PagePool([FP8], 100, 4)
    with pytest.raises(ValueError):
        PagePool([FP8], 9, 10)
    with pytest.raises(ValueError):
        PageKindSpec("none", 0)
    with pytest.raises(ValueError):
        PagePool([FP8], 100).available("bf16")


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    total=st.integers(40, 3000),
    waste=st.sampled_from([0.0, 0.02, 0.1]),
)
def test_slab_choice_is_the_smallest_good_one(sizes: list[int], total: int, waste: float) -> None:
    kinds = [PageKindSpec(str(i), size) for i, size in enumerate(sizes)]

    def worst(slab: int) -> float:
        return max(slab % size / slab for size in sizes)

    largest = max(sizes)
    allowed = range(largest, max(largest, total // 16) + 1)
    good = [slab for slab in allowed if worst(slab) <= waste]
    chosen = choose_slab_granules(kinds, total, waste)
    if good:
        assert chosen == good[0]
    else:
        assert worst(chosen) == min(map(worst, allowed))


def test_many_pages_are_cheap_to_keep() -> None:
    pool = PagePool([PageKindSpec("fp8", 8)], 8 * 200_000, 8 * 100)
    pages = [pool.allocate("fp8", CACHE, 0) for _ in range(200_000)]
    assert pages == list(range(0, 8 * 200_000, 8))
    book = pool._books["fp8"]
    assert len(book._open) <= 1  # full slabs leave the heap
    for page in pages[::2]:
        pool.release(page, CACHE, 0)
    for page in pages[1::2]:
        pool.release(page, CACHE, 0)
    assert pool.stats().free_slabs == 2000 and len(book._open) <= 2000
