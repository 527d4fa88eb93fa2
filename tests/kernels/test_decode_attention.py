"""Decode attention over mixed pages against dense attention over the decoded values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_pages import Pages, relative_error
from random_trees import draw_readers

from minima_kernels import KVGeometry, RouteCounters, Segment, plan_decode, run_decode
from minima_kernels.attention.reference import cached_tokens

MIXTURE = ["fp8", "tq3", "bf16", "tq(16,4)", "tq(5,7)", "f32", "f16", "tq(2,12,uncentred)"]
TOLERANCE = 1e-5


def check(
    pages: Pages,
    segments: list[Segment],
    num_rows: int,
    group_size: int = 3,
    scratch_bytes: int = 64 << 20,
) -> None:
    """Outputs, LSE and page masses of all layers against the reference."""
    geometry = pages.geometry
    heads, scale = geometry.num_kv_heads, geometry.head_dim**-0.5
    plan = plan_decode(segments, num_rows, pages.kinds, geometry, "cpu", scratch_bytes)
    entry_rows = plan.page_entries.rows
    for layer in range(geometry.num_layers):
        q = pages.random(num_rows, heads * group_size, geometry.head_dim) * 2
        result = run_decode(plan, q, pages.arena, layer, scale, page_mass=True)
        assert result.page_mass is not None
        assert result.page_mass.shape == (len(entry_rows), heads * group_size)
        assert result.out.dtype == q.dtype and result.lse.dtype == torch.float32
        for row in range(num_rows):
            out, lse = result.out[row : row + 1], result.lse[row : row + 1]
            if not any(row in segment.readers for segment in segments):
                assert not out.any()
                assert bool((lse == -torch.inf).all())
                assert row not in entry_rows
                continue
            expected = pages.reference(segments, row, q[row : row + 1], layer, scale)
            assert relative_error(out, expected[0]) < TOLERANCE
            assert torch.allclose(lse.double(), expected[1], atol=1e-4)
            check_mass(pages, segments, plan.page_entries, result.page_mass, row, q, layer)


def check_mass(pages, segments, entries, page_mass, row, q, layer) -> None:
    """A row's page masses are the sums of its dense softmax over each page."""
    geometry = pages.geometry
    k, _ = cached_tokens(segments, row, pages.kinds, geometry, pages.arena, layer)
    k = k.double().repeat_interleave(q.shape[1] // geometry.num_kv_heads, dim=1)
    scores = torch.einsum("hd,thd->th", q[row].double(), k) * geometry.head_dim**-0.5
    weights = torch.softmax(scores, dim=0)
    expected = {}
    first = 0
    for segment in segments:
        if row not in segment.readers:
            continue
        for index, address in enumerate(segment.addresses):
            is_last = index == len(segment.addresses) - 1
            count = segment.last_page_len if is_last else geometry.page_size
            expected[int(address)] = weights[first : first + count].sum(0)
            first += count
    mine = entries.rows == row
    assert sorted(entries.addresses[mine].tolist()) == sorted(expected)
    for address, mass in zip(entries.addresses[mine].tolist(), page_mass[mine], strict=True):
        assert torch.allclose(mass.double(), expected[address], atol=1e-5)
    assert torch.allclose(page_mass[mine].sum(0), torch.ones(q.shape[1]), atol=1e-5)


def chat_batch(pages: Pages, kinds: int) -> list[Segment]:
    """A shared prefix in every kind, a nested branch, own pages, open pages, one idle row."""
    size = pages.geometry.page_size
    segments = [pages.segment(kind, 2, [0, 1, 2, 3]) for kind in range(kinds)]
    segments.append(pages.segment(kinds - 1, 3, [1, 3]))
    segments += [pages.segment(0, 1 + row, [row]) for row in (0, 3)]
    open_kind = 0
    for row in range(3):
        segments.append(pages.segment(open_kind, 1, [row], last_page_len=1 + row % size))
    return segments


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_any_mixture_of_formats(page_size: int) -> None:
    pages = Pages(KVGeometry(2, 2, 64, page_size), MIXTURE)
    check(pages, chat_batch(pages, len(MIXTURE)), num_rows=5)


@pytest.mark.parametrize("format_", MIXTURE)
def test_each_format_alone(format_: str) -> None:
    pages = Pages(KVGeometry(2, 3, 64, 16), [format_])
    check(pages, [pages.segment(0, 4, [0]), pages.segment(0, 3, [1])], num_rows=2)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize("group_size", [1, 4, 8])
def test_head_shapes(head_dim: int, group_size: int) -> None:
    pages = Pages(KVGeometry(1, 2, head_dim, 16), ["fp8", "tq3", "tq(6,11)"])
    check(pages, chat_batch(pages, 3), num_rows=5, group_size=group_size)


def test_layers_of_unlike_formats() -> None:
    pages = Pages(KVGeometry(4, 2, 64, 16), ["fp8", "tq3"])
    fp8, tq3 = pages.kinds[0].formats[0], pages.kinds[1].formats[0]
    pages.kinds[1] = pages.kinds[1].with_layers(fp8, [0, -1])
    assert pages.kinds[1].formats == (fp8, tq3, tq3, fp8)
    check(pages, chat_batch(pages, 2), num_rows=4)


@pytest.mark.parametrize("num_pages", [1, 15, 16, 17, 40])
def test_many_readers_share_chunks(num_pages: int) -> None:
    pages = Pages(KVGeometry(1, 2, 64, 4), ["tq3", "fp8"])
    readers = [4, 0, 9, 1, 8, 2, 7, 3, 6]
    segments = [pages.segment(0, num_pages, readers), pages.segment(1, 2, readers, 3)]
    segments.append(pages.segment(1, 1, [5, 0]))
    check(pages, segments, num_rows=11, group_size=2)


def test_tiles_bounded_by_scratch_change_nothing() -> None:
    pages = Pages(KVGeometry(1, 2, 64, 16), ["fp8", "tq3"])
    segments = [pages.segment(1, 33, list(range(9))), pages.segment(0, 12, [2], 5)]
    check(pages, segments, num_rows=9, scratch_bytes=1)
    check(pages, segments, num_rows=9, scratch_bytes=300_000)


@settings(max_examples=25)
@given(data=st.data())
def test_random_trees(data: st.DataObject) -> None:
    """Random nested sharing: a tree of segments, requests at its nodes, ragged open pages."""
    page_size = data.draw(st.sampled_from([1, 16]))
    num_rows = data.draw(st.integers(1, 12))
    pages = Pages(KVGeometry(1, 1, 64, page_size), ["fp8", "tq3", "f16"], seed=num_rows)
    segments = [
        pages.segment(data.draw(st.integers(0, 2)), data.draw(st.integers(1, 5)), readers)
        for readers in draw_readers(data, range(num_rows))
    ]
    for row in range(num_rows):
        if data.draw(st.booleans()):
            length = data.draw(st.integers(1, page_size))
            segments.append(pages.segment(0, data.draw(st.integers(1, 2)), [row], length))
    check(pages, segments, num_rows, group_size=2)


def test_one_request_gets_the_same_bits_however_its_run_is_cut() -> None:
    pages = Pages(KVGeometry(1, 3, 64, 16), ["tq3", "fp8"])
    whole = pages.segment(0, 20, [0])
    last = pages.segment(1, 2, [0], last_page_len=3)
    q = pages.random(1, 9, 64)

    def run(segments: list[Segment]) -> torch.Tensor:
        plan = plan_decode(segments, 1, pages.kinds, pages.geometry, "cpu")
        return run_decode(plan, q, pages.arena, 0, 0.125).out

    cut = [Segment(whole.addresses[a:b], 0, 16, [0]) for a, b in ((0, 1), (1, 13), (13, 20))]
    assert torch.equal(run([whole, last]), run([*cut, last]))


def test_addresses_and_readers_come_in_any_container() -> None:
    pages = Pages(KVGeometry(1, 1, 64, 16), ["fp8"])
    base = pages.segment(0, 3, [1, 0])
    q = pages.random(2, 2, 64)
    results = []
    for addresses in (base.addresses, torch.tensor(base.addresses), tuple(base.addresses)):
        segment = Segment(addresses, 0, 16, torch.tensor([1, 0]).numpy())
        plan = plan_decode([segment], 2, pages.kinds, pages.geometry, "cpu")
        results.append(run_decode(plan, q, pages.arena, 0, 0.125).out)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_nothing_to_read() -> None:
    pages = Pages(KVGeometry(1, 1, 64, 16), ["fp8"])
    empty = [Segment([], 0, 16, [0]), Segment([3], 0, 16, [])]
    for segments in ([], empty):
        plan = plan_decode(segments, 2, pages.kinds, pages.geometry, "cpu")
        result = run_decode(plan, pages.random(2, 2, 64), pages.arena, 0, 1.0, page_mass=True)
        assert not result.out.any()
        assert bool((result.lse == -torch.inf).all())
        assert result.page_mass is not None and result.page_mass.shape == (0, 2)


def test_queries_of_half_precision_come_back_as_such() -> None:
    pages = Pages(KVGeometry(1, 2, 64, 16), ["tq3"])
    plan = plan_decode([pages.segment(0, 3, [0])], 1, pages.kinds, pages.geometry, "cpu")
    q = pages.random(1, 4, 64)
    exact = run_decode(plan, q.bfloat16().float(), pages.arena, 0, 0.125)
    half = run_decode(plan, q.bfloat16(), pages.arena, 0, 0.125)
    assert half.out.dtype == torch.bfloat16
    assert torch.equal(half.out, exact.out.bfloat16())
    assert torch.equal(half.lse, exact.lse)


def test_every_run_is_counted() -> None:
    pages = Pages(KVGeometry(1, 1, 64, 16), ["fp8"])
    plan = plan_decode([pages.segment(0, 1, [0])], 1, pages.kinds, pages.geometry, "cpu")
    routes = RouteCounters()
    for _ in range(3):
        run_decode(plan, pages.random(1, 1, 64), pages.arena, 0, 1.0, routes=routes)
    assert sum(routes.snapshot().values()) == 3
    assert {route.operation for route in routes.snapshot()} == {"decode"}


@pytest.mark.parametrize(
    "segment",
    [
        Segment([1], 1, 16, [0]),
        Segment([1], 0, 0, [0]),
        Segment([1], 0, 17, [0]),
        Segment([1], 0, 16, [2]),
        Segment([1], 0, 16, [-1]),
    ],
)
def test_segments_out_of_range_are_refused(segment: Segment) -> None:
    pages = Pages(KVGeometry(1, 1, 64, 16), ["fp8"])
    with pytest.raises(ValueError):
        plan_decode([segment], 2, pages.kinds, pages.geometry, "cpu")


@pytest.mark.parametrize("shape", [(2, 4, 64), (1, 3, 64), (1, 4, 32)])
def test_queries_that_do_not_fit_are_refused(shape: tuple[int, int, int]) -> None:
    pages = Pages(KVGeometry(1, 2, 64, 16), ["fp8"])
    plan = plan_decode([pages.segment(0, 1, [0])], 1, pages.kinds, pages.geometry, "cpu")
    with pytest.raises(ValueError, match="do not fit"):
        run_decode(plan, torch.zeros(shape), pages.arena, 0, 1.0)
