"""What a batch reads, as segments, without a loop over pages.

Two things are kept between steps, each where what it was made from changes: how the pages of a
tree node are cut by kind, with the node, which drops it when a page of it comes, goes or is
replaced; and who shares which node, as long as the readers end in the same nodes and none was cut.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from minima_kernels.attention.segments import SegmentTable, offsets, ranges
from minima_radix import Node, RequestTable
from sglang_minima.cache.prefix_cache import PrefixCache

_Int64Array = npt.NDArray[np.int64]


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


class _Cut(NamedTuple):
    """A run of pages, cut where their kind changes."""

    addresses: _Int64Array
    lengths: list[int]
    """Pages of each part."""
    kinds: list[int]


class Cohorts:
    """The tree nodes above a batch of readers, in order of position, and who reads each."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.num_readers: _Int64Array = np.empty(0, dtype=np.int64)
        """Readers of each node."""
        self.readers: _Int64Array = np.empty(0, dtype=np.int64)
        """Those of one node after the other."""
        self._ends: list[Node | None] = []
        self._splits = -1

    def update(self, tables: Sequence[RequestTable], splits: int) -> None:
        """Makes it that of the tables; `splits` are those of the tree so far."""
        ends = [table.node for table in tables]
        if splits == self._splits and ends == self._ends:
            return
        sharing: dict[Node, list[int]] = {}
        for reader, node in enumerate(ends):
            while node is not None and node.parent is not None:
                if node in sharing:
                    sharing[node].append(reader)
                else:
                    sharing[node] = [reader]
                node = node.parent
        self.nodes = sorted(sharing, key=_start)
        readers = [sharing[node] for node in self.nodes]
        self.num_readers = np.array([len(one) for one in readers], dtype=np.int64)
        self.readers = np.array([reader for one in readers for reader in one], dtype=np.int64)
        self._ends, self._splits = ends, splits


def build_segments(
    tables: Sequence[RequestTable],
    lengths: Sequence[int],
    cache: PrefixCache,
    cohorts: Cohorts | None = None,
) -> SegmentTable:
    """Cuts what the readers attend to into runs of pages with the same readers and kind.

    Every tree node on the path of several readers becomes one segment that all of them share, so
    its pages are read once; nested nodes give a cascade. The segments of each reader are in order
    of position.

    Args:
        tables: block table of each reader; reader i is row group i.
        lengths: number of leading tokens that each reads.
        cache: tells the kind of a page.
        cohorts: those of an earlier call, to be brought up to date.
    """
    page_size = cache.page_size
    # One reader shares nothing: its segments must not depend on how others cut the tree.
    shares = cache.tree is not None and len(tables) > 1
    if cohorts is None or not shares:
        cohorts = Cohorts()
    if shares:
        assert cache.tree is not None
        cohorts.update(tables, cache.tree.splits)
    addresses: list[_Int64Array] = []
    num_pages: list[int] = []
    kinds: list[int] = []
    parts: list[int] = []
    for node in cohorts.nodes:
        cut: _Cut | None = node.derived
        if cut is None:
            cut = node.derived = _cut(node.pages, cache)
        addresses.append(cut.addresses)
        num_pages += cut.lengths
        kinds += cut.kinds
        parts.append(len(cut.kinds))
    last_page_len = [page_size] * len(kinds)
    own = array("q")
    own_readers: list[int] = []
    for reader, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        full, tail = divmod(length, page_size)
        pages = table.pages[table.bound_pages if shares else 0 : full + 1 if tail else full]
        if not pages:
            continue
        if shares:
            num_pages.append(len(pages))
            own += pages
        else:
            cut = _cut(pages, cache)
            num_pages += cut.lengths
            kinds += cut.kinds
            parts.append(len(cut.kinds))
            last_page_len += [page_size] * (len(cut.kinds) - 1)
            addresses.append(cut.addresses)
        last_page_len.append(tail or page_size)
        own_readers.append(reader)
    if shares:
        # What is not bound to the tree is still written: Recent pages, the first of the kinds.
        kinds += [0] * len(own_readers)
        parts += [1] * len(own_readers)
    addresses.append(np.array(own, dtype=np.int64))
    counts = np.concatenate((cohorts.num_readers, np.ones(len(own_readers), dtype=np.int64)))
    readers = np.concatenate((cohorts.readers, np.array(own_readers, dtype=np.int64)))
    reader_start = offsets(counts)
    if len(kinds) > len(parts):  # a run of several kinds: its readers read every part
        run = np.repeat(np.arange(len(parts)), parts)
        readers = readers[ranges(reader_start[run], counts[run])]
        reader_start = offsets(counts[run])
    return SegmentTable(
        np.concatenate(addresses),
        offsets(num_pages),
        np.array(kinds, dtype=np.int64),
        np.array(last_page_len, dtype=np.int64),
        readers,
        reader_start,
    )


def _start(node: Node) -> int:
    return node.start


def _cut(pages: array[int], cache: PrefixCache) -> _Cut:
    addresses = np.array(pages, dtype=np.int64)
    kinds = cache.kind_indices(addresses)
    starts = np.flatnonzero(kinds[1:] != kinds[:-1]) + 1
    edges = [0, *starts.tolist(), len(addresses)]
    lengths = [end - start for start, end in pairwise(edges)]
    return _Cut(addresses, lengths, kinds[edges[:-1]].tolist())
