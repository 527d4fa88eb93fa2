"""Sums and selections along rows as wide as a vocabulary, spread over a whole GPU.

torch gives a row to a thread block or a few; in pieces it keeps many busy. The values are integers,
so pieces change no bit. On a CPU a row stays whole, and so do sums of few rows: there the host
that launches more kernels takes longer than the GPU gains.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

PIECE = 1024
FEW_ROWS = 8
"""Measured at 1 row, where pieces lose, and at 64, where they win."""
_LARGEST = (2**31 - 1) << 32  # `pad` takes a float64, which this is exactly


def running_sum(values: torch.Tensor) -> torch.Tensor:
    """Cumulative sums of int64 [n, width] along the rows."""
    if not _is_summed_in_pieces(values):
        return values.cumsum(-1)
    pieces = _cut(values, PIECE, 0).cumsum(-1)
    ends = pieces[..., -1]
    pieces += (ends.cumsum(-1) - ends)[..., None]
    return pieces.flatten(1)[:, : values.shape[-1]]


def pick(weights: torch.Tensor, point: torch.Tensor) -> torch.Tensor:
    """Where the running sum of a row first exceeds a share of all.

    Args:
        weights: int64 [n, width], not negative, not all zero.
        point: float64 [n, 1] in [0, 1).

    Returns:
        int64 [n].
    """
    if not _is_summed_in_pieces(weights):
        summed = weights.cumsum(-1)
        return _first_above(summed, _target(summed, point))[:, 0]
    pieces = _cut(weights, PIECE, 0)
    sums = pieces.sum(-1)
    ends = sums.cumsum(-1)
    target = _target(ends, point)
    chosen = _first_above(ends, target)
    target = target - (ends - sums).gather(-1, chosen)
    piece = pieces.gather(1, chosen[..., None].expand(-1, -1, PIECE))[:, 0]
    return (chosen * PIECE + _first_above(piece.cumsum(-1), target))[:, 0]


def smallest(keys: torch.Tensor, most: int) -> torch.Tensor:
    """The `most` smallest of int64 [n, width], below 2^63 - 2^32 and all different within a row,
    ascending."""
    piece = max(PIECE, 4 * most)
    if _is_cut(keys, piece):
        pieces = _cut(keys, piece, _LARGEST)
        keys = pieces.topk(most, dim=-1, largest=False, sorted=False).values.flatten(1)
    return keys.topk(most, dim=-1, largest=False).values


def _target(summed: torch.Tensor, point: torch.Tensor) -> torch.Tensor:
    total = summed[:, -1:]
    return torch.minimum((point * total.double()).long(), total - 1)


def _first_above(summed: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.searchsorted(summed, target, right=True)


def _is_summed_in_pieces(values: torch.Tensor) -> bool:
    return len(values) >= FEW_ROWS and _is_cut(values, PIECE)


def _is_cut(values: torch.Tensor, piece: int) -> bool:
    return values.is_cuda and values.shape[-1] > 4 * piece


def _cut(values: torch.Tensor, piece: int, filling: int) -> torch.Tensor:
    """[n, pieces, piece], filled up at the end."""
    padded = pad(values, (0, -values.shape[-1] % piece), value=filling)
    return padded.reshape(len(values), -1, piece)
