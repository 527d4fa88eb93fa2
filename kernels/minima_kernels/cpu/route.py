"""Which CPU work the native kernels take, and why they leave the rest to torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minima_kernels.cpu.layout import unsupported
from minima_kernels.cpu.library import MISSING, native_library
from minima_kernels.geometry import KVGeometry
from minima_kernels.kinds import PageKind


def fallback_reason(
    kinds: Sequence[PageKind], geometry: KVGeometry, device: torch.device | str
) -> str | None:
    """Why pages of these kinds cannot go through the native kernels, or ``None`` if they can.

    Empty on another device than a CPU: torch is no fallback there.
    """
    if torch.device(device).type != "cpu":
        return ""
    if native_library() is None:
        return MISSING
    return unsupported(tuple(kinds), geometry) or None
