"""Tables of a step go to a GPU through pinned memory: from ordinary memory a copy would wait until
the GPU has done all that it was given."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from minima_kernels.upload import upload

ROOT = Path(__file__).parents[2]
FOLDERS = (
    *("kernels/minima_kernels", "kernels/minima_kernels/attention", "kernels/minima_kernels/cuda"),
    *("python/sglang_minima/runner", "python/sglang_minima/scheduler"),
)
ONCE = {"codebook.py", "rotation.py"}
"""Made at the start, and kept."""
MAKERS = {"from_numpy", "tensor", "as_tensor"}


def made(node: ast.AST) -> str | None:
    """The name of the function by which a call makes a tensor in ordinary memory."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        value = node.func.value
        if isinstance(value, ast.Name) and value.id == "torch" and node.func.attr in MAKERS:
            return node.func.attr
    return None


def waiting_copies(source: str) -> Iterator[int]:
    """Lines that copy to a device what was just made on the host."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        moves = isinstance(node.func, ast.Attribute) and node.func.attr in ("to", "cuda")
        placed = any(keyword.arg == "device" for keyword in node.keywords)
        if (made(node) and placed) or (moves and made(node.func.value)):  # type: ignore[attr-defined]
            yield node.lineno


def test_the_scan_finds_them() -> None:
    lines = ("x = torch.from_numpy(a).to(device)", "torch.tensor([1], device=d)", "upload(a, t, d)")
    assert list(waiting_copies("\n".join(lines))) == [1, 2]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_step_copies_from_ordinary_memory(folder: str) -> None:
    paths = [path for path in (ROOT / folder).glob("*.py") if path.name not in ONCE]
    assert paths
    found = [f"{path.name}:{line}" for path in paths for line in waiting_copies(path.read_text())]
    assert not found


@pytest.mark.parametrize(
    "values", [[3, 1, 2], np.array([3, 1, 2], np.int32), np.array([[3, 1], [2, 0]])]
)
def test_values_arrive(values: object) -> None:
    found = upload(values, torch.int64, torch.device("cpu"))  # type: ignore[arg-type]
    assert found.dtype == torch.int64
    assert found.tolist() == np.asarray(values).tolist()
