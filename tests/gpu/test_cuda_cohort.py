"""The cohort kernels against float64 attention over the decoded pages."""

from __future__ import annotations

import pytest
import torch
from gpu_pages import move
from kernel_pages import Pages, poison, relative_error
from test_cuda_decode import check

from minima_kernels import KVGeometry, plan_decode, run_decode
from minima_kernels.cuda import work

FORMATS = ["tq3", "tq(16,4)", "tq(16,8)", "tq(8,4)", "tq(4,4)", "tq(16,16)", "tq(8,8,uncentred)"]
CASES = [(name, bits) for name in FORMATS for bits in (15, 8)]
# Over FP8 pages queries of a model in 16 bits are exact, unless they are rotated.
QUERIES = {"tq3": torch.float32, "fp8": torch.bfloat16}


@pytest.fixture(autouse=True)
def short_cohorts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of a few pages and rows are cohorts of FP8, too."""
    monkeypatch.setattr(work, "FP8_RULE", work.FP8_RULE._replace(min_stacked=9, min_saved=0))


@pytest.mark.parametrize(("name", "query_bits"), [*CASES, ("fp8", 15)])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_formats(name: str, dim: int, query_bits: int) -> None:
    """Page counts around the eight that share a tile of means, and one."""
    pages = Pages(KVGeometry(2, 2, dim, 64), [name])
    everyone = list(range(7))
    segments = [pages.segment(0, count, everyone) for count in (1, 9, 16, 23)]
    assert (
        plan_decode(segments, 7, pages.kinds, pages.geometry, "cuda")
        .cuda(8)
        .scratch.part_rows.numel()
    )
    check(pages, segments, 7, 4, query_bits, dtype=QUERIES.get(name, torch.float32))


@pytest.mark.parametrize("group_size", [1, 3, 4, 5, 6, 8, 12, 16])
@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize("name", ["tq3", "fp8"])
def test_groups_and_numbers_of_readers(name: str, dim: int, group_size: int) -> None:
    """One to four blocks of rows, rows cut by a block's end, private tails in other formats; two
    kinds of which each has cohorts."""
    num_rows = 24 if group_size < 12 else 16
    pages = Pages(KVGeometry(1, 2, dim, 64), [name, "fp8", "bf16"])
    everyone = list(range(num_rows))
    segments = [
        pages.segment(0, 13, everyone),
        pages.segment(0, 3, everyone[3:21]),
        pages.segment(0, 2, [0, 1]),
        pages.segment(1, 2, everyone),
        *[pages.segment(1 + row % 2, 1 + row % 3, [row], 1 + 2 * row) for row in everyone],
    ]
    rows = [0, 3, 10, 15, num_rows - 1]
    check(pages, segments, num_rows, group_size, rows=rows, dtype=QUERIES[name])


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", ["tq3", "fp8"])
def test_tree_of_nodes_of_uneven_length(name: str, dim: int) -> None:
    pages = Pages(KVGeometry(1, 2, dim, 64), [name, "fp8"])
    segments = [pages.segment(0, 7, range(32))]
    for half in range(2):
        segments.append(pages.segment(0, 5 + half, range(16 * half, 16 * half + 16)))
        for quarter in range(4):
            start = 16 * half + 4 * quarter
            segments.append(pages.segment(0, 1 + quarter + half, range(start, start + 4)))
    segments += [pages.segment(1, 2, [row], 1 + row) for row in range(32)]
    check(pages, segments, 32, 6, rows=[0, 10, 15, 16, 21, 31], dtype=QUERIES[name])


@pytest.mark.parametrize("case", ["large keys", "small, then large values", "zero values"])
@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize("name", ["tq3", "fp8"])
def test_extreme_pages(name: str, dim: int, case: str) -> None:
    """One token that takes all attention; V scales that no 16-bit weight holds at once."""
    geometry = KVGeometry(1, 1, dim, 64)
    pages = Pages(geometry, [name])
    segment = pages.segment(0, 12, range(8))
    format_ = pages.kinds[0].formats[0]
    k, v = pages.random(12, 64, 1, dim), pages.random(12, 64, 1, dim)
    if case == "large keys":
        k[7, 40] *= 300
    elif case == "zero values":
        v[:9] = 0
    else:
        v *= 2.0 ** -(14 - 2 * torch.arange(12.0))[:, None, None, None]
    data = format_.encode(k, v, geometry)
    for address, row in zip(segment.addresses, data, strict=True):
        pages.arena[address * 128 : address * 128 + len(row)] = row
    # Scores of some hundreds: a query's rounding moves them, and so the weights, in proportion.
    limit = 2e-3 if case == "large keys" else None
    check(pages, [segment], 8, 4, dtype=QUERIES[name], limit=limit)


@pytest.mark.parametrize(("dtype", "spread"), [(torch.float32, 2), (torch.bfloat16, 16)])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_queries_over_fp8_pages(dim: int, dtype: torch.dtype, spread: float) -> None:
    """Those of more than 11 bits lose the rest; BF16 ones lose nothing at scores of any size."""
    pages = Pages(KVGeometry(1, 2, dim, 64), ["fp8"])
    check(pages, [pages.segment(0, 9, range(9))], 9, 4, spread=spread, dtype=dtype)


@pytest.mark.parametrize("name", ["tq3", "fp8"])
def test_graph_replay_and_repeat(name: str) -> None:
    geometry = KVGeometry(1, 4, 256, 64)
    pages = Pages(geometry, [name, "fp8"])
    segments = [pages.segment(0, 90, range(32))]
    segments += [pages.segment(1, 2, [row]) for row in range(32)]
    arena = move(pages, segments)
    plan = plan_decode(segments, 32, pages.kinds, geometry, arena.device)
    q = pages.random(32, 24, 256).bfloat16().float().cuda()
    eager = run_decode(plan, q, arena, 0, 0.0625, page_mass=True)
    graph = torch.cuda.CUDAGraph()
    held = torch.zeros_like(q)
    with torch.cuda.graph(graph):
        captured = run_decode(plan, held, arena, 0, 0.0625, page_mass=True)
    for _ in range(3):
        poison(plan.cuda(24).scratch)
        held.copy_(q)
        graph.replay()
        torch.cuda.synchronize()
        for first, second in zip(eager, captured, strict=True):
            assert torch.equal(first, second)
    expected, _ = pages.reference(segments, 5, q[5:6].cpu(), 0, 0.0625)
    assert relative_error(eager.out[5].cpu(), expected[0]) < 5e-4
