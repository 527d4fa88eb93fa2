"""Which work goes native, what the counters say of the rest, and the choice of a level."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_pages import Pages

from minima_kernels import KVGeometry, RouteCounters, plan_decode, run_decode
from minima_kernels.cpu import library
from minima_kernels.cpu.library import MISSING, available_levels, current_level, force_level


def served_by(geometry: KVGeometry) -> tuple[str, str]:
    pages = Pages(geometry, ["fp8"])
    plan = plan_decode([pages.segment(0, 1, [0])], 1, pages.kinds, geometry, "cpu")
    routes = RouteCounters()
    heads, dim = geometry.num_kv_heads, geometry.head_dim
    run_decode(plan, torch.randn(1, heads, dim), pages.arena, 0, 1.0, routes=routes)
    ((_, name, reason),) = routes.snapshot()
    return name, reason


@pytest.mark.parametrize(
    ("head_dim", "page_size", "reason"),
    [(64, 1, "page size 1"), (72, 16, "head dim 72"), (512, 16, "head dim 512")],
)
def test_other_shapes_fall_back(head_dim: int, page_size: int, reason: str) -> None:
    assert served_by(KVGeometry(1, 1, head_dim, page_size)) == ("torch", reason)


def test_supported_shapes_go_native() -> None:
    assert served_by(KVGeometry(1, 1, 64, 16)) == ("native", "")


def test_missing_extension_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library.native_library.cache_clear()
    monkeypatch.setattr(library.Path, "glob", lambda *_: iter(()))
    try:
        with caplog.at_level(logging.WARNING):
            assert served_by(KVGeometry(1, 1, 64, 16)) == ("torch", MISSING)
            assert served_by(KVGeometry(1, 1, 64, 32)) == ("torch", MISSING)
        assert sum("not built" in record.message for record in caplog.records) == 1
        assert available_levels() == () and current_level() is None
        with pytest.raises(RuntimeError, match="not built"):
            force_level("portable")
    finally:
        monkeypatch.undo()
        library.native_library.cache_clear()


def test_a_damaged_extension_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = tmp_path / "_native.abi3.so"
    damaged.write_bytes(b"\x7fELF")
    library.native_library.cache_clear()
    monkeypatch.setattr(library.Path, "glob", lambda *_: iter([damaged]))
    try:
        with pytest.raises(RuntimeError, match=r"_native.abi3.so are damaged .*build them again"):
            current_level()
    finally:
        monkeypatch.undo()
        library.native_library.cache_clear()


def test_levels(level: str) -> None:
    assert current_level() == level


def test_unknown_level() -> None:
    with pytest.raises(ValueError, match="no level 'mmx'"):
        force_level("mmx")
    assert current_level() == available_levels()[-1]


def test_an_unknown_level_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.LEVEL_VARIABLE, "mmx")
    library.native_library.cache_clear()
    try:
        with pytest.raises(ValueError, match=r"^MINIMA_CPU_LEVEL: .*no level 'mmx'.*avx2"):
            current_level()
    finally:
        library.native_library.cache_clear()


def test_level_of_the_environment() -> None:
    code = "from minima_kernels.cpu.library import current_level; print(current_level())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(sys.path), "MINIMA_CPU_LEVEL": "portable"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.strip() == "portable"
