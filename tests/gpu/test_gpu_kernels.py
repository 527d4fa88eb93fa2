"""Formats and attention give on a GPU what they give on the CPU."""

from __future__ import annotations

import pytest
import torch

from minima_kernels import (
    GRANULE,
    KVGeometry,
    PageKind,
    Segment,
    parse_format,
    plan_decode,
    plan_extend,
    run_decode,
    run_extend,
)
from minima_kernels.cpu.route import torch_only
from minima_kernels.shares import write_shares

GEOMETRY = KVGeometry(num_layers=2, num_kv_heads=2, head_dim=64, page_size=64)


@pytest.mark.parametrize("name", ["fp8", "tq3", "tq(16,4)", "tq(5,3)", "bf16"])
def test_encode_and_attend(name: str) -> None:
    torch.manual_seed(0)
    format_ = parse_format(name)
    kind = PageKind.uniform(name, format_, 2)
    pages = 12
    k = torch.randn(pages, 64, 2, 64)
    v = torch.randn(pages, 64, 2, 64)
    data = format_.encode(k, v, GEOMETRY)
    on_gpu = format_.encode(k.cuda(), v.cuda(), GEOMETRY).cpu()
    # Sums run in another order: a value on the border of two codes may fall to the other side.
    assert (data != on_gpu).float().mean() < 1e-3
    size = kind.granules(GEOMETRY)
    addresses = torch.arange(pages) * size
    arenas = []
    for device in ("cpu", "cuda"):
        arena = torch.zeros(pages * size * GRANULE, dtype=torch.uint8, device=device)
        for layer in range(2):
            offset = kind.layer_offset(layer, GEOMETRY)
            shares = data.to(device)
            write_shares(arena, addresses.to(device), format_, offset, GEOMETRY, shares)
        arenas.append(arena)
    segments = [
        Segment(addresses[:6], 0, 64, [0, 1, 2]),
        Segment(addresses[6:9], 0, 64, [0]),
        Segment(addresses[9:], 0, 17, [2]),
    ]
    q = torch.randn(3, 8, 64)
    results = []
    for device, arena in zip(("cpu", "cuda"), arenas, strict=True):
        plan = plan_decode(segments, 3, (kind,), GEOMETRY, device)
        # The native CPU kernels round queries to 15 bits; here the same route is compared.
        with torch_only():
            results.append(run_decode(plan, q.to(device), arena, 1, 0.125).out.cpu())
    assert torch.allclose(results[0], results[1], atol=2e-5, rtol=2e-5)
    new_q, new_k, new_v = torch.randn(10, 8, 64), torch.randn(10, 2, 64), torch.randn(10, 2, 64)
    results = []
    for device, arena in zip(("cpu", "cuda"), arenas, strict=True):
        extend = plan_extend(segments, [0, 3, 4, 10], (kind,), GEOMETRY, device)
        new = (x.to(device) for x in (new_q, new_k, new_v))
        with torch_only():
            out = run_extend(extend, *new, arena, 1, 0.125).out
        results.append(out.cpu())
    assert torch.allclose(results[0], results[1], atol=2e-5, rtol=2e-5)
