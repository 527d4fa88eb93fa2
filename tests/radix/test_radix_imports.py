"""The package stands alone: standard library only."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import minima_radix

PACKAGE = Path(minima_radix.__file__).parent

BLOCKED_IMPORT = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "numpy", "minima_kernels", "sglang_minima"}:
            raise ImportError(name)

sys.meta_path.insert(0, Block())
import minima_radix, minima_radix.checker
assert minima_radix.PagePool
"""


def test_imports_without_torch_numpy_and_the_other_packages() -> None:
    subprocess.run(
        [sys.executable, "-c", BLOCKED_IMPORT],
        check=True,
        env={"PYTHONPATH": str(PACKAGE.parent)},
    )


def test_imports_only_itself_and_the_standard_library() -> None:
    for module in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(module.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                top = name.partition(".")[0]
                assert top == "minima_radix" or top in sys.stdlib_module_names, (module, name)
