"""The rotated basis in which all pages store K and V."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def hadamard(size: int) -> torch.Tensor:
    """Normalised Sylvester Hadamard matrix, float64 ``[size, size]``; ``size`` a power of two."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.cat(
            (torch.cat((matrix, matrix), dim=1), torch.cat((matrix, -matrix), dim=1))
        )
    return matrix / size**0.5


class Rotation:
    """One fixed orthogonal change of basis for every head, layer and page format.

    ``forward`` maps row vectors ``x`` to ``x @ matrix``. The matrix is block-diagonal: Hadamard
    blocks of the largest power of two that divides ``head_dim``. Scores do not change under it,
    and it spreads a vector's energy over all channels, which is what lets one Gaussian codebook
    serve every channel (TurboQuant).

    Args:
        head_dim: channels per head, D.
        dtype: of the matrix and of what ``forward`` and ``inverse`` return.
        device: of the matrix.
        signs: +1 or -1 per channel, applied before the blocks; all +1 by default. Draws of signs
            exist for evaluation: a codec must not be judged on one draw.

    Raises:
        ValueError: ``signs`` has another length than ``head_dim`` or values other than +1, -1.
    """

    def __init__(
        self,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        signs: Sequence[int] | None = None,
    ) -> None:
        block = head_dim & -head_dim
        matrix = torch.block_diag(*[hadamard(block)] * (head_dim // block))
        if signs is not None:
            if len(signs) != head_dim or any(sign not in (-1, 1) for sign in signs):
                raise ValueError(f"signs must be {head_dim} values of +1 or -1")
            matrix = torch.tensor(signs, dtype=torch.float64)[:, None] * matrix
        self.matrix = matrix.to(dtype).to(device)
        self.signs = None if signs is None else torch.tensor(signs, dtype=torch.float32).to(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate the last axis of ``x [..., D]``."""
        return x.to(self.matrix.dtype) @ self.matrix

    def inverse(self, x: torch.Tensor) -> torch.Tensor:
        """Undo ``forward``."""
        return x.to(self.matrix.dtype) @ self.matrix.T
