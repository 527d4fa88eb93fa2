"""Page formats: what the bytes of a page mean."""

from __future__ import annotations

import re

from minima_kernels.formats.base import AppendableFormat, Format, Layout, Part, Tile
from minima_kernels.formats.fp8 import FP8, FP8Format
from minima_kernels.formats.raw import BF16, F16, F32, RawFormat
from minima_kernels.formats.tq import TQ, TQ3

_NAMED: dict[str, Format] = {format_.name: format_ for format_ in (BF16, F16, F32, FP8, TQ3)}
_TQ_PATTERN = re.compile(r"tq\((\d+),(\d+)(,uncentred)?\)")


def parse_format(name: str) -> Format:
    """The format of a name: ``bf16``, ``f16``, ``f32``, ``fp8``, ``tq3`` or ``tq(a,b)``.

    ``tq(a,b,uncentred)`` leaves the key mean out. Case and spaces do not matter.

    Raises:
        ValueError: no such format, or level counts outside 2 to 16.
    """
    text = name.lower().replace(" ", "")
    if text in _NAMED:
        return _NAMED[text]
    match = _TQ_PATTERN.fullmatch(text)
    if match is None:
        raise ValueError(
            f"unknown page format {name!r}: expected one of {', '.join(_NAMED)}, or tq(a,b)"
        )
    return TQ(int(match[1]), int(match[2]), centred=match[3] is None)


__all__ = [
    "BF16",
    "F16",
    "F32",
    "FP8",
    "TQ",
    "TQ3",
    "AppendableFormat",
    "FP8Format",
    "Format",
    "Layout",
    "Part",
    "RawFormat",
    "Tile",
    "parse_format",
]
