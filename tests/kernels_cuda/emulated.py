"""Running the CUDA kernels on the CPU: the sources themselves, with the machine emulated.

`Emulation` puts itself in the place of the loader and of launches, so that plans, arguments and
scratch are those of a run on a GPU. See ``emulator/emulator.h`` for what is emulated.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from kernel_pages import Pages

from minima_kernels import Segment
from minima_kernels.arena import scatter
from minima_kernels.cuda import compiler
from minima_kernels.cuda.driver import Function, Launch
from minima_kernels.cuda.order import fragment_order, supports
from minima_kernels.cuda.variants import Variant
from minima_kernels.formats import TQ

_FOLDER = Path(__file__).parent / "emulator"
_NATIVE = Path(compiler.__file__).parent / "native"
_BOUNDS = r"__launch_bounds__\([^)]*(?:\([^)]*\))?\)"
_KERNEL = re.compile(
    rf'(?:^KERNEL\((\w+),|extern "C" __global__ void {_BOUNDS}\s*(\w+)\()', re.MULTILINE
)
_INCLUDE = re.compile(r"^#include <tl_templates/.*$", re.MULTILINE)


@cache
def _include() -> Path | None:
    """CUDA's headers: 16-bit floats on the host."""
    nvcc = compiler.find_nvcc()
    roots = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))]
    roots += [Path(nvcc).resolve().parents[1]] if nvcc else []
    return next((r / "include" for r in roots if (r / "include" / "cuda_fp16.h").exists()), None)


def skip_unless_possible() -> None:
    """Skip the calling test where kernels cannot be compiled for the CPU."""
    if _include() is None or shutil.which("g++") is None:
        pytest.skip("the emulation needs g++ and the headers of CUDA")


@cache
def _text(path: Path) -> str:
    paths = [path, *sorted(_NATIVE.glob("*.cuh")), *sorted(_FOLDER.iterdir())]
    return "".join(path.read_text() for path in paths)


def _source(variant: Variant) -> Path:
    """The CUDA source; of a kernel in TileLang it is generated, and has our headers."""
    if not variant.source.endswith(".py"):
        return _NATIVE / variant.source
    if compiler.find_tilelang() is None:
        pytest.skip(f"the emulation of {variant.source} needs TileLang {compiler.TILELANG}")
    arguments = dict(variant.macros)
    cubin = compiler.kernel_path(variant.source, arguments)
    target = cubin.parents[1] / "emulated" / cubin.with_suffix(".cu").name
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        made = target.with_suffix(f".{os.getpid()}")
        text = compiler.generate(variant.source, arguments)
        made.write_text('#include "emulated_tilelang.h"\n' + _INCLUDE.sub("", text))
        made.replace(target)
    return target


@cache
def _library(variant: Variant) -> ctypes.CDLL:
    source = _source(variant)
    names = [a or b for a, b in _KERNEL.findall(source.read_text())]
    defines = [] if source.parent != _NATIVE else [f"-D{n}={value}" for n, value in variant.macros]
    defines += [f'-DSOURCE="{source.name}"', "-DKERNELS=" + " ".join(f"X({n})" for n in names)]
    digest = hashlib.sha256("\0".join([_text(source), *defines]).encode()).hexdigest()
    target = compiler.cache_folder().parent / "emulated" / f"{digest[:20]}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        made = target.with_suffix(f".{os.getpid()}")
        # Every library has an emulator of its own; sums are rounded as written.
        options = ["-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-w"]
        options += ["-fno-gnu-unique", "-Wl,-Bsymbolic", "-ffp-contract=off"]
        options += ["-fno-strict-aliasing"]  # values are moved as words of other types
        options += [f"-I{folder}" for folder in (_FOLDER, source.parent, _include())]
        command = ["g++", *options, *defines, str(_FOLDER / "run.cpp"), "-o", str(made)]
        result = subprocess.run(command, capture_output=True, text=True)
        assert not result.returncode, result.stderr
        made.replace(target)
    library = ctypes.CDLL(str(target))
    library.emulator_error.restype = ctypes.c_char_p
    return library


def in_fragment_order(pages: Pages, segments: Sequence[Segment]) -> torch.Tensor:
    """A copy of the arena with TQ pages in the order of the kernels."""
    geometry, arena = pages.geometry, pages.arena.clone()
    for segment in segments:
        kind = pages.kinds[segment.kind_index]
        addresses = torch.as_tensor(segment.addresses)
        for layer, format_ in enumerate(kind.formats):
            if not supports(format_, geometry):
                continue
            assert isinstance(format_, TQ)
            offset, size = kind.layer_offset(layer, geometry), format_.layer_bytes(geometry)
            data = torch.stack([pages.arena[a * 128 + offset :][:size] for a in addresses.tolist()])
            moved = fragment_order(format_, geometry).from_canonical(data)
            scatter(arena, addresses, offset, moved)
    return arena


class Emulated(NamedTuple):
    """What `Function` is on a GPU."""

    variant: Variant
    name: str
    threads: tuple[int, int]

    handle = ctypes.c_void_p()
    shared_bytes = 0

    def blocks_per_multiprocessor(self) -> int:
        return 1


class Emulation:
    """Kernels run here until the monkeypatch is undone; ``seed`` changes the order of warps."""

    def __init__(self, patch: pytest.MonkeyPatch, multiprocessors: int = 4) -> None:
        self.seed = 0
        self.launched: list[str] = []
        properties = type("Properties", (), {"multi_processor_count": multiprocessors})
        stream = type("Stream", (), {"cuda_stream": 0})
        patch.setattr(Variant, "load", lambda variant, name, _: self._load(variant, name))
        patch.setattr(Launch, "call", self._caller())
        patch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        patch.setattr(torch.cuda, "current_stream", lambda *_: stream)

    @staticmethod
    def _load(variant: Variant, name: str) -> Function:
        function: Any = Emulated(variant, name, variant.threads)
        return function

    def _caller(self) -> Any:
        def call(launch: Any, stream: int) -> None:
            function, grid = launch._function, launch._config.grid
            self.launched.append(function.name)
            library = _library(function.variant)  # compiled only where it is called
            status = library.emulate(
                function.name.encode(), launch._pointers, grid[0], grid[1], *function.threads,
                self.seed,
            )  # fmt: skip
            error = library.emulator_error().decode()
            assert not status, f"{function.name}, seed {self.seed}: {error or 'no such kernel'}"

        return call
