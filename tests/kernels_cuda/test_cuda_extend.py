"""Flash attention over expanded tiles gives dense attention (here through torch's CPU kernel)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from kernel_pages import Pages, relative_error

from minima_kernels import ExtendPlan, KVGeometry, Rotation, Segment, plan_extend
from minima_kernels.cuda import extend, stacked
from minima_kernels.cuda.extend import flash_reason, run_cuda_extend
from minima_kernels.routes import Route, RouteCounters

GEOMETRY = KVGeometry(1, 2, 64, 64)


def batch(shared: bool) -> tuple[Pages, list[Segment]]:
    pages = Pages(GEOMETRY, ["tq3", "fp8", "bf16"])
    if shared:
        return pages, [
            pages.segment(0, 5, [0, 1, 2]),
            pages.segment(1, 1, [0, 2]),
            pages.segment(2, 2, [1], 11),
        ]
    return pages, [pages.segment(0, 5, [0]), pages.segment(1, 2, [0], 30)]


def check(plan: ExtendPlan, pages: Pages, segments: Sequence[Segment]) -> set[Route]:
    """Outputs and log-sum-exps of random rows; returns the routes taken."""
    rotation = Rotation(64)
    num_rows = plan.q_indptr[-1]
    q, k, v = (pages.random(num_rows, heads, 64) for heads in (6, 2, 2))
    routes = RouteCounters()
    result = run_cuda_extend(plan, q, k, v, pages.arena, 0, 0.125, rotation, routes)
    # The reference works in the rotated basis, in which the pages are.
    expected = []
    for request, (start, stop) in enumerate(pairwise(plan.q_indptr)):
        rows = slice(start, stop)
        new = rotation.forward(k[rows]), rotation.forward(v[rows])
        out, lse = pages.reference(segments, request, rotation.forward(q[rows]), 0, 0.125, new)
        assert torch.allclose(result.lse[rows].double(), lse, atol=1e-4)
        expected.append(out @ rotation.matrix.double().T)
    assert relative_error(result.out, torch.cat(expected)) < 1e-4
    return set(routes.snapshot())


@pytest.mark.parametrize("tile_keys", [128, 8192])
@pytest.mark.parametrize(
    ("q_indptr", "shared"), [([0, 7], False), ([0, 3, 4, 20], True), ([0, 4, 8, 12], True)]
)
def test_equals_dense_attention(
    q_indptr: Sequence[int], shared: bool, tile_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minima_kernels.cuda.extend.TILE_KEYS", tile_keys)
    pages, segments = batch(shared)
    plan = plan_extend(segments, q_indptr, pages.kinds, GEOMETRY, "cpu")
    assert check(plan, pages, segments) == {
        Route("prefill", "flash", "dtype float32"), Route("extend", "flash", "")
    }  # fmt: skip


@pytest.fixture
def stacked_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decode route serves, here that of the CPU; requests with more than one tile of columns
    over BF16 pages do without."""
    monkeypatch.setattr(stacked, "stacked_reason", lambda plan, group_size: None)
    monkeypatch.setattr(stacked, "MOST_TILE_READS", 4)


@pytest.mark.usefixtures("stacked_rows")
@pytest.mark.parametrize(
    ("q_indptr", "taken"),
    [
        ([0, 3, 4, 20], {"stacked"}),
        ([0, 4, 12, 15], {"stacked", "flash"}),
        ([0, 0, 9, 9], {"flash"}),
        ([0, 8, 8, 9], {"stacked"}),
        ([0, 0, 2, 2], {"stacked"}),
    ],
)
def test_pages_are_read_by_the_decode_kernels(q_indptr: Sequence[int], taken: set[str]) -> None:
    pages, segments = batch(True)  # of three requests the second has two BF16 pages
    plan = plan_extend(segments, q_indptr, pages.kinds, GEOMETRY, "cpu")
    routes = check(plan, pages, segments)
    assert {route.route for route in routes if route.operation == "extend"} == taken
    assert {route.operation for route in routes} == {"extend", "prefill"}


@pytest.mark.usefixtures("stacked_rows")
def test_who_is_read_by_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that every tile would read again count by what they cost."""
    pages = Pages(GEOMETRY, ["tq3", "bf16"])
    segments = [pages.segment(0, 9, [0, 2]), pages.segment(1, 3, [2]), pages.segment(1, 2, [3])]
    plan = partial(plan_extend, segments, [0, 5, 8, 13, 15], pages.kinds, GEOMETRY, "cpu")
    # Five rows of three heads are three tiles: 3 pages x 3 tiles x 2 KV heads; 2 x 1 x 2.
    for limit, expected in ((18, {0, 2, 3}), (17, {0, 3}), (3, {0})):
        monkeypatch.setattr(stacked, "MOST_TILE_READS", limit)
        work = plan().cuda(6)
        assert work.stacked is not None
        assert _requests(plan(), torch.from_numpy(work.stacked.segments.readers)) == expected
        readers = {i for run in work.runs for i in _requests(plan(), run.rows)}
        assert readers == {0, 2, 3} - expected


def _requests(plan: ExtendPlan, rows: torch.Tensor | slice) -> set[int]:
    indices = torch.arange(plan.q_indptr[-1])[rows]
    return set((np.searchsorted(plan.q_indptr, indices.numpy(), side="right") - 1).tolist())


@pytest.mark.usefixtures("stacked_rows")
def test_bits_do_not_depend_on_how_the_tree_cuts() -> None:
    pages = Pages(GEOMETRY, ["tq3", "fp8"])
    whole = [pages.segment(0, 6, [0]), pages.segment(1, 1, [0], 9)]
    addresses = np.asarray(whole[0].addresses)
    parts = [Segment(part, 0, 64, [0]) for part in np.split(addresses, [1, 4])]
    plans = [
        plan_extend(segments, [0, 5], pages.kinds, GEOMETRY, "cpu").cuda(6).stacked
        for segments in (whole, [*parts, whole[1]])
    ]
    first, second = (plan.segments for plan in plans if plan is not None)
    for ours, theirs in zip(first, second, strict=True):
        assert np.array_equal(ours, theirs)


def test_reasons() -> None:
    assert flash_reason(torch.bfloat16, 128) is None
    assert flash_reason(torch.float32, 128) == "dtype float32"
    assert flash_reason(torch.float16, 512) == "head dim 512"
    assert extend.TILE_KEYS % 64 == 0
