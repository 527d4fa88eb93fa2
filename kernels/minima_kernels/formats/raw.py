"""Pages in a floating-point dtype: the control, and Recent pages on request."""

from __future__ import annotations

import torch

from minima_kernels.formats.base import (
    AppendableFormat,
    Layout,
    Tile,
    read_pair,
    scatter_rows,
    write_part,
)
from minima_kernels.geometry import KVGeometry


class RawFormat(AppendableFormat):
    """K and V rows ``[H, B, D]`` in ``dtype``; exact when that is the dtype of the computation."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.name = name
        self.dtype = dtype

    def _build_layout(self, geometry: KVGeometry) -> Layout:
        row_bytes = geometry.head_dim * self.dtype.itemsize
        head_bytes = geometry.page_size * row_bytes
        return Layout.build(geometry, k_codes=head_bytes, v_codes=head_bytes)

    def encode(self, k: torch.Tensor, v: torch.Tensor, geometry: KVGeometry) -> torch.Tensor:
        layout = self.layout(geometry)
        data = torch.zeros(k.shape[0], layout.layer_bytes, dtype=torch.uint8, device=k.device)
        for part, x in ((layout.k_codes, k), (layout.v_codes, v)):
            write_part(data, part, x.transpose(1, 2).to(self.dtype))
        return data

    def expand(self, data: torch.Tensor, geometry: KVGeometry) -> Tile:
        rows = read_pair(data, self.layout(geometry).k_codes, geometry).view(self.dtype)
        k, v = rows.flatten(2).unflatten(-1, (-1, geometry.head_dim)).float().unbind()
        return Tile(k, v)

    def append(
        self,
        arena: torch.Tensor,
        byte_offsets: torch.Tensor,
        slots: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        geometry: KVGeometry,
    ) -> None:
        rows = torch.cat((k, v), dim=1).to(self.dtype)
        scatter_rows(arena, byte_offsets, slots, self.layout(geometry).k_codes, rows)


BF16 = RawFormat("bf16", torch.bfloat16)
F16 = RawFormat("f16", torch.float16)
F32 = RawFormat("f32", torch.float32)
