"""Which CPU work the native kernels take, and why they leave the rest to torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from minima_kernels.cpu.layout import unsupported
from minima_kernels.cpu.library import MISSING, native_library
from minima_kernels.geometry import KVGeometry
from minima_kernels.kinds import PageKind

SWITCHED_OFF = "native kernels switched off"

_switched_off = False


@contextmanager
def torch_only() -> Iterator[None]:
    """Keep everything on the torch route, to compare with it."""
    global _switched_off
    before, _switched_off = _switched_off, True
    try:
        yield
    finally:
        _switched_off = before


def fallback_reason(
    kinds: tuple[PageKind, ...], geometry: KVGeometry, device: torch.device
) -> str | None:
    """Why pages of these kinds cannot go through the native kernels, or ``None`` if they can.

    Empty on another device than a CPU: torch is no fallback there.
    """
    if device.type != "cpu":
        return ""
    if _switched_off:
        return SWITCHED_OFF
    return _lasting_reason(kinds, geometry)


@cache
def _lasting_reason(kinds: tuple[PageKind, ...], geometry: KVGeometry) -> str | None:
    if native_library() is None:
        return MISSING
    return unsupported(kinds, geometry) or None
