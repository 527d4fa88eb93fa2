"""Extend attention by the native kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from minima_kernels.attention.output import AttentionOutput
from minima_kernels.attention.plan import CheckedSegment, Int64Array
from minima_kernels.cpu import abi
from minima_kernels.cpu.layout import IntArray, layer_formats, native_geometry
from minima_kernels.cpu.library import native_library
from minima_kernels.geometry import GRANULE, KVGeometry
from minima_kernels.kinds import PageKind

# Keys are read in groups of 16 tokens: rows that must exist behind the last new token.
_PADDING_ROWS = 15


class NativeExtend(NamedTuple):
    """An extend plan flattened for the kernels; ``arrays`` keeps alive what ``plan`` points to."""

    plan: abi.ExtendPlan
    arrays: tuple[IntArray, ...]
    layers: tuple[ctypes.Array[abi.Format], ...]
    geometry: KVGeometry


class _Run(NamedTuple):
    kind_index: int
    last_page_len: int
    addresses: list[Int64Array]


def flatten_extend(
    segments: Sequence[CheckedSegment],
    q_indptr: Sequence[int],
    kinds: tuple[PageKind, ...],
    geometry: KVGeometry,
) -> NativeExtend:
    """Lay out the cached pages of each request as runs of one kind.

    Neighbouring segments of one kind become one run, so that tiles do not depend on how the tree
    cut them.
    """
    requests: list[list[_Run]] = [[] for _ in q_indptr[1:]]
    for segment in segments:
        for reader in segment.readers:
            runs = requests[reader]
            last = runs[-1] if runs else None
            if (
                last is not None
                and last.kind_index == segment.kind_index
                and last.last_page_len == geometry.page_size
            ):
                last.addresses.append(segment.addresses)
                runs[-1] = last._replace(last_page_len=segment.last_page_len)
            else:
                runs.append(_Run(segment.kind_index, segment.last_page_len, [segment.addresses]))
    runs = [run for request in requests for run in request]
    num_pages = [sum(map(len, run.addresses)) for run in runs]
    pages = [addresses for run in runs for addresses in run.addresses]
    arrays: dict[str, IntArray] = {
        "q_indptr": np.asarray(q_indptr, dtype=np.int64),
        "run_indptr": np.cumsum([0, *map(len, requests)], dtype=np.int64),
        "run_page": np.cumsum([0, *num_pages], dtype=np.int64),
        "run_kind": np.array([run.kind_index for run in runs], dtype=np.int32),
        "run_last": np.array([run.last_page_len for run in runs], dtype=np.int32),
        "pages": np.concatenate([np.empty(0, dtype=np.int64), *pages]) * GRANULE,
    }
    plan = abi.ExtendPlan(
        num_requests=len(requests),
        **{name: array.ctypes.data for name, array in arrays.items()},
    )
    return NativeExtend(plan, tuple(arrays.values()), layer_formats(kinds, geometry), geometry)


def run_native_extend(
    flat: NativeExtend,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    arena: torch.Tensor,
    layer: int,
    scale: float,
    threads: int,
) -> AttentionOutput:
    """``run_extend`` on a flattened plan; shapes are checked by the caller."""
    native = native_library()
    assert native is not None
    num_rows, num_heads, dim = q.shape
    heads = flat.geometry.num_kv_heads
    new = torch.empty(2 * heads * num_rows + _PADDING_ROWS, dim)
    by_head = new[: 2 * heads * num_rows].view(2, heads, num_rows, dim)
    by_head[0] = k.transpose(0, 1)
    by_head[1] = v.transpose(0, 1)
    queries = q.contiguous().float()
    out = torch.empty(num_rows, num_heads, dim)
    lse = torch.empty(num_rows, num_heads)
    native.minima_extend(
        ctypes.byref(flat.plan),
        native_geometry(flat.geometry, num_heads // heads),
        flat.layers[layer],
        queries.data_ptr(),
        new.data_ptr(),
        arena.data_ptr(),
        scale,
        out.data_ptr(),
        lse.data_ptr(),
        threads,
    )
    return AttentionOutput(out.to(q.dtype), lse, None)
