"""Which kernel serves which format and geometry, and what it is compiled with.

The append kernel is TileLang (``tile/``). The decode kernels are CUDA C++: each warp runs a
pipeline of its own past barriers that TileLang's synchronisation pass would have to be kept away
from, and everything between two barriers would be imported code anyhow. Conversion and expansion
unpack the same codes in registers, preparation and merge share headers with all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from minima_kernels.codebook import codebook, lloyd_max
from minima_kernels.cuda.compiler import compile_kernel, is_compiled
from minima_kernels.cuda.driver import Function, load_function
from minima_kernels.cuda.order import CODE_BITS, HEAD_DIMS, PAGE_SIZE, supports
from minima_kernels.formats import BF16, F16, FP8, TQ, Format
from minima_kernels.geometry import KVGeometry

_ROW_FORMATS: dict[Format, int] = {FP8: 0, F16: 1, BF16: 2}
_TQ_FORMAT = 3
_PAGE_DTYPES: dict[Format, str] = {FP8: "float8_e4m3", F16: "float16", BF16: "bfloat16"}
_DTYPE_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""Dtypes of queries, keys and values, and what the kernels call them."""

MAX_GROUP = 16
"""Query heads per KV head, at most."""

# Blocks per multiprocessor by head dim: what registers and shared memory allow.
_TQ_BLOCKS = {64: 4, 128: 4, 256: 2}
_ROW_BLOCKS = {
    (64, 1): 4, (128, 1): 4, (256, 1): 3,
    (64, 2): 4, (128, 2): 3, (256, 2): 2,
}  # fmt: skip
_ROW_STAGES = {
    (64, 1): 4, (128, 1): 3, (256, 1): 2,
    (64, 2): 3, (128, 2): 2, (256, 2): 2,
}  # fmt: skip
WARPS = 4
"""Warps of a thread block of the decode kernels."""

# Cohort kernels by head dim: stages of the K ring and of the V ring, and registers of a thread that
# owns rows, of one that unpacks K and of one that unpacks V. Twice the first and both others must
# not exceed four times the 128 a thread starts with, or a block waits for registers for ever.
_COHORT = {64: (6, 6, 200, 48, 64), 128: (6, 6, 200, 48, 64), 256: (3, 3, 216, 32, 48)}
# Over FP8 pages also: pages that are copied ahead, and whether the next page's scores are made
# early, which takes registers.
_COHORT_FP8 = {
    64: (6, 6, 208, 48, 4, 1), 128: (4, 4, 208, 48, 4, 1), 256: (2, 2, 208, 48, 1, 0),
}  # fmt: skip
_COHORT_THREADS = 512

_RETIER_THREADS = 256
APPEND_THREADS = 256

MERGE_SPLITS = 16, 8, 4, 2
"""Groups of threads that a merge has for a row and head: the more the fewer of those there are."""
MERGE_THREADS, MERGE_BLOCKS = 1536, 32
"""Threads of a merge that are on a multiprocessor at the same time, in so many blocks at most."""


@dataclass(frozen=True)
class Variant:
    """A source with its macros, or with its arguments where it is TileLang."""

    source: str
    macros: tuple[tuple[str, int | str], ...]
    threads: tuple[int, int]
    has_shared: bool

    def compile(self) -> Path:
        """The cubin; see ``compile_kernel``."""
        return compile_kernel(self.source, dict(self.macros))

    @property
    def is_compiled(self) -> bool:
        """Whether the cubin is there already; see ``compiler.is_compiled``."""
        return is_compiled(self.source, dict(self.macros))

    def load(self, name: str, device: torch.device) -> Function:
        """Kernel ``name`` on a device."""
        return _load(self, name, device)


@cache
def _load(variant: Variant, name: str, device: torch.device) -> Function:
    return load_function(variant.compile(), name, variant.threads, variant.has_shared, device)


def unsupported(formats: Iterable[Format], geometry: KVGeometry) -> str:
    """Why the kernels cannot serve pages of these formats; empty if they can."""
    if geometry.head_dim not in HEAD_DIMS:
        return f"head dim {geometry.head_dim}"
    if geometry.page_size != PAGE_SIZE:
        return f"page size {geometry.page_size}"
    for format_ in formats:
        if format_ not in _ROW_FORMATS and not supports(format_, geometry):
            return f"format {format_.name}"
    return ""


@cache
def decode_variant(format_: Format, geometry: KVGeometry, query_bits: int) -> Variant:
    """The attention kernel for pages of a format."""
    dim = geometry.head_dim
    macros: dict[str, int | str] = {"HEAD_DIM": dim, "WARPS": WARPS}
    if isinstance(format_, TQ):
        macros |= {
            "K_BITS": CODE_BITS[format_.k_levels],
            "V_BITS": CODE_BITS[format_.v_levels],
            "Q_BYTES": 1 if query_bits == 8 else 2,
            "CENTRED": int(format_.centred),
            "MIN_BLOCKS": _TQ_BLOCKS[dim],
            **_tables("K", format_.k_levels),
            **_tables("V", format_.v_levels),
        }
        return Variant("tq_decode.cu", tuple(macros.items()), (32 * WARPS, 1), True)
    element = 1 if format_ == FP8 else 2
    macros |= {
        "FORMAT": _ROW_FORMATS[format_],
        "STAGES": _ROW_STAGES[dim, element],
        "MIN_BLOCKS": _ROW_BLOCKS[dim, element],
    }
    return Variant("row_decode.cu", tuple(macros.items()), (32 * WARPS, 1), True)


def has_cohorts(format_: Format) -> bool:
    """Whether there is a kernel for pages of the format that many rows read."""
    return format_ == FP8 or isinstance(format_, TQ)


@cache
def cohort_variant(format_: Format, geometry: KVGeometry, query_bits: int) -> Variant:
    """The attention kernel for pages of a format with ``has_cohorts`` that many rows read."""
    dim = geometry.head_dim
    shape: tuple[int, ...] = _COHORT[dim] if isinstance(format_, TQ) else _COHORT_FP8[dim]
    names: tuple[str, ...] = "K_STAGES", "V_STAGES", "ROW_REGISTERS", "K_REGISTERS", "V_REGISTERS"
    if format_ == FP8:
        names = *names[:3], "FEED_REGISTERS", "HELD", "EARLY"
    macros: dict[str, int | str] = {"HEAD_DIM": dim, **dict(zip(names, shape, strict=True))}
    if not isinstance(format_, TQ):
        return Variant("cohort_fp8.cu", tuple(macros.items()), (_COHORT_THREADS, 1), True)
    macros |= {
        "K_BITS": CODE_BITS[format_.k_levels],
        "V_BITS": CODE_BITS[format_.v_levels],
        "Q_BYTES": 1 if query_bits == 8 else 2,
        "CENTRED": int(format_.centred),
        **_tables("K", format_.k_levels, is_summed=False),
        **_tables("V", format_.v_levels, is_summed=False, is_offset=format_.v_levels < 16),
    }
    return Variant("cohort_decode.cu", tuple(macros.items()), (_COHORT_THREADS, 1), True)


@cache
def retier_variant(
    source: Format, destination: Format, geometry: KVGeometry, kernel: str = "retier"
) -> Variant:
    """The kernel that makes pages of one format from those of another; ``expand``: dense rows."""
    macros: dict[str, int | str] = {"HEAD_DIM": geometry.head_dim}
    for side, format_ in (("FROM", source), ("TO", destination)):
        macros[side] = _ROW_FORMATS.get(format_, _TQ_FORMAT)
        bits = 2, 2, 0  # read by nobody where the format is not TQ
        if isinstance(format_, TQ):
            levels = format_.k_levels, format_.v_levels
            bits = CODE_BITS[levels[0]], CODE_BITS[levels[1]], int(format_.centred)
        names = f"{side}_K_BITS", f"{side}_V_BITS", f"{side}_CENTRED"
        macros |= dict(zip(names, bits, strict=True))
    for num_levels, width in CODE_BITS.items():
        exact = lloyd_max(num_levels)
        step = exact[-1] / 127
        upper = bytes(round(value / step) for value in exact[num_levels // 2 :])
        macros[f"BOOK_{width}"] = f"0x{int.from_bytes(upper, 'little'):X}ull"
        macros[f"STEP_{width}"] = repr(step)
    return Variant(f"{kernel}.cu", tuple(macros.items()), (_RETIER_THREADS, 1), True)


def prepare_variant(geometry: KVGeometry) -> Variant:
    """The kernel that makes query fragments."""
    return Variant("prepare.cu", (("HEAD_DIM", geometry.head_dim),), (256, 1), False)


@cache
def append_variant(
    format_: Format, geometry: KVGeometry, dtype: torch.dtype, is_signed: bool = False
) -> Variant:
    """The kernel that stores new rows of a dtype in pages of a row format.

    ``is_signed``: the rotation has signs.
    """
    arguments: dict[str, int | str] = {
        "head_dim": geometry.head_dim,
        "page_dtype": _PAGE_DTYPES[format_],
        "dtype": _DTYPE_NAMES[dtype],
        "is_signed": int(is_signed),
    }
    return Variant("append.py", tuple(arguments.items()), (APPEND_THREADS, 1), False)


def merge_variant(geometry: KVGeometry, split: int) -> Variant:
    """The kernel that merges partials; ``split`` groups of threads share out those of a head."""
    macros = (("HEAD_DIM", geometry.head_dim), ("SPLIT", split))
    return Variant("merge.cu", macros, (geometry.head_dim // 4 * split, 1), False)


def mass_variant(geometry: KVGeometry) -> Variant:
    """The kernel that turns page sums into shares, in the cubin of the merge."""
    macros = (("HEAD_DIM", geometry.head_dim), ("SPLIT", min(MERGE_SPLITS)))
    return Variant("merge.cu", macros, (256, 1), False)


def _tables(
    name: str, levels: int, *, is_summed: bool = True, is_offset: bool = False
) -> dict[str, int | str]:
    """Codebook of a level count as byte tables of `prmt`, and its step (see ``unpack.cuh``).

    ``is_summed``: the entries of both tables of 16 levels are added up; else one is selected.
    ``is_offset``: bytes are the values plus 128.
    """
    book = codebook(levels, torch.device("cpu")).centroids.double()
    step = float(book[-1]) / 127
    values = [round(float(value) / step) for value in book]
    first, second = values, [0] * 8
    if levels == 16:
        first, second = values[0::2], values[1::2]
        if is_summed:
            # Entries of both tables at one place have one sign; where that is minus, the table not
            # chosen adds -1.
            first = [value + (value < 0) for value in first]
            second = [value + (value < 0) for value in second]
    words = {}
    for letter, table in (("T", first), ("U", second)):
        entries = (*table, *[0] * (8 - len(table)))
        data = bytes(value + 128 * is_offset & 255 for value in entries)
        for half in range(2):
            word = int.from_bytes(data[4 * half : 4 * half + 4], "little")
            words[f"{name}_{letter}{half}"] = f"0x{word:08X}u"
    return {**words, f"{name}_STEP": f"{step!r}f"}
