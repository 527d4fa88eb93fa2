"""Mixed-radix packing of codes into a bit stream.

A *word* holds ``codes`` codes as the digits of a number in base ``levels``, first code lowest, in
``bits`` bits. Words follow each other without gaps, lowest bit first, in little-endian bytes; the
stream is padded with zero bits to a whole number of 32-bit integers. This is the canonical order.
"""

from __future__ import annotations

import sys
from functools import cache
from math import lcm
from typing import NamedTuple

import torch

from minima_kernels.codebook import check_levels, codebook

MAX_WORD_BITS = 18
MAX_TABLE_BITS = 16

if sys.byteorder != "little":
    raise ImportError("minima_kernels reads page bytes as little-endian integers")


class WordShape(NamedTuple):
    """``codes`` codes share one word of ``bits`` bits."""

    codes: int
    bits: int


@cache
def word_shape(levels: int) -> WordShape:
    """The densest word of at most 18 bits; among equals one that is quick to expand.

    Quick means: a table of at most 4096 words, a power of two of codes (whole vectors per table
    row), then as many codes as possible. Eight levels: 4 codes in 12 bits. Five: 3 in 7.
    """
    check_levels(levels)
    shapes = [
        WordShape(codes, (levels**codes - 1).bit_length()) for codes in range(1, MAX_WORD_BITS + 1)
    ]
    return min(
        (shape for shape in shapes if shape.bits <= MAX_WORD_BITS),
        key=lambda shape: (
            shape.bits / shape.codes,
            shape.bits > 12,
            shape.codes & (shape.codes - 1) != 0,
            -shape.codes,
        ),
    )


def stream_bytes(levels: int, num_codes: int) -> int:
    """Bytes of the stream of ``num_codes`` codes, a multiple of four."""
    shape = word_shape(levels)
    return -(-_num_words(shape, num_codes) * shape.bits // 32) * 4


def pack(codes: torch.Tensor, levels: int) -> torch.Tensor:
    """Pack integer ``codes [..., N]``, each in ``0..levels - 1``, into uint8 ``[..., bytes]``."""
    shape = word_shape(levels)
    num_codes = codes.shape[-1]
    num_words = _num_words(shape, num_codes)
    period = lcm(shape.bits, 32)
    words_per_period, integers_per_period = period // shape.bits, period // 32
    num_periods = -(-num_words // words_per_period)

    missing = num_periods * words_per_period * shape.codes - num_codes
    digits = torch.nn.functional.pad(codes.to(torch.int32), (0, missing))
    digits = digits.unflatten(-1, (num_periods * words_per_period, shape.codes))
    words = digits[..., shape.codes - 1]
    for digit in range(shape.codes - 2, -1, -1):
        words = words * levels + digits[..., digit]

    words = words.unflatten(-1, (num_periods, words_per_period))
    integers = words.new_zeros((*words.shape[:-1], integers_per_period))
    for word in range(words_per_period):
        integer, shift = divmod(word * shape.bits, 32)
        integers[..., integer] |= words[..., word] << shift
        if shift + shape.bits > 32:
            integers[..., integer + 1] |= words[..., word] >> (32 - shift)
    stream = integers.flatten(-2)[..., : stream_bytes(levels, num_codes) // 4]
    return stream.contiguous().view(torch.uint8)


def unpack(stream: torch.Tensor, levels: int, num_codes: int) -> torch.Tensor:
    """Undo ``pack``: uint8 ``[..., bytes]`` to int32 codes ``[..., num_codes]``."""
    shape = word_shape(levels)
    words = unpack_words(stream, levels, num_codes)
    digits = []
    for _ in range(shape.codes):
        digits.append(words % levels)
        words = words // levels
    return torch.stack(digits, dim=-1).flatten(-2)[..., :num_codes]


def unpack_words(stream: torch.Tensor, levels: int, num_codes: int) -> torch.Tensor:
    """The words of a stream: uint8 ``[..., bytes]`` to int32 ``[..., words]``.

    ``stream`` must start at a multiple of four bytes in its storage. Values run from 0 to
    ``2**bits - 1`` whatever the bytes are.
    """
    shape = word_shape(levels)
    num_words = _num_words(shape, num_codes)
    if shape.bits == 8:
        return stream[..., :num_words].to(torch.int32)
    period = lcm(shape.bits, 32)
    words_per_period, integers_per_period = period // shape.bits, period // 32
    integers = stream.view(torch.int32)
    missing = -integers.shape[-1] % integers_per_period
    if missing:
        integers = torch.nn.functional.pad(integers, (0, missing))
    columns = integers.unflatten(-1, (-1, integers_per_period)).unbind(-1)
    words = torch.empty(
        (*columns[0].shape, words_per_period), dtype=torch.int32, device=stream.device
    )
    mask = (1 << shape.bits) - 1
    for word in range(words_per_period):
        integer, shift = divmod(word * shape.bits, 32)
        if shift + shape.bits <= 32:
            words[..., word] = (columns[integer] >> shift) & mask
        else:
            low_bits = 32 - shift
            low = (columns[integer] >> shift) & ((1 << low_bits) - 1)
            words[..., word] = low | ((columns[integer + 1] << low_bits) & mask)
    return words.flatten(-2)[..., :num_words]


def dequantise(stream: torch.Tensor, levels: int, num_codes: int) -> torch.Tensor:
    """Centroids of a stream: uint8 ``[..., bytes]`` to float32 ``[..., num_codes]``.

    A table turns a whole word into its centroids. Words above 16 bits are split into their low
    and high digits, so that no table outgrows the cache.
    """
    shape = word_shape(levels)
    words = unpack_words(stream, levels, num_codes)
    if shape.bits <= MAX_TABLE_BITS:
        rows = _look_up(_word_table(levels, shape.codes, 1 << shape.bits, words.device), words)
    else:
        low_codes = shape.codes // 2
        radix = levels**low_codes
        high_words = (1 << shape.bits) // radix + 1
        low = _word_table(levels, low_codes, radix, words.device)
        high = _word_table(levels, shape.codes - low_codes, high_words, words.device)
        rows = torch.cat((_look_up(low, words % radix), _look_up(high, words // radix)), dim=-1)
    return rows.flatten(-2)[..., :num_codes]


def _num_words(shape: WordShape, num_codes: int) -> int:
    return -(-num_codes // shape.codes)


@cache
def _word_table(levels: int, num_digits: int, num_words: int, device: torch.device) -> torch.Tensor:
    """Centroids of each word, float32 ``[num_words, num_digits]``; no word is out of range."""
    words = torch.arange(num_words, device=device)
    digits = torch.stack([words // levels**digit % levels for digit in range(num_digits)], dim=-1)
    return codebook(levels, device).centroids[digits]


def _look_up(table: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Rows of ``table [W, n]`` for ``words [...]``: float32 ``[..., n]``."""
    # A row of 8 or 16 bytes moves as one element of a wider dtype: twice as fast as row copies.
    wide = {2: torch.float64, 4: torch.complex128}.get(table.shape[1])
    flat = words.reshape(-1)
    if wide is None:
        rows = table.index_select(0, flat)
    else:
        rows = table.view(wide).view(-1).index_select(0, flat).view(torch.float32)
    return rows.view(*words.shape, table.shape[1])
