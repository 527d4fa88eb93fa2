"""Flash attention over expanded tiles gives dense attention (here through torch's CPU kernel)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from kernel_pages import Pages, relative_error

from minima_kernels import KVGeometry, Rotation, Segment, plan_extend
from minima_kernels.cuda import extend
from minima_kernels.cuda.extend import flash_reason, run_flash_extend
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


@pytest.mark.parametrize("tile_keys", [128, 8192])
@pytest.mark.parametrize(
    ("q_indptr", "shared"), [([0, 7], False), ([0, 3, 4, 20], True), ([0, 4, 8, 12], True)]
)
def test_equals_dense_attention(
    q_indptr: Sequence[int], shared: bool, tile_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minima_kernels.attention.extend.TILE_KEYS", tile_keys)
    pages, segments = batch(shared)
    plan = plan_extend(segments, q_indptr, pages.kinds, GEOMETRY, "cpu")
    rotation = Rotation(64)
    num_rows = q_indptr[-1]
    q, k, v = (pages.random(num_rows, heads, 64) for heads in (6, 2, 2))
    routes = RouteCounters()
    result = run_flash_extend(plan, q, k, v, pages.arena, 0, 0.125, rotation, routes)
    assert routes.snapshot() == {Route("prefill", "flash", "dtype float32"): 1}
    # The reference works in the rotated basis, in which the pages are.
    expected = []
    for request, (start, stop) in enumerate(pairwise(q_indptr)):
        rows = slice(start, stop)
        new = rotation.forward(k[rows]), rotation.forward(v[rows])
        out, lse = pages.reference(segments, request, rotation.forward(q[rows]), 0, 0.125, new)
        assert torch.allclose(result.lse[rows].double(), lse, atol=1e-4)
        expected.append(out @ rotation.matrix.double().T)
    assert relative_error(result.out, torch.cat(expected)) < 1e-4


def test_reasons() -> None:
    assert flash_reason(torch.bfloat16, 128) is None
    assert flash_reason(torch.float32, 128) == "dtype float32"
    assert flash_reason(torch.float16, 512) == "head dim 512"
    assert extend.TILE_KEYS % 64 == 0
