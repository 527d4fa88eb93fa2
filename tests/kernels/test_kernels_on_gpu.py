"""The torch route on a GPU gives what it gives on the CPU."""

from __future__ import annotations

import pytest
import torch
from kernel_pages import Pages

from minima_kernels import (
    GRANULE,
    KVGeometry,
    copy_tokens,
    plan_decode,
    plan_extend,
    retier,
    run_decode,
    run_extend,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
]

GEOMETRY = KVGeometry(2, 2, 128, 16)
FORMATS = ["fp8", "tq3", "bf16", "tq(6,7)", "tq(12,2)"]


def make_batch() -> tuple[Pages, list]:
    pages = Pages(GEOMETRY, FORMATS)
    segments = [pages.segment(kind, 3, list(range(9))) for kind in range(len(FORMATS))]
    segments += [pages.segment(0, 2, [row], 1 + row) for row in range(9)]
    return pages, segments


def test_decode() -> None:
    pages, segments = make_batch()
    q = pages.random(9, 8, 128)
    results = []
    for device in ("cpu", "cuda"):
        plan = plan_decode(segments, 9, pages.kinds, GEOMETRY, device)
        result = run_decode(
            plan, q.to(device), pages.arena.to(device), 1, 128**-0.5, page_mass=True
        )
        results.append(result)
    for cpu, cuda in zip(*results, strict=True):
        torch.testing.assert_close(cuda.cpu(), cpu, atol=1e-4, rtol=1e-4)


def test_extend() -> None:
    pages, segments = make_batch()
    q, k, v = pages.random(270, 8, 128), pages.random(270, 2, 128), pages.random(270, 2, 128)
    results = []
    for device in ("cpu", "cuda"):
        indptr = [30 * i for i in range(10)]
        plan = plan_extend(segments, indptr, pages.kinds, GEOMETRY, device)
        new = (x.to(device) for x in (q, k, v))
        results.append(run_extend(plan, *new, pages.arena.to(device), 1, 128**-0.5))
    for cpu, cuda in zip(results[0][:2], results[1][:2], strict=True):
        torch.testing.assert_close(cuda.cpu(), cpu, atol=1e-4, rtol=1e-4)


def test_append_copy_and_retier_are_byte_exact() -> None:
    pages = Pages(GEOMETRY, ["bf16", "fp8"])
    old, new, third = pages.page(0), pages.page(1, 0), pages.page(1, 0)
    k, v = pages.random(5, 2, 128), pages.random(5, 2, 128)
    arenas = []
    for device in ("cpu", "cuda"):
        arena = pages.arena.to(device)
        raw, fp8 = pages.kinds
        retier(arena, [old], raw, [new], fp8, GEOMETRY)
        copy_tokens(arena, new, fp8, third, fp8, 7, GEOMETRY)
        starts = torch.full((5,), third * GRANULE, device=device)
        slots = torch.arange(7, 12, device=device)
        fp8.formats[0].append(arena, starts, slots, k.to(device), v.to(device), GEOMETRY)
        arenas.append(arena.cpu())
    # A scale may round the other way; codes then move by one step.
    assert float((arenas[0] != arenas[1]).float().mean()) < 1e-3


def test_encoded_values_agree() -> None:
    pages = Pages(GEOMETRY, FORMATS)
    k, v = pages.random(4, 16, 2, 128), pages.random(4, 16, 2, 128)
    for kind in pages.kinds:
        format_ = kind.formats[0]
        data = format_.encode(k.cuda(), v.cuda(), GEOMETRY)
        exact = format_.encode(k, v, GEOMETRY)
        assert float((data.cpu() != exact).float().mean()) < 1e-3
        for cuda, cpu in zip(
            format_.decode(data, GEOMETRY), format_.decode(data.cpu(), GEOMETRY), strict=True
        ):
            torch.testing.assert_close(cuda.cpu(), cpu, atol=1e-5, rtol=1e-5)
