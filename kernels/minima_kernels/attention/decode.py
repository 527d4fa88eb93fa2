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
from minima_kernels.attention.tile import Partial, attend, mask_tail
from minima_kernels.geometry import KVGeometry
from minima_kernels.kinds import PageKind
from minima_kernels.routes import ROUTES, RouteCounters

# With few rows per page the partials are small and every page may be a chunk of its own; with
# many, partials outweigh the pages unless several pages share one.
_WIDE_READERS = 8
_WIDE_CHUNK_SIZES = (16, 4, 1)
_NARROW_CHUNK_SIZES = (1,)

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
    lengths: torch.Tensor | None  # int64 [X], valid tokens of a chunk where some are not full
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


def _cut(
    segment: CheckedSegment, page_size: int
) -> list[tuple[tuple[int, int, int, bool], Int64Array]]:
    """Chunks of a segment: (kind, readers, chunk size, partly full) and addresses ``[x, C]``."""
    key = segment.kind_index, len(segment.readers)
    sizes = _WIDE_CHUNK_SIZES if key[1] >= _WIDE_READERS else _NARROW_CHUNK_SIZES
    is_open = segment.last_page_len < page_size
    first, stop = 0, len(segment.addresses) - is_open
    chunks = []
    for size in sizes:
        count = (stop - first) // size
        if count:
            part = segment.addresses[first : first + count * size].reshape(count, size)
            chunks.append(((*key, size, False), part))
            first += count * size
    if is_open:
        chunks.append(((*key, 1, True), segment.addresses[-1:, None]))
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
    chunks: dict[tuple[int, int, int, bool], list[tuple[Int64Array, CheckedSegment]]]
    chunks = defaultdict(list)
    for segment in segments:
        checked = check_segment(segment, num_rows, kinds, geometry)
        if len(checked.addresses) and len(checked.readers):
            for key, addresses in _cut(checked, geometry.page_size):
                chunks[key].append((addresses, checked))

    groups: list[DecodeGroup] = []
    partial_rows: list[Int64Array] = []
    entry_addresses: list[Int64Array] = []
    entry_rows: list[Int64Array] = []
    num_partials = num_entries = 0
    for (kind_index, num_readers, size, is_open), parts in chunks.items():
        addresses = np.concatenate([part for part, _ in parts])
        counts = [len(part) for part, _ in parts]
        rows = np.repeat(np.stack([segment.readers for _, segment in parts]), counts, axis=0)
        lengths = None
        if is_open:
            last = np.array([segment.last_page_len for _, segment in parts])
            lengths = torch.from_numpy(last).to(device)
        group = DecodeGroup(
            kind_index,
            torch.from_numpy(addresses).to(device),
            torch.from_numpy(rows).to(device),
            lengths,
            num_partials,
            num_entries,
        )
        groups.append(group)
        num_partials += rows.size
        num_entries += addresses.size * num_readers
        partial_rows.append(rows.ravel())
        shape = (len(addresses), size, num_readers)
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
    partials = _Partials(plan, q, page_mass)
    for group in plan.groups:
        format_ = plan.kinds[group.kind_index].formats[layer]
        offset = plan.kinds[group.kind_index].layer_offset(layer, geometry)
        size = format_.layer_bytes(geometry)
        num_chunks, num_pages = group.addresses.shape
        step = _chunks_per_tile(plan, group, grouped.shape[2])
        for first in range(0, num_chunks, step):
            addresses = group.addresses[first : first + step]
            rows = group.rows[first : first + step]
            data = gather(arena, addresses.flatten(), offset, size)
            tile = format_.expand(data.view(-1, num_pages, size), geometry)
            masked = None
            if group.lengths is not None:
                lengths = group.lengths[first : first + step, None]
                invalid = torch.arange(geometry.page_size, device=q.device) >= lengths
                tile = mask_tail(tile, invalid)
                masked = invalid[:, None, None]
            # [X, R, H, G, D] to [X, H, R * G, D]
            queries = grouped[rows].transpose(1, 2).flatten(2, 3)
            partials.store(
                group,
                first,
                attend(queries, tile, masked, num_pages if page_mass else None),
            )
    return partials.merge(q.dtype)


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
    """The partials of a run, and their merge."""

    def __init__(self, plan: DecodePlan, q: torch.Tensor, page_mass: bool) -> None:
        self.plan = plan
        self.heads = plan.geometry.num_kv_heads
        count = plan.partial_rows.numel()
        self.maximum = q.new_empty(count, q.shape[1], dtype=torch.float32)
        self.total = torch.empty_like(self.maximum)
        self.out = q.new_empty(count, q.shape[1], q.shape[2], dtype=torch.float32)
        self.page_totals: torch.Tensor | None = None
        if page_mass:
            entries = plan.page_entries.rows.numel()
            self.page_totals = q.new_empty(entries, q.shape[1], dtype=torch.float32)

    def store(self, group: DecodeGroup, first_chunk: int, partial: Partial) -> None:
        """Store the partials of a tile: heads and readers back in the order of query rows."""
        num_readers = group.rows.shape[1]

        def rows_first(x: torch.Tensor) -> torch.Tensor:
            """``[X, H, R * G, ...]`` to ``[X, R, H, G, ...]``."""
            return x.unflatten(2, (num_readers, -1)).transpose(1, 2)

        def place(target: torch.Tensor, first: int, x: torch.Tensor) -> None:
            """Copy ``x [..., H, G, *rest]`` over the rows of ``target [rows, Hq, *rest]``."""
            count = x.numel() // target[0].numel()
            target[first : first + count].view(x.shape).copy_(x)

        first = group.first_partial + first_chunk * num_readers
        place(self.maximum, first, rows_first(partial.maximum))
        place(self.total, first, rows_first(partial.total))
        place(self.out, first, rows_first(partial.out))
        if self.page_totals is not None:
            assert partial.page_totals is not None
            per_page = rows_first(partial.page_totals).movedim(-1, 1)
            first = group.first_entry + first_chunk * group.addresses.shape[1] * num_readers
            place(self.page_totals, first, per_page)

    def merge(self, dtype: torch.dtype) -> AttentionOutput:
        """m = max m_j; l = sum e^(m_j - m) l_j; O = sum e^(m_j - m) O_j / l, for every row."""
        rows = self.plan.partial_rows
        num_rows, num_heads = self.plan.num_rows, self.maximum.shape[1]
        row_of = rows[:, None].expand_as(self.maximum)
        maximum = self.maximum.new_full((num_rows, num_heads), -torch.inf)
        maximum.scatter_reduce_(0, row_of, self.maximum, "amax")
        weights = torch.exp(self.maximum - maximum[rows])
        total = torch.zeros_like(maximum).scatter_add_(0, row_of, self.total * weights)
        scaled = self.out.mul_(weights[..., None]).flatten(1)
        out = scaled.new_zeros(num_rows, scaled.shape[1])
        out.scatter_add_(0, rows[:, None].expand_as(scaled), scaled)
        # Rows without pages have a total of zero, an output of zero, and a maximum of -inf.
        out = out.view(num_rows, num_heads, -1) / total.clamp_min(1e-38)[..., None]
        lse = maximum + total.log()
        return AttentionOutput(out.to(dtype), lse, self._page_mass(lse))

    def _page_mass(self, lse: torch.Tensor) -> torch.Tensor | None:
        if self.page_totals is None:
            return None
        factors = torch.exp(self.maximum - lse[self.plan.partial_rows])
        for group in self.plan.groups:
            num_chunks, num_pages = group.addresses.shape
            num_readers = group.rows.shape[1]
            count = num_chunks * num_readers
            factor = factors[group.first_partial : group.first_partial + count]
            entries = self.page_totals[group.first_entry :][: count * num_pages]
            shape = num_chunks, num_pages, num_readers, -1
            entries.view(shape).mul_(factor.view(num_chunks, 1, num_readers, -1))
        return self.page_totals
