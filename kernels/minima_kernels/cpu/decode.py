"""Decode attention by the native kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from minima_kernels.attention.output import AttentionOutput
from minima_kernels.attention.plan import CheckedSegment, Int64Array
from minima_kernels.cpu import abi
from minima_kernels.cpu.layout import layer_formats, native_geometry
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
    arrays: tuple[np.ndarray, ...]
    num_rows: int
    num_partials: int
    num_entries: int
    kinds: tuple[PageKind, ...]
    geometry: KVGeometry


class _Item(NamedTuple):
    segment: CheckedSegment
    first: int
    stop: int
    first_entry: int


def flatten_decode(
    segments: Sequence[CheckedSegment],
    num_rows: int,
    kinds: tuple[PageKind, ...],
    geometry: KVGeometry,
    threads: int,
) -> NativeDecode:
    """Cut segments into items of about equal cost and lay them out in arrays.

    Page entries are numbered segment by segment, page by page, reader by reader.
    """
    items = _cut(segments, geometry, threads)
    num_readers = np.array([len(item.segment.readers) for item in items], dtype=np.int32)
    num_pages = np.array([item.stop - item.first for item in items], dtype=np.int64)
    reader_start = np.cumsum(num_readers, dtype=np.int64) - num_readers
    num_partials = int(num_readers.sum())
    readers = _concatenate([item.segment.readers for item in items])
    # Partials are numbered as readers are; a row's partials keep the order of its segments.
    row_partials = np.argsort(readers, kind="stable")
    row_partial = np.zeros(num_rows + 1, dtype=np.int64)
    np.cumsum(np.bincount(readers, minlength=num_rows), out=row_partial[1:])
    last = [
        item.segment.last_page_len
        if item.stop == len(item.segment.addresses)
        else geometry.page_size
        for item in items
    ]
    entry_rows = _concatenate(
        [np.tile(segment.readers, len(segment.addresses)) for segment in segments]
    )
    arrays = {
        "pages": _concatenate([i.segment.addresses[i.first : i.stop] for i in items]) * GRANULE,
        "item_page": np.concatenate(([0], np.cumsum(num_pages))).astype(np.int64),
        "item_kind": np.array([item.segment.kind_index for item in items], dtype=np.int32),
        "item_last": np.array(last, dtype=np.int32),
        "item_reader": reader_start,
        "item_readers": num_readers,
        "item_partial": reader_start,
        "item_entry": np.array([item.first_entry for item in items], dtype=np.int64),
        "readers": readers,
        "row_partial": row_partial,
        "row_partials": row_partials,
        "entry_rows": entry_rows,
    }
    plan = abi.DecodePlan(
        num_rows=num_rows,
        num_items=len(items),
        num_partials=num_partials,
        num_entries=len(entry_rows),
        **{name: array.ctypes.data for name, array in arrays.items()},
    )
    return NativeDecode(
        plan,
        tuple(arrays.values()),
        num_rows,
        num_partials,
        len(entry_rows),
        kinds,
        geometry,
    )


def run_native_decode(
    flat: NativeDecode,
    q: torch.Tensor,
    arena: torch.Tensor,
    layer: int,
    scale: float,
    page_mass: bool,
    threads: int,
) -> AttentionOutput:
    """``run_decode`` on a flattened plan; shapes are checked by the caller."""
    native = native_library()
    assert native is not None
    num_heads, dim = q.shape[1], q.shape[2]
    queries = q.contiguous().float()
    out = torch.empty(flat.num_rows, num_heads, dim)
    lse = torch.empty(flat.num_rows, num_heads)
    mass = torch.empty(flat.num_entries, num_heads) if page_mass else None
    partials = torch.empty(flat.num_partials * num_heads * (dim + 2))
    native.minima_decode(
        ctypes.byref(flat.plan),
        native_geometry(flat.geometry, num_heads // flat.geometry.num_kv_heads),
        layer_formats(flat.kinds, layer, flat.geometry),
        queries.data_ptr(),
        arena.data_ptr(),
        scale,
        partials.data_ptr(),
        out.data_ptr(),
        lse.data_ptr(),
        None if mass is None else mass.data_ptr(),
        threads,
    )
    return AttentionOutput(out.to(q.dtype), lse, mass)


def _cut(segments: Sequence[CheckedSegment], geometry: KVGeometry, threads: int) -> list[_Item]:
    """Items of about equal cost, in the order of the segments."""
    page_costs = [1 + _READER_COST * (len(segment.readers) - 1) for segment in segments]
    total = sum(
        cost * len(segment.addresses) for cost, segment in zip(page_costs, segments, strict=True)
    )
    target = total * geometry.num_kv_heads / (threads * _ITEMS_PER_THREAD)
    min_pages = max(1, _MIN_ITEM_TOKENS // geometry.page_size)
    items = []
    first_entry = 0
    for cost, segment in zip(page_costs, segments, strict=True):
        num_pages = len(segment.addresses)
        count = max(1, min(round(cost * num_pages / target), num_pages // min_pages))
        # Whole groups of pages that share a tile: see attend_pages in native/attend.inl.
        step = -(-num_pages // count // 4) * 4 if count > 1 else num_pages
        for first in range(0, num_pages, step):
            stop = min(first + step, num_pages)
            entry = first_entry + first * len(segment.readers)
            items.append(_Item(segment, first, stop, entry))
        first_entry += num_pages * len(segment.readers)
    return items


def _concatenate(parts: Sequence[Int64Array]) -> Int64Array:
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])
