"""The work of a plan, cut for the grids of the kernels of a layer. Host only."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from minima_kernels.attention.plan import Int64Array
from minima_kernels.attention.segments import SegmentTable
from minima_kernels.cuda.cohort_plan import (
    FP8_RULE,
    TQ_RULE,
    CohortRule,
    RowBlocks,
    cohort_partials,
    find_cohorts,
    make_cohort_items,
    make_row_blocks,
)
from minima_kernels.cuda.plan import (
    COLUMNS,
    BoolArray,
    IntArray,
    Tiles,
    make_items,
    make_merge_lists,
    make_tiles,
    tile_partials,
)
from minima_kernels.cuda.variants import has_cohorts
from minima_kernels.formats import FP8
from minima_kernels.geometry import KVGeometry
from minima_kernels.kinds import PageKind


class Grid(NamedTuple):
    """Thread blocks of the kernels over pages of one kind; no ``cohort`` where there is no such
    kernel for the format. ``least_pages``: pages that a block of ``tiled`` reads at once."""

    tiled: int
    cohort: int
    least_pages: int = 1


class Cut(NamedTuple):
    """The work of all kinds cut for certain grids; layers of equal grids share it.

    ``tiled``, ``cohort``: the kinds that have work for either kernel. ``first_row_partial``: where
    the partials of stacked rows begin, behind those of tiles.
    """

    number: int
    grids: dict[int, Grid]
    tiled: tuple[int, ...]
    cohort: tuple[int, ...]
    num_tile_slots: int
    num_row_slots: int
    first_row_partial: int


class Work:
    """Tiles and stacked rows of a plan, and its cuts. ``arrays`` gets the work lists."""

    def __init__(
        self,
        table: SegmentTable,
        num_rows: int,
        group_size: int,
        kinds: tuple[PageKind, ...],
        geometry: KVGeometry,
        most_tile_slots: int | None = None,
    ) -> None:
        """``most_tile_slots``: what to leave room for before the partials of stacked rows; by
        default what is needed."""
        self._most_tile_slots = most_tile_slots
        self.arrays: dict[str, IntArray] = {}
        self._table, self._num_rows, self._group_size = table, num_rows, group_size
        self._geometry = geometry
        self._rules = [cohort_rule(kind) for kind in kinds]
        self._is_cohort: BoolArray = find_cohorts(table, group_size, geometry, self._rules)
        # Layers without such a kernel read a segment of a cohort by tiles.
        everywhere = [all(has_cohorts(format_) for format_ in kind.formats) for kind in kinds]
        is_tiled = ~self._is_cohort | ~np.array(everywhere)[table.kind_index]
        self.tiles: Tiles = make_tiles(table, group_size, num_rows, is_tiled, self._is_cohort)
        self.row_blocks: RowBlocks = make_row_blocks(table, self.tiles, self._is_cohort, group_size)
        self._cuts: dict[tuple[tuple[int, Grid], ...], Cut] = {}

    @property
    def cuts(self) -> list[Cut]:
        """All cuts, by number."""
        return list(self._cuts.values())

    def cut(self, grids: dict[int, Grid]) -> Cut:
        """The cut for these grids, by kind index; made when it is first asked for."""
        key = tuple(grids.items())
        found = self._cuts.get(key)
        if found is None:
            found = self._cuts[key] = self._make_cut(len(self._cuts), grids)
        return found

    def _make_cut(self, number: int, grids: dict[int, Grid]) -> Cut:
        table, tiles, heads = self._table, self.tiles, self._geometry.num_kv_heads
        num_heads = heads * self._group_size
        parts, tiled, cohort = [], [], []
        num_tile_slots = num_row_slots = 0
        for kind, grid in grids.items():
            is_kind = table.kind_index == kind
            is_tiled = is_kind & ~self._is_cohort if grid.cohort else is_kind
            chosen = np.flatnonzero(is_tiled[tiles.segment])
            if not len(chosen):
                continue
            items = make_items(
                table,
                tiles,
                chosen,
                heads,
                grid.tiled,
                num_tile_slots,
                self._geometry.page_size,
                grid.least_pages,
            )
            tiled.append(kind)
            num_tile_slots += len(items.items)
            parts.append(tile_partials(items, tiles, num_heads, self._group_size))
            self._keep(f"{number} {kind}", items.items, items.item_start)
        most = self._most_tile_slots
        first_row_partial = (num_tile_slots if most is None else most) * COLUMNS
        for kind, grid in grids.items():
            is_chosen = (table.kind_index == kind) & self._is_cohort
            rule = self._rules[kind]
            if not grid.cohort or rule is None or not is_chosen.any():
                continue
            rows = self.row_blocks
            work = make_cohort_items(
                table,
                rows,
                np.flatnonzero(is_chosen),
                self._group_size,
                heads,
                grid.cohort,
                num_row_slots,
                rule.single_cost,
            )
            cohort.append(kind)
            num_row_slots += 2 * len(work.items)
            parts.append(
                cohort_partials(work, rows, first_row_partial, num_heads, self._group_size)
            )
            self._keep(f"cohort {number} {kind}", work.items, work.item_start)
        merge = make_merge_lists(parts, self._num_rows * num_heads)
        self.arrays[f"unit_start {number}"] = merge.unit_start
        self.arrays[f"unit_partials {number}"] = merge.unit_partials
        return Cut(
            number,
            grids,
            tuple(tiled),
            tuple(cohort),
            num_tile_slots,
            num_row_slots,
            first_row_partial,
        )

    def _keep(self, name: str, items: IntArray, item_start: IntArray) -> None:
        self.arrays[f"items {name}"] = items
        self.arrays[f"item_start {name}"] = item_start

    def has_cohorts(self, kind_index: int) -> bool:
        """Whether a cohort reads pages of this kind."""
        return bool(self._is_cohort[self._table.kind_index == kind_index].any())

    def used_kinds(self) -> Int64Array:
        """Indices of the kinds that the plan reads."""
        return np.flatnonzero(np.bincount(self._table.kind_index))


def cohort_rule(kind: PageKind) -> CohortRule | None:
    """When segments of a kind are cohorts; none where no layer has a kernel for them."""
    formats = {format_ for format_ in kind.formats if has_cohorts(format_)}
    if not formats:
        return None
    return FP8_RULE if formats == {FP8} else TQ_RULE
