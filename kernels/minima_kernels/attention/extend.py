"""Extend attention: new tokens over a cached prefix, and over each other causally.

Both parts run the same step over tiles with a running softmax, in an order and with tile bounds
that depend on positions alone: what a request gets in a batch of its own is a function of its
pages and tokens, not of how the tree cut its segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from minima_kernels.attention.output import AttentionOutput
from minima_kernels.attention.plan import (
    DEFAULT_SCRATCH_BYTES,
    CheckedSegment,
    Int64Array,
)
from minima_kernels.attention.runs import CachedRun, cached_runs
from minima_kernels.attention.segments import Segments, check_segments
from minima_kernels.attention.tile import Partial, attend, clear_tail
from minima_kernels.cpu.extend import NativeExtend, flatten_extend, run_native_extend
from minima_kernels.cpu.route import fallback_reason, reason_now
from minima_kernels.cuda.extend import CudaExtend, flash_reason, plan_cuda_extend, run_cuda_extend
from minima_kernels.formats import Tile
from minima_kernels.geometry import KVGeometry
from minima_kernels.kinds import PageKind
from minima_kernels.rotation import Rotation
from minima_kernels.routes import ROUTES, RouteCounters
from minima_kernels.shares import read_shares

# Tokens of a tile. Fixed: bounds that moved with the batch would change results by rounding.
_TILE_KEYS = 512
_TILE_QUERIES = 128


@dataclass(frozen=True)
class ExtendPlan:
    """What one extend batch reads; valid for every layer until pages or rows change.

    The work list of a route is made when the route first runs, and kept.
    """

    q_indptr: tuple[int, ...]
    kinds: tuple[PageKind, ...]
    geometry: KVGeometry
    segments: tuple[CheckedSegment, ...]
    device: torch.device
    scratch_bytes: int

    @cached_property
    def fallback_reason(self) -> str | None:
        """Why the native kernels cannot take this plan; ``None`` if they can."""
        formats = (format_ for kind in self.kinds for format_ in kind.formats)
        return fallback_reason(formats, self.geometry, self.device)

    @cached_property
    def native(self) -> NativeExtend:
        """Work list of the native CPU kernels."""
        return flatten_extend(self.segments, self.q_indptr, self.kinds, self.geometry)

    @cached_property
    def runs(self) -> tuple[CachedRun, ...]:
        """Work list of the torch route."""
        return cached_runs(self.segments, self.q_indptr, self.geometry, self.device, _TILE_KEYS)

    @cached_property
    def _cuda(self) -> dict[int, CudaExtend]:
        return {}

    def cuda(self, num_heads: int) -> CudaExtend:
        """Work of a GPU for a number of query heads."""
        found = self._cuda.get(num_heads)
        if found is None:
            found = self._cuda[num_heads] = plan_cuda_extend(self, num_heads)
        return found


def plan_extend(
    segments: Segments,
    q_indptr: Sequence[int] | torch.Tensor | Int64Array,
    kinds: Sequence[PageKind],
    geometry: KVGeometry,
    device: torch.device | str,
    scratch_bytes: int = DEFAULT_SCRATCH_BYTES,
) -> ExtendPlan:
    """Plan attention of new tokens over what was in the cache before them.

    Args:
        segments: the cached pages, for each request in order of position; an open page counts
            with its earlier tokens (``last_page_len``).
        q_indptr: ``[num_requests + 1]``; the new tokens of request i are rows ``q_indptr[i]`` to
            ``q_indptr[i + 1]``.
        kinds: the page kinds that segments index.
        device: of the arena.
        scratch_bytes: bound on the scores of a tile.

    Raises:
        ValueError: a segment out of range, or ``q_indptr`` not ascending from 0.
    """
    indptr = np.asarray(q_indptr, dtype=np.int64)
    if indptr.ndim != 1 or len(indptr) < 1 or indptr[0] != 0 or (np.diff(indptr) < 0).any():
        raise ValueError("q_indptr must ascend from 0")
    checked = tuple(check_segments(segments, len(indptr) - 1, kinds, geometry).rows())
    has_new = np.diff(indptr) > 0
    if not has_new.all():
        reading = (s._replace(readers=s.readers[has_new[s.readers]]) for s in checked)
        checked = tuple(segment for segment in reading if len(segment.readers))
    return ExtendPlan(
        tuple(indptr.tolist()),
        tuple(kinds),
        geometry,
        checked,
        torch.device(device),
        scratch_bytes,
    )


class _Running:
    """Running softmax of query rows ``q [H, M, D]``."""

    def __init__(self, q: torch.Tensor) -> None:
        self.q = q
        self.maximum = q.new_full(q.shape[:-1], -torch.inf)
        self.total = q.new_zeros(q.shape[:-1])
        self.out = torch.zeros_like(q)

    def update(self, rows: slice, partial: Partial) -> None:
        """Add a partial of the rows ``rows`` of M."""
        maximum = torch.maximum(self.maximum[:, rows], partial.maximum)
        keep = torch.exp(self.maximum[:, rows] - maximum)
        take = torch.exp(partial.maximum - maximum)
        self.maximum[:, rows] = maximum
        self.total[:, rows] = self.total[:, rows] * keep + partial.total * take
        scaled = self.out[:, rows] * keep[..., None]
        self.out[:, rows] = scaled.addcmul_(partial.out, take[..., None])

    def partial(self) -> Partial:
        return Partial(self.maximum, self.total, self.out, None)


def run_extend(
    plan: ExtendPlan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    arena: torch.Tensor,
    layer: int,
    scale: float,
    *,
    rotation: Rotation | None = None,
    routes: RouteCounters = ROUTES,
) -> AttentionOutput:
    """Attend from new tokens to the cached pages of their request and causally to each other.

    Args:
        q: ``[N, Hq, D]``, rotated, unless ``rotation`` is given.
        k, v: ``[N, H, D]`` likewise, of the new tokens, in the precision they were computed in.
        arena: uint8 ``[bytes]``.
        layer: which layer's share of the pages to read.
        scale: factor on the scores.
        rotation: rotates what is given and turns the output back.

    Raises:
        ValueError: ``q`` or ``k`` does not fit the plan.
    """
    geometry = plan.geometry
    heads, dim = geometry.num_kv_heads, geometry.head_dim
    num_rows = plan.q_indptr[-1]
    if q.shape[0] != num_rows or q.shape[1] % heads or q.shape[2] != dim:
        raise ValueError(f"queries {list(q.shape)} do not fit {num_rows} rows of {geometry}")
    if k.shape != (num_rows, heads, dim) or v.shape != k.shape:
        raise ValueError(f"keys {list(k.shape)} do not fit {num_rows} rows of {geometry}")
    reason = reason_now(plan.fallback_reason)
    if plan.device.type == "cuda":
        reason = reason_now(flash_reason(q.dtype, dim))
        if reason is None:
            return run_cuda_extend(plan, q, k, v, arena, layer, scale, rotation, routes)
    if rotation is not None:
        dtype = q.dtype
        q, k, v = (rotation.forward(x) for x in (q, k, v))
        result = run_extend(plan, q, k, v, arena, layer, scale, routes=routes)
        return result._replace(out=rotation.inverse(result.out).to(dtype))
    if reason is None:
        routes.count("extend", "native")
        threads = torch.get_num_threads()
        return run_native_extend(plan.native, q, k, v, arena, layer, scale, threads)
    routes.count("extend", "torch", reason)
    group_size = q.shape[1] // heads

    def by_head(x: torch.Tensor) -> torch.Tensor:
        """``[N, H, G, D]`` to ``[H, N * G, D]``: the queries of a KV head become its rows."""
        return x.transpose(0, 1).flatten(1, 2)

    grouped = (q.float() * scale).view(num_rows, heads, group_size, dim)
    state = _Running(by_head(grouped))
    for run in plan.runs:
        if isinstance(run.rows, slice):
            _attend_cached(plan, run, state, arena, layer)
            continue
        part = _Running(by_head(grouped[run.rows]))
        _attend_cached(plan, run, part, arena, layer)
        steps = torch.arange(group_size, device=q.device)
        rows = (run.rows[:, None] * group_size + steps).flatten()
        _update_rows(state, rows, part)
    _attend_new(plan, state, k.float(), v.float(), group_size)

    def by_row(x: torch.Tensor) -> torch.Tensor:
        """Undo ``by_head``, to ``[N, Hq, ...]``."""
        return x.unflatten(1, (num_rows, group_size)).transpose(0, 1).flatten(1, 2)

    out = state.out / state.total[..., None]
    lse = state.maximum + state.total.log()
    return AttentionOutput(by_row(out).to(q.dtype), by_row(lse), None)


def _attend_cached(
    plan: ExtendPlan, run: CachedRun, state: _Running, arena: torch.Tensor, layer: int
) -> None:
    geometry = plan.geometry
    num_rows = state.q.shape[1]
    for cached in run.tiles:
        kind = plan.kinds[cached.kind_index]
        format_, offset = kind.formats[layer], kind.layer_offset(layer, geometry)
        data = read_shares(arena, cached.addresses, format_, offset, geometry)
        tile = format_.expand(data[None], geometry)
        num_slots = tile.k.shape[1]
        masked = None
        if cached.num_tokens < num_slots:
            invalid = torch.arange(num_slots, device=arena.device)[None] >= cached.num_tokens
            clear_tail(tile, invalid)
            masked = invalid[:, None, None]
        score_bytes = 12 * geometry.num_kv_heads * num_slots
        step = max(1, plan.scratch_bytes // score_bytes)
        for first in range(0, num_rows, step):
            rows = slice(first, min(first + step, num_rows))
            state.update(rows, attend(state.q[:, rows], tile, masked))


def _update_rows(state: _Running, rows: torch.Tensor, part: _Running) -> None:
    """Merge the state of some rows into the state of all."""
    selected = _Running(part.q)
    selected.maximum = state.maximum[:, rows]
    selected.total = state.total[:, rows]
    selected.out = state.out[:, rows]
    selected.update(slice(None), part.partial())
    state.maximum[:, rows] = selected.maximum
    state.total[:, rows] = selected.total
    state.out[:, rows] = selected.out


def _attend_new(
    plan: ExtendPlan, state: _Running, k: torch.Tensor, v: torch.Tensor, group_size: int
) -> None:
    """Causal attention among the new tokens of each request, ``k, v`` float32 ``[N, H, D]``."""
    for start, stop in zip(plan.q_indptr, plan.q_indptr[1:], strict=False):
        keys = k[start:stop].transpose(0, 1)
        values = v[start:stop].transpose(0, 1)
        for first in range(0, stop - start, _TILE_QUERIES):
            last = min(first + _TILE_QUERIES, stop - start)
            rows = slice((start + first) * group_size, (start + last) * group_size)
            q = state.q[:, rows]
            for key in range(0, first, _TILE_KEYS):
                span = slice(key, min(key + _TILE_KEYS, first))
                tile = Tile(keys[:, span], values[:, span])
                state.update(rows, attend(q, tile))
            steps = torch.arange(last - first, device=k.device)
            future = (steps > steps.repeat_interleave(group_size)[:, None])[None, None]
            tile = Tile(keys[:, first:last], values[:, first:last])
            state.update(rows, attend(q, tile, future))
