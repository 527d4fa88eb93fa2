"""Layers' shares of pages, read from the arena and written to it in canonical order.

Pages may lie in another order on their device (see ``cuda/order.py``); who works on bytes of pages
comes through here and need not know.
"""

from __future__ import annotations

import torch

from minima_kernels.arena import gather, scatter
from minima_kernels.cuda.order import page_order
from minima_kernels.formats import Format
from minima_kernels.geometry import KVGeometry


def read_shares(
    arena: torch.Tensor,
    addresses: torch.Tensor,
    format_: Format,
    offset: int,
    geometry: KVGeometry,
    num_layers: int = 1,
) -> torch.Tensor:
    """Shares of ``num_layers`` layers of one format from ``offset`` bytes into each page.

    Args:
        addresses: int64 ``[P]``, in granules, on the arena's device.

    Returns:
        uint8 ``[P, num_layers * layer_bytes]``.
    """
    size = format_.layer_bytes(geometry)
    data = gather(arena, addresses, offset, size * num_layers)
    order = page_order(format_, geometry, arena.device)
    if order is None:
        return data
    return order.to_canonical(data.view(-1, size)).view(data.shape)


def write_shares(
    arena: torch.Tensor,
    addresses: torch.Tensor,
    format_: Format,
    offset: int,
    geometry: KVGeometry,
    data: torch.Tensor,
) -> None:
    """Write shares of consecutive layers of one format: the inverse of ``read_shares``."""
    order = page_order(format_, geometry, arena.device)
    if order is not None:
        size = format_.layer_bytes(geometry)
        data = order.from_canonical(data.view(-1, size)).view(data.shape)
    scatter(arena, addresses, offset, data)
