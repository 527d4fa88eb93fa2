"""The kernels under AddressSanitizer and UndefinedBehaviorSanitizer, as a program of their own."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from minima_kernels import cpu
from minima_kernels.cpu.library import available_levels

NATIVE = Path(cpu.__file__).parent / "native"


@pytest.mark.slow
def test_no_report_at_any_level(tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path / "sanitize"
    sources = [Path(__file__).with_name("sanitize.cpp"), *sorted(NATIVE.glob("*.cpp"))]
    flags = "-O1 -g -std=c++17 -w -fsanitize=address,undefined -fno-sanitize-recover=all -pthread"
    command = [compiler, *flags.split(), f"-I{NATIVE}", *map(str, sources), "-o", str(program)]
    subprocess.run(command, check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for level in available_levels():
        assert f"{level}: " in done.stdout
