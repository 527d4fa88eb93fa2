"""Pages of one kind from those of another on a GPU, one launch for all pages and layers."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

import torch

from minima_kernels.cuda.compiler import find_nvcc
from minima_kernels.cuda.driver import Argument, Launch
from minima_kernels.cuda.route import NO_COMPILER
from minima_kernels.cuda.variants import retier_variant, unsupported
from minima_kernels.formats import BF16, F16, Format
from minima_kernels.geometry import KVGeometry

# Arguments that change from run to run, by place.
_ARENA, _SOURCES, _TARGETS, _NUMBERS = 0, 1, 2, 3
_FIRST, _KEYS, _VALUES, _PAGES = 2, 7, 8, 9

DENSE: dict[torch.dtype, Format] = {torch.float16: F16, torch.bfloat16: BF16}
"""Formats of expanded pages, by the dtype of attention."""


class LayerShares(NamedTuple):
    """Shares of consecutive layers of one format, in pages at ``addresses``.

    ``addresses`` int64 ``[P]``, granules; ``offset``: bytes into a page of the first layer's share.
    """

    addresses: torch.Tensor
    format_: Format
    offset: int


def retier_reason(
    formats: Iterable[Format], geometry: KVGeometry, device: torch.device
) -> str | None:
    """Why pages of these formats cannot be converted by the kernel; ``None`` if they can."""
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return f"compute capability {capability[0]}.{capability[1]}"
    if find_nvcc() is None:
        return NO_COMPILER
    return unsupported(formats, geometry) or None


def retier_layers(
    arena: torch.Tensor,
    source: LayerShares,
    destination: LayerShares,
    num_layers: int,
    geometry: KVGeometry,
) -> None:
    """Re-encode ``num_layers`` layers of P pages on the current stream.

    The bytes are those of ``Format.encode`` over the decoded values, except where a sum of another
    order moves a value across a boundary, or a scale by its last bit.

    Args:
        arena: uint8 ``[bytes]``; sources and destinations do not overlap.
    """
    launch = _launch(source.format_, destination.format_, geometry, arena.device)
    launch.set(_ARENA, arena.data_ptr())
    launch.set(_SOURCES, source.addresses.data_ptr())
    launch.set(_TARGETS, destination.addresses.data_ptr())
    numbers = (source.offset, source.format_.layer_bytes(geometry), destination.offset)
    for place, value in enumerate((*numbers, destination.format_.layer_bytes(geometry))):
        launch.set(_NUMBERS + place, value)
    launch.set(_NUMBERS + 4, num_layers)
    launch.resize(len(source.addresses) * num_layers * geometry.num_kv_heads)
    launch.call(torch.cuda.current_stream(arena.device).cuda_stream)


def expand_pages(
    arena: torch.Tensor, source: LayerShares, geometry: KVGeometry, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer of P pages as rotated keys and values, ``[H, P * page_size, D]`` of ``dtype``.

    Raises:
        KeyError: a dtype that is not float16 or bfloat16.
    """
    pages, heads = len(source.addresses), geometry.num_kv_heads
    shape = heads, pages * geometry.page_size, geometry.head_dim
    keys, values = (torch.empty(shape, dtype=dtype, device=arena.device) for _ in range(2))
    launch = _expansion(source.format_, DENSE[dtype], geometry, arena.device)
    launch.set(_ARENA, arena.data_ptr())
    launch.set(_SOURCES, source.addresses.data_ptr())
    launch.set(_FIRST, source.offset)
    launch.set(_KEYS, keys.data_ptr())
    launch.set(_VALUES, values.data_ptr())
    launch.set(_PAGES, pages)
    launch.resize(pages * heads)
    launch.call(torch.cuda.current_stream(arena.device).cuda_stream)
    return keys, values


@cache
def _expansion(
    source: Format, destination: Format, geometry: KVGeometry, device: torch.device
) -> Launch:
    variant = retier_variant(source, destination, geometry, "expand")
    arguments: list[Argument] = [None, None, 0, geometry.num_kv_heads, *_parts(source, geometry)]
    function = variant.load("expand", device)
    return Launch(function, (1, 1), [*arguments, None, None, 0], overlaps=False)


def _parts(format_: Format, geometry: KVGeometry) -> list[int]:
    """Where V's codes, K's and V's scales start in a layer's share."""
    layout = format_.layout(geometry)
    parts = layout.v_codes, layout.k_scales, layout.v_scales
    return [0 if part is None else part.offset for part in parts]


@cache
def _launch(
    source: Format, destination: Format, geometry: KVGeometry, device: torch.device
) -> Launch:
    function = retier_variant(source, destination, geometry).load("retier", device)
    arguments: list[Argument] = [None, None, None, *[0] * 5, geometry.num_kv_heads]
    arguments += [*_parts(source, geometry), *_parts(destination, geometry)]
    return Launch(function, (1, 1), arguments, overlaps=False)
