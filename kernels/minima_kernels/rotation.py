"""The rotated basis in which all pages store K and V."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minima_kernels.cpu.library import native_library


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
        self.block = block = head_dim & -head_dim
        matrix = torch.block_diag(*[hadamard(block)] * (head_dim // block))
        if signs is not None:
            if len(signs) != head_dim or any(sign not in (-1, 1) for sign in signs):
                raise ValueError(f"signs must be {head_dim} values of +1 or -1")
            matrix = torch.tensor(signs, dtype=torch.float64)[:, None] * matrix
        self.matrix = matrix.to(dtype).to(device)
        self.signs = None if signs is None else torch.tensor(signs, dtype=torch.float32).to(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate the last axis of ``x [..., D]``."""
        x = x.to(self.matrix.dtype)
        return self._transform(x) if self.is_native else x @ self.matrix

    def inverse(self, x: torch.Tensor) -> torch.Tensor:
        """Undo ``forward``."""
        x = x.to(self.matrix.dtype)
        # Without signs the matrix is symmetric.
        return self._transform(x) if self.is_native else x @ self.matrix.T

    @property
    def is_native(self) -> bool:
        """Whether the native kernels rotate.

        torch spreads even the product of a few rows over threads, and waits for them to wake.
        """
        matrix = self.matrix
        is_plain = matrix.is_cpu and matrix.dtype == torch.float32 and self.signs is None
        return is_plain and native_library() is not None

    def _transform(self, x: torch.Tensor) -> torch.Tensor:
        native = native_library()
        assert native is not None
        dim = len(self.matrix)
        if x.shape[-1] != dim or not x.is_cpu:
            raise ValueError(
                f"x must be [..., {dim}] on the CPU, not {list(x.shape)} on {x.device}"
            )
        x = x.contiguous()
        out = torch.empty_like(x)
        rows = x.numel() // dim
        native.minima_hadamard(
            x.data_ptr(), out.data_ptr(), rows, dim, self.block, torch.get_num_threads()
        )
        return out
