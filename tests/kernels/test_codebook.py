"""Lloyd–Max codebooks against the theory of quantising a unit Gaussian."""

from __future__ import annotations

import pytest
import torch

from minima_kernels.codebook import codebook, distortion, lloyd_max

# Mean squared error of the optimal quantiser of N(0, 1) (Max 1960, table I, and later tables).
THEORY = {
    2: 0.36338,
    3: 0.19017,
    4: 0.11748,
    5: 0.07994,
    6: 0.05798,
    7: 0.04400,
    8: 0.03455,
    16: 0.00950,
}


@pytest.mark.parametrize(("levels", "expected"), THEORY.items())
def test_distortion_is_that_of_theory(levels: int, expected: float) -> None:
    assert distortion(levels) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("levels", range(2, 17))
def test_levels_are_symmetric_and_ascending(levels: int) -> None:
    centroids = lloyd_max(levels)
    assert len(centroids) == levels
    assert list(centroids) == sorted(centroids)
    assert [-c for c in reversed(centroids)] == pytest.approx(centroids, abs=1e-12)


def test_known_levels() -> None:
    assert lloyd_max(2)[1] == pytest.approx((2 / torch.pi) ** 0.5, abs=1e-9)
    assert lloyd_max(8)[7] == pytest.approx(2.1520, abs=1e-4)


@pytest.mark.parametrize("levels", range(2, 17))
def test_stored_levels_are_signed_bytes(levels: int) -> None:
    book = codebook(levels, torch.device("cpu"))
    integers = book.centroids.double() / book.centroids[-1].double() * 127
    assert torch.allclose(integers, integers.round(), atol=1e-4)
    assert integers[-1] == 127


def test_eight_levels_as_bytes() -> None:
    centroids = codebook(8, torch.device("cpu")).centroids
    integers = (centroids / centroids[-1] * 127).round().int().tolist()
    assert integers == [-127, -79, -45, -14, 14, 45, 79, 127]


@pytest.mark.parametrize("levels", [3, 4, 8, 16])
def test_rounding_the_levels_costs_next_to_nothing(levels: int) -> None:
    x = torch.randn(1_000_000, generator=torch.Generator().manual_seed(levels))
    book = codebook(levels, torch.device("cpu"))
    error = (x - book.centroids[torch.bucketize(x, book.boundaries)]).square().mean().item()
    assert error == pytest.approx(distortion(levels), rel=0.01)


@pytest.mark.parametrize("levels", [1, 17])
def test_other_counts_are_refused(levels: int) -> None:
    with pytest.raises(ValueError, match="2 to 16"):
        lloyd_max(levels)
