"""Counters of routes, and the settings of the allocator."""

from __future__ import annotations

import platform

import torch

from minima_kernels import RouteCounters, keep_freed_memory, use_huge_pages


def test_uses_are_counted_by_operation_route_and_reason() -> None:
    routes = RouteCounters()
    routes.count("decode", "native")
    routes.count("decode", "native")
    routes.count("decode", "torch", "page size 1")
    assert routes.snapshot() == {
        ("decode", "native", ""): 2,
        ("decode", "torch", "page size 1"): 1,
    }


def test_a_snapshot_does_not_change() -> None:
    routes = RouteCounters()
    before = routes.snapshot()
    routes.count("retier", "torch")
    assert before == {}


def test_glibc_takes_the_setting() -> None:
    assert keep_freed_memory() == (platform.libc_ver()[0] == "glibc")


def test_huge_pages_are_asked_for_within_a_tensor_alone() -> None:
    memory = torch.full((5 << 20,), 7, dtype=torch.uint8)
    inner = memory[1000:-1000]
    if use_huge_pages(inner):
        assert platform.system() == "Linux"
    assert bool((memory == 7).all())
    assert not use_huge_pages(memory[: 1 << 20])
