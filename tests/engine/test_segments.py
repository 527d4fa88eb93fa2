"""Segments of a batch equal those found page by page; kinds of addresses equal the pool's."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minima_kernels import KVGeometry
from minima_radix import Namespace, OutOfPages, RequestTable
from sglang_minima.cache.arena import KVArena
from sglang_minima.cache.prefix_cache import PrefixCache
from sglang_minima.cache.profile import build_profile
from sglang_minima.runner.segments import Cohorts, build_segments, count_reads
from sglang_minima.server_args import ServerArgs

PAGE = 4
GEOMETRY = KVGeometry(num_layers=1, num_kv_heads=1, head_dim=16, page_size=PAGE)
NAMESPACE = Namespace(None, None, "minima")
Page = tuple[int, int, int]
"""(address, kind index, valid tokens)"""


def make_cache(pages: int, tree: bool) -> PrefixCache:
    args = ServerArgs(page_size=PAGE, disable_radix_cache=not tree)
    profile = build_profile(args, GEOMETRY, torch.float32)
    size = pages * profile.recent.bytes_per_page(GEOMETRY)
    return PrefixCache(args, KVArena(torch.zeros(size, dtype=torch.uint8), GEOMETRY, profile))


def read_pages(cache: PrefixCache, table: RequestTable, length: int) -> list[Page]:
    """What a reader attends to, from its block table alone."""
    names = [kind.name for kind in cache.profile.kinds]
    return [
        (page, names.index(cache.pool.kind_of(page)), min(PAGE, length - position * PAGE))
        for position, page in enumerate(table.pages[: -(-length // PAGE)])
    ]


def check_batch(cache: PrefixCache, lengths: dict[int, int], cohorts: Cohorts) -> None:
    """What is kept between batches changes nothing. Every reader finds its pages once, in order; a
    tree node's pages are listed once."""
    tables = cache.lifecycle.tables
    readers = [(tables[rid], length) for rid, length in lengths.items()]
    rows = [table for table, _ in readers]
    kept = build_segments(rows, list(lengths.values()), cache, cohorts)
    fresh = build_segments(rows, list(lengths.values()), cache)
    assert all(np.array_equal(*pair) for pair in zip(kept, fresh, strict=True))
    segments = list(kept.rows())
    found: list[list[Page]] = [[] for _ in readers]
    for segment in segments:
        assert len(segment.addresses) and len(segment.readers)
        last = len(segment.addresses) - 1
        for index, page in enumerate(segment.addresses.tolist()):
            valid = segment.last_page_len if index == last else PAGE
            for reader in segment.readers.tolist():
                found[reader].append((page, segment.kind_index, valid))
    assert found == [read_pages(cache, table, length) for table, length in readers]
    listed = Counter(page for segment in segments for page in segment.addresses.tolist())
    assert not listed or max(listed.values()) == 1
    sizes = {kind.name: kind.bytes_per_page(GEOMETRY) for kind in cache.profile.kinds}
    assert count_reads(kept, cache) == (
        sum(sizes[cache.pool.kind_of(page)] for page in listed),
        sum(sizes[cache.pool.kind_of(page)] for pages in found for page, _, _ in pages),
    )


def check_kinds(cache: PrefixCache) -> None:
    names = [kind.name for kind in cache.profile.kinds]
    entries = list(cache.pool.references())
    pages = np.array([entry.page for entry in entries], dtype=np.int64)
    assert cache.kind_indices(pages).tolist() == [names.index(entry.kind) for entry in entries]


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), tree=st.booleans(), pages=st.integers(24, 96))
def test_segments_equal_a_walk_of_the_block_tables(seed: int, tree: bool, pages: int) -> None:
    """Random admissions, growth, tiers, evictions and ends; two tokens make prefixes collide."""
    rng = random.Random(seed)
    cache = make_cache(pages, tree)
    lifecycle = cache.lifecycle
    tokens: dict[int, list[int]] = {}
    cohorts, share = Cohorts(), rng.choice([0.8, 1.0])
    for rid in range(1, 60):
        action = rng.choice(["admit", "admit", "grow", "grow", "retier", "end"])
        live = list(tokens)
        try:
            if action == "admit" or not live:
                tokens[rid] = [rng.randrange(2) for _ in range(rng.randrange(1, 10 * PAGE))]
                lifecycle.admit(rid, NAMESPACE, tokens[rid], len(tokens[rid]) - 1)
                if lifecycle.table(rid).copy_hold is not None:
                    lifecycle.end_copy(rid)
                rest = len(tokens[rid]) - lifecycle.table(rid).committed
                lifecycle.reserve(rid, rest)
                lifecycle.commit(rid, rest)
                lifecycle.seal(rid, tokens[rid])
            elif action == "grow":
                chosen = rng.choice(live)
                fresh = [rng.randrange(2) for _ in range(rng.randrange(1, 3 * PAGE))]
                lifecycle.reserve(chosen, len(fresh))
                tokens[chosen] += fresh
                lifecycle.commit(chosen, len(fresh))
                lifecycle.seal(chosen, tokens[chosen])
            elif action == "retier":
                table = lifecycle.table(rng.choice(live))
                if table.sealed_pages:
                    position = rng.randrange(table.sealed_pages)
                    kind = rng.choice(cache.profile.kinds).name
                    if kind != cache.pool.kind_of(table.pages[position]):
                        page = table.pages[position]
                        lifecycle.publish(lifecycle.begin_retier(page, position, kind))
            else:
                chosen = rng.choice(live)
                lifecycle.release(chosen)
                del tokens[chosen]
        except OutOfPages:
            victim = rng.choice(list(tokens))
            lifecycle.release(victim)
            del tokens[victim]
        check_kinds(cache)
        chosen_rids = [rid for rid in tokens if rng.random() < share]
        check_batch(cache, {rid: lifecycle.table(rid).committed for rid in chosen_rids}, cohorts)


def test_a_shared_node_is_read_once_by_all() -> None:
    cache = make_cache(64, tree=True)
    for rid in range(1, 4):
        tokens = [7] * (3 * PAGE) + [rid] * 2
        cache.lifecycle.admit(rid, NAMESPACE, tokens, len(tokens) - 1)
        if cache.lifecycle.table(rid).copy_hold is not None:
            cache.lifecycle.end_copy(rid)
        rest = len(tokens) - cache.lifecycle.table(rid).committed
        cache.lifecycle.reserve(rid, rest)
        cache.lifecycle.commit(rid, rest)
        cache.lifecycle.seal(rid, tokens)
    tables = [cache.lifecycle.table(rid) for rid in range(1, 4)]
    segments = list(build_segments(tables, [3 * PAGE + 2] * 3, cache).rows())
    assert [s.readers.tolist() for s in segments] == [[0, 1, 2], [0], [1], [2]]
    assert [len(s.addresses) for s in segments] == [3, 1, 1, 1]
    assert [s.last_page_len for s in segments] == [PAGE, 2, 2, 2]
