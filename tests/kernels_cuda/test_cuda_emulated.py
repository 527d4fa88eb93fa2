"""The kernels themselves, run on the CPU, against float64 attention over the decoded pages."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from emulated import Emulation, in_fragment_order, skip_unless_possible
from kernel_pages import Pages, poison, relative_error

from minima_kernels import GRANULE, KVGeometry, Rotation, Segment, merge_states
from minima_kernels.attention import State
from minima_kernels.attention.segments import check_segments
from minima_kernels.cuda import work
from minima_kernels.cuda.decode import CudaDecode
from minima_kernels.cuda.plan import entry_rows

LIMITS = {15: 5e-4, 8: 2.5e-2}


@pytest.fixture(autouse=True)
def short_cohorts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of a few pages and rows are cohorts of FP8, too."""
    monkeypatch.setattr(work, "FP8_RULE", work.FP8_RULE._replace(min_stacked=9, min_saved=0))


@pytest.fixture
def emulation(monkeypatch: pytest.MonkeyPatch) -> Emulation:
    skip_unless_possible()
    return Emulation(monkeypatch)


def check(
    emulation: Emulation,
    pages: Pages,
    segments: Sequence[Segment],
    num_rows: int,
    group_size: int,
    query_bits: int = 15,
    seeds: int = 2,
    rows: Sequence[int] | None = None,
    mass_moves_bits: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """``dtype``: to which queries are rounded."""
    geometry = pages.geometry
    num_heads = geometry.num_kv_heads * group_size
    scale = geometry.head_dim**-0.5
    arena = in_fragment_order(pages, segments)
    table = check_segments(segments, num_rows, pages.kinds, geometry)
    plan = CudaDecode(
        table, num_rows, num_heads, tuple(pages.kinds), geometry, torch.device("cpu"), query_bits
    )
    q = (pages.random(num_rows, num_heads, geometry.head_dim) * 2).to(dtype).float()
    chosen = list(range(num_rows) if rows is None else rows)
    answers = [pages.reference(segments, row, q[row : row + 1], 0, scale) for row in chosen]
    expected = torch.cat([answer[0] for answer in answers])
    first = None
    for emulation.seed in range(seeds):
        poison(plan.scratch)
        result = plan.run(q, arena, 0, scale, emulation.seed == 0, None)
        error = relative_error(result.out[chosen], expected)
        assert error < LIMITS[query_bits], (emulation.seed, error)
        if first is None:
            first = result
            assert result.page_mass is not None
            sums = torch.zeros(num_rows, num_heads)
            sums.index_add_(0, torch.from_numpy(entry_rows(table)).int(), result.page_mass)
            has_pages = torch.isfinite(result.lse)
            assert torch.allclose(sums[has_pages], torch.ones(()), atol=2e-4)
        if emulation.seed == 1 and mass_moves_bits:
            first = result
        assert torch.equal(result.out, first.out), emulation.seed


SLOW = pytest.mark.slow


KERNELS = {"tq3": "cohort_decode_mass", "fp8": "cohort_fp8_mass"}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dim", [64, pytest.param(128, marks=SLOW), pytest.param(256, marks=SLOW)])
def test_cohort(emulation: Emulation, dim: int, name: str) -> None:
    pages = Pages(KVGeometry(1, 1, dim, 64), [name])
    everyone = list(range(20))
    # Three blocks of rows, and one; page counts around the eight that share a tile of means.
    segments = [pages.segment(0, 9, everyone), pages.segment(0, 1, everyone)]
    segments.append(pages.segment(0, 7, range(4)))
    check(emulation, pages, segments, 20, 8, seeds=1 if dim == 64 else 3, rows=[0, 3, 15, 16, 19])
    assert KERNELS[name] in emulation.launched


@pytest.mark.parametrize("dim", [64, pytest.param(128, marks=SLOW), pytest.param(256, marks=SLOW)])
def test_cohort_over_fp8_rounds_queries(emulation: Emulation, dim: int) -> None:
    """Queries of more than 11 bits lose the rest there: within the limit of all kernels."""
    pages = Pages(KVGeometry(1, 2, dim, 64), ["fp8"])
    segments = [pages.segment(0, 9, range(9))]
    check(emulation, pages, segments, 9, 4, seeds=1, dtype=torch.float32)
    assert "cohort_fp8_mass" in emulation.launched


@pytest.mark.parametrize("name", ["tq3", "fp8"])
def test_what_is_no_number_stays_none(emulation: Emulation, name: str) -> None:
    """Readers of a token that is NaN get NaN, by cohorts and by tiles; nobody else does."""
    geometry = KVGeometry(1, 1, 64, 64)
    pages = Pages(geometry, [name])
    segments = [pages.segment(0, 2, range(n, n + 5)) for n in (0, 5)]
    segments += [pages.segment(0, 2, [row]) for row in (10, 11)]
    k, v = (pages.random(1, 64, 1, 64) for _ in range(2))
    k[0, 7], v[0, 7] = torch.nan, torch.nan
    data = pages.kinds[0].formats[0].encode(k, v, geometry)[0]
    for segment in (segments[0], segments[2]):
        start = int(segment.addresses[1]) * GRANULE
        pages.arena[start : start + len(data)] = data
    table = check_segments(segments, 12, pages.kinds, geometry)
    kinds = tuple(pages.kinds)
    plan = CudaDecode(table, 12, 4, kinds, geometry, torch.device("cpu"), 15)
    arena = in_fragment_order(pages, segments)
    result = plan.run(pages.random(12, 4, 64), arena, 0, 0.125, False, None)
    reads = torch.tensor([True] * 5 + [False] * 5 + [True, False])
    assert torch.equal(result.out.isnan().any(-1).any(-1), reads)
    assert torch.equal(result.lse.isnan().any(-1), reads)
    assert len(set(emulation.launched)) == 4, emulation.launched


@pytest.mark.parametrize("name", ["tq(8,8,uncentred)", "fp8"])
@pytest.mark.parametrize("dim", [pytest.param(128, marks=SLOW), pytest.param(256, marks=SLOW)])
def test_consumers_that_pages_pass_by(monkeypatch: pytest.MonkeyPatch, dim: int, name: str) -> None:
    """Nodes of one page go to one consumer; the other must not take an old tile for a new one."""
    skip_unless_possible()
    emulation = Emulation(monkeypatch, multiprocessors=1)
    pages = Pages(KVGeometry(1, 1, dim, 64), [name])
    segments = [pages.segment(0, n, range(4)) for n in (1, 1, 1, 1, 1, 5, 1, 1, 1, 1, 3)]
    check(emulation, pages, segments, 4, 4, seeds=12)


@pytest.mark.parametrize("name", ["tq3", pytest.param("tq(16,4)", marks=SLOW)])
@pytest.mark.parametrize("dim", [64, pytest.param(256, marks=SLOW)])
def test_one_reader_each(emulation: Emulation, dim: int, name: str) -> None:
    pages = Pages(KVGeometry(1, 2, dim, 64), [name])
    segments = [pages.segment(0, count, [row]) for row, count in enumerate((1, 9, 14))]
    check(emulation, pages, segments, 3, 4)
    assert "tq_decode_mass" in emulation.launched


@pytest.mark.parametrize("name", ["fp8", "bf16", pytest.param("f16", marks=SLOW)])
@pytest.mark.parametrize("dim", [64, pytest.param(128, marks=SLOW), pytest.param(256, marks=SLOW)])
def test_pages_in_row_order(emulation: Emulation, dim: int, name: str) -> None:
    """Open pages, too, whose unwritten bytes are NaN; a warp has a page, or a quarter of each."""
    pages = Pages(KVGeometry(1, 2, dim, 64), [name])
    segments = [
        pages.segment(0, 1, [0], 1),
        pages.segment(0, 6, [1, 2]),
        pages.segment(0, 3, [1], 17),
        pages.segment(0, 2, [2], 63),
        pages.segment(0, 9, [4]),
    ]
    check(emulation, pages, segments, 5, 3, seeds=3, rows=[0, 1, 2, 4], mass_moves_bits=True)
    assert set(emulation.launched) == {
        "prepare", "row_decode_mass", "row_decode", "merge", "normalise_mass"
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_elsewhere_is_merged(emulation: Emulation, dtype: torch.dtype) -> None:
    """Rows over pages and elsewhere, over one of them alone, and over nothing at all."""
    pages = Pages(KVGeometry(1, 2, 64, 64), ["tq3"])
    segments = [pages.segment(0, 3, [0]), pages.segment(0, 2, [1])]
    table = check_segments(segments, 4, pages.kinds, pages.geometry)
    cpu = torch.device("cpu")
    plan = CudaDecode(table, 4, 8, tuple(pages.kinds), pages.geometry, cpu, 15)
    arena, rotation = in_fragment_order(pages, segments), Rotation(64)
    q = pages.random(4, 8, 64).to(dtype)
    out, lse = pages.random(4, 8, 64).to(dtype), pages.random(4, 8) * 3 + 4
    out[1], lse[1] = 0, -torch.inf
    out[3], lse[3] = 0, -torch.inf
    alone = plan.run(q.float(), arena, 0, 0.125, False, rotation)
    expected = merge_states(alone.out, alone.lse, out.float(), lse)
    result = plan.run(q, arena, 0, 0.125, False, rotation, State(out, lse))
    assert result.out.dtype == dtype
    assert relative_error(result.out, expected.out) < (1e-6 if dtype == torch.float32 else 4e-3)
    assert torch.allclose(result.lse, expected.lse, atol=1e-5)
    assert torch.equal(result.lse[3], torch.full((8,), -torch.inf))
    # What is not given any more is not merged any more.
    again = plan.run(q.float(), arena, 0, 0.125, False, rotation)
    assert torch.equal(again.out, alone.out)
