"""Extend attention on a GPU: through the decode kernels, or over expanded tiles.

Cached pages of formats that have a cohort kernel are read by the decode kernels, for all requests
at once (``stacked.py``). Others, of requests with many new tokens, are expanded, a few thousand
tokens at a time, into a bounded scratch of the queries' dtype that torch's flash attention attends
to; tile bounds depend on positions alone, as on the other routes. FlashInfer or torch attends
causally to the new tokens, and the parts merge by their log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from minima_kernels.attention.decode import DecodePlan, run_decode
from minima_kernels.attention.merge import State, merge_states
from minima_kernels.attention.output import AttentionOutput
from minima_kernels.attention.runs import CachedRun, cached_runs
from minima_kernels.cuda.library import prefill_reason
from minima_kernels.cuda.ragged import ragged_prefill
from minima_kernels.cuda.retier import LayerShares, expand_pages, retier_reason
from minima_kernels.cuda.stacked import MANY_READS, plan_stacked, stacked_reason
from minima_kernels.formats import Format
from minima_kernels.geometry import KVGeometry
from minima_kernels.rotation import Rotation
from minima_kernels.routes import RouteCounters
from minima_kernels.shares import read_shares

if TYPE_CHECKING:
    from minima_kernels.attention.extend import ExtendPlan

TILE_KEYS = 8192
"""Tokens of a tile. More would need fewer merges of the queries' outputs, and more scratch."""

_MAX_HEAD_DIM = 256


class CudaExtend(NamedTuple):
    """How the cached pages of a batch are read; the rows of ``stacked`` are those of the batch."""

    stacked: DecodePlan | None
    runs: tuple[CachedRun, ...]
    reason: str
    """Why requests of ``runs`` are not among those of ``stacked``."""


def plan_cuda_extend(plan: ExtendPlan, num_heads: int) -> CudaExtend:
    """The work of a batch for a number of query heads."""
    lacking = stacked_reason(plan, num_heads // plan.geometry.num_kv_heads)
    stacked, others = (None, plan.segments) if lacking else plan_stacked(plan, num_heads)
    runs = cached_runs(others, plan.q_indptr, plan.geometry, plan.device, TILE_KEYS)
    return CudaExtend(stacked, runs, lacking or MANY_READS)


def flash_reason(dtype: torch.dtype, head_dim: int) -> str | None:
    """Why flash attention cannot serve; ``None`` if it can."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"dtype {str(dtype).removeprefix('torch.')}"
    if head_dim > _MAX_HEAD_DIM:
        return f"head dim {head_dim}"
    return None


def expand_tile(
    arena: torch.Tensor,
    addresses: torch.Tensor,
    num_tokens: int,
    format_: Format,
    offset: int,
    geometry: KVGeometry,
    dtype: torch.dtype,
    routes: RouteCounters,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of consecutive pages, rotated: ``[H, num_tokens, D]`` each."""
    if arena.is_cuda:
        reason = retier_reason([format_], geometry, arena.device)
        routes.count("expand", "cuda" if reason is None else "torch", reason or "")
        if reason is None:
            shares = LayerShares(addresses, format_, offset)
            k, v = expand_pages(arena, shares, geometry, dtype)
            return k[:, :num_tokens], v[:, :num_tokens]
    data = read_shares(arena, addresses, format_, offset, geometry)
    tile = format_.expand(data[None], geometry)
    k, v = tile.k, tile.v
    if tile.k_scales is not None:
        k = k * tile.k_scales.mT
    if tile.k_mean is not None:
        k = (k.unflatten(1, (tile.k_mean.shape[1], -1)) + tile.k_mean[:, :, None]).flatten(1, 2)
    if tile.v_scales is not None:
        v = v * tile.v_scales.mT
    return k[:, :num_tokens].to(dtype), v[:, :num_tokens].to(dtype)


def flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, causal: bool
) -> State:
    """Attention of ``q [B, h, M, D]`` over ``k, v [B, h, T, D]``: out, lse ``[B, h, M]``."""
    if q.device.type == "cpu":
        result = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=scale
        )
    else:
        result = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, False, scale=scale
        )
    return State(result[0], result[1][..., : q.shape[2]].float())


class FlashState:
    """Attention of query rows so far, ``out`` float32 ``[H, M, D]`` normalised, ``lse``."""

    def __init__(self, q: torch.Tensor) -> None:
        self.q = q
        self.out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        self.lse = torch.full(q.shape[:-1], -torch.inf, dtype=torch.float32, device=q.device)

    def attend(self, k: torch.Tensor, v: torch.Tensor, scale: float) -> None:
        """Adds attention over keys and values ``[H, T, D]``."""
        part = flash(self.q[None], k[None], v[None], scale, causal=False)
        self.merge(part.out[0], part.lse[0])

    def merge(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Adds a part of all rows, of which every one attended to something."""
        both = torch.logaddexp(self.lse, lse)
        self.out.mul_(torch.exp(self.lse - both)[..., None])
        self.out.addcmul_(out, torch.exp(lse - both)[..., None])
        self.lse = both


def attend_new(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_indptr: Sequence[int], scale: float
) -> State:
    """Causal attention of each request's new tokens to themselves.

    Args:
        q: ``[N, Hq, D]``.
        k, v: ``[N, H, D]``.

    Returns:
        out ``[N, Hq, D]``, lse float32 ``[N, Hq]``.
    """
    group_size = q.shape[1] // k.shape[1]
    spans = [(start, stop) for start, stop in pairwise(q_indptr) if stop > start]
    lengths = {stop - start for start, stop in spans}
    if len(lengths) == 1:  # requests of one length are a batch
        spans = [(0, q_indptr[-1])]
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    for start, stop in spans:
        length = next(iter(lengths)) if len(lengths) == 1 else stop - start

        def batched(x: torch.Tensor, repeats: int, span: slice, length: int) -> torch.Tensor:
            """``[n, h, D]`` to ``[B, h * repeats, length, D]``."""
            heads = x[span].unflatten(0, (-1, length)).transpose(1, 2)
            return heads.repeat_interleave(repeats, dim=1) if repeats > 1 else heads

        span = slice(start, stop)
        part = flash(
            batched(q, 1, span, length),
            batched(k, group_size, span, length),
            batched(v, group_size, span, length),
            scale,
            causal=True,
        )
        out[span] = part.out.transpose(1, 2).flatten(0, 1)
        lse[span] = part.lse.transpose(1, 2).flatten(0, 1)
    return State(out, lse)


def run_cuda_extend(
    plan: ExtendPlan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    arena: torch.Tensor,
    layer: int,
    scale: float,
    rotation: Rotation | None,
    routes: RouteCounters,
) -> AttentionOutput:
    """``run_extend`` on a GPU; ``flash_reason`` is ``None``."""
    # Scores do not change under a rotation: the new tokens need none among themselves.
    reason = prefill_reason(q.device, q.dtype, q.shape[1], k.shape[1], q.shape[2])
    if reason is None and q.shape[0]:
        # The step is the list: the plan holds device memory, and must not be kept by the kernel.
        new = ragged_prefill(q.device, q.shape[2]).attend(
            plan.q_indptr, q, k, v, plan.q_indptr, scale
        )
    else:
        new = attend_new(q, k, v, plan.q_indptr, scale)
    routes.count("prefill", "flashinfer" if reason is None else "flash", reason or "")
    work = plan.cuda(q.shape[1])
    if work.stacked is not None:
        routes.count("extend", "stacked")
        counters = RouteCounters()  # of decodes, which this is not
        both = run_decode(
            work.stacked, q, arena, layer, scale,
            rotation=rotation, elsewhere=new, routes=counters,
        )  # fmt: skip
        new = State(both.out, both.lse)
    if work.runs:
        routes.count("extend", "flash", work.reason)
    elif work.stacked is None:
        routes.count("extend", "flash")  # nothing is cached
    if not work.runs:
        return AttentionOutput(new.out, new.lse, None)
    total = State(new.out.float(), new.lse)
    rotated = q if rotation is None else rotation.forward(q).to(q.dtype)
    for run in work.runs:
        cached = _flash_run(plan, run, rotated[run.rows], arena, layer, scale, rotation, routes)
        total = _merge_rows(total, run.rows, cached)
    return AttentionOutput(total.out.to(q.dtype), total.lse, None)


def _flash_run(
    plan: ExtendPlan,
    run: CachedRun,
    q: torch.Tensor,
    arena: torch.Tensor,
    layer: int,
    scale: float,
    rotation: Rotation | None,
    routes: RouteCounters,
) -> State:
    """Attention of the run's rows, rotated, over its tiles; turned back with ``rotation``."""
    heads = plan.geometry.num_kv_heads
    # The queries of a KV head become its rows: [n, Hq, D] to [H, n * G, D].
    folded = q.unflatten(1, (heads, -1)).transpose(0, 1).flatten(1, 2).contiguous()
    state = FlashState(folded)
    for cached in run.tiles:
        kind = plan.kinds[cached.kind_index]
        keys, values = expand_tile(
            arena,
            cached.addresses,
            cached.num_tokens,
            kind.formats[layer],
            kind.layer_offset(layer, plan.geometry),
            plan.geometry,
            q.dtype,
            routes,
        )
        state.attend(keys, values, scale)

    def unfold(x: torch.Tensor) -> torch.Tensor:
        """``[H, n * G, ...]`` to ``[n, Hq, ...]``."""
        return x.unflatten(1, (len(q), -1)).transpose(0, 1).flatten(1, 2)

    out = unfold(state.out)
    return State(out if rotation is None else rotation.inverse(out), unfold(state.lse))


def _merge_rows(total: State, rows: torch.Tensor | slice, part: State) -> State:
    """``total`` with the state of some rows merged in, which changes it unless they are all."""
    merged = merge_states(total.out[rows], total.lse[rows], part.out, part.lse)
    if isinstance(rows, slice):
        return merged
    total.out[rows], total.lse[rows] = merged
    return total
