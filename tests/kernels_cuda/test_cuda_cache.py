"""Compiled kernels that are kept: damage, processes that compile at once, unusable folders."""

from __future__ import annotations

import logging
import stat
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from minima_kernels.cuda import build, compiler, cubin
from minima_kernels.cuda.cubin import CubinDamaged, read_cubin

KERNEL = ("merge.cu", {"HEAD_DIM": 64, "SPLIT": 4})
# Takes a moment, so that compilers run at once, and writes an ELF file of other bytes each time.
NVCC = """#!/usr/bin/env python3
import os, struct, sys, time
sys.stderr.write("ptxas info\\n")
time.sleep(0.05)
body = os.urandom(4000)
header = b"\\x7fELF\\x02".ljust(32, b"\\0") + struct.pack("<QQ", 64 + 4000, 64 + 4056)
header += bytes(6) + struct.pack("<HHHH", 56, 1, 64, 1) + bytes(2)
with open(sys.argv[-1], "wb") as file:
    file.write(header + body + bytes(56 + 64))
with open(os.environ["COUNTER"], "a") as file:
    file.write("x")
"""


@pytest.fixture
def counter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nvcc that writes files that look like cubins; a byte for each run of it."""
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(NVCC)
    nvcc.chmod(nvcc.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("COUNTER", str(tmp_path / "runs"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setattr(compiler, "find_nvcc", lambda: str(nvcc))
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path / "cache"))
    cubin._warn.cache_clear()
    return tmp_path / "runs"


def elf(size: int) -> bytes:
    """A file whose program headers end it, as those of nvcc do."""
    header = b"\x7fELF\x02".ljust(32, b"\0") + struct.pack("<QQ", size - 56, size - 200)
    header += bytes(6) + struct.pack("<HHHH", 56, 1, 64, 2)
    return header.ljust(size, b"\1")


def test_what_was_compiled_is_read_back(counter: Path) -> None:
    path = compiler.compile_kernel(*KERNEL)
    body = read_cubin(path)
    assert body.startswith(b"\x7fELF") and len(body) == 64 + 4000 + 56 + 64
    assert path.with_suffix(".log").read_text() == "ptxas info\n"
    assert compiler.compile_kernel(*KERNEL) == path
    assert counter.read_text() == "x"
    assert {file.suffix for file in path.parent.iterdir()} == {".cubin", ".log"}


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "header only", "ends in zeros"])
def test_damaged_kernels_are_compiled_again(
    damage: str, counter: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = compiler.compile_kernel(*KERNEL)
    data = path.read_bytes()
    flipped = data[:100] + bytes([data[100] ^ 1]) + data[101:]
    damaged = {"cut": data[:-200], "empty": b"", "flipped": flipped, "header only": data[:70]}
    damaged["ends in zeros"] = data[:-300] + bytes(300)  # a block that a crash kept from the disk
    path.write_bytes(damaged[damage])
    assert not compiler.is_compiled(*KERNEL)
    assert compiler.compile_kernel(*KERNEL) == path
    assert counter.read_text() == "xx"
    read_cubin(path)
    [warning] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert str(path) in warning.getMessage()


def test_a_damaged_kernel_without_nvcc_is_named(
    counter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = compiler.compile_kernel(*KERNEL)
    monkeypatch.setattr(compiler, "find_nvcc", lambda: None)
    assert compiler.compile_kernel(*KERNEL) == path
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(compiler.CompilerMissing, match=f"{path} is damaged and there is no nvcc"):
        compiler.compile_kernel(*KERNEL)
    with pytest.raises(CubinDamaged, match=str(path)):
        read_cubin(path)


def test_kernels_without_a_checksum(tmp_path: Path) -> None:
    """Of older versions: taken if nothing is cut off."""
    path = tmp_path / "old.cubin"
    path.write_bytes(elf(5000))
    assert read_cubin(path) == elf(5000)
    for size in (0, 4, 60, 4799, 4999):
        path.write_bytes(elf(5000)[:size])
        with pytest.raises(CubinDamaged):
            read_cubin(path)
    path.write_bytes(b"<html>" + bytes(5000))
    with pytest.raises(CubinDamaged):
        read_cubin(path)


def test_compilers_and_readers_at_once(counter: Path) -> None:
    """Whoever reads while others compile, over a damaged file too, finds a whole one or none."""
    path = compiler.compile_kernel(*KERNEL)
    code = f"from minima_kernels.cuda import compiler; compiler.compile_kernel(*{KERNEL!r})"
    process = subprocess.Popen([sys.executable, "-c", code])
    while process.poll() is None or len(counter.read_text()) < 20:
        path.write_bytes(path.read_bytes()[:-7])
        threads = [threading.Thread(target=compiler.compile_kernel, args=KERNEL) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
            assert compiler.is_compiled(*KERNEL)
    assert process.returncode == 0
    assert {file.suffix for file in path.parent.iterdir()} == {".cubin", ".log"}


@pytest.mark.parametrize("place", ["the folder", "above it", "below it"])
def test_a_file_in_the_folders_place(
    place: str, counter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    folder = file / "deep" if place == "above it" else file
    if place == "below it":
        folder.mkdir()
        file = folder / "cubins"
    file.write_text("")
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(folder))
    with pytest.raises(compiler.CacheUnusable) as caught:
        compiler.compile_kernel(*KERNEL)
    assert f"{folder / 'cubins'} (" in str(caught.value)
    assert compiler.CACHE_VARIABLE in str(caught.value)


def test_a_folder_that_cannot_be_written(
    counter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there is used all the same."""
    path = compiler.compile_kernel(*KERNEL)

    def refuse(*arguments: object, **named: object) -> None:
        raise PermissionError(13, "Permission denied", str(path.parent))

    monkeypatch.setattr(compiler.tempfile, "TemporaryDirectory", refuse)
    assert compiler.compile_kernel(*KERNEL) == path
    with pytest.raises(compiler.CacheUnusable, match=rf"{path.parent} \(Permission denied\): name"):
        compiler.compile_kernel("merge.cu", {"HEAD_DIM": 64, "SPLIT": 16})


def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(compiler.CACHE_VARIABLE, raising=False)

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(compiler.CacheUnusable, match=compiler.CACHE_VARIABLE):
        compiler.cache_folder()


def test_the_home_in_the_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(compiler.CACHE_VARIABLE, "~/kept")
    assert compiler.cache_folder() == tmp_path / "kept" / "cubins"


@pytest.mark.parametrize(
    ("arguments", "words"), [([], "cannot be kept in"), (["--formats", "tq5"], "tq5")]
)
def test_the_command_ends_with_one_line(
    arguments: list[str], words: str, counter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (counter.parent / "cache").write_text("")
    monkeypatch.setattr(sys, "argv", ["build", "--head-dims", "64", *arguments])
    with pytest.raises(SystemExit, match=rf"^error: .*{words}.*$"):
        build.main()


def test_an_nvcc_that_fails_is_told_in_a_line(
    counter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.write_text("#!/bin/sh\necho one >&2; echo 'a.cu(3): error: wrong' >&2; exit 1\n")
    with pytest.raises(compiler.CompilerFailed) as caught:
        compiler.compile_kernel(*KERNEL)
    log = compiler.kernel_path(*KERNEL).with_suffix(".log")
    assert str(caught.value) == (
        f"nvcc failed on merge.cu: a.cu(3): error: wrong; its output: {log}"
    )
    assert log.read_text().endswith("one\na.cu(3): error: wrong\n")
    nvcc.write_text("no program")
    with pytest.raises(compiler.CompilerFailed, match="nvcc cannot be run: Exec format error"):
        compiler.compile_kernel(*KERNEL)
    nvcc.unlink()
    with pytest.raises(compiler.CompilerFailed, match="No such file"):
        compiler.compile_kernel(*KERNEL)
