"""TQ pages: Lloyd–Max codes of rotated, centred keys and rotated values."""

from __future__ import annotations

from typing import NamedTuple

import torch

from minima_kernels.codebook import boundaries, check_levels, codebook
from minima_kernels.formats.base import (
    Format,
    Layout,
    Tile,
    read_pair,
    read_part,
    read_scales,
    write_part,
)
from minima_kernels.geometry import KVGeometry
from minima_kernels.packing import dequantise, pack, stream_bytes

# Dividing by the norm of the chosen centroids gives a row its exact norm back. Measured: better
# from five levels on, worse below.
MIN_LEVELS_NORM_CORRECTED = 5

FP16_MAX = 65504.0


class Quantised(NamedTuple):
    """``codes`` uint8 ``[..., D]``, ``scales`` float16 ``[...]``: a row is codebook * scale."""

    codes: torch.Tensor
    scales: torch.Tensor


def quantise(x: torch.Tensor, levels: int) -> Quantised:
    """Quantise rows ``x [..., D]`` to the nearest of ``levels`` Gaussian levels."""
    book = codebook(levels, x.device)
    norms = torch.linalg.vector_norm(x, dim=-1)
    root_mean_square = norms / x.shape[-1] ** 0.5
    unit = x / root_mean_square.clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    # A code is the number of boundaries below the value; counting them one boundary at a time is
    # several times faster than a binary search for each value.
    codes = torch.zeros_like(unit, dtype=torch.uint8)
    for boundary in boundaries(levels):
        codes += unit > boundary
    scales = root_mean_square
    if levels >= MIN_LEVELS_NORM_CORRECTED:
        chosen = book.centroids.index_select(0, codes.flatten().int()).view(x.shape)
        # An odd number of levels has one at zero, which is all that a row of zeros chooses.
        chosen_norms = torch.linalg.vector_norm(chosen, dim=-1)
        scales = norms / chosen_norms.clamp_min(torch.finfo(torch.float32).tiny)
    return Quantised(codes, scales.clamp_max(FP16_MAX).half())


class TQ(Format):
    """TQ(a, b): a levels for K, b levels for V, one FP16 scale per token and head for each.

    Keys are centred: the mean of the page's keys, per head and channel, is kept in FP16 and
    subtracted before coding (``centred=False`` leaves that out, for comparison). It cuts the
    error of 3-bit keys by three, since keys carry a large constant component.

    Source: TurboQuant's MSE codec, with a Hadamard rotation and without its residual stage.
    """

    appendable = False

    def __init__(self, k_levels: int, v_levels: int, centred: bool = True) -> None:
        super().__init__()
        check_levels(k_levels)
        check_levels(v_levels)
        self.k_levels = k_levels
        self.v_levels = v_levels
        self.centred = centred
        suffix = "" if centred else ",uncentred"
        is_tq3 = (k_levels, v_levels, centred) == (8, 8, True)
        self.name = "tq3" if is_tq3 else f"tq({k_levels},{v_levels}{suffix})"

    def _build_layout(self, geometry: KVGeometry) -> Layout:
        num_codes = geometry.page_size * geometry.head_dim
        return Layout.build(
            geometry,
            k_codes=stream_bytes(self.k_levels, num_codes),
            v_codes=stream_bytes(self.v_levels, num_codes),
            scales=2 * geometry.page_size,
            k_mean=2 * geometry.head_dim if self.centred else 0,
        )

    def encode(self, k: torch.Tensor, v: torch.Tensor, geometry: KVGeometry) -> torch.Tensor:
        layout = self.layout(geometry)
        data = torch.zeros(k.shape[0], layout.layer_bytes, dtype=torch.uint8, device=k.device)
        k = k.transpose(1, 2).float().contiguous()
        v = v.transpose(1, 2).float().contiguous()
        if layout.k_mean is not None:
            mean = k.mean(dim=2).half()
            write_part(data, layout.k_mean, mean)
            k = k - mean.float()[:, :, None]
        assert layout.k_scales is not None and layout.v_scales is not None
        for x, levels, codes_part, scales_part in (
            (k, self.k_levels, layout.k_codes, layout.k_scales),
            (v, self.v_levels, layout.v_codes, layout.v_scales),
        ):
            codes, scales = quantise(x, levels)
            write_part(data, codes_part, pack(codes.flatten(2), levels))
            write_part(data, scales_part, scales)
        return data

    def expand(self, data: torch.Tensor, geometry: KVGeometry) -> Tile:
        layout = self.layout(geometry)
        num_codes = geometry.page_size * geometry.head_dim

        def values(codes: torch.Tensor, levels: int) -> torch.Tensor:
            rows = dequantise(codes, levels, num_codes)
            return rows.flatten(-2).unflatten(-1, (-1, geometry.head_dim))

        if self.k_levels == self.v_levels:
            k, v = values(read_pair(data, layout.k_codes, geometry), self.k_levels).unbind()
        else:
            k = values(read_part(data, layout.k_codes, geometry), self.k_levels)
            v = values(read_part(data, layout.v_codes, geometry), self.v_levels)
        mean = None
        if layout.k_mean is not None:
            mean = read_part(data, layout.k_mean, geometry).view(torch.float16).float()
        return Tile(k, v, *read_scales(data, layout, geometry), mean)


TQ3 = TQ(8, 8)
