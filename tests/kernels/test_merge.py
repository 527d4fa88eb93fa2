"""Merging partial attention states."""

from __future__ import annotations

from itertools import pairwise

import torch

from minima_kernels.attention import merge_many, merge_states
from minima_kernels.attention.reference import dense_attention


def test_parts_merge_to_the_whole() -> None:
    q, k, v = torch.randn(5, 8, 64), torch.randn(90, 2, 64) * 3, torch.randn(90, 2, 64)
    whole = dense_attention(q, k, v, 0.125)
    cuts = [0, 1, 40, 41, 90]
    parts = [dense_attention(q, k[a:b], v[a:b], 0.125) for a, b in pairwise(cuts)]
    merged = merge_many(torch.stack([p.out for p in parts]), torch.stack([p.lse for p in parts]))
    assert torch.allclose(merged.out, whole.out, atol=1e-5)
    assert torch.allclose(merged.lse.double(), whole.lse, atol=1e-5)
    state = parts[0]
    for part in parts[1:]:
        state = merge_states(*state, *part)
    assert torch.allclose(state.out, whole.out, atol=1e-5)


def test_an_empty_part_changes_nothing() -> None:
    out, lse = torch.randn(3, 4, 8), torch.randn(3, 4)
    nothing = torch.full((3, 4), -torch.inf)
    merged = merge_states(out, lse, torch.randn(3, 4, 8), nothing)
    assert torch.allclose(merged.out, out)
    assert torch.allclose(merged.lse, lse)


def test_two_empty_parts_are_empty() -> None:
    nothing = torch.full((2, 1), -torch.inf)
    merged = merge_states(torch.ones(2, 1, 8), nothing, torch.ones(2, 1, 8), nothing)
    assert not merged.out.any()
    assert torch.equal(merged.lse, nothing)


def test_output_keeps_its_dtype() -> None:
    out = torch.ones(2, 1, 8, dtype=torch.bfloat16)
    merged = merge_states(out, torch.zeros(2, 1), out, torch.zeros(2, 1))
    assert merged.out.dtype == torch.bfloat16
    assert merged.lse.dtype == torch.float32
