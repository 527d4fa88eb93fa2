"""Making the C allocator keep the memory that expanded tiles go through."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

# The largest that glibc accepts.
_MMAP_THRESHOLD_BYTES = 32 << 20
_TRIM_THRESHOLD_BYTES = 512 << 20


def keep_freed_memory() -> bool:
    """Ask glibc not to give freed blocks of up to 32 MiB back to the system.

    By default every tile's buffers are mapped, cleared page by page by the kernel, and unmapped
    again; in a decode step of many layers that took 40 % of the time. Call it once, when the
    process starts; it costs the process at most the peak of its temporaries.

    Returns whether the allocator is glibc's and took the setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
        and mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)
    )
