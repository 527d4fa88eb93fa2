"""Work lists of the CUDA kernels: executed here in float64, they give dense attention."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_pages import Pages, relative_error

from minima_kernels import KVGeometry, PageKind, Segment
from minima_kernels.attention.segments import SegmentTable, check_segments
from minima_kernels.cuda import work as work_module
from minima_kernels.cuda.cohort_plan import FP8_RULE, ROWS, TQ_RULE, CohortRule, find_cohorts
from minima_kernels.cuda.plan import (
    COLUMNS,
    Int32Array,
    entry_rows,
    mass_columns,
    pack_arrays,
    prepare_columns,
)
from minima_kernels.cuda.work import Grid, Work
from minima_kernels.transfer import read_page

GEOMETRY = KVGeometry(1, 2, 64, 64)


class Lists(NamedTuple):
    """What ``CudaDecode`` gives the kernels."""

    items: dict[int, Int32Array]  # by kind
    cohorts: dict[int, Int32Array]
    num_tile_slots: int
    num_row_slots: int
    arrays: dict[str, np.ndarray]


def plan(
    table: SegmentTable,
    num_rows: int,
    group_size: int,
    kinds: Sequence[PageKind],
    grids: Sequence[Grid],
) -> Lists:
    """The lists of a plan; ``grids`` per kind."""
    work = Work(table, num_rows, group_size, tuple(kinds), GEOMETRY)
    cut = work.cut(dict(enumerate(grids)))
    for name, starts in work.arrays.items():
        if name.startswith("item_start"):
            items = work.arrays[name.replace("item_start", "items")]
            assert starts[0] == 0 and starts[-1] == len(items)
            assert (np.diff(starts) >= 0).all()
    arrays = {
        **work.arrays,
        "prepare": prepare_columns(work.tiles, 2 * group_size, group_size),
        "mass": mass_columns(work.tiles, group_size),
        "rows": work.row_blocks.columns,
        "unit_start": work.arrays["unit_start 0"],
        "unit_partials": work.arrays["unit_partials 0"],
        "pages": table.addresses,
        "entries": entry_rows(table),
    }
    return Lists(
        {kind: work.arrays[f"items 0 {kind}"] for kind in cut.tiled},
        {kind: work.arrays[f"items cohort 0 {kind}"] for kind in cut.cohort},
        cut.num_tile_slots,
        cut.num_row_slots,
        arrays,
    )


def execute(
    pages: Pages,
    table: SegmentTable,
    q: torch.Tensor,
    scale: float,
    grids: Sequence[Grid],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs, lse and page mass of the lists, each step as the kernels do it."""
    num_rows, num_heads, dim = q.shape
    heads = GEOMETRY.num_kv_heads
    group_size = num_heads // heads
    lists = plan(table, num_rows, group_size, pages.kinds, grids)
    arrays = lists.arrays
    num_partials = lists.num_tile_slots * COLUMNS + lists.num_row_slots * ROWS
    part_m = torch.full((num_partials,), float("nan"), dtype=torch.float64)
    part_l, part_o = part_m.clone(), torch.full((num_partials, dim), float("nan")).double()
    mass = torch.full((len(arrays["entries"]), num_heads), float("nan"), dtype=torch.float64)
    flat_q = q.double().view(-1, dim)

    @cache
    def content(kind: int, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        address = int(arrays["pages"][place])
        k, v = read_page(pages.arena, address, pages.kinds[kind], 0, GEOMETRY)
        return k.double(), v.double()

    def attend(
        kind: int, head: int, places: Sequence[int], last_len: int, column: int, partial: int
    ) -> list[torch.Tensor]:
        """One column over some places of the page list; log of the sum of each page."""
        scores, values = [], []
        for place in places:
            k, v = content(kind, place)
            length = last_len if place == places[-1] else 64
            query = flat_q[column + head * group_size] * scale
            scores.append(k[:length, head] @ query)
            values.append(v[:length, head])
        assert torch.isnan(part_m[partial])
        part_m[partial], part_l[partial], part_o[partial] = -torch.inf, 0, 0
        if places:
            m = torch.cat(scores).max()
            weights = torch.exp(torch.cat(scores) - m)
            part_m[partial], part_l[partial] = m, weights.sum()
            part_o[partial] = weights @ torch.cat(values)
        return [torch.logsumexp(page_scores, 0) for page_scores in scores]

    def note(entry: int, head: int, value: torch.Tensor) -> None:
        assert torch.isnan(mass[entry, head])
        mass[entry, head] = value

    for kind, items in lists.items.items():
        for tile_head, first, last, slot, head, last_len, entry, stride in items.tolist():
            columns = arrays["prepare"][tile_head // heads].tolist()
            places = arrays["mass"][tile_head // heads].tolist()
            for n, (column, where) in enumerate(zip(columns, places, strict=True)):
                assert (column < 0) == (where < 0)
                if column < 0:
                    continue
                at = slot * COLUMNS + n
                sums = attend(kind, head, range(first, last), last_len, column, at)
                for index, value in enumerate(sums):
                    cell = entry + index * stride + (where >> 8)
                    note(cell, head * group_size + (where & 255), value)
    flat_columns = arrays["prepare"].ravel()
    for kind, items in lists.cohorts.items():
        for block, first, last, slot, head, packed, entry, stride in items.tolist():
            blocks, local = packed & 255, packed >> 8
            for consumer in range(2):
                which = consumer % blocks
                step, skip = 3 - blocks, consumer if blocks == 1 else 0
                for row, ref in enumerate(arrays["rows"][block + which].tolist()):
                    if ref < 0:
                        continue
                    at = lists.num_tile_slots * COLUMNS + (slot + consumer) * ROWS + row
                    chosen = range(first + skip, last, step)
                    sums = attend(kind, head, chosen, 64, int(flat_columns[ref]), at)
                    reader, head_in_group = divmod((local + which) * ROWS + row, group_size)
                    for place, value in zip(chosen, sums, strict=True):
                        cell = entry + (place - first) * stride + reader
                        note(cell, head * group_size + head_in_group, value)
    out = torch.zeros(num_rows * num_heads, dim, dtype=torch.float64)
    lse = torch.full((num_rows * num_heads,), -torch.inf, dtype=torch.float64)
    for unit in range(num_rows * num_heads):
        chosen = arrays["unit_partials"][
            arrays["unit_start"][unit] : arrays["unit_start"][unit + 1]
        ]
        if not len(chosen):
            continue
        at = torch.from_numpy(chosen.astype(np.int64))
        weight = torch.exp(part_m[at] - part_m[at].max())
        total = (weight * part_l[at]).sum()
        out[unit] = (weight[:, None] * part_o[at]).sum(0) / total
        lse[unit] = part_m[at].max() + total.log()
    lse = lse.view(num_rows, num_heads)
    mass = torch.exp(mass - lse[torch.from_numpy(arrays["entries"])])
    return out.view(q.shape), lse, mass


@pytest.fixture(autouse=True)
def short_cohorts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of a few pages are cohorts of FP8, too."""
    monkeypatch.setattr(work_module, "FP8_RULE", FP8_RULE._replace(min_saved=0))


@pytest.mark.parametrize("group_size", [1, 2, 3, 4, 6, 8, 12, 16])
@pytest.mark.parametrize("blocks", [(1, 1, 1), (7, 3, 5), (500, 40, 132)])
def test_lists_give_dense_attention(group_size: int, blocks: tuple[int, int, int]) -> None:
    pages = Pages(GEOMETRY, ["tq3", "fp8"])
    segments = [
        pages.segment(0, 9, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        pages.segment(0, 5, [9, 1, 3, 4, 8, 7]),
        pages.segment(0, 3, [3, 4]),
        pages.segment(0, 1, [0]),
        pages.segment(1, 2, [0], last_page_len=17),
        pages.segment(1, 1, [4], last_page_len=1),
        pages.segment(1, 3, [9, 2]),
        pages.segment(1, 4, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
    ]
    table = check_segments(segments, 11, pages.kinds, GEOMETRY)
    q = pages.random(11, 2 * group_size, 64)
    grids = [Grid(blocks[0], blocks[2]), Grid(blocks[1], blocks[2])]
    out, lse, mass = execute(pages, table, q, 0.125, grids)
    for row in range(10):
        expected, expected_lse = pages.reference(segments, row, q[row : row + 1], 0, 0.125)
        assert relative_error(out[row], expected[0]) < 1e-12
        assert torch.allclose(lse[row], expected_lse[0])
    assert out[10].abs().max() == 0 and (lse[10] == -torch.inf).all()
    sums = torch.zeros(11, 2 * group_size, dtype=torch.float64)
    sums.index_add_(0, torch.from_numpy(entry_rows(table)), mass)
    assert torch.allclose(sums[:10], torch.ones(10, 2 * group_size, dtype=torch.float64))


def draw_segments(runs: list[tuple[int, int]], num_rows: int, seed: int) -> list[Segment]:
    """Runs of (pages, readers), one behind the other; the readers are drawn."""
    generator = np.random.default_rng(seed)
    segments, page = [], 0
    for pages, readers in runs:
        chosen = np.sort(generator.choice(num_rows, readers, replace=False))
        segments.append(Segment(np.arange(page, page + pages), 0, 64, chosen))
        page += pages
    return segments


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 5)), min_size=1, max_size=12),
    st.sampled_from([1, 2, 3, 4, 5, 6, 8, 16]),
    st.integers(1, 70),
    st.sampled_from([1, 4]),
    st.integers(0, 1000),
)
def test_every_page_is_read_once_by_every_reader(
    runs: list[tuple[int, int]], group_size: int, num_blocks: int, least_pages: int, seed: int
) -> None:
    segments = draw_segments(runs, 8, seed)
    kinds = Pages(GEOMETRY, ["bf16"]).kinds
    table = check_segments(segments, 8, kinds, GEOMETRY)
    lists = plan(table, 8, group_size, kinds, [Grid(num_blocks, 0, least_pages)])
    items, arrays = lists.items[0], lists.arrays
    seen = np.zeros((sum(pages for pages, _ in runs), 8, 2 * group_size), dtype=np.int64)
    for tile_head, first, last, _, head, *_ in items.tolist():
        for column in arrays["prepare"][tile_head // 2]:
            if column >= 0:
                row, head_in_group = divmod(int(column), 2 * group_size)
                seen[first:last, row, head * group_size + head_in_group] += 1
    expected = np.zeros_like(seen)
    for segment in segments:
        expected[np.ix_(segment.addresses, segment.readers)] = 1
    assert np.array_equal(seen, expected)
    # Equal ranges: no block has more than a page above its share, warps without work excepted.
    work = items[:, 2] - items[:, 1]
    start = arrays["item_start 0 0"]
    per_block = np.add.reduceat(np.append(work, 0), start[:-1])
    per_block[np.diff(start) == 0] = 0
    used = min(num_blocks, -(-int(work.sum()) // least_pages))
    assert per_block.max() <= -(-int(work.sum()) // used)
    assert (per_block > 0).sum() == used


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(4, 40)), min_size=1, max_size=12),
    st.sampled_from([4, 5, 6, 8, 16]),
    st.integers(1, 140),
    st.integers(0, 1000),
)
def test_cohorts_read_every_page_once_at_equal_cost(
    runs: list[tuple[int, int]], group_size: int, num_blocks: int, seed: int
) -> None:
    segments = draw_segments(runs, 40, seed)
    kinds = Pages(GEOMETRY, ["tq3"]).kinds
    table = check_segments(segments, 40, kinds, GEOMETRY)
    lists = plan(table, 40, group_size, kinds, [Grid(500, num_blocks)])
    assert not lists.items and lists.num_tile_slots == 0
    items, columns = lists.cohorts[0], lists.arrays["prepare"].ravel()
    seen = np.zeros((sum(pages for pages, _ in runs), 40, 2 * group_size), dtype=np.int64)
    for block, first, last, _, head, packed, *_ in items.tolist():
        for which in range(packed & 255):
            refs = lists.arrays["rows"][block + which]
            row, head_in_group = np.divmod(columns[refs[refs >= 0]], 2 * group_size)
            seen[first:last, row, head * group_size + head_in_group] += 1
    expected = np.zeros_like(seen)
    for segment in segments:
        expected[np.ix_(segment.addresses, segment.readers)] = 1
    assert np.array_equal(seen, expected)
    cost = (items[:, 2] - items[:, 1]) * np.where(items[:, 5] & 255 == 2, 2, 1.35)
    start = lists.arrays["item_start cohort 0 0"]
    per_block = np.add.reduceat(np.append(cost, 0), start[:-1])
    per_block[np.diff(start) == 0] = 0
    used = min(num_blocks, int((items[:, 2] - items[:, 1]).sum()))
    assert per_block.max() <= cost.sum() / used + 2


@pytest.mark.parametrize("rule", [TQ_RULE, FP8_RULE])
@pytest.mark.parametrize("group_size", [1, 4, 6, 16])
@pytest.mark.parametrize("readers", [1, 2, 3, 4, 9, 40])
def test_the_shortest_cohort(readers: int, group_size: int, rule: CohortRule) -> None:
    kinds = Pages(GEOMETRY, ["bf16", "fp8"]).kinds

    def is_cohort(pages: int, last_page_len: int = 64) -> bool:
        segments = [Segment([0] * pages, 1, last_page_len, range(readers))]
        table = check_segments(segments, readers, kinds, GEOMETRY)
        found = find_cohorts(table, group_size, GEOMETRY, [None, rule])
        assert not find_cohorts(table, group_size, GEOMETRY, [rule, None]).any()
        return bool(found[0])

    least = rule.least_pages(readers, group_size, GEOMETRY.num_kv_heads)
    if readers * group_size <= COLUMNS:
        assert least is None
    if least is None:
        assert not is_cohort(5000)
    else:
        assert is_cohort(least) and not is_cohort(least, 63)
        assert least == 1 or not is_cohort(least - 1)


def test_packed_arrays_start_at_16_bytes() -> None:
    packed = pack_arrays({"a": np.arange(5), "b": np.arange(3), "c": np.empty(0, np.int32)})
    assert packed.starts == {"a": 0, "b": 8, "c": 12}
    assert packed.data.tolist() == [0, 1, 2, 3, 4, 0, 0, 0, 0, 1, 2, 0]
