"""The kernels under AddressSanitizer and UndefinedBehaviorSanitizer, as a program of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from minima_kernels import cpu
from minima_kernels.cpu.library import available_levels

NATIVE = Path(cpu.__file__).parent / "native"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    directory = tmp_path_factory.mktemp("sanitize")
    flags = "-O0 -g1 -std=c++17 -w -fsanitize=address,undefined -fno-sanitize-recover=all -pthread"

    def compiled(source: Path) -> str:
        target = directory / f"{source.stem}.o"
        command = [compiler, *flags.split(), f"-I{NATIVE}", "-c", str(source), "-o", str(target)]
        subprocess.run(command, check=True)
        return str(target)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        sources = [*Path(__file__).parent.glob("sanitize*.cpp"), *sorted(NATIVE.glob("*.cpp"))]
        objects = list(pool.map(compiled, sources))
    program = directory / "sanitize"
    subprocess.run([compiler, *flags.split(), *objects, "-o", str(program)], check=True)
    return program


def check(program: Path, *arguments: str) -> None:
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for level in available_levels():
        assert f"{level}: " in done.stdout


def test_no_report_for_any_format_at_any_level(program: Path) -> None:
    check(program, "quick")


@pytest.mark.slow
def test_no_report_for_any_shape(program: Path) -> None:
    check(program)
