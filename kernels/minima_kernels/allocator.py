"""What the C library and the kernel are asked for: freed memory kept, huge pages for the arena."""

from __future__ import annotations

import ctypes
import mmap

import torch

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

# The largest that glibc accepts.
_MMAP_THRESHOLD_BYTES = 32 << 20
_TRIM_THRESHOLD_BYTES = 512 << 20

_HUGE_PAGE_BYTES = 2 << 20


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


def use_huge_pages(memory: torch.Tensor) -> bool:
    """Ask Linux to back a contiguous CPU tensor with huge pages; before it is first written to.

    Attention over KV pages in random places otherwise waits for a page walk at nearly each of them.

    Returns whether the kernel took it: not elsewhere than on Linux, nor for less than a huge page.
    """
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    start = -(-memory.data_ptr() // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    size = memory.data_ptr() + memory.nbytes - start
    if madvise is None or advice is None or size < _HUGE_PAGE_BYTES:
        return False
    size -= size % _HUGE_PAGE_BYTES
    return madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice) == 0
