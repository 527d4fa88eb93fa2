"""The kernels compile for Hopper, within recorded limits of registers and spills."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from minima_kernels import KVGeometry, parse_format
from minima_kernels.cuda import compiler
from minima_kernels.cuda.build import compile_all, expansions, variants
from minima_kernels.cuda.variants import (
    Variant,
    cohort_variant,
    decode_variant,
    merge_variant,
    prepare_variant,
    retier_variant,
)


class Limit(NamedTuple):
    registers: int
    spill_bytes: int  # stores and loads


def decode(name: str, dim: int, query_bits: int = 15) -> Variant:
    return decode_variant(parse_format(name), KVGeometry(1, 1, dim, 64), query_bits)


def cohort(name: str, dim: int, query_bits: int = 15) -> Variant:
    return cohort_variant(parse_format(name), KVGeometry(1, 1, dim, 64), query_bits)


def conversion(source: str, destination: str, dim: int, kernel: str = "retier") -> Variant:
    formats = parse_format(source), parse_format(destination)
    return retier_variant(*formats, KVGeometry(1, 1, dim, 64), kernel)


# 65,536 registers for 128 threads: 4 blocks get 128 each, 3 get 168, 2 get 255.
LIMITS = {
    decode("tq3", 128): Limit(128, 80),
    decode("tq3", 256): Limit(255, 0),
    decode("tq(16,4)", 64): Limit(128, 0),
    decode("fp8", 128): Limit(128, 0),
    decode("fp8", 256): Limit(168, 0),
    decode("bf16", 128): Limit(168, 0),
    # 512 threads; of the 128 registers each starts with, those that unpack give some to the others.
    # What spills is in the loops of those that unpack, which wait for the others.
    cohort("tq3", 128): Limit(128, 24),
    cohort("tq3", 256): Limit(128, 240),
    cohort("tq3", 256, 8): Limit(128, 150),
    cohort("tq(16,4)", 64): Limit(128, 0),
    cohort("fp8", 128): Limit(128, 0),
    cohort("fp8", 256): Limit(128, 100),
    # 256 threads: 3 blocks get 80 registers each, 2 get 128.
    conversion("fp8", "tq3", 128): Limit(80, 0),
    conversion("bf16", "tq3", 256): Limit(128, 40),
    conversion("fp8", "tq(16,4)", 64): Limit(80, 80),
    conversion("tq3", "fp8", 128): Limit(80, 0),
    conversion("tq3", "bf16", 256, "expand"): Limit(128, 0),
    prepare_variant(KVGeometry(1, 1, 128, 64)): Limit(64, 0),
    merge_variant(KVGeometry(1, 1, 128, 64), 2): Limit(40, 0),
    merge_variant(KVGeometry(1, 1, 256, 64), 16): Limit(64, 0),
}


def usage(log: str) -> dict[str, Limit]:
    """What ptxas said of each kernel."""
    found = {}
    for text in log.split("Compiling entry function")[1:]:
        name = re.search(r"'(\w+)'", text)
        registers = re.search(r"Used (\d+) registers", text)
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
        assert name and registers and spills, text
        found[name[1]] = Limit(int(registers[1]), int(spills[1]) + int(spills[2]))
    return found


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[Variant, str]:
    if compiler.find_nvcc() is None:
        pytest.skip("there is no nvcc on this machine: kernels cannot be compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(compiler.CACHE_VARIABLE, str(tmp_path_factory.mktemp("cubins")))
        paths = compile_all(LIMITS, os.cpu_count() or 1)
        assert compile_all(LIMITS, 1) == paths  # the second time nothing is compiled
        return {
            variant: path.with_suffix(".log").read_text()
            for variant, path in zip(LIMITS, paths, strict=True)
        }


def test_registers_and_spills(logs: dict[Variant, str]) -> None:
    for variant, limit in LIMITS.items():
        kernels = usage(logs[variant])
        assert kernels
        for name, used in kernels.items():
            assert used.registers <= limit.registers, (variant, name, used)
            assert used.spill_bytes <= limit.spill_bytes, (variant, name, used)


def test_cohorts_take_no_more_registers_than_there_are() -> None:
    """With more a block waits for ever: it has 512 threads, and each starts with 128."""
    for variant in LIMITS:
        counts = {name: int(n) for name, n in variant.macros if name.endswith("_REGISTERS")}
        if counts:
            feeds = [n for name, n in counts.items() if name != "ROW_REGISTERS"]
            assert 2 * counts["ROW_REGISTERS"] + sum(feeds) * 2 // len(feeds) <= 512, variant


def test_warpgroup_products_run_in_parallel(logs: dict[Variant, str]) -> None:
    """ptxas says where it had to wait for each product: several times slower, and no error."""
    assert not [variant for variant in LIMITS if "serialized" in logs[variant]]


def test_no_two_variants_share_a_file() -> None:
    everything = variants(query_bits=(8, 15))
    assert len(set(everything)) == len(everything)
    with pytest.raises(ValueError, match="head dim 96"):
        variants(head_dims=[96])
    with pytest.raises(ValueError, match=r"format tq\(5,3\)"):
        variants(formats=["tq(5,3)"])


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "find_nvcc", lambda: None)
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path))
    with pytest.raises(compiler.CompilerMissing, match="CUDA_HOME"):
        decode("tq3", 64).compile()


def test_compiler_errors_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if compiler.find_nvcc() is None:
        pytest.skip("there is no nvcc on this machine: kernels cannot be compiled")
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path))
    with pytest.raises(RuntimeError, match="HEAD_DIM"):
        compiler.compile_kernel("merge.cu", {"SPLIT": 1})
    assert not list(tmp_path.rglob("*.cubin"))


def test_what_a_server_compiles_at_its_start() -> None:
    """All that pages of its formats may need, in its dtype alone."""
    chosen = variants({"fp8", "tq3"}, [64], dtypes=[])
    sources = {variant.source for variant in chosen}
    assert sources == {
        "cohort_decode.cu", "cohort_fp8.cu", "merge.cu", "prepare.cu", "retier.cu",
        "row_decode.cu", "tq_decode.cu",
    }  # fmt: skip
    assert len(expansions({"fp8", "tq3"}, [64], [torch.float16, torch.float32])) == 2
    assert not expansions({"fp8"}, [64], [torch.float32])
