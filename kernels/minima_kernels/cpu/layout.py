"""What the native kernels need to know of formats and geometry."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from minima_kernels.cpu import abi
from minima_kernels.cpu.library import register_levels
from minima_kernels.formats import BF16, F16, F32, FP8, TQ, Format, Part
from minima_kernels.geometry import KVGeometry
from minima_kernels.kinds import PageKind

IntArray = npt.NDArray[np.signedinteger[Any]]

MAX_HEAD_DIM = 256

_TYPES: dict[Format, abi.FormatType] = {
    F32: abi.FormatType.F32,
    F16: abi.FormatType.F16,
    BF16: abi.FormatType.BF16,
    FP8: abi.FormatType.FP8,
}


def unsupported(formats: Iterable[Format], geometry: KVGeometry) -> str:
    """Why the kernels cannot serve pages of these formats; empty if they can."""
    if geometry.head_dim % 16 or geometry.head_dim > MAX_HEAD_DIM:
        return f"head dim {geometry.head_dim}"
    if geometry.page_size % 16:
        return f"page size {geometry.page_size}"
    for format_ in formats:
        if not isinstance(format_, TQ) and format_ not in _TYPES:
            return f"format {format_.name}"
    return ""


@cache
def layer_formats(
    kinds: tuple[PageKind, ...], geometry: KVGeometry
) -> tuple[ctypes.Array[abi.Format], ...]:
    """For each layer, its share of a page of each kind."""
    layers = []
    for layer in range(geometry.num_layers):
        described = (abi.Format * max(1, len(kinds)))()
        for target, kind in zip(described, kinds, strict=False):
            _describe(target, kind.formats[layer], kind.layer_offset(layer, geometry), geometry)
        layers.append(described)
    return tuple(layers)


@cache
def layer_pointers(
    kinds: tuple[PageKind, ...], geometry: KVGeometry
) -> ctypes.Array[ctypes.c_void_p]:
    """The addresses of `layer_formats`, as an array."""
    layers = layer_formats(kinds, geometry)
    return (ctypes.c_void_p * len(layers))(*map(ctypes.addressof, layers))


@cache
def page_formats(kind: PageKind, geometry: KVGeometry) -> ctypes.Array[abi.Format]:
    """The shares of all layers of a page."""
    described = (abi.Format * len(kind.formats))()
    for layer, (target, format_) in enumerate(zip(described, kind.formats, strict=True)):
        _describe(target, format_, kind.layer_offset(layer, geometry), geometry)
    return described


@cache
def share_format(format_: Format, geometry: KVGeometry) -> abi.Format:
    """One layer's share of a page, offsets from its own start."""
    described = abi.Format()
    _describe(described, format_, 0, geometry)
    return described


def _describe(target: abi.Format, format_: Format, start: int, geometry: KVGeometry) -> None:
    if isinstance(format_, TQ):
        register_levels(format_.k_levels)
        register_levels(format_.v_levels)
        target.type = abi.FormatType.TQ
        target.k_levels, target.v_levels = format_.k_levels, format_.v_levels
    else:
        target.type = _TYPES[format_]
    layout = format_.layout(geometry)
    for name in ("k_codes", "k_scales", "k_mean", "v_codes", "v_scales"):
        part: Part | None = getattr(layout, name)
        setattr(target, name, -1 if part is None else start + part.offset)
        setattr(target, f"{name}_head", 0 if part is None else part.head_bytes)


@cache
def native_geometry(geometry: KVGeometry, group_size: int) -> abi.Geometry:
    """The geometry with ``group_size`` query heads per KV head."""
    return abi.Geometry(geometry.num_kv_heads, group_size, geometry.head_dim, geometry.page_size)
