"""Pages to convert on a GPU or in its emulation, and the bytes that torch makes of them."""

from __future__ import annotations

import torch

from minima_kernels import GRANULE, KVGeometry, PageKind, parse_format
from minima_kernels.arena import gather, scatter
from minima_kernels.cuda.order import fragment_order, supports
from minima_kernels.cuda.retier import LayerShares
from minima_kernels.formats import TQ, Format

NUM_PAGES = 3
POISON = 0xFF

CASES = [
    ("fp8", "tq3", 64), ("fp8", "tq3", 128), ("fp8", "tq3", 256), ("bf16", "tq3", 128),
    ("f16", "tq3", 64), ("bf16", "tq(16,4)", 256), ("fp8", "tq(8,4)", 128), ("fp8", "tq(16,8)", 64),
    ("bf16", "tq(8,8,uncentred)", 128), ("bf16", "fp8", 128), ("f16", "fp8", 256),
    ("tq3", "fp8", 64), ("tq3", "fp8", 128), ("tq3", "fp8", 256), ("tq(16,4)", "bf16", 128),
    ("tq3", "tq(4,4)", 128), ("tq(16,8)", "tq3", 256), ("tq(4,16)", "f16", 64),
]  # fmt: skip


def in_order(format_: Format, geometry: KVGeometry, data: torch.Tensor) -> torch.Tensor:
    """Canonical shares ``[..., layer_bytes]`` as the kernels want them."""
    if not supports(format_, geometry):
        return data
    assert isinstance(format_, TQ)
    order = fragment_order(format_, geometry)
    return order.from_canonical(data.flatten(0, -2)).view(data.shape)


def parts_of(format_: Format, geometry: KVGeometry, data: torch.Tensor) -> dict[str, torch.Tensor]:
    """Codes and scales of canonical shares, to be compared each with its own tolerance."""
    layout = format_.layout(geometry)
    found = {}
    for name in ("k_codes", "v_codes", "k_scales", "v_scales", "k_mean"):
        part = getattr(layout, name, None)
        if part is not None:
            stop = part.offset + part.head_bytes * geometry.num_kv_heads
            found[name] = data[..., part.offset : stop]
    return found


class Conversion:
    """Source pages in an arena, room for what is made of them, all in the order of the kernels."""

    def __init__(
        self, geometry: KVGeometry, source: str, destination: str, device: torch.device
    ) -> None:
        self.geometry = geometry
        layers = geometry.num_layers
        kinds = [PageKind.uniform(n, parse_format(n), layers) for n in (source, destination)]
        self.source, self.destination = kinds
        old, new = (kind.granules(geometry) for kind in kinds)
        generator = torch.Generator().manual_seed(1)
        places = torch.randperm(NUM_PAGES, generator=generator)
        self.sources = (1 + places * (old + 1)).to(device)
        self.targets = (1 + NUM_PAGES * (old + 1) + places.flip(0) * (new + 1)).to(device)
        size = (2 + NUM_PAGES * (old + new + 2)) * GRANULE
        arena = torch.full((size,), POISON, dtype=torch.uint8)
        shape = NUM_PAGES, geometry.page_size, geometry.num_kv_heads, geometry.head_dim
        shares = []
        for layer, format_ in enumerate(self.source.formats):
            k = torch.randn(shape, generator=generator) + torch.randn(shape[3], generator=generator)
            v = torch.randn(shape, generator=generator) * 100
            k[0, 1], v[0, 2], v[1, 3], v[2] = 0, 0, v[1, 3] * 1e-4, v[2] * 1e-3
            shares.append(format_.encode(k, v, geometry))
            data = in_order(format_, geometry, shares[-1])
            scatter(arena, self.sources.cpu(), self.source.layer_offset(layer, geometry), data)
        self.canonical = torch.stack(shares, dim=1)  # [P, layers, bytes]
        self.arena = arena.to(device)
        self.expected = torch.stack(
            [
                self.destination.formats[layer].encode(*pair, geometry)
                for layer, share in enumerate(shares)
                for pair in [self.source.formats[layer].decode(share, geometry)]
            ],
            dim=1,
        )

    def shares(self) -> tuple[LayerShares, LayerShares]:
        geometry = self.geometry
        offsets = [kind.layer_offset(0, geometry) for kind in (self.source, self.destination)]
        return (
            LayerShares(self.sources, self.source.formats[0], offsets[0]),
            LayerShares(self.targets, self.destination.formats[0], offsets[1]),
        )

    def clear(self) -> None:
        """Poison the pages that are to be made."""
        start = (1 + NUM_PAGES * (self.source.granules(self.geometry) + 1)) * GRANULE
        self.arena[start:] = POISON

    def check(self) -> None:
        """The bytes of torch: codes but for a few at a boundary, scales but for a last bit."""
        geometry, format_ = self.geometry, self.destination.formats[0]
        size = format_.layer_bytes(geometry)
        start = self.destination.layer_offset(0, geometry)
        layers = geometry.num_layers
        data = gather(self.arena, self.targets, start, size * layers).cpu().view(-1, layers, size)
        if supports(format_, geometry):
            assert isinstance(format_, TQ)
            data = fragment_order(format_, geometry).to_canonical(data.flatten(0, 1)).view_as(data)
        expected = parts_of(format_, geometry, self.expected)
        for name, actual in parts_of(format_, geometry, data).items():
            wrong = (actual != expected[name]).float().mean()
            assert wrong < (1e-3 if name.endswith("codes") else 2e-2), (name, float(wrong))
        used = (start + size * layers + GRANULE - 1) // GRANULE * GRANULE
        for target in self.targets.tolist():  # the hole behind each page
            hole = target * GRANULE + used
            assert bool((self.arena[hole : hole + GRANULE] == POISON).all())
