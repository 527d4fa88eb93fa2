"""The rotated basis."""

from __future__ import annotations

import pytest
import torch

from minima_kernels import Rotation

DIMS = [64, 80, 96, 128]


@pytest.mark.parametrize("dim", DIMS)
def test_is_orthogonal_and_inverts(dim: int) -> None:
    rotation = Rotation(dim, torch.float64)
    identity = torch.eye(dim, dtype=torch.float64)
    assert torch.allclose(rotation.matrix @ rotation.matrix.T, identity, atol=1e-12)
    x = torch.randn(5, 3, dim, dtype=torch.float64)
    assert torch.allclose(rotation.inverse(rotation.forward(x)), x, atol=1e-12)


@pytest.mark.parametrize("dim", DIMS)
def test_scores_do_not_change(dim: int) -> None:
    rotation = Rotation(dim)
    q, k = torch.randn(7, dim), torch.randn(9, dim)
    assert torch.allclose(rotation.forward(q) @ rotation.forward(k).T, q @ k.T, atol=1e-4)


@pytest.mark.parametrize(("dim", "block"), [(64, 64), (80, 16), (96, 32), (128, 128)])
def test_a_channel_spreads_over_its_block(dim: int, block: int) -> None:
    for channel in (0, dim - 1):
        spread = Rotation(dim).forward(torch.eye(dim)[channel]).abs()
        start = channel // block * block
        assert torch.allclose(spread[start : start + block], torch.tensor(block**-0.5))
        assert spread.count_nonzero() == block


def test_signs_come_before_the_blocks() -> None:
    signs = [1, -1] * 32
    rotation = Rotation(64, signs=signs)
    x = torch.randn(4, 64)
    expected = Rotation(64).forward(x * torch.tensor(signs))
    assert torch.allclose(rotation.forward(x), expected, atol=1e-6)
    assert torch.allclose(rotation.inverse(rotation.forward(x)), x, atol=1e-5)


@pytest.mark.parametrize("signs", [[1] * 63, [1] * 63 + [0]])
def test_bad_signs_are_refused(signs: list[int]) -> None:
    with pytest.raises(ValueError, match="signs"):
        Rotation(64, signs=signs)


def test_works_in_the_dtype_asked_for() -> None:
    rotation = Rotation(64, torch.bfloat16)
    assert rotation.forward(torch.randn(2, 64)).dtype == torch.bfloat16


@pytest.mark.parametrize("dim", [*DIMS, 256])
@pytest.mark.parametrize("rows", [0, 1, 9, 5000])
def test_float32_is_the_product_with_the_matrix(dim: int, rows: int) -> None:
    rotation = Rotation(dim)
    x = torch.randn(rows, 2, dim)[:, 1]  # rows that do not lie one after another
    expected = x.double() @ rotation.matrix.double()
    assert torch.allclose(rotation.forward(x).double(), expected, atol=1e-5)
    assert torch.allclose(rotation.inverse(x).double(), expected, atol=1e-5)
    if rows:
        assert torch.equal(rotation.forward(x)[-1:], rotation.forward(x[-1:]))


def test_another_dimension_is_refused() -> None:
    with pytest.raises((ValueError, RuntimeError)):
        Rotation(64).forward(torch.randn(4, 128))
