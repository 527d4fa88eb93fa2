"""Builds the native CPU kernels; everything else is in pyproject.toml.

The extension is optional: without a compiler the package installs all the same and attention takes
the torch route, which it says at start and in its route counters. It is plain C behind ctypes, so
one binary serves every Python and needs neither torch nor Python headers to build; kernels for
newer instruction sets are compiled in and chosen at run time.
"""

from __future__ import annotations

import sys
from glob import glob
from pathlib import Path

from setuptools import Extension, setup

SOURCES = "kernels/minima_kernels/cpu/native"

setup(
    ext_modules=[
        Extension(
            "minima_kernels.cpu._native",
            sources=sorted(glob(f"{SOURCES}/*.cpp", root_dir=Path(__file__).parent)),
            depends=sorted(glob(f"{SOURCES}/*.[hi]*", root_dir=Path(__file__).parent)),
            language="c++",
            extra_compile_args=["-O3", "-std=c++17", "-fvisibility=hidden", "-Wno-psabi"],
            extra_link_args=["-pthread"],
            optional=True,
            py_limited_api=True,
        )
    ]
    if sys.platform != "win32"
    else []
)
