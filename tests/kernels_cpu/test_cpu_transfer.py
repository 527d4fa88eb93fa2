"""Native encoding against the torch formats, and golden bytes."""

from __future__ import annotations

import pytest
import torch
from kernel_pages import relative_error

from minima_kernels import (
    GRANULE,
    KVGeometry,
    PageKind,
    RouteCounters,
    append_tokens,
    parse_format,
    read_page,
    retier,
)
from minima_kernels.arena import scatter
from minima_kernels.cpu.route import torch_only

FORMATS = ["f32", "bf16", "f16", "fp8", "tq3", "tq(16,4)", "tq(5,7,uncentred)", "tq(2,12)"]
NUM_PAGES = 2


class Conversion:
    """Source pages, and room for the same conversion by both routes, in a poisoned arena."""

    def __init__(self, geometry: KVGeometry, source: str, destination: str) -> None:
        self.geometry = geometry
        layers = geometry.num_layers
        self.source = PageKind.uniform(source, parse_format(source), layers)
        self.destination = PageKind.uniform(destination, parse_format(destination), layers)
        old, new = (kind.granules(geometry) for kind in (self.source, self.destination))
        numbers = torch.arange(NUM_PAGES)
        self.sources = numbers * old
        self.by_native = NUM_PAGES * old + numbers * new
        self.by_torch = self.by_native + NUM_PAGES * new
        size = NUM_PAGES * (old + 2 * new) * GRANULE
        self.arena = torch.full((size,), 0xFF, dtype=torch.uint8)
        generator = torch.Generator().manual_seed(0)
        for layer, format_ in enumerate(self.source.formats):
            shape = NUM_PAGES, geometry.page_size, geometry.num_kv_heads, geometry.head_dim
            k = torch.randn(shape, generator=generator) + torch.randn(shape[3], generator=generator)
            v = torch.randn(shape, generator=generator) * 100
            k[0, 1], v[0, 2], v[1, 3] = 0, 0, v[1, 3] * 1e-4
            offset = self.source.layer_offset(layer, geometry)
            scatter(self.arena, self.sources, offset, format_.encode(k, v, geometry))

    def run(self, routes: RouteCounters) -> None:
        pair = self.source, self.destination
        retier(self.arena, self.sources, pair[0], self.by_native, pair[1], self.geometry,
               routes=routes)  # fmt: skip
        with torch_only():
            retier(self.arena, self.sources, pair[0], self.by_torch, pair[1], self.geometry)

    def shares(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The layers' bytes of all pages, without the padding behind the last layer."""
        geometry = self.geometry
        size = self.destination.granules(geometry) * GRANULE
        last = geometry.num_layers - 1
        used = self.destination.layer_offset(last, geometry)
        used += self.destination.formats[last].layer_bytes(geometry)
        start = int(self.by_native[0]) * GRANULE
        native, by_torch = self.arena[start:].view(2, NUM_PAGES, size)[:, :, :used]
        return native, by_torch


@pytest.mark.parametrize("destination", FORMATS)
@pytest.mark.parametrize("source", FORMATS)
def test_retier_gives_the_bytes_of_torch(level: str, source: str, destination: str) -> None:
    conversion = Conversion(KVGeometry(2, 2, 80, 16), source, destination)
    routes = RouteCounters()
    conversion.run(routes)
    assert [route.route for route in routes.snapshot()] == ["native"]
    native, by_torch = conversion.shares()
    # Sums of another order may move a value across a boundary, or a scale by its last bit; a sum
    # in float32 of a product in float32 moves the last bits of what was a sum of TQ values.
    if source == destination or not (source.startswith("tq") and destination == "f32"):
        assert (native != by_torch).float().mean() < 0.003
    for page in range(NUM_PAGES):
        for layer in range(2):
            expected = read_page(
                conversion.arena, int(conversion.by_torch[page]), conversion.destination, layer,
                conversion.geometry,
            )  # fmt: skip
            actual = read_page(
                conversion.arena, int(conversion.by_native[page]), conversion.destination, layer,
                conversion.geometry,
            )  # fmt: skip
            for mine, theirs in zip(actual, expected, strict=True):
                assert relative_error(mine, theirs) < 0.01


def test_layers_of_one_format_are_copied(level: str) -> None:
    conversion = Conversion(KVGeometry(3, 1, 64, 16), "fp8", "tq3")
    fp8 = conversion.source.formats[0]
    kind = conversion.destination.with_layers(fp8, [1])
    geometry = conversion.geometry
    arena = torch.cat((conversion.arena, conversion.arena))
    target = conversion.by_native[:1]
    retier(arena, conversion.sources[:1], conversion.source, target, kind, geometry)
    size = fp8.layer_bytes(geometry)
    old = conversion.source.layer_offset(1, geometry)
    new = int(target[0]) * GRANULE + kind.layer_offset(1, geometry)
    assert torch.equal(arena[old : old + size], arena[new : new + size])


@pytest.mark.parametrize("format_", ["fp8", "bf16", "f16", "f32"])
@pytest.mark.parametrize("num_tokens", [1, 5, 200])
def test_append_gives_the_bytes_of_torch(level: str, format_: str, num_tokens: int) -> None:
    geometry = KVGeometry(2, 3, 80, 16)
    kind = PageKind.uniform("open", parse_format(format_), 2)
    size = kind.granules(geometry) * GRANULE
    native = torch.full((20 * size,), 0xFF, dtype=torch.uint8)
    by_torch = native.clone()
    places = torch.randperm(20 * 16)[:num_tokens]
    pages, slots = places // 16 * size, places % 16
    k, v = torch.randn(num_tokens, 3, 80) * 1e-3, torch.randn(num_tokens, 3, 80) * 50
    v[0] = 0
    routes = RouteCounters()
    append_tokens(kind, 1, native, pages, slots, k, v, geometry, routes=routes)
    assert [route.route for route in routes.snapshot()] == ["native"]
    with torch_only():
        append_tokens(kind, 1, by_torch, pages, slots, k, v, geometry)
    assert torch.equal(native, by_torch)


def test_append_needs_an_open_format() -> None:
    kind = PageKind.uniform("sealed", parse_format("tq3"), 1)
    rows, none = torch.zeros(1, 1, 64), torch.zeros(1, dtype=torch.int64)
    arena = torch.zeros(4096, dtype=torch.uint8)
    with pytest.raises(ValueError, match="appended"):
        append_tokens(kind, 0, arena, none, none, rows, rows, KVGeometry(1, 1, 64, 16))


def test_golden_bytes(level: str) -> None:
    """A page whose codes are known: they follow the law the levels are made for."""
    geometry = KVGeometry(1, 1, 16, 16)
    f32 = PageKind.uniform("f32", parse_format("f32"), 1)
    tq = PageKind.uniform("tq", parse_format("tq(8,8,uncentred)"), 1)
    levels = torch.tensor([-127, -79, -45, -14, 14, 45, 79, 127]) / 59.0
    codes = torch.tensor([0, 7, 1, 6, 2, 5, 2, 5, 3, 4, 3, 4, 3, 4, 2, 5])
    rows = torch.stack([levels[codes], levels[codes.flip(0)] * 7] * 8).view(1, 16, 1, 16)
    arena = torch.zeros(64 * GRANULE, dtype=torch.uint8)
    data = parse_format("f32").encode(rows, rows, geometry)[0]
    arena[: len(data)] = data
    retier(arena, [0], f32, [32], tq, geometry)
    golden = [0x78, 0xAC, 0xAA, 0xE3, 0x38, 0xAA, 0x15, 0xC7, 0x71, 0x55, 0xE5, 0x1C]
    # Three bits each, lowest first: 0 | 7 << 3 | 1 << 6 | ...
    share = arena[32 * GRANULE :]
    assert share[:12].tolist() == golden
    assert share[12:96].tolist() == golden * 7
    k, v = read_page(arena, 32, tq, 0, geometry)
    assert relative_error(k, rows[0]) < 0.02
    assert torch.equal(k, v)
