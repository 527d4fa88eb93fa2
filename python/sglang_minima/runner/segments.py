"""What a batch reads, as segments: found anew in every step, without a loop over pages.

Nothing is kept between steps, so nothing can be stale: a step costs a few operations for each
request and tree node that it reads, and array operations over the pages.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from minima_kernels.attention.segments import SegmentTable, offsets, ranges
from minima_radix import Node, RequestTable
from sglang_minima.cache.prefix_cache import PrefixCache


class KvReads(NamedTuple):
    """KV bytes that attention over some segments reads, all layers together."""

    shared: int
    """Each segment once, for all its readers."""
    per_request: int
    """Each segment once for each of its readers."""


def count_reads(segments: SegmentTable, cache: PrefixCache) -> KvReads:
    """What attention over the segments reads; whole pages."""
    sizes = cache.kind_bytes[segments.kind_index] * segments.num_pages
    return KvReads(int(sizes.sum()), int(sizes @ segments.num_readers))


def build_segments(readers: Sequence[tuple[RequestTable, int]], cache: PrefixCache) -> SegmentTable:
    """Cuts what the readers attend to into runs of pages with the same readers and kind.

    Every tree node on the path of several readers becomes one segment that all of them share, so
    its pages are read once; nested nodes give a cascade. The segments of each reader are in order
    of position.

    Args:
        readers: (block table, number of leading tokens to read), reader i is row group i.
        cache: tells the kind of a page.
    """
    page_size = cache.page_size
    sharing: dict[Node, list[int]] = {}
    pages = array("q")
    run_pages: list[int] = []
    last_page_len: list[int] = []
    private: list[tuple[array[int], int, int]] = []
    alone = len(readers) == 1
    for reader, (table, length) in enumerate(readers):
        # One reader shares nothing: its segments must not depend on how others cut the tree.
        node = None if alone else table.node
        while node is not None and node.parent is not None:
            if node in sharing:
                sharing[node].append(reader)
            else:
                sharing[node] = [reader]
            node = node.parent
        full, tail = divmod(length, page_size)
        own = table.pages[0 if alone else table.bound_pages : full + 1 if tail else full]
        if own:
            private.append((own, tail or page_size, reader))
    ordered = sorted(sharing, key=_start)
    for node in ordered:
        pages += node.pages
        run_pages.append(len(node.pages))
        last_page_len.append(page_size)
    for own, tail, _ in private:
        pages += own
        run_pages.append(len(own))
        last_page_len.append(tail)
    run_readers = [sharing[node] for node in ordered] + [[reader] for _, _, reader in private]
    return _cut_by_kind(pages, run_pages, last_page_len, run_readers, cache)


def _start(node: Node) -> int:
    return node.start


def _cut_by_kind(
    pages: array[int],
    run_pages: Sequence[int],
    last_page_len: Sequence[int],
    run_readers: Sequence[Sequence[int]],
    cache: PrefixCache,
) -> SegmentTable:
    """The segments of runs of pages that follow each other in `pages`, none of them empty."""
    addresses = np.frombuffer(pages, dtype=np.int64)
    kinds = cache.kind_indices(addresses)
    run_start = offsets(run_pages)
    is_start = np.ones(len(addresses), dtype=bool)
    np.not_equal(kinds[1:], kinds[:-1], out=is_start[1:])
    is_start[run_start[:-1]] = True
    start = np.flatnonzero(is_start)
    page_start = np.concatenate((start, run_start[-1:]))
    run = run_start.searchsorted(start, side="right") - 1
    is_end = page_start[1:] == run_start[run + 1]
    counts = np.array([len(one) for one in run_readers], dtype=np.int64)
    reader_start = offsets(counts)
    readers = np.array(list(chain.from_iterable(run_readers)), dtype=np.int64)
    if len(run) > len(counts):  # a run of several kinds: its readers read every part
        readers = readers[ranges(reader_start[run], counts[run])]
        reader_start = offsets(counts[run])
    return SegmentTable(
        addresses,
        page_start,
        kinds[start].astype(np.int64),
        np.where(is_end, np.array(last_page_len, dtype=np.int64)[run], cache.page_size),
        readers,
        reader_start,
    )
