"""Writing pages by the native kernels: whole pages in another format, rows of new tokens."""

from __future__ import annotations

import numpy as np
import torch

from minima_kernels.cpu.layout import native_geometry, page_formats, share_format
from minima_kernels.cpu.library import native_library
from minima_kernels.formats.base import Format
from minima_kernels.geometry import GRANULE, KVGeometry
from minima_kernels.kinds import PageKind


def native_retier(
    arena: torch.Tensor,
    sources: torch.Tensor,
    source_kind: PageKind,
    destinations: torch.Tensor,
    destination_kind: PageKind,
    geometry: KVGeometry,
    threads: int,
) -> None:
    """``retier`` of pages at int64 addresses ``[P]``; the caller has checked them."""
    native = native_library()
    assert native is not None
    pairs = list(zip(source_kind.formats, destination_kind.formats, strict=True))
    share_bytes = np.array([new.layer_bytes(geometry) for _, new in pairs], dtype=np.int64)
    copied = np.array([old == new for old, new in pairs], dtype=np.uint8)
    source_bytes = (sources * GRANULE).contiguous()
    destination_bytes = (destinations * GRANULE).contiguous()
    native.minima_retier(
        page_formats(source_kind, geometry),
        page_formats(destination_kind, geometry),
        share_bytes.ctypes.data,
        copied.ctypes.data,
        geometry.num_layers,
        native_geometry(geometry, 1),
        arena.data_ptr(),
        source_bytes.data_ptr(),
        destination_bytes.data_ptr(),
        len(source_bytes),
        threads,
    )


def native_append(
    format_: Format,
    arena: torch.Tensor,
    byte_offsets: torch.Tensor,
    slots: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    geometry: KVGeometry,
    threads: int,
) -> None:
    """``AppendableFormat.append`` of token rows ``k, v [N, H, D]``."""
    native = native_library()
    assert native is not None
    # Names keep the converted tensors alive until the call is over.
    keys, values = k.contiguous().float(), v.contiguous().float()
    shares, places = byte_offsets.contiguous(), slots.contiguous()
    native.minima_append(
        share_format(format_, geometry),
        native_geometry(geometry, 1),
        keys.data_ptr(),
        values.data_ptr(),
        arena.data_ptr(),
        shares.data_ptr(),
        places.data_ptr(),
        len(places),
        threads,
    )
