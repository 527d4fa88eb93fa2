"""Decode attention over mixed pages: one query row per request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from minima_kernels.attention.merge import State, merge_states
from minima_kernels.attention.output import AttentionOutput
from minima_kernels.attention.plan import DEFAULT_SCRATCH_BYTES
from minima_kernels.attention.segments import Segments, SegmentTable, check_segments, ranges
from minima_kernels.attention.torch_decode import ChunkGroups, group_chunks, run_torch_decode
from minima_kernels.cpu.decode import NativeDecode, flatten_decode, run_native_decode
from minima_kernels.cpu.route import fallback_reason, reason_now
from minima_kernels.cuda.decode import CudaDecode
from minima_kernels.cuda.route import decode_reason, group_reason
from minima_kernels.cuda.space import DecodeSpace, SpaceExceeded
from minima_kernels.geometry import KVGeometry
from minima_kernels.kinds import PageKind
from minima_kernels.rotation import Rotation
from minima_kernels.routes import ROUTES, RouteCounters


class PageEntries(NamedTuple):
    """The (page, reader) pairs of a plan, on the host: segment by segment, page by page."""

    addresses: torch.Tensor  # int64 [entries], granules
    rows: torch.Tensor  # int64 [entries], query row


@dataclass(frozen=True)
class DecodePlan:
    """What one decode batch reads; valid for every layer until pages or rows change.

    The work list of a route is made when the route first runs, and kept.
    """

    num_rows: int
    kinds: tuple[PageKind, ...]
    geometry: KVGeometry
    segments: SegmentTable
    device: torch.device
    scratch_bytes: int
    query_bits: int
    space: DecodeSpace | None = None

    @cached_property
    def page_entries(self) -> PageEntries:
        """The order of the entries of ``page_mass``."""
        table = self.segments
        num_readers = np.repeat(table.num_readers, table.num_pages)
        first_readers = np.repeat(table.reader_start[:-1], table.num_pages)
        return PageEntries(
            torch.from_numpy(np.repeat(table.addresses, num_readers)),
            torch.from_numpy(table.readers[ranges(first_readers, num_readers)]),
        )

    @cached_property
    def fallback_reason(self) -> str | None:
        """Why the kernels of the device cannot take this plan; ``None`` if they can."""
        formats = (format_ for kind in self.kinds for format_ in kind.distinct_formats)
        if self.device.type == "cuda":
            return decode_reason(formats, self.geometry, self.device)
        return fallback_reason(formats, self.geometry, self.device)

    @cached_property
    def native(self) -> NativeDecode:
        """Work list of the native CPU kernels."""
        return flatten_decode(
            self.segments, self.num_rows, self.kinds, self.geometry, torch.get_num_threads()
        )

    @cached_property
    def _cuda(self) -> dict[int, CudaDecode]:
        return {}

    def cuda(self, num_heads: int) -> CudaDecode:
        """Work lists, launches and scratch of the CUDA kernels for a number of query heads;
        in memory of its own if the plan does not fit ``space``."""
        found = self._cuda.get(num_heads)
        if found is None:
            try:
                found = self._make_cuda(num_heads, self.space)
            except SpaceExceeded:
                found = self._make_cuda(num_heads, None)
            self._cuda[num_heads] = found
        return found

    def _make_cuda(self, num_heads: int, space: DecodeSpace | None) -> CudaDecode:
        return CudaDecode(
            self.segments,
            self.num_rows,
            num_heads,
            self.kinds,
            self.geometry,
            self.device,
            self.query_bits,
            space,
        )

    @cached_property
    def chunk_groups(self) -> ChunkGroups:
        """Work list of the torch route."""
        return group_chunks(self.segments, self.geometry, self.device)


def plan_decode(
    segments: Segments,
    num_rows: int,
    kinds: Sequence[PageKind],
    geometry: KVGeometry,
    device: torch.device | str,
    scratch_bytes: int = DEFAULT_SCRATCH_BYTES,
    query_bits: int = 15,
    space: DecodeSpace | None = None,
) -> DecodePlan:
    """Plan decode attention of ``num_rows`` requests, one query row each.

    Args:
        segments: what each request reads; its row index is its request index.
        kinds: the page kinds that segments index.
        device: of the arena.
        scratch_bytes: bound on the expanded tile and its scores (a single chunk may exceed it).
        query_bits: 15, or 8 for a little more speed over TQ pages on a GPU at about 1 % error.
        space: device memory for the CUDA kernels that serves plan after plan; the plan is good
            until the next one in it. A plan has its own if there is none, or if it is too large.

    Raises:
        ValueError: a segment with a reader, kind or page length out of range, or other
            ``query_bits``.
    """
    if query_bits not in (8, 15):
        raise ValueError(f"query_bits must be 8 or 15, not {query_bits}")
    return DecodePlan(
        num_rows,
        tuple(kinds),
        geometry,
        check_segments(segments, num_rows, kinds, geometry),
        torch.device(device),
        scratch_bytes,
        query_bits,
        space,
    )


def run_decode(
    plan: DecodePlan,
    q: torch.Tensor,
    arena: torch.Tensor,
    layer: int,
    scale: float,
    *,
    page_mass: bool = False,
    rotation: Rotation | None = None,
    elsewhere: State | None = None,
    routes: RouteCounters = ROUTES,
) -> AttentionOutput:
    """Attend from each row to its pages, with float32 sums.

    Args:
        q: ``[num_rows, Hq, D]``, rotated, unless ``rotation`` is given.
        arena: uint8 ``[bytes]``.
        layer: which layer's share of the pages to read.
        scale: factor on the scores.
        rotation: rotates the queries and turns the output back, which costs a GPU nothing here.
        elsewhere: attention of the same rows to other tokens, merged into the result: out
            ``[num_rows, Hq, D]`` in the basis of the result, lse.
        page_mass: also return the attention mass of every page entry.

    Raises:
        ValueError: ``q`` does not fit the plan, or ``page_mass`` with ``elsewhere``.
    """
    geometry = plan.geometry
    heads = geometry.num_kv_heads
    if q.shape[0] != plan.num_rows or q.shape[1] % heads or q.shape[2] != geometry.head_dim:
        raise ValueError(f"queries {list(q.shape)} do not fit {plan.num_rows} rows of {geometry}")
    if page_mass and elsewhere is not None:
        raise ValueError("page mass is of the pages alone: it cannot be had with elsewhere")
    reason = reason_now(plan.fallback_reason)
    if plan.device.type == "cuda":
        reason = reason or group_reason(q.shape[1] // heads)
        if reason is None:
            routes.count("decode", "cuda")
            cuda = plan.cuda(q.shape[1])
            return cuda.run(q, arena, layer, scale, page_mass, rotation, elsewhere)
    if rotation is not None:
        q = rotation.forward(q)
    result = _run_rotated(plan, q, arena, layer, scale, page_mass, reason, routes)
    if rotation is not None:
        result = result._replace(out=rotation.inverse(result.out))
    if elsewhere is not None:
        merged = merge_states(elsewhere.out.to(result.out.dtype), elsewhere.lse, *result[:2])
        result = result._replace(out=merged.out, lse=merged.lse)
    return result


def _run_rotated(
    plan: DecodePlan,
    q: torch.Tensor,
    arena: torch.Tensor,
    layer: int,
    scale: float,
    page_mass: bool,
    reason: str | None,
    routes: RouteCounters,
) -> AttentionOutput:
    """The native kernels of a CPU, or torch for a ``reason``."""
    if reason is None:
        routes.count("decode", "native")
        entries = plan.page_entries if page_mass else None
        return run_native_decode(
            plan.native,
            q,
            arena,
            layer,
            scale,
            None if entries is None else entries.rows,
            torch.get_num_threads(),
        )
    routes.count("decode", "torch", reason)
    return run_torch_decode(
        plan.chunk_groups,
        q,
        arena,
        layer,
        scale,
        page_mass,
        plan.kinds,
        plan.geometry,
        plan.scratch_bytes,
    )
