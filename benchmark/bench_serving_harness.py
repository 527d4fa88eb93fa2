"""Runs `sglang.bench_serving` of the installed wheel, unchanged, without a GPU's libraries.

    python benchmark/bench_serving_harness.py --backend sglang --dataset-name random ...

The module imports `datasets` for workloads that download one, and the whole of `sglang.srt.utils`
(triton and more) for one class of one small file. Neither is needed to send generated prompts: an
empty module stands for the first, and only the file is loaded of the second.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
import types
from pathlib import Path
from typing import NoReturn


def _refuse(*args: object, **kwargs: object) -> NoReturn:
    raise SystemExit("this workload downloads a data set: install the package `datasets`")


def prepare() -> None:
    """Makes `sglang.bench_serving` importable.

    Raises:
        ModuleNotFoundError: the wheel is not installed.
    """
    found = importlib.util.find_spec("sglang")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("sglang is not installed; `make frontend` installs it")
    if importlib.util.find_spec("datasets") is None:
        datasets = types.ModuleType("datasets")
        datasets.load_dataset = _refuse  # type: ignore[attr-defined]
        sys.modules["datasets"] = datasets
    utils = types.ModuleType("sglang.srt.utils")
    utils.__path__ = [str(Path(found.origin).parent / "srt" / "utils")]
    sys.modules["sglang.srt.utils"] = utils


if __name__ == "__main__":
    prepare()
    runpy.run_module("sglang.bench_serving", run_name="__main__", alter_sys=True)
