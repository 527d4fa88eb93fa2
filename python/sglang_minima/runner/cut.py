"""Draws tokens from logits cut by top-k, top-p and min-p, without waiting for the device.

Weights are integers, relative to that of the likeliest token: their sums do not depend on the order
of adding, so a row gets the same token in every batch and by every way of finding what is left.

Which tokens are left: in the order of falling logits, the first of equals first, the top k; of
these the fewest whose weight makes up top-p of theirs; of these those with at least min-p of the
greatest weight. The likeliest token is always left. The token drawn is the first in the order of
the vocabulary at which the weights so far exceed the given share of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from minima_kernels.cuda.library import package, sampling_reason
from minima_kernels.routes import ROUTES
from minima_kernels.upload import upload
from sglang_minima.runner.wide_rows import pick, running_sum, smallest

NO_TOKEN = -1
"""In place of a token where the model computed none."""

_CANDIDATES = 1024
"""Top-k up to this is taken out of the vocabulary before anything is sorted."""
_ROWS_AT_ONCE = 64
"""More are drawn in several turns: a row needs some 50 bytes per token of the vocabulary."""
_LIBRARY_VOCABULARY = 4096
"""The library has its fast way of top-p from about here on."""


class Cut(NamedTuple):
    """How one row is drawn."""

    temperature: float
    """Above 0."""
    point: float
    """In [0, 1): what share of the weights lies before the token."""
    top_k: int
    """-1: all."""
    top_p: float
    """In (0, 1]."""
    min_p: float
    """In [0, 1]."""


class _Rows(NamedTuple):
    distances: torch.Tensor
    """float32 [n, vocab]: how far a logit lies below the greatest."""
    numbers: torch.Tensor
    """float64 [n, 5]: the fields of `Cut`."""
    has_min_p: bool
    """Whether any row has one."""

    def column(self, name: str) -> torch.Tensor:
        """float64 [n, 1]: one field."""
        place = Cut._fields.index(name)
        return self.numbers[:, place : place + 1]

    def weights(self, distances: torch.Tensor) -> torch.Tensor:
        """int64, of distances [n, m]; the sum over a vocabulary fits."""
        bits = 62 - self.distances.shape[-1].bit_length()
        weights = distances.double().div_(-self.column("temperature")).exp_()
        return weights.mul_(1 << bits).round_().long()


def draw_cut(logits: torch.Tensor, cuts: Sequence[Cut]) -> torch.Tensor:
    """Draws one token a row.

    Args:
        logits: float32 [rows, vocab].
        cuts: one a row.

    Returns:
        int64 [rows] on the device of the logits; `NO_TOKEN` for rows whose greatest logit is
        infinite or no number.
    """
    if len(cuts) > _ROWS_AT_ONCE:
        spans = [slice(i, i + _ROWS_AT_ONCE) for i in range(0, len(cuts), _ROWS_AT_ONCE)]
        return torch.cat([draw_cut(logits[span], cuts[span]) for span in spans])
    device, vocab_size = logits.device, logits.shape[-1]
    greatest = logits.amax(-1, keepdim=True)
    broken = ~greatest.isfinite()
    # Of two zeros the difference may have a sign, which would put it before all others.
    distances = (greatest - logits).abs_().masked_fill_(broken, 0.0)
    has_min_p = any(cut.min_p for cut in cuts)
    rows = _Rows(distances, upload(cuts, torch.float64, device), has_min_p)
    ways = [_way(cut, vocab_size) for cut in cuts]
    used = sorted(set(ways))
    if len(used) == 1:
        tokens = _draw_by(used[0], rows, cuts)
    else:
        tokens = torch.empty(len(cuts), dtype=torch.int64, device=device)
        for way in used:
            chosen = [i for i, other in enumerate(ways) if other == way]
            index = upload(chosen, torch.int64, device)
            part = rows._replace(
                distances=rows.distances.index_select(0, index),
                numbers=rows.numbers.index_select(0, index),
            )
            tokens.index_copy_(0, index, _draw_by(way, part, [cuts[i] for i in chosen]))
    return tokens.masked_fill_(broken[:, 0], NO_TOKEN)


def _way(cut: Cut, vocab_size: int) -> str:
    """How the tokens left of a row are found; a row's own numbers decide alone."""
    if 0 < cut.top_k < vocab_size:
        return "few" if cut.top_k <= _CANDIDATES else "sorted"
    return "whole" if cut.top_p == 1 else "nucleus"


def _draw_by(way: str, rows: _Rows, cuts: Sequence[Cut]) -> torch.Tensor:
    if way == "few":
        few = _candidates(rows.distances, max(cut.top_k for cut in cuts))
        return _draw_few(rows, few, None)
    if way == "sorted":
        return pick(_sorted_weights(rows), rows.column("point"))
    weights = rows.weights(rows.distances)
    if way == "whole":
        return pick(_above_min_p(rows, weights), rows.column("point"))
    if weights.device.type == "cpu":
        return _draw_nucleus_of_few(rows, weights)
    reason = _nucleus_reason(rows.distances)
    ROUTES.count("top_p", "torch" if reason else "flashinfer", reason or "")
    weights = _sorted_weights(rows) if reason else _nucleus(rows, weights)
    return pick(weights, rows.column("point"))


def _candidates(distances: torch.Tensor, most: int) -> torch.Tensor:
    """The first of each row in the order of falling logits: int64 [n, most], distance and token."""
    vocab = torch.arange(distances.shape[-1], device=distances.device)
    # Distances are not negative, so their bits are in the order of their values; the token breaks
    # ties, which are frequent among logits of 16 bits.
    keys = (distances.view(torch.int32).long() << 32) | vocab
    return smallest(keys, most)


def _draw_few(rows: _Rows, few: torch.Tensor, total: torch.Tensor | None) -> torch.Tensor:
    """Rows of which no more than some candidates are left."""
    weights = _prefix(rows, rows.weights((few >> 32).int().view(torch.float32)), total)
    tokens, order = (few & 0xFFFFFFFF).sort(dim=-1)
    picked = pick(weights.gather(-1, order), rows.column("point"))
    return tokens.gather(-1, picked[:, None])[:, 0]


def _draw_nucleus_of_few(rows: _Rows, weights: torch.Tensor) -> torch.Tensor:
    """Rows with top-p alone, on a CPU: some candidates mostly make it up, or all must be sorted."""
    few = _candidates(rows.distances, min(_CANDIDATES, weights.shape[-1]))
    total = weights.sum(-1, keepdim=True)
    found = rows.weights((few >> 32).int().view(torch.float32)).sum(-1, keepdim=True)
    if bool((found.double() >= rows.column("top_p") * total.double()).all()):
        return _draw_few(rows, few, total)
    return pick(_sorted_weights(rows), rows.column("point"))


def _sorted_weights(rows: _Rows) -> torch.Tensor:
    """Weights [n, vocab] of what is left, 0 elsewhere, by sorting the vocabulary."""
    ordered, order = rows.distances.sort(dim=-1, stable=True)
    left = _prefix(rows, rows.weights(ordered), None)
    return torch.zeros_like(left).scatter_(-1, order, left)


def _prefix(rows: _Rows, weights: torch.Tensor, total: torch.Tensor | None) -> torch.Tensor:
    """What top-k, top-p and min-p leave of weights [n, m] in falling order, 0 elsewhere.

    Top-p is a share of `total` [n, 1], or of what top-k leaves of the weights.
    """
    top_k = rows.column("top_k")
    rank = torch.arange(weights.shape[-1], device=weights.device)
    weights = weights.masked_fill((top_k > 0) & (rank >= top_k), 0)
    summed = running_sum(weights)
    # top-p counts over what top-k left, as users of the usual servers expect.
    whole = summed[:, -1:] if total is None else total
    out = (summed - weights).double() >= rows.column("top_p") * whole.double()
    out[:, 0].fill_(False)
    return _above_min_p(rows, weights.masked_fill_(out, 0))


def _above_min_p(rows: _Rows, weights: torch.Tensor) -> torch.Tensor:
    if not rows.has_min_p:
        return weights
    least = rows.column("min_p") * weights.amax(-1, keepdim=True).double()
    return weights.masked_fill(weights.double() < least, 0)


def _nucleus_reason(distances: torch.Tensor) -> str | None:
    """Why the library does not look for the tokens of top-p; None if it does."""
    if distances.shape[-1] < _LIBRARY_VOCABULARY:
        return "small vocabulary"
    return sampling_reason(distances.device)


def _nucleus(rows: _Rows, weights: torch.Tensor) -> torch.Tensor:
    """`_sorted_weights` of rows without top-k; the library finds where the order is cut.

    It counts in float32 and keeps all equals of the last token, which are told apart here: in the
    order of the vocabulary each asks whether top-p was reached before it.
    """
    total = weights.sum(-1, keepdim=True).double()
    top_p = rows.column("top_p")
    shares = (weights.double() / total).float()
    kept = package().sampling.top_p_renorm_probs(shares, top_p[:, 0].float(), is_deterministic=True)
    least = shares.masked_fill(kept <= 0, 2.0).amin(-1, keepdim=True)
    inside = weights.masked_fill(shares <= least, 0)
    equals = weights.masked_fill(shares != least, 0)
    summed = inside.sum(-1, keepdim=True) + running_sum(equals) - equals
    left = inside + equals.masked_fill_(summed.double() >= top_p * total, 0)
    return _above_min_p(rows, left)
