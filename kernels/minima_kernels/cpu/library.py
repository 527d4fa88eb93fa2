"""Loading the native extension and choosing its instruction-set level."""

from __future__ import annotations

import ctypes
import logging
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch

from minima_kernels.codebook import codebook
from minima_kernels.cpu.abi import DecodePlan, ExtendPlan, Format, Geometry
from minima_kernels.packing import word_shape

logger = logging.getLogger(__name__)

LEVELS = ("portable", "avx2", "avx512")
"""Instruction-set levels, slowest first."""

LEVEL_VARIABLE = "MINIMA_CPU_LEVEL"
"""Environment variable that forces a level."""

MISSING = "native extension not built"
"""Reason that the route counters show when there is no extension."""


@cache
def native_library() -> ctypes.CDLL | None:
    """The extension, or ``None`` where it was not built; that is logged, once.

    Raises:
        RuntimeError: the extension is damaged, or was built from other sources than these.
        ValueError: ``MINIMA_CPU_LEVEL`` names a level that this machine lacks.
    """
    files = sorted(Path(__file__).parent.glob("_native*.so"))
    if not files:
        logger.warning(
            "The native CPU kernels are not built: attention on the CPU takes the torch route, "
            "several times slower. Install a C++ compiler and reinstall, or run "
            "`python setup.py build_ext --inplace`."
        )
        return None
    try:
        native = ctypes.CDLL(str(files[-1]))
        _declare(native)
    except (OSError, AttributeError) as error:
        fault = "are damaged" if isinstance(error, OSError) else "were built from other sources"
        raise RuntimeError(
            f"the native CPU kernels in {files[-1].name} {fault} ({error}): build them again with "
            "`python setup.py build_ext --inplace`"
        ) from None
    level = os.environ.get(LEVEL_VARIABLE)
    if level:
        try:
            _force(native, level)
        except ValueError as error:
            raise ValueError(f"{LEVEL_VARIABLE}: {error}") from None
    return native


def available_levels() -> tuple[str, ...]:
    """The levels that this machine has; empty without the extension."""
    native = native_library()
    if native is None:
        return ()
    return tuple(level for level in LEVELS if native.minima_has_level(level.encode()))


def current_level() -> str | None:
    """The level in use, or ``None`` without the extension."""
    native = native_library()
    return None if native is None else native.minima_level().decode()


def force_level(level: str | None) -> None:
    """Use ``level`` from now on; ``None`` goes back to the best one.

    Raises:
        ValueError: this machine lacks the level.
        RuntimeError: the extension is not built.
    """
    native = native_library()
    if native is None:
        raise RuntimeError(MISSING)
    _force(native, level or "")


def _force(native: ctypes.CDLL, level: str) -> None:
    if not native.minima_force_level(level.encode()):
        raise ValueError(
            f"this machine has no level {level!r} of native kernels (levels: {', '.join(LEVELS)})"
        )


def _declare(native: ctypes.CDLL) -> None:
    pointer, integer, real = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
    native.minima_level.restype = ctypes.c_char_p
    native.minima_has_level.argtypes = [ctypes.c_char_p]
    native.minima_force_level.argtypes = [ctypes.c_char_p]
    native.minima_register_levels.argtypes = [integer, integer, integer, real, pointer, pointer]
    shared: list[Any] = [ctypes.POINTER(Geometry), ctypes.POINTER(Format), pointer]
    native.minima_decode.argtypes = [
        ctypes.POINTER(DecodePlan),
        *shared,
        pointer,  # arena
        real,
        *[pointer] * 5,  # partials, out, lse, page mass, rows of its entries
        ctypes.c_int64,
        integer,
    ]
    native.minima_decode.restype = None
    native.minima_extend.argtypes = [
        ctypes.POINTER(ExtendPlan),
        *shared,
        pointer,  # new keys and values
        pointer,  # arena
        real,
        *[pointer] * 2,  # out, lse
        integer,
    ]
    native.minima_extend.restype = None
    native.minima_append.argtypes = [
        ctypes.POINTER(Format),
        ctypes.POINTER(Geometry),
        *[pointer] * 5,  # k, v, arena, shares, slots
        ctypes.c_int64,
        integer,
    ]
    native.minima_append.restype = None
    native.minima_retier.argtypes = [
        ctypes.POINTER(Format),
        ctypes.POINTER(Format),
        *[pointer] * 2,  # share bytes, copied
        ctypes.c_int64,
        ctypes.POINTER(Geometry),
        *[pointer] * 3,  # arena, sources, targets
        ctypes.c_int64,
        integer,
    ]
    native.minima_retier.restype = None
    native.minima_linear.argtypes = [
        *[pointer] * 4,  # matrix, input, x, residual
        ctypes.c_int64,
        pointer,  # out
        integer,
    ]
    native.minima_linear.restype = None
    native.minima_matrix_rows.argtypes = [pointer, pointer, ctypes.c_int64, pointer]
    native.minima_rotate.argtypes = [
        pointer,
        *[ctypes.c_int64] * 4,  # rows, stride, heads, dim
        *[pointer] * 3,  # cos, sin, out
    ]
    native.minima_rotate.restype = None
    native.minima_hadamard.argtypes = [*[pointer] * 2, *[ctypes.c_int64] * 3, integer]
    native.minima_hadamard.restype = None
    native.minima_decode_layers.argtypes = [
        *[pointer] * 3,  # stack, step, x
        integer,
    ]
    native.minima_decode_layers.restype = None
    native.minima_rms_norm.argtypes = [
        pointer,
        *[ctypes.c_int64] * 2,  # rows, dim
        pointer,  # weight
        real,
        pointer,  # out
    ]
    native.minima_rms_norm.restype = None
    native.minima_angles.argtypes = [
        pointer,
        real,
        pointer,  # positions
        *[ctypes.c_int64] * 2,  # rows, dim
        *[pointer] * 2,  # cos, sin
    ]
    native.minima_angles.restype = None


@cache
def register_levels(levels: int) -> None:
    """Give the extension the codebook and the packing of a level count; once per process.

    Raises:
        RuntimeError: the extension is not built, or was built for another packing.
    """
    native = native_library()
    if native is None:
        raise RuntimeError(MISSING)
    book = codebook(levels, torch.device("cpu"))
    step = float(book.centroids[-1]) / 127
    centroids = (book.centroids / step).round().to(torch.int8)
    shape = word_shape(levels)
    registered = native.minima_register_levels(
        levels,
        shape.codes,
        shape.bits,
        step,
        centroids.data_ptr(),
        book.boundaries.contiguous().data_ptr(),
    )
    if not registered:
        raise RuntimeError(f"the native extension cannot hold {levels} levels in {shape}")
