"""Print the CUDA C++ that TileLang makes of a kernel: `python lower.py FILE ARGUMENTS`.

`FILE`: its function of the same name makes the kernel. `ARGUMENTS`: of that function, as JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import tilelang
from tvm.target import Target

# Indices are within their tensors by construction; the checks would cost a branch each.
_PASSES = {tilelang.PassConfigKey.TL_DISABLE_SAFE_MEMORY_ACCESS: True}


def main(path: str, arguments: str) -> None:
    name = Path(path).stem
    kernel = getattr(importlib.import_module(name), name)(**json.loads(arguments))
    with (
        tilelang.tvm.transform.PassContext(config=_PASSES),
        Target({"kind": "cuda", "arch": "sm_90a"}) as target,
    ):
        sys.stdout.write(tilelang.lower(kernel, target=target).kernel_source)


if __name__ == "__main__":
    main(*sys.argv[1:])
