"""Compiling kernels ahead of their first use: ``python -m minima_kernels.cuda.build``.

Needs nvcc and TileLang, but no GPU. Without it kernels are compiled when they are first needed, a
few seconds each, and kept.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations, product
from pathlib import Path

import torch

from minima_kernels.cuda.order import HEAD_DIMS, PAGE_SIZE
from minima_kernels.cuda.retier import DENSE
from minima_kernels.cuda.variants import (
    MERGE_SPLITS,
    Variant,
    append_variant,
    cohort_variant,
    decode_variant,
    has_cohorts,
    mass_variant,
    merge_variant,
    prepare_variant,
    retier_variant,
    unsupported,
)
from minima_kernels.formats import FP8, TQ, Format, parse_format
from minima_kernels.geometry import KVGeometry

FORMATS = ("tq3", "tq(16,4)", "tq(16,8)", "tq(8,4)", "tq(4,4)", "fp8", "bf16", "f16")


def variants(
    formats: Iterable[str] = FORMATS,
    head_dims: Iterable[int] = HEAD_DIMS,
    query_bits: Iterable[int] = (15,),
    dtypes: Iterable[torch.dtype] = (torch.bfloat16,),
) -> list[Variant]:
    """All kernels that decode and extend over pages of these formats need, and those that append
    rows of these dtypes, seal appendable pages, compress them and promote them back.

    Raises:
        ValueError: a format or head dim that the kernels do not take.
    """
    found: dict[Variant, None] = {}
    bits, formats, rows = tuple(query_bits), tuple(formats), tuple(dtypes)
    head_dims = tuple(head_dims)
    for dim in head_dims:
        geometry = KVGeometry(1, 1, dim, PAGE_SIZE)
        for name in formats:
            format_ = parse_format(name)
            if reason := unsupported([format_], geometry):
                raise ValueError(f"no kernels for {reason}")
            found |= {decode_variant(format_, geometry, count): None for count in bits}
            if format_.appendable:
                found |= {append_variant(format_, geometry, dtype): None for dtype in rows}
            if has_cohorts(format_):
                found |= {cohort_variant(format_, geometry, count): None for count in bits}
        found |= dict.fromkeys(_conversions(map(parse_format, formats), geometry))
        found |= {prepare_variant(geometry): None, mass_variant(geometry): None}
        found |= {merge_variant(geometry, split): None for split in MERGE_SPLITS}
    found |= dict.fromkeys(expansions(formats, head_dims, rows))
    return list(found)


def expansions(
    formats: Iterable[str], head_dims: Iterable[int], dtypes: Iterable[torch.dtype]
) -> list[Variant]:
    """Kernels that expand pages of these formats for attention in these dtypes; it takes those of
    16 bits only."""
    dense = [DENSE[dtype] for dtype in dtypes if dtype in DENSE]
    pairs = product(map(parse_format, formats), dense, head_dims)
    return [
        retier_variant(source, to, KVGeometry(1, 1, dim, PAGE_SIZE), "expand")
        for source, to, dim in pairs
    ]


def _conversions(formats: Iterable[Format], geometry: KVGeometry) -> list[Variant]:
    """Kernels that seal, compress and promote pages of these formats."""
    chosen = list(dict.fromkeys(formats))
    return [
        retier_variant(source, destination, geometry)
        for source, destination in permutations(chosen, 2)
        if destination == FP8 or (source.appendable and isinstance(destination, TQ))
    ]


def compile_all(chosen: Iterable[Variant], jobs: int) -> list[Path]:
    """The cubins of kernels, compiled ``jobs`` at a time."""
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(Variant.compile, chosen))


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile the CUDA kernels ahead of use.")
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--head-dims", type=int, nargs="+", default=HEAD_DIMS)
    parser.add_argument("--query-bits", type=int, nargs="+", default=[15], choices=[8, 15])
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    try:
        chosen = variants(arguments.formats, arguments.head_dims, arguments.query_bits)
        paths = compile_all(chosen, arguments.jobs)
    except (ValueError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    for path in sorted(set(paths)):
        print(path)


if __name__ == "__main__":
    main()
