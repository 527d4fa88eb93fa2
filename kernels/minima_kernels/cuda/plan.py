"""Work lists of the decode kernels: tiles of query columns, items, merge lists. Host only.

A *tile* is up to eight query columns, (row, head) pairs that share a KV head: the rows that read a
segment together, as many as fit. A *unit* is a segment read by one tile for one KV head. The units
of a page kind are laid end to end and cut into equal ranges of pages, one per thread block, so that
every block reads the same number of bytes; a piece of a unit inside one range is an *item* and
leaves one partial per column. Segments that many rows read are planned by ``cohort_plan.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from minima_kernels.attention.plan import Int64Array
from minima_kernels.attention.segments import SegmentTable, concatenate, offsets, ranges

Int32Array = npt.NDArray[np.int32]
IntArray = npt.NDArray[np.int32] | npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

COLUMNS = 8
"""Query columns of a tile."""


class Tiles(NamedTuple):
    """Tiles of query columns, and which of them read a segment.

    ``rows`` int64 ``[tiles, n]``: rows of a tile, -1 for none. ``block`` int64 ``[tiles]``: which
    eight heads of the group. ``segment``, ``tile``, ``first_reader`` int64 ``[reads]``: a tile
    reads a segment, beginning with that one of its readers. ``row_tile`` int64 ``[rows]``: for rows
    of cohorts, the first of the tiles that hold the row (one per block of heads), else -1;
    ``row_place``: its place there.
    """

    rows: Int64Array
    block: Int64Array
    segment: Int64Array
    tile: Int64Array
    first_reader: Int64Array
    row_tile: Int64Array
    row_place: Int64Array


class Items(NamedTuple):
    """The work of one kernel launch; ``items`` int32 ``[n, 8]``, see ``struct Item``."""

    items: Int32Array
    item_start: Int32Array  # [blocks + 1]
    tile: Int64Array  # [n], tile of each item
    head: Int64Array  # [n]


class Partials(NamedTuple):
    """Partials, and which unit of the merge (row * query heads + head) each belongs to."""

    unit: Int64Array
    partial: Int64Array


class MergeLists(NamedTuple):
    """The partials of each unit: row * query heads + head."""

    unit_start: Int32Array  # [units + 1]
    unit_partials: Int32Array


def rows_per_tile(group_size: int) -> int:
    """Rows whose query heads fit in a tile."""
    return max(1, COLUMNS // group_size)


def head_blocks(group_size: int) -> int:
    """Tiles that the heads of one row take."""
    return -(-group_size // COLUMNS)


def make_tiles(
    table: SegmentTable,
    group_size: int,
    num_rows: int,
    is_tiled: BoolArray | None = None,
    is_cohort: BoolArray | None = None,
) -> Tiles:
    """Tiles of the readers of every segment; equal ones are made once.

    ``is_tiled`` bool ``[segments]``: which segments tiles read (all unless given). ``is_cohort``:
    which are read by cohorts, whose rows are put in tiles in order, only to be prepared.
    """
    per_tile, blocks = rows_per_tile(group_size), head_blocks(group_size)
    members = np.empty(0, dtype=np.int64)
    row_tile = np.full(num_rows, -1, dtype=np.int64)
    row_place = np.zeros(num_rows, dtype=np.int64)
    if is_cohort is not None and is_cohort.any():
        is_reader = np.repeat(is_cohort, table.num_readers)
        members = np.unique(table.readers[is_reader])
        row_tile[members] = np.arange(len(members)) // per_tile * blocks
        row_place[members] = np.arange(len(members)) % per_tile
    counts = table.num_readers if is_tiled is None else table.num_readers * is_tiled
    num_chunks = -(-counts // per_tile)
    segments = np.repeat(np.arange(len(counts)), num_chunks)
    first_readers = ranges(np.zeros_like(num_chunks), num_chunks) * per_tile
    chunks = np.concatenate(
        (
            _chunks(members, np.arange(0, len(members), per_tile), len(members), per_tile),
            _chunks(
                table.readers,
                table.reader_start[segments] + first_readers,
                table.reader_start[segments + 1],
                per_tile,
            ),
        )
    )
    rows, tiles = _number(chunks)
    tiles = tiles[len(tiles) - len(segments) :]
    steps = np.arange(blocks)
    return Tiles(
        np.repeat(rows, blocks, axis=0),
        np.tile(steps, len(rows)),
        np.repeat(segments, blocks),
        (tiles[:, None] * blocks + steps).ravel(),
        np.repeat(first_readers, blocks),
        row_tile,
        row_place,
    )


def _chunks(
    values: Int64Array, starts: Int64Array, ends: Int64Array | int, width: int
) -> Int64Array:
    """``[chunks, width]``: values from each start on, -1 from its end on."""
    places = starts[:, None] + np.arange(width)
    is_used = places < (ends if isinstance(ends, int) else ends[:, None])
    return np.where(is_used, values[np.minimum(places, len(values) - 1)], -1)


def _number(chunks: Int64Array) -> tuple[Int64Array, Int64Array]:
    """The different rows of ``chunks`` in order of first appearance, and which one each is."""
    order = np.lexsort(chunks.T)
    is_new = np.ones(len(chunks), dtype=np.bool_)
    is_new[1:] = (chunks[order[1:]] != chunks[order[:-1]]).any(axis=1)
    first = order[is_new]  # of its kind: the sort is stable
    rank = np.empty_like(first)
    by_first = np.argsort(first)
    rank[by_first] = np.arange(len(first))
    number = np.empty(len(chunks), dtype=np.int64)
    number[order] = rank[np.cumsum(is_new) - 1]
    return chunks[first[by_first]], number


def prepare_columns(tiles: Tiles, num_heads: int, group_size: int) -> Int32Array:
    """int32 ``[tiles, 8]``: row * query heads + head within the group, -1 for no column."""
    rows, heads = _columns(tiles, group_size)
    return np.where(rows < 0, -1, rows * num_heads + heads).astype(np.int32)


def mass_columns(tiles: Tiles, group_size: int) -> Int32Array:
    """int32 ``[tiles, 8]``: place of the row in its tile << 8 | head within the group, or -1."""
    rows, heads = _columns(tiles, group_size)
    place = np.arange(COLUMNS) // min(group_size, COLUMNS)
    return np.where(rows < 0, -1, place << 8 | heads).astype(np.int32)


def _columns(tiles: Tiles, group_size: int) -> tuple[Int64Array, Int64Array]:
    """Row (-1 for none) and head within the group of each column, ``[tiles, 8]``."""
    width = min(group_size, COLUMNS)
    column = np.arange(COLUMNS)
    place = column // width
    heads = tiles.block[:, None] * COLUMNS + column % width
    is_used = (place < tiles.rows.shape[1])[None] & (heads < group_size)
    rows = tiles.rows[:, np.minimum(place, tiles.rows.shape[1] - 1)]
    return np.where(is_used, rows, -1), heads


def make_items(
    table: SegmentTable,
    tiles: Tiles,
    chosen: Int64Array,
    num_kv_heads: int,
    num_blocks: int,
    first_slot: int,
    page_size: int,
    least_pages: int,
) -> Items:
    """Cut the reads ``chosen`` (indices into the reads of ``tiles``) into equal ranges of pages.

    ``least_pages``: what a thread block reads at once; with fewer some of its warps would idle.
    """
    heads = np.arange(num_kv_heads)
    # Tiles of one segment and head are neighbours: what one reads is in the cache for the next.
    segment = np.repeat(tiles.segment[chosen], num_kv_heads)
    tile = np.repeat(tiles.tile[chosen], num_kv_heads)
    reader = np.repeat(tiles.first_reader[chosen], num_kv_heads)
    head = np.tile(heads, len(chosen))
    order = np.lexsort((tile, head, segment))
    segment, tile, reader, head = segment[order], tile[order], reader[order], head[order]
    pages = table.num_pages[segment]
    ends = np.cumsum(pages)
    total = int(ends[-1]) if len(ends) else 0
    used = max(1, min(num_blocks, -(-total // least_pages)))
    cuts = total * np.arange(1, used) // used
    bounds = sorted_unique(np.concatenate(([0], ends, cuts)))
    begin, end = bounds[:-1], bounds[1:]
    unit = np.searchsorted(ends, begin, side="right")
    block = np.searchsorted(cuts, begin, side="right")
    local = begin - (ends - pages)[unit]
    size = end - begin
    of = segment[unit]
    num_readers = table.num_readers[of]
    is_end = local + size == pages[unit]
    first = table.page_start[of] + local
    items = np.stack(
        (
            tile[unit] * num_kv_heads + head[unit],
            first,
            first + size,
            first_slot + np.arange(len(begin)),
            head[unit],
            np.where(is_end, table.last_page_len[of], page_size),
            table.first_entries()[of] + local * num_readers + reader[unit],
            num_readers,
        ),
        axis=1,
    ).astype(np.int32)
    start = np.full(num_blocks + 1, len(begin), dtype=np.int32)
    start[:used] = np.searchsorted(block, np.arange(used))
    return Items(items, start, tile[unit], head[unit])


def sorted_unique(values: Int64Array) -> Int64Array:
    """The different values in order; for a few thousand, less work than ``numpy.unique``."""
    values = np.sort(values)
    is_new = np.ones(len(values), dtype=np.bool_)
    is_new[1:] = values[1:] != values[:-1]
    return values[is_new]


def tile_partials(items: Items, tiles: Tiles, num_heads: int, group_size: int) -> Partials:
    """The partials of items: ``slot * 8 + column``."""
    rows, heads = _columns(tiles, group_size)
    rows, heads = rows[items.tile], heads[items.tile] + items.head[:, None] * group_size
    partials = items.items[:, 3].astype(np.int64)[:, None] * COLUMNS + np.arange(COLUMNS)
    is_used = rows >= 0
    return Partials((rows * num_heads + heads)[is_used], partials[is_used])


def make_merge_lists(parts: Sequence[Partials], num_units: int) -> MergeLists:
    """Which partials each row and head is the sum of."""
    units = concatenate([part.unit for part in parts])
    partials = concatenate([part.partial for part in parts])
    order = np.argsort(units, kind="stable")
    counts = np.bincount(units, minlength=num_units)
    return MergeLists(offsets(counts).astype(np.int32), partials[order].astype(np.int32))


def entry_rows(table: SegmentTable) -> Int64Array:
    """int64 ``[entries]``: the row of each page entry, segment by segment, page by page."""
    num_readers = np.repeat(table.num_readers, table.num_pages)
    first_readers = np.repeat(table.reader_start[:-1], table.num_pages)
    return table.readers[ranges(first_readers, num_readers)]


class Packed(NamedTuple):
    """Arrays in one buffer, and where each starts (in int32 elements)."""

    data: Int32Array
    starts: dict[str, int]


def pack_arrays(arrays: Mapping[str, IntArray]) -> Packed:
    """Lay arrays end to end as int32, each at a multiple of 16 bytes."""
    starts: dict[str, int] = {}
    size = 0
    for name, array in arrays.items():
        starts[name] = size
        size += -(-array.size // 4) * 4
    data = np.zeros(size, dtype=np.int32)
    for name, array in arrays.items():
        data[starts[name] : starts[name] + array.size] = array.ravel()
    return Packed(data, starts)
