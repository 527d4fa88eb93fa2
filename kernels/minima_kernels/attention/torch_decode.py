"""Decode attention in torch, page-parallel: the route of whatever no kernel takes.

Segments are cut into *chunks* of consecutive pages with the same readers; chunks of the same kind,
readers count and size make a *group*, so that a group is a few batched operations. A run expands
each chunk once for all its readers, takes one partial per (chunk, reader), and merges the partials
of each row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from minima_kernels.attention.output import AttentionOutput
from minima_kernels.attention.plan import CheckedSegment, Int64Array
from minima_kernels.attention.segments import SegmentTable, concatenate, ranges
from minima_kernels.attention.tile import Partial, attend, clear_tail
from minima_kernels.geometry import KVGeometry
from minima_kernels.kinds import PageKind
from minima_kernels.shares import read_shares
from minima_kernels.upload import upload

# With few readers the partials of a page are small and every page may be a chunk of its own; with
# many they would outweigh the page unless several pages share one.
_WIDE_READERS = 8
_WIDE_CHUNK_PAGES = 16

# Expanded values of a tile on a CPU: past the cache, more is slower.
_CPU_TILE_VALUES = 1 << 20


class ChunkGroup(NamedTuple):
    """X chunks of C pages, read by R rows each, all of one kind."""

    kind_index: int
    addresses: torch.Tensor  # int64 [X, C]
    rows: torch.Tensor  # int64 [X, R]
    lengths: torch.Tensor | None  # int64 [X], valid tokens of a chunk; None where all are full
    first_partial: int  # place of its X * R partials among all
    first_entry: int  # place of its X * C * R page entries among all, groups in order


class ChunkGroups(NamedTuple):
    """Work list of the torch route."""

    groups: tuple[ChunkGroup, ...]
    partial_rows: torch.Tensor  # int64 [partials], the row of each partial
    entry_places: torch.Tensor  # int64 [entries], place in the plan of each entry of the groups


class _GroupKey(NamedTuple):
    kind_index: int
    num_readers: int
    num_pages: int


class _Chunks(NamedTuple):
    addresses: Int64Array  # [x, C]
    rows: Int64Array  # [x, R]
    lengths: Int64Array  # [x], valid tokens
    first_entries: Int64Array  # [x], place of the chunk's page entries in the plan


def group_chunks(table: SegmentTable, geometry: KVGeometry, device: torch.device) -> ChunkGroups:
    """Cut and group the segments of a decode plan."""
    groups: list[ChunkGroup] = []
    partial_rows: list[Int64Array] = []
    entry_places: list[Int64Array] = []
    num_partials = num_entries = 0
    for key, chunks in _grouped(table, geometry.page_size):
        is_full = bool((chunks.lengths == key.num_pages * geometry.page_size).all())
        group = ChunkGroup(
            key.kind_index,
            upload(chunks.addresses, torch.int64, device),
            upload(chunks.rows, torch.int64, device),
            None if is_full else upload(chunks.lengths, torch.int64, device),
            num_partials,
            num_entries,
        )
        groups.append(group)
        num_partials += chunks.rows.size
        num_entries += chunks.addresses.size * key.num_readers
        partial_rows.append(chunks.rows.ravel())
        within = np.arange(key.num_pages * key.num_readers)
        entry_places.append((chunks.first_entries[:, None] + within).ravel())
    return ChunkGroups(
        tuple(groups),
        upload(concatenate(partial_rows), torch.int64, device),
        upload(concatenate(entry_places), torch.int64, device),
    )


def _grouped(table: SegmentTable, page_size: int) -> Iterator[tuple[_GroupKey, _Chunks]]:
    """All chunks, those of equal kind, readers count and size together."""
    num_readers = table.num_readers
    is_wide = num_readers >= _WIDE_READERS
    # Most segments are private to a request: their pages become chunks all at once.
    codes = np.where(is_wide, -1, table.kind_index * _WIDE_READERS + num_readers)
    for code in np.unique(codes).tolist():
        if code >= 0:
            key = _GroupKey(code // _WIDE_READERS, code % _WIDE_READERS, 1)
            yield key, _single_pages(table, np.flatnonzero(codes == code), page_size)
    if not is_wide.any():
        return
    by_group: dict[_GroupKey, list[_Chunks]] = defaultdict(list)
    first_entries = table.first_entries().tolist()
    for index, segment in enumerate(table.rows()):
        if is_wide[index]:
            for chunks in _cut(segment, page_size, first_entries[index]):
                key = _GroupKey(segment.kind_index, len(segment.readers), chunks.addresses.shape[1])
                by_group[key].append(chunks)
    for key, parts in by_group.items():
        yield key, _Chunks(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def _single_pages(table: SegmentTable, chosen: Int64Array, page_size: int) -> _Chunks:
    """Every page of some segments, which have equally many readers, as a chunk of its own."""
    counts, first_reader = table.num_pages[chosen], table.reader_start[chosen]
    num_readers = int(table.num_readers[chosen[0]])
    rows = table.readers[first_reader[:, None] + np.arange(num_readers)]
    pages = ranges(table.page_start[chosen], counts)
    lengths = np.full(len(pages), page_size)
    lengths[np.cumsum(counts) - 1] = table.last_page_len[chosen]
    first_entries = np.repeat(
        table.first_entries()[chosen] - table.page_start[chosen] * num_readers, counts
    )
    return _Chunks(
        table.addresses[pages][:, None],
        np.repeat(rows, counts, axis=0),
        lengths,
        first_entries + pages * num_readers,
    )


def _cut(segment: CheckedSegment, page_size: int, first_entry: int) -> list[_Chunks]:
    """The chunks of a segment with many readers, of one or two sizes, in order of position."""
    num_pages, num_readers = len(segment.addresses), len(segment.readers)
    size = min(_WIDE_CHUNK_PAGES, num_pages)
    whole = num_pages - num_pages % size
    parts = (
        (segment.addresses[:whole].reshape(-1, size), np.arange(0, whole, size)),
        (segment.addresses[None, whole:], np.array([whole])),
    )
    chunks = [
        _Chunks(
            part,
            np.broadcast_to(segment.readers, (len(part), num_readers)),
            np.full(len(part), part.shape[1] * page_size),
            first_entry + first_pages * num_readers,
        )
        for part, first_pages in parts
        if part.size
    ]
    chunks[-1].lengths[-1] -= page_size - segment.last_page_len
    return chunks


def run_torch_decode(
    work: ChunkGroups,
    q: torch.Tensor,
    arena: torch.Tensor,
    layer: int,
    scale: float,
    page_mass: bool,
    kinds: Sequence[PageKind],
    geometry: KVGeometry,
    scratch_bytes: int,
) -> AttentionOutput:
    """``run_decode`` on grouped chunks; shapes are checked by the caller."""
    heads = geometry.num_kv_heads
    # GQA: the queries that share a KV head become further rows of it.
    grouped = (q.float() * scale).view(q.shape[0], heads, -1, geometry.head_dim)
    partials = _Partials(work, heads)
    for group in work.groups:
        format_ = kinds[group.kind_index].formats[layer]
        offset = kinds[group.kind_index].layer_offset(layer, geometry)
        size = format_.layer_bytes(geometry)
        num_chunks, num_pages = group.addresses.shape
        step = _chunks_per_tile(group, grouped.shape[2], geometry, scratch_bytes)
        for first in range(0, num_chunks, step):
            chunks = slice(first, first + step)
            addresses = group.addresses[chunks].flatten()
            data = read_shares(arena, addresses, format_, offset, geometry)
            tile = format_.expand(data.view(-1, num_pages, size), geometry)
            masked = None
            if group.lengths is not None:
                slots = torch.arange(num_pages * geometry.page_size, device=q.device)
                invalid = slots >= group.lengths[chunks, None]
                clear_tail(tile, invalid)
                masked = invalid[:, None, None]
            # [X, R, H, G, D] to [X * H, R * G, D]
            queries = grouped[group.rows[chunks]].transpose(1, 2).flatten(2, 3).flatten(0, 1)
            partial = attend(queries, tile, masked, num_pages if page_mass else None)
            partials.append(partial, group.rows.shape[1])
    return partials.merge(q)


def _chunks_per_tile(
    group: ChunkGroup, group_size: int, geometry: KVGeometry, scratch_bytes: int
) -> int:
    num_pages, num_rows = group.addresses.shape[1], group.rows.shape[1] * group_size
    num_values = geometry.values_per_layer * num_pages
    num_scores = geometry.page_size * geometry.num_kv_heads * num_pages * num_rows
    # K and V, their words, and the scores with their products.
    chunk_bytes = 8 * num_values + 12 * num_scores
    limit = scratch_bytes
    if group.addresses.device.type == "cpu":
        limit = min(limit, 8 * _CPU_TILE_VALUES)
    return max(1, limit // chunk_bytes)


class _Partials:
    """The partials of a run, in the order of the plan, and their merge."""

    def __init__(self, work: ChunkGroups, heads: int) -> None:
        self.work = work
        self.heads = heads
        self._maximum: list[torch.Tensor] = []  # [partials, Hq]
        self._total: list[torch.Tensor] = []  # [partials, Hq]
        self._out: list[torch.Tensor] = []  # [partials, Hq, D]
        self._page_totals: list[torch.Tensor] = []  # [entries, Hq]

    def append(self, partial: Partial, num_readers: int) -> None:
        """Add the partials of a tile, heads and readers back in the order of query rows."""

        def by_row(x: torch.Tensor) -> torch.Tensor:
            """``[X * H, R * G, ...]`` to ``[X, R, H, G, ...]``."""
            return x.unflatten(1, (num_readers, -1)).unflatten(0, (-1, self.heads)).transpose(1, 2)

        self._maximum.append(by_row(partial.maximum).flatten(0, 1).flatten(1, 2))
        self._total.append(by_row(partial.total).flatten(0, 1).flatten(1, 2))
        self._out.append(by_row(partial.out).flatten(0, 1).flatten(1, 2))
        if partial.page_totals is not None:
            by_page = by_row(partial.page_totals).movedim(-1, 1)
            self._page_totals.append(by_page.flatten(0, 2).flatten(1, 2))

    def merge(self, q: torch.Tensor) -> AttentionOutput:
        """m = max m_j; l = sum e^(m_j - m) l_j; O = sum e^(m_j - m) O_j / l, for every row."""
        maximum = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
        if not self._maximum:
            mass = q.new_empty((0, q.shape[1]), dtype=torch.float32)
            return AttentionOutput(torch.zeros_like(q), maximum, mass)
        rows = self.work.partial_rows
        partial_maximum = torch.cat(self._maximum)
        row_of = rows[:, None].expand_as(partial_maximum)
        maximum.scatter_reduce_(0, row_of, partial_maximum, "amax")
        weights = torch.exp(partial_maximum - maximum[rows])
        total = torch.zeros_like(maximum)
        total.scatter_add_(0, row_of, torch.cat(self._total) * weights)
        scaled = (torch.cat(self._out) * weights[..., None]).flatten(1)
        out = scaled.new_zeros(len(maximum), scaled.shape[1])
        out.scatter_add_(0, rows[:, None].expand_as(scaled), scaled)
        # A row's total is at least 1, or 0 for a row without pages: its output stays zero.
        out = out.view(q.shape) / total.clamp_min(1.0)[..., None]
        lse = maximum + total.log()
        return AttentionOutput(out.to(q.dtype), lse, self._page_mass(partial_maximum, lse))

    def _page_mass(self, maximum: torch.Tensor, lse: torch.Tensor) -> torch.Tensor | None:
        if not self._page_totals:
            return None
        mass = torch.cat(self._page_totals)
        factors = torch.exp(maximum - lse[self.work.partial_rows])
        for group in self.work.groups:
            num_chunks, num_pages = group.addresses.shape
            num_readers = group.rows.shape[1]
            factor = factors[group.first_partial :][: num_chunks * num_readers]
            entries = mass[group.first_entry :][: num_chunks * num_pages * num_readers]
            entries.view(num_chunks, num_pages, num_readers, -1).mul_(
                factor.view(num_chunks, 1, num_readers, -1)
            )
        return torch.empty_like(mass).index_copy_(0, self.work.entry_places, mass)
