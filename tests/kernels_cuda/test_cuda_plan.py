"""Work lists of the CUDA kernels: executed here in float64, they give dense attention."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_pages import Pages, relative_error

from minima_kernels import KVGeometry, Segment
from minima_kernels.attention.segments import SegmentTable, check_segments
from minima_kernels.cuda.plan import (
    COLUMNS,
    Items,
    entry_rows,
    head_blocks,
    make_items,
    make_merge_lists,
    make_tiles,
    mass_columns,
    pack_arrays,
    prepare_columns,
)
from minima_kernels.transfer import read_page

GEOMETRY = KVGeometry(1, 2, 64, 64)


def plan(
    table: SegmentTable, num_rows: int, group_size: int, blocks: Sequence[int]
) -> tuple[list[Items], dict[str, np.ndarray]]:
    """The lists of a plan as ``CudaDecode`` makes them; ``blocks`` per kind."""
    tiles = make_tiles(table, group_size)
    heads = GEOMETRY.num_kv_heads
    slots, lists = 0, []
    for kind, num_blocks in enumerate(blocks):
        chosen = np.flatnonzero(table.kind_index[tiles.segment] == kind)
        items = make_items(table, tiles, chosen, heads, num_blocks, slots, 64)
        slots += len(items.items)
        lists.append(items)
    merge = make_merge_lists(lists, tiles, num_rows, heads, group_size)
    arrays = {
        "prepare": prepare_columns(tiles, heads * group_size, group_size),
        "mass": mass_columns(tiles, group_size),
        "unit_start": merge.unit_start,
        "unit_partials": merge.unit_partials,
        "pages": table.addresses,
        "entries": entry_rows(table),
    }
    return lists, arrays


def execute(
    pages: Pages,
    table: SegmentTable,
    q: torch.Tensor,
    scale: float,
    blocks: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs, lse and page mass of the lists, each step as the kernels do it."""
    num_rows, num_heads, dim = q.shape
    heads = GEOMETRY.num_kv_heads
    group_size = num_heads // heads
    lists, arrays = plan(table, num_rows, group_size, blocks)
    num_slots = sum(len(items.items) for items in lists)
    part_m = torch.full((num_slots * COLUMNS,), float("nan"), dtype=torch.float64)
    part_l, part_o = part_m.clone(), torch.full((len(part_m), dim), float("nan")).double()
    mass = torch.full((len(arrays["entries"]), num_heads), float("nan"), dtype=torch.float64)
    flat_q = q.double().view(-1, dim)
    for kind, items in enumerate(lists):
        assert items.item_start[0] == 0 and items.item_start[-1] == len(items.items)
        assert (np.diff(items.item_start) >= 0).all()
        for tile_head, first, last, slot, head, last_len, entry, stride in items.items.tolist():
            columns = arrays["prepare"][tile_head // heads].tolist()
            places = arrays["mass"][tile_head // heads].tolist()
            parts = []
            for place in range(first, last):
                address = int(arrays["pages"][place])
                k, v = read_page(pages.arena, address, pages.kinds[kind], 0, GEOMETRY)
                length = last_len if place == last - 1 else 64
                parts.append((k[:length, head].double(), v[:length, head].double()))
            for n, (column, where) in enumerate(zip(columns, places, strict=True)):
                assert (column < 0) == (where < 0)
                if column < 0:
                    continue
                query = flat_q[column + head * group_size] * scale
                scores = [k @ query for k, _ in parts]
                m = torch.cat(scores).max()
                weights = torch.exp(torch.cat(scores) - m)
                at = slot * COLUMNS + n
                assert torch.isnan(part_m[at])
                part_m[at], part_l[at] = m, weights.sum()
                part_o[at] = weights @ torch.cat([v for _, v in parts])
                for index, page_scores in enumerate(scores):
                    cell = entry + index * stride + (where >> 8)
                    assert torch.isnan(mass[cell, head * group_size + (where & 255)])
                    page_sum = torch.logsumexp(page_scores, 0)
                    mass[cell, head * group_size + (where & 255)] = page_sum
    out = torch.zeros(num_rows * num_heads, dim, dtype=torch.float64)
    lse = torch.full((num_rows * num_heads,), -torch.inf, dtype=torch.float64)
    blocks_per_row = head_blocks(group_size)
    for unit in range(num_rows * heads * blocks_per_row):
        chosen = arrays["unit_partials"][
            arrays["unit_start"][unit] : arrays["unit_start"][unit + 1]
        ]
        for n in range(min(group_size, COLUMNS)):
            head_in_group = unit % blocks_per_row * COLUMNS + n
            if head_in_group >= group_size or not len(chosen):
                continue
            at = torch.from_numpy(chosen.astype(np.int64)) + n
            weight = torch.exp(part_m[at] - part_m[at].max())
            total = (weight * part_l[at]).sum()
            row = unit // blocks_per_row * group_size + head_in_group
            out[row] = (weight[:, None] * part_o[at]).sum(0) / total
            lse[row] = part_m[at].max() + total.log()
    lse = lse.view(num_rows, num_heads)
    mass = torch.exp(mass - lse[torch.from_numpy(arrays["entries"])])
    return out.view(q.shape), lse, mass


@pytest.mark.parametrize("group_size", [1, 2, 3, 4, 6, 8, 12, 16])
@pytest.mark.parametrize("blocks", [(1, 1), (7, 3), (500, 40)])
def test_lists_give_dense_attention(group_size: int, blocks: tuple[int, int]) -> None:
    pages = Pages(GEOMETRY, ["tq3", "fp8"])
    segments = [
        pages.segment(0, 9, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        pages.segment(0, 3, [3, 4]),
        pages.segment(0, 1, [0]),
        pages.segment(1, 2, [0], last_page_len=17),
        pages.segment(1, 1, [4], last_page_len=1),
        pages.segment(1, 3, [9, 2]),
    ]
    table = check_segments(segments, 11, pages.kinds, GEOMETRY)
    q = pages.random(11, 2 * group_size, 64)
    out, lse, mass = execute(pages, table, q, 0.125, blocks)
    for row in range(10):
        expected, expected_lse = pages.reference(segments, row, q[row : row + 1], 0, 0.125)
        assert relative_error(out[row], expected[0]) < 1e-12
        assert torch.allclose(lse[row], expected_lse[0])
    assert out[10].abs().max() == 0 and (lse[10] == -torch.inf).all()
    sums = torch.zeros(11, 2 * group_size, dtype=torch.float64)
    sums.index_add_(0, torch.from_numpy(entry_rows(table)), mass)
    assert torch.allclose(sums[:10], torch.ones(10, 2 * group_size, dtype=torch.float64))


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 5)), min_size=1, max_size=12),
    st.sampled_from([1, 2, 3, 4, 5, 6, 8, 16]),
    st.integers(1, 70),
    st.integers(0, 1000),
)
def test_every_page_is_read_once_by_every_reader(
    runs: list[tuple[int, int]], group_size: int, num_blocks: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    segments, page = [], 0
    for pages, readers in runs:
        chosen = np.sort(generator.choice(8, readers, replace=False))
        segments.append(Segment(np.arange(page, page + pages), 0, 64, chosen))
        page += pages
    kinds = Pages(GEOMETRY, ["tq3"]).kinds
    table = check_segments(segments, 8, kinds, GEOMETRY)
    (items,), arrays = plan(table, 8, group_size, [num_blocks])
    seen = np.zeros((page, 8, 2 * group_size), dtype=np.int64)
    for tile_head, first, last, _, head, *_ in items.items.tolist():
        for column in arrays["prepare"][tile_head // 2]:
            if column >= 0:
                row, head_in_group = divmod(int(column), 2 * group_size)
                seen[first:last, row, head * group_size + head_in_group] += 1
    expected = np.zeros_like(seen)
    for segment in segments:
        expected[np.ix_(segment.addresses, segment.readers)] = 1
    assert np.array_equal(seen, expected)
    # Equal ranges: no block has more than a page above its share, warps without work excepted.
    work = items.items[:, 2] - items.items[:, 1]
    per_block = np.add.reduceat(np.append(work, 0), items.item_start[:-1])
    per_block[np.diff(items.item_start) == 0] = 0
    used = min(num_blocks, -(-int(work.sum()) // 4))
    assert per_block.max() <= -(-int(work.sum()) // used)
    assert (per_block > 0).sum() == used


def test_packed_arrays_start_at_16_bytes() -> None:
    packed = pack_arrays({"a": np.arange(5), "b": np.arange(3), "c": np.empty(0, np.int32)})
    assert packed.starts == {"a": 0, "b": 8, "c": 12}
    assert packed.data.tolist() == [0, 1, 2, 3, 4, 0, 0, 0, 0, 1, 2, 0]
