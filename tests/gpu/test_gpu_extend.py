"""Extend attention on a GPU against float64 attention over the decoded pages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from gpu_pages import move
from kernel_pages import Pages, relative_error

from minima_kernels import KVGeometry, Rotation, RouteCounters, Segment, plan_extend, run_extend
from minima_kernels.cuda import stacked

LIMIT = 1e-3  # outputs of both parts, and their sum, are rounded to 16-bit floats


def check(
    pages: Pages, segments: Sequence[Segment], q_indptr: Sequence[int], group_size: int
) -> set[str]:
    """Outputs of all rows; returns the routes taken."""
    geometry, num_rows = pages.geometry, q_indptr[-1]
    heads, dim = geometry.num_kv_heads, geometry.head_dim
    arena = move(pages, segments)
    plan = plan_extend(segments, q_indptr, pages.kinds, geometry, arena.device)
    q = (pages.random(num_rows, heads * group_size, dim) * 1.5).half()
    k, v = (pages.random(num_rows, heads, dim).half() for _ in range(2))
    turned = Rotation(dim)
    rotation = Rotation(dim, device="cuda")
    routes = RouteCounters()
    for layer in range(geometry.num_layers):
        result = run_extend(
            plan, q.cuda(), k.cuda(), v.cuda(), arena, layer, dim**-0.5,
            rotation=rotation, routes=routes,
        )  # fmt: skip
        expected, lses = [], []
        for request, (start, stop) in enumerate(pairwise(q_indptr)):
            rows = slice(start, stop)
            ours = [turned.forward(x[rows].float()) for x in (q, k, v)]
            out, lse = pages.reference(
                segments, request, ours[0], layer, dim**-0.5, (ours[1], ours[2])
            )
            expected.append(out @ turned.matrix.double().T)
            lses.append(lse)
        assert relative_error(result.out.cpu(), torch.cat(expected)) < LIMIT
        assert torch.allclose(result.lse.cpu().double(), torch.cat(lses), atol=5e-3)
    return {route.route for route in routes.snapshot() if route.operation == "extend"}


@pytest.mark.parametrize("group_size", [1, 4, 6, 16])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", ["tq3", "tq(16,4)", "fp8", "bf16"])
def test_few_new_tokens(name: str, dim: int, group_size: int) -> None:
    """A prefix of all, one of some, tails in open pages; requests of 1 to 90 rows."""
    pages = Pages(KVGeometry(2, 2, dim, 64), [name, "fp8"])
    segments = [
        pages.segment(0, 11, [0, 1, 2, 4]),
        pages.segment(0, 3, [1, 2, 4]),
        pages.segment(1, 2, [1], 17),
        pages.segment(1, 1, [2], 64),
        pages.segment(0, 9, [3]),
    ]
    assert check(pages, segments, [0, 9, 10, 43, 133, 150], group_size) == {"stacked"}


@pytest.mark.parametrize("name", ["tq3", "fp8", "bf16"])
def test_few_and_many_and_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long ones, ones without cached pages and ones without new tokens beside short ones."""
    monkeypatch.setattr(stacked, "MOST_TILE_READS", 2000)
    pages = Pages(KVGeometry(1, 2, 128, 64), [name, "fp8"])
    segments = [
        pages.segment(0, 6, [0, 2, 3, 5]),
        pages.segment(1, 1, [2], 33),
        pages.segment(0, 2, [3, 5]),
    ]
    q_indptr = [0, 20, 100, 100, 613, 800, 831]
    taken = {"stacked", "flash"} if name == "bf16" else {"stacked"}
    assert check(pages, segments, q_indptr, 4) == taken


@pytest.mark.parametrize("dim", [128, 256])
def test_alternating_kinds_before_an_open_end(dim: int) -> None:
    """Pages left by earlier turns, some of them compressed; the last run ends in an open page."""
    pages = Pages(KVGeometry(1, 2, dim, 64), ["tq3", "fp8"])
    segments = [pages.segment(kind, 3, [0]) for kind in (1, 0, 1, 0, 1, 0)]
    segments += [pages.segment(1, 4, [0], 21), pages.segment(0, 5, [1])]
    assert check(pages, segments, [0, 700, 763], 4) == {"stacked"}


def test_many_requests_at_once() -> None:
    pages = Pages(KVGeometry(1, 2, 128, 64), ["tq3", "fp8"])
    everyone = list(range(40))
    segments = [pages.segment(0, 15, everyone)]
    segments += [pages.segment(1, 1, [i], 1 + i) for i in everyone]
    q_indptr = [0, *np.cumsum([1 + i % 13 for i in everyone]).tolist()]
    assert check(pages, segments, q_indptr, 4) == {"stacked"}


def test_bits_of_a_request_alone_do_not_depend_on_where_its_pages_lie() -> None:
    """Deterministic mode runs requests one by one."""
    outs = []
    for spare in (0, 7):
        pages = Pages(KVGeometry(1, 2, 128, 64), ["tq3"])
        content = torch.Generator().manual_seed(5)
        pages.segment(0, spare + 1, [0])
        segment = pages.segment(0, 9, [0])
        geometry, format_ = pages.geometry, pages.kinds[0].formats[0]
        k, v = (torch.randn(9, 64, 2, 128, generator=content) for _ in range(2))
        for address, row in zip(segment.addresses, format_.encode(k, v, geometry), strict=True):
            pages.arena[address * 128 : address * 128 + len(row)] = row
        arena = move(pages, [segment])
        plan = plan_extend([segment], [0, 30], pages.kinds, geometry, "cuda")
        q, k, v = (
            torch.randn(30, heads, 128, generator=content).bfloat16().cuda() for heads in (8, 2, 2)
        )
        outs.append(run_extend(plan, q, k, v, arena, 0, 0.1).out)
    assert torch.equal(*outs)
