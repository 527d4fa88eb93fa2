"""The kernel that converts pages, on the GPU, against the bytes of the torch formats."""

from __future__ import annotations

import gpu_pages  # noqa: F401  (makes the folder of the cases importable)
import pytest
import torch
from retier_cases import CASES, Conversion

from minima_kernels import KVGeometry, RouteCounters, parse_format, retier
from minima_kernels.cuda.retier import LayerShares, expand_pages
from minima_kernels.routes import Route


@pytest.mark.parametrize(("source", "destination", "dim"), CASES)
def test_bytes_of_torch(source: str, destination: str, dim: int) -> None:
    device = torch.device("cuda", 0)
    conversion = Conversion(KVGeometry(2, 2, dim, 64), source, destination, device)
    conversion.clear()
    routes = RouteCounters()
    retier(
        conversion.arena, conversion.sources, conversion.source, conversion.targets,
        conversion.destination, conversion.geometry, routes=routes,
    )  # fmt: skip
    conversion.check()
    assert routes.snapshot() == {Route("retier", "cuda", ""): 1}


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("source", ["tq3", "tq(16,4)", "fp8", "bf16"])
def test_expanded_pages(source: str, dim: int) -> None:
    conversion = Conversion(KVGeometry(2, 2, dim, 64), source, "bf16", torch.device("cuda", 0))
    share, _ = conversion.shares()
    size = share.format_.layer_bytes(conversion.geometry)
    second = LayerShares(share.addresses, share.format_, share.offset + size)
    expanded = expand_pages(conversion.arena, second, conversion.geometry, torch.bfloat16)
    for actual, expected in zip(
        expanded, parse_format(source).decode(conversion.canonical[:, 1], conversion.geometry),
        strict=True,
    ):  # fmt: skip
        rows = expected.flatten(0, 1).transpose(0, 1).bfloat16()
        assert torch.allclose(actual.cpu().float(), rows.float(), rtol=2**-7, atol=1e-5)
