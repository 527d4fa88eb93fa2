"""FP8 pages: e4m3 codes with a scale of their own for every token and head."""

from __future__ import annotations

from typing import NamedTuple

import torch

from minima_kernels.formats.base import (
    AppendableFormat,
    Layout,
    Part,
    Tile,
    read_pair,
    read_scales,
    scatter_rows,
    write_part,
)
from minima_kernels.geometry import KVGeometry

E4M3_MAX = 448.0

# Smallest normal FP16 number. Below it a scale would lose precision or vanish; with it, rows of
# zeros and rows of tiny values still decode to within 2**-24.
MIN_SCALE = 2.0**-14


class Quantised(NamedTuple):
    """``codes`` uint8 ``[..., D]`` (e4m3 bits), ``scales`` float16 ``[...]``."""

    codes: torch.Tensor
    scales: torch.Tensor


def quantise(x: torch.Tensor) -> Quantised:
    """Quantise rows ``x [..., D]``: scale = largest magnitude / 448, rounded to FP16."""
    x = x.float()
    scales = (x.abs().amax(-1) / E4M3_MAX).clamp_min(MIN_SCALE).half()
    scaled = (x / scales.float()[..., None]).clamp(-E4M3_MAX, E4M3_MAX)
    return Quantised(scaled.to(torch.float8_e4m3fn).view(torch.uint8), scales)


def expand_codes(codes: torch.Tensor) -> torch.Tensor:
    """e4m3 bits, uint8, to their values divided by 256, float32.

    Moved one sign and seven payload bits into place, e4m3 bits are FP16 bits of the value / 256
    (the exponent biases are 7 and 15): several times faster on a CPU than the dtype's own cast.
    The two NaN codes, which ``quantise`` never writes, read as +-480 / 256.
    """
    bits = codes.view(torch.int8).to(torch.int16)
    # The sign extends into bit 14 when shifted; clear that bit.
    return bits.bitwise_left_shift_(7).bitwise_and_(~0x4000).view(torch.float16).float()


class FP8Format(AppendableFormat):
    """e4m3 codes ``[H, B, D]`` and FP16 scales ``[H, B]``, for K and for V."""

    name = "fp8"

    def _build_layout(self, geometry: KVGeometry) -> Layout:
        head_bytes = geometry.page_size * geometry.head_dim
        return Layout.build(
            geometry, k_codes=head_bytes, v_codes=head_bytes, scales=2 * geometry.page_size
        )

    def _parts(self, geometry: KVGeometry) -> tuple[tuple[Part, Part], tuple[Part, Part]]:
        """(codes, scales) of K, and of V."""
        layout = self.layout(geometry)
        assert layout.k_scales is not None and layout.v_scales is not None
        return (layout.k_codes, layout.k_scales), (layout.v_codes, layout.v_scales)

    def encode(self, k: torch.Tensor, v: torch.Tensor, geometry: KVGeometry) -> torch.Tensor:
        size = self.layer_bytes(geometry)
        data = torch.zeros(k.shape[0], size, dtype=torch.uint8, device=k.device)
        for (codes_part, scales_part), x in zip(self._parts(geometry), (k, v), strict=True):
            codes, scales = quantise(x.transpose(1, 2))
            write_part(data, codes_part, codes)
            write_part(data, scales_part, scales)
        return data

    def expand(self, data: torch.Tensor, geometry: KVGeometry) -> Tile:
        layout = self.layout(geometry)
        values = expand_codes(read_pair(data, layout.k_codes, geometry))
        k, v = values.flatten(2).unflatten(-1, (-1, geometry.head_dim)).unbind()
        k_scales, v_scales = read_scales(data, layout, geometry)
        return Tile(k, v, k_scales.mul_(256), v_scales.mul_(256))

    def append(
        self,
        arena: torch.Tensor,
        byte_offsets: torch.Tensor,
        slots: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        geometry: KVGeometry,
    ) -> None:
        (codes_part, scales_part), _ = self._parts(geometry)
        codes, scales = quantise(torch.cat((k, v), dim=1))
        scatter_rows(arena, byte_offsets, slots, codes_part, codes)
        scatter_rows(arena, byte_offsets, slots, scales_part, scales[..., None])


FP8 = FP8Format()
