"""The package stands alone."""

from __future__ import annotations

import subprocess
import sys

BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("sglang_minima", "minima_radix", "transformers"):
            raise ImportError(f"{name} is out of bounds")

sys.meta_path.insert(0, Blocker())
import importlib.util, pkgutil, minima_kernels
HAS_TILELANG = importlib.util.find_spec("tilelang") is not None
for module in pkgutil.walk_packages(minima_kernels.__path__, "minima_kernels."):
    is_tile = ".cuda.tile." in module.name
    if "._native" not in module.name and (HAS_TILELANG or not is_tile):
        importlib.import_module(module.name)
"""


def test_every_module_imports_without_the_engine() -> None:
    result = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
