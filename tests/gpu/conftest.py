from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "engine"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The embedded model, or the GGUF file that SGLANG_MINIMA_TEST_MODEL names."""
    from sglang_minima.models.embedded import find_embedded_model
    from sglang_minima.models.resolve import resolve_model_path

    named = os.environ.get("SGLANG_MINIMA_TEST_MODEL")
    if named is None and find_embedded_model() is None:
        pytest.skip("the embedded model is not installed")
    return resolve_model_path(named)
