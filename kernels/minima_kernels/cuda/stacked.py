"""Cached pages of requests with few new tokens, read by the decode kernels.

The new tokens of a request are rows that read its cached pages, so those of all requests of a
batch are one decode plan: a handful of launches per layer however many requests there are, and a
page that many rows read is unpacked once for all of them (``cohort_plan.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from minima_kernels.attention.decode import DecodePlan, plan_decode, run_decode
from minima_kernels.attention.merge import State
from minima_kernels.attention.plan import CheckedSegment, Int64Array
from minima_kernels.attention.runs import join_segments
from minima_kernels.attention.segments import offsets, ranges, tabulate
from minima_kernels.cuda.plan import BoolArray, head_blocks, rows_per_tile
from minima_kernels.cuda.route import decode_reason, group_reason
from minima_kernels.cuda.variants import has_cohorts
from minima_kernels.rotation import Rotation
from minima_kernels.routes import RouteCounters
from minima_kernels.upload import upload

if TYPE_CHECKING:
    from minima_kernels.attention.extend import ExtendPlan

MOST_ROWS = 512
"""New tokens of a request up to which its cached pages are read this way."""

MOST_TILE_READS = 1 << 14
"""How often pages without a cohort kernel may be read for a request, each KV head counted: a tile
of query columns reads them for itself."""


class Stacked(NamedTuple):
    """A decode plan, and which rows of the batch are its rows."""

    plan: DecodePlan
    rows: torch.Tensor | slice  # int64 [n], or all

    def run(
        self,
        q: torch.Tensor,
        arena: torch.Tensor,
        layer: int,
        scale: float,
        rotation: Rotation | None,
    ) -> State:
        """Attention of its rows of ``q [N, Hq, D]`` over their cached pages; see ``run_decode``."""
        # They are not decodes: the caller counts them.
        counters = RouteCounters()
        result = run_decode(
            self.plan, q[self.rows], arena, layer, scale, rotation=rotation, routes=counters
        )
        return State(result.out, result.lse)


def stacked_reason(plan: ExtendPlan, group_size: int) -> str | None:
    """Why the decode kernels cannot take requests of a plan; ``None`` if they can."""
    if plan.device.type != "cuda":
        return "no CUDA device"
    formats = {format_ for kind in plan.kinds for format_ in kind.distinct_formats}
    return decode_reason(formats, plan.geometry, plan.device) or group_reason(group_size)


def plan_stacked(
    plan: ExtendPlan, num_heads: int
) -> tuple[Stacked | None, Sequence[CheckedSegment]]:
    """The requests that the decode kernels take, and what the others read."""
    segments = join_segments(plan.segments, plan.geometry)
    group_size = num_heads // plan.geometry.num_kv_heads
    if stacked_reason(plan, group_size) is not None:
        return None, segments
    is_stacked = _find(plan, segments, group_size)
    if not is_stacked.any():
        return None, segments
    new = np.diff(plan.q_indptr) * is_stacked
    start = offsets(new)
    ours: list[CheckedSegment] = []
    others: list[CheckedSegment] = []
    for segment in segments:
        chosen = is_stacked[segment.readers]
        if chosen.any():
            readers = segment.readers[chosen]
            ours.append(segment._replace(readers=ranges(start[readers], new[readers])))
        if not chosen.all():
            others.append(segment._replace(readers=segment.readers[~chosen]))
    rows: torch.Tensor | slice = slice(None)
    if start[-1] < plan.q_indptr[-1]:
        first = np.array(plan.q_indptr[:-1], dtype=np.int64)
        rows = upload(ranges(first[is_stacked], new[is_stacked]), torch.int64, plan.device)
    decode = plan_decode(tabulate(ours), int(start[-1]), plan.kinds, plan.geometry, plan.device)
    return Stacked(decode, rows), others


def _find(plan: ExtendPlan, segments: Sequence[CheckedSegment], group_size: int) -> BoolArray:
    """bool ``[requests]``: a request's own pages and new tokens alone decide."""
    new = np.diff(plan.q_indptr)
    reads_cache = np.zeros(len(new), dtype=np.bool_)
    reread: Int64Array = np.zeros(len(new), dtype=np.int64)  # pages that every tile reads
    for segment in segments:
        reads_cache[segment.readers] = True
        formats = plan.kinds[segment.kind_index].distinct_formats
        if not all(has_cohorts(format_) for format_ in formats):
            reread[segment.readers] += len(segment.addresses)
    tiles = -(-new // rows_per_tile(group_size)) * head_blocks(group_size)
    is_cheap = tiles * reread * plan.geometry.num_kv_heads <= MOST_TILE_READS
    found: BoolArray = reads_cache & (new > 0) & (new <= MOST_ROWS) & is_cheap
    return found
