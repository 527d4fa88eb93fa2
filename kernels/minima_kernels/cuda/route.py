"""Which GPU work the CUDA kernels take, and why they leave the rest to torch."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch

from minima_kernels.cuda.compiler import (
    TILELANG,
    CompilerFailed,
    cache_folder,
    find_nvcc,
    find_tilelang,
)
from minima_kernels.cuda.variants import MAX_GROUP, Variant, append_variant, unsupported
from minima_kernels.formats import BF16, F16, Format
from minima_kernels.geometry import KVGeometry

logger = logging.getLogger(__name__)

NO_COMPILER = "no nvcc"


def decode_reason(
    formats: Iterable[Format], geometry: KVGeometry, device: torch.device
) -> str | None:
    """Why decode over pages of these formats cannot go through the kernels; ``None`` if it can.

    Whether the query heads fit is found when the queries are known: ``group_reason``.
    """
    used = set(formats)
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return f"compute capability {capability[0]}.{capability[1]}"
    if find_nvcc() is None:
        return NO_COMPILER
    if BF16 in used and F16 in used:
        return "BF16 and F16 pages together"
    return unsupported(used, geometry) or None


def append_reason(format_: Format, geometry: KVGeometry, dtype: torch.dtype) -> str | None:
    """Why rows of a dtype cannot be appended by the kernel that ``decode_reason`` lets through;
    ``None`` if they can.

    Whether TileLang works is found by use: the kernel is compiled here, which takes some ten
    seconds where it was not before.

    Raises:
        CacheUnusable: the folder of compiled kernels cannot be read or written.
    """
    variant = append_variant(format_, geometry, dtype)
    if variant.is_compiled:
        return None
    if find_tilelang() is None:
        return f"no TileLang {TILELANG}"
    if find_nvcc() is None:
        return NO_COMPILER
    return _failure(variant, cache_folder())


@cache
def _failure(variant: Variant, folder: Path) -> str | None:
    """Why TileLang makes no kernel for a folder of compiled ones; tried once."""
    logger.info(
        "Compiling %s with TileLang: once, some ten seconds; kept in %s", variant.source, folder
    )
    try:
        variant.compile()
    except CompilerFailed as error:
        logger.warning("TileLang %s is installed and does not work: %s", TILELANG, error)
        return f"broken TileLang {TILELANG}"
    return None


def group_reason(group_size: int) -> str | None:
    """Why this many query heads per KV head do not fit the kernels; ``None`` if they do."""
    return None if group_size <= MAX_GROUP else f"group size {group_size}"
