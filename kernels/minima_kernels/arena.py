"""Gathering bytes of pages out of the arena, and scattering them back.

The arena is a flat uint8 tensor that the caller makes; its storage must start at a multiple of
16 bytes (every allocator of torch does). Offsets and sizes here are multiples of 16 as well.
"""

from __future__ import annotations

import torch

from minima_kernels.geometry import ALIGNMENT, GRANULE

# The widest dtype torch can index: one element per 16 bytes. Its numbers mean nothing here.
_VECTOR = torch.complex128
_VECTORS_PER_GRANULE = GRANULE // ALIGNMENT


def gather(
    arena: torch.Tensor, addresses: torch.Tensor, offset: int, num_bytes: int
) -> torch.Tensor:
    """Copy ``num_bytes`` from ``offset`` bytes into each page: uint8 ``[P, num_bytes]``.

    ``addresses`` is int64 ``[P]``, in granules, on the arena's device.
    """
    vectors = arena.view(_VECTOR)
    count = num_bytes // ALIGNMENT
    start = offset // ALIGNMENT
    # One overlapping row per granule at which a page could begin: indexing it needs one index per
    # page instead of one per 16 bytes.
    num_starts = (vectors.numel() - start - count) // _VECTORS_PER_GRANULE + 1
    rows = torch.as_strided(vectors, (num_starts, count), (_VECTORS_PER_GRANULE, 1), start)
    return rows[addresses].view(torch.uint8)


def scatter(arena: torch.Tensor, addresses: torch.Tensor, offset: int, data: torch.Tensor) -> None:
    """Write ``data`` uint8 ``[P, num_bytes]`` at ``offset`` bytes into each page."""
    steps = torch.arange(data.shape[1] // ALIGNMENT, device=arena.device) + offset // ALIGNMENT
    indices = (addresses * _VECTORS_PER_GRANULE)[:, None] + steps
    arena.view(_VECTOR)[indices] = data.contiguous().view(_VECTOR)
