"""The kernel that converts pages, run on the CPU, against the bytes of the torch formats."""

from __future__ import annotations

import pytest
import torch
from emulated import Emulation, skip_unless_possible
from retier_cases import CASES, Conversion

from minima_kernels import KVGeometry, parse_format
from minima_kernels.cuda.retier import LayerShares, expand_pages, retier_layers


@pytest.fixture
def emulation(monkeypatch: pytest.MonkeyPatch) -> Emulation:
    skip_unless_possible()
    return Emulation(monkeypatch)


QUICK = (("fp8", "tq3", 128), ("tq3", "fp8", 64), ("bf16", "tq(16,4)", 256))


@pytest.mark.parametrize(
    ("source", "destination", "dim"),
    [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
def test_bytes_of_torch(emulation: Emulation, source: str, destination: str, dim: int) -> None:
    conversion = Conversion(KVGeometry(2, 2, dim, 64), source, destination, torch.device("cpu"))
    for emulation.seed in range(2):
        conversion.clear()
        retier_layers(conversion.arena, *conversion.shares(), 2, conversion.geometry)
        conversion.check()
    assert set(emulation.launched) == {"retier"}


@pytest.mark.parametrize("source", ["tq3", pytest.param("fp8", marks=pytest.mark.slow)])
def test_expanded_pages(emulation: Emulation, source: str) -> None:
    conversion = Conversion(KVGeometry(2, 2, 128, 64), source, "bf16", torch.device("cpu"))
    share, _ = conversion.shares()
    size = share.format_.layer_bytes(conversion.geometry)
    second = LayerShares(share.addresses, share.format_, share.offset + size)
    expanded = expand_pages(conversion.arena, second, conversion.geometry, torch.bfloat16)
    k, v = parse_format(source).decode(conversion.canonical[:, 1], conversion.geometry)
    for actual, expected in zip(expanded, (k, v), strict=True):
        rows = expected.flatten(0, 1).transpose(0, 1).bfloat16()
        wrong = actual != rows
        assert wrong.float().mean() < 1e-3  # a product of another order, rounded
        assert torch.allclose(actual.float(), rows.float(), rtol=2**-7, atol=1e-5)
