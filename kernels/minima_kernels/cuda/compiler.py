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

from minima_kernels.cuda.cubin import has_cubin, seal_cubin

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
_REMEDY = f"name a folder that can be written with {CACHE_VARIABLE}"


class CompilerMissing(RuntimeError):
    """There is no nvcc, or no TileLang where one is needed, and the kernel was not compiled
    before."""


class CompilerFailed(RuntimeError):
    """nvcc or TileLang made no kernel; the message is one line, ``output`` all that was said."""

    def __init__(self, message: str, output: str) -> None:
        super().__init__(message)
        self.output = output


class CacheUnusable(RuntimeError):
    """Compiled kernels cannot be kept or found; the message names folder and variable."""


@cache
def find_nvcc() -> str | None:
    """Path of nvcc: of ``CUDA_HOME``, of ``PATH``, or where CUDA is usually installed."""
    candidates = [os.path.join(os.environ.get("CUDA_HOME", ""), "bin", "nvcc")]
    candidates += [shutil.which("nvcc") or "", "/usr/local/cuda/bin/nvcc"]
    return next(
        (path for path in candidates if os.path.isabs(path) and os.access(path, os.X_OK)), None
    )


def cache_folder() -> Path:
    """Where compiled kernels are kept.

    Raises:
        CacheUnusable: no folder is named, and there is no home.
    """
    named = os.environ.get(CACHE_VARIABLE)
    try:
        base = Path(named).expanduser() if named else Path.home() / ".cache" / "sglang_minima"
    except RuntimeError as error:
        raise CacheUnusable(f"no folder for compiled kernels ({error}): {_REMEDY}") from None
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


def is_compiled(source: str, options: Mapping[str, int | str]) -> bool:
    """Whether the cubin of a kernel is there, and whole.

    Raises:
        CacheUnusable: it cannot be read.
    """
    path = kernel_path(source, options)
    try:
        return has_cubin(path)
    except OSError as error:
        raise CacheUnusable(f"{path} cannot be read ({error.strerror}): {_REMEDY}") from None


def compile_kernel(source: str, options: Mapping[str, int | str]) -> Path:
    """The cubin of ``native/source`` with these macros, or of ``tile/source`` (a name that ends in
    ``.py``) with these arguments; compiled unless it was before, and again if it is damaged.

    A file beside it, ``.log``, holds what ptxas said: registers and spills of each kernel. Beside
    one of TileLang lies the generated source, ``.cu``, too.

    Raises:
        CompilerMissing: no nvcc on this machine, or no TileLang.
        CompilerFailed: TileLang or nvcc failed; ``.log`` has the output.
        CacheUnusable: the folder of compiled kernels cannot be read or written.
    """
    target = kernel_path(source, options)
    if is_compiled(source, options):
        return target
    lacking = f"{target} is damaged" if target.exists() else f"{source} is not compiled"
    nvcc = find_nvcc()
    if nvcc is None:
        raise CompilerMissing(f"{lacking} and there is no nvcc: set CUDA_HOME or {CACHE_VARIABLE}")
    if _is_tile(source) and find_tilelang() is None:
        raise CompilerMissing(f"{lacking} and TileLang {TILELANG} is not installed")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Others may compile the same: each writes files of its own and moves them into place.
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            _compile(nvcc, source, options, Path(folder) / target.name)
    except OSError as error:
        raise CacheUnusable(
            f"compiled kernels cannot be kept in {target.parent} ({error.strerror}): {_REMEDY}"
        ) from None
    return target


def _compile(nvcc: str, source: str, options: Mapping[str, int | str], made: Path) -> None:
    """Make a cubin and what belongs to it, and move all into the folder above, the cubin last."""
    log = made.with_suffix(".log")
    try:
        if _is_tile(source):
            path = made.with_suffix(".cu")
            path.write_text(generate(source, options))
            root = find_tilelang()
            assert root is not None, "generated without TileLang"
            command = [nvcc, *_TILE_OPTIONS, *(f"-I{root / name}" for name in _TILE_INCLUDES)]
        else:
            path = _NATIVE / source
            command = [nvcc, *_OPTIONS, *(f"-D{name}={value}" for name, value in options.items())]
        log.write_text(_run("nvcc", source, [*command, str(path), "-o", str(made)]).stderr)
        seal_cubin(made)
    except CompilerFailed as error:
        log.write_text(error.output)
        kept = made.parents[1] / log.name
        log.replace(kept)
        raise CompilerFailed(f"{error}; its output: {kept}", error.output) from None
    for file in (log, made.with_suffix(".cu"), made):
        if file.exists():
            file.replace(made.parents[1] / file.name)


def generate(source: str, arguments: Mapping[str, int | str]) -> str:
    """CUDA C++ of a kernel in TileLang.

    In a process of its own: the import takes seconds and brings a compiler, neither of which
    belongs in a server. No GPU is needed.

    Raises:
        CompilerMissing: this version of TileLang is not installed.
        CompilerFailed: TileLang is broken, or refused.
    """
    if find_tilelang() is None:
        raise CompilerMissing(f"TileLang {TILELANG} is needed for {source}, not another version")
    options = json.dumps(dict(arguments))
    command = [sys.executable, str(_TILE / "lower.py"), str(_TILE / source), options]
    return _run("TileLang", source, command).stdout


def _run(tool: str, source: str, command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        result = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise CompilerFailed(f"{command[0]} cannot be run: {error.strerror}", "") from None
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        # nvcc ends with a count of its errors, Python with the error.
        found = (line for line in lines if tool == "nvcc" and ("error" in line or "fatal" in line))
        said = next(found, lines[-1] if lines else f"exit status {result.returncode}")
        output = f"{' '.join(command)}\n{result.stderr}"
        raise CompilerFailed(f"{tool} failed on {source}: {said.strip()}", output)
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
