"""What a run of attention returns."""

from __future__ import annotations

from typing import NamedTuple

import torch


class AttentionOutput(NamedTuple):
    """Result of ``run_decode`` or ``run_extend`` for N query rows, in the rotated basis of V.

    ``out`` is ``[N, Hq, D]`` in the dtype of the queries; rows that attend to nothing are zero.
    ``lse`` is float32 ``[N, Hq]``, natural logarithm of the sum of exp of the scaled scores; -inf
    for rows that attend to nothing.
    ``page_mass`` is float32 ``[entries, Hq]`` where it was asked for: the share of a row's
    attention that went to a page, one entry per (page, reader) as ``plan.page_entries`` lists
    them; a row's entries sum to one.
    """

    out: torch.Tensor
    lse: torch.Tensor
    page_mass: torch.Tensor | None
