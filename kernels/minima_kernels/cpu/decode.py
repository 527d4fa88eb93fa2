"""Decode attention by the native kernels."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np
import torch

from minima_kernels.attention.output import AttentionOutput
from minima_kernels.attention.plan import Int64Array
from minima_kernels.attention.segments import SegmentTable, offsets, ranges
from minima_kernels.cpu import abi
from minima_kernels.cpu.layout import IntArray, layer_formats, native_geometry
from minima_kernels.cpu.library import native_library
from minima_kernels.geometry import GRANULE, KVGeometry
from minima_kernels.kinds import PageKind

# Items per thread: enough to even out their lengths, few enough to keep partials cheap.
_ITEMS_PER_THREAD = 4

# A partial costs about as much as a few dozen tokens.
_MIN_ITEM_TOKENS = 256

# Cost of a token for one more reader, in units of reading and expanding it.
_READER_COST = 0.5


class NativeDecode(NamedTuple):
    """A decode plan flattened for the kernels; ``arrays`` keeps alive what ``plan`` points to."""

    plan: abi.DecodePlan
    arrays: tuple[IntArray, ...]
    num_rows: int
    num_partials: int
    layers: tuple[ctypes.Array[abi.Format], ...]
    kinds: tuple[PageKind, ...]
    geometry: KVGeometry


class _Items(NamedTuple):
    segment: Int64Array  # [items]
    first: Int64Array  # [items], page within the segment
    stop: Int64Array  # [items]


def flatten_decode(
    table: SegmentTable,
    num_rows: int,
    kinds: tuple[PageKind, ...],
    geometry: KVGeometry,
    threads: int,
) -> NativeDecode:
    """Cut segments into items of about equal cost and lay them out in arrays.

    Page entries are numbered segment by segment, page by page, reader by reader.
    """
    segment, first, stop = _cut(table, geometry, threads)
    layers = layer_formats(kinds, geometry)
    num_readers = table.num_readers[segment]
    reader_start = np.cumsum(num_readers) - num_readers
    readers = table.readers[ranges(table.reader_start[segment], num_readers)]
    # Partials are numbered as readers are; a row's partials keep the order of its segments.
    row_partials = np.argsort(readers, kind="stable")
    row_partial = offsets(np.bincount(readers, minlength=num_rows))
    is_end = stop == table.num_pages[segment]
    last_page_len = np.where(is_end, table.last_page_len[segment], geometry.page_size)
    first_entries = table.first_entries()
    arrays: dict[str, IntArray] = {
        "pages": table.addresses * GRANULE,
        "item_page": offsets(stop - first),
        "item_kind": table.kind_index[segment].astype(np.int32),
        "item_last": last_page_len.astype(np.int32),
        "item_reader": reader_start,
        "item_readers": num_readers.astype(np.int32),
        "item_partial": reader_start,
        "item_entry": first_entries[segment] + first * num_readers,
        "readers": readers,
        "row_partial": row_partial,
        "row_partials": row_partials,
    }
    plan = abi.DecodePlan(
        num_rows=num_rows,
        num_items=len(segment),
        num_partials=len(readers),
        **{name: array.__array_interface__["data"][0] for name, array in arrays.items()},
    )
    return NativeDecode(
        plan, tuple(arrays.values()), num_rows, len(readers), layers, kinds, geometry
    )


def run_native_decode(
    flat: NativeDecode,
    q: torch.Tensor,
    arena: torch.Tensor,
    layer: int,
    scale: float,
    entry_rows: torch.Tensor | None,
    threads: int,
) -> AttentionOutput:
    """``run_decode`` on a flattened plan; shapes are checked by the caller.

    With ``entry_rows``, the row of each page entry (int64), also their attention mass.
    """
    native = native_library()
    assert native is not None
    num_heads, dim = q.shape[1], q.shape[2]
    queries = q.contiguous().float()
    out = torch.empty(flat.num_rows, num_heads, dim)
    lse = torch.empty(flat.num_rows, num_heads)
    mass = None if entry_rows is None else torch.empty(len(entry_rows), num_heads)
    partials = torch.empty(flat.num_partials * num_heads * (dim + 2))
    native.minima_decode(
        ctypes.byref(flat.plan),
        native_geometry(flat.geometry, num_heads // flat.geometry.num_kv_heads),
        flat.layers[layer],
        queries.data_ptr(),
        arena.data_ptr(),
        scale,
        partials.data_ptr(),
        out.data_ptr(),
        lse.data_ptr(),
        None if mass is None else mass.data_ptr(),
        None if entry_rows is None else entry_rows.data_ptr(),
        0 if entry_rows is None else len(entry_rows),
        threads,
    )
    return AttentionOutput(out.to(q.dtype), lse, mass)


def _cut(table: SegmentTable, geometry: KVGeometry, threads: int) -> _Items:
    """Items of about equal cost, in the order of the segments."""
    num_pages = table.num_pages
    costs = num_pages * (1 + _READER_COST * (table.num_readers - 1))
    target = costs.sum() * geometry.num_kv_heads / (threads * _ITEMS_PER_THREAD)
    min_pages = max(1, _MIN_ITEM_TOKENS // geometry.page_size)
    counts = np.rint(costs / target).astype(np.int64)
    counts = np.maximum(np.minimum(counts, num_pages // min_pages), 1)
    # Whole groups of pages that share a tile: see attend_pages in native/attend.inl.
    steps = np.where(counts > 1, -(-num_pages // counts // 4) * 4, num_pages)
    num_items = -(-num_pages // steps)
    segment = np.repeat(np.arange(len(num_pages)), num_items)
    first = ranges(np.zeros_like(num_items), num_items) * steps[segment]
    return _Items(segment, first, np.minimum(first + steps[segment], num_pages[segment]))
