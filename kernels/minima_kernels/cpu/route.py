"""Which CPU work the native kernels take, and why they leave the rest to torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from minima_kernels.cpu.layout import unsupported
from minima_kernels.cpu.library import MISSING, native_library
from minima_kernels.formats import Format
from minima_kernels.geometry import KVGeometry

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
    formats: Iterable[Format], geometry: KVGeometry, device: torch.device
) -> str | None:
    """Why pages of these formats cannot go through the native kernels, or ``None`` if they can.

    Empty on another device than a CPU: torch is no fallback there.
    """
    if device.type != "cpu":
        return ""
    if native_library() is None:
        return MISSING
    return unsupported(formats, geometry) or None


def reason_now(lasting_reason: str | None) -> str | None:
    """A ``fallback_reason`` found earlier, and whether the kernels are switched off by now."""
    return SWITCHED_OFF if lasting_reason is None and _switched_off else lasting_reason
