"""Native extend attention against dense float64 causal attention over the decoded values."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from kernel_pages import Pages, relative_error

from minima_kernels import KVGeometry, RouteCounters, Segment, plan_extend, run_extend

TOLERANCE = 2e-4


def check(pages: Pages, segments: list[Segment], lengths: list[int], group_size: int = 3) -> None:
    geometry = pages.geometry
    heads, dim = geometry.num_kv_heads, geometry.head_dim
    indptr = torch.tensor([0, *lengths]).cumsum(0).tolist()
    plan = plan_extend(segments, indptr, pages.kinds, geometry, "cpu")
    q = pages.random(indptr[-1], heads * group_size, dim) * 2
    k, v = pages.random(indptr[-1], heads, dim), pages.random(indptr[-1], heads, dim)
    routes = RouteCounters()
    result = run_extend(plan, q, k, v, pages.arena, 0, dim**-0.5, routes=routes)
    assert [route.route for route in routes.snapshot()] == ["native"]
    for request, (start, stop) in enumerate(pairwise(indptr)):
        if start == stop:
            continue
        rows = slice(start, stop)
        new = k[rows], v[rows]
        out, lse = pages.reference(segments, request, q[rows], 0, dim**-0.5, new)
        assert relative_error(result.out[rows], out) < TOLERANCE
        assert torch.allclose(result.lse[rows].double(), lse, atol=1e-3)


@pytest.mark.parametrize("page_size", [16, 64, 128])
def test_ragged_batch_over_mixed_pages(level: str, page_size: int) -> None:
    pages = Pages(KVGeometry(1, 2, 64, page_size), ["fp8", "tq3", "f32", "tq(5,12)"])
    segments = [pages.segment(kind, 3, [0, 1, 3]) for kind in range(4)]
    segments.append(pages.segment(0, 2, [1], last_page_len=5))
    check(pages, segments, [70, 3, 65, 1])


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_dims(level: str, head_dim: int) -> None:
    pages = Pages(KVGeometry(1, 1, head_dim, 16), ["tq3", "bf16"])
    segments = [pages.segment(0, 5, [0]), pages.segment(1, 2, [0], last_page_len=9)]
    check(pages, segments, [33], group_size=2)


@pytest.mark.parametrize("group_size", [1, 2, 5, 8])
def test_group_sizes(level: str, group_size: int) -> None:
    pages = Pages(KVGeometry(1, 1, 64, 16), ["tq3"])
    check(pages, [pages.segment(0, 2, [0])], [50], group_size)


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 63, 64, 65, 128, 300])
def test_without_a_prefix(level: str, num_tokens: int) -> None:
    pages = Pages(KVGeometry(1, 2, 64, 16), ["fp8"])
    check(pages, [], [num_tokens, 0, 2])


def test_blocks_of_queries(level: str) -> None:
    """More rows than a block of queries holds, with prefix and diagonal in one."""
    pages = Pages(KVGeometry(1, 1, 128, 64), ["tq3", "fp8"])
    segments = [pages.segment(0, 2, [0]), pages.segment(1, 1, [0], last_page_len=33)]
    check(pages, segments, [200], group_size=8)


@pytest.mark.parametrize("page_size", [16, 64])
def test_bits_do_not_depend_on_cuts_or_neighbours(level: str, page_size: int) -> None:
    pages = Pages(KVGeometry(1, 2, 64, page_size), ["tq3"])
    whole = pages.segment(0, 7, [0])
    q, k, v = pages.random(40, 4, 64), pages.random(40, 2, 64), pages.random(40, 2, 64)

    def run(segments: list[Segment], indptr: list[int], *rows: torch.Tensor) -> torch.Tensor:
        plan = plan_extend(segments, indptr, pages.kinds, pages.geometry, "cpu")
        return run_extend(plan, *rows, pages.arena, 0, 0.125).out

    expected = run([whole], [0, 40], q, k, v)
    parts = [whole.addresses[:3], whole.addresses[3:4], whole.addresses[4:]]
    cut = [Segment(part, 0, page_size, [0]) for part in parts]
    assert torch.equal(run(cut, [0, 40], q, k, v), expected)
    both = [Segment(part, 0, page_size, [0, 1]) for part in parts]
    twice = [torch.cat((x, x + 1)) for x in (q, k, v)]
    assert torch.equal(run(both, [0, 40, 80], *twice)[:40], expected)


def test_half_precision_inputs() -> None:
    pages = Pages(KVGeometry(1, 2, 64, 16), ["tq3"])
    segment = pages.segment(0, 2, [0])
    plan = plan_extend([segment], [0, 20], pages.kinds, pages.geometry, "cpu")
    q, k, v = (pages.random(20, heads, 64).bfloat16() for heads in (4, 2, 2))
    result = run_extend(plan, q, k, v, pages.arena, 0, 0.125)
    assert result.out.dtype == torch.bfloat16
    out, _ = pages.reference([segment], 0, q.float(), 0, 0.125, (k.float(), v.float()))
    assert relative_error(result.out.float(), out) < 1e-2
