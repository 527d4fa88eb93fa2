"""Pages in random places of a GPU's memory, and decode attention over them, for benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from gpu_timing import Call, num_sets

from minima_kernels import (
    GRANULE,
    KVGeometry,
    PageKind,
    Rotation,
    RouteCounters,
    Segment,
    parse_format,
    plan_decode,
    run_decode,
)
from minima_kernels.shares import write_shares

GEOMETRIES = {"A": (24, 4, 256), "B": (32, 8, 128)}
"""Query heads, KV heads, head dim."""
PAGE = 64


class Inputs:
    """Arenas with pages of some kinds in random places, the same places in all of them."""

    def __init__(self, geometry: KVGeometry, formats: Sequence[str], counts: Sequence[int]) -> None:
        self.geometry = geometry
        self.kinds = [PageKind.uniform(name, parse_format(name), 1) for name in formats]
        sizes = [kind.granules(geometry) for kind in self.kinds]
        self.read_bytes = sum(
            kind.formats[0].layer_bytes(geometry) * count
            for kind, count in zip(self.kinds, counts, strict=True)
        )
        total = sum(size * count for size, count in zip(sizes, counts, strict=True)) * GRANULE
        self.addresses: list[torch.Tensor] = []
        start = 0
        for size, count in zip(sizes, counts, strict=True):
            self.addresses.append(torch.randperm(count) * size + start)
            start += size * count
        self.arenas = [
            torch.empty(total, dtype=torch.uint8, device="cuda")
            for _ in range(num_sets(self.read_bytes))
        ]
        for kind, addresses in zip(self.kinds, self.addresses, strict=True):
            self._fill(kind, addresses.cuda())

    def _fill(self, kind: PageKind, addresses: torch.Tensor) -> None:
        """Random content: some pages are encoded and used again and again."""
        geometry, format_ = self.geometry, kind.formats[0]
        shape = 128, PAGE, geometry.num_kv_heads, geometry.head_dim
        k, v = (torch.randn(shape, device="cuda") for _ in range(2))
        data = format_.encode(k, v, geometry)
        for part in addresses.split(len(data)):
            write_shares(self.arenas[0], part, format_, 0, geometry, data[: len(part)])
        for arena in self.arenas[1:]:
            arena.copy_(self.arenas[0])

    def segments(self, kind: int, pages: int) -> list[Segment]:
        """A segment per request, each with so many pages of one of the kinds to itself."""
        parts = self.addresses[kind].split(pages)
        return [Segment(part, kind, PAGE, [request]) for request, part in enumerate(parts)]


def calls(
    inputs: Inputs,
    segments: Sequence[Segment],
    q: torch.Tensor,
    query_bits: int = 15,
    page_mass: bool = False,
) -> list[Call]:
    """One whole decode per input set."""
    geometry = inputs.geometry
    plan = plan_decode(segments, len(q), inputs.kinds, geometry, q.device, query_bits=query_bits)
    rotation = Rotation(geometry.head_dim, device=q.device)
    routes = RouteCounters()

    def call(arena: torch.Tensor) -> object:
        return run_decode(
            plan,
            q,
            arena,
            0,
            geometry.head_dim**-0.5,
            page_mass=page_mass,
            rotation=rotation,
            routes=routes,
        )

    call(inputs.arenas[0])
    assert [route.route for route in routes.snapshot()] == ["cuda"], routes.snapshot()
    return [partial(call, arena) for arena in inputs.arenas]
