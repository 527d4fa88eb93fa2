"""What every page format says: where its bytes lie, and how they become K and V."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch

from minima_kernels.geometry import ALIGNMENT, KVGeometry, align


class Part(NamedTuple):
    """A part of a layer's share of a page: ``head_bytes`` for each KV head, heads in order.

    ``offset`` counts bytes from the start of the layer's share.
    """

    offset: int
    head_bytes: int


@dataclass(frozen=True)
class Layout:
    """Byte offsets within one layer's share of a page; a part that a format lacks is ``None``.

    V codes follow K codes, and V scales K scales, without a gap: parts of equal size can be read
    as one.
    """

    k_codes: Part
    v_codes: Part
    k_scales: Part | None
    v_scales: Part | None
    k_mean: Part | None
    layer_bytes: int

    @classmethod
    def build(
        cls,
        geometry: KVGeometry,
        *,
        k_codes: int,
        v_codes: int,
        scales: int = 0,
        k_mean: int = 0,
    ) -> Layout:
        """Lay out codes, scales, mean; the arguments are bytes per KV head, 0 for no such part."""
        heads = geometry.num_kv_heads
        scales_offset = align((k_codes + v_codes) * heads, ALIGNMENT)
        mean_offset = scales_offset + align(2 * scales * heads, ALIGNMENT)
        return cls(
            Part(0, k_codes),
            Part(k_codes * heads, v_codes),
            Part(scales_offset, scales) if scales else None,
            Part(scales_offset + scales * heads, scales) if scales else None,
            Part(mean_offset, k_mean) if k_mean else None,
            mean_offset + align(k_mean * heads, ALIGNMENT),
        )

    def account(self, geometry: KVGeometry) -> dict[str, int]:
        """Bytes by purpose: codes, scales, means, padding; they sum to the share."""

        def size(*parts: Part | None) -> int:
            return sum(part.head_bytes * geometry.num_kv_heads for part in parts if part)

        codes = size(self.k_codes, self.v_codes)
        scales = size(self.k_scales, self.v_scales)
        means = size(self.k_mean)
        return {
            "codes": codes,
            "scales": scales,
            "means": means,
            "padding": self.layer_bytes - codes - scales - means,
        }


class Tile(NamedTuple):
    """K and V of a tile of pages, expanded, with the factors that attention can apply cheaper.

    X chunks of C pages each make Y = X * H batches (H heads of one chunk after the other) of
    T = C * page_size tokens and D channels, all float32: a key is ``k * k_scales + k_mean`` (the
    mean of its page), a value ``v * v_scales``.
    """

    k: torch.Tensor  # [Y, T, D]
    v: torch.Tensor  # [Y, T, D]
    k_scales: torch.Tensor | None = None  # [Y, 1, T]
    v_scales: torch.Tensor | None = None  # [Y, 1, T]
    k_mean: torch.Tensor | None = None  # [Y, C, D]


class Format(ABC):
    """How the bytes of one layer's share of a page encode rotated K and V.

    Formats are values: two of the same name are equal, and ``parse_format(name)`` gives the format
    back. P pages, B tokens per page, H KV heads, D channels below.
    """

    name: str
    appendable: bool

    def __init__(self) -> None:
        self._layouts: dict[KVGeometry, Layout] = {}

    def layout(self, geometry: KVGeometry) -> Layout:
        """Byte offsets within a layer's share of a page."""
        layout = self._layouts.get(geometry)
        if layout is None:
            layout = self._layouts[geometry] = self._build_layout(geometry)
        return layout

    @abstractmethod
    def _build_layout(self, geometry: KVGeometry) -> Layout: ...

    @abstractmethod
    def encode(self, k: torch.Tensor, v: torch.Tensor, geometry: KVGeometry) -> torch.Tensor:
        """Encode whole pages: float ``k, v [P, B, H, D]`` to uint8 ``[P, layer_bytes]``."""

    @abstractmethod
    def expand(self, data: torch.Tensor, geometry: KVGeometry) -> Tile:
        """Expand uint8 ``data [X, C, layer_bytes]`` for attention."""

    def decode(self, data: torch.Tensor, geometry: KVGeometry) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode uint8 ``[P, layer_bytes]`` to float32 K and V, each ``[P, B, H, D]``."""
        tile = self.expand(data[:, None], geometry)
        k, v = tile.k, tile.v
        if tile.k_scales is not None:
            k = k * tile.k_scales.mT
        if tile.k_mean is not None:
            k = k + tile.k_mean
        if tile.v_scales is not None:
            v = v * tile.v_scales.mT
        k, v = (x.unflatten(0, (-1, geometry.num_kv_heads)).transpose(1, 2) for x in (k, v))
        return k.contiguous(), v.contiguous()

    def layer_bytes(self, geometry: KVGeometry) -> int:
        """Bytes of one layer's share of a page, padding included; a multiple of 16."""
        return self.layout(geometry).layer_bytes

    def bits_per_value(self, geometry: KVGeometry) -> float:
        """Bits per stored value, every byte of the layer's share counted."""
        return self.layer_bytes(geometry) * 8 / geometry.values_per_layer

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Format) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"<format {self.name}>"


class AppendableFormat(Format):
    """A format whose pages take single token rows, so that it can serve as Recent pages."""

    appendable = True

    @abstractmethod
    def append(
        self,
        arena: torch.Tensor,
        byte_offsets: torch.Tensor,
        slots: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        geometry: KVGeometry,
    ) -> None:
        """Write N token rows.

        Args:
            arena: uint8 ``[bytes]``.
            byte_offsets: int64 ``[N]``, where in the arena the layer's share of the page starts.
            slots: int64 ``[N]``, the token's place in its page.
            k, v: rotated, float ``[N, H, D]``.
        """


def read_part(data: torch.Tensor, part: Part, geometry: KVGeometry) -> torch.Tensor:
    """A part of ``data [X, C, layer_bytes]``, heads first: uint8 ``[Y, C, head_bytes]``.

    Bringing heads forward before anything is expanded moves compressed bytes only.
    """
    heads, stop = geometry.num_kv_heads, part.offset + geometry.num_kv_heads * part.head_bytes
    rows = data[..., part.offset : stop].unflatten(-1, (heads, part.head_bytes))
    return rows.transpose(1, 2).reshape(-1, data.shape[1], part.head_bytes)


def read_pair(data: torch.Tensor, k_part: Part, geometry: KVGeometry) -> torch.Tensor:
    """A K part and the V part of equal size behind it: uint8 ``[2, Y, C, head_bytes]``."""
    heads, size = geometry.num_kv_heads, k_part.head_bytes
    stop = k_part.offset + 2 * heads * size
    rows = data[..., k_part.offset : stop].unflatten(-1, (2, heads, size))
    return rows.permute(2, 0, 3, 1, 4).reshape(2, -1, data.shape[1], size)


def read_scales(
    data: torch.Tensor, layout: Layout, geometry: KVGeometry
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP16 scales of K and V as float32, ``[Y, 1, T]`` each."""
    assert layout.k_scales is not None
    stored = read_pair(data, layout.k_scales, geometry).view(torch.float16)
    k_scales, v_scales = stored.flatten(2).float()[:, :, None].unbind()
    return k_scales, v_scales


def write_part(data: torch.Tensor, part: Part, content: torch.Tensor) -> None:
    """Store ``content [P, H, ...]`` of any dtype as a part of ``data [P, layer_bytes]``."""
    rows = content.flatten(1).contiguous().view(torch.uint8)
    data[:, part.offset : part.offset + rows.shape[1]] = rows


def scatter_rows(
    arena: torch.Tensor,
    byte_offsets: torch.Tensor,
    slots: torch.Tensor,
    k_part: Part,
    rows: torch.Tensor,
) -> None:
    """Write one row per token and head into a K part and the V part of equal size behind it.

    ``rows`` is ``[N, 2 * H, width]`` of any dtype, K heads before V heads; the other arguments are
    those of ``append``.
    """
    row_bytes = rows.shape[2] * rows.element_size()
    # Whole 8-byte words where the rows allow it: eight times fewer elements to scatter.
    word = torch.int64 if row_bytes % 8 == 0 else torch.int16
    words = rows.contiguous().flatten(1).view(word)
    device = arena.device
    heads = torch.arange(rows.shape[1], device=device) * k_part.head_bytes + k_part.offset
    starts = (byte_offsets + slots * row_bytes)[:, None] + heads
    steps = torch.arange(row_bytes // word.itemsize, device=device)
    indices = (starts // word.itemsize)[..., None] + steps
    arena.view(word)[indices.flatten(1)] = words
