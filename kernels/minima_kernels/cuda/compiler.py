"""Compiling the kernels with nvcc, once per source and option, into files that are kept.

A kernel is CUDA C++ (`native/`, options are macros) or TileLang (`tile/`, options are arguments of
the function that makes it), whose CUDA source is generated first.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

ARCHITECTURE = "sm_90a"

CACHE_VARIABLE = "SGLANG_MINIMA_CACHE"
"""Environment variable that names the folder of compiled kernels."""

TILELANG = "0.1.15"
"""The version that the kernels in `tile/` are written for; others generate other sources."""

_NATIVE, _TILE = (Path(__file__).parent / name for name in ("native", "tile"))
_OPTIONS = ("-O3", "-std=c++17", "-cubin", f"-arch={ARCHITECTURE}", "-Xptxas", "-v")
# What TileLang's headers are compiled as; they come with it, and with a part of CUTLASS.
_TILE_OPTIONS = ("-O3", "-std=c++20", "-cubin", f"-arch={ARCHITECTURE}", "-Xptxas", "-v")
_TILE_INCLUDES = ("src", "3rdparty/cutlass/include")


class CompilerMissing(RuntimeError):
    """There is no nvcc, or no TileLang where one is needed, and the kernel was not compiled
    before."""


@cache
def find_nvcc() -> str | None:
    """Path of nvcc: of ``CUDA_HOME``, of ``PATH``, or where CUDA is usually installed."""
    candidates = [os.path.join(os.environ.get("CUDA_HOME", ""), "bin", "nvcc")]
    candidates += [shutil.which("nvcc") or "", "/usr/local/cuda/bin/nvcc"]
    return next(
        (path for path in candidates if os.path.isabs(path) and os.access(path, os.X_OK)), None
    )


def cache_folder() -> Path:
    """Where compiled kernels are kept."""
    named = os.environ.get(CACHE_VARIABLE)
    base = Path(named) if named else Path.home() / ".cache" / "sglang_minima"
    return base / "cubins"


@cache
def find_tilelang() -> Path | None:
    """Folder of the version of TileLang that is wanted; it is not imported."""
    try:
        if metadata.version("tilelang") != TILELANG:
            return None
    except metadata.PackageNotFoundError:
        return None
    found = importlib.util.find_spec("tilelang")
    return Path(found.origin).parent if found and found.origin else None


def kernel_path(source: str, options: Mapping[str, int | str]) -> Path:
    """Where the cubin of a kernel is kept, compiled or not yet; see ``compile_kernel``.

    The name has the hash of all that the cubin depends on, but for the installed nvcc.
    """
    given = [f"-D{name}={value}" for name, value in options.items()]
    always = [TILELANG, *_TILE_OPTIONS] if _is_tile(source) else _OPTIONS
    digest = hashlib.sha256(_text(source).encode())
    digest.update("\0".join([source, *always, *given]).encode())
    return cache_folder() / f"{Path(source).stem}-{digest.hexdigest()[:20]}.cubin"


def compile_kernel(source: str, options: Mapping[str, int | str]) -> Path:
    """The cubin of ``native/source`` with these macros, or of ``tile/source`` (a name that ends in
    ``.py``) with these arguments; compiled unless it was before.

    A file beside it, ``.log``, holds what ptxas said: registers and spills of each kernel. Beside
    one of TileLang lies the generated source, ``.cu``, too.

    Raises:
        CompilerMissing: no nvcc on this machine, or no TileLang.
        RuntimeError: TileLang or nvcc failed; the message has its output.
    """
    target = kernel_path(source, options)
    if target.exists():
        return target
    nvcc = find_nvcc()
    if nvcc is None:
        raise CompilerMissing(f"no nvcc to compile {source}; set CUDA_HOME or {CACHE_VARIABLE}")
    target.parent.mkdir(parents=True, exist_ok=True)
    # Others may compile the same: each writes files of its own and moves them into place.
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        if _is_tile(source):
            path = made.with_suffix(".cu")
            path.write_text(generate(source, options))
            root = find_tilelang()
            assert root is not None, "generated without TileLang"
            command = [nvcc, *_TILE_OPTIONS, *(f"-I{root / name}" for name in _TILE_INCLUDES)]
        else:
            path = _NATIVE / source
            command = [nvcc, *_OPTIONS, *(f"-D{name}={value}" for name, value in options.items())]
        made.with_suffix(".log").write_text(_run([*command, str(path), "-o", str(made)]).stderr)
        for suffix in (".log", ".cu", ".cubin"):
            if made.with_suffix(suffix).exists():
                made.with_suffix(suffix).replace(target.with_suffix(suffix))
    return target


def generate(source: str, arguments: Mapping[str, int | str]) -> str:
    """CUDA C++ of a kernel in TileLang.

    In a process of its own: the import takes seconds and brings a compiler, neither of which
    belongs in a server. No GPU is needed.

    Raises:
        CompilerMissing: this version of TileLang is not installed.
        RuntimeError: TileLang refused; the message has its output.
    """
    if find_tilelang() is None:
        raise CompilerMissing(f"TileLang {TILELANG} is needed for {source}, not another version")
    options = json.dumps(dict(arguments))
    return _run([sys.executable, str(_TILE / "lower.py"), str(_TILE / source), options]).stdout


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"failed: {' '.join(command)}\n{result.stderr}")
    return result


def _is_tile(source: str) -> bool:
    return source.endswith(".py")


@cache
def _text(source: str) -> str:
    """Text of a source and of all headers: a change of a header is a change of every kernel."""
    if _is_tile(source):
        paths = [_TILE / source, _TILE / "lower.py"]
    else:
        paths = [_NATIVE / source, *sorted(_NATIVE.glob("*.cuh"))]
    return "".join(f"{path.name}\0{path.read_text()}\0" for path in paths)
