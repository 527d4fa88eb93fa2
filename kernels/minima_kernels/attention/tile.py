"""Attention of some query rows over one expanded tile: the step that decode and extend share."""

from __future__ import annotations

from typing import NamedTuple

import torch

from minima_kernels.formats import Tile


class Partial(NamedTuple):
    """Unnormalised attention of M rows in each of the Y batches of a tile."""

    maximum: torch.Tensor  # [Y, M], largest score
    total: torch.Tensor  # [Y, M], sum of exp(score - maximum)
    out: torch.Tensor  # [Y, M, D], sum of exp(score - maximum) * value
    page_totals: torch.Tensor | None  # [Y, M, C], ``total`` page by page


def clear_tail(tile: Tile, invalid: torch.Tensor) -> None:
    """Make the values of tokens ``invalid [X, T]`` zero in place, whatever their bytes are.

    Bytes behind the last token of an open page are not written yet. Their scores get masked, but
    zero times an undefined value need not be zero.
    """
    values = tile.v.mT if tile.v_scales is None else tile.v_scales
    values.unflatten(0, (len(invalid), -1)).masked_fill_(invalid[:, None, None], 0.0)


def attend(
    q: torch.Tensor,
    tile: Tile,
    masked: torch.Tensor | None = None,
    num_pages: int | None = None,
) -> Partial:
    """Attend from ``q`` float32 ``[Y, M, D]``, already scaled, to a tile.

    Args:
        masked: bool ``[X or 1, 1, M or 1, T]``: scores to leave out of all heads of a chunk.
            Every row must keep at least one.
        num_pages: pages per chunk, to ask for ``page_totals``.
    """
    scores = torch.bmm(q, tile.k.mT)
    if tile.k_scales is not None:
        # The scale and the mean of a page act on M x T scores instead of on T x D keys.
        scores.mul_(tile.k_scales)
    if tile.k_mean is not None:
        shift = torch.bmm(q, tile.k_mean.mT)
        scores.unflatten(-1, (shift.shape[-1], -1)).add_(shift[..., None])
    if masked is not None:
        scores.unflatten(0, (masked.shape[0], -1)).masked_fill_(masked, -torch.inf)
    maximum = scores.amax(-1, keepdim=True)
    weights = scores.sub_(maximum).exp_()
    page_totals = None
    if num_pages is None:
        total = weights.sum(-1)
    else:
        page_totals = weights.unflatten(-1, (num_pages, -1)).sum(-1)
        total = page_totals.sum(-1)
    if tile.v_scales is not None:
        weights.mul_(tile.v_scales)
    return Partial(maximum[..., 0], total, torch.bmm(weights, tile.v), page_totals)
