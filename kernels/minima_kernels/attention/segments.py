"""Segments of a whole batch as arrays: what a plan works on without a loop over segments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from minima_kernels.attention.plan import CheckedSegment, Int64Array, Segment, check_segment
from minima_kernels.geometry import KVGeometry
from minima_kernels.kinds import PageKind


class SegmentTable(NamedTuple):
    """The segments of a batch; the fields of `Segment`, concatenated."""

    addresses: Int64Array  # [pages], granules
    page_start: Int64Array  # [segments + 1]
    kind_index: Int64Array  # [segments]
    last_page_len: Int64Array  # [segments]
    readers: Int64Array  # [reads]
    reader_start: Int64Array  # [segments + 1]

    @property
    def num_pages(self) -> Int64Array:
        """int64 [segments]"""
        return self.page_start[1:] - self.page_start[:-1]

    @property
    def num_readers(self) -> Int64Array:
        """int64 [segments]"""
        return self.reader_start[1:] - self.reader_start[:-1]

    def first_entries(self) -> Int64Array:
        """int64 [segments + 1]: where the (page, reader) pairs of each segment start."""
        return offsets(self.num_pages * self.num_readers)

    def rows(self) -> Iterator[CheckedSegment]:
        """The segments one by one, as views."""
        pages, readers = self.page_start.tolist(), self.reader_start.tolist()
        for i, (kind_index, last_page_len) in enumerate(
            zip(self.kind_index.tolist(), self.last_page_len.tolist(), strict=True)
        ):
            yield CheckedSegment(
                self.addresses[pages[i] : pages[i + 1]],
                kind_index,
                last_page_len,
                self.readers[readers[i] : readers[i + 1]],
            )


Segments = Sequence[Segment] | SegmentTable
"""What plans take: segments one by one, or all of them as arrays."""


def tabulate(segments: Sequence[CheckedSegment]) -> SegmentTable:
    """The segments as arrays."""
    return SegmentTable(
        concatenate([segment.addresses for segment in segments]),
        offsets([len(segment.addresses) for segment in segments]),
        np.array([segment.kind_index for segment in segments], dtype=np.int64),
        np.array([segment.last_page_len for segment in segments], dtype=np.int64),
        concatenate([segment.readers for segment in segments]),
        offsets([len(segment.readers) for segment in segments]),
    )


def check_segments(
    segments: Segments, num_requests: int, kinds: Sequence[PageKind], geometry: KVGeometry
) -> SegmentTable:
    """The segments that have pages and readers.

    Raises:
        ValueError: a reader, kind or page length out of range.
    """
    if isinstance(segments, SegmentTable):
        table = segments
        _check(table.kind_index, 0, len(kinds) - 1, "a kind index")
        _check(table.last_page_len, 1, geometry.page_size, "a last_page_len")
        _check(table.readers, 0, num_requests - 1, "a reader")
    else:
        table = tabulate([check_segment(s, num_requests, kinds, geometry) for s in segments])
    if table.num_pages.all() and table.num_readers.all():
        return table
    return tabulate([s for s in table.rows() if len(s.addresses) and len(s.readers)])


def offsets(counts: Sequence[int] | Int64Array) -> Int64Array:
    """int64 [n + 1]: where each of n runs starts, and the end of the last."""
    result = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=result[1:])
    return result


def ranges(starts: Int64Array, counts: Int64Array) -> Int64Array:
    """The numbers starts[i], starts[i] + 1, ... of each i, `counts[i]` of them, concatenated."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(starts - ends + counts, counts)


def concatenate(parts: Sequence[Int64Array]) -> Int64Array:
    """The parts one after another; of no parts, nothing."""
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])


def _check(values: Int64Array, low: int, high: int, what: str) -> None:
    if values.size and not (values.min() >= low and values.max() <= high):
        raise ValueError(f"{what} of a segment is not {low} to {high}")
