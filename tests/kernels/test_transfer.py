"""Moving pages between kinds."""

from __future__ import annotations

import pytest
import torch
from kernel_pages import POISON, Pages

from minima_kernels import BF16, FP8, GRANULE, TQ3, KVGeometry, RouteCounters, transfer
from minima_kernels.arena import gather, scatter

GEOMETRY = KVGeometry(num_layers=5, num_kv_heads=3, head_dim=64, page_size=16)


def make_pages(*formats: str) -> Pages:
    pages = Pages(GEOMETRY, formats)
    pages.arena = torch.full((1 << 21,), POISON, dtype=torch.uint8)
    return pages


def page_bytes(pages: Pages, address: int, kind_index: int) -> torch.Tensor:
    size = pages.kinds[kind_index].bytes_per_page(GEOMETRY)
    return pages.arena[address * GRANULE : address * GRANULE + size]


@pytest.mark.parametrize("scratch_values", [1, 20_000, 1 << 21])
@pytest.mark.parametrize(
    ("source", "destination"),
    [("fp8", "tq3"), ("tq3", "fp8"), ("bf16", "tq(16,4)"), ("f32", "f16")],
)
def test_retier_is_decode_then_encode(
    source: str, destination: str, scratch_values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "_MAX_SCRATCH_VALUES", scratch_values)
    pages = make_pages(source, destination)
    old = [pages.page(0) for _ in range(4)]
    new = [pages.page(1) for _ in range(4)]
    before = pages.arena.clone()
    routes = RouteCounters()
    order = [2, 0, 3, 1]
    transfer.retier(
        pages.arena,
        [old[i] for i in order],
        pages.kinds[0],
        torch.tensor([new[i] for i in order]),
        pages.kinds[1],
        GEOMETRY,
        routes=routes,
    )
    touched = torch.zeros(len(before), dtype=torch.bool)
    for address, target in zip(old, new, strict=True):
        touched[target * GRANULE :][: pages.kinds[1].bytes_per_page(GEOMETRY)] = True
        for layer in range(GEOMETRY.num_layers):
            k, v = transfer.read_page(pages.arena, address, pages.kinds[0], layer, GEOMETRY)
            expected = pages.kinds[1].formats[layer].encode(k[None], v[None], GEOMETRY)
            start = target * GRANULE + pages.kinds[1].layer_offset(layer, GEOMETRY)
            assert torch.equal(pages.arena[start : start + expected.shape[1]], expected[0])
    assert torch.equal(pages.arena[~touched], before[~touched])
    assert sum(routes.snapshot().values()) == 1


def test_retier_copies_layers_of_one_format() -> None:
    pages = make_pages("fp8", "tq3")
    pages.kinds[1] = pages.kinds[1].with_layers(FP8, [0, 3, 4])
    old, new = pages.page(0), pages.page(1)
    transfer.retier(pages.arena, [old], pages.kinds[0], [new], pages.kinds[1], GEOMETRY)
    for layer in range(GEOMETRY.num_layers):
        source = transfer.read_page(pages.arena, old, pages.kinds[0], layer, GEOMETRY)
        target = transfer.read_page(pages.arena, new, pages.kinds[1], layer, GEOMETRY)
        assert torch.equal(source[0], target[0]) == (layer in (0, 3, 4))
        assert torch.equal(source[1], target[1]) == (layer in (0, 3, 4))
        assert float((source[1] - target[1]).norm() / source[1].norm()) < 0.2


def test_retier_of_nothing_is_nothing() -> None:
    pages = make_pages("fp8", "tq3")
    before = pages.arena.clone()
    transfer.retier(pages.arena, [], pages.kinds[0], [], pages.kinds[1], GEOMETRY)
    assert torch.equal(pages.arena, before)


def test_retier_refuses_unequal_counts_and_layers() -> None:
    pages = make_pages("fp8", "tq3")
    with pytest.raises(ValueError, match="2 source pages"):
        transfer.retier(pages.arena, [1, 9], pages.kinds[0], [30], pages.kinds[1], GEOMETRY)
    other = type(pages.kinds[0]).uniform("short", TQ3, 4)
    with pytest.raises(ValueError, match="layer counts"):
        transfer.retier(pages.arena, [1], pages.kinds[0], [30], other, GEOMETRY)


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 16])
@pytest.mark.parametrize("source", ["tq3", "fp8", "bf16"])
def test_copy_on_write_takes_the_first_tokens(source: str, num_tokens: int) -> None:
    pages = make_pages(source, "fp8")
    old = pages.page(0)
    before = pages.arena.clone()
    new = pages.page(1, 0)
    transfer.copy_tokens(
        pages.arena, old, pages.kinds[0], new, pages.kinds[1], num_tokens, GEOMETRY
    )
    span = slice(new * GRANULE, new * GRANULE + pages.kinds[1].bytes_per_page(GEOMETRY))
    outside = torch.ones(len(before), dtype=torch.bool)
    outside[span] = False
    assert torch.equal(pages.arena[outside], before[outside])
    for layer in range(GEOMETRY.num_layers):
        exact = transfer.read_page(pages.arena, old, pages.kinds[0], layer, GEOMETRY)
        copied = transfer.read_page(pages.arena, new, pages.kinds[1], layer, GEOMETRY)
        for x, y in zip(exact, copied, strict=True):
            kept, copy = x[:num_tokens], y[:num_tokens]
            if source == "fp8":
                assert torch.equal(kept, copy)
            elif num_tokens:
                assert float((kept - copy).norm() / kept.norm()) < 0.04
    if source == "fp8":
        assert torch.equal(page_bytes(pages, old, 0), page_bytes(pages, new, 1))


def test_copy_on_write_needs_an_appendable_page() -> None:
    pages = make_pages("fp8", "tq3")
    with pytest.raises(ValueError, match="cannot be appended"):
        transfer.copy_tokens(pages.arena, 1, pages.kinds[0], 99, pages.kinds[1], 3, GEOMETRY)
    with pytest.raises(ValueError, match="17 tokens"):
        transfer.copy_tokens(pages.arena, 1, pages.kinds[0], 99, pages.kinds[0], 17, GEOMETRY)


def test_gather_reaches_the_last_byte_and_scatter_undoes_it() -> None:
    arena = torch.arange(8 * GRANULE, dtype=torch.int64).to(torch.uint8)
    addresses = torch.tensor([6, 0, 3])
    data = gather(arena, addresses, 16, 2 * GRANULE - 16)
    for row, address in zip(data, addresses.tolist(), strict=True):
        start = address * GRANULE + 16
        assert torch.equal(row, arena[start : (address + 2) * GRANULE])
    target = torch.zeros_like(arena)
    scatter(target, addresses, 16, data)
    assert torch.equal(gather(target, addresses, 16, 2 * GRANULE - 16), data)
    assert int(target.count_nonzero()) == int(data.count_nonzero())


def test_gather_keeps_every_bit_pattern() -> None:
    arena = torch.randint(0, 256, (64 * GRANULE,), dtype=torch.uint8)
    arena[: 8 * GRANULE] = POISON
    assert torch.equal(gather(arena, torch.arange(64), 0, GRANULE).flatten(), arena)


def test_raw_formats_are_byte_exact_through_append_and_retier() -> None:
    pages = make_pages("bf16", "bf16")
    old, new = pages.page(0), pages.page(1)
    transfer.retier(pages.arena, [old], pages.kinds[0], [new], pages.kinds[1], GEOMETRY)
    assert torch.equal(page_bytes(pages, old, 0), page_bytes(pages, new, 1))
    assert pages.kinds[0].formats[0] == BF16
