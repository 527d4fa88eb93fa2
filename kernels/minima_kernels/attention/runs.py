"""Cached pages of an extend batch as tiles, grouped by who reads them. Host only."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from minima_kernels.attention.plan import CheckedSegment, Int64Array
from minima_kernels.geometry import KVGeometry
from minima_kernels.upload import upload


class CachedTile(NamedTuple):
    """Consecutive pages of one kind."""

    kind_index: int
    addresses: torch.Tensor  # int64 [C]
    num_tokens: int  # the last page may be open


class CachedRun(NamedTuple):
    """Tiles that the same query rows read, in order of position."""

    tiles: tuple[CachedTile, ...]
    rows: torch.Tensor | slice  # int64 [n], or all rows


def cached_runs(
    segments: Sequence[CheckedSegment],
    q_indptr: Sequence[int],
    geometry: KVGeometry,
    device: torch.device,
    tile_keys: int,
) -> tuple[CachedRun, ...]:
    """Tiles of the cached pages, grouped by who reads them."""
    num_requests = len(q_indptr) - 1
    pages_read = np.zeros(num_requests, dtype=np.int64)
    runs: list[CachedRun] = []
    tiles: list[CachedTile] = []
    readers: Int64Array | None = None

    def close() -> None:
        if readers is not None and tiles:
            rows: torch.Tensor | slice = slice(None)
            if not np.array_equal(readers, np.arange(num_requests)):
                spans = [np.arange(q_indptr[i], q_indptr[i + 1]) for i in readers]
                rows = upload(np.concatenate(spans), torch.int64, device)
            runs.append(CachedRun(tuple(tiles), rows))
            tiles.clear()

    for segment in _join(segments, geometry):
        if readers is None or not np.array_equal(readers, segment.readers):
            close()
            readers = segment.readers
        first_page = int(pages_read[segment.readers[0]])
        pages_read[segment.readers] += len(segment.addresses)
        tiles.extend(_cut(segment, first_page, geometry.page_size, device, tile_keys))
    close()
    return tuple(runs)


def _join(segments: Sequence[CheckedSegment], geometry: KVGeometry) -> list[CheckedSegment]:
    """Segments, neighbours of one kind and the same readers joined."""
    joined: list[CheckedSegment] = []
    for segment in segments:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.kind_index == segment.kind_index
            and last.last_page_len == geometry.page_size
            and np.array_equal(last.readers, segment.readers)
        ):
            addresses = np.concatenate((last.addresses, segment.addresses))
            joined[-1] = segment._replace(addresses=addresses)
        else:
            joined.append(segment)
    return joined


def _cut(
    segment: CheckedSegment,
    first_page: int,
    page_size: int,
    device: torch.device,
    tile_keys: int,
) -> list[CachedTile]:
    """Tiles of a segment, cut where the request's page count is a multiple of a tile's pages."""
    pages_per_tile = max(1, tile_keys // page_size)
    num_pages = len(segment.addresses)
    cuts = list(range(-first_page % pages_per_tile, num_pages, pages_per_tile))
    cuts = sorted({0, *cuts, num_pages})
    tiles = []
    for start, stop in pairwise(cuts):
        num_tokens = (stop - start) * page_size
        if stop == num_pages:
            num_tokens += segment.last_page_len - page_size
        addresses = upload(segment.addresses[start:stop].copy(), torch.int64, device)
        tiles.append(CachedTile(segment.kind_index, addresses, num_tokens))
    return tiles
