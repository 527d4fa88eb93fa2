"""The tests of this folder are about the torch route; tests/kernels_cpu has the native kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from minima_kernels.cpu.route import torch_only


@pytest.fixture(autouse=True)
def torch_route() -> Iterator[None]:
    with torch_only():
        yield
