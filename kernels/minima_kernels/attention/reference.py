"""Plain dense attention: the truth in tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from minima_kernels.attention.merge import State
from minima_kernels.attention.plan import Segment
from minima_kernels.geometry import KVGeometry
from minima_kernels.kinds import PageKind
from minima_kernels.transfer import read_page


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    causal: bool = False,
    dtype: torch.dtype = torch.float64,
) -> State:
    """Attend from ``q [N, Hq, D]`` to ``k, v [T, H, D]``, all scores at once.

    With ``causal`` the queries are the last N of the T tokens. Returns ``out [N, Hq, D]`` and
    ``lse [N, Hq]`` in ``dtype``.
    """
    group_size = q.shape[1] // k.shape[1]
    k = k.to(dtype).repeat_interleave(group_size, dim=1)
    v = v.to(dtype).repeat_interleave(group_size, dim=1)
    scores = torch.einsum("nhd,thd->nht", q.to(dtype), k) * scale
    if causal:
        num_rows, num_tokens = q.shape[0], k.shape[0]
        last = torch.arange(num_tokens - num_rows, num_tokens, device=q.device)
        future = torch.arange(num_tokens, device=q.device) > last[:, None]
        scores = scores.masked_fill(future[:, None], -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.softmax(scores, dim=-1)
    return State(torch.einsum("nht,thd->nhd", weights, v), lse)


def cached_tokens(
    segments: Sequence[Segment],
    request: int,
    kinds: Sequence[PageKind],
    geometry: KVGeometry,
    arena: torch.Tensor,
    layer: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decoded K and V, float32 ``[T, H, D]``, of all tokens that a request reads, in order."""
    keys, values = [], []
    for segment in segments:
        if request not in list(segment.readers):
            continue
        addresses = [int(address) for address in segment.addresses]
        for index, address in enumerate(addresses):
            kind = kinds[segment.kind_index]
            k, v = read_page(arena, address, kind, layer, geometry)
            is_last = index == len(addresses) - 1
            num_tokens = segment.last_page_len if is_last else geometry.page_size
            keys.append(k[:num_tokens])
            values.append(v[:num_tokens])
    if not keys:
        empty = torch.empty(0, geometry.num_kv_heads, geometry.head_dim, device=arena.device)
        return empty, empty
    return torch.cat(keys), torch.cat(values)
