"""Compiling the kernels with nvcc, once per source and option, into files that are kept."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

ARCHITECTURE = "sm_90a"

CACHE_VARIABLE = "SGLANG_MINIMA_CACHE"
"""Environment variable that names the folder of compiled kernels."""

_NATIVE = Path(__file__).parent / "native"
_OPTIONS = ("-O3", "-std=c++17", "-cubin", f"-arch={ARCHITECTURE}", "-Xptxas", "-v")


class CompilerMissing(RuntimeError):
    """There is no nvcc, and the kernel was not compiled before."""


@cache
def find_nvcc() -> str | None:
    """Path of nvcc: of ``CUDA_HOME``, of ``PATH``, or where CUDA is usually installed."""
    candidates = [os.path.join(os.environ.get("CUDA_HOME", ""), "bin", "nvcc")]
    candidates += [shutil.which("nvcc") or "", "/usr/local/cuda/bin/nvcc"]
    return next((path for path in candidates if os.path.isabs(path) and os.path.exists(path)), None)


def cache_folder() -> Path:
    """Where compiled kernels are kept."""
    named = os.environ.get(CACHE_VARIABLE)
    base = Path(named) if named else Path.home() / ".cache" / "sglang_minima"
    return base / "cubins"


def compile_kernel(source: str, macros: Mapping[str, int | str]) -> Path:
    """The cubin of ``native/source`` with these macros; compiled unless it was before.

    A file beside it, ``.log``, holds what ptxas said: registers and spills of each kernel.

    Raises:
        CompilerMissing: no nvcc on this machine.
        RuntimeError: nvcc failed; the message has its output.
    """
    defines = [f"-D{name}={value}" for name, value in macros.items()]
    digest = hashlib.sha256(_text(source).encode())
    digest.update("\0".join([source, *_OPTIONS, *defines]).encode())
    target = cache_folder() / f"{Path(source).stem}-{digest.hexdigest()[:20]}.cubin"
    if target.exists():
        return target
    nvcc = find_nvcc()
    if nvcc is None:
        raise CompilerMissing(f"no nvcc to compile {source}; set CUDA_HOME or {CACHE_VARIABLE}")
    target.parent.mkdir(parents=True, exist_ok=True)
    # Others may compile the same: each writes files of its own and moves them into place.
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        command = [nvcc, *_OPTIONS, *defines, str(_NATIVE / source), "-o", str(made)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise RuntimeError(f"nvcc failed: {' '.join(command)}\n{result.stderr}")
        made.with_suffix(".log").write_text(result.stderr)
        made.with_suffix(".log").replace(target.with_suffix(".log"))
        made.replace(target)
    return target


@cache
def _text(source: str) -> str:
    """Text of a source and of all headers: a change of a header is a change of every kernel."""
    paths = [_NATIVE / source, *sorted(_NATIVE.glob("*.cuh"))]
    return "".join(f"{path.name}\0{path.read_text()}\0" for path in paths)
