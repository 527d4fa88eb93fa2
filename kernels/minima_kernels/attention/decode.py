"""Decode attention over mixed pages: one query row per request, page-parallel.

A plan cuts the segments into *chunks* of consecutive pages with the same readers and groups chunks
of the same kind, readers count and size, so that a group is a few batched operations. A run
expands each chunk once for all its readers, takes one partial per (chunk, reader), and merges the
partials of each row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from minima_kernels.arena import gather
from minima_kernels.attention.output import AttentionOutput
from minima_kernels.attention.plan import (
    DEFAULT_SCRATCH_BYTES,
    CheckedSegment,
    Int64Array,
    Segment,
    check_segment,
)
from minima_kernels.attention.tile import Partial, attend, clear_tail
from minima_kernels.geometry import KVGeometry
from minima_kernels.kinds import PageKind
from minima_kernels.routes import ROUTES, RouteCounters

# With few readers the partials of a page are small and every page may be a chunk of its own; with
# many they would outweigh the page unless several pages share one.
_WIDE_READERS = 8
_WIDE_CHUNK_PAGES = 16

# Expanded values of a tile on a CPU: past the cache, more is slower.
_CPU_TILE_VALUES = 1 << 20


class PageEntries(NamedTuple):
    """The (page, reader) pairs of a plan, on the host."""

    addresses: torch.Tensor  # int64 [entries], granules
    rows: torch.Tensor  # int64 [entries], query row


class DecodeGroup(NamedTuple):
    """X chunks of C pages, read by R rows each, all of one kind."""

    kind_index: int
    addresses: torch.Tensor  # int64 [X, C]
    rows: torch.Tensor  # int64 [X, R]
    lengths: torch.Tensor | None  # int64 [X], valid tokens of a chunk; None where all are full
    first_partial: int  # place of its X * R partials among all
    first_entry: int  # place of its X * C * R page entries among all


@dataclass(frozen=True)
class DecodePlan:
    """Work list of one decode batch; valid for every layer until pages or rows change."""

    num_rows: int
    kinds: tuple[PageKind, ...]
    geometry: KVGeometry
    groups: tuple[DecodeGroup, ...]
    partial_rows: torch.Tensor  # int64 [partials], the row of each partial
    page_entries: PageEntries
    scratch_bytes: int


class _GroupKey(NamedTuple):
    kind_index: int
    num_readers: int
    num_pages: int


class _Chunks(NamedTuple):
    addresses: Int64Array  # [x, C]
    readers: Int64Array  # [R]
    lengths: Int64Array  # [x], valid tokens


def _cut(segment: CheckedSegment, page_size: int) -> list[_Chunks]:
    """The chunks of a segment, of one or two sizes, in order of position."""
    num_pages = len(segment.addresses)
    size = min(_WIDE_CHUNK_PAGES, num_pages) if len(segment.readers) >= _WIDE_READERS else 1
    whole = num_pages - num_pages % size
    chunks = [
        _Chunks(part, segment.readers, np.full(len(part), part.shape[1] * page_size))
        for part in (segment.addresses[:whole].reshape(-1, size), segment.addresses[None, whole:])
        if part.size
    ]
    chunks[-1].lengths[-1] -= page_size - segment.last_page_len
    return chunks


def plan_decode(
    segments: Sequence[Segment],
    num_rows: int,
    kinds: Sequence[PageKind],
    geometry: KVGeometry,
    device: torch.device | str,
    scratch_bytes: int = DEFAULT_SCRATCH_BYTES,
) -> DecodePlan:
    """Plan decode attention of ``num_rows`` requests, one query row each.

    Args:
        segments: what each request reads; its row index is its request index.
        kinds: the page kinds that segments index.
        device: of the arena.
        scratch_bytes: bound on the expanded tile and its scores (a single chunk may exceed it).

    Raises:
        ValueError: a segment with a reader, kind or page length out of range.
    """
    by_group: dict[_GroupKey, list[_Chunks]] = defaultdict(list)
    for segment in segments:
        checked = check_segment(segment, num_rows, kinds, geometry)
        if len(checked.addresses) and len(checked.readers):
            for chunks in _cut(checked, geometry.page_size):
                key = _GroupKey(checked.kind_index, len(checked.readers), chunks.addresses.shape[1])
                by_group[key].append(chunks)

    groups: list[DecodeGroup] = []
    partial_rows: list[Int64Array] = []
    entry_addresses: list[Int64Array] = []
    entry_rows: list[Int64Array] = []
    num_partials = num_entries = 0
    for (kind_index, num_readers, num_pages), parts in by_group.items():
        addresses = np.concatenate([part.addresses for part in parts])
        rows = np.repeat(
            np.stack([part.readers for part in parts]),
            [len(part.lengths) for part in parts],
            axis=0,
        )
        lengths = np.concatenate([part.lengths for part in parts])
        is_full = bool((lengths == num_pages * geometry.page_size).all())
        group = DecodeGroup(
            kind_index,
            torch.from_numpy(addresses).to(device),
            torch.from_numpy(rows).to(device),
            None if is_full else torch.from_numpy(lengths).to(device),
            num_partials,
            num_entries,
        )
        groups.append(group)
        num_partials += rows.size
        num_entries += addresses.size * num_readers
        partial_rows.append(rows.ravel())
        shape = len(addresses), num_pages, num_readers
        entry_addresses.append(np.broadcast_to(addresses[:, :, None], shape).ravel())
        entry_rows.append(np.broadcast_to(rows[:, None], shape).ravel())

    empty = np.empty(0, dtype=np.int64)
    return DecodePlan(
        num_rows,
        tuple(kinds),
        geometry,
        tuple(groups),
        torch.from_numpy(np.concatenate([empty, *partial_rows])).to(device),
        PageEntries(
            torch.from_numpy(np.concatenate([empty, *entry_addresses])),
            torch.from_numpy(np.concatenate([empty, *entry_rows])),
        ),
        scratch_bytes,
    )


def run_decode(
    plan: DecodePlan,
    q: torch.Tensor,
    arena: torch.Tensor,
    layer: int,
    scale: float,
    *,
    page_mass: bool = False,
    routes: RouteCounters = ROUTES,
) -> AttentionOutput:
    """Attend from each row to its pages, in float32.

    Args:
        q: ``[num_rows, Hq, D]``, rotated.
        arena: uint8 ``[bytes]``.
        layer: which layer's share of the pages to read.
        scale: factor on the scores.
        page_mass: also return the attention mass of every page entry.

    Raises:
        ValueError: ``q`` does not fit the plan.
    """
    geometry = plan.geometry
    heads = geometry.num_kv_heads
    if q.shape[0] != plan.num_rows or q.shape[1] % heads or q.shape[2] != geometry.head_dim:
        raise ValueError(f"queries {list(q.shape)} do not fit {plan.num_rows} rows of {geometry}")
    routes.count("decode", "torch")
    # GQA: the queries that share a KV head become further rows of it.
    grouped = (q.float() * scale).view(plan.num_rows, heads, -1, geometry.head_dim)
    partials = _Partials(plan)
    for group in plan.groups:
        format_ = plan.kinds[group.kind_index].formats[layer]
        offset = plan.kinds[group.kind_index].layer_offset(layer, geometry)
        size = format_.layer_bytes(geometry)
        num_chunks, num_pages = group.addresses.shape
        step = _chunks_per_tile(plan, group, grouped.shape[2])
        for first in range(0, num_chunks, step):
            chunks = slice(first, first + step)
            data = gather(arena, group.addresses[chunks].flatten(), offset, size)
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


def _chunks_per_tile(plan: DecodePlan, group: DecodeGroup, group_size: int) -> int:
    geometry = plan.geometry
    num_pages, num_rows = group.addresses.shape[1], group.rows.shape[1] * group_size
    num_values = geometry.values_per_layer * num_pages
    num_scores = geometry.page_size * geometry.num_kv_heads * num_pages * num_rows
    # K and V, their words, and the scores with their products.
    chunk_bytes = 8 * num_values + 12 * num_scores
    limit = plan.scratch_bytes
    if group.addresses.device.type == "cpu":
        limit = min(limit, 8 * _CPU_TILE_VALUES)
    return max(1, limit // chunk_bytes)


class _Partials:
    """The partials of a run, in the order of the plan, and their merge."""

    def __init__(self, plan: DecodePlan) -> None:
        self.plan = plan
        self._maximum: list[torch.Tensor] = []  # [partials, Hq]
        self._total: list[torch.Tensor] = []  # [partials, Hq]
        self._out: list[torch.Tensor] = []  # [partials, Hq, D]
        self._page_totals: list[torch.Tensor] = []  # [entries, Hq]

    def append(self, partial: Partial, num_readers: int) -> None:
        """Add the partials of a tile, heads and readers back in the order of query rows."""
        heads = self.plan.geometry.num_kv_heads

        def by_row(x: torch.Tensor) -> torch.Tensor:
            """``[X * H, R * G, ...]`` to ``[X, R, H, G, ...]``."""
            return x.unflatten(1, (num_readers, -1)).unflatten(0, (-1, heads)).transpose(1, 2)

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
        rows = self.plan.partial_rows
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
        factors = torch.exp(maximum - lse[self.plan.partial_rows])
        for group in self.plan.groups:
            num_chunks, num_pages = group.addresses.shape
            num_readers = group.rows.shape[1]
            factor = factors[group.first_partial :][: num_chunks * num_readers]
            entries = mass[group.first_entry :][: num_chunks * num_pages * num_readers]
            entries.view(num_chunks, num_pages, num_readers, -1).mul_(
                factor.view(num_chunks, 1, num_readers, -1)
            )
        return mass
