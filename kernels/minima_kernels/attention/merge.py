"""Merging partial attention states: exact, whatever the split."""

from __future__ import annotations

from typing import NamedTuple

import torch


class State(NamedTuple):
    """Attention output and log-sum-exp of the scores it was normalised by."""

    out: torch.Tensor  # [..., D]
    lse: torch.Tensor  # float32 [...], natural logarithm; -inf where nothing was attended


def merge_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> State:
    """Merge two partial states of the same rows: ``out [..., D]``, ``lse [...]``."""
    return merge_many(torch.stack((out_a, out_b)), torch.stack((lse_a, lse_b)))


def merge_many(outs: torch.Tensor, lses: torch.Tensor) -> State:
    """Merge partial states ``outs [K, ..., D]``, ``lses [K, ...]`` over their first axis.

    Computed in float32; ``out`` has the dtype of ``outs``. Rows that attended to nothing in any
    part get output 0 and -inf.
    """
    lses = lses.float()
    lse = torch.logsumexp(lses, dim=0)
    # -inf minus -inf is no number; such rows have weight zero everywhere.
    weights = torch.exp(lses - lse.masked_fill(lse == -torch.inf, 0.0))
    return State((outs.float() * weights[..., None]).sum(0).to(outs.dtype), lse)
