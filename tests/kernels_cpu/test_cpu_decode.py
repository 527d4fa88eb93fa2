"""Native decode attention against dense float64 attention over the decoded values."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_pages import Pages, relative_error
from random_trees import draw_readers

from minima_kernels import KVGeometry, RouteCounters, Segment, plan_decode, run_decode
from minima_kernels.cpu.route import torch_only

# Queries have 15 bits and weights 15 bits per tile; centroids are exact.
TOLERANCE = 2e-4

MIXTURE = ["fp8", "tq3", "bf16", "tq(16,4)", "tq(5,7)", "f32", "f16", "tq(2,12,uncentred)"]


def check(pages: Pages, segments: list[Segment], num_rows: int, group_size: int = 3) -> None:
    """Outputs and LSE of all layers against the reference, page masses against the torch route."""
    geometry = pages.geometry
    heads, scale = geometry.num_kv_heads, geometry.head_dim**-0.5
    plan = plan_decode(segments, num_rows, pages.kinds, geometry, "cpu")
    routes = RouteCounters()
    for layer in range(geometry.num_layers):
        q = pages.random(num_rows, heads * group_size, geometry.head_dim) * 2
        result = run_decode(plan, q, pages.arena, layer, scale, page_mass=True, routes=routes)
        assert [route.route for route in routes.snapshot()] == ["native"]
        for row in range(num_rows):
            out, lse = result.out[row : row + 1], result.lse[row : row + 1]
            if not any(row in segment.readers for segment in segments):
                assert not out.any()
                assert bool((lse == -torch.inf).all())
                continue
            expected = pages.reference(segments, row, q[row : row + 1], layer, scale)
            assert relative_error(out, expected[0]) < TOLERANCE
            assert torch.allclose(lse.double(), expected[1], atol=1e-3)
        with torch_only():
            expected_mass = run_decode(plan, q, pages.arena, layer, scale, page_mass=True).page_mass
        assert result.page_mass is not None and expected_mass is not None
        assert torch.allclose(result.page_mass, expected_mass, atol=3e-4)


def mixed_batch(pages: Pages, kinds: int) -> list[Segment]:
    """A shared prefix in every kind, a nested branch, own pages, an open page, one idle row."""
    size = pages.geometry.page_size
    segments = [pages.segment(kind, 2, [0, 1, 2, 3]) for kind in range(kinds)]
    segments.append(pages.segment(kinds - 1, 3, [1, 3]))
    segments += [pages.segment(0, 1 + row, [row]) for row in (0, 3)]
    segments += [pages.segment(0, 1, [row], last_page_len=1 + 5 * row % size) for row in range(3)]
    return segments


@pytest.mark.parametrize("page_size", [16, 64, 128])
def test_mixed_formats(level: str, page_size: int) -> None:
    pages = Pages(KVGeometry(2, 2, 64, page_size), MIXTURE)
    check(pages, mixed_batch(pages, len(MIXTURE)), num_rows=5)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("format_", ["fp8", "bf16", "f16", "f32", "tq3", "tq(16,4)", "tq(2,5)"])
def test_formats_and_head_dims(level: str, format_: str, head_dim: int) -> None:
    pages = Pages(KVGeometry(1, 2, head_dim, 16), [format_])
    check(pages, [pages.segment(0, 5, [0, 1]), pages.segment(0, 3, [1])], 2, group_size=2)


@pytest.mark.parametrize("levels", range(2, 17))
def test_level_counts(level: str, levels: int) -> None:
    pages = Pages(KVGeometry(1, 1, 80, 16), [f"tq({levels},{18 - levels})"])
    check(pages, [pages.segment(0, 3, [0])], num_rows=1, group_size=1)


@pytest.mark.parametrize("group_size", range(1, 9))
@pytest.mark.parametrize("page_size", [16, 64])
def test_group_sizes(level: str, group_size: int, page_size: int) -> None:
    pages = Pages(KVGeometry(1, 2, 64, page_size), ["fp8", "tq3"])
    check(pages, mixed_batch(pages, 2), num_rows=5, group_size=group_size)


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 63, 64, 65, 100, 127, 128])
def test_open_pages(level: str, num_tokens: int) -> None:
    pages = Pages(KVGeometry(1, 1, 128, 128), ["fp8", "bf16", "f32"])
    segments = [pages.segment(kind, 2, [kind], last_page_len=num_tokens) for kind in range(3)]
    check(pages, segments, num_rows=3, group_size=4)


def test_more_readers_than_a_block_of_rows(level: str) -> None:
    pages = Pages(KVGeometry(1, 1, 64, 16), ["tq3", "fp8"])
    readers = random.Random(0).sample(range(80), 70)
    segments = [pages.segment(0, 9, readers), pages.segment(1, 2, readers[:33], 7)]
    check(pages, segments, num_rows=80, group_size=8)


def test_layers_of_unlike_formats(level: str) -> None:
    pages = Pages(KVGeometry(4, 2, 64, 16), ["fp8", "tq3"])
    fp8 = pages.kinds[0].formats[0]
    pages.kinds[1] = pages.kinds[1].with_layers(fp8, [0, -1])
    check(pages, mixed_batch(pages, 2), num_rows=4)


def test_peaked_attention(level: str) -> None:
    """One token takes nearly all the weight: the others' weights are far below its step."""
    pages = Pages(KVGeometry(1, 1, 64, 16), ["tq(16,16)"])
    segment = pages.segment(0, 8, [0])
    plan = plan_decode([segment], 1, pages.kinds, pages.geometry, "cpu")
    q = pages.random(1, 4, 64) * 40
    result = run_decode(plan, q, pages.arena, 0, 0.125)
    expected, lse = pages.reference([segment], 0, q, 0, 0.125)
    assert relative_error(result.out, expected) < 1e-3
    assert torch.allclose(result.lse.double(), lse, rtol=1e-4)


def test_rows_do_not_depend_on_the_batch_beside_them(level: str) -> None:
    pages = Pages(KVGeometry(1, 2, 64, 64), ["tq3"])
    shared, own = pages.segment(0, 3, [0, 1, 2]), pages.segment(0, 2, [1])
    q = pages.random(3, 6, 64)
    plan = plan_decode([shared, own], 3, pages.kinds, pages.geometry, "cpu")
    together = run_decode(plan, q, pages.arena, 0, 0.125).out[1]
    alone = [segment_for(shared, [0]), segment_for(own, [0])]
    plan = plan_decode(alone, 1, pages.kinds, pages.geometry, "cpu")
    assert torch.equal(run_decode(plan, q[1:2], pages.arena, 0, 0.125).out[0], together)


def segment_for(segment: Segment, readers: list[int]) -> Segment:
    return Segment(segment.addresses, segment.kind_index, segment.last_page_len, readers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_queries_of_other_dtypes(dtype: torch.dtype) -> None:
    pages = Pages(KVGeometry(1, 2, 64, 16), ["tq3"])
    segment = pages.segment(0, 4, [0])
    plan = plan_decode([segment], 1, pages.kinds, pages.geometry, "cpu")
    q = pages.random(1, 4, 64).to(dtype)
    result = run_decode(plan, q, pages.arena, 0, 0.125)
    assert result.out.dtype == dtype
    expected, _ = pages.reference([segment], 0, q.float(), 0, 0.125)
    assert relative_error(result.out.float(), expected) < 1e-2


@settings(
    max_examples=20,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_random_trees(data: st.DataObject) -> None:
    """Random nested sharing, pages in random places, ragged open pages."""
    page_size = data.draw(st.sampled_from([16, 48]))
    num_rows = data.draw(st.integers(1, 12))
    pages = Pages(KVGeometry(1, 1, 64, page_size), ["fp8", "tq3", "tq(6,3)"], seed=num_rows)
    segments: list[Segment] = []
    for readers in draw_readers(data, range(num_rows)):
        kind, num_pages = data.draw(st.integers(0, 2)), data.draw(st.integers(1, 9))
        segment = pages.segment(kind, num_pages, readers)
        order = data.draw(st.permutations(list(segment.addresses)))
        segments.append(Segment(order, segment.kind_index, segment.last_page_len, readers))
    for row in range(num_rows):
        if data.draw(st.booleans()):
            length = data.draw(st.integers(1, page_size))
            segments.append(pages.segment(0, 1, [row], last_page_len=length))
    check(pages, segments, num_rows, group_size=data.draw(st.sampled_from([1, 2, 5])))
