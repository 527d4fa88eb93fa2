"""Work lists of the cohort kernels: segments of TQ or FP8 pages that many rows read. Host only.

The readers of a segment times the heads of a group are *stacked rows*, 64 to a block of rows. A
thread block unpacks a page once for two blocks of rows; a last single block has both consumers to
itself, which take alternate pages. A *unit* is a segment, a KV head and one or two blocks of rows.
Units are laid end to end and cut into ranges of equal cost, one per thread block; a piece of a unit
inside one range is an item and leaves a partial per consumer and row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from minima_kernels.attention.plan import Int64Array
from minima_kernels.attention.segments import SegmentTable, concatenate, offsets
from minima_kernels.cuda.plan import (
    COLUMNS,
    BoolArray,
    Int32Array,
    Partials,
    Tiles,
    head_blocks,
    rows_per_tile,
    sorted_unique,
)
from minima_kernels.geometry import KVGeometry

ROWS = 64
"""Stacked rows of a block, and of a partial's slot."""

_CONSUMERS = 2


class CohortRule(NamedTuple):
    """When segments of a kind are cohorts: at least so many readers and stacked rows.

    ``min_saved``: reads of a page by a tile, one KV head each, that the cohorts of a kind save
    together, at least: fewer are not worth a kernel of their own. ``single_cost``: cost of a page
    for one block of rows where it is 2 for two blocks.
    """

    min_readers: int
    min_stacked: int  # more than a tile's columns
    min_saved: int
    single_cost: float

    def is_wide(self, num_readers: Int64Array, group_size: int) -> BoolArray:
        """bool ``[segments]``: which have enough readers."""
        enough = num_readers >= max(self.min_readers, -(-self.min_stacked // group_size))
        return np.asarray(enough)

    def least_pages(self, num_readers: int, group_size: int, num_kv_heads: int) -> int | None:
        """Pages of the shortest segment that is a cohort by itself; none is with few readers."""
        if not self.is_wide(np.array([num_readers]), group_size).any():
            return None
        saved = int(_tile_reads(np.array([num_readers]), group_size)[0] - 1) * num_kv_heads
        return max(1, -(-self.min_saved // saved))


# Measured: from here on unpacking once wins over reading a page once per request.
TQ_RULE = CohortRule(min_readers=4, min_stacked=16, min_saved=0, single_cost=1.35)
# Measured, too: 12 and 16 rows are read faster tile by tile, 24 are not.
FP8_RULE = CohortRule(min_readers=2, min_stacked=20, min_saved=1024, single_cost=1.6)


class RowBlocks(NamedTuple):
    """Stacked rows of the readers of segments; equal sets of readers share them.

    ``columns`` int32 ``[blocks, 64]``: ``tile * 8 + column`` among the prepared queries, -1 for
    none. ``units`` int64 ``[blocks, 64]``: row * group size + head within the group, or -1.
    ``first`` int64 ``[segments]``: first block of a segment's readers, -1 where it is no cohort.
    """

    columns: Int32Array
    units: Int64Array
    first: Int64Array


class CohortItems(NamedTuple):
    """The work of the cohort kernel; ``items`` int32 ``[n, 8]``, see ``struct Cohort``."""

    items: Int32Array
    item_start: Int32Array  # [thread blocks + 1]


def find_cohorts(
    table: SegmentTable,
    group_size: int,
    geometry: KVGeometry,
    rules: Sequence[CohortRule | None],
) -> BoolArray:
    """bool ``[segments]``: which have enough readers, and whole pages only.

    ``rules``: of each kind; none where there is no kernel for it.
    """
    found = np.zeros(len(table.kind_index), dtype=np.bool_)
    is_whole = table.last_page_len == geometry.page_size
    saved = (_tile_reads(table.num_readers, group_size) - 1) * table.num_pages
    for kind, rule in enumerate(rules):
        if rule is None:
            continue
        chosen = is_whole & (table.kind_index == kind) & rule.is_wide(table.num_readers, group_size)
        if saved[chosen].sum() * geometry.num_kv_heads >= rule.min_saved:
            found |= chosen
    return found


def _tile_reads(num_readers: Int64Array, group_size: int) -> Int64Array:
    """How often tiles read a page for so many readers."""
    return -(-num_readers // rows_per_tile(group_size)) * head_blocks(group_size)


def make_row_blocks(
    table: SegmentTable, tiles: Tiles, is_cohort: BoolArray, group_size: int
) -> RowBlocks:
    """Stacked rows of the segments of cohorts, reader by reader."""
    width = min(group_size, COLUMNS)
    heads = np.arange(group_size)
    known: dict[bytes, int] = {}
    first = np.full(len(is_cohort), -1, dtype=np.int64)
    columns, units = [], []
    num_blocks = 0
    for segment in np.flatnonzero(is_cohort).tolist():
        rows = table.readers[table.reader_start[segment] : table.reader_start[segment + 1]]
        key = rows.tobytes()
        if key not in known:
            known[key] = num_blocks
            tile = tiles.row_tile[rows][:, None] + heads // COLUMNS
            column = tiles.row_place[rows][:, None] * width + heads % COLUMNS
            columns.append(_fill_blocks(tile * COLUMNS + column))
            units.append(_fill_blocks(rows[:, None] * group_size + heads))
            num_blocks += len(columns[-1]) // ROWS
        first[segment] = known[key]
    return RowBlocks(
        concatenate(columns).reshape(-1, ROWS).astype(np.int32),
        concatenate(units).reshape(-1, ROWS),
        first,
    )


def _fill_blocks(values: Int64Array) -> Int64Array:
    """The values one after another, -1 behind them up to the end of a block of rows."""
    filled = np.full(-(-values.size // ROWS) * ROWS, -1, dtype=np.int64)
    filled[: values.size] = values.ravel()
    return filled


def make_cohort_items(
    table: SegmentTable,
    rows: RowBlocks,
    chosen: Int64Array,
    group_size: int,
    num_kv_heads: int,
    num_blocks: int,
    first_slot: int,
    single_cost: float,
) -> CohortItems:
    """Cut segments ``chosen`` into ranges of equal cost; an item takes two slots."""
    num_row_blocks = -(-table.num_readers[chosen] * group_size // ROWS)
    pairs = (num_row_blocks + 1) // _CONSUMERS
    # Units of one segment and head are neighbours: what one reads is in the cache for the next.
    per_segment = pairs * num_kv_heads
    segment = np.repeat(chosen, per_segment)
    within = np.arange(len(segment)) - np.repeat(offsets(per_segment)[:-1], per_segment)
    head, pair = np.divmod(within, np.repeat(pairs, per_segment))
    left = np.repeat(num_row_blocks, per_segment) - pair * _CONSUMERS
    blocks = np.minimum(left, _CONSUMERS)
    pages = table.num_pages[segment]
    cost = np.where(blocks == _CONSUMERS, float(_CONSUMERS), single_cost)
    page_ends, cost_ends = np.cumsum(pages), np.cumsum(pages * cost)
    total = int(page_ends[-1]) if len(page_ends) else 0
    used = max(1, min(num_blocks, total))
    wanted = (cost_ends[-1] if total else 0.0) * np.arange(1, used) / used
    at = np.searchsorted(cost_ends, wanted, side="right")
    cuts = (page_ends[at] - np.rint((cost_ends[at] - wanted) / cost[at])).astype(np.int64)
    bounds = sorted_unique(np.concatenate(([0], page_ends, cuts)))
    begin, end = bounds[:-1], bounds[1:]
    unit = np.searchsorted(page_ends, begin, side="right")
    block = np.searchsorted(cuts, begin, side="right")
    local = begin - (page_ends - pages)[unit]
    of = segment[unit]
    first = table.page_start[of] + local
    num_readers = table.num_readers[of]
    items = np.stack(
        (
            rows.first[of] + pair[unit] * _CONSUMERS,
            first,
            first + end - begin,
            first_slot + np.arange(len(begin)) * _CONSUMERS,
            head[unit],
            blocks[unit] | pair[unit] * _CONSUMERS << 8,
            table.first_entries()[of] + local * num_readers,
            num_readers,
        ),
        axis=1,
    ).astype(np.int32)
    start = np.full(num_blocks + 1, len(begin), dtype=np.int32)
    start[:used] = np.searchsorted(block, np.arange(used))
    return CohortItems(items, start)


def cohort_partials(
    items: CohortItems, rows: RowBlocks, first_partial: int, num_heads: int, group_size: int
) -> Partials:
    """The partials of items: ``first_partial + slot * 64 + row`` of each slot's 64 rows."""
    data = items.items.astype(np.int64)
    consumer = np.arange(_CONSUMERS)
    block = (data[:, None, 0] + consumer % (data[:, None, 5] & 255)).ravel()
    slot = (data[:, None, 3] + consumer).ravel()
    head = np.repeat(data[:, 4], _CONSUMERS)
    # Of blocks, which are far fewer than slots: the units of KV head 0.
    row, within = np.divmod(rows.units, group_size)
    units = (row * num_heads + within)[block] + head[:, None] * group_size
    partials = first_partial + slot[:, None] * ROWS + np.arange(ROWS)
    is_used = rows.units[block] >= 0
    return Partials(units[is_used], partials[is_used])
