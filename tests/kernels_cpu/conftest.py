"""The native CPU kernels, at every instruction-set level that the machine has."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Pages in a poisoned arena come from the tests of the torch route.
sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

from minima_kernels.cpu.library import LEVELS, available_levels, force_level, native_library


@pytest.fixture(autouse=True)
def extension() -> None:
    if native_library() is None:
        pytest.skip("the native extension is not built")


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param not in available_levels():
        pytest.skip(f"this CPU has no {request.param}")
    force_level(request.param)
    yield request.param
    force_level(None)
