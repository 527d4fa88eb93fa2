"""Which GPU work the CUDA kernels take, and why they leave the rest to torch."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from minima_kernels.cuda.compiler import TILELANG, find_nvcc, find_tilelang
from minima_kernels.cuda.variants import MAX_GROUP, append_variant, unsupported
from minima_kernels.formats import BF16, F16, Format
from minima_kernels.geometry import KVGeometry

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
    ``None`` if they can."""
    if find_tilelang() or append_variant(format_, geometry, dtype).is_compiled:
        return None
    return f"no TileLang {TILELANG}"


def group_reason(group_size: int) -> str | None:
    """Why this many query heads per KV head do not fit the kernels; ``None`` if they do."""
    return None if group_size <= MAX_GROUP else f"group size {group_size}"
