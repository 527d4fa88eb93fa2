"""Extend attention: cached pages and new tokens against dense causal attention."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_pages import Pages, relative_error
from random_trees import draw_readers

from minima_kernels import KVGeometry, RouteCounters, Segment, plan_extend, run_extend

MIXTURE = ["fp8", "tq3", "bf16", "tq(5,7)", "f32"]
TOLERANCE = 1e-5


def check(
    pages: Pages,
    segments: list[Segment],
    lengths: list[int],
    group_size: int = 3,
    scratch_bytes: int = 64 << 20,
) -> None:
    geometry = pages.geometry
    heads, dim = geometry.num_kv_heads, geometry.head_dim
    scale = dim**-0.5
    indptr = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    plan = plan_extend(segments, indptr, pages.kinds, geometry, "cpu", scratch_bytes)
    for layer in range(geometry.num_layers):
        q = pages.random(indptr[-1], heads * group_size, dim) * 2
        k, v = pages.random(indptr[-1], heads, dim), pages.random(indptr[-1], heads, dim)
        result = run_extend(plan, q, k, v, pages.arena, layer, scale)
        assert result.page_mass is None
        for request, (start, stop) in enumerate(pairwise(indptr)):
            if start == stop:
                continue
            rows = slice(start, stop)
            new = k[rows], v[rows]
            out, lse = pages.reference(segments, request, q[rows], layer, scale, new)
            assert relative_error(result.out[rows], out) < TOLERANCE
            assert torch.allclose(result.lse[rows].double(), lse, atol=1e-4)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_cached_prefix_of_any_mixture(page_size: int) -> None:
    pages = Pages(KVGeometry(2, 2, 64, page_size), MIXTURE)
    segments = [pages.segment(kind, 3, [0, 1, 2]) for kind in range(len(MIXTURE))]
    segments.append(pages.segment(1, 2, [0, 2]))
    segments.append(pages.segment(0, 2, [1], last_page_len=max(1, page_size // 2)))
    segments.append(pages.segment(0, 1, [2], last_page_len=1))
    check(pages, segments, [7, 130, 1, 0, 33])


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize("group_size", [1, 8])
def test_head_shapes(head_dim: int, group_size: int) -> None:
    pages = Pages(KVGeometry(1, 2, head_dim, 16), ["tq3", "fp8"])
    segments = [pages.segment(0, 2, [0]), pages.segment(1, 1, [0], 5)]
    check(pages, segments, [20, 3], group_size)


@pytest.mark.parametrize("length", [1, 127, 128, 129, 700])
def test_cold_prefill_is_causal_attention(length: int) -> None:
    pages = Pages(KVGeometry(1, 1, 64, 16), ["fp8"])
    check(pages, [], [length], group_size=2)


def test_prefix_longer_than_a_tile_and_bounded_scratch() -> None:
    pages = Pages(KVGeometry(1, 1, 64, 16), ["tq3", "fp8"])
    segments = [pages.segment(0, 70, [0, 1]), pages.segment(1, 37, [0], 9)]
    for scratch_bytes in (1, 100_000, 64 << 20):
        check(pages, segments, [40, 3], group_size=2, scratch_bytes=scratch_bytes)


@settings(max_examples=20)
@given(data=st.data())
def test_random_trees(data: st.DataObject) -> None:
    page_size = data.draw(st.sampled_from([1, 16]))
    lengths = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=5))
    requests = list(range(len(lengths)))
    pages = Pages(KVGeometry(1, 1, 64, page_size), ["fp8", "tq3", "f16"], seed=len(lengths))
    segments = [
        pages.segment(data.draw(st.integers(0, 2)), data.draw(st.integers(1, 5)), readers)
        for readers in draw_readers(data, requests)
    ]
    for request in requests:
        if data.draw(st.booleans()):
            length = data.draw(st.integers(1, page_size))
            segments.append(pages.segment(0, 1, [request], length))
    check(pages, segments, lengths, group_size=2)


def test_one_request_gets_the_same_bits_however_its_prefix_is_cut() -> None:
    pages = Pages(KVGeometry(1, 2, 64, 16), ["tq3", "fp8"])
    stale, recent = pages.segment(0, 75, [0]), pages.segment(1, 3, [0])
    q, k, v = pages.random(64, 6, 64), pages.random(64, 2, 64), pages.random(64, 2, 64)

    def run(segments: list[Segment]) -> torch.Tensor:
        plan = plan_extend(segments, [0, 64], pages.kinds, pages.geometry, "cpu")
        return run_extend(plan, q, k, v, pages.arena, 0, 0.125).out

    whole = run([stale, recent])
    for cuts in ([0, 1, 75], [0, 30, 31, 64, 75]):
        parts = [Segment(stale.addresses[a:b], 0, 16, [0]) for a, b in pairwise(cuts)]
        parts += [Segment(recent.addresses[a:b], 1, 16, [0]) for a, b in ((0, 2), (2, 3))]
        assert torch.equal(run(parts), whole)


def test_warm_pages_of_exact_values_agree_with_a_cold_prefill() -> None:
    """float32 pages that hold a prompt's first tokens stand for those tokens."""
    geometry = KVGeometry(1, 2, 64, 16)
    pages = Pages(geometry, ["f32"])
    q, k, v = pages.random(200, 6, 64), pages.random(200, 2, 64), pages.random(200, 2, 64)
    cold_plan = plan_extend([], [0, 200], pages.kinds, geometry, "cpu")
    cold = run_extend(cold_plan, q, k, v, pages.arena, 0, 0.125)
    segment = pages.segment(0, 7, [0], last_page_len=5)
    kind = pages.kinds[0]
    num_cached = 6 * 16 + 5
    for token in range(num_cached):
        page, slot = divmod(token, 16)
        start = torch.tensor([segment.addresses[page] * 128 + kind.layer_offset(0, geometry)])
        rows = k[token : token + 1], v[token : token + 1]
        kind.formats[0].append(pages.arena, start, torch.tensor([slot]), *rows, geometry)
    warm_plan = plan_extend([segment], [0, 200 - num_cached], pages.kinds, geometry, "cpu")
    rest = slice(num_cached, None)
    warm = run_extend(warm_plan, q[rest], k[rest], v[rest], pages.arena, 0, 0.125)
    assert torch.allclose(warm.out, cold.out[rest], atol=1e-5)
    assert torch.allclose(warm.lse, cold.lse[rest], atol=1e-5)


def test_half_precision_comes_back_as_such() -> None:
    pages = Pages(KVGeometry(1, 1, 64, 16), ["fp8"])
    plan = plan_extend([], [0, 5], pages.kinds, pages.geometry, "cpu")
    q, k = pages.random(5, 2, 64).bfloat16(), pages.random(5, 1, 64).bfloat16()
    routes = RouteCounters()
    half = run_extend(plan, q, k, k, pages.arena, 0, 0.125, routes=routes)
    full = run_extend(plan, q.float(), k.float(), k.float(), pages.arena, 0, 0.125)
    assert half.out.dtype == torch.bfloat16
    assert torch.equal(half.out, full.out.bfloat16())
    assert {route.operation for route in routes.snapshot()} == {"extend"}


def test_no_new_tokens() -> None:
    pages = Pages(KVGeometry(1, 1, 64, 16), ["fp8"])
    plan = plan_extend([pages.segment(0, 1, [0])], [0, 0], pages.kinds, pages.geometry, "cpu")
    none = torch.empty(0, 1, 64)
    result = run_extend(plan, torch.empty(0, 2, 64), none, none, pages.arena, 0, 1.0)
    assert result.out.shape == (0, 2, 64) and result.lse.shape == (0, 2)


@pytest.mark.parametrize("indptr", [[], [1, 2], [0, 3, 2]])
def test_bad_indptr_is_refused(indptr: list[int]) -> None:
    pages = Pages(KVGeometry(1, 1, 64, 16), ["fp8"])
    with pytest.raises(ValueError, match="q_indptr"):
        plan_extend([], indptr, pages.kinds, pages.geometry, "cpu")


def test_tensors_that_do_not_fit_are_refused() -> None:
    pages = Pages(KVGeometry(1, 2, 64, 16), ["fp8"])
    plan = plan_extend([], [0, 3], pages.kinds, pages.geometry, "cpu")
    good_q, good_k = torch.zeros(3, 4, 64), torch.zeros(3, 2, 64)
    for q, k in ((good_q[:2], good_k), (good_q[:, :3], good_k), (good_q, good_k[:, :1])):
        with pytest.raises(ValueError, match="do not fit"):
            run_extend(plan, q, k, k, pages.arena, 0, 1.0)
