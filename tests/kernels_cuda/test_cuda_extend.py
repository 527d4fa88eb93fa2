"""Flash attention over expanded tiles gives dense attention (here through torch's CPU kernel)."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from emulated import Emulation, in_fragment_order, skip_unless_possible
from kernel_pages import Pages, relative_error

from minima_kernels import (
    DecodePlan,
    ExtendPlan,
    KVGeometry,
    Rotation,
    Segment,
    parse_format,
    plan_extend,
)
from minima_kernels.attention import State
from minima_kernels.attention.output import AttentionOutput
from minima_kernels.cuda import extend, stacked, work
from minima_kernels.cuda.extend import attend_new, flash_reason, run_cuda_extend
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


def check(
    plan: ExtendPlan,
    pages: Pages,
    segments: Sequence[Segment],
    *,
    arena: torch.Tensor | None = None,
    layer: int = 0,
    group_size: int = 3,
    limit: float = 1e-4,
) -> set[Route]:
    """Outputs and log-sum-exps of random rows; returns the routes taken."""
    rotation = Rotation(64)
    num_rows, kv_heads = plan.q_indptr[-1], plan.geometry.num_kv_heads
    heads = kv_heads * group_size, kv_heads, kv_heads
    q, k, v = (pages.random(num_rows, count, 64) for count in heads)
    routes = RouteCounters()
    arena = pages.arena if arena is None else arena
    result = run_cuda_extend(plan, q, k, v, arena, layer, 0.125, rotation, routes)
    # The reference works in the rotated basis, in which the pages are.
    expected = []
    for request, (start, stop) in enumerate(pairwise(plan.q_indptr)):
        rows = slice(start, stop)
        new = rotation.forward(k[rows]), rotation.forward(v[rows])
        out, lse = pages.reference(segments, request, rotation.forward(q[rows]), layer, 0.125, new)
        assert torch.allclose(result.lse[rows].double(), lse, atol=limit)
        expected.append(out @ rotation.matrix.double().T)
    assert relative_error(result.out, torch.cat(expected)) < limit
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
        Route("prefill", "flash", "dtype float32"), Route("extend", "flash", "no CUDA device")
    }  # fmt: skip


@pytest.fixture
def stacked_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decode route serves, here that of the CPU; requests with more than one tile of columns
    over BF16 pages do without."""
    monkeypatch.setattr(extend, "stacked_reason", lambda plan, group_size: None)
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
    reasons = {"stacked": "", "flash": stacked.MANY_READS}
    expected = {Route("extend", route, reasons[route]) for route in taken}
    assert {route for route in routes if route.operation == "extend"} == expected
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


@pytest.mark.usefixtures("stacked_rows")
def test_whole_pages_of_a_kind_and_its_readers_are_read_together() -> None:
    """Each segment leaves a partial of every row: runs of alternating kinds, and nodes of requests
    side by side in the tree, must not. An open page must not keep those before it from a cohort."""
    pages = Pages(GEOMETRY, ["tq3", "fp8"])
    segments = [
        pages.segment(kind, 2, readers) for kind in (1, 0, 1, 0) for readers in ([0, 1], [2], [0])
    ]
    segments += [pages.segment(1, 3, [0], 9), pages.segment(1, 1, [1], 5)]
    plan = plan_extend(segments, [0, 2, 5, 9], pages.kinds, GEOMETRY, "cpu")
    work = plan.cuda(6).stacked
    assert work is not None
    found = [
        (one.kind_index, one.readers.tolist(), one.last_page_len, len(one.addresses))
        for one in work.segments.rows()
    ]
    both, first, second, third = [0, 1, 2, 3, 4], [0, 1], [2, 3, 4], [5, 6, 7, 8]
    whole = [(1, both, 4), (1, third, 4), (1, first, 6), (0, both, 4), (0, third, 4), (0, first, 4)]
    assert found == [
        *((kind, rows, 64, count) for kind, rows, count in whole),
        (1, first, 9, 1),
        (1, second, 5, 1),
    ]
    check(plan, pages, segments)


@pytest.mark.usefixtures("stacked_rows")
def test_partials_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four prompts along one path, 11 + 9 + 5 + 3 reads of rows; alone 2 + 4 + 2 + 3."""
    pages = Pages(GEOMETRY, ["tq3"])
    segments = [pages.segment(0, 1 + first, list(range(first, 4))) for first in range(4)]
    plan = partial(plan_extend, segments, [0, 2, 6, 8, 11], pages.kinds, GEOMETRY, "cpu")
    row_bytes = 6 * 64 * 2
    for limit, expected in ((28 * row_bytes, [11, 9, 5, 3]), (28 * row_bytes - 1, [2, 4, 2, 3])):
        monkeypatch.setattr(stacked, "MOST_PARTIAL_BYTES", limit)
        work = plan().cuda(6).stacked
        assert work is not None
        assert work.segments.num_readers.tolist() == expected
        check(plan(), pages, segments)
    assert work.segments.num_pages.tolist() == [1, 3, 6, 10]


def test_the_kernels_of_new_tokens_keep_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """They remember the step that they are planned for, whose memory on the device is large."""
    steps: list[object] = []

    def attend(step: object, *given: Any) -> State:
        steps.append(step)
        return attend_new(*given)

    monkeypatch.setattr(extend, "prefill_reason", lambda *_: None)
    monkeypatch.setattr(extend, "ragged_prefill", lambda *_: SimpleNamespace(attend=attend))
    pages, segments = batch(False)
    plans = [plan_extend(segments, [0, 3], pages.kinds, GEOMETRY, "cpu") for _ in range(2)]
    for plan in plans:
        for _ in range(2):  # layers
            check(plan, pages, segments)
    # One plan of the library for all layers, and another for the next step.
    assert steps[0] is steps[1] and steps[2] is steps[3] and steps[0] is not steps[2]
    gone = [weakref.ref(plan) for plan in plans]
    del plan, plans
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


@pytest.mark.parametrize("group_size", [1, 6, 16])
def test_emulated_kernels(
    group_size: int, stacked_rows: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefix of all and some of few, formats that differ by layer, open pages with few tokens,
    requests without cached pages and without new tokens."""
    skip_unless_possible()
    emulation = Emulation(monkeypatch)
    monkeypatch.setattr(work, "FP8_RULE", work.FP8_RULE._replace(min_stacked=9, min_saved=0))

    def run_decode(plan: DecodePlan, q: torch.Tensor, *run: Any, **named: Any) -> AttentionOutput:
        del named["routes"]
        return plan.cuda(q.shape[1]).run(q, *run, False, **named)

    monkeypatch.setattr(extend, "run_decode", run_decode)
    geometry = KVGeometry(2, 1, 64, 64)
    pages = Pages(geometry, ["tq3", "fp8", "tq3"])
    pages.kinds[2] = pages.kinds[2].with_layers(parse_format("fp8"), [1], "mixed")
    segments = [
        pages.segment(1, 2, [0, 2, 3, 4]),
        pages.segment(2, 3, [0, 2, 4]),
        pages.segment(0, 1, [1]),
        pages.segment(1, 2, [0], 1),
        pages.segment(0, 2, [2, 4]),
        pages.segment(0, 9, [4]),
        pages.segment(1, 1, [4], 33),
    ]
    arena = in_fragment_order(pages, segments)
    plan = plan_extend(segments, [0, 10, 11, 23, 23, 27, 30], pages.kinds, geometry, "cpu")
    for layer in range(2):
        check(
            plan, pages, segments, arena=arena, layer=layer, group_size=group_size, limit=5e-4
        )  # fmt: skip
    kernels = "cohort_decode", "cohort_fp8", "tq_decode", "row_decode", "merge"
    assert set(kernels) <= set(emulation.launched)


def test_reasons() -> None:
    assert flash_reason(torch.bfloat16, 128) is None
    assert flash_reason(torch.float32, 128) == "dtype float32"
    assert flash_reason(torch.float16, 512) == "head dim 512"
    assert extend.TILE_KEYS % 64 == 0
