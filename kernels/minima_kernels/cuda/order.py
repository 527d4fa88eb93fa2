"""The order of TQ codes in pages on a GPU: that of matrix-multiply operands.

A sealed page is written once and read many times, so on a GPU its codes lie as the tensor cores
want them: a lane of a warp reads 16 bytes after 16 bytes and has the operand after one byte
permutation per four codes. All parts of a KV head follow each other, so that two copies fetch what
a warp needs:

    K codes, K scales, key mean (where centred), V codes, V scales

The bytes of a page are the same as in canonical order, its bits are permuted. Formats of other
level counts, other page sizes and head dims stay in canonical order, and so do FP8 and BF16 pages:
those are read as fast in row order, and appending to a page and sealing it leave it where it is.

Codes come in groups of 32 per lane, eight operand registers of four codes:

    K  16 tokens t, 64 channels c; register ks * 4 + a holds
       token 16 t + 8 (a & 1) + lane / 4,
       channels 64 c + 32 ks + 16 (a >> 1) + 4 (lane % 4) + 0 ... 3
    V  16 channels c; register r holds
       channel 16 c + 8 (r & 1) + lane / 4,
       tokens 16 (r >> 1) + 2 (lane % 4) + 0, 1, 8, 9

As many words as a code has bits hold a group. Two bits: a nibble of word i is a code of register
4 i or 4 i + 1 and, above it, one of the register two further. Three: nibbles of words 0 to 2 are
codes of registers 0 to 5, their top bits make registers 6 and 7. Four: nibbles of word i are codes
of registers 2 i and 2 i + 1 with the lowest bit moved to the top.
"""

from __future__ import annotations

from functools import cache

import torch

from minima_kernels.formats import TQ, Format
from minima_kernels.formats.base import Part
from minima_kernels.geometry import KVGeometry
from minima_kernels.packing import pack, unpack

PAGE_SIZE = 64
HEAD_DIMS = (64, 128, 256)
CODE_BITS = {4: 2, 8: 3, 16: 4}
"""Bits per code of the level counts that have this order."""


def supports(format_: Format, geometry: KVGeometry) -> bool:
    """Whether pages of a format have this order on a GPU."""
    return (
        isinstance(format_, TQ)
        and format_.k_levels in CODE_BITS
        and format_.v_levels in CODE_BITS
        and geometry.page_size == PAGE_SIZE
        and geometry.head_dim in HEAD_DIMS
    )


def page_order(format_: Format, geometry: KVGeometry, device: torch.device) -> FragmentOrder | None:
    """How pages of a format lie in an arena on a device; ``None`` for the canonical order.

    The one place that decides it.
    """
    if device.type != "cuda" or not supports(format_, geometry):
        return None
    assert isinstance(format_, TQ)
    return fragment_order(format_, geometry)


@cache
def fragment_order(format_: TQ, geometry: KVGeometry) -> FragmentOrder:
    """The order of a format and geometry that `supports` takes."""
    return FragmentOrder(format_, geometry)


class FragmentOrder:
    """Between canonical and fragment order, for one layer's share of pages of a TQ format.

    Works on tensors of any device; nothing but bits moves.
    """

    def __init__(self, format_: TQ, geometry: KVGeometry) -> None:
        self._geometry = geometry
        self._layout = format_.layout(geometry)
        self._levels = format_.k_levels, format_.v_levels
        sizes = [self._layout.k_codes, self._layout.k_scales, self._layout.k_mean]
        sizes += [self._layout.v_codes, self._layout.v_scales]
        self._parts: list[Part] = [part for part in sizes if part is not None]
        self.head_bytes = sum(part.head_bytes for part in self._parts)
        assert self.head_bytes * geometry.num_kv_heads == self._layout.layer_bytes

    def from_canonical(self, data: torch.Tensor) -> torch.Tensor:
        """Canonical uint8 ``[P, layer_bytes]`` to fragment order, the same shape."""
        layout, dim = self._layout, self._geometry.head_dim
        columns = []
        for part in self._parts:
            content = self._read(data, part)
            if part is layout.k_codes or part is layout.v_codes:
                is_value = part is layout.v_codes
                levels = self._levels[is_value]
                codes = unpack(content.contiguous(), levels, PAGE_SIZE * dim)
                content = _to_words(codes.to(torch.uint8), dim, CODE_BITS[levels], is_value)
            elif part is not layout.k_mean:
                content = _reorder_scales(content, _scale_order(data.device))
            columns.append(content)
        return torch.cat(columns, dim=-1).flatten(1)

    def to_canonical(self, data: torch.Tensor) -> torch.Tensor:
        """Undo ``from_canonical``."""
        layout, dim = self._layout, self._geometry.head_dim
        heads = data.unflatten(1, (self._geometry.num_kv_heads, self.head_bytes))
        result = torch.empty_like(data)
        sizes = [part.head_bytes for part in self._parts]
        for part, content in zip(self._parts, heads.split(sizes, dim=-1), strict=True):
            if part is layout.k_codes or part is layout.v_codes:
                is_value = part is layout.v_codes
                levels = self._levels[is_value]
                codes = _from_words(content, dim, CODE_BITS[levels], is_value)
                content = pack(codes, levels)
            elif part is not layout.k_mean:
                content = _reorder_scales(content, _scale_order(data.device).argsort())
            stop = part.offset + part.head_bytes * self._geometry.num_kv_heads
            result[:, part.offset : stop] = content.flatten(1)
        return result

    def _read(self, data: torch.Tensor, part: Part) -> torch.Tensor:
        """A part of all heads: uint8 ``[P, H, head_bytes]``."""
        heads = self._geometry.num_kv_heads
        stop = part.offset + part.head_bytes * heads
        return data[:, part.offset : stop].unflatten(1, (heads, part.head_bytes))


@cache
def _code_order(dim: int, is_value: bool, device: torch.device) -> torch.Tensor:
    """int64 ``[groups * 32 * 8 * 4]``: the code (token * dim + channel) of each operand byte."""
    groups = torch.arange(dim // 16)[:, None, None, None]
    lanes = torch.arange(32)[:, None, None]
    registers = torch.arange(8)[:, None]
    byte = torch.arange(4)
    row, quarter = lanes // 4, lanes % 4
    if is_value:
        channel = 16 * groups + 8 * (registers & 1) + row
        token = 16 * (registers >> 1) + 8 * (byte >> 1) + 2 * quarter + (byte & 1)
    else:
        per_tile = dim // 64
        step, place = registers // 4, registers % 4
        token = 16 * (groups // per_tile) + 8 * (place & 1) + row
        channel = 32 * (2 * (groups % per_tile) + step) + 16 * (place >> 1) + 4 * quarter + byte
    return (token * dim + channel).flatten().to(device)


@cache
def _scale_order(device: torch.device) -> torch.Tensor:
    """int64 ``[64]``: the token of each stored scale; a lane reads those of its rows at once."""
    place = torch.arange(PAGE_SIZE)
    return (16 * (place % 8 // 2) + 8 * (place % 2) + place // 8).to(device)


def _reorder_scales(content: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    scales = content.contiguous().view(torch.int16)
    return scales[..., order].contiguous().view(torch.uint8)


def _to_words(codes: torch.Tensor, dim: int, bits: int, is_value: bool) -> torch.Tensor:
    """uint8 codes ``[P, H, 64 * dim]`` to the bytes of the words ``[P, H, 8 * dim * bits]``."""
    operands = codes[..., _code_order(dim, is_value, codes.device)]
    # [P, H, groups, lanes, register pairs, nibbles]
    pairs = operands.unflatten(-1, (dim // 16, 32, 4, 8))
    if bits == 2:
        nibbles = pairs[..., 0::2, :] | pairs[..., 1::2, :] << 2
    elif bits == 3:
        top = torch.stack([pairs[..., 3, :] >> bit & 1 for bit in range(3)], dim=-2)
        nibbles = pairs[..., :3, :] | top << 3
    else:
        nibbles = pairs >> 1 | (pairs & 1) << 3
    words = nibbles[..., 0::2] | nibbles[..., 1::2] << 4
    # [P, H, groups, lanes, words, 4] to 16-byte chunks of all lanes
    by_lane = words.transpose(-4, -3).flatten(-3).unflatten(-1, (-1, 16))
    return by_lane.transpose(-3, -2).flatten(-3)


def _from_words(content: torch.Tensor, dim: int, bits: int, is_value: bool) -> torch.Tensor:
    """Undo ``_to_words``."""
    by_lane = content.unflatten(-1, (-1, 32, 16)).transpose(-3, -2).flatten(-2)
    words = by_lane.unflatten(-1, (dim // 16, bits, 4)).transpose(-4, -3)
    nibbles = torch.stack((words & 15, words >> 4), dim=-1).flatten(-2)
    if bits == 2:
        pairs = torch.stack((nibbles & 3, nibbles >> 2), dim=-2).flatten(-3, -2)
    elif bits == 3:
        first, second, third = (nibbles[..., bit, :] >> 3 << bit for bit in range(3))
        top = first | second | third
        pairs = torch.cat((nibbles & 7, top[..., None, :]), dim=-2)
    else:
        pairs = nibbles << 1 & 15 | nibbles >> 3
    codes = torch.empty_like(pairs.flatten(-4))
    codes[..., _code_order(dim, is_value, content.device)] = pairs.flatten(-4)
    return codes
