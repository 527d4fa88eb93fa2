"""The byte arena that holds the pages of every kind, and how large it is."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch

from minima_kernels import GRANULE, KVGeometry, use_huge_pages
from minima_radix import PageKindSpec, choose_slab_granules
from sglang_minima.cache.profile import KvProfile
from sglang_minima.server_args import ServerArgs
from sglang_minima.settings import ArgumentError

_CPU_LIMIT = 4 << 30
_CPU_SHARE = 0.25


@dataclass(frozen=True)
class KVArena:
    """One buffer; addresses are in granules of 128 bytes (see `minima_kernels`)."""

    buffer: torch.Tensor
    """uint8 [num_bytes]"""
    geometry: KVGeometry
    profile: KvProfile

    @property
    def num_bytes(self) -> int:
        return self.buffer.numel()

    @property
    def granules(self) -> int:
        return self.num_bytes // GRANULE

    @classmethod
    def allocate(
        cls, args: ServerArgs, geometry: KVGeometry, profile: KvProfile, device: torch.device
    ) -> KVArena:
        """Allocates the arena.

        Raises:
            ArgumentError: the memory asked for does not hold even a few pages.
        """
        granules = arena_bytes(args, geometry, profile, device) // GRANULE
        check_memory(args, granules * GRANULE, device)
        smallest = 4 * max(kind.granules(geometry) for kind in profile.kinds)
        if granules < smallest:
            raise ArgumentError(
                f"the KV arena of {granules * GRANULE} bytes holds fewer than 4 pages of "
                f"{smallest // 4 * GRANULE} bytes: raise --kv-cache-memory or --max-total-tokens"
            )
        buffer = torch.zeros(granules * GRANULE, dtype=torch.uint8, device=device)
        if device.type == "cpu":
            use_huge_pages(buffer)
        return cls(buffer, geometry, profile)


def arena_bytes(
    args: ServerArgs, geometry: KVGeometry, profile: KvProfile, device: torch.device
) -> int:
    """Bytes of the arena for these settings (before rounding to granules)."""
    if args.kv_cache_memory is not None:
        return args.kv_cache_memory
    if args.max_total_tokens is not None:
        # In Recent pages: that many tokens fit whatever tier they are in.
        return _granules_for(args.max_total_tokens, geometry, profile) * GRANULE
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        used = total - free
        budget = int(total * args.mem_fraction_static) - used
        if budget <= 0:
            raise ArgumentError(
                "--mem-fraction-static leaves no GPU memory for the KV arena after the weights"
            )
        return budget
    return min(_CPU_LIMIT, int(psutil.virtual_memory().available * _CPU_SHARE))


def check_memory(args: ServerArgs, num_bytes: int, device: torch.device) -> None:
    """Raises `ArgumentError` for an arena that is larger than the memory that is free."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = psutil.virtual_memory().available
    if num_bytes > free:
        flag = "--max-total-tokens" if args.kv_cache_memory is None else "--kv-cache-memory"
        raise ArgumentError(
            f"{flag}: a KV arena of {num_bytes / 2**30:.1f} GiB does not fit into the "
            f"{free / 2**30:.1f} GiB of memory that are free"
        )


def _granules_for(tokens: int, geometry: KVGeometry, profile: KvProfile) -> int:
    """Granules of the smallest arena that holds a sequence of so many tokens in any tier: see
    `PrefixCache.capacity_tokens`."""
    kinds = [PageKindSpec(kind.name, kind.granules(geometry)) for kind in profile.kinds]
    page = profile.recent.granules(geometry)
    pages = -(-tokens // geometry.page_size)
    granules = max(pages * page, *(kind.granules for kind in kinds))
    while True:
        slab = choose_slab_granules(kinds, granules)
        slabs = -(-pages // (slab // page)) + (1 if profile.compresses else 0)
        if slabs * slab <= granules:
            return granules
        granules = slabs * slab
