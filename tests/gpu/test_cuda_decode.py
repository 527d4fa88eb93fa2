"""The CUDA decode kernels against float64 attention over the decoded pages."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from gpu_pages import move
from kernel_pages import Pages, poison, relative_error

from minima_kernels import (
    KVGeometry,
    PageKind,
    Rotation,
    RouteCounters,
    Segment,
    parse_format,
    plan_decode,
    retier,
    run_decode,
)
from minima_kernels.attention.reference import dense_attention
from minima_kernels.routes import Route
from minima_kernels.shares import read_shares

LIMITS = {15: 5e-4, 8: 2.5e-2}
FORMATS = ["tq3", "tq(16,4)", "tq(16,8)", "tq(8,4)", "tq(4,4)", "tq(8,8,uncentred)"]
ROWS = ["fp8", "bf16", "f16"]


def check(
    pages: Pages,
    segments: Sequence[Segment],
    num_rows: int,
    group_size: int,
    query_bits: int = 15,
    spread: float = 2.0,
    rows: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    limit: float | None = None,
) -> None:
    """``dtype``: to which queries are rounded; they are given, and outputs taken, as float32.
    ``limit``: of errors; by default that of ``query_bits``."""
    geometry = pages.geometry
    num_heads = geometry.num_kv_heads * group_size
    scale = geometry.head_dim**-0.5
    arena = move(pages, segments)
    plan = plan_decode(
        segments, num_rows, pages.kinds, geometry, arena.device, query_bits=query_bits
    )
    poison(plan.cuda(num_heads).scratch)
    q = (pages.random(num_rows, num_heads, geometry.head_dim) * spread).to(dtype).float()
    routes = RouteCounters()
    limit = limit or LIMITS[query_bits]
    for layer in range(geometry.num_layers):
        result = run_decode(
            plan, q.cuda(), arena, layer, scale, page_mass=layer == 0, routes=routes
        )
        expected_rows, actual_rows, lses = [], [], []
        for row in range(num_rows) if rows is None else rows:
            expected, lse = pages.reference(segments, row, q[row : row + 1], layer, scale)
            expected_rows.append(expected)
            actual_rows.append(result.out[row : row + 1].cpu())
            # Queries are rounded: the error of scores is in proportion to their size.
            size = lse[0].abs().clamp_min(20)
            lses.append(((result.lse[row].cpu().double() - lse[0]).abs() / size).max())
        assert relative_error(torch.cat(actual_rows), torch.cat(expected_rows)) < limit
        assert max(lses) < limit
        if result.page_mass is not None:
            sums = torch.zeros(num_rows, num_heads, device="cuda")
            sums.index_add_(0, plan.page_entries.rows.cuda(), result.page_mass)
            has_pages = torch.isfinite(result.lse)
            assert torch.allclose(sums[has_pages], torch.ones_like(sums[has_pages]), atol=2e-4)
    assert routes.snapshot() == {Route("decode", "cuda", ""): geometry.num_layers}


@pytest.mark.parametrize("query_bits", [15, 8])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", FORMATS)
def test_formats_of_integer_products(name: str, dim: int, query_bits: int) -> None:
    pages = Pages(KVGeometry(2, 2, dim, 64), [name])
    segments = [pages.segment(0, count, [row]) for row, count in enumerate((1, 3, 17, 40))]
    check(pages, segments, 5, 4, query_bits, rows=range(4))


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", ROWS)
def test_formats_in_row_order(name: str, dim: int) -> None:
    pages = Pages(KVGeometry(2, 2, dim, 64), [name])
    segments = [
        pages.segment(0, count, [row], length)
        for row, (count, length) in enumerate(((1, 1), (3, 16), (9, 17), (2, 63), (6, 64)))
    ]
    check(pages, segments, 5, 4)


@pytest.mark.parametrize("group_size", [1, 2, 3, 5, 6, 7, 8, 12, 16])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_groups_and_shared_segments(dim: int, group_size: int) -> None:
    pages = Pages(KVGeometry(1, 2, dim, 64), ["tq3", "fp8", "bf16"])
    everyone = list(range(5))
    segments = [
        pages.segment(0, 11, everyone),
        pages.segment(1, 2, [0, 1]),
        pages.segment(0, 3, [2, 4]),
        *[pages.segment(1 + row % 2, 1 + row % 3, [row], 1 + 15 * row) for row in everyone],
    ]
    check(pages, segments, 5, group_size)


def test_kinds_that_differ_by_layer() -> None:
    pages = Pages(KVGeometry(3, 2, 64, 64), ["fp8", "tq3"])
    pages.kinds[1] = pages.kinds[1].with_layers(parse_format("fp8"), [0, -1])
    segments = [pages.segment(1, 9, [0, 1]), pages.segment(0, 2, [1], 30)]
    check(pages, segments, 2, 3)


@pytest.mark.parametrize("name", ["tq3", "fp8"])
@pytest.mark.parametrize(
    "case", ["zero values", "zero keys", "large keys", "no value", "tiny values"]
)
def test_extreme_pages(name: str, case: str) -> None:
    """Scales of zero, one token that takes all attention, a reference that must move far."""
    geometry = KVGeometry(1, 1, 128, 64)
    pages = Pages(geometry, [name])
    segment = pages.segment(0, 6, [0])
    format_ = pages.kinds[0].formats[0]
    k, v = pages.random(6, 64, 1, 128), pages.random(6, 64, 1, 128)
    if case == "zero values":
        v[1:5] = 0
    elif case == "zero keys":
        k[:] = 0
    elif case == "large keys":
        k[3, 40] *= 300
    elif case == "no value":
        k[3, 40] *= 4
        v[3, 40] = 0
    else:
        v *= 2.0**-14
    data = format_.encode(k, v, geometry)
    for address, row in zip(segment.addresses, data, strict=True):
        pages.arena[address * 128 : address * 128 + len(row)] = row
    check(pages, [segment], 1, 4)


def test_fused_rotation() -> None:
    geometry = KVGeometry(1, 2, 128, 64)
    pages = Pages(geometry, ["tq3"])
    segments = [pages.segment(0, 5, [0, 1])]
    arena = move(pages, segments)
    plan = plan_decode(segments, 2, pages.kinds, geometry, arena.device)
    q = pages.random(2, 8, 128).cuda()
    signs = [1 if i % 3 else -1 for i in range(128)]
    for rotation in (Rotation(128, device="cuda"), Rotation(128, device="cuda", signs=signs)):
        fused = run_decode(plan, q, arena, 0, 0.1, rotation=rotation)
        apart = run_decode(plan, rotation.forward(q), arena, 0, 0.1)
        assert relative_error(fused.out, rotation.inverse(apart.out)) < 1e-4
        assert torch.allclose(fused.lse, apart.lse, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_queries(dtype: torch.dtype) -> None:
    geometry = KVGeometry(1, 2, 64, 64)
    pages = Pages(geometry, ["tq3"])
    segments = [pages.segment(0, 5, [0])]
    arena = move(pages, segments)
    plan = plan_decode(segments, 1, pages.kinds, geometry, arena.device)
    q = pages.random(1, 6, 64).to(dtype)
    result = run_decode(plan, q.cuda(), arena, 0, 0.125)
    assert result.out.dtype == dtype
    expected, _ = pages.reference(segments, 0, q.float(), 0, 0.125)
    assert relative_error(result.out.cpu(), expected) < 5e-3


def test_graph_replay_and_repeat() -> None:
    """A captured run gives the bits of an eager one, for queries that were not there at capture."""
    geometry = KVGeometry(1, 2, 128, 64)
    pages = Pages(geometry, ["tq3", "fp8"])
    segments = [pages.segment(0, 30, [0, 1, 2]), pages.segment(1, 2, [1], 9)]
    arena = move(pages, segments)
    plan = plan_decode(segments, 3, pages.kinds, geometry, arena.device)
    q = pages.random(3, 8, 128).cuda()
    eager = run_decode(plan, q, arena, 0, 0.1, page_mass=True)
    graph = torch.cuda.CUDAGraph()
    held = torch.zeros_like(q)
    with torch.cuda.graph(graph):
        captured = run_decode(plan, held, arena, 0, 0.1, page_mass=True)
    for _ in range(3):
        poison(plan.cuda(8).scratch)
        held.copy_(q)
        graph.replay()
        torch.cuda.synchronize()
        for first, second in zip(eager, captured, strict=True):
            assert torch.equal(first, second)


def test_retier_on_the_gpu_then_decode() -> None:
    geometry = KVGeometry(2, 2, 128, 64)
    pages = Pages(geometry, ["fp8", "tq3", "tq(16,4)"])
    source = pages.segment(0, 8, [0])
    targets = [Segment([pages.page(kind) for _ in range(8)], kind, 64, [0]) for kind in (1, 2)]
    for target in targets:
        arena = move(pages, [source, target])
        kinds = pages.kinds
        retier(
            arena, source.addresses, kinds[0], target.addresses, kinds[target.kind_index], geometry
        )
        plan = plan_decode([target], 1, kinds, geometry, arena.device)
        q = pages.random(1, 8, 128)
        result = run_decode(plan, q.cuda(), arena, 1, 0.1)
        format_ = kinds[target.kind_index].formats[1]
        offset = kinds[target.kind_index].layer_offset(1, geometry)
        addresses = torch.as_tensor(target.addresses).cuda()
        data = read_shares(arena, addresses, format_, offset, geometry).cpu()
        k, v = (x.flatten(0, 1) for x in format_.decode(data, geometry))
        expected, _ = dense_attention(q, k, v, 0.1)
        assert relative_error(result.out.cpu(), expected) < 5e-4


@pytest.mark.parametrize("name", ["tq3", "fp8"])
@pytest.mark.parametrize("dim", [128, 256])
def test_long_contexts_in_random_places(name: str, dim: int) -> None:
    """Hundreds of pages per request, cut among all blocks."""
    geometry = KVGeometry(1, 4, dim, 64)
    format_ = parse_format(name)
    kind = PageKind.uniform(name, format_, 1)
    generator = torch.Generator("cuda").manual_seed(0)
    counts = 700, 211, 5
    total, granules = sum(counts) + 3, kind.granules(geometry)
    arena = torch.full((total * granules * 128,), 255, dtype=torch.uint8, device="cuda")
    order = torch.randperm(total, generator=generator, device="cuda") * granules
    from minima_kernels.shares import write_shares

    for part in order[: sum(counts)].split(64):
        shape = len(part), 64, 4, dim
        k, v = (torch.randn(shape, generator=generator, device="cuda") for _ in range(2))
        data = format_.encode(k + 1, v, geometry)
        write_shares(arena, part, format_, 0, geometry, data)
    segments = [
        Segment(pages.cpu(), 0, 64, [row])
        for row, pages in enumerate(order[: sum(counts)].split(counts))
    ]
    plan = plan_decode(segments, 3, [kind], geometry, arena.device)
    q = torch.randn(3, 24, dim, generator=generator, device="cuda") * 2
    poison(plan.cuda(24).scratch)
    result = run_decode(plan, q, arena, 0, dim**-0.5)
    for row, segment in enumerate(segments):
        addresses = torch.as_tensor(segment.addresses).cuda()
        data = read_shares(arena, addresses, format_, 0, geometry)
        k, v = (x.flatten(0, 1) for x in format_.decode(data, geometry))
        expected, lse = dense_attention(q[row : row + 1], k, v, dim**-0.5)
        assert relative_error(result.out[row], expected[0]) < 5e-4
        assert (result.lse[row].double() - lse[0]).abs().max() < 1e-2
