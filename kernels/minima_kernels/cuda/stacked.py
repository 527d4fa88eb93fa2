"""Cached pages of new tokens, read by the decode kernels.

The new tokens of a request are rows that read its cached pages, so those of all requests of a batch
are one decode plan: a handful of launches per layer however many requests there are, and a page
that many rows read is unpacked once for all of them (``cohort_plan.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from minima_kernels.attention.decode import DecodePlan, plan_decode
from minima_kernels.attention.plan import CheckedSegment, Int64Array
from minima_kernels.attention.segments import ranges, tabulate
from minima_kernels.cuda.plan import BoolArray, head_blocks, rows_per_tile
from minima_kernels.cuda.route import decode_reason, group_reason
from minima_kernels.cuda.variants import has_cohorts

if TYPE_CHECKING:
    from minima_kernels.attention.extend import ExtendPlan

MOST_TILE_READS = 1 << 15
"""How often pages of formats that have no cohort kernel may be read for a request, each KV head
counted: tiles of query columns read them one by one. Measured: up to here that is faster than to
expand them, for one request and for several that share them; at four times as many not for all."""

MANY_READS = "many reads of pages without a cohort kernel"
"""Why requests beyond that are left to flash attention, as routes count it."""

MOST_PARTIAL_BYTES = 1 << 30
"""Partials of rows that may be kept for sharing pages among requests: every segment leaves one of
each of its rows, and prompts that end all along one path of a tree share many. Beyond, each request
reads its pages for itself."""
_PARTIAL_BYTES = 2  # of a channel


def stacked_reason(plan: ExtendPlan, group_size: int) -> str | None:
    """Why the decode kernels cannot take requests of a plan; ``None`` if they can."""
    if plan.device.type != "cuda":
        return "no CUDA device"
    formats = {format_ for kind in plan.kinds for format_ in kind.distinct_formats}
    return decode_reason(formats, plan.geometry, plan.device) or group_reason(group_size)


def plan_stacked(
    plan: ExtendPlan, num_heads: int
) -> tuple[DecodePlan | None, Sequence[CheckedSegment]]:
    """A decode plan over all rows of the batch, in which those of the requests that the decode
    kernels take read their pages, and what the other requests read; ``stacked_reason`` is
    ``None``."""
    segments = plan.segments
    group_size = num_heads // plan.geometry.num_kv_heads
    start = np.array(plan.q_indptr[:-1], dtype=np.int64)
    new = np.diff(plan.q_indptr)
    is_stacked = _is_stacked(plan, segments, new, group_size)
    ours: list[CheckedSegment] = []
    others: list[CheckedSegment] = []
    for segment in segments:
        chosen = is_stacked[segment.readers]
        if chosen.any():
            ours.append(segment._replace(readers=segment.readers[chosen]))
        if not chosen.all():
            others.append(segment._replace(readers=segment.readers[~chosen]))
    if not ours:
        return None, others
    geometry, num_rows = plan.geometry, plan.q_indptr[-1]
    gathered = _gather(ours, geometry.page_size)
    reads = sum(int(new[segment.readers].sum()) for segment in gathered)
    if reads * num_heads * geometry.head_dim * _PARTIAL_BYTES > MOST_PARTIAL_BYTES:
        gathered = _gather(_by_request(ours), geometry.page_size)
    table = tabulate(
        [one._replace(readers=ranges(start[one.readers], new[one.readers])) for one in gathered]
    )
    return plan_decode(table, num_rows, plan.kinds, geometry, plan.device), others


def _by_request(segments: Iterable[CheckedSegment]) -> Iterator[CheckedSegment]:
    """The segments, for each of their readers alone."""
    for segment in segments:
        for place in range(len(segment.readers)):
            yield segment._replace(readers=segment.readers[place : place + 1])


def _gather(segments: Iterable[CheckedSegment], page_size: int) -> list[CheckedSegment]:
    """The segments with all whole pages of one kind and the same readers in one of them.

    Their order is of no matter to attention, but each segment leaves a partial of every row. Open
    pages stand alone: a segment that ends in one would be read tile by tile, whole pages too.
    """
    whole: dict[tuple[int, bytes], list[CheckedSegment]] = {}
    tails: list[CheckedSegment] = []
    for segment in segments:
        if segment.last_page_len < page_size:
            tails.append(segment._replace(addresses=segment.addresses[-1:]))
            segment = segment._replace(addresses=segment.addresses[:-1], last_page_len=page_size)
        if len(segment.addresses):
            key = segment.kind_index, segment.readers.tobytes()
            whole.setdefault(key, []).append(segment)
    gathered = [
        parts[0]._replace(addresses=np.concatenate([part.addresses for part in parts]))
        for parts in whole.values()
    ]
    return gathered + tails


def _is_stacked(
    plan: ExtendPlan, segments: Sequence[CheckedSegment], new: Int64Array, group_size: int
) -> BoolArray:
    """bool ``[requests]``: a request's own pages and new tokens alone decide."""
    reread: Int64Array = np.zeros(len(new), dtype=np.int64)  # pages that every tile reads
    for segment in segments:
        formats = plan.kinds[segment.kind_index].distinct_formats
        if not all(has_cohorts(format_) for format_ in formats):
            reread[segment.readers] += len(segment.addresses)
    tiles = -(-new // rows_per_tile(group_size)) * head_blocks(group_size)
    found: BoolArray = tiles * reread * plan.geometry.num_kv_heads <= MOST_TILE_READS
    return found
