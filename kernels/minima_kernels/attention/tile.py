"""Attention of some query rows over one expanded tile: the step that decode and extend share."""

from __future__ import annotations

from typing import NamedTuple

import torch

from minima_kernels.formats import Tile


class Partial(NamedTuple):
    """Unnormalised attention of rows over a tile: X chunks, H KV heads, M rows per head."""

    maximum: torch.Tensor  # [X, H, M], largest score
    total: torch.Tensor  # [X, H, M], sum of exp(score - maximum)
    out: torch.Tensor  # [X, H, M, D], sum of exp(score - maximum) * value
    page_totals: torch.Tensor | None  # [X, H, M, C], ``total`` page by page


def mask_tail(tile: Tile, invalid: torch.Tensor) -> Tile:
    """Make the values of tokens ``invalid [X, T]`` finite, whatever their bytes are.

    Bytes behind the last token of an open page are not written yet. Their scores are masked, but
    zero times an undefined value need not be zero.
    """
    heads = invalid[:, None]
    if tile.v_scales is not None:
        return tile._replace(v_scales=tile.v_scales.masked_fill(heads, 0.0))
    return tile._replace(v=tile.v.masked_fill(heads[..., None], 0.0))


def attend(
    q: torch.Tensor,
    tile: Tile,
    masked: torch.Tensor | None = None,
    num_pages: int | None = None,
) -> Partial:
    """Attend from ``q`` float32 ``[X, H, M, D]``, already scaled, to a tile.

    Args:
        masked: bool, broadcastable to ``[X, H, M, T]``: scores to leave out. Every row must keep
            at least one score.
        num_pages: pages per chunk, to ask for ``page_totals``.
    """
    scores = torch.matmul(q, tile.k.transpose(-1, -2))
    if tile.k_scales is not None:
        # The scale and the mean of a page act on M x T scores instead of on T x D keys.
        scores = scores.mul_(tile.k_scales[:, :, None])
    if tile.k_mean is not None:
        shift = torch.matmul(q, tile.k_mean.transpose(-1, -2))
        scores.unflatten(-1, (shift.shape[-1], -1)).add_(shift[..., None])
    if masked is not None:
        scores = scores.masked_fill_(masked, -torch.inf)
    maximum = scores.amax(-1)
    weights = scores.sub_(maximum[..., None]).exp_()
    page_totals = None
    if num_pages is None:
        total = weights.sum(-1)
    else:
        page_totals = weights.unflatten(-1, (num_pages, -1)).sum(-1)
        total = page_totals.sum(-1)
    if tile.v_scales is not None:
        weights = weights.mul_(tile.v_scales[:, :, None])
    return Partial(maximum, total, torch.matmul(weights, tile.v), page_totals)
